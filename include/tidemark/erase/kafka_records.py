"""A person's messages in Kafka: finds the records of a key, and when the retention of each topic removes the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tidemark.db import rows, scalar, statements
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import RangeGone, read
from tidemark.records.ranges import Log, TopicPartition
from tidemark.retry.ladder import Ladder
from tidemark.text.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor
    from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.erase", "erasure.sql")

PROGRESS_EVERY = 1_000_000
"""Records between two lines of progress."""


@dataclass(frozen=True, slots=True)
class InKafka:
    """Upper bound of a person's messages in a topic. ``until``: when retention removes the last one; `None`: never."""

    topic: str
    messages: int
    until: datetime | None
    compacted: bool

    def __str__(self) -> str:
        when = "permanently" if self.until is None else f"until about {self.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        fix = ""
        if self.compacted:
            fix = "; the topic is compacted: write a tombstone for the key"
        elif self.until is None:
            fix = "; set the topic's retention.ms"
        return f"{counted(self.messages, 'message')} in {self.topic}, kept {when}{fix}"


@dataclass(frozen=True, slots=True)
class Keyed:
    """The records of a key: sorted offsets by partition, with the topics' UUIDs and the logs that were read. Each log starts where
    it started when it was read: retention may have moved it since the search began."""

    uuids: Mapping[str, str]
    logs: Mapping[TopicPartition, Log]
    offsets: Mapping[TopicPartition, Sequence[int]]


def records_of(cluster: Cluster, config: KafkaConfig, spec: ConsumerSpec, key: bytes, on_progress: Callable[[str], None]) -> Keyed:
    """Reads the consumer's topics from start to end and returns the records of a key. Calls ``on_progress`` with lines of text.

    Needs memory for the matching offsets and one fetch. Raises `TopicsMissing`, `RangeGone` or `BrokerUnavailable`.
    """
    import pyarrow.compute as pc

    topics = cluster.topics(cluster.subscribed(spec))
    logs = cluster.logs(partition for topic in topics for partition in topic.all())
    matches: dict[TopicPartition, list[int]] = {}
    done, total = 0, sum(log.end - log.start for log in logs.values())
    for partition, log in sorted(logs.items()):  # the logs as they were when the search began
        reported = done
        for chunk in _read_log(cluster, config, logs, partition):
            matches.setdefault(partition, []).extend(chunk["offset"].filter(pc.equal(chunk["key"], key)).to_pylist())
            at = done + chunk["offset"][-1].as_py() + 1 - log.start
            if at - reported >= PROGRESS_EVERY:
                reported = at
                on_progress(f"read {at:,} of {counted(total, 'offset')}")
        done += log.end - log.start
    on_progress(f"read {counted(done, 'offset')}, found {counted(sum(map(len, matches.values())), 'record')} of the key")
    return Keyed({topic.name: topic.kafka_uuid for topic in topics}, logs, matches)


def _read_log(
    cluster: Cluster, config: KafkaConfig, logs: dict[TopicPartition, Log], partition: TopicPartition
) -> Iterator[pa.RecordBatch]:
    """Reads a partition, which may be hours after its log was looked up. Continues where retention has moved the start of the log, and
    updates the log."""
    position, end = logs[partition].start, logs[partition].end
    gone: RangeGone | None = None
    while position < end:
        start = cluster.log_starts([partition])[partition]
        if start > position:
            logs[partition] = replace(logs[partition], start=start, end=max(start, end))
            position = start
        elif gone is not None:  # not by retention
            raise gone
        if position >= end:
            return
        try:
            for chunk in read(config, partition, position, end):
                yield chunk
                position = chunk["offset"][-1].as_py() + 1
            return
        except RangeGone as error:
            gone = error


def in_kafka(cur: Cursor, cluster: Cluster, spec: ConsumerSpec, group_id: int) -> list[InKafka]:
    """Counts the matching records' messages in each topic, and computes how long they stay. Needs the tables that a plan has filled."""
    last: dict[str, tuple[int, datetime]] = {}
    cur.execute(SQL["group_topics"], {"group_id": group_id})
    topic_ids = {(row["name"], row["kafka_uuid"]): row["topic_id"] for row in rows(cur)}
    existing = [
        topic for topic in cluster.topics({name for name, _ in topic_ids}, missing_ok=True) if (topic.name, topic.kafka_uuid) in topic_ids
    ]
    starts = cluster.log_starts(partition for topic in existing for partition in topic.all())
    ids = {topic.name: topic_ids[topic.name, topic.kafka_uuid] for topic in existing}
    cur.execute(SQL["in_logs"], of_logs(starts, ids))
    names = {topic_id: name for name, topic_id in ids.items()}
    in_logs = {TopicPartition(names[row["topic_id"]], row["partition"]): row for row in rows(cur)}
    times = cluster.times_at({partition: row["last"] for partition, row in in_logs.items()}) if in_logs else {}
    cur.execute(SQL["now"])
    now: datetime = scalar(cur)
    for partition, row in in_logs.items():
        millis = times.get(partition, -1)
        moment = now if millis < 0 else datetime.fromtimestamp(millis / 1000, UTC)
        messages, newest = last.get(partition.topic, (0, moment))
        last[partition.topic] = (messages + row["messages"], max(newest, moment))
    cur.execute(SQL["in_hops"], {"topics": [rung.topic for rung in Ladder.of(spec).rungs]})
    last |= {row["topic"]: (row["messages"], row["last"]) for row in rows(cur)}
    settings = cluster.settings(topic.name for topic in cluster.topics(sorted(last), missing_ok=True))
    in_topics = []
    for name, config in sorted(settings.items()):
        messages, newest = last[name]
        policy, retention_ms = config["cleanup.policy"].value, int(config["retention.ms"].value)
        ends = None if retention_ms < 0 or "delete" not in policy else newest + timedelta(milliseconds=retention_ms)
        in_topics.append(InKafka(name, messages, ends, "compact" in policy))
    return in_topics


def of_logs(starts: Mapping[TopicPartition, int], ids: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the parameters of statements on logs: topic ids, partitions and start offsets."""
    parts = sorted(starts)
    return {
        "topic_ids": [ids[part.topic] for part in parts],
        "partitions": [part.partition for part in parts],
        "starts": [starts[part] for part in parts],
    }
