"""Tidemark end to end: what a driver does, from the attempt's row to its end, on a warm Spark session.

Calls `tidemark.consume.run.consume` with a `tidemark.spark.engine.SparkEngine`. The engine is kept between rounds, as a driver keeps it
between batches. Everything else (look-ups, claims, plan, guard, commits, ledger) is repeated in each round and timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2

from benchmarks.site import ACCOUNTS, SECOND_TABLE, TABLE, Job, Site
from tidemark.connections import Connections
from tidemark.consume import run
from tidemark.consume.claims import LookUp
from tidemark.consume.lookup import last_records
from tidemark.errors import TidemarkError
from tidemark.offsets import store
from tidemark.offsets.reset import Log
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import TopicPartition
from tidemark.sink.commit import Receipt
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.spark.engine import SparkEngine
from tidemark.spec import Batch, ConsumerSpec, Sink, SinkMode, load_consumer
from tidemark.values.fields import transform_of
from tidemark.worker.decoding import Decoding

if TYPE_CHECKING:
    from tidemark.db import Connection

from tidemark.records.ranges import Slice

MAX_RECORDS = 2_000_000
"""Records per batch. Each batch is a Spark job. The default of a consumer's file is 500,000."""
TRANSFORMS = Path(__file__).with_name("transforms")
_ACCOUNTS = f"{{table: {ACCOUNTS}, mode: upsert, key: [id], deletes: hard}}"


class _Warm:
    """An engine that the end of a run does not stop."""

    def __init__(self, engine: SparkEngine) -> None:
        self._engine = engine

    def warm_up(self, sample: Sequence[Slice]) -> None:
        self._engine.warm_up(sample)

    def layouts(self, connection: Connection) -> tuple[Layout, ...]:
        return self._engine.layouts(connection)

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        return self._engine.run(target, slices, isolate=isolate)

    def stop(self) -> None: ...


class _Product:
    transform: str | None = None
    keys: Mapping[str, str] = {}

    def __init__(self, site: Site) -> None:
        self._site = site
        registry = {"url": site.registry} if site.registry else None
        master = site.master or f"local[{site.cores}]"
        kafka = {"bootstrap.servers": site.servers}
        self._connections = Connections(site.database_url, kafka, master, site.spark_conf, registry=registry)
        self._spec = write_spec(Path(site.folder), self.transform, ["any"], **self.keys)
        self._engine = _Warm(
            SparkEngine(self._spec, self._connections, transform_of(self._spec, [TRANSFORMS]), (), 0, [TRANSFORMS]),
        )
        self._attempt = 0
        self._this: ConsumerSpec = self._spec

    def prepare(self, job: Job) -> None:
        with contextlib.closing(psycopg2.connect(self._site.database_url)) as connection, connection, connection.cursor() as cur:
            group = f"bench-{self._spec.name}-{store.next_generation(cur)}"
            group_id = store.ensure_group(cur, group)
            for number in range(job.topic.partitions):
                store.start_partition(cur, group_id, job.topic.topic_id, number, job.first)
        batch = Batch(max_records=int(job.parameters.get("max_records", MAX_RECORDS)))
        key = str(job.parameters.get("upsert", ""))
        sink = Sink(table=TABLE, mode=SinkMode.UPSERT, key=(key,)) if key else self._spec.sink
        self._this = self._spec.model_copy(update={"group": group, "topics": (job.topic.name,), "batch": batch, "sink": sink})
        engine = self._engine._engine  # noqa: SLF001 - a driver's engine has one consumer for life
        engine._spec = self._this  # noqa: SLF001
        engine._decoding = Decoding(self._this, self._connections.registry, lambda: self._this.topics)  # noqa: SLF001
        # Spark ends workers after an idle minute, and the turns of the other contestants take longer
        parts = [TopicPartition(job.topic.name, number) for number in range(job.topic.partitions)]
        logs = {part: Log(part, 0, job.topic.each) for part in parts}
        self._engine.warm_up(last_records(LookUp((), logs, {})))

    def run(self, job: Job) -> None:
        attempt = run.open_attempt(self._site.database_url, self._this.group, TaskIdentity())
        run.consume(self._this, self._connections, attempt, lambda _records: self._engine)

    def close(self) -> None:
        self._engine._engine.stop()  # noqa: SLF001


class Arrow(_Product):
    transform = "bench_arrow"


class Spark(_Product):
    transform = "bench_spark"


class TwoTables(_Product):
    transform = "bench_two_tables"
    keys: Mapping[str, str] = {"sinks": f"{{even: {{table: {TABLE}}}, odd: {{table: {SECOND_TABLE}}}}}"}


class AvroTransform(_Product):
    transform = "bench_decoded"
    keys: Mapping[str, str] = {"format": "{value: avro}"}


class ProtobufTransform(_Product):
    transform = "bench_decoded"
    keys: Mapping[str, str] = {"format": "{value: protobuf}"}


class Avro(_Product):
    keys: Mapping[str, str] = {"format": "{value: avro}"}


class Protobuf(_Product):
    keys: Mapping[str, str] = {"format": "{value: protobuf}"}


class Changes(_Product):
    keys: Mapping[str, str] = {"format": "{value: json, key: json, envelope: debezium}", "sink": _ACCOUNTS}


class AvroChanges(_Product):
    keys: Mapping[str, str] = {"format": "{value: avro, key: avro, envelope: debezium}", "sink": _ACCOUNTS}


class Json(_Product):
    keys: Mapping[str, str] = {"format": "{value: json}"}


def write_spec(folder: Path, transform: str | None, topics: Sequence[str], group: str | None = None, **keys: str) -> ConsumerSpec:
    """Writes a consumer's file in ``folder/consumers``, named after its transform, if it has one, and loads it."""
    name = transform or "bench_without_code"
    file = folder / "consumers" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    own = {"group": group or name, "topics": f"[{', '.join(topics)}]"}
    own |= {} if "sinks" in keys else {"sink": f"{{table: {TABLE}}}"}
    own |= {"transform": f"{transform}:transform"} if transform else {}
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**own, **keys}.items()))
    return load_consumer(file)
