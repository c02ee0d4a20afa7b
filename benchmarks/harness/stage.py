"""The stage: Postgres and Kafka of the embedded stack, the topics, and the table that all contestants load."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg2
from benchmarks.harness.processes import Clocks, read_clocks, seconds_of, tree
from benchmarks.harness.site import (
    ACCOUNTS,
    COLUMNS,
    CONNECT_ACCOUNTS,
    CONNECT_TABLE,
    LINEAGE,
    SCHEMA,
    TABLE,
    Job,
    Topic,
)
from benchmarks.records import accounts, events
from psycopg2.extensions import connection as Connection

from tidemark import migrations
from tidemark.kafka.cluster import Cluster
from tidemark.local import LocalStack
from tidemark.offsets import store

SETTLE_S = 0.3


class Stage:
    """Running servers with a migrated database. Not thread-safe."""

    def __init__(self, stack: LocalStack, report: Callable[[str], None]) -> None:
        self._report = report
        self._stack, env = stack, stack.env()
        self.database_url, self.servers = env["TIDEMARK_DATABASE_URL"], env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]
        self.registry: str | None = None
        postgres, broker, *_ = stack.status()
        self.versions = {"Postgres": postgres.version, "Kafka": broker.version}
        self._pids = (broker.pid or 0, postgres.pid or 0)
        migrations.migrate(self.database_url)
        self._connection: Connection = psycopg2.connect(self.database_url)
        self._connection.autocommit = True
        self.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}; {DDL}")

    def close(self) -> None:
        self._connection.close()

    def start_registry(self) -> str:
        """The address of a schema registry, which runs until the end."""
        self._stack.start(self._stack.registry)
        self.registry = self._stack.env()["TIDEMARK_REGISTRY_URL"]
        return self.registry

    def clocks(self, seat_pid: int) -> Clocks:
        return read_clocks(*self._pids, seat_pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The servers' processes, by server."""
        return {name: tree(pid) for name, pid in zip(("Kafka", "Postgres"), self._pids, strict=True)}

    def cpu_s(self) -> float:
        """CPU seconds of the servers up to now."""
        return sum(seconds_of(one, ended=True) for family in self.processes().values() for one in family)

    def wal_position(self) -> int:
        """Bytes of write-ahead log written so far."""
        with self._connection.cursor() as cur:
            cur.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
            (position,) = cur.fetchone() or (0,)
        return int(position)

    def topic(self, topic: Topic) -> Topic:
        """Fills the topic and returns it with its id in Tidemark's schema."""
        begun = time.monotonic()
        topic = replace(topic, schema_ids=self._register(topic))
        events.fill(self.servers, topic)
        (kafka,) = Cluster({"bootstrap.servers": self.servers}).topics([topic.name])
        with self._connection.cursor() as cur:
            topic_id = store.ensure_topic(cur, kafka.name, kafka.kafka_uuid)
        if topic.changes:
            self._expect(topic)
        if (seconds := time.monotonic() - begun) > 1:
            self._report(f"topic {topic.name}: {topic.records:,} records in {topic.partitions} partitions ({seconds:.0f} s)")
        return replace(topic, topic_id=topic_id)

    def _register(self, topic: Topic) -> dict[str, int]:
        """Registers the topic's schemas and returns their ids."""
        from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

        kind, texts = events.schemas(topic.form)
        if not texts:
            return {}
        with SchemaRegistryClient({"url": self.registry}) as client:
            return {side: client.register_schema(f"{topic.name}-{side}", Schema(text, kind)) for side, text in texts.items()}

    def _expect(self, topic: Topic) -> None:
        """Stores the rows that should remain after all changes."""
        self.execute(f"CREATE SCHEMA IF NOT EXISTS expected; DROP TABLE IF EXISTS {topic.remaining}")
        self.execute(f"CREATE TABLE {topic.remaining} ({_columns(accounts.COLUMNS)})")
        with self._connection.cursor() as cur:
            cur.copy_expert(f"COPY {topic.remaining} FROM STDIN", io.StringIO("".join(accounts.remaining(topic))))

    def empty(self) -> None:
        """Empties the tables and makes a checkpoint, so that no contestant pays for it."""
        # deletions would affect the next round, which reads the same records
        self.execute(f"TRUNCATE {', '.join((TABLE, CONNECT_TABLE, ACCOUNTS, CONNECT_ACCOUNTS))}, tidemark.deletion")
        self.execute("CHECKPOINT")
        time.sleep(SETTLE_S)

    def wrong(self, job: Job, table: str) -> str | None:
        """How the table differs from what the job's records should give; `None` if it does not."""
        if job.topic.changes:
            return self._differs(job.topic, table)
        with self._connection.cursor() as cur:
            cur.execute(f"SELECT count(*), coalesce(sum(event_id), 0)::bigint FROM {table}")
            found, rows = cur.fetchone(), job.topic.records
        expected = (rows, sum(range(rows)))  # events are numbered from 0
        return None if found == expected else f"rows and the sum of their numbers are {found}; expected {expected}"

    def _differs(self, topic: Topic, table: str) -> str | None:
        rows = f"SELECT {', '.join(name for name, _ in accounts.COLUMNS)} FROM {table}"
        expected = f"TABLE {topic.remaining}"
        differences = f"({rows} EXCEPT ALL {expected}) UNION ALL ({expected} EXCEPT ALL {rows})"
        with self._connection.cursor() as cur:
            cur.execute(f"SELECT count(*), min(one::text) FROM ({differences}) one")
            count, example = cur.fetchone() or (0, None)
        return f"{count:,} rows are not as expected, or too many, or missing, as {example}" if count else None

    def execute(self, statement: str) -> None:
        with self._connection.cursor() as cur:
            cur.execute(statement)


@contextlib.contextmanager
def created(server_url: str, name: str) -> Iterator[str]:
    """Creates a database, and drops it after the block."""
    with autocommit(server_url) as cur:
        cur.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        cur.execute(f"CREATE DATABASE {name}")
        try:
            yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
        finally:
            cur.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextlib.contextmanager
def autocommit(url: str) -> Iterator[Any]:
    """A cursor each of whose statements is a transaction."""
    with contextlib.closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            yield cur


def _columns(of: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in of)


_LINEAGE = "kafka_topic_id smallint NOT NULL, kafka_partition int NOT NULL, kafka_offset bigint NOT NULL, kafka_seq int NOT NULL"
_OWN = f"{_LINEAGE}, UNIQUE ({', '.join(LINEAGE)})"
_DEBEZIUM = "__connect_topic text, __connect_partition int, __connect_offset bigint"
DDL = f"""
CREATE TABLE {TABLE} ({_columns(COLUMNS)}, {_OWN});
CREATE TABLE {CONNECT_TABLE} ({_DEBEZIUM}, {_columns(COLUMNS)}, PRIMARY KEY (__connect_topic, __connect_partition, __connect_offset));
CREATE TABLE {ACCOUNTS} ({_columns(accounts.COLUMNS)}, PRIMARY KEY (id), {_OWN});
CREATE TABLE {CONNECT_ACCOUNTS} ({_columns(accounts.COLUMNS)}, PRIMARY KEY (id));
CREATE TABLE {SCHEMA}.position (kafka_partition int PRIMARY KEY, next_offset bigint NOT NULL, epoch bigint NOT NULL)
"""
"""The common table, and the one with Debezium's names of lineage columns, both with a unique index on lineage; the two tables for change
data; and the positions of contestants that keep their own."""


@contextlib.contextmanager
def set_up(folder: Path | None, report: Callable[[str], None]) -> Iterator[Stage]:
    """The stage. Its data is in ``folder``, which keeps the topics, or in a temporary folder."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-", ignore_cleanup_errors=True)))
            folder.chmod(0o755)  # if root runs this, Postgres runs as another user
        local = stack.enter_context(LocalStack(folder.resolve()).running(report))
        yield stack.enter_context(contextlib.closing(Stage(local, report)))
