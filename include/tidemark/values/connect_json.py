"""Reads the output of Kafka Connect's JsonConverter, with schemas (``{"schema": …, "payload": …}``) or without.

A schema defines the meaning of a number or a text: a day, a time, a decimal. Without one, a value is read as Debezium's default settings
write a source column of the table column's type.
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
from tidemark.formats.connect import Misfit
from tidemark.sink.types import base_of, digits_of
from tidemark.values import json_fields
from tidemark.values.conversion import INTEGERS, JSONS, TEXTS
from tidemark.values.json_text import json_text

UNAVAILABLE = "__debezium_unavailable_value"
"""Debezium's text in place of a large value (TOAST) that the source has not sent."""
NOT_SENT = (
    "is not in the record, because the value is large (TOAST) and did not change. Set REPLICA IDENTITY FULL on the source table; the next "
    "change of this row then has all values"
)
Types = Mapping[str, Any] | None
"""The schema of a struct, as JsonConverter writes it; None for a record without a schema."""
_AS_IS = {**dict.fromkeys(INTEGERS, int), **dict.fromkeys((*TEXTS, "uuid", "enum"), str), "boolean": bool}
"""Python types of values that a column stores unchanged."""
_MAX_DIGITS = 30
"""Maximum digits of a number that may be a byte of the placeholder, or a byte multiplied by a unit of time."""
_INVALID: Mapping[str, Any] = {}
"""In place of an invalid schema of a record."""
_MICROS = 3
"""Times with more fractional digits than this are in microseconds, others in milliseconds."""


@dataclass(frozen=True)
class Placeholder:
    """Debezium's substitute for a value that it could not send: its setting ``unavailable.value.placeholder``."""

    text: str = UNAVAILABLE

    @functools.cached_property
    def bytes(self) -> list[int]:
        return [*self.text.encode()]

    @functools.cached_property
    def base64(self) -> str:
        return base64.b64encode(self.text.encode()).decode()

    @functools.cached_property
    def _encoded_forms(self) -> tuple[str, ...]:
        return (f'"{self.text}"', self.base64, ",".join(map(str, self.bytes)), ",".join(f"{byte}.0" for byte in self.bytes))

    def may_be_in(self, text: str) -> bool:
        """Whether a record in JSON may contain the placeholder."""
        return any(form in text for form in self._encoded_forms)

    def is_in(self, value: Any) -> bool:
        """Whether a value is the placeholder, or contains it."""
        pending = [value]
        while pending:
            current = pending.pop()
            if isinstance(current, str | bytes):
                if current in (self.text, self.base64, self.text.encode()):
                    return True
            elif isinstance(current, Mapping):
                pending += [*current, *current.values()]
            elif isinstance(current, list):
                if self.is_written_in(current):
                    return True
                pending += current
        return False

    def is_written_in(self, values: Sequence[Any]) -> bool:
        """Whether the numbers are the placeholder's bytes, or a multiple of them: milliseconds become microseconds."""
        if len(values) != len(self.bytes) or not all(map(_can_be_multiplied, values)):
            return False
        first_value, first_byte = values[0], self.bytes[0]
        return all(value * first_byte == first_value * byte for value, byte in zip(values, self.bytes, strict=True))


def _can_be_multiplied(value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and bool(value) and abs(value.adjusted()) < _MAX_DIGITS
    return isinstance(value, int | float) and 0 < abs(value) < 10**_MAX_DIGITS


class _Record(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()


class _Envelope(msgspec.Struct):
    op: str | None = None
    after: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Envelopes:
    """For each record: the envelope and its row as JSON, the operation, and the types."""

    payloads: list[str | None]
    rows: list[str | None]
    operations: list[str | None]
    types: list[Types]


_RECORD = msgspec.json.Decoder(_Record)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_ROW = msgspec.json.Decoder(dict[str, Any], float_hook=json_fields.number)


def payloads(texts: Sequence[str | None]) -> tuple[list[str | None], list[Types]]:
    """Splits texts into payloads and schemas. A text that is not an object is returned unchanged."""
    bare: list[str | None] = []
    types: list[Types] = []
    for text in texts:
        try:
            record = None if text is None else _RECORD.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            record = None
        schema = b"" if record is None else bytes(record.schema)
        payload = b"" if record is None else bytes(record.payload)
        if record is not None and payload and (schema.startswith(b"{") or (schema == b"null" and payload.startswith(b"{"))):
            bare.append(json_fields.text_of(record.payload))
            types.append(None if schema == b"null" else _parsed(schema) or _INVALID)
        else:
            bare.append(text)
            types.append(None)
    return bare, types


def envelopes(texts: Sequence[str | None], errors: dict[int, str]) -> Envelopes:
    """The envelopes of change data. Adds ``Type: reason`` to ``errors`` for each text that is not an envelope."""
    bare, types = payloads(texts)
    rows: list[str | None] = []
    operations: list[str | None] = []
    for at, text in enumerate(bare):
        envelope = _Envelope()
        try:
            if text is not None:
                envelope = _ENVELOPE.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            errors[at] = f"Undecodable: it is not an envelope in JSON: {json_fields.problem(text or '', error)}"
        rows.append(json_fields.text_of(envelope.after))
        operations.append(envelope.op)
    return Envelopes(bare, rows, operations, [_schema_at(record_types, ("after",)) for record_types in types])


def read(
    texts: Sequence[str | None],
    leaves: Sequence[tuple[tuple[str, ...], str]],
    types: Sequence[Types],
    placeholder: Placeholder = Placeholder(),
    with_default: Set[json_fields.Leaf] = frozenset(),
) -> tuple[list[list[Any]], dict[int, str]]:
    """Reads a column of values for each leaf, one value per text, and ``Type: reason`` for unreadable texts, by index. Like
    `json_fields.read`, but by the records' schemas."""
    errors: dict[int, str] = {}
    rows = [_row(text, at, errors) for at, text in enumerate(texts)]
    complete = [text is None or not placeholder.may_be_in(text) for text in texts]
    records = _Records(rows, types, complete, placeholder, errors)
    return [records.column(*leaf, json_fields.ABSENT if leaf in with_default else None) for leaf in leaves], errors


def not_sent(
    texts: Sequence[str | None],
    columns: Sequence[Sequence[Any]],
    leaves: Sequence[tuple[tuple[str, ...], str]],
    placeholder: Placeholder,
) -> dict[int, str]:
    """``Type: reason`` for records with a value that Debezium has not sent, by index."""
    errors: dict[int, str] = {}
    any_suspect = placeholder.may_be_in("\n".join(text for text in texts if text is not None))
    suspects = [any_suspect and text is not None and placeholder.may_be_in(text) for text in texts]
    for values, (path, postgres) in zip(columns, leaves, strict=True):
        for at, value in enumerate(values) if any_suspect or postgres.endswith("[]") else ():
            quoted = suspects[at] and isinstance(value, str) and f'"{placeholder.text}"' in value  # in a JSON column
            if quoted or ((suspects[at] or isinstance(value, list)) and placeholder.is_in(value)):
                errors[at] = f"Fail: {'.'.join(path)} {NOT_SENT}"
    return errors


@dataclass(frozen=True, slots=True)
class _Records:
    """Parsed records with their schemas. ``complete``: whether Debezium has sent all values of a record."""

    rows: Sequence[Mapping[str, Any]]
    types: Sequence[Types]
    complete: Sequence[bool]
    placeholder: Placeholder
    errors: dict[int, str]

    def column(self, path: Sequence[str], postgres: str, missing: Any) -> list[Any]:
        """Reads one column. ``missing``: the value for an absent field. Adds the reasons of values that do not fit to `errors`."""
        first, below = path[0], path[1:]
        schemas: dict[int, tuple[Types, type | None]] = {}  # by the id of the cached schema
        values: list[Any] = []
        for at, (row, types) in enumerate(zip(self.rows, self.types, strict=True)):
            value = row.get(first, missing)
            for name in below:
                value = value.get(name, missing) if isinstance(value, Mapping) else missing
            if value is None or value is missing:
                values.append(value)
                continue
            try:
                if id(types) not in schemas:
                    schema = _schema_at(types, path)
                    schemas[id(types)] = (schema, _native_type(postgres, schema))
                schema, native = schemas[id(types)]
                if (not self.complete[at] or isinstance(value, list)) and self.placeholder.is_in(value):
                    raise Misfit(NOT_SENT)
                values.append(value if type(value) is native else _converted(value, postgres, schema))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - any error is the record's fault
                reason = _problem(error, value)
                problem = reason if reason == NOT_SENT else f"does not fit {postgres}: the value {reason}"
                self.errors.setdefault(at, f"Fail: {'.'.join(path)} {problem}")
                values.append(None)
        return values


def _problem(error: Exception, value: Any) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, OverflowError):
        return "is out of range"
    return str(error) if isinstance(error, Misfit) else f"is of type {type(value).__name__}"


def _schema_at(types: Types, path: Sequence[str]) -> Types:
    """The schema at ``path``; `_INVALID` if the record's schema is malformed."""
    for name in path:
        if types is None or types is _INVALID:
            return types
        fields = types.get("fields") or []
        if not isinstance(fields, list) or not all(isinstance(field, dict) for field in fields):
            return _INVALID
        types = next((field for field in fields if field.get("field") == name), None)
    return types


def _native_type(postgres: str, schema: Types) -> type | None:
    """The type of values that need no conversion."""
    if schema is _INVALID:
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
    """The value as `conversion.from_python` expects it for a column of this type."""
    base = base_of(postgres)
    if base in JSONS:
        is_text = isinstance(value, str) and (schema is None or schema.get("name") == connect.JSON)
        return value if is_text else json_text(value if schema is None else connect.value_of(value, schema))
    if base.endswith("[]") and isinstance(value, list):
        items = None if schema is None else schema.get("items")
        return [None if item is None else _converted(item, postgres[:-2], items) for item in value]
    converted = connect.value_of(value, schema if schema is not None else _guessed_schema(value, base, digits_of(postgres) or ()))
    return json_fields.from_base64s(converted) if base == "bytea" else converted


def _guessed_schema(value: Any, base: str, digits: Sequence[int]) -> Mapping[str, Any]:
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
    names = {
        "date": connect.DATE,
        "time without time zone": connect.TIME if in_millis else connect.MICRO_TIME,
        "timestamp without time zone": connect.TIMESTAMP if in_millis else connect.MICRO_TIMESTAMP,
        "interval": connect.DURATION,
    }
    return {"name": names[base]} if number and base in names else {}


@functools.lru_cache(maxsize=256)
def _parsed(schema: bytes) -> Types:
    try:
        parsed: Types = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return parsed
