"""The limit, and Tidemark's writer alone: no Kafka and no JSON. The rows are in memory when the clock starts.

`Limit` sends a finished binary COPY, after the compare-and-set that exactly-once delivery needs anyway: no program in any language loads
this table faster by COPY. `Writer` passes Arrow batches to `tidemark.sink.commit.commit_slice`, which accounts for every record, checks
types, encodes, copies, and writes the ledger. Both use one transaction per partition, and 1 or 2 connections in a process each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg2
from benchmarks.harness.remote import Remote
from benchmarks.harness.site import COLUMNS, SCHEMA, TABLE, Job, Site, Topic
from benchmarks.records.events import values
from benchmarks.transforms.bench_arrow import EVENT, parse
from benchmarks.transforms.bench_arrow import LINEAGE as GIVEN

from tidemark.db import session, transaction
from tidemark.offsets import store
from tidemark.records.ranges import Claim, Epoch, Slice, TopicPartition
from tidemark.sink.commit import commit_slice
from tidemark.sink.encode import COPY_BUFFER_BYTES, CopyStream
from tidemark.sink.fit import ExistingTable, match
from tidemark.sink.table import LINEAGE, Layout, read_columns
from tidemark.sink.tally import Tally, split_output
from tidemark.sink.target import Target
from tidemark.spec.model import Sink

ROWS_A_BATCH = 10_000
"""Rows per batch, as the reader returns them."""


class _InMemory(ABC):
    """Rows of a topic in memory, and the processes that send them, which are forked to share this memory."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.rows: dict[int, Any] = {}
        """By partition."""
        self._topic: Topic | None = None
        self._senders: dict[int, list[Remote]] = {}

    def prepare(self, job: Job) -> None:
        if self._topic != job.topic:
            self.close()
            self._topic, self.rows = job.topic, {number: self._load(job.topic, number) for number in range(job.topic.partitions)}
        count = job.connections
        if count not in self._senders:
            self._senders[count] = [Remote(_Sender, self, method="fork") for _ in range(count)]
        tasks = self._tasks(job)
        for number, sender in enumerate(self._senders[count]):
            sender.ask("prepare", tasks[number::count])

    def run(self, job: Job) -> None:
        run_all(self._senders[job.connections])

    def close(self) -> None:
        for sender in (sender for senders in self._senders.values() for sender in senders):
            sender.close()
        self._senders.clear()

    @abstractmethod
    def _load(self, topic: Topic, number: int) -> Any: ...

    @abstractmethod
    def _tasks(self, job: Job) -> list[Any]: ...

    @abstractmethod
    def send(self, connection: Any, task: Any) -> None: ...


class _Sender:
    def __init__(self, contestant: _InMemory) -> None:
        self._contestant, self._tasks = contestant, list[Any]()
        self._connection: Any = None

    def prepare(self, tasks: list[Any]) -> None:
        if self._connection is not None:
            self._connection.close()
        self._tasks, self._connection = tasks, psycopg2.connect(self._contestant.site.database_url)

    def run(self) -> None:
        for task in self._tasks:
            self._contestant.send(self._connection, task)


class Limit(_InMemory):
    """Raw COPY BINARY."""

    def _load(self, topic: Topic, number: int) -> list[bytes]:
        part, layout = slice_of(topic, number, Epoch(0)), layout_of(self.site)
        tally = Tally(part)
        rows = (tally.take(split_output(one, part), layout) for one in _batches(topic, number))
        return list(iter(CopyStream([*COLUMNS, *LINEAGE], (batch for batch in rows if batch is not None)).read, b""))

    def _tasks(self, job: Job) -> list[int]:
        return start_positions(self.site, job)

    def send(self, connection: Any, task: int) -> None:
        position = f"UPDATE {SCHEMA}.position SET next_offset = next_offset + 1"
        with connection.cursor() as cur:
            cur.execute(f"{position} WHERE kafka_partition = %s AND next_offset = 0 AND epoch = 1", (task,))
            assert cur.rowcount == 1
            left, names = iter(self.rows[task]), ", ".join(name for name, _ in [*COLUMNS, *LINEAGE])
            source = SimpleNamespace(read=lambda _size=-1: next(left, b""))
            cur.copy_expert(f"COPY {TABLE} ({names}) FROM STDIN (FORMAT binary)", source, size=COPY_BUFFER_BYTES)
        connection.commit()


class Writer(_InMemory):
    """`commit_slice`, as a task calls it."""

    def _load(self, topic: Topic, number: int) -> Any:
        return list(_batches(topic, number))

    def _tasks(self, job: Job) -> list[tuple[Target, Slice]]:
        layout, tasks = layout_of(self.site), []
        with session(self.site.database_url) as connection, transaction(connection) as cur:
            generation = store.next_generation(cur)
            group = store.ensure_group(cur, f"bench-writer-{generation}")
            attempt = store.new_attempt(cur, group, store.TaskIdentity())
            for number in range(job.topic.partitions):
                store.start_partition(cur, group, job.topic.topic_id, number, 0)
                partition = TopicPartition(job.topic.name, number)
                claim: Claim = store.claim(cur, group, job.topic.topic_id, partition, store.Owner(generation, "bench"))
                tasks.append((Target(self.site.database_url, group, attempt, (layout,)), slice_of(job.topic, number, claim.epoch)))
        return tasks

    def send(self, connection: Any, task: tuple[Target, Slice]) -> None:
        target, part = task
        commit_slice(target, part, (split_output(batch, part) for batch in self.rows[part.partition.partition]), _no_payloads)


def run_all(processes: Iterable[Remote]) -> None:
    """Lets all of them run at the same time, and waits for the last."""
    started = list(processes)
    for process in started:
        process.begin("run")
    for process in started:
        process.answer()


def start_positions(site: Site, job: Job) -> list[int]:
    """Sets the positions of contestants that keep them in a table of their own, and returns the numbers of the partitions."""
    numbers = list(range(job.topic.partitions))
    with session(site.database_url) as connection, transaction(connection) as cur:
        cur.execute(f"DELETE FROM {SCHEMA}.position")
        cur.executemany(f"INSERT INTO {SCHEMA}.position VALUES (%s, 0, 1)", [(number,) for number in numbers])
    return numbers


def slice_of(topic: Topic, number: int, epoch: Epoch) -> Slice:
    return Slice(TopicPartition(topic.name, number), topic.topic_id, 0, topic.each, epoch)


def layout_of(site: Site) -> Layout:
    """The layout of the common table for the transform's output."""
    import pyarrow as pa

    output = pa.schema([*EVENT, (GIVEN[0], pa.string()), (GIVEN[1], pa.int32()), (GIVEN[2], pa.int64())])
    with session(site.database_url) as connection, transaction(connection) as cur:
        return match(Sink(table=TABLE), ExistingTable(read_columns(cur, TABLE)), output)


def _no_payloads(part: Slice, offsets: object) -> Iterator[Any]:
    raise AssertionError(f"{part}: no record fails here, but {offsets} did")


def _batches(topic: Topic, number: int) -> Iterator[Any]:
    """The output of the transform for a partition."""
    import pyarrow as pa

    records = list(values(topic, number))
    for start in range(0, len(records), ROWS_A_BATCH):
        events = parse(pa.array(records[start : start + ROWS_A_BATCH], pa.binary()))
        count = events.num_rows
        name, partition = pa.scalar(topic.name), pa.scalar(number, pa.int32())
        lineage = [pa.repeat(name, count), pa.repeat(partition, count), pa.array(range(start, start + count), pa.int64())]
        yield pa.RecordBatch.from_arrays([*events.columns, *lineage], names=[*events.schema.names, *GIVEN])
