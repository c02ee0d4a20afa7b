"""A consumer as a user has it (spec, transform, sink, topics), run for real and compared with the contents of its topics."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import yaml

from tests.support.fetching import fetched, plain
from tests.support.kafka_topics import Topics
from tests.support.waiting import until
from tidemark import project
from tidemark.author.check import sink_ddl
from tidemark.author.describe import layouts_of
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, REGISTRY_URL, SPARK_MASTER, Connections
from tidemark.consume import run
from tidemark.consume.assignment import narrowed
from tidemark.db import Connection
from tidemark.driver import launch
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.sink.commit import Receipt
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.spec.user_transform import Transform, load_permanent
from tidemark.values.fields import transform_of
from tidemark.worker.call_transform import Work
from tidemark.worker.decoding import Decoding, run_with_schemas
from tidemark.worker.slice_worker import SliceWorker

PLAIN = """
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        return {"payload": record.value}
"""
"""One row for each record, with its value."""

STARTS_A_PROCESS = """
    import subprocess
    import sys

    from tidemark.transform import Record


    def transform(record: Record):
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {"payload": str(child.pid).encode()}
"""
"""Starts a process for each record, which nobody ends, and loads its pid."""

ARROW = """
    import pyarrow as pa


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
        return batch.select([*lineage, "value"]).rename_columns([*lineage, "payload"])
"""
"""The same in the Arrow form."""

SPARK = """
    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        return records.selectExpr("kafka_topic", "kafka_partition", "kafka_offset", "value AS payload")
"""
"""The same in the Spark form."""

FIRST_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as stored in a topic."""

    offset: int
    timestamp: datetime | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


@dataclass
class LocalEngine:
    """A `run.Engine` in this process, for the Arrow and function forms. Reads and commits in threads, as the tasks of a Spark job do."""

    spec: ConsumerSpec
    transform: Transform
    connections: Connections
    permanent: tuple[type[Exception], ...]
    before: Callable[[Slice], None] = lambda part: None
    """Called before each slice. A `TidemarkError` that it raises becomes the slice's outcome."""
    batches: list[list[Slice]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decoding = Decoding(self.spec, self.connections.registry, lambda: Cluster(self.connections.kafka).subscribed(self.spec))

    def warm_up(self, sample: Sequence[Slice]) -> None: ...

    def layouts(self, connection: Connection) -> tuple[Layout, ...]:
        return layouts_of(self.transform, self.spec.sinks, connection, _no_spark, self.decoding.input_schema())

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        self.batches.append(list(slices))
        self.decoding.forget_unknown()
        return run_with_schemas(self.decoding, slices, lambda some: self._run(target, some, isolate))

    def _run(self, target: Target, slices: Sequence[Slice], isolate: bool) -> list[Receipt | TidemarkError]:
        form, function, decoder = self.transform.form, self.transform.function, self.decoding.decoder()
        work = Work(target, self.connections.read().kafka, form, function, self.permanent, decoder)
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda part: self._outcome(work, part, isolate), slices))

    def cancel(self) -> None:
        """Nothing here takes long."""

    def stop(self) -> None: ...

    def _outcome(self, work: Work, part: Slice, isolate: bool) -> Receipt | TidemarkError:
        try:
            self.before(part)
            with contextlib.closing(SliceWorker(work)) as worker:
                return worker.consume(part, isolate=isolate)
        except TidemarkError as error:
            return error


class Scenario:
    """One consumer in separate folders. No other test uses its names (module, group, table)."""

    def __init__(self, folder: Path, database_url: str, topics: Topics) -> None:
        self.folder = folder
        for kind in ("consumers", "transforms"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        self.database_url = database_url
        self.topics = topics
        self.name = f"c{uuid.uuid4().hex[:8]}"
        self.table = f"lake.{self.name}"
        self.connections = Connections(database_url, {"bootstrap.servers": topics.servers}, "local[2]")
        self.keys: dict[str, Any] = {}
        self.engine: LocalEngine | None = None
        """The engine of the last run in this process; `None` if the run failed before it had one."""
        self.attempt_id = 0
        """The last attempt in this process."""

    # ---- what the user writes

    def write(self, transform: str | None = PLAIN, *, topics: str | Sequence[str] | None = None, **keys: Any) -> Scenario:
        """Writes the consumer's file and its transform, if it has one. ``keys`` add to the default keys of the file, or replace them."""
        if transform is not None:
            self.transform(transform)
        if topics is not None:
            keys["topics"] = [topics] if isinstance(topics, str) else list(topics)
        self.keys = {"transform": f"{self.name}:transform" if transform else None, "sink": {"table": self.table}}
        self.set(**keys)
        return self

    def set(self, **keys: Any) -> None:
        """Changes keys of the consumer's file. `None` removes a key."""
        self.keys = {key: value for key, value in (self.keys | keys).items() if value is not None}
        self.spec_file.write_text(yaml.safe_dump(self.keys, sort_keys=False))

    def transform(self, source: str) -> None:
        """Writes the transform's module, which the next run uses."""
        self.module_file.write_text(textwrap.dedent(source).lstrip())
        Path(cache_from_source(self.module_file)).unlink(missing_ok=True)  # Python compares sizes, and times in whole seconds
        sys.modules.pop(self.name, None)

    def loaded_module(self) -> Any:
        """Waits until a run in this process has imported the transform's module as a whole, and returns it."""
        return until(lambda: (module := sys.modules.get(self.name)) and hasattr(module, "transform") and module)

    @property
    def spec_file(self) -> Path:
        return self.folder / "consumers" / f"{self.name}.yaml"

    @property
    def module_file(self) -> Path:
        return self.folder / "transforms" / f"{self.name}.py"

    @property
    def folders(self) -> list[Path]:
        return [self.folder / "transforms"]

    @property
    def spec(self) -> ConsumerSpec:
        return find_consumer(self.name, self.folder / "consumers")

    def make_sink(self, ddl: str | None = None, *, partitions: int | None = None) -> Scenario:
        """Creates the table with the DDL of ``tidemark sink ddl``, or with the columns ``ddl`` and the lineage columns."""
        if ddl is None:
            self.sql(sink_ddl(self.spec, transform_of(self.spec, self.folders), _no_spark, partitions=partitions))
        else:
            lineage = "kafka_topic_id smallint, kafka_partition integer, kafka_offset bigint, kafka_seq integer"
            unique = "UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)"
            self.sql(f"CREATE SCHEMA IF NOT EXISTS lake; CREATE TABLE {self.table} ({ddl}, {lineage}, {unique})")
        return self

    def feed(
        self,
        values: Sequence[bytes | str | None],
        transform: str | None = PLAIN,
        ddl: str | None = None,
        *,
        partitions: int = 1,
        **keys: Any,
    ) -> str:
        """Creates a topic with these values in each partition, its consumer, and the sink; returns the topic. ``ddl``: as for `make_sink`,
        ``keys``: as for `write`."""
        topic = self.topics.create(partitions)
        for partition in range(partitions):
            self.topics.produce(topic, values, partition=partition)
        self.write(transform, topics=topic, **keys).make_sink(ddl)
        return topic

    # ---- runs

    def run(
        self,
        *,
        before: Callable[[Slice], None] = lambda part: None,
        task: TaskIdentity | None = None,
        drain: bool = False,
        of_rewind: int | None = None,
        partitions: Sequence[str] = (),
    ) -> launch.Progress:
        """One run in this process, or one drain, or one backfill of what a rewind skipped. Raises the error that made it fail."""
        spec = narrowed(self.spec, partitions)
        attempt = self.attempt_id = run.open_attempt(self.database_url, spec.group, task or TaskIdentity(), of_rewind=of_rewind)
        self.engine = None

        def start(_records: int | None, rehearsed: str | None) -> LocalEngine:
            transform, permanent = transform_of(spec, self.folders, rehearsed), load_permanent(spec, self.folders)
            self.engine = LocalEngine(spec, transform, self.connections, permanent, before)
            return self.engine

        run.consume(spec, self.connections, attempt, start, drain=drain)
        return launch.progress(self.database_url, attempt)

    def command(self, *arguments: str, env: Mapping[str, str] | None = None, wide: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs ``tidemark`` with these arguments, as a user does."""
        command = [sys.executable, "-m", "tidemark.cli.main", *arguments]
        environment = self.env() | ({} if wide else {"COLUMNS": "80"}) | dict(env or {})
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FIRST_LIMIT_S, cwd=self.folder, stdin=subprocess.DEVNULL
        )

    def env(self) -> dict[str, str]:
        """The environment of a user's shell: this test's folders, database and broker, and no colours."""
        return {name: value for name, value in os.environ.items() if not name.startswith("TIDEMARK_") or name == "TIDEMARK_CACHE"} | {
            DATABASE_URL: self.database_url,
            BOOTSTRAP_SERVERS: self.topics.servers,
            SPARK_MASTER: "local[2]",
            **({REGISTRY_URL: self.connections.registry["url"]} if self.connections.registry else {}),
            "TIDEMARK_HOME": str(project.root()),  # then messages show full paths
            "TIDEMARK_CONSUMERS": str(self.folder / "consumers"),
            "TIDEMARK_TRANSFORMS": str(self.folder / "transforms"),
            "NO_COLOR": "1",
            "PYTHONWARNINGS": "default",
        }

    # ---- what is stored

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(psycopg2.connect(self.database_url)) as connection, connection, connection.cursor() as cur:
            cur.execute(statement, parameters or None)
            return fetched(cur)

    def rows(self, columns: str = "payload", *, where: str = "true") -> list[Any]:
        """The sink's rows in the order of their lineage; bare values if there is only one column."""
        order = "kafka_topic_id, kafka_partition, kafka_offset, kafka_seq"
        found = [tuple(map(plain, row)) for row in self.sql(f"SELECT {columns} FROM {self.table} WHERE {where} ORDER BY {order}")]
        return [row[0] for row in found] if found and len(found[0]) == 1 else found

    def failed(self, columns: str = "record_offset, disposition, error_type, error_text") -> list[tuple[Any, ...]]:
        query = f"SELECT {columns} FROM tidemark.failed_record ORDER BY topic_id, partition, record_offset"
        return [tuple(map(plain, row)) for row in self.sql(query)]

    def counts(self) -> dict[str, int]:
        """The sums over the whole ledger, without those that are 0."""
        names = ("loaded", "skipped", "retried", "failed", "unaccounted", "sink_rows", "deleted")
        (sums,) = self.sql(f"SELECT {', '.join(f'coalesce(sum({name}), 0)::bigint' for name in names)} FROM tidemark.batch")
        return {name: value for name, value in zip(names, sums, strict=True) if value}

    def ledger(self) -> list[tuple[str, int, int, int]]:
        """Topic, partition, start and end of each batch."""
        columns = "name, partition, start_offset, end_offset"
        query = f"SELECT {columns} FROM tidemark.batch JOIN tidemark.topic USING (topic_id) ORDER BY 1, topic_id, 2, 3"
        return [(topic, partition, start, end) for topic, partition, start, end in self.sql(query)]

    def lost(self) -> list[tuple[Any, ...]]:
        return self.sql("SELECT partition, start_offset, end_offset, reason FROM tidemark.lost_range ORDER BY topic_id, 1, 2")

    def positions(self) -> dict[tuple[str, int], int]:
        """The position of each partition, for the newest incarnation of each topic."""
        newest = "SELECT max(topic_id) FROM tidemark.topic GROUP BY name"
        columns = "name, partition, next_offset FROM tidemark.partition_offset JOIN tidemark.topic USING (topic_id)"
        rows = self.sql(f"SELECT {columns} WHERE topic_id IN ({newest}) ORDER BY 1, 2")
        return {(topic, partition): offset for topic, partition, offset in rows}

    def mirrored(self) -> dict[tuple[str, int], int]:
        """The positions that Kafka has stored for the group (``mirror: true``)."""
        partitions = [TopicPartition(*key) for key in self.positions()]
        found = Cluster(self.connections.kafka).group_offsets(self.spec.group, partitions)
        return {(part.topic, part.partition): offset for part, offset in found.items()}

    def attempt(self, attempt_id: int | None = None) -> dict[str, Any]:
        """``state`` and ``error`` of an attempt, by default the last one in this process."""
        ((state, error),) = self.sql("SELECT state, error FROM tidemark.attempt WHERE attempt_id = %s", attempt_id or self.attempt_id)
        return {"state": state, "error": error}

    def refuses(self, error: type[TidemarkError], said: str, run: Callable[[Scenario], object] | None = None) -> None:
        """The run fails with this error, which is stored in its attempt's row; nothing else is stored. An error in the user's code may be
        an outage."""
        if not self.sql("SELECT to_regclass(%s)", self.table)[0][0]:
            self.make_sink("payload bytea")
        with pytest.raises(error, match=said) as raised:
            self.run() if run is None else run(self)
        kind = "unavailable" if error.retriable else "refused"
        assert self.attempt() == {"state": "FAILED", "error": {"kind": kind, "type": error.__name__, "text": str(raised.value)}}
        assert self.rows() == self.ledger() == self.failed() == []
        assert set(self.positions().values()) == {0}

    def records(self, topic: str, partition: int = 0) -> dict[int, Stored]:
        """The records that a read_committed reader gets from a partition, by offset."""
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.topics.servers,
                "group.id": f"check-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # the next fetch reports the end of a partition
            }
        )
        found: dict[int, Stored] = {}
        try:
            consumer.assign([TopicPartition(topic, partition, 0)])
            while True:
                message = consumer.poll(120)
                assert message is not None, f"{topic}/{partition} is silent"
                failure = message.error()
                if failure is not None:
                    assert failure.code() == KafkaError._PARTITION_EOF, failure
                    return found
                offset, millis = message.offset() or 0, message.timestamp()[1]
                found[offset] = Stored(
                    offset, datetime.fromtimestamp(millis / 1000, UTC), message.key(), message.value(), message.headers() or []
                )
        finally:
            consumer.close()

    # ---- the invariants

    def check(self, *, filtered: int = 0) -> None:
        """Checks that the tables agree with one another (I3) and with the topics: each record that was read is a row, a failed record or a
        skipped one, except for ``filtered`` records that should leave no trace. A column ``payload`` must contain the record's value."""
        with contextlib.closing(psycopg2.connect(self.database_url)) as connection, connection.cursor() as cur:
            assert check_conservation(cur, self.spec.group, [self.table], upsert=self.spec.upserts) == []
        newest = dict(self.sql("SELECT name, max(topic_id) FROM tidemark.topic GROUP BY name"))
        unmentioned = sum(self._check_partition(topic, newest[topic], partition) for topic, partition in self.positions())
        assert unmentioned == filtered

    def _check_partition(self, topic: str, topic_id: int, partition: int) -> int:
        """The number of records of the partition that were read, but have no row and no failed record and do not count as skipped."""
        log = self.records(topic, partition)
        of_partition = "WHERE topic_id = %s AND partition = %s"
        ranges = self.sql(f"SELECT start_offset, end_offset, skipped FROM tidemark.batch {of_partition}", topic_id, partition)
        read = {offset for start, end, _ in ranges for offset in range(start, end) if offset in log}
        where = f"kafka_topic_id = {topic_id} AND kafka_partition = {partition}"
        columns = {name for (name,) in self.sql("SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass", self.table)}
        payload = "payload" if "payload" in columns else "NULL"
        rows = self.rows(f"kafka_offset, {payload}", where=where)
        for offset, stored in rows:
            assert offset in log or offset < min(log, default=offset + 1), f"row {offset} of {topic}/{partition} comes from no record"
            if "payload" in columns and offset in log:
                assert stored == log[offset].value
        content = "record_offset, record_timestamp, key, value, headers"
        failed = self.sql(f"SELECT {content} FROM tidemark.failed_record {of_partition}", topic_id, partition)
        for offset, timestamp, key, value, headers in failed:
            if offset in log:
                kept = [(name, None if text is None else base64.b64decode(text)) for name, text in headers]
                assert Stored(offset, timestamp, plain(key), plain(value), kept) == log[offset]
        mentioned = {offset for offset, _ in rows} | {row[0] for row in failed}
        return len(read - mentioned) - sum(skipped for _, _, skipped in ranges)


@contextlib.contextmanager
def tidy_imports() -> Iterator[None]:
    """Removes what loading transforms within the block adds to ``sys.path`` and ``sys.modules``."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").find("/transforms/") >= 0:
            del sys.modules[name]


def _no_spark(function: Callable[..., Any], _given: Any) -> Any:
    raise AssertionError(f"{function} is not of the Spark form, and needs no JVM")


def as_json(text: str) -> Any:
    """Parses the output of ``--output json``: all of stdout is one document."""
    return json.loads(text)
