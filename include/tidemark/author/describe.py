"""Determines the columns that a transform returns, without a record: for the check before a run, ``consumers check`` and ``sink ddl``."""

from __future__ import annotations

import datetime as dt
import decimal
import types
import typing
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemark.db import transaction
from tidemark.errors import Refused, message_of
from tidemark.records.outcome import ONLY
from tidemark.sink.fit import SinkGuardsRows, SinkMismatch, SinkNoTable, match, read_table
from tidemark.sink.table import LINEAGE, Column, Layout, SinkHidden, SinkMissing
from tidemark.sink.types import arrow_type, base_of
from tidemark.spec import Sink
from tidemark.spec.model import Evolve
from tidemark.spec.user_transform import Form, Transform
from tidemark.values.conversion import converts
from tidemark.values.fields import Fields
from tidemark.worker.call_transform import TransformFailed, require_batches, require_sinks

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Connection

SparkSchema = Callable[[Callable[..., Any], "pa.Schema"], Mapping[str, "pa.Schema"]]
"""Returns the output schema of a Spark-form transform for each sink, for input of a schema. Starts a JVM."""


class OutputUnknown(Refused):
    """The function form has no declared result type, so its columns are unknown."""

    transform: str
    several: bool = False
    """Whether it loads several sinks."""
    evolve: bool = False
    """Whether runs add missing columns to the tables."""

    def __str__(self) -> str:
        if self.evolve and self.several:
            return (
                f"{self.transform} is a plain function for several sinks, so only their tables define the columns. Remove "
                "evolve: add, or write the transform in the Arrow or the Spark form."
            )
        if self.several:
            return (
                f"{self.transform} is a plain function for several sinks, so only their tables define the columns. Create the "
                "tables first, each with the lineage columns kafka_topic_id smallint, kafka_partition integer, kafka_offset bigint and "
                "kafka_seq integer, all NOT NULL, and a unique constraint on these four."
            )
        return (
            f"{self.transform} does not declare the columns it returns. Annotate its result:\n"
            "    class Row(TypedDict):\n        city: str\n        population: int\n\n"
            "    def transform(record: Record) -> Row | None: ..."
        )


def outputs_of(transform: Transform, sinks: Collection[str], spark_schema: SparkSchema, input_schema: pa.Schema) -> dict[str, pa.Schema]:
    """The columns of a transform's output for each sink, including the lineage columns.

    Spark and Arrow forms are called once, with no records of the ``input_schema``. A plain function declares its columns in its result
    type (a ``TypedDict``).
    Raises `TransformFailed` or `OutputUnknown`.
    """
    if isinstance(transform.function, Fields):
        return {ONLY: transform.function.output(input_schema, None)}
    if transform.form is Form.FUNCTION:
        return {ONLY: _declared_schema(transform, list(sinks))}
    return _returned_schemas(transform, sinks, spark_schema, input_schema)


def _declared_schema(transform: Transform, sinks: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    name = f"{transform.module}:{transform.name}"
    columns = declared_columns(transform) if sinks == [ONLY] else None
    if columns is None:
        raise OutputUnknown(transform=name, several=sinks != [ONLY])
    lineage = [pa.field("kafka_topic", pa.string()), pa.field("kafka_partition", pa.int32()), pa.field("kafka_offset", pa.int64())]
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()] + lineage)


def _returned_schemas(
    transform: Transform, sinks: Collection[str], spark_schema: SparkSchema, input_schema: pa.Schema
) -> dict[str, pa.Schema]:
    """The output schemas of a transform of the Arrow or Spark form, for an empty batch."""
    import pyarrow as pa

    where = "an empty batch"
    if transform.form is Form.SPARK:
        schemas = dict(spark_schema(transform.function, input_schema))
    else:
        empty = pa.RecordBatch.from_pylist([], schema=input_schema)
        try:
            result = transform.function(empty)
        except Exception as error:
            fix = "It must also accept an empty batch, because this is how its columns are found."
            problem = f"{type(error).__name__}: {message_of(error)}. {fix}"
            raise TransformFailed(where=where, problem=problem) from error
        require_batches(result, where)
        schemas = {sink: output.schema for sink, output in (result if isinstance(result, Mapping) else {ONLY: result}).items()}
    require_sinks(schemas, list(sinks), where)
    if missing := [sink for sink in sinks if sink not in schemas]:
        problem = f"it returned nothing for {', '.join(missing)}: return a result for each sink, also without rows."
        raise TransformFailed(where=where, problem=problem)
    return schemas


@dataclass(frozen=True, slots=True)
class TableComparison:
    """A sink's table, compared with the output. ``layout``: how rows are written. ``refused``: why they cannot be. Both are set if a run
    adds the missing columns, which ``layout`` then includes."""

    columns: Sequence[Column] = ()
    layout: Layout | None = None
    refused: Refused | None = None

    @property
    def to_add(self) -> list[Column]:
        """Columns that a run adds to the table."""
        return self.refused.to_add if self.layout is not None and isinstance(self.refused, SinkMismatch) else []


def layouts_of(
    transform: Transform, sinks: Mapping[str, Sink], connection: Connection, spark_schema: SparkSchema, input_schema: pa.Schema
) -> tuple[Layout, ...]:
    """The mapping of this transform's output to the sinks' tables, in load order. Raises `SinkMissing`, `SinkHidden`, `SinkNoTable`,
    `SinkGuardsRows` or `SinkMismatch`, and what `compare` raises. A mismatch that a run can fix comes last."""
    compared = compare(transform, sinks, connection, spark_schema, input_schema)
    if refused := [(bool(comparison.to_add), comparison.refused) for comparison in compared.values() if comparison.refused is not None]:
        raise min(refused, key=lambda mismatch: mismatch[0])[1]
    return common_layouts(compared)


def common_layouts(compared: Mapping[str, TableComparison]) -> tuple[Layout, ...]:
    """The layouts of all sinks. Raises `TransformFailed` if some rows have lineage and others do not."""
    layouts = tuple(comparison.layout for comparison in compared.values() if comparison.layout is not None)
    if len({layout.by_record for layout in layouts}) > 1:
        problem = "some of its results have lineage columns and others do not: return all with them, or all without."
        raise TransformFailed(where="an empty batch", problem=problem)
    return layouts


def compare(
    transform: Transform, sinks: Mapping[str, Sink], connection: Connection, spark_schema: SparkSchema, input_schema: pa.Schema
) -> dict[str, TableComparison]:
    """Compares this transform's output with each sink's table, in load order.

    A plain function's values get the types of the table's columns. If it declares no result type, it may return every column without a
    default. Raises `TransformFailed`, and `OutputUnknown` if undeclared columns are to be added.
    """
    returned: dict[str, pa.Schema] = {}
    compared = {}
    for name, sink in sinks.items():
        try:
            with transaction(connection) as cur:
                table = read_table(cur, sink)
            columns = table.columns
        except (SinkMissing, SinkHidden, SinkNoTable, SinkGuardsRows) as error:
            compared[name] = TableComparison(refused=error)
            continue
        if isinstance(transform.function, Fields):
            output = transform.function.output(input_schema, columns)
        elif transform.form is Form.FUNCTION:
            declared = declared_columns(transform) if name == ONLY else None
            if declared is None and sink.evolve is Evolve.ADD:
                raise OutputUnknown(transform=f"{transform.module}:{transform.name}", several=name != ONLY, evolve=True)
            output = _function_schema(declared, columns)
        else:
            returned = returned or _returned_schemas(transform, sinks, spark_schema, input_schema)
            output = returned[name]
        fit = partial(match, sink, output=output, aggregates=transform.form is Form.SPARK)
        refused = None
        try:
            layout: Layout | None = fit(table)
        except SinkMismatch as error:
            to_add = error.to_add if sink.evolve is Evolve.ADD else []
            layout, refused = fit(replace(table, columns=[*columns, *to_add])) if to_add else None, error
        compared[name] = TableComparison(columns, layout and replace(layout, sink=name), refused)
    return compared


def declared_columns(transform: Transform) -> dict[str, pa.DataType] | None:
    """The columns of a plain function's result type, in order, with their Arrow types. `None` if it declares no result type."""
    try:
        result = typing.get_type_hints(transform.function).get("return")
        row = next((part for part in _parts(result) if typing.is_typeddict(part)), None)
        return None if row is None else {name: _arrow_of(kind) for name, kind in typing.get_type_hints(row).items()}
    except (NameError, TypeError):  # a name imported for type checkers only
        return None


def _function_schema(declared: Mapping[str, pa.DataType] | None, columns: Sequence[Column]) -> pa.Schema:
    """The schema of the batches built from the function's rows: the columns that it may return, in the table's types."""
    import pyarrow as pa

    lineage = {name for name, _ in LINEAGE}
    own = {column.name: column for column in columns if column.name not in lineage}
    if declared is None:
        names = [column.name for column in own.values() if not column.generated and not column.has_default]
    else:
        names = list(declared)
    fields = []
    for name in names:
        kind = arrow_type(own[name].type) if name in own else None
        if declared is not None and (kind is None or not _accepts(declared[name], own[name].type)):
            kind = declared[name]
        if kind is not None:
            fields.append(pa.field(name, kind))
    lineage_fields = [pa.field("kafka_topic", pa.string()), pa.field("kafka_partition", pa.int32()), pa.field("kafka_offset", pa.int64())]
    return pa.schema(fields + lineage_fields)


def _accepts(declared: pa.DataType, postgres: str) -> bool:
    """Whether the column accepts Python values of the declared type: a ``datetime`` may have a zone or not."""
    import pyarrow as pa

    if pa.types.is_list(declared) and postgres.endswith("[]"):
        return _accepts(declared.value_type, postgres[:-2])
    if pa.types.is_timestamp(declared) and base_of(postgres).startswith("timestamp"):
        return True
    return converts(declared, postgres)


_POSTGRES_TYPES: Mapping[Any, str] = {
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
    """The Arrow type for a Python type. Types other than the simple ones become JSON text."""
    import pyarrow as pa

    for member in _members(kind):
        if isinstance(member, typing.Hashable) and member in _POSTGRES_TYPES:
            arrow = pa.decimal128(38, 18) if member is decimal.Decimal else arrow_type(_POSTGRES_TYPES[member])
            assert arrow is not None
            return arrow
        if typing.get_origin(member) is list and (inner := typing.get_args(member)) and inner[0] in _POSTGRES_TYPES:
            return pa.list_(_arrow_of(inner[0]))
    return pa.string()


def _parts(kind: Any) -> list[Any]:
    """A type, or the members of a union and of ``Iterable[...]``, ``list[...]`` and similar, without None."""
    parts = []
    for member in _members(kind):
        inner = typing.get_args(member)
        parts += [part for argument in inner for part in _parts(argument)] if inner else [member]
    return parts


def _members(kind: Any) -> list[Any]:
    """A type, or the members of a union without None; for a ``Literal`` the types of its values."""
    if typing.get_origin(kind) is typing.Literal:
        return [type(value) for value in typing.get_args(kind)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(kind) for part in _members(member)]
    return [] if kind is type(None) or kind is None else [kind]
