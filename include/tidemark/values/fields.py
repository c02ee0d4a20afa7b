"""Consumers without code: the fields of each record's value become columns of the table, in the table's types.

`Fields` takes the place of a user's Arrow-form transform, so the rest of a run is the same. Values have a schema (Avro), or are JSON,
where only the table defines the types.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
from tidemark.spec.user_transform import Form, Transform, load_rehearsed, load_transform
from tidemark.values import connect_json, debezium, json_fields
from tidemark.values.arrow_values import python_values
from tidemark.values.conversion import as_column, converts, from_python
from tidemark.values.json_fields import Leaf

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

TOMBSTONE = "its value is null, which deletes the row of its key; the sink refuses deletes: set sink.deletes to hard or soft"
MARKED = "it marks its row as deleted (__deleted), and the sink refuses deletes: set sink.deletes to hard or soft"
RESERVED = frozenset((*GIVEN, *OPTIONAL, *(name for name, _ in LINEAGE)))
"""Columns with a meaning of their own."""
_ADDED = frozenset((*(name for name, _ in LINEAGE), DELETED))
"""Columns of the table that are not loaded from records' values."""
_ROOTS = {"$key": "key", "$timestamp": "timestamp", "$value": "value", "$change": "change"}

_DELETED_FIELD = ("value", "__deleted")
"""The field of unwrapped change data that marks a deleted row."""
Steps = tuple[str, ...]
"""A path: the column of the input (``key``, ``value``, ``timestamp``, ``change``), then the fields."""


class FieldsRefused(Refused):
    """Fields cannot become columns, or the consumer's file names a field that the schema lacks. ``problem`` says what to write instead."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class FieldReserved(Refused):
    """A field has the name of a column with a meaning of its own."""

    field: str

    def __str__(self) -> str:
        return (
            f'The field "{self.field}" has the name of a column with a meaning of its own. Load it into another one, '
            f"columns: {{{self.field}_: {self.field}}}, or drop it: drop: [{self.field}]."
        )


class ColumnsUnknown(Refused):
    """JSON has no schema, and there is no table."""

    def __str__(self) -> str:
        return (
            "JSON has no schema, so only the table defines the columns. If there is no table yet, `tidemark sink ddl NAME` "
            "derives its DDL from the latest records."
        )


def transform_of(spec: ConsumerSpec, folders: Sequence[Path], rehearsed: str | None = None) -> Transform:
    """The user's transform, or `Fields` if the consumer has none; ``rehearsed`` is read instead. Raises what `load_transform` and
    `load_rehearsed` raise."""
    if rehearsed is not None:
        return load_rehearsed(spec, rehearsed, folders)
    if spec.transform is not None:
        return load_transform(spec, folders)
    sink = spec.sinks[ONLY]
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
    its key. ``json``: the sides that are JSON texts. ``changes``: values are change data. ``placeholder``: Debezium's text for values that
    it did not send. ``table``: the columns to write, once they are known.
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

    def output(self, input_schema: pa.Schema, table: Sequence[Column] | None) -> pa.Schema:
        """The schema of the rows for input of this schema. ``table``: the table's columns, None if there is no table.

        Raises `FieldsRefused`, `FieldReserved`, for change data `NoEnvelope`, and for JSON without a table `ColumnsUnknown`.
        """
        import pyarrow as pa

        if self.changes:
            input_schema = debezium.opened_schema(input_schema)
        existing = {column.name: column for column in table or ()}
        if "value" in self.json and table is None:
            raise ColumnsUnknown
        paths = self._paths(input_schema, table or ())
        if reserved := next((name for name in paths if name in RESERVED), None):
            raise FieldReserved(field=reserved)
        keys = self._key_paths(input_schema, paths)
        for steps in keys.values():
            self._field_at(input_schema, steps)
        read_paths = [*paths.values(), *keys.values(), *(steps for _, steps, _ in self.skip_if)]
        for name in (name for steps in read_paths if steps[0] in self.json for name in steps[1:]):
            if json_fields.UNREADABLE & {*name}:
                problem = f"The field {name!r} cannot be read from JSON, because its name has a quote, a backslash or a control character. "
                fix = "Rename the column of that name, or the field in the consumer's file, or write a transform."
                raise FieldsRefused(problem=problem + fix)
        fields = [_output_field(name, self._field_at(input_schema, steps), existing.get(name)) for name, steps in paths.items()]
        return pa.schema([*fields, *(pa.field(name, input_schema.field(name).type) for name in GIVEN)])

    def bound(self, table: Sequence[Column]) -> Fields:
        """A copy that writes these columns."""
        return replace(self, table=tuple(table))

    @property
    def reads_json(self) -> bool:
        """Whether the values are JSON, and not change data: the table alone defines the columns."""
        return "value" in self.json and not self.changes

    def unread(self, names: Iterable[str], table: Sequence[Column]) -> list[str]:
        """The fields of JSON values that no column of the table gets, and that the consumer's file does not name."""
        paths = [*(self._table_paths(table) | dict(self.columns)).values(), *(steps for _, steps, _ in self.skip_if)]
        if ("value",) in paths:
            return []
        used = {steps[1] for steps in paths if steps[0] == "value"} | {path.split(".")[0] for path in self.drop}
        return [name for name in names if name not in used and not (self._reads_delete_marks and name == _DELETED_FIELD[1])]

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
        marked = self._delete_marks(batch, parsed)
        arrays = []
        for column in self.table:
            array, misfits = _column(batch, paths[column.name], column, parsed)
            if column.name in self.key and base_of(column.type) == "numeric":
                array = array.cast(pa.string())  # values and keys may be decimals of different types
            if paths[column.name][0] == "value" not in self.json:
                absent = debezium.not_sent(_array_at(batch, paths[column.name]), self.placeholder)
                errors = {at: f"Fail: {column.name} {connect_json.NOT_SENT}" for at in absent if not marked[at]} | errors
            if column.name in deleting:
                keys, key_misfits = _column(batch, deleting[column.name], column, parsed)
                array = pc.if_else(null, keys.cast(array.type), array)
                misfits |= {at: reason for at, reason in key_misfits.items() if null[at].as_py()}
            arrays.append(array)
            for at, reason in misfits.items():
                if marked[at] and column.name not in self.key:
                    continue  # a delete needs its key only
                errors.setdefault(at, f"Fail: {_place(column.name, paths[column.name])} does not fit {column.type}: the value {reason}")
        tombstones = null.to_numpy(zero_copy_only=False)
        deletes = tombstones | marked
        skips = self._skip_mask(batch, parsed) & ~deletes
        skips[list(opened.skipped)] = True
        if self.upsert and not self.key:
            errors |= dict.fromkeys(tombstones.nonzero()[0].tolist(), f"Fail: {TOMBSTONE}")
            errors |= dict.fromkeys(marked.nonzero()[0].tolist(), f"Fail: {MARKED}")
        elif not self.upsert:
            skips |= tombstones
        names = [*(column.name for column in self.table), *GIVEN]
        arrays += [batch[name] for name in GIVEN]
        with_default = [(paths[column.name], column.type) for column in self.table if column.has_default]
        if self.json and with_default:
            all_present = [False] * len(batch)
            bits = np.packbits(np.array([missing.get(leaf, all_present) for leaf in with_default]) & ~deletes, axis=0).T
            names.append(ABSENT)
            arrays.append(pa.array([row.tobytes() for row in np.ascontiguousarray(bits)], pa.binary()))
        if errors or skips.any() or deletes.any():
            dispositions = [
                "skip" if skipped else "fail" if at in errors else "delete" if deleted else None
                for at, (skipped, deleted) in enumerate(zip(skips.tolist(), deletes.tolist(), strict=True))
            ]
            names += ["disposition", "error"]
            arrays += [pa.array(dispositions, pa.string()), pa.array([errors.get(at) for at in range(len(batch))], pa.string())]
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _paths(self, input_schema: pa.Schema, table: Sequence[Column]) -> dict[str, Steps]:
        """The path of each column. A column that ``columns`` does not name gets the field of its own name."""
        own = self._table_paths(table) if "value" in self.json else self._schema_paths(input_schema)
        return own | dict(self.columns)

    def _key_paths(self, input_schema: pa.Schema, paths: Mapping[str, Steps]) -> dict[str, Steps]:
        """Where the sink's key is in a record without a value: at the same path in the record's key, or the whole key."""
        import pyarrow as pa

        whole = "key" not in self.json and not pa.types.is_struct(input_schema.field("key").type) and len(self.key) == 1
        return {name: ("key",) if whole else ("key", *paths.get(name, ("value", name))[1:]) for name in self.key}

    def _table_paths(self, table: Sequence[Column]) -> dict[str, Steps]:
        names = [column.name for column in table if not column.generated]
        return {name: ("value", name) for name in names if name not in _ADDED and name not in self.drop}

    def _schema_paths(self, input_schema: pa.Schema) -> dict[str, Steps]:
        """Paths of the schema's fields, without those that ``columns`` loads."""
        import pyarrow as pa

        paths: dict[str, Steps] = {}
        used = {steps for _, steps in self.columns}

        def add(kind: pa.DataType, above: Steps, prefix: str) -> None:
            for child in kind:
                steps, name = (*above, child.name), f"{prefix}{child.name}"
                path = ".".join(steps[1:])
                if steps in used or path in self.drop or (self._reads_delete_marks and steps == _DELETED_FIELD):
                    continue
                if self.flatten is not None and pa.types.is_struct(child.type):
                    add(child.type, steps, f"{name}{self.flatten}")
                elif name in paths:
                    problem = f"The fields {'.'.join(paths[name][1:])} and {path} would both load column {name}. Name one of them"
                    raise FieldsRefused(problem=f"{problem}, columns: {{{name}_: {path}}}, or drop it: drop: [{path}].")
                elif (size := len(name.encode())) > POSTGRES_NAME_LIMIT:
                    problem = f"The column {name} has a name of {size} bytes; Postgres has names of at most {POSTGRES_NAME_LIMIT}. Name it"
                    raise FieldsRefused(problem=f"{problem}, columns: {{shorter: {path}}}, or drop it: drop: [{path}].")
                else:
                    paths[name] = steps

        kind = input_schema.field("value").type
        if pa.types.is_struct(kind):
            add(kind, ("value",), "")
        elif not self.columns:
            fix = "Load each as a whole, columns: {value: $value}, or write a transform."
            raise FieldsRefused(problem=f"The values have no fields: they are {kind}. {fix}")
        return paths

    def _field_at(self, input_schema: pa.Schema, steps: Steps) -> pa.Field | None:
        """The field at the end of the path, None within JSON. Raises `FieldsRefused`."""
        import pyarrow as pa

        current = input_schema.field(steps[0])
        if steps[0] in self.json:
            return None if steps[1:] else current
        for at, name in enumerate(steps[1:], 1):
            kind = current.type
            if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
                fields = ", ".join(child.name for child in kind) if pa.types.is_struct(kind) else f"no fields, but {kind}"
                raise FieldsRefused(problem=f'The schema has no field "{".".join(steps[1 : at + 1])}". It has {fields}.')
            current = kind.field(name)
        return current

    def _parsed(
        self, opened: debezium.Opened, paths: Mapping[str, Steps], key_paths: Mapping[str, Steps], deleting: Mapping[str, Steps]
    ) -> tuple[dict[Leaf, list[Any]], dict[Leaf, list[bool]], dict[int, str]]:
        """The values read from JSON; for columns with a default, which records lack the field; and the errors of unreadable records."""
        leaves = [(paths[column.name], column.type) for column in self.table] + [(steps, json_fields.ANY) for _, steps, _ in self.skip_if]
        leaves += [(deleting[column.name], column.type) for column in self.table if column.name in deleting]
        leaves += [(_DELETED_FIELD, json_fields.ANY)] * self._reads_delete_marks
        with_default = {(paths[column.name], column.type) for column in self.table if column.has_default}
        parsed: dict[Leaf, list[Any]] = {}
        errors = dict(opened.errors)
        for side in self.json:
            of_side = list(dict.fromkeys(leaf for leaf in leaves if leaf[0][0] == side and leaf[0][1:]))
            defaults = {(steps[1:], kind) for steps, kind in with_default if steps[0] == side}
            if of_side:
                texts = opened.batch[side].to_pylist()
                if side == "key":
                    loaded = {steps for steps in (*paths.values(), *(steps for _, steps, _ in self.skip_if)) if steps[0] == side}
                    alone = key_paths[self.key[0]][1:] if len(self.key) == 1 else ()
                    texts = _key_texts(texts, alone, [False] * len(texts) if loaded else opened.batch["value"].is_valid().to_pylist())
                within_side = [(steps[1:], kind) for steps, kind in of_side]
                types = opened.types.get(side)
                if types is not None:
                    values, unreadable = connect_json.read(texts, within_side, types, self.placeholder, defaults)
                else:
                    values, unreadable = json_fields.read(texts, within_side, defaults)
                    unreadable = connect_json.not_sent(texts, values, within_side, self.placeholder) | unreadable
                parsed |= dict(zip(of_side, values, strict=True))
                errors = unreadable | errors
        missing = {leaf: [value is json_fields.ABSENT for value in parsed[leaf]] for leaf in with_default & parsed.keys()}
        for leaf in missing:
            parsed[leaf] = [None if value is json_fields.ABSENT else value for value in parsed[leaf]]
        return parsed, missing, errors

    @property
    def _reads_delete_marks(self) -> bool:
        """Whether values may mark their row as deleted, as with Debezium's ExtractNewRecordState."""
        return self.upsert and not self.changes

    def _delete_marks(self, batch: pa.RecordBatch, parsed: Mapping[Leaf, list[Any]]) -> np.ndarray:
        """Mask of values that mark their row as deleted."""
        import numpy as np
        import pyarrow as pa

        kind = batch["value"].type
        values = parsed.get((_DELETED_FIELD, json_fields.ANY))
        if values is None and self._reads_delete_marks and pa.types.is_struct(kind) and kind.get_field_index(_DELETED_FIELD[1]) >= 0:
            values = _plain_values(_array_at(batch, _DELETED_FIELD))
        return np.array([value is True or value == "true" for value in values or [None] * len(batch)], bool)

    def _skip_mask(self, batch: pa.RecordBatch, parsed: Mapping[Leaf, list[Any]]) -> np.ndarray:
        import numpy as np

        skips = np.full(len(batch), bool(self.skip_if))
        for _, steps, skipped_values in self.skip_if:
            values = parsed.get((steps, json_fields.ANY))
            if values is None:
                values = _plain_values(_array_at(batch, steps))
            skips &= np.array([any(_is_same(value, skipped) for skipped in skipped_values) for value in values], bool)
        return skips


def _key_texts(texts: list[str | None], alone: Steps, unread: list[bool]) -> list[str | None]:
    """Keys in JSON, null where ``unread``. A key that is not an object becomes the value at the path ``alone``."""
    before, after = "".join(f"{{{json.dumps(name)}: " for name in alone), "}" * len(alone)

    def wrapped(text: str) -> str:
        is_value = bool(alone) and not text.lstrip().startswith("{") and json_fields.is_json(text)
        return f"{before}{text}{after}" if is_value else text

    return [None if text is None or skip else wrapped(text) for text, skip in zip(texts, unread, strict=True)]


def _place(column: str, steps: Steps) -> str:
    """The column, and its field if that has another name."""
    side, *names = steps
    field = ".".join(names if side == "value" and names else (f"${side}", *names))
    return column if field == column else f"{column} (from {field})"


def _is_same(value: Any, expected: Any) -> bool:
    """Whether a record's value equals that in the consumer's file, type included: 1 is 1.0, but neither true nor "1"."""
    if isinstance(value, bool) is not isinstance(expected, bool):
        return False
    if isinstance(value, Decimal) and isinstance(expected, float):
        value = float(value)
    return bool(value == expected)


def _output_field(name: str, field: pa.Field | None, column: Column | None) -> pa.Field:
    """The column in the table's type if the values convert to it, otherwise in their own, so that the difference is reported."""
    import pyarrow as pa

    kind = None if field is None else field.type
    if column is not None:
        target = arrow_type(column.type)
        return pa.field(name, target if target is not None and (kind is None or converts(kind, column.type)) else kind or pa.string())
    if kind is not None and postgres_type(kind) is None:
        return pa.field(name, pa.string(), metadata={"postgres": "jsonb"})
    return pa.field(name, kind or pa.string(), metadata=None if field is None else field.metadata)


def _column(batch: pa.RecordBatch, steps: Steps, column: Column, parsed: Mapping[Leaf, list[Any]]) -> tuple[pa.Array, dict[int, str]]:
    """The values of a column, and the reason for each that does not fit it, by its index in the batch."""
    values = parsed.get((steps, column.type))
    if values is None:
        return as_column(_array_at(batch, steps), column.type)
    return from_python(values, column.type)


def _plain_values(array: pa.Array) -> list[Any]:
    """Python values. One that Python cannot represent, such as a time after the year 9999, becomes an object that equals no other."""
    values, unreadable = python_values(array)
    return [object() if at in unreadable else value for at, value in enumerate(values)]


def _array_at(batch: pa.RecordBatch, steps: Steps) -> pa.Array:
    import pyarrow.compute as pc

    return pc.struct_field(batch[steps[0]], list(steps[1:])) if len(steps) > 1 else batch[steps[0]]
