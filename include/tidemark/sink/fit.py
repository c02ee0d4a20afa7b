"""What a sink requires of its table: the transform's output is compared with it before a record is read, and DDL creates or fixes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tidemark.errors import BadInput, Refused
from tidemark.records.outcome import GIVEN, OPTIONAL
from tidemark.sink.table import (
    LINEAGE,
    LINEAGE_NAMES,
    MARK,
    SQL,
    Column,
    Layout,
    SinkMissing,
    first_value,
    quoted,
    quoted_table,
    read_columns,
)
from tidemark.sink.types import arrow_type, fits, postgres_type, rewrites, widened
from tidemark.spec.checks import POSTGRES_NAME_LIMIT
from tidemark.spec.model import Deletes, Sink

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor


VIEWS_FIRST = " -- first drop views of the column"
REWRITES = "; rewrites the whole table"
"""Remarks after a statement that changes a type."""


class SinkNoTable(Refused):
    """The relation is a view or similar: no constraint can ensure that a record is loaded only once."""

    table: str
    kind: str

    def __str__(self) -> str:
        return (
            f"{self.table} is a {self.kind}, which cannot have the unique index on the lineage columns. "
            "Set sink.table to a table: the one behind it, or a new one that you create with the DDL of `tidemark sink ddl NAME`."
        )


class SinkGuardsRows(Refused):
    """Row-level security applies to the role, so Postgres refuses COPY into the table."""

    table: str
    role: str

    def __str__(self) -> str:
        return (
            f"row-level security of {self.table} applies to the role {self.role}, so Postgres refuses COPY into the table. "
            f"A superuser can exempt the role: ALTER ROLE {quoted(self.role)} BYPASSRLS;"
        )


class Change(Enum):
    """How the table can be fixed."""

    ADD = "add"
    """A new nullable column. A run may do it."""
    WIDEN = "widen"
    """A wider type, without a rewrite of the table."""
    REFUSE = "refuse"
    """Anything else."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mismatch, and the DDL that fixes the table, if any. ``column``: the column for `Change.ADD` to add."""

    problem: str
    ddl: str | None = None
    change: Change = Change.REFUSE
    column: Column | None = None


class SinkMismatch(Refused):
    """The output does not fit the sink. Shows both."""

    table: str
    differences: list[Difference]
    output: list[str]
    columns: list[str]

    @property
    def problems(self) -> list[str]:
        return [each.problem for each in self.differences]

    @property
    def ddl(self) -> str:
        return "\n".join(each.ddl for each in self.differences if each.ddl)

    @property
    def to_add(self) -> list[Column]:
        """Missing columns, if there are no other differences."""
        missing = [each.column for each in self.differences if each.column is not None]
        return missing if len(missing) == len(self.differences) else []

    def __str__(self) -> str:
        lines = [f"The output does not fit {self.table}:"]
        lines += [f"  - {problem}" for problem in self.problems]
        lines += [
            f"the output has: {', '.join(self.output) or 'nothing'}",
            f"the table has:  {', '.join(self.columns) or 'nothing'}",
        ]
        if self.ddl:
            lines += ["To fix the table:", self.ddl]
        if self.to_add:
            lines.append("Or let runs add them: set `evolve: add` next to the sink's table.")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ExistingTable:
    """What a sink needs to know of its table."""

    columns: Sequence[Column]
    lineage_index: bool = True
    """Whether there is a unique index on `index_columns`."""
    key_index: bool = True
    """Whether there is a unique index on the key of an upsert sink."""
    publication: str | None = None
    """A publication that makes Postgres refuse updates and deletes in the table."""
    partitioned_by: Sequence[str] = ()
    """The columns by which the table is partitioned."""

    @property
    def index_columns(self) -> list[str]:
        """The columns of the lineage index. Postgres requires the partition key in each unique index."""
        return list(dict.fromkeys((*LINEAGE_NAMES, *self.partitioned_by)))

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


def read_table(cur: Cursor, sink: Sink) -> ExistingTable:
    """Reads what a sink needs to know of its table.

    Raises `SinkMissing`, `SinkHidden`, `SinkNoTable` for a view, a materialized view or a foreign table, and `SinkGuardsRows` if row-level
    security applies to this role and prevents COPY.
    """
    table = {"table": quoted_table(sink.table)}
    columns = read_columns(cur, sink.table)
    if (kind := first_value(cur, SQL["kind"], table)) is not None:
        raise SinkNoTable(table=sink.table, kind=kind)
    if not sink.key and first_value(cur, SQL["row_security"], table):
        raise SinkGuardsRows(table=sink.table, role=cur.connection.info.user)
    if not columns:
        raise SinkMissing(table=sink.table)
    cur.execute(SQL["partition_key"], table)
    existing = ExistingTable(columns, partitioned_by=[name for (name,) in cur.fetchall()])
    return replace(
        existing,
        lineage_index=has_unique_index(cur, sink.table, existing.index_columns),
        key_index=not sink.key or has_unique_index(cur, sink.table, sink.key),
        publication=first_value(cur, SQL["publication"], table),
    )


def has_unique_index(cur: Cursor, table: str, columns: Sequence[str]) -> bool:
    """Whether ``ON CONFLICT`` can use a unique index on exactly these columns."""
    return bool(first_value(cur, SQL["unique_index"], {"table": quoted_table(table), "columns": list(columns)}))


def create_ddl(sink: Sink, output: pa.Schema, view: str, partitions: int | None = None) -> str:
    """Returns the complete DDL of a sink for this output: schema, table, primary key, unique lineage index, view of validated rows.

    The primary key, on the key or the lineage, serves as replica identity for logical replication.

    With ``partitions``, the table is LIST-partitioned by Kafka partition, so that each writer has its own index. Raises `SinkMismatch` for
    a column whose type has no counterpart in Postgres, and `BadInput` for ``partitions`` of an upsert sink.
    """
    table, key = sink.table, sink.key
    if key and partitions:
        raise BadInput(
            what="partitions",
            found=f"{table} is an upsert sink, and its key {', '.join(key)} must be unique in the whole table",
            fix="Omit --partitions.",
        )
    data = data_fields(output)
    unknown = [
        Difference(f"column {field.name}: no Postgres type for Arrow's {field.type}; {_advice(field.type)}")
        for field in data
        if _kind(field) is None
    ]
    if unknown:
        raise SinkMismatch(table=table, differences=unknown, output=_shown(output), columns=[])
    own = [*LINEAGE, *([MARK] if sink.deletes is Deletes.SOFT else [])]
    width = max(len(quoted(name)) for name in [field.name for field in data] + [name for name, _ in own])
    lines = [f"    {quoted(field.name):<{width}} {_kind(field)}{' NOT NULL' * (field.name in key)}" for field in data]
    lines += [f"    {quoted(name):<{width}} {kind} NOT NULL{' DEFAULT false' * ((name, kind) == MARK)}" for name, kind in own]
    lines.append(f"    PRIMARY KEY ({_listed(key or LINEAGE_NAMES)})")
    lines += [f"    {_unique(LINEAGE_NAMES)}"] if key else []
    schema = table.split(".")[0]
    parts = [f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)};"] if schema != "public" else []
    parts.append(
        f"CREATE TABLE {quoted_table(table)} (\n"
        + ",\n".join(lines)
        + "\n)"
        + (" PARTITION BY LIST (kafka_partition)" if partitions else "")
        + ";"
    )
    for number in range(partitions or 0):
        name = f"{table}_p{number}"
        parts.append(f"CREATE TABLE {quoted_table(name)} PARTITION OF {quoted_table(table)} FOR VALUES IN ({number});")
    if partitions:
        parts.append(f"CREATE TABLE {quoted_table(table + '_rest')} PARTITION OF {quoted_table(table)} DEFAULT;")
    return "\n".join([*parts, view])


def add_column(table: str, column: Column) -> str:
    """Returns the DDL of a new nullable column."""
    return f"ALTER TABLE {quoted_table(table)} ADD COLUMN {quoted(column.name)} {column.type};"


def columns_of(output: pa.Schema) -> list[Column]:
    """Returns the data columns of the table that `create_ddl` creates."""
    return [Column(field.name, kind) for field in data_fields(output) if (kind := _kind(field)) is not None]


def match(sink: Sink, table: ExistingTable, output: pa.Schema, *, aggregates: bool = False) -> Layout:
    """Matches this output to the table. Raises `SinkMismatch` with every difference and the DDL that fixes the table.

    ``aggregates``: the output may lack the lineage columns, because no single record produced a row.
    """
    by_record = not aggregates or any(name in output.names for name in (*GIVEN, *OPTIONAL))
    fields = data_fields(output)
    differences = [
        *(_output_differences(output) if by_record else ()),
        *_lineage_differences(sink, table, output),
        *(each for field in fields if (each := _difference(sink.table, field, table.column(field.name))) is not None),
        *_missing_required(table.columns, output),
        *_key_differences(sink, table, output),
        *_deletes_differences(sink, table, output),
        *_publication_differences(sink, table),
    ]
    if differences:
        shown = [f"{column.name} {column.type}" for column in table.columns]
        raise SinkMismatch(table=sink.table, differences=differences, output=_shown(output), columns=shown)
    columns = tuple(column for field in fields if (column := table.column(field.name)) is not None)
    return Layout(sink.table, columns, sink.key, by_record, sink.error_detail, sink.deletes)


def offers(table: str, columns: Sequence[Column], output: pa.Schema) -> list[Difference]:
    """Returns the columns that Postgres can widen, without a rewrite, to hold every value of this output."""
    fields = {field.name: field for field in data_fields(output)}
    wider = [_widened(table, fields[column.name], column) for column in columns if column.name in fields]
    return [each for each in wider if each is not None and each.change is Change.WIDEN]


def _lineage_differences(sink: Sink, table: ExistingTable, output: pa.Schema) -> Iterator[Difference]:
    for name in dict.fromkeys(output.names):
        if output.names.count(name) > 1:
            yield Difference(f"the output has the column {name} {output.names.count(name)} times")
    for name, kind in LINEAGE:
        column = table.column(name)
        if column is None:
            yield Difference(f"the table lacks the lineage column {name}", f"{_alter(sink)} ADD COLUMN {quoted(name)} {kind} NOT NULL;")
        elif column.type != kind:
            problem = f"the table's {name} is {column.type}, but must be {kind}"
            yield Difference(problem, f"{_alter(sink)} ALTER COLUMN {quoted(name)} TYPE {kind};")
    if not table.lineage_index:
        extra = f" and {', '.join(more)}" if (more := table.index_columns[len(LINEAGE_NAMES) :]) else ""
        yield Difference(
            f"the table has no unique index on its lineage columns{extra}", f"{_alter(sink)} ADD {_unique(table.index_columns)};"
        )
    for field in output:
        if field.name in LINEAGE_NAMES and field.name not in GIVEN:
            yield Difference(f"the output has the lineage column {field.name}, which Tidemark fills in: remove it")


def _key_differences(sink: Sink, table: ExistingTable, output: pa.Schema) -> Iterator[Difference]:
    for name in sink.key:
        if name not in output.names:
            yield Difference(f"the output lacks the key column {name}")
        if (column := table.column(name)) is not None and not column.not_null:
            yield Difference(f"the key column {name} is nullable", f"{_alter(sink)} ALTER COLUMN {quoted(name)} SET NOT NULL;")
    if sink.key and (outside := [name for name in table.partitioned_by if name not in sink.key]):
        names = ", ".join(outside)
        yield Difference(f"the table is partitioned by {names}, so Postgres cannot keep a key without {names} unique: add it to sink.key")
    elif sink.key and not table.key_index:
        yield Difference(f"the table has no unique index on the key {', '.join(sink.key)}", f"{_alter(sink)} ADD {_unique(sink.key)};")


def _deletes_differences(sink: Sink, table: ExistingTable, output: pa.Schema) -> Iterator[Difference]:
    name, kind = MARK
    column = table.column(name)
    if name in output.names:
        yield Difference(f"the output has the column {name}, which Tidemark fills in: remove it")
    elif sink.deletes is Deletes.SOFT and column is None:
        add = f"{_alter(sink)} ADD COLUMN {quoted(name)} {kind} NOT NULL DEFAULT false;"
        yield Difference(f"the table lacks the column {name}, which soft deletes set", add)
    elif sink.deletes is Deletes.SOFT and column is not None and column.type != kind:
        yield Difference(f"the table's {name} is {column.type}, but must be {kind}")


def _publication_differences(sink: Sink, table: ExistingTable) -> Iterator[Difference]:
    if table.publication is not None:
        problem = (
            f"the publication {table.publication} includes the table, which has no primary key and no other replica identity, "
            "so Postgres refuses to change or delete its rows"
        )
        yield Difference(problem, f"{_alter(sink)} ADD PRIMARY KEY ({_listed(sink.key or table.index_columns)});")


def _output_differences(output: pa.Schema) -> Iterator[Difference]:
    import pyarrow as pa

    for name in GIVEN:
        if name not in output.names:
            yield Difference(f"the output lacks the lineage column {name}: return it as the transform was given it")
    for field in output:
        if field.name in OPTIONAL and not fits(field.type, "text"):
            yield Difference(f"{field.name} must be text, but is {field.type}")
        if field.name in GIVEN and not (fits(field.type, "text") if field.name == "kafka_topic" else pa.types.is_integer(field.type)):
            yield Difference(f"the lineage column {field.name} is {field.type}: return it as the transform was given it")


def _difference(table: str, field: pa.Field, column: Column | None) -> Difference | None:
    if column is None:
        kind = _kind(field)
        lacks = f"the table has no column {field.name}"
        if kind is None:
            return Difference(f"{lacks}, and Arrow's {field.type} has no Postgres type; {_advice(field.type)}")
        if len(field.name.encode()) > POSTGRES_NAME_LIMIT:
            return Difference(f"{lacks}, and its name is too long: Postgres limits names to {POSTGRES_NAME_LIMIT} bytes")
        new = Column(field.name, kind)
        return Difference(lacks, add_column(table, new), Change.ADD, new)
    if column.generated:
        return Difference(f"column {field.name} is generated by the table and cannot be written")
    target = arrow_type(column.type)
    if target is None:
        return Difference(f"column {field.name}: Tidemark cannot write {column.type}; use text, and derive the value in a generated column")
    if fits(field.type, column.type):
        return None
    problem = f"column {field.name}: the output is {field.type}, the table is {column.type}; cast it to {target}, or change the column"
    return replace(_widened(table, field, column) or Difference(""), problem=problem)


def _widened(table: str, field: pa.Field, column: Column) -> Difference | None:
    kind = _kind(field)
    wider = widened(column.type, kind) if kind is not None else None
    if wider is None:
        return None
    ddl = f"ALTER TABLE {quoted_table(table)} ALTER COLUMN {quoted(field.name)} TYPE {wider};{VIEWS_FIRST}"
    if rewrites(column.type, wider):
        return Difference("", f"{ddl}{REWRITES}")
    return Difference(f"column {field.name} could be {wider}, the table is {column.type}", ddl, Change.WIDEN)


def _missing_required(columns: Sequence[Column], output: pa.Schema) -> Iterator[Difference]:
    lineage = {name for name, _ in (*LINEAGE, MARK)}
    for column in columns:
        if column.must_be_given and column.name not in output.names and column.name not in lineage:
            yield Difference(f"column {column.name} is NOT NULL without a default, but the output lacks it")


def data_fields(output: pa.Schema) -> list[pa.Field]:
    """Returns the fields to store: all except lineage, ``disposition`` and ``error``."""
    return [field for field in output if field.name not in GIVEN and field.name not in OPTIONAL]


def _alter(sink: Sink) -> str:
    return f"ALTER TABLE {quoted_table(sink.table)}"


def _unique(columns: Sequence[str]) -> str:
    return f"UNIQUE ({_listed(columns)})"


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(quoted(name) if name not in LINEAGE_NAMES else name for name in columns)


def _kind(field: pa.Field) -> str | None:
    """Returns the column type for a field: from its metadata, otherwise from its Arrow type."""
    override = (field.metadata or {}).get(b"postgres")
    return override.decode() if override else postgres_type(field.type)


def _shown(output: pa.Schema) -> list[str]:
    return [f"{field.name} {field.type}" for field in output]


def _advice(arrow: pa.DataType) -> str:
    import pyarrow as pa

    nested = pa.types.is_struct(arrow) or pa.types.is_map(arrow) or pa.types.is_list(arrow)
    return "turn it into JSON text (to_json) for a jsonb column" if nested else "cast it to another type"
