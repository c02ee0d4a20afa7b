"""Reads a consumer's file as text and as a tree of YAML nodes: values for the checks, and the place of each value for the messages.

Supports the part of YAML that a declaration needs: mappings, lists, scalars and anchors. Tags, merge keys, several documents and duplicate
keys are refused (PyYAML's loaders silently keep the last duplicate).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tidemark.spec.problem import KeyPath, Problem, key_text, masked
from tidemark.text.wording import quoted

MAX_BYTES = 1_000_000  # far more than any declaration needs; keeps a wrong file (a dump, an archive) out of the parser
MAX_VALUES = 5_000  # keys, values and list items together; each costs time in every process that reads the file
MAX_TEXT = 10_000  # characters of one key or value
MAX_DEPTH = 50  # levels of nesting; the declaration has four

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTRUCTOR = yaml.constructor.SafeConstructor()  # stateless here: only its functions for single scalars are called
_TEXT = yaml.constructor.SafeConstructor.construct_yaml_str
_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")  # YAML 1.1's line breaks, which its marks count
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value")}
_NUMBERS = {_TAG + "int", _TAG + "float"}
MAX_DIGITS = 40  # characters of a number; Python takes minutes to parse a long one, or refuses to print it
_AS_WRITTEN = {("skip_if",)}
"""Keys with values of any type, where no later check notices that ``NO`` is false and ``12:30`` is 750."""
_CORE = (
    (re.compile("(true|True|TRUE|false|False|FALSE)"), "bool"),
    (re.compile("[-+]?(0|[1-9][0-9]*)"), "int"),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), "float"),
    (re.compile("0o[0-7]+|0x[0-9a-fA-F]+"), "int"),
)
"""The types that YAML 1.2 gives to plain text, besides text and null."""
_PLAIN = "put the value in quotes"
_SYNTAX = (
    # part of the parser's message, our message, the fix, whether to point at the start of the broken construct
    ("that cannot start any token", "is not YAML: a plain value cannot begin with this character", _PLAIN, False),
    ("did not find expected alphabetic or numeric character", "is not YAML: * and & begin an alias or an anchor", _PLAIN, True),
    ("expected a single document", "has several documents (---)", "write one consumer per file", False),
    ("found undefined alias", "is not YAML: this alias (*) has no anchor (&)", "put the value in quotes if no alias is meant", False),
    ("could not find expected ':'", "is not YAML: a key without a colon", "write key: value", True),
    ("found unexpected end of stream", "is not YAML: a quote that is not closed", "close the quote", True),
    ("expected ',' or ']'", "is not YAML: a list that is not closed", "write , between the entries and ] at the end", True),
    ("expected ',' or '}'", "is not YAML: a mapping that is not closed", "write , between the keys and } at the end", True),
    ("expected node content", "is not YAML: a value is missing", "close what is open, or write a value", False),
    (
        "did not find expected key",
        "is not YAML: this does not continue the mapping",
        "begin keys in one column, quote values as a whole",
        False,
    ),
    ("too many values", f"has more than {MAX_VALUES:,} keys and values", "select topics with topic_pattern; split the consumer", False),
    ("too long", f"has a key or value of more than {MAX_TEXT:,} characters", "shorten it", False),
    ("nested too deeply", f"is nested deeper than {MAX_DEPTH} levels", "write it flatter", False),
    ("parsing depth", f"is nested deeper than {MAX_DEPTH} levels", "write it flatter", False),  # the parser's own limit, in newer versions
)


@dataclass(frozen=True, slots=True)
class Source:
    """A consumer's file: its path and text. Small and hashable; the tree is parsed again when a place is needed."""

    path: Path
    text: str = field(repr=False)

    def problem(self, path: KeyPath, message: str, fix: str, *, at_key: bool = False) -> Problem:
        """A problem at the value of ``path``, or at its key if ``at_key``. If the path is missing, at the mapping that lacks it."""
        return Places(self, _compose_quietly(self.text)).problem(path, message, fix, at_key=at_key)

    def lines(self) -> list[str]:
        return _BREAK.split(self.text)


class Places:
    """Locates paths in a file. Holds the composed tree if the file could be parsed."""

    def __init__(self, source: Source, root: Node | None) -> None:
        self.source = source
        self._lines = source.lines()
        self._masked: dict[int, str] = {}  # many problems may be in one long line
        self._root = root

    def problem(self, path: KeyPath, message: str, fix: str, *, at_key: bool = False) -> Problem:
        line, column, length = self._locate(path, at_key)
        return self.problem_at(line, column, length, key_text(path), message, fix)

    def problem_at(self, line: int, column: int, length: int, key: str, message: str, fix: str) -> Problem:
        """A problem at a line and column (both from 0), clamped to the nearest character of the file."""
        line = min(line, len(self._lines) - 1)
        while length and line and not self._lines[line].strip():  # past the end: show the last line that is not blank
            line -= 1
            column = len(self._lines[line])
        text = self._lines[line]
        column = max(0, min(column, len(text) - 1))
        length = min(length, len(text) - column)
        if line not in self._masked:
            self._masked[line] = masked(text)
        return Problem(self.source.path, line + 1, column + 1, length, key, message, fix, self._masked[line])

    def describe(self, path: KeyPath) -> str:
        """Formats the user's value for a message."""
        node = self._node(path)[1]
        match node:
            case MappingNode():
                return "a mapping"
            case SequenceNode():
                return "a list" if node.value else "an empty list"
            case ScalarNode() if node.tag == _TAG + "null":
                return node.value or "nothing"
            case ScalarNode() if node.tag in (_TAG + "str", _TAG + "value"):
                return quoted(node.value)
            case ScalarNode():
                return quoted(node.value)[1:-1]
        return "nothing"

    def _node(self, path: KeyPath) -> tuple[Node | None, Node | None, Node | None]:
        """The key node, the value node and the innermost existing node of a path."""
        key: Node | None = None
        node = self._root
        for part in path:
            pair = _child(node, part)
            if pair is None:
                return None, None, node
            key, node = pair
        return key, node, node

    def _locate(self, path: KeyPath, at_key: bool) -> tuple[int, int, int]:
        key, node, innermost = self._node(path)
        if at_key and key is not None:
            return self._span(key)
        if node is None:
            if innermost is None:
                return 0, 0, 0
            return innermost.start_mark.line, innermost.start_mark.column, 1
        if node.start_mark.index == node.end_mark.index and key is not None:  # an empty value: point at its key
            return self._span(key)
        return self._span(node)

    def _span(self, node: Node) -> tuple[int, int, int]:
        start, end = node.start_mark, node.end_mark
        if start.line == end.line:
            return start.line, start.column, max(1, end.column - start.column)
        text = self._lines[min(start.line, len(self._lines) - 1)].rstrip()
        return start.line, start.column, max(1, len(text) - start.column)


@dataclass(slots=True)
class Parsed:
    """The result of reading a file: its mapping if it has one, its places, and its YAML problems."""

    places: Places
    data: Mapping[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)


def read(path: Path) -> Parsed:
    """Reads a file. Never raises: problems are part of the result. Lists become tuples, keys become text."""
    try:
        raw = beginning(path)
    except OSError as error:
        return _unparsable(Source(path, ""), 0, 0, 0, f"cannot be read: {error.strerror or error}", "check the path and its permissions")
    if len(raw) > MAX_BYTES:
        return _unparsable(
            Source(path, ""), 0, 0, 0, f"is not a consumer's file: it has more than {MAX_BYTES:,} bytes", "split the consumer"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = _BREAK.split(raw[: error.start].decode("utf-8-sig", "replace"))
        source = Source(path, raw.decode("utf-8", "replace").removeprefix("\ufeff"))
        byte = raw[error.start]
        return _unparsable(source, len(before) - 1, len(before[-1]), 1, f"is not UTF-8: byte 0x{byte:02x}", "save the file as UTF-8")
    return parse(Source(path, text))


def beginning(path: Path) -> bytes:
    """The bytes of a file, up to one more than `MAX_BYTES`."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def parse(source: Source) -> Parsed:
    """Parses text that is already loaded; otherwise like `read`."""
    control = _UNPRINTABLE.search(source.text)
    if control:
        before = _BREAK.split(source.text[: control.start()])
        message = f"is not YAML: control character {quoted(control[0])[1:-1]}"
        return _unparsable(source, len(before) - 1, len(before[-1]), 1, message, "remove it")
    try:
        root = _compose(source.text)
    except yaml.MarkedYAMLError as error:
        return _syntax(source, error)
    if root is None:
        return _unparsable(source, 0, 0, 0, "is empty", "declare a consumer: topics, transform, sink")
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else "a plain value"
        line, column = root.start_mark.line, root.start_mark.column
        return _unparsable(source, line, column, 1, f"is {kind}, not a mapping", "write keys and values: topics: [flights]")
    parsed = Parsed(Places(source, root))
    parsed.data = _Builder(parsed).build(root, ())
    return parsed


class _Builder:
    """Builds values from nodes and collects problems."""

    def __init__(self, parsed: Parsed) -> None:
        self._places = parsed.places
        self._problems = parsed.problems
        self._done: dict[int, Any] = {}  # an anchored node is built once, however many aliases it has
        self._open: set[int] = set()

    def build(self, node: Node, path: KeyPath) -> Any:
        if id(node) in self._done:
            return self._done[id(node)]
        if id(node) in self._open:
            return self._refuse(path, "contains itself", "write the value out instead of the alias")
        self._open.add(id(node))
        value = self._value(node, path)
        self._open.discard(id(node))
        self._done[id(node)] = value
        return value

    def _value(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return tuple(self.build(child, (*path, index)) for index, child in enumerate(node.value))
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            if control := _UNPRINTABLE.search(node.value):  # escaped, as in "\0": neither Postgres nor Airflow can store it
                return self._refuse(path, f"contains the control character {quoted(control[0])[1:-1]}", "remove it")
            if path[:1] in _AS_WRITTEN and not node.style and _is_ambiguous(node):
                meaning = f"is {_scalar(node)!r} in YAML 1.1, which most people do not mean by {node.value}"
                return self._refuse(path, meaning, f'write "{node.value}" in quotes for text, or the value that is meant')
            return _scalar(node)
        return self._refuse(path, f"has the YAML tag {quoted(node.tag.removeprefix(_TAG))[1:-1]}", "write a plain value without a tag")

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, child in node.value:
            if not isinstance(key, ScalarNode):
                self._at(key, path, "a key is a list or a mapping", "write a plain word as the key")
            elif control := _UNPRINTABLE.search(key.value):
                self._at(key, path, f"a key contains the control character {quoted(control[0])[1:-1]}", "remove it")
            elif key.tag == _TAG + "merge":
                self._at(key, path, "merge keys (<<) are not supported", "write the keys out")
            elif key.value in values:
                where = key_text((*path, key.value))
                self._at(key, (*path, key.value), f"{where} is a duplicate, first in line {lines[key.value]}", "remove one of them")
            else:
                lines[key.value] = key.start_mark.line + 1
                values[key.value] = self.build(child, (*path, key.value))
        return values

    def _refuse(self, path: KeyPath, clause: str, fix: str) -> None:
        self._problems.append(self._places.problem(path, f"{key_text(path) or 'the file'} {clause}", fix))

    def _at(self, node: Node, path: KeyPath, message: str, fix: str) -> None:
        mark = node.start_mark
        length = node.end_mark.column - mark.column if node.end_mark.line == mark.line else 1
        self._problems.append(self._places.problem_at(mark.line, mark.column, max(1, length), key_text(path), message, fix))


def _compose(text: str) -> Node | None:
    """Parses a text into a tree. Raises `yaml.MarkedYAMLError`.

    Composing is recursive in C, and very deep nesting crashes the process. So the nesting is measured first, without recursion.
    """
    depth = values = 0
    for event in yaml.parse(text, Loader=_LOADER):
        values += isinstance(event, yaml.NodeEvent)
        mark: Any = event.start_mark
        if values > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="too many values", problem_mark=mark)
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
            raise yaml.MarkedYAMLError(problem="too long", problem_mark=mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=mark)
    node: Node | None = yaml.compose(text, Loader=_LOADER)
    return node


def _compose_quietly(text: str) -> Node | None:
    try:
        return _compose(text)
    except yaml.YAMLError:
        return None


def _child(node: Node | None, part: str | int) -> tuple[Node | None, Node] | None:
    if isinstance(node, MappingNode):
        for key, child in node.value:
            if isinstance(key, ScalarNode) and key.value == part:
                return key, child
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return None, node.value[part]
    return None


def _is_ambiguous(node: ScalarNode) -> bool:
    """Whether YAML 1.1, which PyYAML reads, and YAML 1.2 read a plain value as different types or numbers."""
    kind = node.tag.removeprefix(_TAG)
    core = next((kind for pattern, kind in _CORE if pattern.fullmatch(node.value)), "str")
    return kind not in ("null", core) or (kind == "int" and not _CORE[1][0].fullmatch(node.value))


def _scalar(node: ScalarNode) -> Any:
    if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
        return node.value
    try:
        return _CONSTRUCTOR.yaml_constructors.get(node.tag, _TEXT)(_CONSTRUCTOR, node)
    except (ValueError, KeyError, AttributeError, IndexError, TypeError, OverflowError, yaml.YAMLError):
        return node.value  # 2026-99-99 looks like a date but is not one: keep it as text


def _syntax(source: Source, error: yaml.MarkedYAMLError) -> Parsed:
    error_text = f"{error.context or ''} {error.problem or ''}".strip()
    line, column = _line_and_column(error.problem_mark or error.context_mark)
    text = source.lines()[line] if line < len(source.lines()) else ""
    if "\t" in text[: column + 1] and not text[:column].strip():
        return _unparsable(source, line, text.index("\t"), 1, "is not YAML: the line is indented with a tab", "indent with spaces")
    if "mapping values are not allowed" in error_text:
        first = ":" not in text[:column]  # the line is in the wrong place, rather than a value that contains a colon
        fix = "begin keys in one column, and end the key before it with a colon" if first else _PLAIN
        return _unparsable(source, line, column, 1, f"is not YAML: {'this' if first else 'a second'} colon cannot stand here", fix)
    for part, clause, fix, at_start in _SYNTAX:
        if part in error_text:
            if at_start and error.context_mark:
                line, column = _line_and_column(error.context_mark)
            return _unparsable(source, line, column, 1, clause, fix)
    return _unparsable(source, line, column, 1, f"is not YAML: {error.problem or error_text}", "fix the line, or the one before it")


def _line_and_column(mark: Any) -> tuple[int, int]:
    return (mark.line, mark.column) if mark else (0, 0)


def _unparsable(source: Source, line: int, column: int, length: int, clause: str, fix: str) -> Parsed:
    """The result for a file that this problem makes unparsable."""
    places = Places(source, None)
    return Parsed(places, None, [places.problem_at(line, column, length, "", f"the file {clause}", fix)])
