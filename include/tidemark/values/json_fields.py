"""Reads fields of JSON texts for a table's columns. A missing field is null; fields without a column are ignored.

Values become Python values, numbers with a point or an exponent ``Decimal``. Text columns get the raw JSON of values that are not texts;
JSON columns always get raw JSON; bytes are base64. `tidemark.values.conversion` does the rest.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from tidemark.formats.connect import Misfit, from_base64
from tidemark.sink.types import base_of
from tidemark.values.conversion import JSONS, TEXTS

UNREADABLE = frozenset('"\\') | frozenset(map(chr, range(32)))
"""Characters that msgspec refuses in the name of a field to read."""
ABSENT = msgspec.UNSET
"""In place of the value of an absent field."""
ANY = "any"
"""In place of a column's type: any JSON value."""
_TYPES: dict[str, Any] = {
    **dict.fromkeys((*TEXTS, "enum"), str),
    **dict.fromkeys(JSONS, msgspec.Raw),
}
"""Types to decode, by column type without modifier. Other columns accept any value."""
_NEEDS_FINISH = (*JSONS, "bytea")


def number(text: str) -> Decimal:
    """Parses a JSON number. Raises ValueError if its exponent is too large for ``Decimal``."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError("a number is out of range") from None


_NAMES = {
    "object": "an object",
    "array": "a list",
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "null": "null",
}
"""JSON's types, by msgspec's names."""
_VALIDATION = re.compile(
    r"(?:Expected `(?P<expected>\w+).*?`, got `(?P<actual>\w+)`|(?P<other>.*?))(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL
)


def problem(text: str, error: Exception) -> str:
    """Why a text cannot be parsed, without msgspec's names of types and its marks."""
    if text.startswith("\ufeff"):
        return "it begins with a byte order mark"
    if not isinstance(error, msgspec.ValidationError) or (match := _VALIDATION.fullmatch(str(error))) is None:
        return str(error)
    field = match["path"] or "it"
    if match["other"] is not None:
        return match["other"] if field in ("it", "[...]") else f"{field}: {match['other']}"
    actual, expected = (_NAMES.get(match[side], match[side]) for side in ("actual", "expected"))
    return f"{field} is {actual}, not {expected}"


def is_json(text: str) -> bool:
    """Whether the text is a single JSON value."""
    try:
        _RAW.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


Leaf = tuple[tuple[str, ...], str]
"""A path of one or more names, and the type of the column, as ``format_type`` spells it."""


def read(
    texts: Sequence[str | None], leaves: Sequence[Leaf], with_default: Set[Leaf] = frozenset()
) -> tuple[list[list[Any]], dict[int, str]]:
    """Reads a column of values for each leaf, one value per text, and ``Type: reason`` for unreadable texts, by index. A missing field is
    None, or `ABSENT` for the leaves ``with_default``."""
    columns: list[list[Any]] = [[]] * len(leaves)
    errors: dict[int, str] = {}
    for reader in _readers(tuple(leaves), frozenset(with_default)):
        rows, has_raw = _parse(reader, texts, errors)
        for at, attributes in reader.places:
            columns[at] = _values_at(rows, attributes, ABSENT if leaves[at] in with_default else None)
            if has_raw or base_of(leaves[at][1]).removesuffix("[]") in _NEEDS_FINISH:
                columns[at] = _finish(columns[at], *leaves[at], errors)
    return columns, errors


@dataclass(frozen=True, slots=True)
class _Reader:
    """Decodes some leaves, ``raw`` as raw JSON. ``blank``: a row without fields. ``places``: each leaf's index and attributes."""

    decode: Callable[[str], Any]
    raw: Callable[[str], Any]
    blank: Any
    places: tuple[tuple[int, tuple[str, ...]], ...]


@functools.lru_cache(maxsize=64)
def _readers(leaves: tuple[Leaf, ...], with_default: frozenset[Leaf]) -> list[_Reader]:
    """Usually one reader; nested paths need a reader each."""
    trees: list[tuple[dict[str, Any], list[tuple[int, tuple[str, ...]]]]] = []
    for at, (path, postgres) in enumerate(leaves):
        tree = next((candidate for candidate in trees if _is_free(candidate[0], path)), None)
        if tree is None:
            trees.append(tree := ({}, []))
        node = tree[0]
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = (_type(postgres), ABSENT if (path, postgres) in with_default else None)
        tree[1].append((at, path))
    return [_reader(*tree) for tree in trees]


def _reader(tree: dict[str, Any], paths: list[tuple[int, tuple[str, ...]]]) -> _Reader:
    kind, raw = _struct(tree), _struct(_map_leaves(tree, lambda leaf: (msgspec.Raw, leaf[1])))
    return _Reader(
        msgspec.json.Decoder(kind, float_hook=number).decode,
        msgspec.json.Decoder(raw).decode,
        kind(),
        tuple((at, tuple(_attributes(tree, path))) for at, path in paths),
    )


def _map_leaves(tree: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: _map_leaves(kind, change) if isinstance(kind, dict) else change(kind) for name, kind in tree.items()}


def _is_free(tree: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether the tree can take the path: it has no leaf on the way, and nothing at the end."""
    node: Any = tree
    for name in path:
        if not isinstance(node, dict):
            return False
        if name not in node:
            return True
        node = node[name]
    return False


def _struct(tree: dict[str, Any]) -> Any:
    leaves = {name: (_struct(leaf), None) if isinstance(leaf, dict) else leaf for name, leaf in tree.items()}
    fields = [
        (f"f{at}", kind if kind in (msgspec.Raw, Any) else kind | None, msgspec.field(default=default, name=name))
        for at, (name, (kind, default)) in enumerate(leaves.items())
    ]
    return msgspec.defstruct("Fields", fields)


def _attributes(tree: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    node = tree
    for name in path:
        yield f"f{list(node).index(name)}"
        node = node[name]


def _type(postgres: str) -> Any:
    base = base_of(postgres)
    if base.endswith("[]"):
        inner = _type(postgres[:-2])
        return Any if inner is Any else list[inner | None]  # type: ignore[valid-type]
    return _TYPES.get(base, Any)


def _parse(reader: _Reader, texts: Sequence[str | None], errors: dict[int, str]) -> tuple[list[Any], bool]:
    """The fields of each text, and whether some texts have unexpected types: their fields are raw JSON."""
    decode, blank = reader.decode, reader.blank
    try:
        return list(map(decode, texts)), False  # type: ignore[arg-type]
    except (msgspec.MsgspecError, RecursionError, TypeError):  # TypeError: a null
        pass
    rows, has_raw = [], False
    for at, text in enumerate(texts):
        value = blank
        if text is not None:
            try:
                try:
                    value = decode(text)
                except msgspec.ValidationError:
                    value, has_raw = reader.raw(text), True
            except msgspec.ValidationError as error:
                errors[at] = f"Fail: {_misfit(text, error)}"
            except (msgspec.DecodeError, RecursionError) as error:
                errors[at] = f"Undecodable: it is not JSON: {problem(text, error)}"
        rows.append(value)
    return rows, has_raw


def _misfit(text: str, error: Exception) -> str:
    reason = problem(text, error)
    return f"the value {reason.removeprefix('it ')}" if reason.startswith("it is ") else reason


def _values_at(rows: list[Any], attributes: Sequence[str], missing: Any) -> list[Any]:
    values = list(map(operator.attrgetter(attributes[0]), rows))
    for name in attributes[1:]:
        values = [getattr(value, name, missing) for value in values]
    return values


def _finish(values: list[Any], path: Sequence[str], postgres: str, errors: dict[int, str]) -> list[Any]:
    """Decodes raw JSON into values, and base64 into bytes."""
    base = base_of(postgres)
    is_json = base in JSONS
    is_bytes = base.removesuffix("[]") == "bytea"
    for at, value in enumerate(values):
        try:
            if type(value) is msgspec.Raw:
                values[at] = text_of(value) if is_json else _value(bytes(value), base)
            if is_bytes:
                values[at] = from_base64s(values[at])
        except (Misfit, msgspec.MsgspecError, RecursionError) as error:
            values[at] = None
            reason = "the value is nested too deeply" if isinstance(error, RecursionError) else problem("", error)
            reason = f"the value {error}" if isinstance(error, Misfit) else reason
            errors.setdefault(at, f"Fail: {'.'.join(path)} does not fit {postgres}: {reason}")
    return values


def from_base64s(value: Any) -> Any:
    """Decodes base64 in texts and lists of texts. Raises `Misfit`."""
    if isinstance(value, str):
        return from_base64(value)
    return [from_base64s(item) for item in value] if isinstance(value, list) else value


def text_of(raw: msgspec.Raw) -> str | None:
    """Raw JSON as text; None for null, and for an absent field."""
    text = bytes(raw).decode()
    return None if text in ("", "null") else text


def _value(raw: bytes, base: str) -> Any:
    """Decodes raw JSON. An absent field is null."""
    if not raw or raw == b"null":
        return None
    if _TYPES.get(base) is str and not raw.startswith(b'"'):
        return raw.decode()
    if base.endswith("[]") and _TYPES.get(base[:-2]) is str and raw.startswith(b"["):
        return [_value(bytes(item), base[:-2]) for item in _RAWS.decode(raw)]
    return number(raw.decode()) if _MANY_DIGITS.fullmatch(raw) else _ANYTHING.decode(raw)


_MANY_DIGITS = re.compile(rb"-?\d{20,}")
_RAW = msgspec.json.Decoder(msgspec.Raw)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_ANYTHING = msgspec.json.Decoder(float_hook=number)
