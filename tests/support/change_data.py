"""A database whose changes Debezium writes to Kafka: a separate Postgres with logical decoding, and a Kafka Connect worker."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg2
from confluent_kafka.admin import AdminClient

from tests.support.connect_worker import Worker
from tests.support.fetching import plain
from tests.support.kafka_topics import delete_topics
from tests.support.waiting import until
from tidemark.jvm.jars import Recipe, jars_of
from tidemark.jvm.java import LIGHT
from tidemark.local import LocalStack
from tidemark.local.postgres import Postgres

RECIPE = Recipe(Path(__file__).with_suffix(".xml"), ("worker", "connector", "converter"), "the jars of Kafka Connect and Debezium", "50 MB")
UNAVAILABLE = "__debezium_unavailable_value"
"""Debezium's placeholder for a TOASTed text that an UPDATE did not change."""

_AVRO = "io.apicurio.registry.utils.converter.AvroConverter"
_JSON = "org.apache.kafka.connect.json.JsonConverter"


def json_converter(*, schemas: bool = False) -> dict[str, str]:
    """Keys and values as JSON. A null stays null. By default, the converter would replace it with the column's default, if there is one."""
    own = {"": _JSON, ".schemas.enable": str(schemas).lower(), ".replace.null.with.default": "false"}
    return {f"{side}.converter{name}": setting for side in ("key", "value") for name, setting in own.items()}


def avro_converter(registry: str) -> dict[str, str]:
    """Keys and values as Avro in Confluent's wire format. ``registry`` is the URL that the fixture ``registry`` returns."""
    own = {
        "": _AVRO,
        ".apicurio.registry.url": registry.replace("/apis/ccompat/v7", "/apis/registry/v2"),
        ".apicurio.registry.auto-register": "true",
        ".apicurio.registry.headers.enabled": "false",  # the id precedes the value, in four bytes
        ".apicurio.registry.id-handler": "io.apicurio.registry.serde.Legacy4ByteIdHandler",
        ".apicurio.registry.use-id": "contentId",  # Confluent's API looks up schemas by this id
    }
    both = {f"{side}.converter{name}": setting for side in ("key", "value") for name, setting in own.items()}
    return {**both, "schema.name.adjustment.mode": "avro"}


class LogicalPostgres(Postgres):
    """A Postgres whose WAL can be decoded."""

    def _initialise(self, fresh: Path) -> str | None:
        problem = super()._initialise(fresh)
        if problem is None:
            with (fresh / "postgresql.auto.conf").open("a") as settings:
                settings.write("wal_level = logical\nfsync = off\n")
        return problem


@dataclass(frozen=True)
class Followed:
    """Tables whose changes a connector writes to one topic each. It has already written the initial rows (op ``r``)."""

    source: ChangeSource
    name: str

    def topic(self, table: str) -> str:
        return f"{self.name}.public.{table}"

    def catch_up(self) -> None:
        """Returns when all changes that are committed now are in Kafka. Raises RuntimeError if the connector has failed.

        The slot is confirmed up to the second-to-last transaction that the connector has delivered, so the transaction after the mark moves
        it past the mark. Both are messages, which go to a separate topic.
        """
        mark = self.source.ask("SELECT pg_logical_emit_message(true, 'mark', '')")[0][0]
        self.source.execute("SELECT pg_logical_emit_message(true, 'after the mark', '')")

        def passed() -> bool:
            self.source.worker.check(self.name)
            query = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND confirmed_flush_lsn >= %s::pg_lsn"
            return bool(self.source.ask(query, self.name, mark))

        until(passed)


class ChangeSource:
    def __init__(self, stack: LocalStack, worker: Worker, servers: str) -> None:
        self.url = stack.postgres.url()
        self.worker = worker
        self._connection = psycopg2.connect(self.url)
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def execute(self, statement: str, *parameters: Any) -> None:
        self.transaction([(statement, parameters)])

    def transaction(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> None:
        with self._connection as connection, connection.cursor() as cur:
            for statement, parameters in statements:
                cur.execute(statement, parameters or None)

    def ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._connection as connection, connection.cursor() as cur:
            cur.execute(query, parameters or None)
            return cur.fetchall()

    def rows(self, table: str) -> dict[int, dict[str, Any]]:
        """The rows of a table by their column ``id``, with bytea as bytes."""
        with self._connection as connection, connection.cursor() as cur:
            cur.execute(f"SELECT * FROM {table}")
            names = [column.name for column in cur.description or ()]
            read = [dict(zip(names, map(plain, row), strict=True)) for row in cur]
        return {row["id"]: row for row in read}

    def create(self, columns: str, *, identity: str = "DEFAULT", table: str | None = None) -> str:
        """Creates a table in the schema ``public`` and returns its name. ``identity`` is its REPLICA IDENTITY: DEFAULT or FULL."""
        table = table or f"t_{uuid.uuid4().hex[:10]}"
        self.execute(f"CREATE TABLE {table} ({columns}); ALTER TABLE {table} REPLICA IDENTITY {identity}")
        return table

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def follow(
        self,
        *tables: str,
        converter: Mapping[str, str] | None = None,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Iterator[Followed]:
        """Writes the tables' rows and then their changes to Kafka while the block runs, and deletes the topics after it.

        ``converter`` is a `json_converter` (default: without schemas) or an `avro_converter`. ``config`` has further settings of the
        connector, which override the ones here. ``name`` is the prefix of the topics' names.
        """
        followed = Followed(self, name or f"changes_{uuid.uuid4().hex[:10]}")
        own = self._config(followed.name, tables, partitions)
        self.worker.configure(followed.name, {**own, **(converter or json_converter()), **(config or {})})
        try:
            until(lambda: self._streams(followed.name))
            followed.catch_up()
            yield followed
        finally:
            self.worker.delete(followed.name)
            slot = "FROM pg_replication_slots WHERE slot_name = %s"
            until(lambda: not self.ask(f"SELECT 1 {slot} AND active", followed.name))
            self.ask(f"SELECT pg_drop_replication_slot(slot_name) {slot}", followed.name)
            self.execute(f"DROP PUBLICATION IF EXISTS {followed.name}")
            topics = [topic for topic in self._admin.list_topics(timeout=60).topics if topic.startswith(f"{followed.name}.")]
            if topics:
                delete_topics(self.servers, topics)

    def _streams(self, name: str) -> bool:
        self.worker.check(name)
        return bool(self.ask("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", name))

    def _config(self, name: str, tables: Sequence[str], partitions: int) -> dict[str, str]:
        address = urlsplit(self.url)
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "topic.prefix": name,
            "slot.name": name,
            "slot.drop.on.stop": "false",
            "publication.name": name,
            "publication.autocreate.mode": "filtered",
            "table.include.list": ",".join(f"public.{table}" for table in tables),
            "database.hostname": str(address.hostname),
            "database.port": str(address.port),
            "database.user": unquote(address.username or ""),
            "database.password": unquote(address.password or ""),
            "database.dbname": address.path.lstrip("/"),
            "topic.creation.default.replication.factor": "1",
            "topic.creation.default.partitions": str(partitions),
            "poll.interval.ms": "50",  # 500 by default
        }


def plugins(folder: Path, *configurations: str) -> Path:
    """A folder with a plugin for each of ``connector`` and ``converter``. The converter's plugin gets the manifest that it lacks: unless
    every plugin has one, the worker reads all classes, which takes three seconds."""
    for configuration in configurations:
        plugin = folder / configuration
        plugin.mkdir(parents=True)
        for jar in jars_of(RECIPE, configuration):
            (plugin / jar.name).symlink_to(jar)
    with zipfile.ZipFile(folder / "converter" / "manifest.jar", "w") as manifest:
        manifest.writestr("META-INF/services/org.apache.kafka.connect.storage.Converter", f"{_AVRO}\n")
    return folder


@contextlib.contextmanager
def running(servers: str) -> Iterator[ChangeSource]:
    """Runs the source during the block, with ``servers`` as its Kafka."""
    with tempfile.TemporaryDirectory(prefix="tidemark-changes-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        stack = LocalStack(folder / "stack")
        stack.postgres = LogicalPostgres(stack.postgres.folder, None)
        settings = {
            "plugin.path": str(plugins(folder / "plugins", "connector", "converter")),
            "plugin.discovery": "service_load",
            "offset.flush.interval.ms": "100",  # how often the slot is confirmed
        }
        options, classes = ["-Xmx384m", *LIGHT], jars_of(RECIPE, "worker")
        worker = Worker(folder, servers, classes=classes, settings=settings, java_options=options, log=folder / "worker.log")
        try:
            stack.start(stack.postgres)
            stack.postgres.create_database("tidemark")
            worker.wait()
            with contextlib.closing(ChangeSource(stack, worker, servers)) as source:
                yield source
        finally:
            worker.close()
            stack.stop(stack.postgres)
