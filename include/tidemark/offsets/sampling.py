"""Samples a group's lag: reads positions from Postgres and logs from Kafka, and stores both (`tidemark.offsets.samples`).

Runs take a sample when they start and end, continuous runs every minute, ``tidemark maintain`` and ``tidemark lag`` one per consumer.
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
from tidemark.kafka.cluster import Cluster, SettingUnknown, Topic
from tidemark.kafka.failures import NotAllowed
from tidemark.offsets import samples, store
from tidemark.offsets.ends import current, truncations
from tidemark.offsets.samples import Key
from tidemark.offsets.store import Position
from tidemark.offsets.window import Observation, Sample
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

LAST_TIMESTAMP_MS = 32_503_680_000_000
"""The year 3000. Later timestamps are invalid, and dates could overflow."""


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
    """Like `sample`, but logs errors: they must not end a run."""
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
    """Samples these partitions of a group. Returns `False` if the group does not exist, or if another process is sampling it.

    Reads positions before log ends, so that no end lies before its position. ``by_pattern``: the consumer subscribes to a pattern, so the
    next run settles the unread rest of topics that are gone. ``new_window``: a run begins, see `tidemark.offsets.window`.
    Raises `BrokerUnavailable` and `NotAllowed`.
    """
    with transaction(connection) as cur:
        group_id = store.find_group(cur, group)
        if group_id is None or not partitions:
            return False
        ids = {topic.name: store.ensure_topic(cur, topic.name, topic.kafka_uuid) for topic in topics}
    with transaction(connection) as cur:
        cur.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")  # sees a rewind's moves and its number together
        at, applied_no = samples.state(cur, group_id)
        positions = store.positions(cur, group)
        replays = {(each.topic_id, each.partition.partition): each.until for each in samples.replays(cur, group)}
        before = samples.last(cur, group_id)
    logs = cluster.logs(partitions)
    highs = cluster.high_watermarks(partitions)
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    held = current(positions, uuids, logs)
    truncated = truncations(held, logs, cluster.truncated)
    times = _times(cluster, {part: (ids[part.topic], part.partition) for part in logs}, held, logs, before)
    retentions = _retentions(cluster, topics)
    observations: dict[Key, Observation] = {}
    for part, part_log in logs.items():
        position, key = held.get(part), (ids[part.topic], part.partition)
        observations[key] = Observation(
            at=at,
            position=None if position is None else position.position,
            log_start=part_log.start,
            log_end=part_log.end,
            high_watermark=highs.get(part),
            truncated=part in truncated,
            next_at=times.get(part),
            retention=retentions.get(part.topic),
            committed_at=None if position is None else position.committed_at,
            applied_no=applied_no,
            replay_until=replays.get(key),
        )
    gone = _gone(cluster, {topic_id for topic_id, _ in before.keys() - observations.keys()}, positions) if by_pattern else ()
    with transaction(connection) as cur:
        return samples.store(cur, group_id, observations, gone=gone, new_window=new_window)


def _gone(cluster: Cluster, topic_ids: Collection[int], positions: Iterable[Position]) -> set[int]:
    """Returns which of these topics Kafka no longer has."""
    candidates = [each for each in positions if each.topic_id in topic_ids]
    visible, hidden = cluster.visible({each.partition.topic for each in candidates})
    visible_uuids = {topic.kafka_uuid for topic in visible}
    return {each.topic_id for each in candidates if each.kafka_uuid not in visible_uuids and each.partition.topic not in hidden}


def _times(
    cluster: Cluster,
    keys: Mapping[TopicPartition, Key],
    positions: Mapping[TopicPartition, Position],
    logs: Mapping[TopicPartition, Log],
    before: Mapping[Key, Sample],
) -> dict[TopicPartition, datetime]:
    """Returns the timestamp of each partition's first unread record. Asks Kafka only where the position has moved since the last sample."""
    first = {part: max(each.position, logs[part].start) for part, each in positions.items() if each.position < logs[part].end}
    unchanged, moved = {}, {}
    for part, offset in first.items():
        last = before[keys[part]].observation if keys[part] in before else None
        if last is not None and last.next_at is not None and last.position is not None and max(last.position, last.log_start) == offset:
            unchanged[part] = last.next_at
        else:
            moved[part] = offset
    times = cluster.times_at(moved) if moved else {}
    return unchanged | {part: datetime.fromtimestamp(ms / 1000, UTC) for part, ms in times.items() if 0 <= ms < LAST_TIMESTAMP_MS}


def _retentions(cluster: Cluster, topics: Iterable[Topic]) -> dict[str, timedelta]:
    """Reads the retention of each topic that deletes records by age; empty if this client may not read settings."""
    with contextlib.suppress(NotAllowed, SettingUnknown):
        cleanups = cluster.cleanups(topic.name for topic in topics)
        return {name: cleanup.retention for name, cleanup in cleanups.items() if cleanup.retention is not None}
    return {}
