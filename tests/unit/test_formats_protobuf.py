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
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from tidemark.consume.messages import input_schema
from tidemark.formats import protobuf
from tidemark.formats.decoder import Decoder, Undecodable
from tidemark.formats.protobuf import BadMessage, Message, compiled
from tidemark.formats.schema import BadSchema
from tidemark.spec.model import Encoding

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
  double f_double = 1;
  float f_float = 2;
  int32 f_int32 = 3;
  int64 f_int64 = 4;
  uint32 f_uint32 = 5;
  uint64 f_uint64 = 6;
  sint32 f_sint32 = 7;
  sint64 f_sint64 = 8;
  fixed32 f_fixed32 = 9;
  fixed64 f_fixed64 = 10;
  sfixed32 f_sfixed32 = 11;
  sfixed64 f_sfixed64 = 12;
  bool f_bool = 13;
  string f_string = 14;
  bytes f_bytes = 15;
  Kind f_enum = 16;
  optional string f_optional = 17;
  Line f_message = 18;
  repeated Line f_repeated = 19;
  repeated int32 f_packed = 20;
  map<string, int64> f_map = 21;
  map<int32, Line> f_map_of_messages = 22;
  oneof payment { string f_card = 23; int32 f_cash = 24; }
  google.protobuf.Timestamp f_timestamp = 25;
  google.protobuf.Duration f_duration = 26;
  google.protobuf.Int64Value f_wrapper = 27;
  google.protobuf.StringValue f_text_wrapper = 28;
  google.protobuf.Struct f_struct = 29;
  google.protobuf.Value f_value = 30;
  google.protobuf.ListValue f_list = 31;
  google.protobuf.Any f_any = 32;
  repeated Kind f_enums = 33;
  repeated google.protobuf.Struct f_structs = 34;

  message Note { string text = 1; }
}

message Parcel { string id = 1; }
"""
LINE = 'syntax = "proto3"; package shop; message Line { string sku = 1; int32 count = 2; }'
NONE = {
    "f_double": 0.0, "f_float": 0.0, "f_int32": 0, "f_int64": 0, "f_uint32": 0, "f_uint64": Decimal(0), "f_sint32": 0, "f_sint64": 0,
    "f_fixed32": 0, "f_fixed64": Decimal(0), "f_sfixed32": 0, "f_sfixed64": 0, "f_bool": False, "f_string": "", "f_bytes": b"",
    "f_enum": "UNKNOWN", "f_optional": None, "f_message": None, "f_repeated": [], "f_packed": [], "f_map": {}, "f_map_of_messages": {},
    "f_card": None, "f_cash": None, "f_timestamp": None, "f_duration": None, "f_wrapper": None, "f_text_wrapper": None, "f_struct": None,
    "f_value": None, "f_list": None, "f_any": None, "f_enums": [], "f_structs": [],
}  # fmt: skip
"""The decoded fields of an empty message."""
SAMPLES: dict[str, tuple[Any, Any, str]] = {
    # field: as JSON, read, Arrow type
    "f_double": (1.5, 1.5, "double"),
    "f_float": (1.5, 1.5, "float"),
    "f_int32": (-7, -7, "int32"),
    "f_int64": (-(2**62), -(2**62), "int64"),
    "f_uint32": (2**32 - 1, 2**32 - 1, "int64"),
    "f_uint64": (2**64 - 1, Decimal(2**64 - 1), "decimal128(20, 0)"),
    "f_sint32": (-7, -7, "int32"),
    "f_sint64": (-7, -7, "int64"),
    "f_fixed32": (7, 7, "int64"),
    "f_fixed64": (2**64 - 1, Decimal(2**64 - 1), "decimal128(20, 0)"),
    "f_sfixed32": (-7, -7, "int32"),
    "f_sfixed64": (-7, -7, "int64"),
    "f_bool": (True, True, "bool"),
    "f_string": ("Zürich", "Zürich", "string"),
    "f_bytes": ("AP8=", b"\x00\xff", "binary"),
    "f_enum": ("WEB", "WEB", "string"),
    "f_optional": ("", "", "string"),
    "f_message": ({"sku": "a"}, {"sku": "a", "count": 0}, "struct<sku: string, count: int32>"),
    "f_repeated": (
        [{"sku": "a"}, {}],
        [{"sku": "a", "count": 0}, {"sku": "", "count": 0}],
        "list<item: struct<sku: string, count: int32>>",
    ),
    "f_packed": ([1, 2], [1, 2], "list<item: int32>"),
    "f_map": ({"a": 1}, {"a": 1}, "map<string, int64>"),
    "f_map_of_messages": ({"5": {"count": 1}}, {"5": {"sku": "", "count": 1}}, "map<string, struct<sku: string, count: int32>>"),
    "f_card": ("", "", "string"),
    "f_cash": (0, 0, "int32"),
    "f_timestamp": ("2026-01-02T03:04:05.678901Z", dt.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=dt.UTC), "timestamp[us, tz=UTC]"),
    "f_duration": ("3.5s", dt.timedelta(seconds=3.5), "duration[us]"),
    "f_wrapper": ("0", 0, "int64"),
    "f_text_wrapper": ("", "", "string"),
    "f_struct": ({"a": [1, {"b": None}]}, '{"a": [1.0, {"b": null}]}', "string"),
    "f_value": ("x", '"x"', "string"),
    "f_list": ([1, "x"], '[1.0, "x"]', "string"),
    "f_any": (
        {"@type": "type.googleapis.com/google.protobuf.Duration", "value": "1s"},
        {"type_url": "type.googleapis.com/google.protobuf.Duration", "value": b"\x08\x01"},
        "struct<type_url: string, value: binary>",
    ),
    "f_enums": (["WEB", "UNKNOWN"], ["WEB", "UNKNOWN"], "list<item: string>"),
    "f_structs": ([{}, {"a": 1}], ["{}", '{"a": 1.0}'], "list<item: string>"),
}


@functools.cache
def order() -> Message:
    return compiled(ORDER, {"shop/line.proto": LINE})


@functools.cache
def google(name: str = "shop.Order") -> Any:
    return GetMessageClass(protobuf._pool(order().files).FindMessageTypeByName(name))


def written(**fields: Any) -> bytes:
    data: bytes = ParseDict(fields, google()(), descriptor_pool=protobuf._pool(order().files)).SerializeToString()
    return data


def read(*data: bytes) -> list[Any]:
    found: list[Any] = order().decode(pa.array(data, pa.binary())).to_pylist(maps_as_pydicts="strict")
    return found


@pytest.mark.parametrize("field", SAMPLES)
def test_each_type_has_one_arrow_type(field: str) -> None:
    """A missing field is null if Protobuf can tell that it is missing; otherwise it has its default."""
    value, expected, arrow = SAMPLES[field]
    assert read(written(**{field: value}), b"") == [NONE | {field: expected}, NONE]
    assert str(order().type().field(field).type) == arrow


def test_every_field_has_a_sample() -> None:
    assert {field.name for field in google().DESCRIPTOR.fields} == set(SAMPLES) == set(NONE)


def test_unknown_number_of_an_enum_is_its_text() -> None:
    message = google()()
    message.f_enum = 99
    assert read(message.SerializeToString())[0]["f_enum"] == "99"


def test_fields_of_other_versions_are_ignored_or_empty() -> None:
    """A newer producer writes fields that are unknown here, and an older one does not write all fields that are known here."""
    older = compiled('syntax = "proto3"; message Order { int32 f_int32 = 3; string gone = 99; }', {})
    assert older.decode(pa.array([written(f_int32=5, f_string="x")], pa.binary())).to_pylist() == [{"f_int32": 5, "gone": ""}]


PROTO2 = """
syntax = "proto2";
message Old {
  required int32 id = 1;
  optional string city = 2 [default = "Bern"];
  optional int32 count = 3;
}
"""


def test_proto2() -> None:
    message = compiled(PROTO2, {})
    assert message.decode(pa.array([b"\x08\x05"], pa.binary())).to_pylist()[0]["id"] == 5


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


def test_message_may_be_named() -> None:
    assert compiled(ORDER, {"shop/line.proto": LINE}, "shop.Order.Note").indexes == (0, 0)
    assert compiled(ORDER, {"shop/line.proto": LINE}, "shop.Parcel").indexes == (1,)
    with pytest.raises(BadSchema, match=r"has no message shop\.Line; it has shop\.Order, shop\.Order\.Note, shop\.Parcel"):
        compiled(ORDER, {"shop/line.proto": LINE}, "shop.Line")


def test_schema_may_be_a_descriptor_as_python_producers_register_it() -> None:
    files = {file.name: base64.b64encode(file.SerializeToString()).decode() for file in FileDescriptorSet.FromString(order().files).file}
    main = files.pop(protobuf.MAIN)
    found = compiled(main, {"shop/line.proto": files["shop/line.proto"]}, "shop.Parcel")
    assert found.indexes == (1,)
    assert compiled(main, {"shop/line.proto": files["shop/line.proto"]}).type() == order().type()
    with pytest.raises(BadSchema, match=r"imports shop/line\.proto, which it does not refer to"):
        compiled(main, {})


def test_reference_outside_its_folder_is_refused() -> None:
    with pytest.raises(BadSchema, match="not below its own folder"):
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
def test_message_that_is_cut_off_is_refused_as_google_refuses_it(order: dict[str, Any], cut: int) -> None:
    data = written(**order)[:-cut]
    try:
        google().FromString(data)
    except DecodeError:
        with pytest.raises(BadMessage):
            read(data)


@given(noise)
def test_noise_that_google_reads_is_read_alike_or_refused(data: bytes) -> None:
    """Only a map entry without a value is refused although Google reads it. Google's Python library drops a map entry with unknown fields,
    which is read here. Some noise that Google refuses is read: ptars checks neither the field number at the end of an unknown group, nor
    that a tag fits into 32 bits."""
    try:
        message = google().FromString(data)
    except DecodeError:
        return
    try:
        (found,) = read(data)
    except BadMessage:
        assert message.f_map_of_messages
        return
    assert (found["f_int64"], found["f_string"]) == (message.f_int64, message.f_string)
    assert dict(message.f_map).items() <= found["f_map"].items()
    assert [each["sku"] for each in found["f_repeated"]] == [each.sku for each in message.f_repeated]
    assert found["f_cash"] == (message.f_cash if message.HasField("f_cash") else None)


def framed(data: bytes, indexes: bytes = b"\0") -> bytes:
    return b"\0\0\0\0\x07" + indexes + data


def decoder(message: Message, *, framed: bool = True) -> Decoder:
    encodings = {"key": Encoding.BYTES, "value": Encoding.PROTOBUF}
    made = Decoder(encodings, {("orders", "value"): message}, framed={"key": True, "value": framed})
    return pickle.loads(pickle.dumps(made))  # as it is sent to the workers


def batch(values: list[bytes | None], headers: list[Any] | None = None) -> pa.RecordBatch:
    rows = [
        {"topic": "orders", "partition": 0, "offset": at, "value": value, "headers": headers[at] if headers else None}
        for at, value in enumerate(values)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=input_schema())


@given(st.lists(orders | st.none() | st.just("broken"), min_size=1, max_size=8))
def test_broken_data_fails_alone(given_: list[Any]) -> None:
    values = [None if each is None else framed(b"\xff" if each == "broken" else written(**each)) for each in given_]
    decoded, wrong = decoder(order()).batch(batch(values))
    good = [each for each in given_ if each != "broken"]
    assert sorted(wrong) == [at for at, each in enumerate(given_) if each == "broken"]
    expected = [None if each is None else each.get("f_int64", 0) for each in good]
    assert [each and each["f_int64"] for each in decoded["value"].to_pylist()] == expected


def test_id_and_indexes_before_the_message_or_in_a_header() -> None:
    """As confluent-kafka's serializers write them."""
    parcel = compiled(ORDER, {"shop/line.proto": LINE}, "shop.Parcel")
    data = google("shop.Parcel")(id="p").SerializeToString()
    of_parcel = b"\x02\x02"  # one index, which is 1
    header = [{"key": "__value_schema_id", "value": framed(b"", of_parcel)}]
    guid = [{"key": "__value_schema_id", "value": b"\x01" + b"g" * 16 + of_parcel}]
    values = [framed(data, of_parcel), data, data, framed(data), b"x", None, framed(b"", b"\xff")]
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
