"""The contestants: what each of them runs, which topic it reads, and the ratios between them, with their bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from benchmarks.harness.site import ACCOUNTS, CONNECT_ACCOUNTS, CONNECT_TABLE, SECOND_TABLE, TABLE

BOTH_TABLES = (
    f"(SELECT event_id FROM {TABLE} WHERE event_id & 4 = 0"
    f" UNION ALL SELECT event_id FROM {SECOND_TABLE} WHERE event_id & 4 = 4) AS both_tables"
)
"""The rows of ``two_tables`` that are in the right table."""
SHARE = 4
"""Contestants that would need a minute for all records read one record in 4, generated the same way. Their rates are the same."""


class Reads(Enum):
    """Which topic a contestant reads: its name, the form of its records, and which share of the records it has."""

    ALL = ("events", "json", 1)
    PART = ("events-part", "json", SHARE)
    WITH_SCHEMA = ("events-schema", "connect", SHARE)
    """In the envelope that Kafka Connect's sinks require."""
    AVRO = ("events-avro", "avro", 1)
    PROTOBUF = ("events-protobuf", "protobuf", 1)
    CHANGES = ("accounts", "accounts", SHARE)
    """Change data in Debezium's format, as JSON with schemas."""
    CHANGES_AVRO = ("accounts-avro", "accounts-avro", SHARE)

    @property
    def registry(self) -> bool:
        """Whether the records refer to a schema registry."""
        return self in (Reads.AVRO, Reads.PROTOBUF, Reads.CHANGES_AVRO)


@dataclass(frozen=True, slots=True)
class Contestant:
    """``seat``: ``module:name`` of what is built in its process. Contestants with the same seat share it."""

    name: str
    letter: str
    title: str
    seat: str
    reads: Reads = Reads.ALL
    table: str = TABLE
    exactly_once: str = "no"
    parameters: dict[str, int | str | bool] = field(default_factory=dict)

    @property
    def package(self) -> str | None:
        """What has to be installed for it."""
        module = self.seat.partition(":")[0].rpartition(".")[2]
        return module if module in ("jdbc", "connect", "quix") else None


def _rows(name: str, letter: str, title: str, seat: str, connections: int, exactly_once: str) -> Contestant:
    title = f"{title}, {connections} connection{'s' if connections > 1 else ''}"
    parameters: dict[str, int | str | bool] = {"connections": connections}
    return Contestant(name, letter, title, f"throughput.in_memory:{seat}", exactly_once=exactly_once, parameters=parameters)


def _tidemark(name: str, letter: str, title: str, seat: str, reads: Reads = Reads.ALL, table: str = TABLE) -> Contestant:
    return Contestant(name, letter, f"Tidemark, {title}", f"harness.consumer:{seat}", reads, table, "yes")


def _peer(name: str, letter: str, title: str, seat: str, reads: Reads = Reads.ALL, table: str = TABLE, **parameters: bool) -> Contestant:
    return Contestant(name, letter, title, f"throughput.peers.{seat}", reads, table, parameters=dict(parameters))


def _loop(name: str, processes: int) -> Contestant:
    title = f"confluent-kafka + execute_values, {processes} process{'es' if processes > 1 else ''}"
    parameters: dict[str, int | str | bool] = {"processes": processes}
    return Contestant(name, "g", title, "throughput.peers.loop:Loop", Reads.PART, exactly_once="yes", parameters=parameters)


_SINK, _DEBEZIUM = "Debezium JDBC sink", "connect:Debezium"
ALL = (
    _rows("limit", "a", "raw COPY BINARY from memory", "Limit", 1, "-"),
    _rows("limit_2", "a", "raw COPY BINARY from memory", "Limit", 2, "-"),
    _rows("writer", "b", "Tidemark's writer alone", "Writer", 1, "yes"),
    _rows("writer_2", "b", "Tidemark's writer alone", "Writer", 2, "yes"),
    _tidemark("spark_transform", "c", "Spark transform (from_json)", "Spark"),
    _tidemark("arrow_transform", "d", "Arrow transform", "Arrow"),
    _tidemark("two_tables", "d", "Arrow transform, two tables", "TwoTables", table=BOTH_TABLES),
    _tidemark("avro_transform", "d", "Arrow transform of Avro", "AvroTransform", Reads.AVRO),
    _tidemark("protobuf_transform", "d", "Arrow transform of Protobuf", "ProtobufTransform", Reads.PROTOBUF),
    _tidemark("avro_without_code", "d", "Avro without code", "Avro", Reads.AVRO),
    _tidemark("protobuf_without_code", "d", "Protobuf without code", "Protobuf", Reads.PROTOBUF),
    _tidemark("json_without_code", "d", "JSON without code", "Json"),
    _peer("jdbc", "e", "Spark df.write.jdbc, defaults", "jdbc:Jdbc"),
    _peer("jdbc_tuned", "f", "Spark df.write.jdbc, tuned", "jdbc:Tuned"),
    _loop("execute_values", 1),
    _loop("execute_values_2", 2),
    _peer("debezium", "h", f"{_SINK}, Kafka Connect, defaults", _DEBEZIUM, Reads.WITH_SCHEMA, CONNECT_TABLE),
    _peer("debezium_tuned", "h", f"{_SINK}, Kafka Connect, tuned", _DEBEZIUM, Reads.WITH_SCHEMA, CONNECT_TABLE, tuned=True),
    _peer("quix", "i", "Quix Streams, PostgreSQLSink", "quix:Quix", Reads.PART),
    _tidemark("changes", "j", "change data without code", "Changes", Reads.CHANGES, ACCOUNTS),
    _tidemark("changes_avro", "j", "change data in Avro without code", "AvroChanges", Reads.CHANGES_AVRO, ACCOUNTS),
    _peer("debezium_changes", "k", f"{_SINK}, change data, tuned", _DEBEZIUM, Reads.CHANGES, CONNECT_ACCOUNTS, tuned=True),
    _peer(
        "debezium_changes_avro", "k", f"{_SINK}, change data in Avro, tuned", _DEBEZIUM, Reads.CHANGES_AVRO, CONNECT_ACCOUNTS, tuned=True
    ),
)
BY_NAME = {one.name: one for one in ALL}
