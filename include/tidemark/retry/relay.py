"""The relay: takes records that were handed off in Postgres to Kafka, and notes where each of them is.

    ① take a portion of the outbox, and lock it   ② publish it   ③ wait for the broker's answers   ④ note them   ⑤ commit

A row without a place in its topic (``hop_offset``) is to be published; a row with one has been. What dies between ② and ⑤ leaves
messages that no row names, and nobody will try; their records are published again. So there is nothing to be lost, and nothing to be
doubled. Several relays share the work, because each passes over what others have locked. One that hangs loses its session after `IDLE_MS`,
and its portion with it; its late answers go nowhere.

A record that the broker does not take is tried once more, alone, because the broker refuses whole batches; then it gets a
``publish_error``, and the others go on. A topic that is not there, or not allowed, holds up its own records and no others. When the broker
does not answer, what it did answer is noted, and the relay gives up; no lock is held for longer than `ANSWER_S`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.producer import Answer, Publisher, Publishers
from tidemark.offsets import store
from tidemark.offsets.ranges import TopicPartition
from tidemark.retry.hop import outgoing
from tidemark.retry.store import publish_gone

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor
    from tidemark.kafka.cluster import Topic

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "relay.sql")

IDLE_MS = 20_000
"""Longer than `tidemark.kafka.producer.ANSWER_S`: a relay that waits for the broker keeps its rows, one that stands still does not."""
PORTION_RECORDS = 2_000
PORTION_BYTES = 16 * 1024 * 1024
MISSING = "it does not exist"
ANY = 2**63 - 1
"""No record, and no offset, has a greater number."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """What one call has done."""

    published: Mapping[str, int] = field(default_factory=dict)
    """Records by topic."""
    refused: int = 0
    """Records that have got a ``publish_error``."""
    again: int = 0
    """Waiting records whose messages the log had no more, and that were put back into the outbox."""
    blocked: Mapping[str, str] = field(default_factory=dict)
    """Topics that take nothing, and why. Their records stay in the outbox."""

    @property
    def records(self) -> int:
        return sum(self.published.values())


def relay(
    connection: Connection,
    config: KafkaConfig,
    group: str,
    *,
    limit: int | None = None,
    portion: int = PORTION_RECORDS,
    publishers: Publishers | None = None,
) -> Relayed:
    """Publishes what a group has in its outbox, up to ``limit`` records, each portion in a transaction of its own.

    ``publishers`` are those of an earlier call on the same cluster. What comes into the outbox meanwhile may be left for the next call.
    Raises `BrokerUnavailable` when the broker does not answer, and `DatabaseUnavailable`, also when this process was so slow that its
    session was ended; what was noted before stays, and the rest is still in the outbox.
    """
    with transaction(connection) as cur:
        cur.execute(SQL["group_id"], {"group": group})
        found = cur.fetchone()
    if found is None:
        return Relayed()
    return _Relay(connection, Cluster(config), publishers or Publishers(config), group, int(found[0]), portion).run(limit)


class _Relay:
    def __init__(self, connection: Connection, cluster: Cluster, publishers: Publishers, group: str, group_id: int, portion: int) -> None:
        self.connection, self.cluster, self.publishers = connection, cluster, publishers
        self.group, self.group_id, self.portion = group, group_id, portion
        self.topics: dict[str, tuple[Topic, int]] = {}
        """By name, with our id of this incarnation."""
        self.published: Counter[str] = Counter()
        self.blocked: dict[str, str] = {}
        self.refused = 0

    def run(self, limit: int | None) -> Relayed:
        again = self._put_back_gone()
        self._look_up()
        left, after, suspects = limit, 0, list[int]()
        while left is None or left > 0:
            last, taken, doubtful = self._publish(
                self.publishers.together, after, self.portion if left is None else min(left, self.portion)
            )
            suspects += doubtful
            if not taken:
                break
            left, after = None if left is None else left - taken, last
        for suspect in suspects:
            self._publish(self.publishers.alone, suspect - 1, 1, upto=suspect, alone=True)
        done = Relayed(dict(self.published), self.refused, again, dict(self.blocked))
        if done != Relayed():
            log.info(
                "relayed group=%s records=%s refused=%s again=%s blocked=%s",
                self.group, done.records, done.refused, done.again, ",".join(done.blocked),
            )  # fmt: skip
        return done

    def _look_up(self) -> None:
        """Finds the topics of the outbox in the cluster, before anything is locked."""
        with transaction(self.connection) as cur:
            cur.execute(SQL["outbox_topics"], {"group_id": self.group_id})
            names = [name for (name,) in cur.fetchall()]
        found = {topic.name: topic for topic in self.cluster.topics(names, missing_ok=True)}
        self.blocked |= {name: MISSING for name in names if name not in found}
        with transaction(self.connection) as cur:
            self.topics = {name: (topic, store.ensure_topic(cur, name, topic.kafka_uuid)) for name, topic in found.items()}

    def _put_back_gone(self) -> int:
        """Messages of waiting records that retention took, or that went with their topic, are published again: Postgres has the records."""
        with transaction(self.connection) as cur:
            cur.execute(SQL["published"], {"group_id": self.group_id})
            places = rows(cur)
        found = {topic.name: topic for topic in self.cluster.topics({place["topic"] for place in places}, missing_ok=True)}
        there = [place for place in places if _is_there(place, found)]
        starts = self.cluster.log_starts(TopicPartition(place["topic"], place["partition"]) for place in there)
        again = 0
        for place in places:
            start = starts[TopicPartition(place["topic"], place["partition"])] if place in there else None
            if start is not None and place["first"] >= start:
                continue
            with transaction(self.connection) as cur:
                put_back = publish_gone(cur, self.group_id, place["topic_id"], partition=place["partition"], before=start)
            again += put_back
            log.warning(
                "messages of waiting records are gone and will be published again group=%s topic=%s partition=%s records=%s",
                self.group, place["topic"], place["partition"], put_back,
            )  # fmt: skip
        return again

    def _publish(self, publisher: Publisher, after: int, count: int, *, upto: int = ANY, alone: bool = False) -> tuple[int, int, list[int]]:
        """One portion behind a record: the last record that it took, how many, and those that are to be tried alone."""
        allowed = [name for name in self.topics if name not in self.blocked]
        with transaction(self.connection) as cur:
            records = self._take(cur, after, upto, count, allowed)  # ①
            messages = [outgoing(self.group, record, self.topics[record["hop_topic"]][0].partitions) for record in records]
            reports = publisher.publish(messages)  # ② ③
            stored, refused, silence = [], [], ""
            for record, message, report in zip(records, messages, reports, strict=True):
                number = record["failed_record_id"]
                if report.answer is Answer.STORED:
                    stored.append((number, self.topics[message.topic][1], message.partition, report.offset))
                elif report.answer is Answer.REFUSED:
                    refused.append((number, report.text))
                elif report.answer is Answer.BLOCKED:
                    self.blocked[message.topic] = report.text
                else:
                    silence = report.text
            self._note(cur, stored, refused if alone else [])  # ④
        self.published.update(message.topic for message, report in zip(messages, reports, strict=True) if report.answer is Answer.STORED)
        self.refused += len(refused) if alone else 0
        if silence:
            raise BrokerUnavailable(cause=f"{self.cluster.servers}: {silence}")
        return (
            records[-1]["failed_record_id"] if records else after,
            len(records),
            [] if alone else [number for number, _ in refused],
        )

    def _take(self, cur: Cursor, after: int, upto: int, count: int, topics: Sequence[str]) -> list[dict[str, Any]]:
        cur.execute(SQL["limits"], {"idle_ms": str(IDLE_MS)})
        bounds = {"after": after, "upto": upto, "records": count, "bytes": PORTION_BYTES}
        cur.execute(SQL["take"], {"group_id": self.group_id, "topics": list(topics), **bounds})
        return rows(cur)

    def _note(self, cur: Cursor, stored: Sequence[tuple[int, int, int, int]], refused: Sequence[tuple[int, str]]) -> None:
        if stored:
            ids, topic_ids, partitions, offsets = map(list, zip(*stored, strict=True))
            cur.execute(SQL["note_stored"], {"ids": ids, "topic_ids": topic_ids, "partitions": partitions, "offsets": offsets})
        if refused:
            numbers, texts = map(list, zip(*refused, strict=True))
            cur.execute(SQL["note_refused"], {"ids": numbers, "texts": texts})


def _is_there(place: Mapping[str, Any], found: Mapping[str, Topic]) -> bool:
    topic = found.get(place["topic"])
    return topic is not None and topic.kafka_uuid == place["kafka_uuid"] and place["partition"] < topic.partitions
