"""Change data: how envelopes and Kafka Connect's types are loaded, from JSON and Avro."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.encoded import batch, record, written

from tidemark.formats import avro
from tidemark.formats.connect import InvalidConnectValue
from tidemark.formats.decoder import Decoder
from tidemark.formats.schema import parse
from tidemark.formats.shape import plain, resolved, type_of
from tidemark.sink.table import Column
from tidemark.spec import SpecInvalid, load_consumer
from tidemark.spec.model import Encoding
from tidemark.values.connect_json import UNAVAILABLE
from tidemark.values.debezium import NoEnvelope
from tidemark.values.fields import Fields, steps_of, transform_of

CONNECT = "org.apache.kafka.connect.data"
UTC = dt.UTC


def base64_of(number: int) -> str:
    return base64.b64encode(number.to_bytes(8, "big", signed=True)).decode()


EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001
MOMENT = "2026-01-02T03:04:05.678901Z"
TYPES: dict[str, tuple[str, str, Any, str, Any]] = {
    # name: type in JSON, type in Avro, value in JSON, type of the column, value in the table
    "io.debezium.time.Date": ("int32", "int", 20_000, "date", dt.date(2024, 10, 4)),
    "io.debezium.time.Time": ("int32", "int", 3_600_001, "time(3) without time zone", dt.time(1, 0, 0, 1_000)),
    "io.debezium.time.MicroTime": ("int64", "long", 3_600_000_001, "time without time zone", dt.time(1, 0, 0, 1)),
    "io.debezium.time.NanoTime": ("int64", "long", 1_000, "time without time zone", dt.time(0, 0, 0, 1)),
    "io.debezium.time.Timestamp": ("int64", "long", -1, "timestamp(3) without time zone", EPOCH - dt.timedelta(milliseconds=1)),
    "io.debezium.time.MicroTimestamp": ("int64", "long", 1, "timestamp without time zone", EPOCH + dt.timedelta(microseconds=1)),
    "io.debezium.time.NanoTimestamp": ("int64", "long", 1_000, "timestamp without time zone", EPOCH + dt.timedelta(microseconds=1)),
    "io.debezium.time.ZonedTimestamp": ("string", "string", MOMENT, "timestamp with time zone", dt.datetime.fromisoformat(MOMENT)),
    "io.debezium.time.MicroDuration": ("int64", "long", -1_500_000, "interval", dt.timedelta(seconds=-1.5)),
    "io.debezium.data.Json": ("string", "string", '{"a": 1.10}', "jsonb", '{"a": 1.10}'),
    "io.debezium.data.VariableScaleDecimal": (
        *("struct", "record", {"scale": 3, "value": base64_of(-1001)}),
        *("numeric", Decimal("-1.001")),
    ),
}
NOT_BY_DEFAULT = {"io.debezium.time.NanoTime", "io.debezium.time.NanoTimestamp"}
"""Types that Debezium's default settings do not write for such a column."""


def envelope(after: Mapping[str, Any] | None, operation: str = "c") -> dict[str, Any]:
    return {"before": None, "after": after, "op": operation, "source": {"ts_ms": 1_767_323_045_678, "table": "t"}, "ts_ms": 5}


def with_schema(after: Mapping[str, Any] | None, schemas: Mapping[str, Any], operation: str = "c") -> dict[str, Any]:
    fields = [{"field": name, "optional": True, **schema} for name, schema in schemas.items()]
    own = {"type": "struct", "fields": [{"type": "struct", "field": side, "fields": fields} for side in ("before", "after")]}
    return {"schema": own, "payload": envelope(after, operation)}


def fields(table_columns: Mapping[str, str], **more: Any) -> Fields:
    table = tuple(Column(name, kind) for name, kind in table_columns.items())
    json_sides = frozenset({"key", "value", "change"})
    return Fields(upsert=True, key=("id",), json=json_sides, changes=True, table=table, **more)


def result(made: Fields, values: list[Any]) -> list[dict[str, Any]]:
    """The rows of JSON records, with disposition and error."""
    texts = [value if value is None or isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    decoder = Decoder({"key": Encoding.JSON, "value": Encoding.JSON}, framed={"key": True, "value": True}, reads_json=False)
    decoded, wrong = decoder.batch(batch(texts, key=b'{"id": 1}'))
    assert not wrong
    found: list[dict[str, Any]] = made(decoded).to_pylist()
    return [{"disposition": None, "error": None} | row for row in found]


def test_operations() -> None:
    """A change loads or deletes; tombstones and messages say nothing about a row."""
    values = [envelope({"id": 1, "name": "a"}, "c"), envelope(None, "d"), None, envelope({"id": 1, "name": "b"}, "r"), envelope(None, "m")]
    rows = result(fields({"id": "bigint", "name": "text"}), values)
    assert [(row["disposition"], row["id"], row["name"], row["error"]) for row in rows] == [
        (None, 1, "a", None),
        ("delete", 1, None, None),
        ("skip", 1, None, None),
        (None, 1, "b", None),
        ("skip", 1, None, None),
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (envelope(None, "t"), "Fail: it truncates the whole table"),
        (envelope(None, "x"), "Undecodable: its envelope has the unknown operation 'x'"),
        (envelope(None, "u"), "Undecodable: its envelope has no row after the change"),
        ({"id": 1}, "Undecodable: its envelope has the unknown operation None"),
        ([], "Undecodable: it is not an envelope in JSON"),
        (b"{", "Undecodable: it is not an envelope in JSON"),
        (envelope({"id": 1, "name": UNAVAILABLE}, "u"), "Fail: name is not in the record, because the value is large"),
        (envelope({"id": "x", "name": "a"}), "Fail: id does not fit bigint: the value is text that is not a number"),
    ],
)
def test_record_that_fails_says_why_and_its_neighbours_load(value: Any, said: str) -> None:
    good = envelope({"id": 1, "name": "a"})
    first, row, last = result(fields({"id": "bigint", "name": "text"}), [good, value, good])
    assert row["disposition"] == "fail"
    assert row["error"].startswith(said)
    assert (first["disposition"], last["disposition"], last["name"]) == (None, None, "a")


@pytest.mark.parametrize("name", TYPES)
def test_types_of_json(name: str) -> None:
    """Without schemas, values are read as Debezium writes them by default for a source column of the sink column's type."""
    kind, _, value, column, expected = TYPES[name]
    values = [with_schema({"x": value}, {"x": {"type": kind, "name": name}}), *[envelope({"x": value})] * (name not in NOT_BY_DEFAULT)]
    expected = str(expected) if column == "numeric" else expected
    assert [(row["error"], row["x"]) for row in result(fields({"x": column}), values)] == [(None, expected)] * len(values)


@pytest.mark.parametrize("name", TYPES)
def test_types_of_avro(name: str) -> None:
    """The value, null and the newest schema's default have the same type."""
    _, kind, value, _, expected = TYPES[name]
    default, inner, again = value, {"type": kind, "connect.name": name}, {"type": kind, "connect.name": name}
    if kind == "record":
        inner |= record("V", scale="int", value="bytes")
        again = "V"  # a named type is defined once
        value = {"scale": 3, "value": base64.b64decode(value["value"])}
        default = {"scale": 3, "value": value["value"].decode("latin-1")}
    old = record("R", x=["null", inner])
    new = record("R", x=["null", inner], y={"type": again, "default": default})
    writer, reader = parse(json.dumps(old)), parse(json.dumps(new))
    data = [written(old, {"x": each}) for each in (value, None)]
    found = resolved(plain(avro.decode(pa.array(data), writer), writer), type_of(reader), reader).to_pylist()
    as_text = str(expected) if name.endswith("Decimal") else expected
    assert found == [{"x": as_text, "y": as_text}, {"x": None, "y": as_text}]


@pytest.mark.parametrize("name", ["io.debezium.time.NanoTime", "io.debezium.time.NanoTimestamp"])
def test_nanoseconds_that_postgres_does_not_store_fail_their_record(name: str) -> None:
    """They would be cut."""
    (row,) = result(fields({"x": TYPES[name][3]}), [with_schema({"x": 1_001}, {"x": {"type": "int64", "name": name}})])
    assert row["error"].endswith("has more than 6 digits after the second, which Postgres does not store")
    schema = record("R", x={"type": "long", "connect.name": name})
    writer = parse(json.dumps(schema))
    with pytest.raises(InvalidConnectValue, match=r"^x has more than 6 digits after the second"):
        plain(avro.decode(pa.array([written(schema, {"x": 1_001})]), writer), writer)


@pytest.mark.parametrize(("name", "per_ms"), [("io.debezium.time.Timestamp", 1), ("io.debezium.time.MicroTimestamp", 1_000)])
def test_infinite_timestamp_is_no_moment(name: str, per_ms: int) -> None:
    """Debezium writes infinite timestamps as values near the limits of 64 bits, in the year 294247."""
    schema = record("R", x={"type": "long", "connect.name": name})
    writer = parse(json.dumps(schema))
    for ms in (9_223_372_036_825_200, -9_223_372_036_832_400):
        with pytest.raises(InvalidConnectValue, match=r"^x is an infinite timestamp$"):
            plain(avro.decode(pa.array([written(schema, {"x": ms * per_ms})]), writer), writer)
        (row,) = result(fields({"x": f"timestamp({3 if per_ms == 1 else 6}) without time zone"}), [envelope({"x": ms * per_ms})])
        assert row["disposition"] == "fail"


def test_default_of_a_logical_type_is_read_like_its_data() -> None:
    """The default is given in the underlying type: milliseconds, unscaled bytes."""
    at = {"type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 1_000}
    price = {"type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}, "default": "\u0004\u00d2"}
    old = record("R", x="int")
    writer, reader = parse(json.dumps(old)), parse(json.dumps(record("R", x="int", at=at, price=price)))
    (row,) = resolved(plain(avro.decode(pa.array([written(old, {"x": 1})]), writer), writer), type_of(reader), reader).to_pylist()
    assert row == {"x": 1, "at": dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "price": Decimal("12.34")}


def test_decimals_in_json() -> None:
    """They are base64 with the schema's scale or, without a schema, the column's scale. Text needs a schema that says so."""
    scaled = {"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "2"}}
    columns = {"x": "numeric(12,2)"}
    values = [
        with_schema({"x": base64_of(1234)}, {"x": scaled}),
        envelope({"x": base64_of(1234)}),
        with_schema({"x": "12.34"}, {"x": {"type": "string"}}),
        envelope({"x": 12.34}),
        envelope({"x": "12.34"}),
    ]
    rows = result(fields(columns), values)
    assert [row["x"] for row in rows] == ["12.34"] * 4 + [None]
    assert rows[-1]["error"].startswith("Fail: x does not fit numeric(12,2): the value is text, and by default Debezium writes")


def test_bytes_arrays_and_numbers_in_text() -> None:
    columns = {"raw": "bytea", "texts": "text[]", "days": "date[]", "ratios": "real[]", "number": "text", "ratio": "real"}
    row = {"raw": "AP8=", "texts": ["a", None], "days": [0, None], "ratios": [1.5, None], "number": 12, "ratio": 0.5}
    schemas = {
        "raw": {"type": "bytes"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "days": {"type": "array", "items": {"type": "int32", "name": "io.debezium.time.Date"}},
        "ratios": {"type": "array", "items": {"type": "float"}},
        "number": {"type": "int32"},
        "ratio": {"type": "float"},
    }
    found = result(fields(columns), [with_schema(row, schemas), envelope(row)])
    expected = row | {"raw": b"\x00\xff", "days": [dt.date(1970, 1, 1), None], "number": "12"}
    assert [{name: each[name] for name in columns} for each in found] == [expected, expected]
    rows = result(fields({"texts": "text[]"}), [with_schema({"texts": "ab"}, {"texts": {"type": "string"}}), envelope({"texts": "ab"})])
    assert [row["error"] for row in rows] == ["Fail: texts does not fit text[]: the value is text, not a list"] * 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", UNAVAILABLE),
        ("jsonb", UNAVAILABLE),
        ("bytea", base64.b64encode(UNAVAILABLE.encode()).decode()),
        ("text[]", [UNAVAILABLE]),
        ("integer[]", [*UNAVAILABLE.encode()]),
        ("date[]", [*UNAVAILABLE.encode()]),
        ("timestamp(3) without time zone[]", [*UNAVAILABLE.encode()]),
        ("double precision[]", [float(byte) for byte in UNAVAILABLE.encode()]),
        ("jsonb", {UNAVAILABLE: UNAVAILABLE}),
        ("jsonb", {"inner": [{"a": UNAVAILABLE}]}),
        ("jsonb", [["a"], [UNAVAILABLE]]),
    ],
)
def test_value_that_was_not_sent_fails_the_record_unless_the_column_is_dropped(kind: str, value: Any) -> None:
    (row,) = result(fields({"id": "bigint", "x": kind}), [envelope({"id": 1, "x": value}, "u")])
    assert row["disposition"] == "fail"
    assert "REPLICA IDENTITY FULL" in row["error"]
    (row,) = result(fields({"id": "bigint"}), [envelope({"id": 1, "x": value}, "u")])
    assert (row["disposition"], row["id"]) == (None, 1)


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        (pa.string(), "text", UNAVAILABLE),
        (pa.binary(), "bytea", UNAVAILABLE.encode()),
        (pa.large_string(), "text", UNAVAILABLE),
        (pa.binary(len(UNAVAILABLE)), "bytea", UNAVAILABLE.encode()),
        (pa.large_list(pa.string()), "text[]", [UNAVAILABLE]),
        (pa.list_(pa.string()), "text[]", [UNAVAILABLE]),
        (pa.list_(pa.int32()), "integer[]", [*UNAVAILABLE.encode()]),
        (pa.struct([("inner", pa.string())]), "jsonb", {"inner": UNAVAILABLE}),
        (pa.list_(pa.date32()), "date[]", [dt.date(1970, 1, 1) + dt.timedelta(byte) for byte in UNAVAILABLE.encode()]),
        (
            pa.list_(pa.timestamp("us")),
            "timestamp without time zone[]",
            [EPOCH + dt.timedelta(0, 0, 0, byte) for byte in UNAVAILABLE.encode()],
        ),
        (pa.list_(pa.float64()), "double precision[]", [float(byte) for byte in UNAVAILABLE.encode()]),
        (pa.list_(pa.decimal128(10, 2)), "numeric[]", [Decimal(byte) for byte in UNAVAILABLE.encode()]),
        (pa.list_(pa.list_(pa.string())), "jsonb", [["a"], [UNAVAILABLE]]),
        (pa.map_(pa.string(), pa.string()), "jsonb", [(UNAVAILABLE, UNAVAILABLE)]),
    ],
)
def test_value_of_avro_that_was_not_sent_fails_the_record(kind: pa.DataType, column: str, value: Any) -> None:
    row = pa.struct([("id", pa.int64()), ("x", kind)])
    lineage = {"kafka_topic": pa.string(), "kafka_partition": pa.int32(), "kafka_offset": pa.int64()}
    sides = {"key": pa.struct([("id", pa.int64())]), "value": pa.struct([("op", pa.string()), ("after", row)])}
    values = [{"op": "u", "after": {"id": 1, "x": each}} for each in (value, None)]
    columns = [["t"] * 2, [0] * 2, [0, 1], [{"id": 1}] * 2, values]
    given = pa.record_batch([*map(pa.array, columns, (lineage | sides).values())], names=[*lineage, *sides])
    made = Fields(upsert=True, key=("id",), changes=True, table=(Column("id", "bigint"), Column("x", column)))
    first, second = made(given).to_pylist()
    assert (first["disposition"], second["disposition"]) == ("fail", None)
    assert first["error"].startswith("Fail: x is not in the record, because the value is large (TOAST)")


def test_columns_come_from_the_envelope() -> None:
    columns = {"id": "bigint", "operation": "text", "changed_at": "timestamp with time zone"}
    paths = (("operation", steps_of("$change.op")), ("changed_at", steps_of("$change.source.ts_ms")))
    skip_if = (("$change.op", steps_of("$change.op"), ("r",)),)
    made = fields(columns, columns=paths, skip_if=skip_if)
    for schemas in (False, True):
        values = [with_schema({"id": 1}, {}, op) if schemas else envelope({"id": 1}, op) for op in ("u", "r")]
        first, second = result(made, values)
        assert (first["operation"], first["changed_at"]) == ("u", dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC))
        assert (first["disposition"], second["disposition"]) == (None, "skip")


def test_schema_without_an_envelope_is_refused() -> None:
    plain_row = pa.schema([("key", pa.struct([("id", pa.int64())])), ("value", pa.struct([("id", pa.int64()), ("op", pa.string())]))])
    with pytest.raises(NoEnvelope, match="they lack after"):
        Fields(upsert=True, key=("id",), changes=True).output(plain_row, None)


FORMAT = {"value": "json", "key": "json", "envelope": "debezium"}
GOOD = {"topics": ["t"], "format": FORMAT, "sink": {"table": "lake.t", "mode": "upsert", "key": ["id"], "deletes": "hard"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": FORMAT | {"value": "protobuf"}}, "format.value of change data is not avro or json"),
        ({"format": {"value": "json", "envelope": "debezium"}}, "format.key of change data is not avro or json"),
        ({"format": FORMAT | {"envelope": "maxwell"}}, "write debezium"),
        ({"sink": {"table": "lake.t"}}, "change data needs an upsert sink with deletes"),
        ({"sink": {"table": "lake.t", "mode": "upsert", "key": ["id"]}}, "change data needs an upsert sink with deletes"),
        ({"transform": "a:b"}, "envelope and transform are both given"),
        ({"format": {"value": "json", "key": "json"}, "columns": {"a": "$change.op"}}, "$change needs format.envelope"),
        ({"format": {"value": "json", "key": "json"}, "skip_if": {"$change.op": "r"}}, "$change needs format.envelope"),
    ],
)
def test_file_that_cannot_load_change_data(tmp_path: Path, change: Mapping[str, Any], said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(GOOD))
    assert isinstance(transform_of(load_consumer(path), ()).function, Fields)
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(SpecInvalid) as caught:
        load_consumer(path)
    assert said in str(caught.value)
