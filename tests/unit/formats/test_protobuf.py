"""Decoding of Protobuf, compared with Google's own library."""

from __future__ import annotations

import base64
import datetime as dt
import functools
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st
from tests.support.encoded import batch, framed

from tidemark.formats import protobuf
from tidemark.formats.connect import InvalidConnectValue
from tidemark.formats.decoder import Decoder, Undecodable
from tidemark.formats.protobuf import BadMessage, Message, compiled
from tidemark.formats.schema import BadSchema
from tidemark.spec.model import Encoding

MOMENT = "2026-01-02T03:04:05.678901Z"
URL = "type.googleapis.com/google.protobuf.Duration"
SAMPLES: dict[str, tuple[str, Any, Any, Any]] = {
    # declaration: Arrow type, as JSON, read, read from an empty message
    "double f_double": ("double", 1.5, 1.5, 0.0),
    "float f_float": ("float", 1.5, 1.5, 0.0),
    "int32 f_int32": ("int32", -7, -7, 0),
    "int64 f_int64": ("int64", -(2**62), -(2**62), 0),
    "uint32 f_uint32": ("int64", 2**32 - 1, 2**32 - 1, 0),
    "uint64 f_uint64": ("decimal128(20, 0)", 2**64 - 1, Decimal(2**64 - 1), Decimal(0)),
    "sint32 f_sint32": ("int32", -7, -7, 0),
    "sint64 f_sint64": ("int64", -7, -7, 0),
    "fixed32 f_fixed32": ("int64", 7, 7, 0),
    "fixed64 f_fixed64": ("decimal128(20, 0)", 2**64 - 1, Decimal(2**64 - 1), Decimal(0)),
    "sfixed32 f_sfixed32": ("int32", -7, -7, 0),
    "sfixed64 f_sfixed64": ("int64", -7, -7, 0),
    "bool f_bool": ("bool", True, True, False),
    "string f_string": ("string", "Zürich", "Zürich", ""),
    "bytes f_bytes": ("binary", "AP8=", b"\x00\xff", b""),
    "Kind f_enum": ("string", "WEB", "WEB", "UNKNOWN"),
    "optional string f_optional": ("string", "", "", None),
    "Line f_message": ("struct<sku: string, count: int32>", {"sku": "a"}, {"sku": "a", "count": 0}, None),
    "repeated Line f_repeated": ("list<item: struct<sku: string, count: int32>>", [{}], [{"sku": "", "count": 0}], []),
    "repeated int32 f_packed": ("list<item: int32>", [1, 2], [1, 2], []),
    "map<string, int64> f_map": ("map<string, int64>", {"a": 1}, {"a": 1}, {}),
    "map<int32, Note> f_messages": ("map<string, struct<text: string>>", {"5": {}}, {"5": {"text": ""}}, {}),
    "google.protobuf.Timestamp f_timestamp": ("timestamp[us, tz=UTC]", MOMENT, dt.datetime.fromisoformat(MOMENT), None),
    "google.protobuf.Duration f_duration": ("duration[us]", "3.5s", dt.timedelta(seconds=3.5), None),
    "google.protobuf.Int64Value f_wrapper": ("int64", "0", 0, None),
    "google.protobuf.StringValue f_text_wrapper": ("string", "", "", None),
    "google.protobuf.Struct f_struct": ("string", {"a": [1, {"b": None}]}, '{"a": [1.0, {"b": null}]}', None),
    "google.protobuf.Value f_value": ("string", "x", '"x"', None),
    "google.protobuf.ListValue f_list": ("string", [1, "x"], '[1.0, "x"]', None),
    "google.protobuf.Any f_any": (
        *("struct<type_url: string, value: binary>", {"@type": URL, "value": "1s"}),
        *({"type_url": URL, "value": b"\x08\x01"}, None),
    ),
    "repeated Kind f_enums": ("list<item: string>", ["WEB", "UNKNOWN"], ["WEB", "UNKNOWN"], []),
    "repeated google.protobuf.Struct f_structs": ("list<item: string>", [{}, {"a": 1}], ["{}", '{"a": 1.0}'], []),
    "string f_card": ("string", "", "", None),
    "int32 f_cash": ("int32", 0, 0, None),
}
FIELDS = [f"{declared} = {number};" for number, declared in enumerate(SAMPLES, start=1)]
NONE = {declared.split()[-1]: empty for declared, (*_, empty) in SAMPLES.items()}
"""The decoded fields of an empty message."""
ORDER = """
syntax = "proto3";
package shop;
import "google/protobuf/any.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "shop/line.proto";

enum Kind { UNKNOWN = 0; WEB = 1; }

message Order {
  FIELDS
  oneof payment { PAYMENT }
  message Note { string text = 1; }
}

message Parcel { string id = 1; }
""".replace("FIELDS", "\n  ".join(FIELDS[:-2])).replace("PAYMENT", " ".join(FIELDS[-2:]))
LINE = 'syntax = "proto3"; package shop; message Line { string sku = 1; int32 count = 2; }'


@functools.cache
def order(name: str | None = None) -> Message:
    return compiled(ORDER, {"shop/line.proto": LINE}, name)


@functools.cache
def pool(message: Message) -> DescriptorPool:
    made = DescriptorPool()
    for file in FileDescriptorSet.FromString(message.files).file:
        made.Add(file)
    return made


@functools.cache
def google(message: Message) -> Any:
    """Google's class for a message type."""
    return GetMessageClass(pool(message).FindMessageTypeByName(message.name))


def written(**fields: Any) -> bytes:
    data: bytes = ParseDict(fields, google(order())(), descriptor_pool=pool(order())).SerializeToString()
    return data


def read(*data: bytes) -> list[Any]:
    found: list[Any] = order().decode(pa.array(data, pa.binary())).to_pylist(maps_as_pydicts="strict")
    return found


@pytest.mark.parametrize("declared", SAMPLES)
def test_each_type_has_one_arrow_type(declared: str) -> None:
    """A missing field is null if Protobuf can tell that it is missing; otherwise it has its default."""
    arrow, value, expected, _ = SAMPLES[declared]
    field = declared.split()[-1]
    assert read(written(**{field: value}), b"") == [NONE | {field: expected}, NONE]
    assert str(order().type().field(field).type) == arrow


TIMES = compiled(
    'syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/duration.proto";'
    " message Times { google.protobuf.Timestamp at = 1; repeated google.protobuf.Duration took = 2;"
    " map<string, google.protobuf.Timestamp> by_name = 3; oneof one { google.protobuf.Duration last = 4; string text = 5; } }",
    {},
)


def time(seconds: int, nanos: int) -> bytes:
    """A message of `TIMES` with the same time in each field."""
    made = google(TIMES)()
    for each in (made.at, made.took.add(), made.by_name["a"], made.last):
        each.seconds, each.nanos = seconds, nanos
    data: bytes = made.SerializeToString()
    return data


@given(st.integers(-62_135_596_800, 253_402_300_799), st.integers(0, 999_999))
def test_time_has_its_microseconds(seconds: int, micros: int) -> None:
    (found,) = TIMES.decode(pa.array([time(seconds, micros * 1_000)], pa.binary())).to_pylist()
    took = dt.timedelta(seconds=seconds, microseconds=micros)
    at = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + took
    assert found == {"at": at, "took": [took], "by_name": [("a", at)], "last": took, "text": None}


@pytest.mark.parametrize(
    ("seconds", "nanos", "problem"),
    [(0, 1, "more than 6 digits"), (-1, -999_999_999, "more than 6 digits"), (2**62, 0, "out of range"), (-(2**63), 0, "out of range")],
)
def test_time_that_cannot_be_stored_is_no_other_time(seconds: int, nanos: int, problem: str) -> None:
    with pytest.raises(InvalidConnectValue, match=problem):
        TIMES.decode(pa.array([time(seconds, nanos)], pa.binary()))


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("", "message tidemark { google.protobuf.Timestamp at = 1; } message Other { google.protobuf.Timestamp at = 1; }"),
        ("package tidemark;", "message seconds { google.protobuf.Timestamp at = 1; }"),
        ("package google.protobuf.zz;", "message M { Timestamp at = 1; message Inner { Timestamp at = 1; } Inner inner = 2; }"),
    ],
)
def test_time_whatever_the_names_around_it(package: str, message: str) -> None:
    made = compiled(f'syntax = "proto3"; {package} import "google/protobuf/timestamp.proto"; {message}', {})
    written = google(made)()
    written.at.seconds = 5
    (found,) = made.decode(pa.array([written.SerializeToString()], pa.binary())).to_pylist()
    assert found["at"] == dt.datetime(1970, 1, 1, 0, 0, 5, tzinfo=dt.UTC)


def test_struct_that_is_required() -> None:
    made = compiled('syntax = "proto2"; import "google/protobuf/struct.proto"; message M { required google.protobuf.Struct doc = 1; }', {})
    assert made.decode(pa.array([b"\x0a\x00"], pa.binary())).to_pylist() == [{"doc": "{}"}]


def test_fields_of_other_versions_are_ignored_or_empty() -> None:
    """A newer producer writes fields that are unknown here, and an older one does not write all fields that are known here. The unknown
    number of an enum is its text."""
    older = compiled('syntax = "proto3"; message Order { int32 f_int32 = 3; string gone = 99; }', {})
    assert older.decode(pa.array([written(f_int32=5, f_string="x")], pa.binary())).to_pylist() == [{"f_int32": 5, "gone": ""}]
    assert read(google(order())(f_enum=99).SerializeToString())[0]["f_enum"] == "99"
    proto2 = compiled('syntax = "proto2"; message Old { required int32 id = 1; optional string city = 2 [default = "Bern"]; }', {})
    assert proto2.decode(pa.array([b"\x08\x05"], pa.binary())).to_pylist()[0]["id"] == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("message {", "cannot be compiled: schema.proto:1:9: Expected message name"),
        ('syntax = "proto3"; import "other.proto";', "cannot be compiled: other.proto: File not found"),
        ('syntax = "proto3"; enum E { A = 0; }', "defines no message"),
        ('syntax = "proto3"; message A { A a = 1; }', "is recursive: A contains itself, which no table can hold"),
        ('syntax = "proto3"; message A { }', "has the message A, which has no fields"),
        ('syntax = "proto2"; message A { optional group B = 1 { optional int32 c = 1; } }', "has the group b, which is not supported"),
    ],
)
def test_schema_that_cannot_be_used_says_why(text: str, said: str) -> None:
    with pytest.raises(BadSchema) as caught:
        compiled(text, {})
    assert said in caught.value.problem
    assert "/tmp" not in caught.value.problem


@pytest.mark.parametrize("edition", ["2023", "2024"])
def test_edition_is_refused(edition: str) -> None:
    """The decoder panics on one."""
    with pytest.raises(BadSchema, match=r"uses an edition of Protobuf|cannot be compiled"):
        compiled(f'edition = "{edition}"; package shop; message Order {{ int64 id = 1; }}', {})


def test_message_may_be_named() -> None:
    assert order("shop.Order.Note").indexes == (0, 0)
    assert order("shop.Parcel").indexes == (1,)
    with pytest.raises(BadSchema, match=r"has no message shop\.Line; it has shop\.Order, shop\.Order\.Note, shop\.Parcel"):
        order("shop.Line")


def test_schema_may_be_a_descriptor_as_python_producers_register_it() -> None:
    files = {file.name: base64.b64encode(file.SerializeToString()).decode() for file in FileDescriptorSet.FromString(order().files).file}
    main = files.pop(protobuf.MAIN)
    references = {"shop/line.proto": files["shop/line.proto"]}
    assert compiled(main, references, "shop.Parcel").indexes == (1,)
    assert compiled(main, references).type() == order().type()
    with pytest.raises(BadSchema, match=r'imports "shop/line\.proto", which it does not refer to'):
        compiled(main, {})
    with pytest.raises(BadSchema, match=r"not a \.proto file below its own folder"):
        compiled(ORDER, {"../line.proto": LINE})


orders = st.fixed_dictionaries(
    {},
    optional={
        "f_int64": st.integers(-(2**63), 2**63 - 1),
        "f_string": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        "f_repeated": st.lists(st.just({"sku": "a"}), max_size=3),
        "f_map": st.dictionaries(st.sampled_from("ab"), st.integers(0, 5), max_size=2),
        "f_cash": st.integers(0, 5),
    },
)
noise = st.binary(max_size=20) | st.builds(
    lambda order, cut, more: written(**order)[:cut] + more, orders, st.integers(0, 40), st.binary(max_size=4)
)


@given(orders, st.integers(1, 40))
def test_message_that_is_cut_off_is_refused_as_google_refuses_it(fields: dict[str, Any], cut: int) -> None:
    data = written(**fields)[:-cut]
    try:
        google(order()).FromString(data)
    except DecodeError:
        with pytest.raises(BadMessage):
            read(data)


@given(noise)
def test_noise_that_google_reads_is_read_alike_or_refused(data: bytes) -> None:
    """Only a map entry without a value is refused although Google reads it. Google's Python library drops a map entry with unknown fields,
    which is read here. Some noise that Google refuses is read: ptars checks neither the field number at the end of an unknown group, nor
    that a tag fits into 32 bits."""
    try:
        message = google(order()).FromString(data)
    except DecodeError:
        return
    try:
        (found,) = read(data)
    except BadMessage:
        assert message.f_messages
        return
    assert (found["f_int64"], found["f_string"]) == (message.f_int64, message.f_string)
    assert dict(message.f_map).items() <= found["f_map"].items()
    assert [each["sku"] for each in found["f_repeated"]] == [each.sku for each in message.f_repeated]
    assert found["f_cash"] == (message.f_cash if message.HasField("f_cash") else None)


def decoder(message: Message, *, framed: bool = True) -> Decoder:
    encodings = {"key": Encoding.BYTES, "value": Encoding.PROTOBUF}
    made = Decoder(encodings, {("orders", "value"): message}, framed={"key": True, "value": framed})
    return pickle.loads(pickle.dumps(made))  # as it is sent to the workers


@given(st.lists(orders | st.none() | st.just("broken"), min_size=1, max_size=8))
def test_broken_data_fails_alone(given_: list[Any]) -> None:
    values = [None if each is None else framed(b"\0" + (b"\xff" if each == "broken" else written(**each))) for each in given_]
    decoded, wrong = decoder(order()).batch(batch(values))
    good = [each for each in given_ if each != "broken"]
    assert sorted(wrong) == [at for at, each in enumerate(given_) if each == "broken"]
    expected = [None if each is None else each.get("f_int64", 0) for each in good]
    assert [each and each["f_int64"] for each in decoded["value"].to_pylist()] == expected


def test_id_and_indexes_before_the_message_or_in_a_header() -> None:
    """As confluent-kafka's serializers write them."""
    parcel = order("shop.Parcel")
    data = google(parcel)(id="p").SerializeToString()
    of_parcel = b"\x02\x02"  # one index, which is 1
    header = [{"key": "__value_schema_id", "value": framed(of_parcel)}]
    guid = [{"key": "__value_schema_id", "value": b"\x01" + b"g" * 16 + of_parcel}]
    values = [framed(of_parcel + data), data, data, framed(b"\0" + data), b"x", None, framed(b"\xff")]
    decoded, wrong = decoder(parcel).batch(batch(values, [None, header, guid, None, None, None, None]))
    assert decoded["value"].to_pylist() == [{"id": "p"}] * 3 + [None]
    assert {at: str(error) for at, error in wrong.items()} == {
        3: "its value is message 0 of its schema, and shop.Parcel is 1",
        4: "its value has no schema id: it does not begin with a zero byte and four more",
        6: "its value has no message indexes after its schema id",
    }
    assert {type(error) for error in wrong.values()} == {Undecodable}


def test_schema_file_reads_messages_without_ids() -> None:
    decoded, wrong = decoder(order(), framed=False).batch(batch([written(f_int64=5), None, b"\xff"]))
    assert [each and each["f_int64"] for each in decoded["value"].to_pylist()] == [5, None]
    assert list(wrong) == [2]
