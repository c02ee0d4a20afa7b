"""Derives columns for JSON from the fields of sampled records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tidemark.errors import Refused
from tidemark.formats import connect
from tidemark.formats.decoder import Decoder
from tidemark.sink.types import postgres_type
from tidemark.spec.model import Encoding
from tidemark.values import connect_json, debezium
from tidemark.values.conversion import from_python

if TYPE_CHECKING:
    import pyarrow as pa

BIGINT = range(-(2**63), 2**63)
WRITE_ONE = "Write a transform that reads it: format: {value: bytes}, or {value: string} for text, and transform: module:function."
_OF_CONNECT = {
    "boolean": "boolean",
    "int8": "smallint",
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "bytes": "bytea",
}


@dataclass(frozen=True, slots=True)
class SampledField:
    """A field of the values. ``type``: the column's, `None` if the schema decides. ``required``: never null. ``nested``: its values are
    objects."""

    name: str
    type: str | None
    required: bool
    nested: bool = False


class NoSketch(Refused):
    """The topic's values cannot be read without a transform."""

    topic: str
    problem: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.problem}. {WRITE_ONE}"


@dataclass(frozen=True, slots=True)
class JsonSample:
    """Sampled records. ``objects``: the parsed JSON of each input column, without nulls. ``schemas``: Kafka Connect's schemas of keys and
    values."""

    topic: str
    objects: Mapping[str, list[Any]]
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, topic: str, value: Encoding, messages: pa.RecordBatch, key: Encoding = Encoding.BYTES) -> JsonSample:
        """Keys and values of these formats; an exception in place of a text that is not JSON."""
        sides = {"value": value, "key": key}
        return cls(
            topic, {side: _parsed(topic, encoding, messages, side) for side, encoding in sides.items() if encoding is not Encoding.BYTES}
        )

    @classmethod
    def of_changes(cls, topic: str, messages: pa.RecordBatch) -> JsonSample | None:
        """Rows and keys of change data. `None` if the messages are not change data."""
        errors: dict[int, str] = {}
        envelopes = connect_json.envelopes([_text(value) for value in messages["value"].to_pylist()], errors)
        present = [operation for operation, payload in zip(envelopes.operations, envelopes.payloads, strict=True) if payload is not None]
        if errors or not present or not {*present} <= debezium.OPERATIONS:
            return None
        keys, key_types = connect_json.payloads([_text(key) for key in messages["key"].to_pylist()])
        texts = {"value": envelopes.rows, "key": keys, "change": envelopes.payloads}
        objects = {side: [msgspec.json.decode(text) for text in side_texts if text is not None] for side, side_texts in texts.items()}
        types = {"value": envelopes.types, "key": key_types}
        newest = {side: next((schema for schema in reversed(schemas) if schema is not None), None) for side, schemas in types.items()}
        return cls(topic, objects, {side: schema for side, schema in newest.items() if schema is not None})

    def fields(self, side: str = "value") -> list[SampledField]:
        """The fields in the schema, or in the objects, in the order in which they first appear. Raises `NoSketch`."""
        if (schema := self.schemas.get(side)) is not None:
            return [SampledField(entry["field"], _type_of(entry), not entry.get("optional")) for entry in schema["fields"]]
        objects = [record for record in self.objects[side] if isinstance(record, dict)]
        names = list(dict.fromkeys(name for record in objects for name in record))
        if not names:
            raise NoSketch(topic=self.topic, problem=f"none of its latest {side}s is a JSON object with fields to derive columns from")
        values = {name: [record[name] for record in objects if record.get(name) is not None] for name in names}
        return [
            SampledField(name, column_type(present), len(present) == len(objects), {*map(type, present)} == {dict})
            for name, present in values.items()
        ]

    def type_at(self, steps: Sequence[str]) -> str:
        """The column type for the field at this path."""
        side, *path = steps
        values = self.objects[side]
        for name in path:
            values = [value.get(name) if isinstance(value, dict) else None for value in values]
        return column_type([value for value in values if value is not None]) if path else "jsonb"


def _parsed(topic: str, encoding: Encoding, messages: pa.RecordBatch, side: str) -> list[Any]:
    values = messages[side].drop_null().to_pylist()
    framed = dict.fromkeys(("key", "value"), True)
    encodings = dict.fromkeys(("key", "value"), Encoding.BYTES) | {side: encoding}
    return Decoder(encodings, framed=framed).objects(topic, side, values, [[]] * len(values))


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "replace")


def _type_of(schema: Mapping[str, Any]) -> str:
    """The column type for data of a Kafka Connect schema."""
    name = schema.get("name", "")
    if (column := connect.postgres_type(name)) is not None:
        return column
    if name == connect.DECIMAL:
        digits = schema["parameters"].get("connect.decimal.precision")
        return f"numeric({digits},{schema['parameters']['scale']})" if digits else "numeric"
    if (arrow := connect.arrow_type(name)) is not None:
        return postgres_type(arrow) or "text"
    if schema["type"] == "array":
        return f"{inner}[]" if (inner := _type_of(schema["items"])) in _OF_CONNECT.values() else "jsonb"
    return _OF_CONNECT.get(schema["type"], "jsonb")


def column_type(values: Sequence[Any]) -> str:
    """The type of a column that can hold these non-null JSON values."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "bigint" if all(value in BIGINT for value in values) else "numeric"
    if kinds and kinds <= {int, float}:
        return "double precision"
    if kinds == {str} and all(map(_is_moment, values)):
        return "timestamp with time zone"
    return "text" if kinds <= {str} else "jsonb"


def _is_moment(text: str) -> bool:
    """Whether a run would read this as a time in ISO 8601 with a time zone."""
    return not from_python([text], "timestamp with time zone")[1]
