"""The limit, and Tidemark's writer alone: no Kafka and no JSON. The rows are in memory when the clock starts.

`Limit` sends a finished binary COPY, after the compare-and-set that exactly-once delivery needs anyway: no program in any language loads
this table faster by COPY. `Writer` passes Arrow batches to `tidemark.sink.commit.commit_slice`, which accounts for every record, checks
types, encodes, copies, and writes the ledger. Both use one transaction per partition, and 1 or 2 connections in a process each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import psycopg2

from benchmarks.data import values
from benchmarks.site import COLUMNS, SCHEMA, TABLE, Job, Site, Topic
from benchmarks.transforms.bench_arrow import parse
from tidemark.offsets import store
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Claim, Epoch, Slice, TopicPartition
from tidemark.sink.commit import commit_slice
from tidemark.sink.encode import COPY_BUFFER_BYTES, CopyStream
from tidemark.sink.table import LINEAGE, Layout, match, read_columns
from tidemark.sink.tally import Tally, split_output
from tidemark.sink.target import Target

ROWS_A_BATCH = 10_000
"""Rows per batch, as the reader returns them."""


class _InMemory:
    """Rows of a topic in memory, and the processes that send them, which are forked to share this memory."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._loaded: tuple[Topic, dict[int, Any]] | None = None
        self._crews: dict[int, list[tuple[Any, Any]]] = {}

    def prepare(self, job: Job) -> None:
        if self._loaded is None or self._loaded[0] != job.topic:
            self.close()
            self._loaded = (job.topic, {number: self._load(job.topic, number) for number in range(job.topic.partitions)})
        count = int(job.parameters["connections"])
        if count not in self._crews:
            self._crews[count] = [self._fork() for _ in range(count)]
        tasks = self._tasks(job)
        for number, (_, pipe) in enumerate(self._crews[count]):
            pipe.send(tasks[number::count])

    def run(self, job: Job) -> None:
        crew = self._crews[int(job.parameters["connections"])]
        for _, pipe in crew:
            pipe.send("go")
        for error in [pipe.recv() for _, pipe in crew]:
            if error is not None:
                raise RuntimeError(error)

    def close(self) -> None:
        for crew in self._crews.values():
            for process, pipe in crew:
                pipe.close()
                process.join(10)
        self._crews.clear()

    def _fork(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._serve, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _serve(self, pipe: Any, other_end: Any) -> None:
        other_end.close()
        with contextlib.suppress(EOFError):
            while True:
                tasks = pipe.recv()
                with contextlib.closing(psycopg2.connect(self.site.database_url)) as connection:
                    pipe.recv()
                    try:
                        for task in tasks:
                            self._send(connection, task)
                    except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
                        pipe.send(f"{type(error).__name__}: {error}")
                    else:
                        pipe.send(None)
        os._exit(0)

    def _rows(self, number: int) -> Any:
        assert self._loaded is not None
        return self._loaded[1][number]

    def _load(self, topic: Topic, number: int) -> Any:
        raise NotImplementedError

    def _tasks(self, job: Job) -> list[Any]:
        raise NotImplementedError

    def _send(self, connection: Any, task: Any) -> None:
        raise NotImplementedError


class Limit(_InMemory):
    """Raw COPY BINARY."""

    def _load(self, topic: Topic, number: int) -> list[bytes]:
        part = _slice(topic, number, Epoch(0))
        tally = Tally(part)
        rows = (tally.take(one, _layout(self.site)) for one in _judged(topic, part, _batches(topic, number)))
        stream = CopyStream([*COLUMNS, *LINEAGE], (batch for batch in rows if batch is not None))
        return list(iter(stream.read, b""))

    def _tasks(self, job: Job) -> list[int]:
        numbers = list(range(job.topic.partitions))
        with contextlib.closing(psycopg2.connect(self.site.database_url)) as connection, connection, connection.cursor() as cur:
            cur.execute(f"DELETE FROM {SCHEMA}.position")
            cur.executemany(f"INSERT INTO {SCHEMA}.position VALUES (%s, 0, 1)", [(number,) for number in numbers])
        return numbers

    def _send(self, connection: Any, task: int) -> None:
        chunks = iter(self._rows(task))

        class Source:
            def read(self, _size: int = -1) -> bytes:
                return next(chunks, b"")

        names = ", ".join(name for name, _ in [*COLUMNS, *LINEAGE])
        with connection.cursor() as cur:
            cur.execute(
                f"UPDATE {SCHEMA}.position SET next_offset = next_offset + 1 WHERE kafka_partition = %s AND next_offset = 0 AND epoch = 1",
                (task,),
            )
            assert cur.rowcount == 1
            cur.copy_expert(f"COPY {TABLE} ({names}) FROM STDIN (FORMAT binary)", Source(), size=COPY_BUFFER_BYTES)
        connection.commit()


class Writer(_InMemory):
    """`commit_slice`, as a task calls it."""

    def _load(self, topic: Topic, number: int) -> Any:
        return list(_batches(topic, number))

    def _tasks(self, job: Job) -> list[tuple[Target, Slice]]:
        self._topic = job.topic
        layout = _layout(self.site)
        with contextlib.closing(psycopg2.connect(self.site.database_url)) as connection, connection, connection.cursor() as cur:
            generation = store.next_generation(cur)
            group = store.ensure_group(cur, f"bench-writer-{generation}")
            attempt = store.new_attempt(cur, group, store.TaskIdentity())
            tasks = []
            for number in range(job.topic.partitions):
                store.start_partition(cur, group, job.topic.topic_id, number, 0)
                partition = TopicPartition(job.topic.name, number)
                claim: Claim = store.claim(cur, group, job.topic.topic_id, partition, generation, "bench")
                tasks.append((Target(self.site.database_url, group, attempt, (layout,)), _slice(job.topic, number, claim.epoch)))
        return tasks

    def _send(self, connection: Any, task: tuple[Target, Slice]) -> None:
        target, part = task
        commit_slice(target, part, (split_output(batch, part) for batch in self._rows(part.partition.partition)), _no_payloads)


def _no_payloads(part: Slice, offsets: object) -> Iterator[Any]:
    raise AssertionError(f"{part}: no record fails here, but {offsets} did")


def _slice(topic: Topic, number: int, epoch: Epoch) -> Slice:
    return Slice(TopicPartition(topic.name, number), topic.topic_id, 0, topic.each, epoch)


def _batches(topic: Topic, number: int) -> Iterator[Any]:
    """The output of the transform for a partition."""
    import pyarrow as pa

    records = list(values(topic, number))
    for start in range(0, len(records), ROWS_A_BATCH):
        events = parse(pa.array(records[start : start + ROWS_A_BATCH], pa.binary()))
        count = events.num_rows
        given = [
            pa.repeat(pa.scalar(topic.name), count),
            pa.repeat(pa.scalar(number, pa.int32()), count),
            pa.array(range(start, start + count), pa.int64()),
        ]
        names = [*events.schema.names, "kafka_topic", "kafka_partition", "kafka_offset"]
        yield pa.RecordBatch.from_arrays([*events.columns, *given], names=names)


def _judged(topic: Topic, part: Slice, batches: Iterator[Any]) -> Iterator[TransformOutput]:
    return (split_output(batch, part) for batch in batches)


def _layout(site: Site) -> Layout:
    import pyarrow as pa

    from benchmarks.transforms.bench_arrow import EVENT
    from benchmarks.transforms.bench_arrow import LINEAGE as GIVEN

    output = pa.schema([*EVENT, (GIVEN[0], pa.string()), (GIVEN[1], pa.int32()), (GIVEN[2], pa.int64())])
    with contextlib.closing(psycopg2.connect(site.database_url)) as connection, connection, connection.cursor() as cur:
        return match(TABLE, read_columns(cur, TABLE), output, lineage_index=True)
