"""Reads what Kafka Connect's JsonConverter writes, with schemas (``{"schema": …, "payload": …}``) or without.

A schema says what a number or a text stands for: a day, a time, a decimal. Without one, a value is read as Debezium's default settings
write a source column of the same type as the table's.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from tidemark.formats import connect
from tidemark.sink.types import base_of, digits_of
from tidemark.values import json_fields
from tidemark.values.json_text import json_text
from tidemark.values.plain import Misfit

UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes in place of a large value (TOAST) that the source has not sent."""
NOT_SENT = (
    "is not in the record, because the value is large (TOAST) and did not change. Set REPLICA IDENTITY FULL on the source table; the next "
    "change of this row then has all values"
)
Types = Mapping[str, Any] | None
"""The schema of a struct, as JsonConverter writes it; None if the record has none."""
_AS_IS = {
    **dict.fromkeys(("smallint", "integer", "bigint"), int),
    **dict.fromkeys(("text", "character varying", "character", "uuid", "enum"), str),
    "boolean": bool,
}
"""Types of values that stay as they are in a column."""
_MOST_DIGITS = 30
"""Of a number that can be a byte, or a byte times what turns milliseconds into microseconds."""
_NONE: Mapping[str, Any] = {}
"""In place of a record's schema that is none."""
_MICROS = 3
"""Times with more digits after the second are in microseconds, others in milliseconds."""


@dataclass(frozen=True)
class Placeholder:
    """What Debezium writes in place of a value that it could not send, by its setting ``unavailable.value.placeholder``."""

    text: str = UNAVAILABLE

    @functools.cached_property
    def bytes(self) -> list[int]:
        return [*self.text.encode()]

    @functools.cached_property
    def base64(self) -> str:
        return base64.b64encode(self.text.encode()).decode()

    @functools.cached_property
    def _marks(self) -> tuple[str, ...]:
        return (f'"{self.text}"', self.base64, ",".join(map(str, self.bytes)), ",".join(f"{byte}.0" for byte in self.bytes))

    def may_be_in(self, text: str) -> bool:
        """Whether a record in JSON may have it somewhere."""
        return any(mark in text for mark in self._marks)

    def is_in(self, value: Any) -> bool:
        """Whether a value is the placeholder, or has it within."""
        pending = [value]
        while pending:
            each = pending.pop()
            if isinstance(each, str | bytes):
                if each in (self.text, self.base64, self.text.encode()):
                    return True
            elif isinstance(each, Mapping):
                pending += [*each, *each.values()]
            elif isinstance(each, list):
                if self.is_written_in(each):
                    return True
                pending += each
        return False

    def is_written_in(self, values: Sequence[Any]) -> bool:
        """Whether numbers are its bytes, or a multiple of them: milliseconds become microseconds."""
        if len(values) != len(self.bytes) or not all(map(_can_be_multiplied, values)):
            return False
        first, least = values[0], self.bytes[0]
        return all(value * least == first * byte for value, byte in zip(values, self.bytes, strict=True))


def _can_be_multiplied(value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and bool(value) and abs(value.adjusted()) < _MOST_DIGITS
    return isinstance(value, int | float) and 0 < abs(value) < 10**_MOST_DIGITS


class _Record(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()


class _Envelope(msgspec.Struct):
    op: str | None = None
    after: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Envelopes:
    """Of each record: the envelope and the row in it as JSON, its operation, and its types."""

    payloads: list[str | None]
    rows: list[str | None]
    operations: list[str | None]
    types: list[Types]


_RECORD = msgspec.json.Decoder(_Record)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_ROW = msgspec.json.Decoder(dict[str, Any], float_hook=json_fields.number)


def payloads(texts: Sequence[str | None]) -> tuple[list[str | None], list[Types]]:
    """The texts without their schemas, and the schemas. A text that is not an object is returned as it is."""
    bare: list[str | None] = []
    types: list[Types] = []
    for text in texts:
        try:
            found = None if text is None else _RECORD.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            found = None
        schema = b"" if found is None else bytes(found.schema)
        payload = b"" if found is None else bytes(found.payload)
        if found is not None and payload and (schema.startswith(b"{") or (schema == b"null" and payload.startswith(b"{"))):
            bare.append(_text(found.payload))
            types.append(None if schema == b"null" else _parsed(schema) or _NONE)
        else:
            bare.append(text)
            types.append(None)
    return bare, types


def envelopes(texts: Sequence[str | None], errors: dict[int, str]) -> Envelopes:
    """The envelopes of change data. ``errors`` gets the places of texts that are not envelopes, with ``Type: reason``."""
    bare, types = payloads(texts)
    rows: list[str | None] = []
    operations: list[str | None] = []
    for at, text in enumerate(bare):
        found = _Envelope()
        try:
            if text is not None:
                found = _ENVELOPE.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            errors[at] = f"Undecodable: it is not an envelope in JSON: {json_fields.problem(text or '', error)}"
        rows.append(_text(found.after))
        operations.append(found.op)
    return Envelopes(bare, rows, operations, [_schema_at(each, ("after",)) for each in types])


def read(
    texts: Sequence[str | None],
    leaves: Sequence[tuple[tuple[str, ...], str]],
    types: Sequence[Types],
    placeholder: Placeholder = Placeholder(),
    with_default: Set[json_fields.Leaf] = frozenset(),
) -> tuple[list[list[Any]], dict[int, str]]:
    """The value at each path, for a column of the type, one for each text; and the places of texts that cannot be read so, with
    ``Type: reason``. Like `json_fields.read`, but by the records' schemas."""
    errors: dict[int, str] = {}
    rows = [_row(text, at, errors) for at, text in enumerate(texts)]
    complete = [text is None or not placeholder.may_be_in(text) for text in texts]
    missing = {leaf: json_fields.ABSENT if leaf in with_default else None for leaf in leaves}
    return [_column(rows, *leaf, types, complete, placeholder, errors, missing[leaf]) for leaf in leaves], errors


def not_sent(
    texts: Sequence[str | None],
    columns: Sequence[Sequence[Any]],
    leaves: Sequence[tuple[tuple[str, ...], str]],
    placeholder: Placeholder,
) -> dict[int, str]:
    """The records of which Debezium has not sent one of the values read from them, with ``Type: reason``."""
    found: dict[int, str] = {}
    some = placeholder.may_be_in("\n".join(text for text in texts if text is not None))
    suspects = [some and text is not None and placeholder.may_be_in(text) for text in texts]
    for values, (path, postgres) in zip(columns, leaves, strict=True):
        for at, value in enumerate(values) if some or postgres.endswith("[]") else ():
            within = suspects[at] and isinstance(value, str) and f'"{placeholder.text}"' in value  # of a JSON column
            if within or ((suspects[at] or isinstance(value, list)) and placeholder.is_in(value)):
                found[at] = f"Fail: {'.'.join(path)} {NOT_SENT}"
    return found


def _column(
    rows: Sequence[Mapping[str, Any]],
    path: Sequence[str],
    postgres: str,
    types: Sequence[Types],
    complete: Sequence[bool],
    placeholder: Placeholder,
    errors: dict[int, str],
    missing: Any,
) -> list[Any]:
    """``complete``: whether Debezium has sent all values of a row. ``missing``: in place of a field that a row does not have."""
    first, below = path[0], path[1:]
    schemas: dict[int, tuple[Types, type | None]] = {}  # by the identity of the record's schema, which is cached
    values: list[Any] = []
    for at, row in enumerate(rows):
        value = row.get(first, missing)
        for name in below:
            value = value.get(name, missing) if isinstance(value, Mapping) else missing
        if value is None or value is missing:
            values.append(value)
            continue
        key = id(types[at])
        try:
            if key not in schemas:
                schema = _schema_at(types[at], path)
                schemas[key] = (schema, _plain(postgres, schema))
            schema, plain = schemas[key]
            if (not complete[at] or isinstance(value, list)) and placeholder.is_in(value):
                raise Misfit(NOT_SENT)
            values.append(value if type(value) is plain else _converted(value, postgres, schema))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the record's
            why = str(error) if isinstance(error, Misfit | connect.NoValue) else _problem(error, value)
            said = why if why == NOT_SENT else f"does not fit {postgres}: the value {why}"
            errors.setdefault(at, f"Fail: {'.'.join(path)} {said}")
            values.append(None)
    return values


def _problem(error: Exception, value: Any) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, OverflowError):
        return "is out of range"
    return str(error) if isinstance(error, connect.NotOfSchema) else f"is of type {type(value).__name__}"


def _schema_at(types: Types, path: Sequence[str]) -> Types:
    """The schema below ``path``, `_NONE` if the record's schema has not the form of one."""
    for name in path:
        if types is None or types is _NONE:
            return types
        fields = types.get("fields") or []
        if not isinstance(fields, list) or not all(isinstance(each, dict) for each in fields):
            return _NONE
        types = next((each for each in fields if each.get("field") == name), None)
    return types


def _plain(postgres: str, schema: Types) -> type | None:
    """The type of values that need no conversion."""
    if schema is _NONE:
        raise Misfit("has a schema that does not have the form of a schema of Kafka Connect")
    if schema is not None and (schema.get("name") in connect.NAMES or schema.get("type") == "bytes"):
        return None
    return _AS_IS.get(base_of(postgres))


def _row(text: str | None, at: int, errors: dict[int, str]) -> Mapping[str, Any]:
    try:
        return {} if text is None else _ROW.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        errors[at] = f"Undecodable: it is not a JSON object: {json_fields.problem(text or '', error)}"
        return {}


def _converted(value: Any, postgres: str, schema: Types) -> Any:
    """As `convert.from_python` takes it for a column of this type."""
    base = base_of(postgres)
    if base in ("json", "jsonb"):
        is_text = isinstance(value, str) and (schema is None or schema.get("name") == connect.JSON)
        return value if is_text else json_text(value if schema is None else connect.value_of(value, schema))
    if base.endswith("[]") and isinstance(value, list):
        items = None if schema is None else schema.get("items")
        return [None if each is None else _converted(each, postgres[:-2], items) for each in value]
    found = connect.value_of(value, schema if schema is not None else _guessed(value, base, digits_of(postgres) or ()))
    return json_fields.from_base64s(found) if base == "bytea" else found


def _guessed(value: Any, base: str, digits: Sequence[int]) -> Mapping[str, Any]:
    """The schema that Debezium's default settings give a source column of this type."""
    number = isinstance(value, int)
    in_millis = bool(digits) and digits[0] <= _MICROS
    if base == "numeric" and isinstance(value, str):
        if len(digits) < 2 or "." in value:
            raise Misfit("is text, and by default Debezium writes such a number in base64; use schemas, or Avro")
        return {"name": connect.DECIMAL, "parameters": {"scale": digits[1]}}
    if base == "numeric" and isinstance(value, Mapping):
        return {"name": connect.VARIABLE_DECIMAL}
    if base == "bytea":
        return {"type": "bytes"}
    if base == "timestamp with time zone":
        return {"name": connect.CONNECT_TIMESTAMP if number else connect.ZONED_TIMESTAMP}
    named = {
        "date": connect.DATE,
        "time without time zone": connect.TIME if in_millis else connect.MICRO_TIME,
        "timestamp without time zone": connect.TIMESTAMP if in_millis else connect.MICRO_TIMESTAMP,
        "interval": connect.DURATION,
    }
    return {"name": named[base]} if number and base in named else {}


@functools.lru_cache(maxsize=256)
def _parsed(schema: bytes) -> Types:
    try:
        found: Types = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found


def _text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode()
    return None if text in ("", "null") else text
