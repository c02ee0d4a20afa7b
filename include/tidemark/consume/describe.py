"""Finds out which columns a transform returns, without a record: for the check before a run, ``consumers check`` and ``sink ddl``."""

from __future__ import annotations

import datetime as dt
import decimal
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tidemark.consume.fields import Fields
from tidemark.consume.forms import TransformFailed
from tidemark.db import transaction
from tidemark.errors import Refused
from tidemark.sink.table import LINEAGE, Column, Layout, SinkMissing, has_unique_index, match, read_columns, require_table
from tidemark.sink.types import arrow_type, fits
from tidemark.spec import Sink
from tidemark.spec.transform import Form, Transform

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Connection

SparkSchema = Callable[[Callable[..., Any], "pa.Schema"], "pa.Schema"]
"""Returns the output schema of a Spark-form transform for input of a schema. Starts a JVM."""


@dataclass(kw_only=True, eq=False)
class OutputUnknown(Refused):
    """The function form has no declared result type, so its columns are unknown."""

    transform: str

    def __str__(self) -> str:
        return (
            f"{self.transform} does not say what columns it returns. Annotate its result:\n"
            "    class Row(TypedDict):\n        city: str\n        population: int\n\n"
            "    def transform(record: Record) -> Row | None: ..."
        )


def output_of(transform: Transform, spark_schema: SparkSchema, given: pa.Schema) -> pa.Schema:
    """The columns of a transform's output, including the lineage columns.

    Spark and Arrow forms are called once with no records, in the columns ``given``. A plain function declares its columns in its result
    type (a ``TypedDict``).
    Raises `TransformFailed` or `OutputUnknown`.
    """
    import pyarrow as pa

    if isinstance(transform.function, Fields):
        return transform.function.output(given, None)
    if transform.form is Form.SPARK:
        return spark_schema(transform.function, given)
    if transform.form is Form.FUNCTION:
        declared = declared_columns(transform)
        if declared is None:
            raise OutputUnknown(transform=f"{transform.module}:{transform.name}")
        lineage = [pa.field("kafka_topic", pa.string()), pa.field("kafka_partition", pa.int32()), pa.field("kafka_offset", pa.int64())]
        return pa.schema([pa.field(name, kind) for name, kind in declared.items()] + lineage)
    empty = pa.RecordBatch.from_pylist([], schema=given)
    try:
        answer = transform.function(empty)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}. It must also accept an empty batch, because this is how its columns are found."
        raise TransformFailed(where="an empty batch", problem=problem) from error
    if not isinstance(answer, pa.RecordBatch):
        raise TransformFailed(where="an empty batch", problem=f"it returned {type(answer).__name__}; it must return a pyarrow.RecordBatch.")
    return answer.schema


def layout_of(transform: Transform, sink: Sink, connection: Connection, spark_schema: SparkSchema, given: pa.Schema) -> Layout:
    """How this transform's output maps to the sink's table. Raises `SinkMissing`, `SinkHidden`, `SinkNoTable` or `SinkMismatch`.

    A plain function's values get the types of the table's columns. If it declares no result type, it may return every column without a
    default.
    """
    with transaction(connection) as cur:
        columns = read_columns(cur, sink.table)
        require_table(cur, sink.table)
        by_lineage = has_unique_index(cur, sink.table, [name for name, _ in LINEAGE])
        by_key = not sink.key or has_unique_index(cur, sink.table, sink.key)
    if not columns:
        raise SinkMissing(table=sink.table)
    function = transform.form is Form.FUNCTION
    if isinstance(transform.function, Fields):
        output = transform.function.output(given, columns)
    else:
        output = _function_schema(transform, columns) if function else output_of(transform, spark_schema, given)
    aggregates = transform.form is Form.SPARK
    found = match(
        sink.table, columns, output, lineage_index=by_lineage, key=sink.key, key_index=by_key, aggregates=aggregates, deletes=sink.deletes
    )
    return replace(found, error_detail=sink.error_detail)


def declared_columns(transform: Transform) -> dict[str, pa.DataType] | None:
    """The columns of a plain function's result type, in order, with their Arrow types. `None` if it declares no result type."""
    try:
        result = typing.get_type_hints(transform.function).get("return")
        row = next((each for each in _parts(result) if typing.is_typeddict(each)), None)
        return None if row is None else {name: _arrow_of(kind) for name, kind in typing.get_type_hints(row).items()}
    except (NameError, TypeError):  # a name imported for type checkers only
        return None


def _function_schema(transform: Transform, columns: list[Column]) -> pa.Schema:
    """The schema of the batches built from the function's rows: the table's types, for the columns that it may return."""
    import pyarrow as pa

    declared = declared_columns(transform)
    lineage = {name for name, _ in LINEAGE}
    own = {column.name: column for column in columns if column.name not in lineage}
    if declared is None:
        names = [column.name for column in own.values() if not column.generated and not column.has_default]
    else:
        names = list(declared)
    fields = []
    for name in names:
        kind = arrow_type(own[name].type) if name in own else None
        if declared is not None and (kind is None or not _agrees(declared[name], own[name].type)):
            kind = declared[name]
        if kind is not None:
            fields.append(pa.field(name, kind))
    given = [pa.field("kafka_topic", pa.string()), pa.field("kafka_partition", pa.int32()), pa.field("kafka_offset", pa.int64())]
    return pa.schema(fields + given)


def _agrees(declared: pa.DataType, postgres: str) -> bool:
    """Whether Python values of the declared type fit the column: an ``int`` fits every numeric type, a ``datetime`` either timestamp."""
    import pyarrow as pa

    target = arrow_type(postgres)
    assert target is not None
    if pa.types.is_list(declared) and pa.types.is_list(target):
        return _agrees(declared.value_type, postgres[:-2])
    same = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_timestamp)
    number = any(kind(declared) and kind(target) for kind in same) or (
        pa.types.is_integer(declared) and (pa.types.is_floating(target) or pa.types.is_decimal(target))
    )
    return number or fits(declared, postgres) or (postgres in ("json", "jsonb") and pa.types.is_string(declared))


_PYTHON: Mapping[Any, str] = {
    bool: "boolean",
    int: "bigint",
    float: "double precision",
    str: "text",
    bytes: "bytea",
    dt.datetime: "timestamp with time zone",
    dt.date: "date",
    dt.time: "time without time zone",
    dt.timedelta: "interval",
    decimal.Decimal: "numeric",
    uuid.UUID: "uuid",
}


def _arrow_of(kind: Any) -> pa.DataType:
    """The Arrow type for a Python type. All but the simple types become JSON text."""
    import pyarrow as pa

    for each in _members(kind):
        if isinstance(each, typing.Hashable) and each in _PYTHON:
            found = arrow_type(_PYTHON[each])
            assert found is not None
            return found
        if typing.get_origin(each) is list and (inner := typing.get_args(each)) and inner[0] in _PYTHON:
            return pa.list_(_arrow_of(inner[0]))
    return pa.string()


def _parts(kind: Any) -> list[Any]:
    """A type, or the members of a union and of ``Iterable[...]``, ``list[...]`` and similar, without None."""
    found = []
    for each in _members(kind):
        inner = typing.get_args(each)
        found += [part for one in inner for part in _parts(one)] if inner else [each]
    return found


def _members(kind: Any) -> list[Any]:
    """A type, or the members of a union without None; for a ``Literal`` the types of its values."""
    if typing.get_origin(kind) is typing.Literal:
        return [type(value) for value in typing.get_args(kind)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(kind) for part in _members(each)]
    return [] if kind is type(None) or kind is None else [kind]
