"""The relay: publishes records handed off in Postgres to their Kafka topics, and registers each message in the record's row.

    ① lock a portion of the outbox   ② publish it   ③ wait for the broker's answers   ④ register the messages   ⑤ commit

④ begins with the first answers, while other records are still being published.

A row without ``retry_offset`` is still to be published. A relay that dies between ② and ⑤ leaves messages that no row registers; they are
never tried, and their records are published again. So no record is lost or tried twice. Several relays share the work, because each skips
rows that others have locked. A relay that hangs loses its session, and with it its portion, after `IDLE_MS`; later answers are ignored.

Before it publishes to a topic for the first time, the relay checks the topic, and creates it if missing (`tidemark.retry.topics`). A known
topic costs only the metadata request for its partitions.

The broker rejects whole batches, so each record of a rejected batch is tried once more, alone. If it is rejected again, it gets a
``publish_error``, and the relay continues with the others. A topic that is missing, misconfigured or not authorized blocks only its own
records. If the broker stops answering, the relay registers the answers it has and gives up; it holds no lock longer than `ANSWER_S`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemark.db import array, rows, statements, transaction
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.producer import DeliveryStatus, Publisher, Publishers
from tidemark.offsets import store
from tidemark.offsets.store import find_group
from tidemark.records.ranges import TopicPartition
from tidemark.retry.messages import Row, outgoing, partition_of
from tidemark.retry.store import by_index, publish_gone, release
from tidemark.retry.topics import inspect_topics, largest_of, own_topics, visible
from tidemark.spec.retry_topics import now_topic

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor
    from tidemark.kafka.cluster import Topic
    from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "relay.sql")

IDLE_MS = 9_000
"""Longer than `tidemark.kafka.producer.ANSWER_S`, so that a relay waiting for the broker keeps its rows. Shorter than a rewind's wait for
them (`tidemark.rewind.apply.GRACE_MS`), so that a hanging relay does not block a rewind."""
PORTION_RECORDS = 10_000
PORTION_BYTES = 16 * 1024 * 1024
REGISTERED_AT_ONCE = 1_000
"""Records that one statement registers while the rest of the portion is being published."""
MISSING = "it does not exist"
NOT_ALLOWED = "{} on it is not allowed"
NOT_OWN = "it is not a topic of this group"
ANY = 2**63 - 1
"""The largest record number."""


Stored = tuple[int, int, int, int]
"""A record's number, and the topic id, partition and offset of its message."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """The result of one call."""

    published: Mapping[str, int] = field(default_factory=dict)
    """Number of records by topic."""
    refused: int = 0
    """Records that the broker rejected; they have a ``publish_error``."""
    again: int = 0
    """Waiting records put back into the outbox, because their messages are gone from the log."""
    blocked: Mapping[str, str] = field(default_factory=dict)
    """Reasons by topic that cannot be published to. Its records stay in the outbox."""

    @property
    def records(self) -> int:
        return sum(self.published.values())


def relay(
    connection: Connection,
    config: KafkaConfig,
    spec: ConsumerSpec,
    *,
    limit: int | None = None,
    portion: int = PORTION_RECORDS,
    publishers: Publishers | None = None,
) -> Relayed:
    """Publishes up to ``limit`` records of a group's outbox, each portion in a transaction of its own. Creates missing topics, unless
    the spec disables it (``retry.topics.create``).

    ``publishers`` may be reused from an earlier call on the same cluster. Records that enter the outbox meanwhile may be left for the next
    call. Raises `BrokerUnavailable` if the broker does not answer, and `DatabaseUnavailable`, also if Postgres ended the session because
    this process was too slow. Committed portions stay, and the rest is still in the outbox.
    """
    with transaction(connection) as cur:
        group_id = find_group(cur, spec.group)
    if group_id is None:
        return Relayed()
    return _Relay(connection, Cluster(config), publishers or Publishers(config), spec, group_id, portion).run(limit)


class _Relay:
    def __init__(
        self, connection: Connection, cluster: Cluster, publishers: Publishers, spec: ConsumerSpec, group_id: int, portion: int
    ) -> None:
        self.connection, self.cluster, self.publishers = connection, cluster, publishers
        self.spec, self.group, self.group_id, self.portion = spec, spec.group, group_id, portion
        self.topics: dict[str, tuple[Topic, int]] = {}
        """By name, with Tidemark's topic id of this incarnation."""
        self.published: Counter[str] = Counter()
        self.blocked: dict[str, str] = {}
        self.refused = 0

    def run(self, limit: int | None) -> Relayed:
        again = self._put_back_gone()
        with transaction(self.connection) as cur:
            release(cur, self.group_id, now_topic(self.group))
        self._find_topics()
        remaining, after, suspects = limit, 0, list[int]()
        while remaining is None or remaining > 0:
            count = self.portion if remaining is None else min(remaining, self.portion)
            after, taken, rejected = self._publish(self.publishers.together, after, count)
            suspects += rejected
            if not taken:
                break
            remaining = None if remaining is None else remaining - taken
        for suspect in suspects:
            self._publish(self.publishers.alone, suspect - 1, 1, upto=suspect, alone=True)
        done = Relayed(dict(self.published), self.refused, again, dict(self.blocked))
        if done != Relayed():
            log.info(
                "relayed group=%s records=%s refused=%s again=%s blocked=%s",
                self.group, done.records, done.refused, done.again, ",".join(done.blocked),
            )  # fmt: skip
        return done

    def _find_topics(self) -> None:
        """Looks up the outbox's topics in the cluster, before locking rows, and checks topics that are new."""
        with transaction(self.connection) as cur:
            cur.execute(SQL["outbox_topics"], {"group_id": self.group_id})
            outbox_topics = [name for (name,) in cur.fetchall()]
            names = [topic.name for topic in own_topics(self.group, outbox_topics)]
            self.blocked |= {name: NOT_OWN for name in outbox_topics if name not in names}  # an operator can store any name
            cur.execute(SQL["known"], {"names": names})
            known_topics = {(name, kafka_uuid) for name, kafka_uuid in cur.fetchall()}
        if names:
            self.publishers.together.connect()  # in the background, while the topics are looked up
        topics, hidden = visible(self.cluster, names)
        self.blocked |= {name: NOT_ALLOWED.format("DESCRIBE") for name in hidden}
        if new := [
            name for name in names if name not in hidden and (name not in topics or (name, topics[name].kafka_uuid) not in known_topics)
        ]:
            topics |= self._checked(new)
        with transaction(self.connection) as cur:
            self.topics = {
                name: (topic, store.ensure_topic(cur, name, topic.kafka_uuid)) for name, topic in topics.items() if name not in self.blocked
            }

    def _checked(self, names: Sequence[str]) -> dict[str, Topic]:
        """Creates missing topics and returns the existing ones. Marks misconfigured and unauthorized topics as blocked.

        A topic whose settings the ACLs hide cannot be checked, and is used.
        """
        largest = largest_of(self.cluster, self.spec, missing_ok=True)
        state = inspect_topics(self.cluster, self.spec, own_topics(self.group, names), largest, create=self.spec.retry.topics.create)
        self.blocked |= {each.name: MISSING for each in state.missing}
        self.blocked |= {name: NOT_ALLOWED.format(operation) for name, operation in state.denied.items() if operation != "DESCRIBE_CONFIGS"}
        self.blocked |= {name: " ".join(problems).rstrip(".") for name, problems in state.problems.items()}
        return dict(state.existing)

    def _put_back_gone(self) -> int:
        """Puts waiting records back into the outbox if their messages were deleted, by retention or with their topic."""
        with transaction(self.connection) as cur:
            cur.execute(SQL["published"], {"group_id": self.group_id})
            partitions = rows(cur)
        topics, hidden = visible(self.cluster, sorted({row["topic"] for row in partitions}))
        partitions = [row for row in partitions if row["topic"] not in hidden]
        existing = [row for row in partitions if _exists(row, topics)]
        starts = self.cluster.log_starts(TopicPartition(row["topic"], row["partition"]) for row in existing)
        again = 0
        for row in partitions:
            start = starts[TopicPartition(row["topic"], row["partition"])] if row in existing else None
            if start is not None and row["first"] >= start:
                continue
            with transaction(self.connection) as cur:
                put_back = publish_gone(cur, self.group_id, row["topic_id"], partition=row["partition"], before=start)
            again += put_back
            log.warning(
                "messages of waiting records are gone and will be published again group=%s topic=%s partition=%s records=%s",
                self.group, row["topic"], row["partition"], put_back,
            )  # fmt: skip
        return again

    def _publish(self, publisher: Publisher, after: int, count: int, *, upto: int = ANY, alone: bool = False) -> tuple[int, int, list[int]]:
        """Publishes the portion after a record. Returns the last record taken, the number taken, and records to publish alone."""
        allowed = [name for name in self.topics if name not in self.blocked]
        stored, refused, no_answer, published = list[Stored](), [], "", Counter[str]()
        with _collector_paused(), transaction(self.connection) as cur, ThreadPoolExecutor(1) as registrar:
            records = self._take(cur, after, upto, count, allowed)  # ①
            reports = publisher.publish(outgoing(self.group, record, self._partitions(record)) for record in records)  # ② ③
            registrations = list[Future[None]]()
            for record, report in zip(records, reports, strict=True):
                number, topic = record.failed_record_id, record.retry_topic
                if report.answer is DeliveryStatus.STORED:
                    stored.append((number, self.topics[topic][1], partition_of(record, self._partitions(record)), report.offset))
                    published[topic] += 1
                    if len(stored) == REGISTERED_AT_ONCE:
                        registrations.append(registrar.submit(_register, cur, stored))  # ④ while others are published
                        stored = []
                elif report.answer is DeliveryStatus.REFUSED:
                    refused.append((number, report.text))
                elif report.answer is DeliveryStatus.BLOCKED:
                    self.blocked[topic] = report.text
                else:
                    no_answer = report.text
            for registration in registrations:
                registration.result()
            _register(cur, stored)  # ④
            if alone:
                _mark_refused(cur, refused)
        self.published += published
        self.refused += len(refused) if alone else 0
        if no_answer:
            raise BrokerUnavailable(cause=f"{self.cluster.servers}: {no_answer}")
        return (
            records[-1].failed_record_id if records else after,
            len(records),
            [] if alone else [number for number, _ in refused],
        )

    def _partitions(self, record: Row) -> int:
        return self.topics[record.retry_topic][0].partitions

    def _take(self, cur: Cursor, after: int, upto: int, count: int, topics: Sequence[str]) -> list[Row]:
        cur.execute(SQL["idle_limit"], {"idle_ms": str(IDLE_MS)})
        by_index(cur)
        bounds = {"after": after, "upto": upto, "records": count, "bytes": PORTION_BYTES}
        cur.execute(SQL["take"], {"group_id": self.group_id, "topics": list(topics), **bounds})
        return [*map(Row._make, cur.fetchall())]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection: a portion's many objects form no cycles, and the search takes a quarter of a relay's CPU time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _register(cur: Cursor, stored: Sequence[Stored]) -> None:
    if stored:
        ids, topic_ids, partitions, offsets = map(array, zip(*stored, strict=True))
        cur.execute(SQL["note_stored"], {"ids": ids, "topic_ids": topic_ids, "partitions": partitions, "offsets": offsets})


def _mark_refused(cur: Cursor, refused: Sequence[tuple[int, str]]) -> None:
    if refused:
        numbers, texts = map(list, zip(*refused, strict=True))
        cur.execute(SQL["note_refused"], {"ids": numbers, "texts": texts})


def _exists(row: Mapping[str, Any], topics: Mapping[str, Topic]) -> bool:
    topic = topics.get(row["topic"])
    return topic is not None and topic.kafka_uuid == row["kafka_uuid"] and row["partition"] < topic.partitions
