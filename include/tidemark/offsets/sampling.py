"""Takes a sample of a group's lag: asks Postgres for positions and Kafka for logs, and stores both (`tidemark.offsets.samples`).

Runs take one when they start and end, continuous runs one a minute, ``tidemark maintain`` and ``tidemark lag`` one of each consumer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import transaction
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster, Setting, Topic, cleanup_of
from tidemark.kafka.failures import NotAllowed
from tidemark.offsets import samples, store
from tidemark.offsets.ends import truncations
from tidemark.offsets.samples import Key
from tidemark.offsets.store import Position
from tidemark.offsets.window import Observation, Sample
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

LAST_TIMESTAMP_MS = 32_503_680_000_000
"""The year 3000. Later timestamps are not times, and dates could overflow."""


def sample_all(connection: Connection, cluster: Cluster, specs: Iterable[ConsumerSpec]) -> dict[str, TidemarkError]:
    """Samples each consumer whose group exists; returns the errors by consumer."""
    failed = {}
    for spec in specs:
        try:
            topics = cluster.topics(cluster.subscribed(spec), missing_ok=True)
            partitions = [part for topic in topics for part in topic.all() if spec.fixed.covers(part)]
            sample(connection, cluster, spec.group, topics, partitions, by_pattern=bool(spec.topic_pattern))
        except TidemarkError as error:
            failed[spec.name] = error
    return failed


def sample_or_log(
    connection: Connection,
    cluster: Cluster,
    group: str,
    topics: Sequence[Topic],
    partitions: Collection[TopicPartition],
    *,
    by_pattern: bool,
    new_window: bool,
) -> None:
    """As `sample`, within a run: an error must not end it."""
    try:
        sample(connection, cluster, group, topics, partitions, by_pattern=by_pattern, new_window=new_window)
    except (TidemarkError, psycopg2.Error) as error:
        log.info("lag not sampled group=%s: %s", group, error)


def sample(
    connection: Connection,
    cluster: Cluster,
    group: str,
    topics: Sequence[Topic],
    partitions: Collection[TopicPartition],
    *,
    by_pattern: bool = False,
    new_window: bool = False,
) -> bool:
    """Samples these partitions of a group. Returns whether it did: not if the group does not exist, nor if another process does just now.
    ``by_pattern``: the consumer reads what a pattern matches, so that the next run settles what it has not read of topics that are gone.

    Positions come first, so that the logs' ends are not before them. ``new_window``: a run begins, see `tidemark.offsets.window`.
    Raises `BrokerUnavailable` and `NotAllowed`.
    """
    with transaction(connection) as cur:
        group_id = samples.find_group(cur, group)
        if group_id is None or not partitions:
            return False
        ids = {topic.name: store.ensure_topic(cur, topic.name, topic.kafka_uuid) for topic in topics}
    with transaction(connection) as cur:
        cur.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")  # a rewind has moved the positions, and is counted, or neither
        at, applied_no = samples.state(cur, group_id)
        positions = store.positions(cur, group)
        replays, before = samples.replays(cur, group_id), samples.last(cur, group_id)
    logs = cluster.logs(partitions)
    highs = cluster.high_watermarks(partitions)
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    cut = truncations(positions, uuids, logs, cluster.truncated)
    held = {one.partition: one for one in positions if uuids.get(one.partition.topic) == one.kafka_uuid}
    times = _times(cluster, {part: (ids[part.topic], part.partition) for part in logs}, held, logs, before)
    retentions = _retentions(cluster, topics)
    seen: dict[Key, Observation] = {}
    for part, found in logs.items():
        position, key = held.get(part), (ids[part.topic], part.partition)
        seen[key] = Observation(
            at=at,
            position=None if position is None else position.position,
            log_start=found.start,
            log_end=found.end,
            high_watermark=highs.get(part),
            truncated=part in cut,
            next_at=times.get(part),
            retention=retentions.get(part.topic),
            committed_at=None if position is None else position.committed_at,
            applied_no=applied_no,
            replay_until=replays.get(key),
        )
    gone = _gone(cluster, {topic_id for topic_id, _ in before.keys() - seen.keys()}, positions) if by_pattern else ()
    with transaction(connection) as cur:
        return samples.store(cur, group_id, seen, gone=gone, new_window=new_window)


def _gone(cluster: Cluster, topic_ids: Collection[int], positions: Iterable[Position]) -> set[int]:
    """The topics among these that Kafka no longer has."""
    asked = [one for one in positions if one.topic_id in topic_ids]
    visible, hidden = cluster.visible({one.partition.topic for one in asked})
    there = {topic.kafka_uuid for topic in visible}
    return {one.topic_id for one in asked if one.kafka_uuid not in there and one.partition.topic not in hidden}


def _times(
    cluster: Cluster,
    keys: Mapping[TopicPartition, Key],
    held: Mapping[TopicPartition, Position],
    logs: Mapping[TopicPartition, Log],
    before: Mapping[Key, Sample],
) -> dict[TopicPartition, datetime]:
    """The timestamp of each partition's first unread record. Kafka is asked for those whose position has moved since the last sample."""
    first = {part: max(one.position, logs[part].start) for part, one in held.items() if part in logs and one.position < logs[part].end}
    found, asked = {}, {}
    for part, offset in first.items():
        last = before[keys[part]].seen if keys[part] in before else None
        if last is not None and last.next_at is not None and last.position is not None and max(last.position, last.log_start) == offset:
            found[part] = last.next_at
        else:
            asked[part] = offset
    times = cluster.times_at(asked) if asked else {}
    return found | {part: datetime.fromtimestamp(ms / 1000, UTC) for part, ms in times.items() if 0 <= ms < LAST_TIMESTAMP_MS}


def _retentions(cluster: Cluster, topics: Iterable[Topic]) -> dict[str, timedelta]:
    """The retention of each topic that deletes records by age; none if this client may not read settings."""
    settings: Mapping[str, Mapping[str, Setting]] = {}
    with contextlib.suppress(NotAllowed):
        settings = cluster.settings(topic.name for topic in topics)
    kept = {name: cleanup_of(values).retention for name, values in settings.items()}
    return {name: retention for name, retention in kept.items() if retention is not None}
