"""Decoding of keys and values, compared with fastavro record by record."""

from __future__ import annotations

import datetime as dt
import io
import json
import pickle
import uuid
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemark.consume.messages import input_schema
from tidemark.formats import avro
from tidemark.formats.avro import BadDatum, decode
from tidemark.formats.decoder import Decoder, SchemasMissing, SchemaUnknown, Undecodable
from tidemark.formats.schema import BadSchema, parse
from tidemark.formats.shape import Unresolvable, plain, resolved, type_of
from tidemark.spec.model import Encoding

UTC = dt.UTC
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "city", "type": ["null", "string"], "default": None},
        {
            "name": "lines",
            "type": {"type": "array", "items": {"type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}},
        },
    ],
}


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def framed(schema_id: int, datum: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + datum


def batch(values: list[bytes | None], *, keys: list[bytes | None] | None = None, headers: list[Any] | None = None) -> pa.RecordBatch:
    rows = [
        {
            "topic": "orders",
            "partition": 0,
            "offset": 10 + at,
            "key": keys[at] if keys else None,
            "value": value,
            "headers": headers[at] if headers else None,
        }
        for at, value in enumerate(values)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=input_schema())


def decoder(*, value: Encoding = Encoding.AVRO, reader: Any = ORDER, writers: Any = None, framed: bool = True) -> Decoder:
    readers = {("orders", "value"): parse(json.dumps(reader))} if value is Encoding.AVRO else {}
    known = {key: parse(json.dumps(each)) if isinstance(each, dict) else each for key, each in (writers or {7: ORDER}).items()}
    return Decoder({"key": Encoding.BYTES, "value": value}, readers, known, {"key": True, "value": framed})


def fixed(size: int, name: str, **more: Any) -> dict[str, Any]:
    return {"type": "fixed", "size": size, "name": name, **more}


DAY = dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
NANOS = 1_767_323_045_678_901_234
TYPES: dict[str, tuple[Any, Any, Any, str]] = {
    # Avro type, value written, value read, Arrow type
    "boolean": ("boolean", True, True, "bool"),
    "int": ("int", -7, -7, "int32"),
    "long": ("long", 2**40, 2**40, "int64"),
    "float": ("float", 1.5, 1.5, "float"),
    "double": ("double", 1.5, 1.5, "double"),
    "bytes": ("bytes", b"\x00\xff", b"\x00\xff", "binary"),
    "string": ("string", "Zürich", "Zürich", "string"),
    "fixed": (fixed(3, "F"), b"abc", b"abc", "binary"),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B", "string"),
    "array": ({"type": "array", "items": ["null", "string"]}, ["a", None], ["a", None], "list<item: string>"),
    "map": ({"type": "map", "values": "int"}, {"a": 1}, {"a": 1}, "map<string, int32>"),
    "record": ({"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}, {"x": 1}, {"x": 1}, "struct<x: int32>"),
    "null or a type": (["null", "string"], None, None, "string"),
    "several types": (["null", "string", "long"], 5, {"string": None, "long": 5}, "struct<string: string, long: int64>"),
    "decimal": (
        {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
        Decimal("-1.0001"),
        Decimal("-1.0001"),
        "decimal128(20, 4)",
    ),
    "decimal of many digits": (
        {"type": "bytes", "logicalType": "decimal", "precision": 60, "scale": 2},
        Decimal("1" * 50 + ".01"),
        Decimal("1" * 50 + ".01"),
        "decimal256(60, 2)",
    ),
    "decimal in fixed": (
        fixed(12, "F", logicalType="decimal", precision=20, scale=4),
        Decimal("7.0001"),
        Decimal("7.0001"),
        "decimal128(20, 4)",
    ),
    "date": ({"type": "int", "logicalType": "date"}, DAY.date(), DAY.date(), "date32[day]"),
    "time-millis": ({"type": "int", "logicalType": "time-millis"}, dt.time(1, 2, 3, 4000), dt.time(1, 2, 3, 4000), "time64[us]"),
    "time-micros": ({"type": "long", "logicalType": "time-micros"}, dt.time(1, 2, 3, 4), dt.time(1, 2, 3, 4), "time64[us]"),
    "timestamp-millis": ({"type": "long", "logicalType": "timestamp-millis"}, DAY, DAY, "timestamp[us, tz=UTC]"),
    "timestamp-micros": ({"type": "long", "logicalType": "timestamp-micros"}, DAY, DAY, "timestamp[us, tz=UTC]"),
    "timestamp-nanos": (
        {"type": "long", "logicalType": "timestamp-nanos"},
        NANOS,
        dt.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC),
        "timestamp[us, tz=UTC]",
    ),
    "local-timestamp-millis": (
        {"type": "long", "logicalType": "local-timestamp-millis"},
        DAY.replace(tzinfo=None),
        DAY.replace(tzinfo=None),
        "timestamp[us]",
    ),
    "local-timestamp-micros": (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        DAY.replace(tzinfo=None),
        DAY.replace(tzinfo=None),
        "timestamp[us]",
    ),
    "local-timestamp-nanos": (
        {"type": "long", "logicalType": "local-timestamp-nanos"},
        NANOS,
        DAY.replace(microsecond=678_901, tzinfo=None),
        "timestamp[us]",
    ),
    "uuid": ({"type": "string", "logicalType": "uuid"}, uuid.UUID(int=5), str(uuid.UUID(int=5)), "string"),
    "duration": (
        fixed(12, "D", logicalType="duration"),
        b"\x01\0\0\0\x02\0\0\0\x03\0\0\0",
        {"months": 1, "days": 2, "milliseconds": 3},
        "struct<months: int32, days: int32, milliseconds: int64>",
    ),
    "another logical type": ({"type": "string", "logicalType": "shop-sku"}, "x", "x", "string"),
}


@pytest.mark.parametrize("name", TYPES)
def test_each_avro_type_has_one_arrow_type(name: str) -> None:
    kind, value, read, arrow = TYPES[name]
    schema = {"type": "record", "name": "Whole", "fields": [{"name": "it", "type": kind}, {"name": "end", "type": "int"}]}
    node = parse(json.dumps(schema))
    datum = written(schema, {"it": value, "end": 7})
    found = plain(decode(pa.array([datum, datum], pa.binary()), node), node)
    assert found.to_pylist(maps_as_pydicts="strict") == [{"it": read, "end": 7}] * 2
    assert str(found.type.field("it").type) == arrow
    assert found.type == type_of(node)


@pytest.mark.parametrize("name", TYPES)
def test_each_avro_type_may_be_null_and_in_a_list(name: str) -> None:
    kind, value, read, _ = TYPES[name]
    if isinstance(kind, list):
        pytest.skip("a union in a union is not Avro")
    again = kind["name"] if isinstance(kind, dict) and "name" in kind else kind  # a named type is defined once
    fields = [{"name": "it", "type": ["null", kind]}, {"name": "all", "type": {"type": "array", "items": ["null", again]}}]
    schema = {"type": "record", "name": "Whole", "fields": fields}
    node = parse(json.dumps(schema))
    data = [written(schema, each) for each in ({"it": None, "all": []}, {"it": value, "all": [None, value]}, {"it": None, "all": [value]})]
    found = plain(decode(pa.array(data, pa.binary()), node), node)
    assert found.to_pylist(maps_as_pydicts="strict") == [
        {"it": None, "all": []},
        {"it": read, "all": [None, read]},
        {"it": None, "all": [read]},
    ]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "is not JSON"),
        (
            {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]},
            "is recursive: Node contains itself, which no table can hold",
        ),
        ({"type": "array", "items": "null"}, "has a type without a value, null, outside a union"),
        ({"type": "fixed", "name": "Empty", "size": 0}, "has a type without a value, Empty, outside a union"),
        ({"type": "record", "name": "A", "fields": [{"name": "b", "type": "B"}]}, "uses the type B, which it does not define"),
        ({"type": "record", "name": "A", "fields": []}, "has the record A, which has no fields"),
        ({"type": "record", "name": "A", "fields": [{"name": "b", "type": ["string", {"type": "enum", "name": "E", "symbols": ["X"]}]}]},
         "has a union of several types, one of which is the enum E; this is not supported"),
        ({"type": "record", "name": "A", "fields": [{"name": "b"}]}, "has null where a type is expected"),
    ],
)  # fmt: skip
def test_schema_that_cannot_be_used_says_why(schema: Any, said: str) -> None:
    with pytest.raises(BadSchema, match=r"^The schema ") as caught:
        parse(schema if isinstance(schema, str) else json.dumps(schema))
    assert caught.value.problem == said


def test_named_types_are_found_in_namespaces_and_references() -> None:
    line = {"type": "record", "name": "Line", "namespace": "shop", "fields": [{"name": "sku", "type": "string"}]}
    order = {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [{"name": "a", "type": "Line"}, {"name": "b", "type": "shop.Line"}],
    }
    node = parse(json.dumps(order), [json.dumps(line)])
    datum = written(
        {**order, "fields": [{"name": "a", "type": line}, {"name": "b", "type": "shop.Line"}]}, {"a": {"sku": "x"}, "b": {"sku": "y"}}
    )
    assert decode(pa.array([datum], pa.binary()), node).to_pylist() == [{"a": {"sku": "x"}, "b": {"sku": "y"}}]


orders = st.builds(
    lambda number, city, skus: {"id": number, "city": city, "lines": [{"sku": sku} for sku in skus]},
    st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=5), st.lists(st.text(max_size=3), max_size=3),
)  # fmt: skip


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes | None, Any]:
    """A message and its expected content: an order, None, or an exception class."""
    kind = draw(st.sampled_from(["good", "good", "good", "null", "cut", "longer", "other id", "no id", "noise"]))
    order = draw(orders)
    datum = written(ORDER, order)
    if kind == "null":
        return None, None
    if kind == "cut":
        return framed(7, datum[:-1]), Undecodable
    if kind == "longer":
        return framed(7, datum + draw(st.binary(min_size=1, max_size=9))), Undecodable
    if kind == "other id":
        return framed(9, datum), SchemaUnknown
    if kind == "no id":
        return draw(st.binary(max_size=4) | st.binary(min_size=5, max_size=20).filter(lambda some: some[0] != 0)), Undecodable
    if kind == "noise":
        data = draw(st.binary(max_size=20))
        return framed(7, data), read_alone(data)
    return framed(7, datum), order


def read_alone(datum: bytes) -> Any:
    data = io.BytesIO(datum)
    try:
        read = fastavro.schemaless_reader(data, fastavro.parse_schema(ORDER), None)
    except Exception:  # noqa: BLE001
        return Undecodable
    return read if data.read() == b"" else Undecodable


@settings(max_examples=60, deadline=None)
@given(st.lists(messages(), min_size=1, max_size=12))
def test_broken_data_fails_alone(given_: list[tuple[bytes | None, Any]]) -> None:
    """Whatever is wrong with some records, every other record has exactly its own values."""
    one = decoder(writers={7: ORDER, 9: None})
    made = batch([message for message, _ in given_])
    decoded, wrong = one.batch(made)
    expected = [value for _, value in given_]
    assert {at: type(error) for at, error in wrong.items()} == {at: kind for at, kind in enumerate(expected) if isinstance(kind, type)}
    assert decoded["value"].to_pylist() == [value for value in expected if not isinstance(value, type)]
    assert decoded["value_bytes"].to_pylist() == [message for message, value in given_ if not isinstance(value, type)]
    assert decoded.schema == one.schema(made.schema, "orders")
    for found, value in zip(one.objects("orders", "value", [message for message, _ in given_], [[]] * len(given_)), expected, strict=True):
        assert isinstance(found, value) if isinstance(value, type) else found == value


def test_data_that_would_move_into_the_next_record_is_noticed() -> None:
    """Together, the two records are as long as two valid ones."""
    first, second = (written(ORDER, {"id": at, "city": "x", "lines": []}) for at in (1, 2))
    with pytest.raises(BadDatum):
        decode(pa.array([first + second, b""], pa.binary()), parse(json.dumps(ORDER)))


NEWER = {
    **ORDER,
    "fields": [
        {"name": "total", "type": "double", "default": 1.5},
        {"name": "id", "type": "double"},
        {"name": "town", "aliases": ["city"], "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["new"]},
        {"name": "raw", "type": "bytes", "default": "\u00ff"},
        {
            "name": "by",
            "type": {"type": "record", "name": "By", "fields": [{"name": "name", "type": ["null", "string"], "default": None}]},
            "default": {},
        },
    ],
}


@settings(max_examples=30, deadline=None)
@given(st.lists(orders, min_size=1, max_size=5))
def test_old_data_is_read_with_the_newest_schema_as_avro_says(given_: list[Any]) -> None:
    data = [written(ORDER, each) for each in given_]
    expected = [
        fastavro.schemaless_reader(io.BytesIO(each), fastavro.parse_schema(ORDER), fastavro.parse_schema(json.loads(json.dumps(NEWER))))
        for each in data
    ]
    made = batch([framed(7, each) for each in data])
    decoded, wrong = decoder(reader=NEWER, writers={7: ORDER}).batch(made)
    assert not wrong
    assert decoded["value"].to_pylist() == [{**each, "raw": b"\xff", "by": {"name": None}} for each in expected]  # fastavro: "ÿ"


def test_records_of_two_schemas_in_one_batch() -> None:
    old = framed(7, written(ORDER, {"id": 1, "city": "Bern", "lines": []}))
    new = framed(8, written(NEWER, {"total": 2.0, "id": 2, "town": None, "tags": [], "raw": b"", "by": {"name": "me"}}))
    decoded, _ = decoder(reader=NEWER, writers={7: ORDER, 8: NEWER}).batch(batch([new, old, None, new]))
    assert [each and each["id"] for each in decoded["value"].to_pylist()] == [2.0, 1.0, None, 2.0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"name": "must", "type": "string"}, "must is missing in its own schema and has no default in the newest"),
        ({"name": "id", "type": "string"}, "id has type int64 in its own schema and string in the newest"),
    ],
)  # fmt: skip
def test_data_that_the_newest_schema_cannot_read_fails(kind: Any, said: str) -> None:
    reader = {"type": "record", "name": "Order", "fields": [kind]}
    decoded, wrong = decoder(reader=reader).batch(batch([framed(7, written(ORDER, {"id": 1, "city": None, "lines": []}))]))
    assert decoded.num_rows == 0
    assert {at: str(error) for at, error in wrong.items()} == {0: f"it cannot be read with the newest schema: {said}"}


def test_decimal_that_is_invalid_is_what_is_below_it() -> None:
    """Avro's specification says to ignore the logical type. Debezium writes a numeric(5,-2) like this."""
    price = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2046}
    schema = {"type": "record", "name": "R", "fields": [{"name": "price", "type": price}]}
    found, wrong = decoder(reader=schema, writers={7: schema}).batch(batch([framed(7, b"\x02a"), framed(7, b"\x04a")]))
    assert (found["value"].to_pylist(), list(wrong)) == ([{"price": b"a"}], [1])


def test_union_of_several_types_is_resolved_by_type() -> None:
    several = type_of(union := parse('["null", "string", "long"]'))
    assert resolved(pa.array([1, None], pa.int32()), several, union).to_pylist() == [{"string": None, "long": 1}, None]
    fewer = plain(decode(pa.array([written(["string", "long"], "x")], pa.binary()), node := parse('["string", "long"]')), node)
    assert resolved(fewer, several, union).to_pylist() == [{"string": "x", "long": None}]
    with pytest.raises(Unresolvable, match="is no branch of the union"):
        resolved(pa.array([True]), several, union)


def test_schema_id_in_a_header() -> None:
    """As confluent-kafka's serializers write it: an id, or a GUID. The datum then has no prefix."""
    guid = uuid.UUID(int=77)
    datum = written(ORDER, {"id": 1, "city": None, "lines": []})
    headers = [
        [{"key": "__value_schema_id", "value": b"\0\0\0\0\x07"}],
        [{"key": "__value_schema_id", "value": b"\x01" + guid.bytes}],
        [{"key": "trace", "value": b"x"}],
        [{"key": "__value_schema_id", "value": b"seven"}],
        None,
    ]
    one = decoder(writers={7: ORDER, guid: ORDER})
    decoded, wrong = one.batch(batch([datum, datum, framed(7, datum), datum, None], headers=headers))
    assert [each and each["id"] for each in decoded["value"].to_pylist()] == [1, 1, 1, None]
    assert {at: str(error) for at, error in wrong.items()} == {3: "its header __value_schema_id holds neither a schema id nor a GUID"}
    pairs = [[(each["key"], each["value"]) for each in some or []] for some in headers]
    assert one.objects("orders", "value", [datum, datum, framed(7, datum)], pairs[:3])[1]["id"] == 1


def test_schemas_that_the_driver_has_not_sent_are_asked_for() -> None:
    one = decoder()
    with pytest.raises(SchemasMissing) as caught:
        one.batch(batch([framed(7, b""), framed(8, b""), framed(9, b"")]))
    assert caught.value.ids == {8, 9}
    assert pickle.loads(pickle.dumps(caught.value)).ids == {8, 9}
    with pytest.raises(SchemasMissing) as caught:
        Decoder(one.encodings, framed=one.framed).batch(batch([framed(7, b"")]))
    assert caught.value.topics == {"orders"}
    known = one.with_writers({8: None})
    assert 8 in known.writers
    assert 8 not in known.without_unknown().writers


def test_value_that_its_type_does_not_have_fails_alone_and_names_the_field() -> None:
    """The values are Debezium's infinite timestamp, and a timestamp that Arrow cannot represent."""
    at = {"type": "long", "connect.name": "io.debezium.time.Timestamp"}
    row = {"type": "record", "name": "Row", "fields": [{"name": "at", "type": at}]}
    schema = {"type": "record", "name": "Change", "fields": [{"name": "after", "type": ["null", row]}]}
    values = [framed(7, written(schema, {"after": {"at": ms}})) for ms in (1, 9_223_372_036_825_200, 2**62)]
    decoded, wrong = decoder(reader=schema, writers={7: schema}).batch(batch(values))
    assert {place: str(error) for place, error in wrong.items()} == {
        1: "it cannot be decoded: after.at is an infinite timestamp",
        2: "it cannot be decoded: after.at is out of range for io.debezium.time.Timestamp",
    }
    assert decoded.column("value").to_pylist()[0] == {"after": {"at": dt.datetime(1970, 1, 1, 0, 0, 0, 1_000)}}  # noqa: DTZ001


def test_schema_that_cannot_be_used_fails_its_records() -> None:
    _, wrong = decoder(writers={7: "The Avro schema is recursive: Node contains itself."}).batch(batch([framed(7, b"")]))
    assert str(wrong[0]) == "schema 7 of its value cannot be used: The Avro schema is recursive: Node contains itself."


def test_schema_file_reads_data_without_ids() -> None:
    data = [written(ORDER, {"id": at, "city": None, "lines": []}) for at in (1, 2)]
    decoded, wrong = decoder(framed=False).batch(batch([data[0], None, data[1] + b"\0", data[1]]))
    assert [each and each["id"] for each in decoded["value"].to_pylist()] == [1, None, 2]
    assert list(wrong) == [2]


def texts(encoding: Encoding, data: list[bytes | None], headers: list[Any] | None = None) -> tuple[list[Any], dict[int, str]]:
    """The decoded column, and why records fail. Checks that ``objects`` returns the same values, parsed."""
    one = decoder(value=encoding)
    decoded, wrong = one.batch(batch(data, headers=headers))
    column = decoded["value"].to_pylist()
    objects = one.objects(
        "orders", "value", data, [[(each["key"], each["value"]) for each in some or []] for some in headers or [[]] * len(data)]
    )
    parsed = [each if encoding is Encoding.STRING or each is None else json.loads(each) for each in column]
    assert [each for each in objects if not isinstance(each, Undecodable)] == parsed
    assert [at for at, each in enumerate(objects) if isinstance(each, Undecodable)] == sorted(wrong)
    return column, {at: str(error) for at, error in wrong.items()}


def test_text() -> None:
    column, wrong = texts(Encoding.STRING, ["é".encode(), None, b"{}", b"\xff"])
    assert column == ["é", None, "{}"]
    assert wrong == {3: "its value is not UTF-8 text"}


def test_json() -> None:
    column, wrong = texts(Encoding.JSON, ['"é"'.encode(), None, b'{"a":', b"{}", b"\xff", b"", b"[" * 100_000])
    assert column == ['"é"', None, "{}"]
    assert wrong == {
        2: "its value is not JSON: Input data was truncated",
        4: "its value is not UTF-8 text",
        5: "its value is not JSON: Input data was truncated",
        6: "its value is not JSON: maximum recursion depth exceeded while deserializing an object",
    }


def test_json_schema() -> None:
    """The id is read and removed; the schema is not needed."""
    header = [{"key": "__value_schema_id", "value": b"\0\0\0\0\x07"}]
    data = [framed(7, b'{"a": 1}'), b"{}", None, b"{}", framed(7, b"{")]
    column, wrong = texts(Encoding.JSON_SCHEMA, data, [None, header, None, None, None])
    assert column == ['{"a": 1}', "{}", None]
    assert wrong == {
        3: "its value has no schema id: it does not begin with a zero byte and four more",
        4: "its value is not JSON: Input data was truncated",
    }


def test_many_broken_data_are_found_without_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer may have written only data of another schema."""
    calls = []
    real = avro.decode
    monkeypatch.setattr(avro, "decode", lambda datums, schema: calls.append(len(datums)) or real(datums, schema))
    good = framed(7, written(ORDER, {"id": 1, "city": None, "lines": []}))
    decoded, wrong = decoder().batch(batch([framed(7, b"\xff"), good] * 500 + [framed(7, b"")] * 500))
    assert (decoded.num_rows, len(wrong)) == (500, 1000)
    assert calls == [1500, 500]
    decoded, wrong = decoder().batch(batch([framed(7, b"\xff")] * 500))
    assert (decoded.num_rows, len(wrong)) == (0, 500)
