"""A group with positions, sink and ledger on a real Postgres, into which tests commit slices. There is no Kafka: records are made up."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from tests.support.fetching import fetched
from tidemark.db import Connection, Cursor, session, transaction
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.records.outcome import Disposition, TransformOutput, only, reject
from tidemark.records.ranges import Claim, Generation, Slice, TopicPartition
from tidemark.sink.commit import Receipt, Sessions, commit_slice
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target

TABLE = "analytics.departures"
DDL = f"""
    CREATE SCHEMA IF NOT EXISTS analytics;
    CREATE TABLE IF NOT EXISTS {TABLE} (
        city text CHECK (city <> 'Atlantis'), population bigint,
        kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
        UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
    )"""
LAYOUT = Layout(TABLE, (Column("city", "text"), Column("population", "bigint")))


def backend_of(connection: Connection) -> int:
    """The process that executes the open transaction, also behind a pooler. Uses a plain cursor, which no test counts."""
    with Cursor(connection) as cur:
        cur.execute("SELECT pg_backend_pid()")
        return int(cur.fetchone()[0])  # type: ignore[index]


def rows(part: Slice, offsets: Sequence[int], city: str | Callable[[int], str] = "Ulm") -> pa.RecordBatch:
    """Rows as a transform returns them, one for each of ``offsets``."""
    return pa.RecordBatch.from_pydict(
        {
            "city": pa.array([city if isinstance(city, str) else city(offset) for offset in offsets], pa.string()),
            "population": pa.array(offsets, pa.int64()),
            "kafka_topic": pa.array([part.partition.topic] * len(offsets), pa.string()),
            "kafka_partition": pa.array([part.partition.partition] * len(offsets), pa.int32()),
            "kafka_offset": pa.array(offsets, pa.int64()),
        }
    )


def all_loaded(part: Slice) -> Iterator[TransformOutput]:
    """One row for each record of the slice, in batches."""
    for start in range(part.start, part.end, 100):
        yield TransformOutput(only(rows(part, range(start, min(start + 100, part.end)))))


def of_all_kinds(part: Slice) -> Iterator[TransformOutput]:
    """The offset's last digit decides: 0 is skipped, 1 retried, 2 failed, 3 not mentioned, 4 has three rows, the others one."""
    for start in range(part.start, part.end, 7):
        span = range(start, min(start + 7, part.end))
        loaded = [offset for offset in span for _ in range(3 if offset % 10 == 4 else 1) if offset % 10 > 3]
        rejects = [
            reject(offset, Disposition.RETRY if offset % 10 == 1 else Disposition.FAIL, f"KeyError: {offset}")
            for offset in span
            if offset % 10 in (1, 2)
        ]
        yield TransformOutput(only(rows(part, loaded)) if loaded else {}, [offset for offset in span if offset % 10 == 0], rejects)


def payloads(part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
    """Failed records as Kafka would deliver them again."""
    for offset in sorted(offsets):
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([offset], pa.int64()),
                pa.array([datetime(2024, 1, 1, tzinfo=UTC) if offset % 2 else None], pa.timestamp("us", "UTC")),
                pa.array([None if offset % 2 else b"k\0"], pa.binary()),
                pa.array([f"{part.partition} {offset}".encode()], pa.binary()),
                pa.array(['[["h", "eA=="]]'], pa.string()),
            ],
            names=["record_offset", "record_timestamp", "key", "value", "headers"],
        )


def never(*_: object) -> Iterator[Any]:
    """An iterator that must not be consumed."""
    raise AssertionError("it was consumed")
    yield


@dataclass
class Group:
    """A separate consumer group with one topic, in a database that others may share. ``watch`` is a session outside any transaction."""

    url: str
    watch: Connection
    partitions: int = 1
    name: str = field(default_factory=lambda: f"g-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        self.topic = f"t-{self.name}"
        self.watch.autocommit = True
        with self.watch.cursor() as cur:
            self.group_id = store.ensure_group(cur, self.name)
            self.topic_id = store.ensure_topic(cur, self.topic, self.name)
            for partition in range(self.partitions):
                store.start_partition(cur, self.group_id, self.topic_id, partition, 0)

    def target(self, *, url: str | None = None, attempt: int | None = None, layout: Layout = LAYOUT) -> Target:
        return Target(url or self.url, self.group_id, attempt or self.attempt(), (layout,))

    def attempt(self) -> int:
        with self.watch.cursor() as cur:
            return store.new_attempt(cur, self.group_id, TaskIdentity())

    def claim(self, partition: int = 0, owner: str = "me", generation: Generation | None = None) -> Claim:
        """Claims a partition for the owner of a new or the given generation, in a separate transaction."""
        with session(self.url) as connection, transaction(connection) as cur:
            number = generation or store.next_generation(cur)
            return store.claim(cur, self.group_id, self.topic_id, TopicPartition(self.topic, partition), store.Owner(number, owner))

    def slice(self, end: int = 30, partition: int = 0) -> Slice:
        """Claims the partition and returns the slice from its position to ``end``."""
        return slice_of(self.claim(partition), end)

    def commit(
        self, part: Slice, judged: Iterator[TransformOutput] | None = None, *, sessions: Sessions | None = None, **options: Any
    ) -> Receipt:
        return commit_slice(self.target(**options), part, of_all_kinds(part) if judged is None else judged, payloads, sessions=sessions)

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        with self.watch.cursor() as cur:
            cur.execute(statement, parameters or None)
            return fetched(cur)

    def position(self, partition: int = 0) -> tuple[int, int]:
        """The next offset and the epoch."""
        return self.sql(
            "SELECT next_offset, owner_epoch FROM tidemark.partition_offset WHERE group_id = %s AND partition = %s",
            self.group_id,
            partition,
        )[0]  # type: ignore[no-any-return]

    def counted(self) -> tuple[int, int, int, int]:
        """The sum of positions, and the numbers of sink rows, failed records and ledger rows, all from one statement and one moment."""
        return self.sql(
            "SELECT (SELECT sum(next_offset)::int FROM tidemark.partition_offset WHERE group_id = %s),"
            f" (SELECT count(*) FROM {TABLE} WHERE kafka_topic_id = %s),"
            " (SELECT count(*) FROM tidemark.failed_record WHERE group_id = %s), (SELECT count(*) FROM tidemark.batch WHERE group_id = %s)",
            self.group_id, self.topic_id, self.group_id, self.group_id,
        )[0]  # type: ignore[no-any-return]  # fmt: skip

    def check_conserved(self) -> None:
        """Checks that nothing is lost, duplicated or left over (I3)."""
        with self.watch.cursor() as cur:
            assert check_conservation(cur, self.name, [TABLE]) == []

    def sessions(self) -> list[tuple[int, str, str | None]]:
        """The sessions that commit for this group: pid, state, and type of the event that they wait for."""
        return self.sql(
            "SELECT pid, state, wait_event_type FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s",
            f"tidemark/{self.group_id}/%",
        )


def slice_of(claim: Claim, end: int) -> Slice:
    return Slice(claim.partition, claim.topic_id, claim.position, end, claim.epoch)


@contextlib.contextmanager
def in_thread(act: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Runs ``act`` in a thread, and waits for it at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(act)
