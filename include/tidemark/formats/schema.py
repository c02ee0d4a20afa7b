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
"""Of a schema, with all that it refers to."""
MAX_FIELDS = 5_000
"""Of a schema whose named types are replaced by their definitions. A row of Postgres has at most 1,600 columns."""
MAX_DEPTH = 50
"""How deep types are nested."""
MAX_NAME = 255
"""Characters of a name. Decoded records repeat the names of fields."""
MAX_FIXED = 1_000_000
"""Bytes of a ``fixed``, which a missing value takes too."""
MAX_DEFAULT = 10_000
"""Characters of a default, which each record gets."""
MAX_DIGITS = 76
"""Of a decimal."""
MAX_TEXT = 500
"""Characters of a problem. Names in it come from the schema."""


@dataclass(kw_only=True, eq=False)
class BadSchema(Refused):
    """A schema is not valid, or not supported."""

    problem: str

    def __str__(self) -> str:
        problem = one_line(self.problem)
        return f"The schema {problem[:MAX_TEXT]}{'…' if len(problem) > MAX_TEXT else ''}."


@dataclass(frozen=True, slots=True)
class Node:
    """A type. ``kind`` is Avro's name of it, or ``union``; ``name`` is set for named types, without their namespace."""

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
        return tuple(each for each in self.inner if each.kind != "null") if self.kind == "union" else (self,)

    @property
    def label(self) -> str:
        """How a branch is named where a union has several."""
        return self.name or self.details.get("logicalType", self.kind)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record. ``default`` is JSON, or `NO_DEFAULT`."""

    name: str
    type: Node
    default: Any = NO_DEFAULT
    aliases: tuple[str, ...] = ()


def parse(text: str, references: Sequence[str] = ()) -> Node:
    """``references``: schemas that define named types which ``text`` uses. Raises `BadSchema`, also for a type that contains itself."""
    texts = (*references, text)
    require_small(texts)
    known: Known = {}
    try:
        given = [_json(each) for each in texts]
        for each in given:
            _collect(each, "", known)
        return _parse(given[-1], "", _Within(known, itertools.count(1)))
    except RecursionError:
        raise _too_deep() from None
    except (AttributeError, KeyError, TypeError, UnicodeError):
        raise BadSchema(problem="does not have the form of an Avro schema") from None


def require_small(texts: Iterable[str]) -> None:
    if (size := sum(map(len, texts))) > MAX_CHARACTERS:
        raise BadSchema(problem=f"has {size:,} characters with all that it refers to; the limit is {MAX_CHARACTERS:,}")


def _too_deep() -> BadSchema:
    return BadSchema(problem=f"nests types more than {MAX_DEPTH} deep")


Known = dict[str, tuple[Mapping[str, Any], str]]
"""The named types, each with the namespace of the names in it."""


@dataclass(frozen=True, slots=True)
class _Within:
    """Where in a schema a type is: the named types, those that it is part of, and how deep it is nested."""

    known: Known
    types: Iterator[int]
    names: tuple[str, ...] = ()
    depth: int = 0

    def deeper(self, name: str | None = None) -> _Within:
        if self.depth >= MAX_DEPTH:
            raise _too_deep()
        return replace(self, depth=self.depth + 1, names=self.names if name is None else (*self.names, name))


def to_json(node: Node) -> Any:
    """The type as JSON. Named types get new names, because one name may be defined only once."""
    return _to_json(node, itertools.count())


def _to_json(node: Node, numbers: Iterator[int]) -> Any:
    if node.kind == "union":
        return [_to_json(each, numbers) for each in node.inner]
    if not node.details and not node.name and not node.inner:
        return node.kind
    said: dict[str, Any] = {"type": node.kind, **{name: value for name, value in node.details.items() if name != connect.NAME}}
    if node.name:
        said["name"] = f"t{next(numbers)}"
    if node.kind == "record":
        said["fields"] = [{"name": each.name, "type": _to_json(each.type, numbers)} for each in node.fields]
    elif node.kind in ("array", "map"):
        said["items" if node.kind == "array" else "values"] = _to_json(node.inner[0], numbers)
    return said


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if text.strip() in PRIMITIVES:
            return text.strip()
        raise BadSchema(problem="is not JSON") from None


def _collect(schema: Any, namespace: str, known: Known) -> None:
    if isinstance(schema, list):
        for each in schema:
            _collect(each, namespace, known)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if isinstance(kind, str) and kind in NAMED and isinstance(name := schema.get("name"), str):
        full = _full(name, schema.get("namespace") or namespace)
        namespace = full.rpartition(".")[0]
        known[full] = (schema, namespace)
    for each in (kind, schema.get("items"), schema.get("values")):
        _collect(each, namespace, known)
    for each in schema.get("fields") or ():
        if isinstance(each, dict):
            _collect(each.get("type"), namespace, known)


def _parse(schema: Any, namespace: str, within: _Within) -> Node:
    if next(within.types) > MAX_FIELDS:
        raise BadSchema(problem=f"has more than {MAX_FIELDS:,} types, if those with names count each time that they are used")
    if isinstance(schema, list):
        return _union(tuple(Node("null") if each == "null" else _parse(each, namespace, within.deeper()) for each in schema))
    if schema == "null" or schema == {"type": "null"}:
        raise _no_value("null")
    if isinstance(schema, str):
        return Node(schema) if schema in PRIMITIVES else _named(schema, namespace, within)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, dict | list):
        return _parse(kind, namespace, within.deeper())
    if not isinstance(kind, str):
        raise BadSchema(problem=f"has {json.dumps(schema)[:60]} where a type is expected")
    if kind in ("array", "map"):
        inner = schema.get("items" if kind == "array" else "values")
        return Node(kind, inner=(_parse(inner, namespace, within.deeper()),))
    if kind in NAMED:
        return _named(_full(str(schema.get("name")), schema.get("namespace") or namespace), "", within)
    if kind in PRIMITIVES:
        return Node(kind, details=_details(schema))
    return _named(kind, namespace, within)


def _no_value(name: str) -> BadSchema:
    """Its data is empty, so a wrong count of an array's items could keep a reader busy without end."""
    return BadSchema(problem=f"has a type without a value, {name}, outside a union")


def _union(branches: tuple[Node, ...]) -> Node:
    """Arrow's reader cannot read a union of several types of which one has a name or a decimal."""
    union = Node("union", inner=branches)
    if not union.branches:
        raise BadSchema(problem="has a union without a type other than null")
    hard = [each for each in union.branches if each.name or each.details.get("logicalType") == "decimal"]
    if len(union.branches) > 1 and hard:
        kind = f"the {hard[0].kind} {hard[0].name}" if hard[0].name else "a decimal"
        raise BadSchema(problem=f"has a union of several types, one of which is {kind}; this is not supported")
    return union


def _named(name: str, namespace: str, within: _Within) -> Node:
    full = next((each for each in (_full(name, namespace), name) if each in within.known), None)
    if full is None:
        raise BadSchema(problem=f"uses the type {name}, which it does not define")
    if full in within.names:
        raise BadSchema(problem=f"is recursive: {full} contains itself, which no table can hold")
    if len(full) > 2 * MAX_NAME or not full.isprintable():
        raise BadSchema(problem=f"has a type whose name is not one of at most {2 * MAX_NAME} characters")
    schema, own = within.known[full]
    if schema["type"] != "record" and schema["type"] != "error":
        if schema["type"] == "fixed" and not 0 <= schema["size"] <= MAX_FIXED:
            raise BadSchema(problem=f"has a fixed of {schema['size']} bytes; the limit is {MAX_FIXED:,}")
        if schema.get("size") == 0:
            raise _no_value(full)
        if schema["type"] == "enum":
            _require_symbols(full, schema["symbols"])
        return Node(schema["type"], full.rpartition(".")[2], _details(schema))
    inside = within.deeper(full)
    fields = tuple(_field(each, own, inside) for each in schema.get("fields") or ())
    if not fields:
        raise BadSchema(problem=f"has the record {full}, which has no fields")
    return Node("record", full.rpartition(".")[2], _details(schema), fields=fields)


def _require_symbols(name: str, symbols: Any) -> None:
    if not symbols or len(set(symbols)) < len(symbols) or not all(isinstance(each, str) and 0 < len(each) <= MAX_NAME for each in symbols):
        raise BadSchema(problem=f"has the enum {name} without symbols, or with symbols that are not names")


def _field(schema: Mapping[str, Any], namespace: str, within: _Within) -> Field:
    name, aliases, default = schema["name"], schema.get("aliases") or (), schema.get("default", NO_DEFAULT)
    for each in (name, *aliases):
        if not isinstance(each, str) or not 0 < len(each) <= MAX_NAME or not each.isprintable():
            raise BadSchema(problem=f"has a field whose name is not one of at most {MAX_NAME} characters")
    if default is not NO_DEFAULT and len(json.dumps(default)) > MAX_DEFAULT:
        raise BadSchema(problem=f"has a default of more than {MAX_DEFAULT:,} characters, of {name}")
    return Field(name, _parse(schema.get("type"), namespace, within), default, tuple(aliases))


def _details(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    details = {name: schema[name] for name in DETAILS if name in schema}
    if wrong := [name for name, value in details.items() if not isinstance(value, DETAILS[name]) or isinstance(value, bool)]:
        raise BadSchema(problem=f"has {json.dumps(details[wrong[0]])[:60]} as {wrong[0]}")
    if schema["type"] not in LOGICAL.get(details.get("logicalType", ""), ()):
        details.pop("logicalType", None)  # unknown, or of another type, so that Avro's specification says to ignore it
    precision = details.get("precision", 0)
    if details.get("logicalType") == "decimal" and not (0 < precision <= MAX_DIGITS and 0 <= details.get("scale", 0) <= precision):
        del details["logicalType"]  # invalid, so Avro's specification says to ignore it
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
"""Logical types that are read as such, with the types that may have them. A uuid in a string stays text."""
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
