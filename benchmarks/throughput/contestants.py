"""The contestants: what each of them runs, which topic it reads, and which table it loads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from benchmarks.harness.site import ACCOUNTS, CONNECT_ACCOUNTS, CONNECT_TABLE, TABLE

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
    exactly_once: str = "yes"
    connections: int = 1

    @property
    def package(self) -> str | None:
        """What has to be fetched for it."""
        module = self.seat.partition(":")[0].rpartition(".")[2]
        return module if module in ("jdbc", "connect") else None


_LIMIT, _WRITER = "throughput.in_memory:Limit", "throughput.in_memory:Writer"
_TIDEMARK, _PEERS = "harness.consumer:", "throughput.peers."
_DEBEZIUM = f"{_PEERS}connect:Debezium"
ALL = (
    Contestant("limit", "a", "raw COPY BINARY from memory, 1 connection", _LIMIT, exactly_once="-"),
    Contestant("limit_2", "a", "raw COPY BINARY from memory, 2 connections", _LIMIT, exactly_once="-", connections=2),
    Contestant("writer", "b", "Tidemark's writer alone, 1 connection", _WRITER),
    Contestant("spark_transform", "c", "Tidemark, Spark transform (from_json)", f"{_TIDEMARK}Spark"),
    Contestant("arrow_transform", "d", "Tidemark, Arrow transform", f"{_TIDEMARK}Arrow"),
    Contestant("avro_without_code", "d", "Tidemark, Avro without code", f"{_TIDEMARK}Avro", Reads.AVRO),
    Contestant("protobuf_without_code", "d", "Tidemark, Protobuf without code", f"{_TIDEMARK}Protobuf", Reads.PROTOBUF),
    Contestant("json_without_code", "d", "Tidemark, JSON without code", f"{_TIDEMARK}Json"),
    Contestant("jdbc_tuned", "e", "Spark df.write.jdbc, tuned", f"{_PEERS}jdbc:Jdbc", exactly_once="no"),
    Contestant("execute_values_2", "f", "confluent-kafka + execute_values, 2 processes", f"{_PEERS}loop:Loop", Reads.PART, connections=2),
    Contestant(
        "debezium_tuned", "g", "Debezium JDBC sink, Kafka Connect, tuned", _DEBEZIUM, Reads.WITH_SCHEMA, CONNECT_TABLE, exactly_once="no"
    ),
    Contestant("changes", "h", "Tidemark, change data without code", f"{_TIDEMARK}Changes", Reads.CHANGES, ACCOUNTS),
    Contestant("changes_avro", "h", "Tidemark, change data in Avro without code", f"{_TIDEMARK}AvroChanges", Reads.CHANGES_AVRO, ACCOUNTS),
    Contestant(
        "debezium_changes", "i", "Debezium JDBC sink, change data, tuned", _DEBEZIUM, Reads.CHANGES, CONNECT_ACCOUNTS, exactly_once="no"
    ),
    Contestant(
        "debezium_changes_avro",
        "i",
        "Debezium JDBC sink, change data in Avro, tuned",
        _DEBEZIUM,
        Reads.CHANGES_AVRO,
        CONNECT_ACCOUNTS,
        exactly_once="no",
    ),
)
BY_NAME = {one.name: one for one in ALL}
