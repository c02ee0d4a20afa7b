"""A record or a schema from others fails alone: it takes limited memory and time, and the records beside it are read."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.encoded import written

from tidemark.formats.decoder import Decoder, Undecodable
from tidemark.formats.protobuf import compiled
from tidemark.formats.schema import BadSchema, parse
from tidemark.formats.shape import type_of
from tidemark.spec.model import Encoding
from tidemark.transform import NoRow
from tidemark.values.connect_json import envelopes, read
from tidemark.values.conversion import from_python
from tidemark.worker.decoding import Decoding

WIDE = {"type": "record", "name": "wide", "fields": [{"name": f"c{n}", "type": "long"} for n in range(4_000)]}
VARIABLE = {
    "type": "record",
    "name": "decimal",
    "connect.name": "io.debezium.data.VariableScaleDecimal",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": ["null", "bytes"]}],
}
MEMORY = 4 << 30


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    """What takes more memory fails, instead of the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def varint(number: int) -> bytes:
    return written("long", number)


def avro(value: Any) -> Decoder:
    schema = parse(json.dumps({"type": "record", "name": "r", "fields": [{"name": "a", "type": value}]}))
    return decoder(Encoding.AVRO, schema)


def decoder(encoding: Encoding, schema: Any) -> Decoder:
    encodings = {"key": Encoding.BYTES, "value": encoding}
    return Decoder(encodings, {("t", "value"): schema}, {}, {"key": False, "value": False})


def objects(of: Decoder, *data: bytes) -> list[Any]:
    return of.objects("t", "value", list(data), [None] * len(data))


LOGICAL = (
    *(("long", name) for name in ("timestamp-millis", "timestamp-micros", "timestamp-nanos", "local-timestamp-millis", "time-micros")),
    ("int", "date"),
    ("int", "time-millis"),
)


@given(st.sampled_from(LOGICAL), st.integers(-(2**63), 2**63 - 1))
def test_moment_is_read_as_it_is_or_its_record_fails(kind: tuple[str, str], number: int) -> None:
    """Whether Arrow or Python cannot represent it; never as another moment."""
    number = number if kind[0] == "long" else number >> 32
    found, good = objects(avro({"type": kind[0], "logicalType": kind[1]}), varint(number), varint(0))
    assert not isinstance(good, NoRow)
    if isinstance(found, NoRow):
        assert isinstance(found, Undecodable)
        return
    sizes = {"timestamp-millis": 1_000, "local-timestamp-millis": 1_000}
    if kind[1].endswith(("millis", "micros")) and "timestamp" in kind[1]:
        since = found["a"].replace(tzinfo=None) - good["a"].replace(tzinfo=None)
        assert (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds == number * sizes.get(kind[1], 1)


@pytest.mark.parametrize(
    ("value", "datum"),
    [
        ({"type": "array", "items": ["null", WIDE]}, varint(100_000) + b"\0" * 100_001),
        ({"type": "map", "values": {"type": "array", "items": ["null", WIDE]}}, varint(1) + varint(0) + varint(90_000) + b"\0" * 90_002),
        (VARIABLE, varint(-(2**31)) + b"\x02" + varint(1) + b"\1"),
        (VARIABLE, varint(1) + b"\0"),
        (VARIABLE, varint(0) + b"\x02" + varint(500_000) + b"\1" * 500_000),
    ],
    ids=["missing items", "missing items in a map", "digits", "no value", "long value"],
)
def test_small_record_that_would_take_gigabytes_fails_alone(value: Any, datum: bytes) -> None:
    good = varint(0) if value is not VARIABLE else varint(0) + b"\x02" + varint(1) + b"\7"
    before = time.process_time()
    found, kept = objects(avro(value), datum, good)
    assert isinstance(found, Undecodable) or len(str(found)) < 100
    assert not isinstance(kept, NoRow)
    assert time.process_time() - before < 10


@pytest.mark.parametrize("value", [["null", {"type": "fixed", "name": "f", "size": 1_000_000}], ["null", WIDE]], ids=["fixed", "record"])
def test_missing_values_of_large_types_are_read_in_parts(value: Any) -> None:
    assert objects(avro(value), *[b"\0"] * 3_000) == [{"a": None}] * 3_000


def test_empty_messages_of_protobuf_take_no_more_than_their_share() -> None:
    fields = " ".join(f"int64 a{n} = {n};" for n in range(1, 4_001))
    message = compiled(f'syntax = "proto3"; message A {{ repeated W r = 1; }} message W {{ {fields} }}', {})
    found, kept = objects(decoder(Encoding.PROTOBUF, message), b"\x0a\0" * 50_000, b"\x0a\0")
    assert isinstance(found, Undecodable)
    assert len(kept["r"]) == 1


BAD: dict[str, Any] = {
    "precision": {"type": "bytes", "logicalType": "decimal", "precision": 10**9, "scale": 2},
    "no precision": {"type": "bytes", "logicalType": "decimal", "precision": 0},
    "symbols": {"type": "enum", "name": "e", "symbols": [1, 2]},
    "same symbols": {"type": "enum", "name": "e", "symbols": ["a", "a"]},
    "no symbols": {"type": "enum", "name": "e", "symbols": []},
    "no size": {"type": "fixed", "name": "f"},
    "size": {"type": "fixed", "name": "f", "size": 2**30},
    "negative size": {"type": "fixed", "name": "f", "size": -1},
    "surrogate": {"type": "record", "name": "q", "fields": [{"name": "a\ud800", "type": "int"}]},
    "name": {"type": "record", "name": "q", "fields": [{"name": "a" * 500_000, "type": "int"}]},
    "type": "a\x1b[31m\n" + "x" * 900_000,
    "alias": {"type": "record", "name": "q", "fields": [{"name": "a", "aliases": [1], "type": "int"}]},
    "default": {"type": "record", "name": "q", "fields": [{"name": "a", "type": "string", "default": "x" * 900_000}]},
}


@pytest.mark.parametrize("what", BAD)
def test_schema_that_nobody_could_use_is_refused_or_read_without_what_is_wrong(what: str) -> None:
    text = json.dumps({"type": "record", "name": "r", "fields": [{"name": "f", "type": BAD[what]}]})
    if "precision" in what:
        assert type_of(parse(text)).field("f").type == pa.binary()
        return
    with pytest.raises(BadSchema) as caught:
        parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000


def test_descriptor_of_protobuf_has_the_limits_of_the_compiler() -> None:
    import base64

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for package, fields in (("p" * 150_000, 10), ("p", 35_000)):
        file = FileDescriptorProto(name="x.proto", package=package, syntax="proto3")
        message = file.message_type.add(name="M")
        for number in range(1, fields + 1):
            message.field.add(name=f"f{number}", number=number, type=3, label=1)
        with pytest.raises(BadSchema, match=r"name of more than|defines more than"):
            compiled(base64.b64encode(file.SerializeToString()).decode(), {})


SCHEMAS = (
    '{"fields": 7}', '{"fields": [7]}', '{"fields": "a"}', '{"fields": [null]}', '{"x": 1e999}',
    '{"fields": [{"field": "after", "fields": 7}]}',
    '{"fields": [{"field": "after", "fields": [{"field": "a", "name": []}]}]}', '{"x": ' + "[" * 500 + "]" * 500 + "}",
)  # fmt: skip
VALUES = ("1e2000000", "-1e2000000", "1e999999999", "[" * 500 + "1" + "]" * 500, '"\\ud800"', "1e-2000000")


@pytest.mark.parametrize("postgres", ["bigint", "numeric", "text", "jsonb", "double precision", "date", "integer[]", "boolean"])
def test_change_event_with_any_schema_or_value_fails_alone(postgres: str) -> None:
    before = time.process_time()
    good = '{"op": "c", "after": {"a": null, "b": 1}}'
    for text in (
        *('{"schema": %s, "payload": {"op": "c", "after": {"a": 1, "b": 1}}}' % schema for schema in SCHEMAS),  # noqa: UP031 - braces
        *('{"op": "c", "after": {"a": %s, "b": 1}}' % value for value in VALUES),  # noqa: UP031 - braces
    ):
        errors: dict[int, str] = {}
        found = envelopes([text, good], errors)
        (column,), more = read(found.rows, [(("a",), postgres)], found.types)
        assert 1 not in errors | more
        assert column[1] is None
        converted, wrong = from_python(column, postgres)
        assert 1 not in wrong
        assert len(str(converted[0])) < 1_500
    assert time.process_time() - before < 10


@pytest.mark.parametrize(("value", "datum"), [({"type": "int", "logicalType": "date"}, varint(2**31 - 1)), ("bytes", b"\2\0" * 200_000)])
def test_page_shows_every_record_whatever_it_holds(value: Any, datum: bytes) -> None:
    sides = SimpleNamespace(key=Encoding.BYTES, value=Encoding.AVRO, uses_registry=True)
    decoding = Decoding(SimpleNamespace(format=sides, transform=None, name="c"), None, lambda: ["t"])  # type: ignore[arg-type]
    decoding._decoder = avro(value)
    shown = decoding.for_people("t", SimpleNamespace(key=None, value=datum, headers=[]))["value"]  # type: ignore[arg-type]
    assert shown.json is None
    assert "Python cannot represent" in (shown.problem or "") or "are not decoded here" in (shown.problem or "")
