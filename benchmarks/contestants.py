"""The contestants: the limit, Tidemark, and the usual alternatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.site import ACCOUNTS, CONNECT_ACCOUNTS, CONNECT_TABLE, SECOND_TABLE, TABLE

BOTH_TABLES = (
    f"(SELECT event_id FROM {TABLE} WHERE event_id & 4 = 0"
    f" UNION ALL SELECT event_id FROM {SECOND_TABLE} WHERE event_id & 4 = 4) AS both_tables"
)
"""The rows of ``two_tables`` that are in the right table."""


class Reads(StrEnum):
    """Which topic a contestant reads."""

    ALL = "all"
    PART = "part"
    """A quarter of the records, generated the same way, for contestants that would need a minute for all. Their rates are the same."""
    WITH_SCHEMA = "with schema"
    """As `PART`, in the envelope that Kafka Connect's sinks require."""
    AVRO = "avro"
    """As `ALL`, in Avro with a schema registry."""
    PROTOBUF = "protobuf"
    """As `AVRO`, in Protobuf."""
    CHANGES = "change data"
    """A quarter of the number of records, in Debezium's format, as JSON with schemas."""
    CHANGES_AVRO = "change data in avro"
    """The same in Avro."""


REGISTRY = (Reads.AVRO, Reads.PROTOBUF, Reads.CHANGES_AVRO)


class Needs(StrEnum):
    JDBC = "jdbc"
    CONNECT = "connect"
    QUIX = "quix"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    letter: str
    title: str
    seat: str
    """``module:Class`` below `benchmarks`."""
    exactly_once: str
    reads: Reads = Reads.ALL
    needs: Needs | None = None
    parameters: dict[str, int | str | bool] = field(default_factory=dict)
    table: str = TABLE

    @property
    def place(self) -> tuple[str, bool]:
        """Contestants with the same place share a seat."""
        return self.seat, self.needs is Needs.QUIX


ALL = (
    Contestant("limit", "a", "raw COPY BINARY from memory, 1 connection", "limit:Limit", "-", parameters={"connections": 1}),
    Contestant("limit_2", "a", "raw COPY BINARY from memory, 2 connections", "limit:Limit", "-", parameters={"connections": 2}),
    Contestant("writer", "b", "Tidemark's writer alone, 1 connection", "limit:Writer", "yes", parameters={"connections": 1}),
    Contestant("writer_2", "b", "Tidemark's writer alone, 2 connections", "limit:Writer", "yes", parameters={"connections": 2}),
    Contestant("spark_transform", "c", "Tidemark, Spark transform (from_json)", "product:Spark", "yes"),
    Contestant("arrow_transform", "d", "Tidemark, Arrow transform", "product:Arrow", "yes"),
    Contestant("two_tables", "d", "Tidemark, Arrow transform, two tables", "product:TwoTables", "yes", table=BOTH_TABLES),
    Contestant("avro_transform", "d", "Tidemark, Arrow transform of Avro", "product:AvroTransform", "yes", Reads.AVRO),
    Contestant("protobuf_transform", "d", "Tidemark, Arrow transform of Protobuf", "product:ProtobufTransform", "yes", Reads.PROTOBUF),
    Contestant("avro_without_code", "d", "Tidemark, Avro without code", "product:Avro", "yes", Reads.AVRO),
    Contestant("protobuf_without_code", "d", "Tidemark, Protobuf without code", "product:Protobuf", "yes", Reads.PROTOBUF),
    Contestant("json_without_code", "d", "Tidemark, JSON without code", "product:Json", "yes"),
    Contestant("jdbc", "e", "Spark df.write.jdbc, defaults", "jdbc:Defaults", "no", needs=Needs.JDBC),
    Contestant("jdbc_tuned", "f", "Spark df.write.jdbc, tuned", "jdbc:Tuned", "no", needs=Needs.JDBC),
    Contestant(
        "execute_values", "g", "confluent-kafka + execute_values, 1 process", "loop:Loop", "yes", Reads.PART, parameters={"processes": 1}
    ),
    Contestant(
        "execute_values_2",
        "g",
        "confluent-kafka + execute_values, 2 processes",
        "loop:Loop",
        "yes",
        Reads.PART,
        parameters={"processes": 2},
    ),
    Contestant(
        "debezium",
        "h",
        "Debezium JDBC sink, Kafka Connect, defaults",
        "connect:Debezium",
        "no",
        Reads.WITH_SCHEMA,
        Needs.CONNECT,
        {},
        CONNECT_TABLE,
    ),
    Contestant(
        "debezium_tuned",
        "h",
        "Debezium JDBC sink, Kafka Connect, tuned",
        "connect:Debezium",
        "no",
        Reads.WITH_SCHEMA,
        Needs.CONNECT,
        {"tuned": True},
        CONNECT_TABLE,
    ),
    Contestant("quix", "i", "Quix Streams, PostgreSQLSink", "quix:Quix", "no", Reads.PART, Needs.QUIX),
    Contestant("changes", "j", "Tidemark, change data without code", "product:Changes", "yes", Reads.CHANGES, table=ACCOUNTS),
    Contestant(
        "changes_avro", "j", "Tidemark, change data in Avro without code", "product:AvroChanges", "yes", Reads.CHANGES_AVRO, table=ACCOUNTS
    ),
    Contestant(
        "debezium_changes",
        "k",
        "Debezium JDBC sink, change data, tuned",
        "connect:Debezium",
        "no",
        Reads.CHANGES,
        Needs.CONNECT,
        {"tuned": True},
        CONNECT_ACCOUNTS,
    ),
    Contestant(
        "debezium_changes_avro",
        "k",
        "Debezium JDBC sink, change data in Avro, tuned",
        "connect:Debezium",
        "no",
        Reads.CHANGES_AVRO,
        Needs.CONNECT,
        {"tuned": True},
        CONNECT_ACCOUNTS,
    ),
)
BY_NAME = {one.name: one for one in ALL}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of one divided by the median of the other, and the bar on 2 cores."""

    of: str
    to: str
    name: str
    bar: float | None = None


RATIOS = (
    Ratio("writer", "limit", "writer/limit", 0.95),
    Ratio("writer_2", "limit_2", "writer_2/limit_2"),
    Ratio("spark_transform", "jdbc_tuned", "spark_transform/jdbc_tuned", 1.4),
    Ratio("arrow_transform", "jdbc_tuned", "arrow_transform/jdbc_tuned", 3.0),
    Ratio("arrow_transform", "execute_values_2", "arrow_transform/execute_values_2", 7.0),
    Ratio("arrow_transform", "limit_2", "arrow_transform/limit", 0.65),
    Ratio("avro_without_code", "arrow_transform", "avro_without_code/arrow_transform", 1.0),
    Ratio("json_without_code", "arrow_transform", "json_without_code/arrow_transform"),
    Ratio("protobuf_without_code", "arrow_transform", "protobuf_without_code/arrow_transform"),
    Ratio("avro_transform", "arrow_transform", "avro_transform/arrow_transform"),
    Ratio("protobuf_transform", "arrow_transform", "protobuf_transform/arrow_transform"),
    Ratio("two_tables", "arrow_transform", "two_tables/arrow_transform"),
    Ratio("arrow_transform", "debezium_tuned", "arrow_transform/debezium_tuned"),
    Ratio("arrow_transform", "quix", "arrow_transform/quix"),
    Ratio("changes", "debezium_changes", "changes/debezium_changes", 3.0),
    Ratio("changes_avro", "debezium_changes_avro", "changes_avro/debezium_changes_avro", 3.0),
)
