"""Avro schemas as trees: every use of a named type is replaced by its definition."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tidemark.errors import Refused
from tidemark.formats import connect
from tidemark.text.wording import one_line

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NAMED = frozenset({"record", "error", "enum", "fixed"})
NO_DEFAULT = object()
MAX_CHARACTERS = 1_000_000
"""Limit for a schema with all its references."""
MAX_FIELDS = 5_000
"""Limit for a schema with named types expanded. A Postgres table has at most 1,600 columns."""
MAX_DEPTH = 50
"""Maximum nesting of types."""
MAX_NAME = 255
"""Maximum characters of a name. Decoded records repeat the names of fields."""
MAX_FIXED = 1_000_000
"""Maximum bytes of a ``fixed``. A missing value takes as many."""
MAX_DEFAULT = 10_000
"""Maximum characters of a default, which each record gets."""
MAX_DIGITS = 76
"""Maximum precision of a decimal."""
MAX_TEXT = 500
"""Maximum characters of a problem, which may quote names of the schema."""


class BadSchema(Refused):
    """A schema is not valid, or not supported."""

    problem: str

    def __str__(self) -> str:
        problem = one_line(self.problem)
        return f"The schema {problem[:MAX_TEXT]}{'…' if len(problem) > MAX_TEXT else ''}."


@dataclass(frozen=True, slots=True)
class Node:
    """A type. ``kind``: Avro's name of the type, or ``union``. ``name``: that of a named type, without its namespace."""

    kind: str
    name: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the type: ``logicalType``, ``precision``, ``scale``, ``size``, ``symbols``, ``connect.name``."""
    fields: tuple[Field, ...] = ()
    inner: tuple[Node, ...] = ()
    """The items of an array, the values of a map, the branches of a union."""

    @property
    def branches(self) -> tuple[Node, ...]:
        """The branches of a union that are not null; for any other type, the type itself."""
        return tuple(branch for branch in self.inner if branch.kind != "null") if self.kind == "union" else (self,)

    @property
    def label(self) -> str:
        """The branch's name in a union of several types."""
        return self.name or self.details.get("logicalType", self.kind)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record. ``default`` is JSON, or `NO_DEFAULT`."""

    name: str
    type: Node
    default: Any = NO_DEFAULT
    aliases: tuple[str, ...] = ()


def parse(text: str, references: Sequence[str] = ()) -> Node:
    """Parses a schema. ``references``: schemas that define named types for it. Raises `BadSchema`, also for a type that contains itself."""
    texts = (*references, text)
    require_small(texts)
    named_types: NamedTypes = {}
    try:
        schemas = [_json(schema) for schema in texts]
        for schema in schemas:
            _collect(schema, "", named_types)
        return _parse(schemas[-1], "", _Position(named_types, itertools.count(1)))
    except RecursionError:
        raise _too_deep() from None
    except (AttributeError, KeyError, TypeError, UnicodeError):
        raise BadSchema(problem="does not have the form of an Avro schema") from None


def require_small(texts: Iterable[str]) -> None:
    if (size := sum(map(len, texts))) > MAX_CHARACTERS:
        raise BadSchema(problem=f"has {size:,} characters with all that it refers to; the limit is {MAX_CHARACTERS:,}")


def _too_deep() -> BadSchema:
    return BadSchema(problem=f"nests types more than {MAX_DEPTH} deep")


NamedTypes = dict[str, tuple[Mapping[str, Any], str]]
"""Named types, each with the namespace that applies within it."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Position in a schema: all named types, a counter of types, the names of the enclosing types, and the depth."""

    named_types: NamedTypes
    types: Iterator[int]
    names: tuple[str, ...] = ()
    depth: int = 0

    def deeper(self, name: str | None = None) -> _Position:
        if self.depth >= MAX_DEPTH:
            raise _too_deep()
        return replace(self, depth=self.depth + 1, names=self.names if name is None else (*self.names, name))


def to_json(node: Node) -> Any:
    """The type as JSON. Named types get generated names, because a name may be defined only once."""
    return _to_json(node, itertools.count())


def _to_json(node: Node, numbers: Iterator[int]) -> Any:
    if node.kind == "union":
        return [_to_json(branch, numbers) for branch in node.inner]
    if not node.details and not node.name and not node.inner:
        return node.kind
    schema: dict[str, Any] = {"type": node.kind, **{name: value for name, value in node.details.items() if name != connect.NAME}}
    if node.name:
        schema["name"] = f"t{next(numbers)}"
    if node.kind == "record":
        schema["fields"] = [{"name": field.name, "type": _to_json(field.type, numbers)} for field in node.fields]
    elif node.kind in ("array", "map"):
        schema["items" if node.kind == "array" else "values"] = _to_json(node.inner[0], numbers)
    return schema


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if text.strip() in PRIMITIVES:
            return text.strip()
        raise BadSchema(problem="is not JSON") from None


def _collect(schema: Any, namespace: str, named_types: NamedTypes) -> None:
    if isinstance(schema, list):
        for nested in schema:
            _collect(nested, namespace, named_types)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if isinstance(kind, str) and kind in NAMED and isinstance(name := schema.get("name"), str):
        full = _full(name, schema.get("namespace") or namespace)
        namespace = full.rpartition(".")[0]
        named_types[full] = (schema, namespace)
    for nested in (kind, schema.get("items"), schema.get("values")):
        _collect(nested, namespace, named_types)
    for nested in schema.get("fields") or ():
        if isinstance(nested, dict):
            _collect(nested.get("type"), namespace, named_types)


def _parse(schema: Any, namespace: str, position: _Position) -> Node:
    if next(position.types) > MAX_FIELDS:
        raise BadSchema(problem=f"has more than {MAX_FIELDS:,} types, counting each use of a named type")
    if isinstance(schema, list):
        return _union(tuple(Node("null") if branch == "null" else _parse(branch, namespace, position.deeper()) for branch in schema))
    if schema == "null" or schema == {"type": "null"}:
        raise _no_value("null")
    if isinstance(schema, str):
        return Node(schema) if schema in PRIMITIVES else _named(schema, namespace, position)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, dict | list):
        return _parse(kind, namespace, position.deeper())
    if not isinstance(kind, str):
        raise BadSchema(problem=f"has {json.dumps(schema)[:60]} where a type is expected")
    if kind in ("array", "map"):
        inner = schema.get("items" if kind == "array" else "values")
        return Node(kind, inner=(_parse(inner, namespace, position.deeper()),))
    if kind in NAMED:
        return _named(_full(str(schema.get("name")), schema.get("namespace") or namespace), "", position)
    if kind in PRIMITIVES:
        return Node(kind, details=_details(schema))
    return _named(kind, namespace, position)


def _no_value(name: str) -> BadSchema:
    """Its data is empty, so a wrong item count of an array could keep a reader busy indefinitely."""
    return BadSchema(problem=f"has a type without a value, {name}, outside a union")


def _union(branches: tuple[Node, ...]) -> Node:
    """Arrow's reader cannot read a union of several types of which one has a name or a decimal."""
    union = Node("union", inner=branches)
    if not union.branches:
        raise BadSchema(problem="has a union without a type other than null")
    unsupported = [branch for branch in union.branches if branch.name or branch.details.get("logicalType") == "decimal"]
    if len(union.branches) > 1 and unsupported:
        kind = f"the {unsupported[0].kind} {unsupported[0].name}" if unsupported[0].name else "a decimal"
        raise BadSchema(problem=f"has a union of several types, one of which is {kind}; this is not supported")
    return union


def _named(name: str, namespace: str, position: _Position) -> Node:
    full = next((candidate for candidate in (_full(name, namespace), name) if candidate in position.named_types), None)
    if full is None:
        raise BadSchema(problem=f"uses the type {name}, which it does not define")
    if full in position.names:
        raise BadSchema(problem=f"is recursive: {full} contains itself, which no table can hold")
    if len(full) > 2 * MAX_NAME or not full.isprintable():
        raise BadSchema(problem=f"has a type whose name is not one of at most {2 * MAX_NAME} characters")
    schema, own = position.named_types[full]
    if schema["type"] != "record" and schema["type"] != "error":
        if schema["type"] == "fixed" and not 0 <= schema["size"] <= MAX_FIXED:
            raise BadSchema(problem=f"has a fixed of {schema['size']} bytes; the limit is {MAX_FIXED:,}")
        if schema.get("size") == 0:
            raise _no_value(full)
        if schema["type"] == "enum":
            _require_symbols(full, schema["symbols"])
        return Node(schema["type"], full.rpartition(".")[2], _details(schema))
    inner = position.deeper(full)
    fields = tuple(_field(field_schema, own, inner) for field_schema in schema.get("fields") or ())
    if not fields:
        raise BadSchema(problem=f"has the record {full}, which has no fields")
    return Node("record", full.rpartition(".")[2], _details(schema), fields=fields)


def _require_symbols(name: str, symbols: Any) -> None:
    valid = all(isinstance(symbol, str) and 0 < len(symbol) <= MAX_NAME for symbol in symbols or ())
    if not symbols or len(set(symbols)) < len(symbols) or not valid:
        raise BadSchema(problem=f"has the enum {name} without symbols, or with symbols that are not names")


def _field(schema: Mapping[str, Any], namespace: str, position: _Position) -> Field:
    name, aliases, default = schema["name"], schema.get("aliases") or (), schema.get("default", NO_DEFAULT)
    for label in (name, *aliases):
        if not isinstance(label, str) or not 0 < len(label) <= MAX_NAME or not label.isprintable():
            raise BadSchema(problem=f"has a field whose name is not one of at most {MAX_NAME} characters")
    if default is not NO_DEFAULT and len(json.dumps(default)) > MAX_DEFAULT:
        raise BadSchema(problem=f"has a default of more than {MAX_DEFAULT:,} characters, of {name}")
    return Field(name, _parse(schema.get("type"), namespace, position), default, tuple(aliases))


def _details(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    details = {name: schema[name] for name in DETAILS if name in schema}
    if invalid := [name for name, value in details.items() if not isinstance(value, DETAILS[name]) or isinstance(value, bool)]:
        raise BadSchema(problem=f"has {json.dumps(details[invalid[0]])[:60]} as {invalid[0]}")
    if schema["type"] not in LOGICAL.get(details.get("logicalType", ""), ()):
        details.pop("logicalType", None)  # unknown, or not for this type: Avro's specification says to ignore it
    precision = details.get("precision", 0)
    if details.get("logicalType") == "decimal" and not (0 < precision <= MAX_DIGITS and 0 <= details.get("scale", 0) <= precision):
        del details["logicalType"]  # invalid: Avro's specification says to ignore it
    return details


_TIMES = ("millis", "micros", "nanos")
LOGICAL: Mapping[str, tuple[str, ...]] = {
    "decimal": ("bytes", "fixed"),
    "uuid": ("fixed",),
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    **{f"{zone}timestamp-{unit}": ("long",) for zone in ("", "local-") for unit in _TIMES},
    "duration": ("fixed",),
}
"""Supported logical types, with their base types. A uuid in a string stays text."""
DETAILS: Mapping[str, type] = {
    "logicalType": str,
    "precision": int,
    "scale": int,
    "size": int,
    "symbols": list,
    connect.NAME: str,
}


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
