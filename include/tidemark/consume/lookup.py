"""Looks up the topics, logs and ends to read: in Kafka, and for drains and backfills also in Postgres."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemark.consume.assignment import partitions_of
from tidemark.consume.claims import LookUp
from tidemark.db import transaction
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.records.ranges import Epoch, Slice
from tidemark.retry import store as retries
from tidemark.rewind.backfill import Backfill, SkippedTopicRecreated
from tidemark.rewind.beside import ReplayTopicRecreated, SideReplay
from tidemark.rewind.side import SidePart
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

SAMPLE = 100


def look(cluster: Cluster, spec: ConsumerSpec) -> LookUp:
    """The spec's current topics and the partitions that the run reads. Raises `TopicsMissing` and the errors of `partitions_of`."""
    topics = cluster.topics(cluster.subscribed(spec), missing_ok=not spec.topics)
    logs = cluster.logs(partitions_of(spec, topics))
    return LookUp(topics, logs, {partition: log.end for partition, log in logs.items()})


def look_due(connection: Connection, cluster: Cluster, group_id: int) -> LookUp:
    """The partitions of a group's retry topics that have due records, up to the last of them. Due times are the database's (I6).

    Does not ask Kafka if nothing is due. Publishes records again if their message is no longer in the log (I7). A partition that was never
    drained starts at its first registered message.
    """
    with transaction(connection) as cur:
        republished = retries.publish_stranded(cur, group_id)
        due = retries.due(cur, group_id)
    if not due:
        return LookUp((), {}, {})
    topics = cluster.topics(sorted({part.partition.topic for part in due}), missing_ok=True)
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    available = {part.partition: part for part in due if uuids.get(part.partition.topic) == part.kafka_uuid}
    logs = cluster.logs(available)
    with transaction(connection) as cur:
        for topic_id in sorted({part.topic_id for part in due if available.get(part.partition) is not part}):
            republished += retries.publish_gone(cur, group_id, topic_id)
        for partition, part in sorted(available.items()):
            start = logs[partition].start
            if part.first < start:
                republished += retries.publish_gone(cur, group_id, part.topic_id, partition=partition.partition, before=start)
            store.start_partition(cur, group_id, part.topic_id, partition.partition, max(start, part.first), drained=True)
    if republished:
        log.warning("retry messages are gone, publishing their records again group_id=%s records=%s", group_id, republished)
    return LookUp(topics, logs, {partition: min(part.end, logs[partition].end) for partition, part in available.items()})


def look_side(cluster: Cluster, side: Backfill | SideReplay) -> LookUp:
    """Like `look`, for what a side group may read: a backfill to the end of its ranges, a replay beside up to its group's positions.

    Raises `TopicsMissing`, and `SkippedTopicRecreated` or `ReplayTopicRecreated` for a topic that was deleted and created again.
    """
    backfill = side if isinstance(side, Backfill) else None
    parts: Sequence[SidePart] = side.parts if backfill is None else [part for part in backfill.parts if part.left]
    topics = cluster.topics(sorted({part.partition.topic for part in parts}))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    for part in parts:
        if uuids[part.partition.topic] != part.kafka_uuid:
            recreated = ReplayTopicRecreated if backfill is None else SkippedTopicRecreated
            raise recreated(topic=part.partition.topic, rewind_id=side.rewind_id)
    logs = cluster.logs(part.partition for part in parts)
    return LookUp(topics, logs, {part.partition: min(part.end, logs[part.partition].end) for part in parts}, backfill)


def last_records(lookup: LookUp) -> list[Slice]:
    """The last `SAMPLE` offsets of each partition, unclaimed."""
    return [
        Slice(partition, 0, max(log.start, log.end - SAMPLE), log.end, Epoch(0))
        for partition, log in lookup.logs.items()
        if log.end > log.start
    ]
