"""The messages to a seat: where the servers are, and what to load into which table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 4
"""Of most topics."""
SCHEMA = "bench"
TABLE = "bench.events"
CONNECT_TABLE = "bench.events_connect"
"""Debezium's sink chooses the names of its lineage columns."""
ACCOUNTS = "bench.accounts"
CONNECT_ACCOUNTS = "bench.accounts_connect"
"""Debezium's sink cannot fill lineage columns of an upsert."""

COLUMNS = (
    ("event_id", "bigint"),
    ("happened_at", "timestamp with time zone"),
    ("customer", "text"),
    ("kind", "text"),
    ("amount", "double precision"),
    ("quantity", "integer"),
    ("note", "text"),
)
LINEAGE = ("kafka_topic_id", "kafka_partition", "kafka_offset", "kafka_seq")


@dataclass(frozen=True, slots=True)
class Topic:
    """An evenly filled topic: ``records`` of about ``width`` bytes, numbered round robin over ``partitions``."""

    name: str
    partitions: int
    records: int
    width: int
    topic_id: int = 0
    form: str = "json"
    """Events: ``json``, ``connect`` (JSON in the envelope that Kafka Connect's sinks ask for), ``avro``, ``protobuf``, or ``empty``, for a
    rewind, which only looks at offsets.
    Change data (`benchmarks.records.accounts`): ``accounts`` (JSON with schemas) or ``accounts-avro``."""
    schema_ids: dict[str, int] = field(default_factory=dict)
    """Schema ids in the registry, for ``key`` and ``value``."""

    @property
    def each(self) -> int:
        """Records of one partition."""
        return self.records // self.partitions

    @property
    def changes(self) -> bool:
        """Whether it has change data."""
        return self.form.startswith("accounts")

    @property
    def remaining(self) -> str:
        """The table with the rows that remain after its changes."""
        return f'expected."{self.name}"'


@dataclass(frozen=True, slots=True)
class Job:
    """One round of one contestant: load the records of a topic, by so many connections at the same time."""

    topic: Topic
    connections: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "topic": Topic(**fields["topic"])})


@dataclass(frozen=True, slots=True)
class Site:
    """The servers, and a folder for a seat's files."""

    database_url: str = field(repr=False)
    servers: str
    folder: str
    cores: int
    jars: dict[str, list[str]] = field(default_factory=dict)
    registry: str | None = None

    @property
    def database(self) -> dict[str, str]:
        """``host, port, user, password, dbname``, for drivers other than libpq."""
        parts = urlsplit(self.database_url)
        return {
            "host": str(parts.hostname),
            "port": str(parts.port),
            "user": unquote(parts.username or ""),
            "password": unquote(parts.password or ""),
            "dbname": parts.path.lstrip("/"),
        }

    def jdbc_url(self, options: str = "") -> str:
        database = self.database
        return f"jdbc:postgresql://{database['host']}:{database['port']}/{database['dbname']}{options}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Site:
        return Site(**json.loads(text))
