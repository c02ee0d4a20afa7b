"""Tidemark end to end: what a driver does, from the attempt's row to its end, on a warm Spark session, or in a driver of its own.

A `Consumer` calls `tidemark.consume.run.consume` with a `tidemark.spark.engine.SparkEngine`. The engine is kept between rounds, as a driver
keeps it between batches. Everything else (look-ups, claims, plan, guard, commits, ledger) is repeated in each round and timed. `drive`
starts a driver as a task starts it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.site import ACCOUNTS, ROOT, TABLE, Job, Site

from tidemark.connections import Connections
from tidemark.consume import run
from tidemark.consume.claims import LookUp
from tidemark.consume.lookup import last_records
from tidemark.db import session, transaction
from tidemark.driver.launch import DriverArguments, run_attempt
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spark.engine import SparkEngine
from tidemark.spec import Batch, ConsumerSpec, load_consumer
from tidemark.values.fields import transform_of
from tidemark.worker.decoding import Decoding

MAX_RECORDS = 2_000_000
"""Records per batch. Each batch is a Spark job. The default of a consumer's file is 500,000."""
TRANSFORMS = ROOT / "benchmarks" / "transforms"
FORMS = {"Arrow": "bench_arrow:transform", "Spark": "bench_spark:transform"}
"""The transform of each form."""


class _Warm(SparkEngine):
    """An engine that the end of a run does not stop."""

    def stop(self) -> None: ...

    def end(self) -> None:
        super().stop()


class Consumer:
    """``keys``: further keys of its file."""

    def __init__(self, site: Site, transform: str | None = None, **keys: str) -> None:
        self._site = site
        self._connections = connections(site)
        self.spec = write_spec(site, transform, "any", **keys)
        self._engine = _Warm(self.spec, self._connections, transform_of(self.spec, [TRANSFORMS]), (), 0, [TRANSFORMS])

    def prepare(self, job: Job) -> None:
        group = start_group(self._site, self.spec.name, job)
        self.reads(self.spec.model_copy(update={"group": group, "topics": (job.topic.name,), "batch": Batch(max_records=MAX_RECORDS)}))
        # Spark ends workers after an idle minute, and the turns of the other contestants take longer
        parts = [TopicPartition(job.topic.name, number) for number in range(job.topic.partitions)]
        logs = {part: Log(part, 0, job.topic.each) for part in parts}
        self._engine.warm_up(last_records(LookUp((), logs, {})))

    def reads(self, spec: ConsumerSpec) -> None:
        """From now on, it is this consumer."""
        self.spec = self._engine._spec = spec  # noqa: SLF001 - a driver's engine has one consumer for life
        self._engine._decoding = Decoding(spec, self._connections.registry, lambda: spec.topics)  # noqa: SLF001

    def run(self, job: Job, *, drain: bool = False, of_rewind: int | None = None) -> None:
        attempt = run.open_attempt(self._site.database_url, self.spec.group, TaskIdentity(), of_rewind=of_rewind)
        run.consume(self.spec, self._connections, attempt, lambda *_: self._engine, drain=drain)

    def close(self) -> None:
        self._engine.end()


_SINK_OF_CHANGES = f"{{table: {ACCOUNTS}, mode: upsert, key: [id], deletes: hard}}"
Arrow = partial(Consumer, transform=FORMS["Arrow"])
Spark = partial(Consumer, transform=FORMS["Spark"])
Avro = partial(Consumer, format="{value: avro}")
Protobuf = partial(Consumer, format="{value: protobuf}")
Json = partial(Consumer, format="{value: json}")
Changes = partial(Consumer, format="{value: json, key: json, envelope: debezium}", sink=_SINK_OF_CHANGES)
AvroChanges = partial(Consumer, format="{value: avro, key: avro, envelope: debezium}", sink=_SINK_OF_CHANGES)


def connections(site: Site) -> Connections:
    registry = {"url": site.registry} if site.registry else None
    return Connections(site.database_url, {"bootstrap.servers": site.servers}, f"local[{site.cores}]", registry=registry)


def start_group(site: Site, name: str, job: Job) -> str:
    """A new group, whose positions are at the start of the topic."""
    with session(site.database_url) as connection, transaction(connection) as cur:
        group = f"bench-{name}-{store.next_generation(cur)}"
        group_id = store.ensure_group(cur, group)
        for number in range(job.topic.partitions):
            store.start_partition(cur, group_id, job.topic.topic_id, number, 0)
    return group


def write_spec(site: Site, transform: str | None, topic: str, group: str | None = None, **keys: str) -> ConsumerSpec:
    """Writes a consumer's file, named after its transform, if it has one, and loads it."""
    name = transform.replace(":", "_") if transform else "bench_without_code"
    file = Path(site.folder, "consumers", f"{name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    own = {"group": group or name, "topics": f"[{topic}]", "sink": f"{{table: {TABLE}}}"} | ({"transform": transform} if transform else {})
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**own, **keys}.items()))
    return load_consumer(file)


def drive(site: Site, spec: ConsumerSpec, **options: Any) -> None:
    """Runs one attempt of a consumer in its own driver. ``options`` are passed to `tidemark.driver.launch.run_attempt`."""
    arguments = DriverArguments(
        spec.name, run.open_attempt(site.database_url, spec.group, TaskIdentity()), Path(site.folder, "consumers"), [TRANSFORMS]
    )
    run_attempt(arguments, connections(site), on_log=lambda _: None, on_progress=lambda _: None, **options)
