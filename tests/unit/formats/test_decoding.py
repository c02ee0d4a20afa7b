"""Decoding of keys and values, compared with fastavro record by record."""

from __future__ import annotations

import datetime as dt
import io
import json
import pickle
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.encoded import batch, framed, record, written
from tests.support.sampling import examples

from tidemark import project
from tidemark.formats import avro
from tidemark.formats.avro import BadDatum, decode
from tidemark.formats.connect import InvalidConnectValue
from tidemark.formats.decoder import Decoder, SchemasMissing, SchemaUnknown, Undecodable
from tidemark.formats.schema import BadSchema, parse
from tidemark.formats.shape import Unresolvable, plain, resolved, type_of
from tidemark.spec import SpecInvalid, load_consumer
from tidemark.spec.model import Encoding
from tidemark.worker.decoding import Decoding

UTC = dt.UTC
LINE = record("Line", sku="string")
ORDER = record("Order", id="long", city={"type": ["null", "string"], "default": None}, lines={"type": "array", "items": LINE})


def order(number: int = 1, city: str | None = None) -> bytes:
    return written(ORDER, {"id": number, "city": city, "lines": []})


def decoder(*, value: Encoding = Encoding.AVRO, reader: Any = ORDER, writers: Any = None, framed: bool = True) -> Decoder:
    readers = {("orders", "value"): parse(json.dumps(reader))} if value is Encoding.AVRO else {}
    known = {key: parse(json.dumps(each)) if isinstance(each, dict) else each for key, each in (writers or {7: ORDER}).items()}
    return Decoder({"key": Encoding.BYTES, "value": value}, readers, known, {"key": True, "value": framed})


def fixed(size: int, **more: Any) -> dict[str, Any]:
    return {"type": "fixed", "size": size, "name": "F", **more}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


DAY = dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
LOCAL = DAY.replace(tzinfo=None)
NANOS = 1_767_323_045_678_901_000
TYPES: dict[str, tuple[Any, Any, str]] = {
    # Avro type, value, Arrow type
    "boolean": ("boolean", True, "bool"),
    "int": ("int", -7, "int32"),
    "long": ("long", 2**40, "int64"),
    "float": ("float", 1.5, "float"),
    "double": ("double", 1.5, "double"),
    "bytes": ("bytes", b"\x00\xff", "binary"),
    "string": ("string", "Zürich", "string"),
    "fixed": (fixed(3), b"abc", "binary"),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "string"),
    "array": ({"type": "array", "items": ["null", "string"]}, ["a", None], "list<item: string>"),
    "map": ({"type": "map", "values": "int"}, {"a": 1}, "map<string, int32>"),
    "record": (record("R", x="int"), {"x": 1}, "struct<x: int32>"),
    "decimal": (logical("bytes", "decimal", precision=20, scale=4), Decimal("-1.0001"), "decimal128(20, 4)"),
    "long decimal": (logical("bytes", "decimal", precision=60, scale=2), Decimal("1" * 50 + ".01"), "decimal256(60, 2)"),
    "decimal in fixed": (fixed(12, logicalType="decimal", precision=20, scale=4), Decimal("7.0001"), "decimal128(20, 4)"),
    "date": (logical("int", "date"), DAY.date(), "date32[day]"),
    "time-millis": (logical("int", "time-millis"), dt.time(1, 2, 3, 4000), "time64[us]"),
    "time-micros": (logical("long", "time-micros"), dt.time(1, 2, 3, 4), "time64[us]"),
    "timestamp-millis": (logical("long", "timestamp-millis"), DAY, "timestamp[us, tz=UTC]"),
    "timestamp-micros": (logical("long", "timestamp-micros"), DAY, "timestamp[us, tz=UTC]"),
    "timestamp-nanos": (logical("long", "timestamp-nanos"), NANOS, "timestamp[us, tz=UTC]"),
    "local-timestamp-millis": (logical("long", "local-timestamp-millis"), LOCAL, "timestamp[us]"),
    "local-timestamp-micros": (logical("long", "local-timestamp-micros"), LOCAL, "timestamp[us]"),
    "local-timestamp-nanos": (logical("long", "local-timestamp-nanos"), NANOS, "timestamp[us]"),
    "uuid": (logical("string", "uuid"), uuid.UUID(int=5), "string"),
    "duration": (
        fixed(12, logicalType="duration"),
        b"\x01\0\0\0\x02\0\0\0\x03\0\0\0",
        "struct<months: int64, days: int64, milliseconds: int64>",
    ),
    "another logical type": (logical("string", "shop-sku"), "x", "string"),
}
UNIONS: dict[str, tuple[Any, Any, str]] = {
    "null or a type": (["null", "string"], None, "string"),
    "several types": (["null", "string", "long"], 5, "struct<string: string, long: int64>"),
}
READ: dict[str, Any] = {
    "several types": {"string": None, "long": 5},
    "timestamp-nanos": DAY.replace(microsecond=678_901),
    "local-timestamp-nanos": LOCAL.replace(microsecond=678_901),
    "uuid": str(uuid.UUID(int=5)),
    "duration": {"months": 1, "days": 2, "milliseconds": 3},
}
"""Values that are read as others than were written."""


@pytest.mark.parametrize("name", ["timestamp-nanos", "local-timestamp-nanos"])
def test_nanoseconds_that_postgres_does_not_store_are_no_value(name: str) -> None:
    """They would be cut. Others of the batch are not affected, because the decoder then reads one by one."""
    schema = record("Whole", it=["null", logical("long", name)])
    node = parse(json.dumps(schema))
    with pytest.raises(InvalidConnectValue, match=r"^it has more than 6 digits after the second"):
        plain(decode(pa.array([written(schema, {"it": NANOS}), written(schema, {"it": NANOS + 1})], pa.binary()), node), node)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("long", {"logicalType": "date"}),
        ("int", {"logicalType": "timestamp-millis"}),
        ("string", {"logicalType": "timestamp-millis"}),
        ("string", {"logicalType": "decimal", "precision": 10, "scale": 2}),
        ("bytes", {"logicalType": "decimal"}),
        ("bytes", {"logicalType": "decimal", "precision": 100, "scale": 2}),
        ("bytes", {"logicalType": "decimal", "precision": 4, "scale": 5}),
        ("long", {"logicalType": "time-millis"}),
        ("int", {"logicalType": "decimal", "precision": 4}),
    ],
)
def test_logical_type_that_is_not_valid_is_ignored(kind: str, attributes: Any) -> None:
    """As Avro's specification says: the data have the type below it."""
    assert type_of(parse(json.dumps(record("R", it={"type": kind, **attributes})))) == type_of(parse(json.dumps(record("R", it=kind))))


@pytest.mark.parametrize("name", TYPES | UNIONS)
def test_each_avro_type_has_one_arrow_type(name: str) -> None:
    kind, value, arrow = (TYPES | UNIONS)[name]
    node = parse(json.dumps(schema := record("Whole", it=kind, end="int")))
    datum = written(schema, {"it": value, "end": 7})
    found = plain(decode(pa.array([datum, datum], pa.binary()), node), node)
    assert found.to_pylist(maps_as_pydicts="strict") == [{"it": READ.get(name, value), "end": 7}] * 2
    assert str(found.type.field("it").type) == arrow
    assert found.type == type_of(node)


@pytest.mark.parametrize("name", TYPES)
def test_each_avro_type_may_be_null_and_in_a_list(name: str) -> None:
    """Except unions: a union in a union is not Avro."""
    kind, value, _ = TYPES[name]
    again = kind["name"] if isinstance(kind, dict) and "name" in kind else kind  # a named type is defined once
    node = parse(json.dumps(schema := record("Whole", it=["null", kind], all={"type": "array", "items": ["null", again]})))
    data = [written(schema, each) for each in ({"it": None, "all": []}, {"it": value, "all": [None, value]})]
    found = plain(decode(pa.array(data, pa.binary()), node), node)
    read = READ.get(name, value)
    assert found.to_pylist(maps_as_pydicts="strict") == [{"it": None, "all": []}, {"it": read, "all": [None, read]}]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "is not JSON"),
        (record("Node", next=["null", "Node"]), "is recursive: Node contains itself, which no table can hold"),
        ({"type": "array", "items": "null"}, "has a type without a value, null, outside a union"),
        ({"type": "fixed", "name": "Empty", "size": 0}, "has a type without a value, Empty, outside a union"),
        (record("A", b="B"), "uses the type B, which it does not define"),
        (record("A"), "has the record A, which has no fields"),
        (
            record("A", b=["string", {"type": "enum", "name": "E", "symbols": ["X"]}]),
            "has a union of several types, one of which is the enum E; this is not supported",
        ),
        ({"type": "record", "name": "A", "fields": [{"name": "b"}]}, "has null where a type is expected"),
    ],
)
def test_schema_that_cannot_be_used_says_why(schema: Any, said: str) -> None:
    with pytest.raises(BadSchema, match=r"^The schema ") as caught:
        parse(schema if isinstance(schema, str) else json.dumps(schema))
    assert caught.value.problem == said


def test_named_types_are_found_in_namespaces_and_references() -> None:
    line, shop = LINE | {"namespace": "shop"}, {"namespace": "shop"}
    node = parse(json.dumps(record("Order", a="Line", b="shop.Line") | shop), [json.dumps(line)])
    datum = written(record("Order", a=line, b="shop.Line") | shop, {"a": {"sku": "x"}, "b": {"sku": "y"}})
    assert decode(pa.array([datum], pa.binary()), node).to_pylist() == [{"a": {"sku": "x"}, "b": {"sku": "y"}}]


lines = st.lists(st.fixed_dictionaries({"sku": st.text(max_size=3)}), max_size=3)
orders = st.fixed_dictionaries({"id": st.integers(-(2**63), 2**63 - 1), "city": st.none() | st.text(max_size=5), "lines": lines})


def read_alone(datum: bytes) -> Any:
    data = io.BytesIO(datum)
    try:
        read = fastavro.schemaless_reader(data, fastavro.parse_schema(ORDER), None)
    except Exception:  # noqa: BLE001
        return Undecodable
    return read if data.read() == b"" else Undecodable


data = orders.map(lambda value: written(ORDER, value))
without_id = st.binary(max_size=4) | st.binary(min_size=5, max_size=20).filter(lambda some: some[0] != 0)
messages = st.one_of(
    orders.map(lambda value: (framed(written(ORDER, value)), value)),
    st.just((None, None)),
    data.map(lambda datum: (framed(datum[:-1]), Undecodable)),
    st.builds(lambda datum, more: (framed(datum + more), Undecodable), data, st.binary(min_size=1, max_size=9)),
    data.map(lambda datum: (framed(datum, 9), SchemaUnknown)),
    without_id.map(lambda some: (some, Undecodable)),
    st.binary(max_size=20).map(lambda noise: (framed(noise), read_alone(noise))),
)
"""A message and its expected content: an order, None, or an exception class."""


@settings(max_examples=examples(60))
@given(st.lists(messages, min_size=1, max_size=12))
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
    with pytest.raises(BadDatum):
        decode(pa.array([order(1) + order(2), b""], pa.binary()), parse(json.dumps(ORDER)))


NEWER = record(
    "Order",
    total={"type": "double", "default": 1.5},
    id="double",
    town=["null", "string"],
    tags={"type": {"type": "array", "items": "string"}, "default": ["new"]},
    raw={"type": "bytes", "default": "\u00ff"},
    by={"type": record("By", name={"type": ["null", "string"], "default": None}), "default": {}},
)
NEWER["fields"][2]["aliases"] = ["city"]


@settings(max_examples=examples(30))
@given(st.lists(orders, min_size=1, max_size=5))
def test_old_data_is_read_with_the_newest_schema_as_avro_says(given_: list[Any]) -> None:
    data = [written(ORDER, each) for each in given_]
    schemas = [fastavro.parse_schema(json.loads(json.dumps(schema))) for schema in (ORDER, NEWER)]
    expected = [fastavro.schemaless_reader(io.BytesIO(each), *schemas) for each in data]
    decoded, wrong = decoder(reader=NEWER, writers={7: ORDER}).batch(batch([framed(each) for each in data]))
    assert not wrong
    assert decoded["value"].to_pylist() == [{**each, "raw": b"\xff", "by": {"name": None}} for each in expected]  # fastavro: "ÿ"


def test_records_of_two_schemas_in_one_batch() -> None:
    old = framed(order())
    new = framed(written(NEWER, {"total": 2.0, "id": 2, "town": None, "tags": [], "raw": b"", "by": {"name": "me"}}), 8)
    decoded, _ = decoder(reader=NEWER, writers={7: ORDER, 8: NEWER}).batch(batch([new, old, None, new]))
    assert [each and each["id"] for each in decoded["value"].to_pylist()] == [2.0, 1.0, None, 2.0]


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        ({"must": "string"}, "must is missing in its own schema and has no default in the newest"),
        ({"id": "string"}, "id has type int64 in its own schema and string in the newest"),
    ],
)
def test_data_that_the_newest_schema_cannot_read_fails(newest: Any, said: str) -> None:
    decoded, wrong = decoder(reader=record("Order", **newest)).batch(batch([framed(order())]))
    assert decoded.num_rows == 0
    assert {at: str(error) for at, error in wrong.items()} == {0: f"it cannot be read with the newest schema: {said}"}


def test_decimal_that_is_invalid_is_what_is_below_it() -> None:
    """Avro's specification says to ignore the logical type. Debezium writes a numeric(5,-2) like this."""
    schema = record("R", price=logical("bytes", "decimal", precision=5, scale=2046))
    found, wrong = decoder(reader=schema, writers={7: schema}).batch(batch([framed(b"\x02a"), framed(b"\x04a")]))
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
    guid, datum = uuid.UUID(int=77), order()
    headers = [
        [{"key": "__value_schema_id", "value": b"\0\0\0\0\x07"}],
        [{"key": "__value_schema_id", "value": b"\x01" + guid.bytes}],
        [{"key": "trace", "value": b"x"}],
        [{"key": "__value_schema_id", "value": b"seven"}],
        None,
    ]
    one = decoder(writers={7: ORDER, guid: ORDER})
    decoded, wrong = one.batch(batch([datum, datum, framed(datum), datum, None], headers=headers))
    assert [each and each["id"] for each in decoded["value"].to_pylist()] == [1, 1, 1, None]
    assert {at: str(error) for at, error in wrong.items()} == {3: "its header __value_schema_id holds neither a schema id nor a GUID"}
    pairs = [[(each["key"], each["value"]) for each in some or []] for some in headers]
    assert one.objects("orders", "value", [datum, datum, framed(datum)], pairs[:3])[1]["id"] == 1


def test_schemas_that_the_driver_has_not_sent_are_asked_for() -> None:
    one = decoder()
    with pytest.raises(SchemasMissing) as caught:
        one.batch(batch([framed(b""), framed(b"", 8), framed(b"", 9)]))
    assert caught.value.ids == {8, 9}
    assert pickle.loads(pickle.dumps(caught.value)).ids == {8, 9}
    with pytest.raises(SchemasMissing) as caught:
        Decoder(one.encodings, framed=one.framed).batch(batch([framed(b"")]))
    assert caught.value.topics == {"orders"}
    known = one.with_writers({8: None})
    assert 8 in known.writers
    assert 8 not in known.without_unknown().writers


def test_value_that_its_type_does_not_have_fails_alone_and_names_the_field() -> None:
    """The values are Debezium's infinite timestamp, and a timestamp that Arrow cannot represent."""
    at = {"type": "long", "connect.name": "io.debezium.time.Timestamp"}
    schema = record("Change", after=["null", record("Row", at=at)])
    values = [framed(written(schema, {"after": {"at": ms}})) for ms in (1, 9_223_372_036_825_200, 2**62)]
    decoded, wrong = decoder(reader=schema, writers={7: schema}).batch(batch(values))
    assert {place: str(error) for place, error in wrong.items()} == {
        1: "it cannot be decoded: after.at is an infinite timestamp",
        2: "it cannot be decoded: after.at is out of range for io.debezium.time.Timestamp",
    }
    assert decoded.column("value").to_pylist()[0] == {"after": {"at": dt.datetime(1970, 1, 1, 0, 0, 0, 1_000)}}  # noqa: DTZ001


def test_schema_that_cannot_be_used_fails_its_records() -> None:
    _, wrong = decoder(writers={7: "The Avro schema is recursive: Node contains itself."}).batch(batch([framed(b"")]))
    assert str(wrong[0]) == "schema 7 of its value cannot be used: The Avro schema is recursive: Node contains itself."


def test_schema_file_reads_data_without_ids() -> None:
    decoded, wrong = decoder(framed=False).batch(batch([order(1), None, order(2) + b"\0", order(2)]))
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
    data = [framed(b'{"a": 1}'), b"{}", None, b"{}", framed(b"{")]
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
    decoded, wrong = decoder().batch(batch([framed(b"\xff"), framed(order())] * 500 + [framed(b"")] * 500))
    assert (decoded.num_rows, len(wrong)) == (500, 1000)
    assert calls == [1500, 500]
    decoded, wrong = decoder().batch(batch([framed(b"\xff")] * 500))
    assert (decoded.num_rows, len(wrong)) == (0, 500)


@pytest.mark.parametrize(("encoding", "file"), [("avro", "order.avsc"), ("protobuf", "order.proto")])
def test_schema_file_that_is_not_utf_8_is_a_problem_of_the_spec(
    encoding: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows' shells write UTF-16."""
    monkeypatch.setattr(project, "schemas", lambda: tmp_path)
    (tmp_path / file).write_text("{}", encoding="utf-16")
    path = tmp_path / "orders.yaml"
    path.write_text(f"topics: [orders]\nsink: {{table: a.b}}\ntransform: t:t\nformat: {{value: {encoding}, value_schema: {file}}}\n")
    with pytest.raises(SpecInvalid, match=f"{file}.* is not UTF-8 text"):
        Decoding(load_consumer(path), None, lambda: ["orders"]).learn(SchemasMissing(topics=frozenset({"orders"})))
