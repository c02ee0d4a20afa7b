"""Consumers without code: the fields of each record's value become columns of the table, in the types that the table has.

`Fields` stands where a user's transform of the Arrow form would, so that everything else is the same. Values have a schema (Avro), or are
JSON, where only the table says what a field is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
from tidemark.records.outcome import ABSENT, DELETED, GIVEN, ONLY, OPTIONAL
from tidemark.sink.table import LINEAGE, Column
from tidemark.sink.types import arrow_type, base_of, postgres_type
from tidemark.spec import ConsumerSpec
from tidemark.spec.checks import POSTGRES_NAME_LIMIT
from tidemark.spec.model import Deletes, Encoding, Envelope
from tidemark.spec.user_transform import Form, Transform, load_transform
from tidemark.values import connect_json, debezium, json_fields
from tidemark.values.arrow_values import python_values
from tidemark.values.conversion import as_column, converts, from_python

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

TOMBSTONE = "its value is null, which deletes the row of its key; the sink refuses deletes: set sink.deletes to hard or soft"
MARKED = "it says that its row is deleted (__deleted), and the sink refuses deletes: set sink.deletes to hard or soft"
RESERVED = frozenset((*GIVEN, *OPTIONAL, *(name for name, _ in LINEAGE)))
"""Columns with a meaning of their own."""
_ADDED = frozenset((*(name for name, _ in LINEAGE), DELETED))
"""Columns of the table that hold nothing of the records' values."""
_ROOTS = {"$key": "key", "$timestamp": "timestamp", "$value": "value", "$change": "change"}

_MARK = ("value", "__deleted")
"""The field of unwrapped change data that says whether its row is deleted."""
Steps = tuple[str, ...]
"""A path: the column of the input (``key``, ``value``, ``timestamp``, ``change``), then the fields."""
Leaf = tuple[Steps, str]
"""A path into JSON, and the type of the column that gets its value."""


@dataclass(kw_only=True, eq=False)
class FieldMissing(Refused):
    """A path of the consumer's file leads to no field of the schema."""

    path: str
    fields: list[str]

    def __str__(self) -> str:
        return f'The schema has no field "{self.path}". It has {", ".join(self.fields)}.'


@dataclass(kw_only=True, eq=False)
class FieldReserved(Refused):
    """A field has the name of a column that has another meaning."""

    field: str

    def __str__(self) -> str:
        return (
            f'The field "{self.field}" has the name of a column with a meaning of its own. Load it into another one, '
            f"columns: {{{self.field}_: {self.field}}}, or drop it: drop: [{self.field}]."
        )


@dataclass(kw_only=True, eq=False)
class ColumnsUnknown(Refused):
    """JSON has no schema, and there is no table."""

    def __str__(self) -> str:
        return (
            "JSON has no schema, so only the table says which columns there are. If there is no table yet, `tidemark sink ddl NAME` "
            "derives its DDL from the latest records."
        )


@dataclass(kw_only=True, eq=False)
class FieldUnreadable(Refused):
    """JSON is not searched for a field of this name."""

    field: str

    def __str__(self) -> str:
        return (
            f"The field {self.field!r} cannot be read from JSON, because its name has a quote, a backslash or a control character. "
            "Rename the column of that name, or the field in the consumer's file, or write a transform."
        )


@dataclass(kw_only=True, eq=False)
class NotARecord(Refused):
    """The values have no fields that could become columns."""

    kind: str

    def __str__(self) -> str:
        return f"The values have no fields: they are {self.kind}. Load each as a whole, columns: {{value: $value}}, or write a transform."


@dataclass(kw_only=True, eq=False)
class FieldsClash(Refused):
    """Two fields would become one column."""

    column: str
    first: str
    second: str

    def __str__(self) -> str:
        return (
            f"The fields {self.first} and {self.second} would both be the column {self.column}. Name one of them, "
            f"columns: {{{self.column}_: {self.second}}}, or drop it: drop: [{self.second}]."
        )


@dataclass(kw_only=True, eq=False)
class NameTooLong(Refused):
    """Postgres would cut a column's name."""

    column: str
    path: str

    def __str__(self) -> str:
        return (
            f"The column {self.column} has a name of {len(self.column.encode())} bytes; Postgres has names of at most "
            f"{POSTGRES_NAME_LIMIT}. Name it, columns: {{shorter: {self.path}}}, or drop it: drop: [{self.path}]."
        )


def transform_of(spec: ConsumerSpec, folders: Sequence[Path]) -> Transform:
    """The user's transform, or what stands in its place if the consumer has none. Raises what `load_transform` raises."""
    if spec.transform is not None:
        return load_transform(spec, folders)
    sink = spec.tables[ONLY]
    jsons = {side for side in ("key", "value") if getattr(spec.format, side) in (Encoding.JSON, Encoding.JSON_SCHEMA)}
    changes = spec.format.envelope is Envelope.DEBEZIUM
    if changes and "value" in jsons:
        jsons.add("change")
    fields = Fields(
        columns=tuple((name, steps_of(path)) for name, path in spec.columns.items()),
        drop=frozenset(spec.drop),
        skip_if=tuple((path, steps_of(path), values) for path, values in spec.skip_if.items()),
        flatten=spec.flatten,
        upsert=bool(sink.key),
        key=() if sink.deletes is Deletes.REFUSE else sink.key,
        json=frozenset(jsons),
        changes=changes,
        placeholder=connect_json.Placeholder(spec.format.placeholder or connect_json.UNAVAILABLE),
    )
    return Transform(Form.ARROW, fields, "", "")


def steps_of(path: str) -> Steps:
    first, *rest = path.split(".")
    return (_ROOTS[first], *rest) if first in _ROOTS else ("value", first, *rest)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A transform of the Arrow form.

    ``columns``: columns with paths of their own. ``drop``: fields that do not become columns. ``skip_if``: records whose fields all have
    one of these values are skipped. ``key``: the key columns of a sink with deletes, in which a record without a value deletes the row of
    its key. ``json``: the sides that are JSON texts. ``changes``: values are change data. ``placeholder``: of values that Debezium has
    not sent. ``table``: the columns to write, once they are known.
    """

    columns: tuple[tuple[str, Steps], ...] = ()
    drop: frozenset[str] = frozenset()
    skip_if: tuple[tuple[str, Steps, tuple[Any, ...]], ...] = ()
    flatten: str | None = None
    upsert: bool = False
    key: tuple[str, ...] = ()
    json: frozenset[str] = frozenset()
    changes: bool = False
    placeholder: connect_json.Placeholder = field(default_factory=connect_json.Placeholder)
    table: tuple[Column, ...] = ()

    def output(self, given: pa.Schema, table: Sequence[Column] | None) -> pa.Schema:
        """The columns of the rows, for input of the schema ``given``. ``table``: the table's columns, None if there is no table.

        Raises `FieldMissing`, `FieldReserved`, `FieldsClash`, `NameTooLong`, `NotARecord`, for change data `NoEnvelope`, and for JSON
        `FieldUnreadable`, or `ColumnsUnknown` without a table.
        """
        import pyarrow as pa

        if self.changes:
            given = debezium.opened_schema(given)
        have = {column.name: column for column in table or ()}
        if "value" in self.json and table is None:
            raise ColumnsUnknown
        paths = self._paths(given, table or ())
        if taken := next((name for name in paths if name in RESERVED), None):
            raise FieldReserved(field=taken)
        keys = self._key_paths(given, paths)
        for steps in keys.values():
            self._field_at(given, steps)
        read = [*paths.values(), *keys.values(), *(steps for _, steps, _ in self.skip_if)]
        for name in (name for steps in read if steps[0] in self.json for name in steps[1:]):
            if json_fields.UNREADABLE & {*name}:
                raise FieldUnreadable(field=name)
        fields = [_output_field(name, self._field_at(given, steps), have.get(name)) for name, steps in paths.items()]
        return pa.schema([*fields, *(pa.field(name, given.field(name).type) for name in GIVEN)])

    def bound(self, table: Sequence[Column]) -> Fields:
        """For rows of these columns."""
        return replace(self, table=tuple(table))

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        opened = debezium.opened(batch) if self.changes else debezium.Opened(batch)
        batch = opened.batch
        paths = self._paths(batch.schema, self.table)
        null = pc.is_null(batch["value"])
        key_paths = self._key_paths(batch.schema, paths)
        deleting = key_paths if pc.any(null).as_py() else {}
        parsed, missing, errors = self._parsed(opened, paths, key_paths, deleting)
        marked = self._marked(batch, parsed)
        arrays = []
        for column in self.table:
            array, wrong = _column(batch, paths[column.name], column, parsed)
            if column.name in self.key and base_of(column.type) == "numeric":
                array = array.cast(pa.string())  # values and keys may be decimals of different types
            if paths[column.name][0] == "value" not in self.json:
                absent = debezium.not_sent(_at(batch, paths[column.name]), self.placeholder)
                errors = {at: f"Fail: {column.name} {connect_json.NOT_SENT}" for at in absent if not marked[at]} | errors
            if column.name in deleting:
                keys, wrong_keys = _column(batch, deleting[column.name], column, parsed)
                array = pc.if_else(null, keys.cast(array.type), array)
                wrong |= {at: why for at, why in wrong_keys.items() if null[at].as_py()}
            arrays.append(array)
            for at, why in wrong.items():
                if marked[at] and column.name not in self.key:
                    continue  # a delete needs its key only
                errors.setdefault(at, f"Fail: {column.name} does not fit {column.type}: the value {why}")
        tombstones = null.to_numpy(zero_copy_only=False)
        deletes = tombstones | marked
        gone = self._skipped(batch, parsed) & ~deletes
        gone[list(opened.skipped)] = True
        if self.upsert and not self.key:
            errors |= dict.fromkeys(tombstones.nonzero()[0].tolist(), f"Fail: {TOMBSTONE}")
            errors |= dict.fromkeys(marked.nonzero()[0].tolist(), f"Fail: {MARKED}")
        elif not self.upsert:
            gone |= tombstones
        names = [*(column.name for column in self.table), *GIVEN]
        arrays += [batch[name] for name in GIVEN]
        with_default = [(paths[column.name], column.type) for column in self.table if column.has_default]
        if self.json and with_default:
            none = [False] * len(batch)
            bits = np.packbits(np.array([missing.get(leaf, none) for leaf in with_default]) & ~deletes, axis=0).T
            names.append(ABSENT)
            arrays.append(pa.array([each.tobytes() for each in np.ascontiguousarray(bits)], pa.binary()))
        if errors or gone.any() or deletes.any():
            said = [
                "skip" if skipped else "fail" if at in errors else "delete" if deleted else None
                for at, (skipped, deleted) in enumerate(zip(gone.tolist(), deletes.tolist(), strict=True))
            ]
            names += ["disposition", "error"]
            arrays += [pa.array(said, pa.string()), pa.array([errors.get(at) for at in range(len(batch))], pa.string())]
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _paths(self, given: pa.Schema, table: Sequence[Column]) -> dict[str, Steps]:
        """The path of each column. Those that ``columns`` does not name get the field of their own name."""
        own = self._of_table(table) if "value" in self.json else self._of_schema(given)
        return own | dict(self.columns)

    def _key_paths(self, given: pa.Schema, paths: Mapping[str, Steps]) -> dict[str, Steps]:
        """Where the sink's key is in a record without a value: at the same path in the record's key, or the whole key."""
        import pyarrow as pa

        whole = "key" not in self.json and not pa.types.is_struct(given.field("key").type) and len(self.key) == 1
        return {name: ("key",) if whole else ("key", *paths.get(name, ("value", name))[1:]) for name in self.key}

    def _of_table(self, table: Sequence[Column]) -> dict[str, Steps]:
        names = [column.name for column in table if not column.generated]
        return {name: ("value", name) for name in names if name not in _ADDED and name not in self.drop}

    def _of_schema(self, given: pa.Schema) -> dict[str, Steps]:
        """Without the fields that ``columns`` loads into others."""
        import pyarrow as pa

        found: dict[str, Steps] = {}
        used = {steps for _, steps in self.columns}

        def add(kind: pa.DataType, above: Steps, prefix: str) -> None:
            for each in kind:
                steps, name = (*above, each.name), f"{prefix}{each.name}"
                if steps in used or ".".join(steps[1:]) in self.drop or (self._reads_marks and steps == _MARK):
                    continue
                if self.flatten is not None and pa.types.is_struct(each.type):
                    add(each.type, steps, f"{name}{self.flatten}")
                elif name in found:
                    raise FieldsClash(column=name, first=".".join(found[name][1:]), second=".".join(steps[1:]))
                elif len(name.encode()) > POSTGRES_NAME_LIMIT:
                    raise NameTooLong(column=name, path=".".join(steps[1:]))
                else:
                    found[name] = steps

        kind = given.field("value").type
        if pa.types.is_struct(kind):
            add(kind, ("value",), "")
        elif not self.columns:
            raise NotARecord(kind=str(kind))
        return found

    def _field_at(self, given: pa.Schema, steps: Steps) -> pa.Field | None:
        """The field at the end of the path, None within JSON. Raises `FieldMissing`."""
        import pyarrow as pa

        found = given.field(steps[0])
        if steps[0] in self.json:
            return None if steps[1:] else found
        for at, name in enumerate(steps[1:], 1):
            kind = found.type
            if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
                fields = [each.name for each in kind] if pa.types.is_struct(kind) else [f"no fields, but {kind}"]
                raise FieldMissing(path=".".join(steps[1 : at + 1]), fields=fields)
            found = kind.field(name)
        return found

    def _parsed(
        self, opened: debezium.Opened, paths: Mapping[str, Steps], key_paths: Mapping[str, Steps], deleting: Mapping[str, Steps]
    ) -> tuple[dict[Leaf, list[Any]], dict[Leaf, list[bool]], dict[int, str]]:
        """The values that are within JSON; for columns with a default, whether a record has no such field; and the errors of records whose
        JSON cannot be read."""
        wanted = [(paths[column.name], column.type) for column in self.table] + [(steps, json_fields.ANY) for _, steps, _ in self.skip_if]
        wanted += [(deleting[column.name], column.type) for column in self.table if column.name in deleting]
        wanted += [(_MARK, json_fields.ANY)] * self._reads_marks
        with_default = {(paths[column.name], column.type) for column in self.table if column.has_default}
        found: dict[Leaf, list[Any]] = {}
        errors = dict(opened.errors)
        for side in self.json:
            leaves = list(dict.fromkeys(leaf for leaf in wanted if leaf[0][0] == side and leaf[0][1:]))
            defaults = {(steps[1:], kind) for steps, kind in with_default if steps[0] == side}
            if leaves:
                texts = opened.batch[side].to_pylist()
                if side == "key":
                    read = {steps for steps in (*paths.values(), *(steps for _, steps, _ in self.skip_if)) if steps[0] == side}
                    alone = key_paths[self.key[0]][1:] if len(self.key) == 1 else ()
                    texts = _keys(texts, alone, [False] * len(texts) if read else opened.batch["value"].is_valid().to_pylist())
                named = [(steps[1:], kind) for steps, kind in leaves]
                types = opened.types.get(side)
                if types is not None:
                    values, wrong = connect_json.read(texts, named, types, self.placeholder, defaults)
                else:
                    values, wrong = json_fields.read(texts, named, defaults)
                    wrong = connect_json.not_sent(texts, values, named, self.placeholder) | wrong
                found |= dict(zip(leaves, values, strict=True))
                errors = wrong | errors
        missing = {leaf: [value is json_fields.ABSENT for value in found[leaf]] for leaf in with_default & found.keys()}
        for leaf in missing:
            found[leaf] = [None if value is json_fields.ABSENT else value for value in found[leaf]]
        return found, missing, errors

    @property
    def _reads_marks(self) -> bool:
        """Whether values may say that their row is deleted, as Debezium's ExtractNewRecordState lets them."""
        return self.upsert and not self.changes

    def _marked(self, batch: pa.RecordBatch, parsed: Mapping[Leaf, list[Any]]) -> np.ndarray:
        """Whether each value says that its row is deleted."""
        import numpy as np
        import pyarrow as pa

        kind = batch["value"].type
        values = parsed.get((_MARK, json_fields.ANY))
        if values is None and self._reads_marks and pa.types.is_struct(kind) and kind.get_field_index(_MARK[1]) >= 0:
            values = _plain_values(_at(batch, _MARK))
        return np.array([value is True or value == "true" for value in values or [None] * len(batch)], bool)

    def _skipped(self, batch: pa.RecordBatch, parsed: Mapping[Leaf, list[Any]]) -> np.ndarray:
        import numpy as np

        gone = np.full(len(batch), bool(self.skip_if))
        for _, steps, wanted in self.skip_if:
            values = parsed.get((steps, json_fields.ANY))
            found = _plain_values(_at(batch, steps)) if values is None else values
            gone &= np.array([any(_is_same(value, each) for each in wanted) for value in found], bool)
        return gone


def _keys(texts: list[str | None], alone: Steps, unread: list[bool]) -> list[str | None]:
    """Keys in JSON, null where ``unread``. A key that is no object is the value at the path ``alone``."""
    before, after = "".join(f"{{{json.dumps(name)}: " for name in alone), "}" * len(alone)

    def placed(text: str) -> str:
        is_value = bool(alone) and not text.lstrip().startswith("{") and json_fields.is_json(text)
        return f"{before}{text}{after}" if is_value else text

    return [None if text is None or skip else placed(text) for text, skip in zip(texts, unread, strict=True)]


def _is_same(value: Any, wanted: Any) -> bool:
    """Whether a value of a record is the one in the consumer's file, of the same type: 1 is 1.0, but neither true nor "1"."""
    if isinstance(value, bool) is not isinstance(wanted, bool):
        return False
    if isinstance(value, Decimal) and isinstance(wanted, float):
        value = float(value)
    return bool(value == wanted)


def _output_field(name: str, field: pa.Field | None, column: Column | None) -> pa.Field:
    """The column in the table's type, if the values can be converted to it; else in their own, so that the difference is reported."""
    import pyarrow as pa

    kind = None if field is None else field.type
    if column is not None:
        target = arrow_type(column.type)
        return pa.field(name, target if target is not None and (kind is None or converts(kind, column.type)) else kind or pa.string())
    if kind is not None and postgres_type(kind) is None:
        return pa.field(name, pa.string(), metadata={"postgres": "jsonb"})
    return pa.field(name, kind or pa.string(), metadata=None if field is None else field.metadata)


def _column(batch: pa.RecordBatch, steps: Steps, column: Column, parsed: Mapping[Leaf, list[Any]]) -> tuple[pa.Array, dict[int, str]]:
    """The values of a column, and what is wrong with those that do not fit it, by their places in the batch."""
    values = parsed.get((steps, column.type))
    if values is None:
        return as_column(_at(batch, steps), column.type)
    return from_python(values, column.type)


def _plain_values(array: pa.Array) -> list[Any]:
    """With a value that equals no other in place of those that Python has not, such as times after the year 9999."""
    values, unreadable = python_values(array)
    return [object() if at in unreadable else value for at, value in enumerate(values)]


def _at(batch: pa.RecordBatch, steps: Steps) -> pa.Array:
    import pyarrow.compute as pc

    return pc.struct_field(batch[steps[0]], list(steps[1:])) if len(steps) > 1 else batch[steps[0]]
