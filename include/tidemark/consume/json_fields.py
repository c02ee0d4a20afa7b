"""Reads fields of JSON texts in the types of a table's columns. Fields that are missing are null, others are ignored."""

from __future__ import annotations

import datetime as dt
import functools
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import msgspec

UNIX_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNREADABLE = frozenset('"\\') | frozenset(map(chr, range(32)))
"""Characters that msgspec refuses in the name of a field to read."""
ANY = "any"
"""In place of a column's type: whatever the JSON has."""
_AWARE, _NAIVE = msgspec.Meta(tz=True), msgspec.Meta(tz=False)
_TYPES: dict[str, Any] = {
    ANY: Any,
    "boolean": bool,
    "smallint": int,
    "integer": int,
    "bigint": int,
    "real": float,
    "double precision": float,
    "numeric": Decimal,
    "json": msgspec.Raw,
    "jsonb": msgspec.Raw,
    "bytea": bytes,  # base64
    "uuid": uuid.UUID,
    "date": dt.date,
    "time without time zone": Annotated[dt.time, _NAIVE],
    "timestamp with time zone": Annotated[dt.datetime, _AWARE] | int,
    "timestamp without time zone": Annotated[dt.datetime, _NAIVE],
    "interval": dt.timedelta,  # ISO 8601
}
"""What a column's type, without its modifier, reads. All other types read text."""

Leaf = tuple[tuple[str, ...], str]
"""A path of one or more names, and the type of the column, as ``format_type`` spells it."""


def read(texts: Sequence[str | None], leaves: Sequence[Leaf]) -> tuple[list[list[Any]], dict[int, str]]:
    """The values of each path, one for each text, and the places of texts that cannot be read so, with ``Type: reason``."""
    columns: list[list[Any]] = [[]] * len(leaves)
    errors: dict[int, str] = {}
    for reader in _readers(tuple(leaves)):
        found = _parsed(reader, texts, errors)
        for at, attributes in reader.places:
            columns[at] = _finished(_walked(found, attributes), leaves[at][1], errors)
    return columns, errors


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads some leaves: their numbers and attributes. ``blank`` has none of the fields."""

    decode: Callable[[str], Any]
    blank: Any
    places: tuple[tuple[int, tuple[str, ...]], ...]


@functools.lru_cache(maxsize=64)
def _readers(leaves: tuple[Leaf, ...]) -> list[_Reader]:
    """One reader; several, if a path goes on below another one."""
    trees: list[tuple[dict[str, Any], list[tuple[int, tuple[str, ...]]]]] = []
    for at, (path, postgres) in enumerate(leaves):
        tree = next((each for each in trees if _is_free(each[0], path)), None)
        if tree is None:
            trees.append(tree := ({}, []))
        node = tree[0]
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = _type(postgres)
        tree[1].append((at, path))
    return [_reader(*each) for each in trees]


def _reader(tree: dict[str, Any], paths: list[tuple[int, tuple[str, ...]]]) -> _Reader:
    kind = _struct(tree)
    return _Reader(msgspec.json.Decoder(kind).decode, kind(), tuple((at, tuple(_attributes(tree, path))) for at, path in paths))


def _is_free(tree: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the tree has no leaf on the way, and nothing at its end."""
    node: Any = tree
    for name in path:
        if not isinstance(node, dict):
            return False
        if name not in node:
            return True
        node = node[name]
    return False


def _struct(tree: dict[str, Any]) -> Any:
    kinds = {name: _struct(kind) if isinstance(kind, dict) else kind for name, kind in tree.items()}
    fields = [
        (f"f{at}", kind if kind in (msgspec.Raw, Any) else kind | None, msgspec.field(default=None, name=name))
        for at, (name, kind) in enumerate(kinds.items())
    ]
    return msgspec.defstruct("Fields", fields)


def _attributes(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    node = tree
    for name in path:
        yield f"f{list(node).index(name)}"
        node = node[name]


def _type(postgres: str) -> Any:
    if postgres.endswith("[]"):
        return list[_type(postgres[:-2]) | None]  # type: ignore[misc]
    name, bracket, rest = postgres.partition("(")
    base = (name + rest.partition(")")[2]).strip() if bracket else name
    return _TYPES.get(base, str)


def _parsed(reader: _Reader, texts: Sequence[str | None], errors: dict[int, str]) -> list[Any]:
    decode, blank = reader.decode, reader.blank
    try:
        return list(map(decode, texts))  # type: ignore[arg-type]
    except (msgspec.MsgspecError, RecursionError, TypeError):  # TypeError: a null
        pass
    found = []
    for at, text in enumerate(texts):
        value = blank
        try:
            if text is not None:
                value = decode(text)
        except msgspec.ValidationError as error:
            errors[at] = f"Fail: {error}"
        except (msgspec.DecodeError, RecursionError) as error:
            errors[at] = f"Undecodable: it is not JSON: {error}"
        found.append(value)
    return found


def _walked(rows: list[Any], attributes: Sequence[str]) -> list[Any]:
    values = list(map(operator.attrgetter(attributes[0]), rows))
    for name in attributes[1:]:
        values = [None if value is None else getattr(value, name) for value in values]
    return values


def _finished(values: list[Any], postgres: str, errors: dict[int, str]) -> list[Any]:
    """JSON as text, and times that are numbers of milliseconds as times."""
    if postgres in ("json", "jsonb"):
        texts = [None if value is None else bytes(value).decode() for value in values]
        return [None if text == "null" else text for text in texts]
    if postgres.endswith("with time zone"):
        return [_moment(value, at, errors) if isinstance(value, int) else value for at, value in enumerate(values)]
    return values


def _moment(milliseconds: int, at: int, errors: dict[int, str]) -> dt.datetime | None:
    try:
        return UNIX_EPOCH + dt.timedelta(milliseconds=milliseconds)
    except OverflowError:
        errors[at] = "Fail: a number is out of range for milliseconds since 1970"
        return None
