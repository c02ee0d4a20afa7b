"""The sink: the user's own table, its requirements, and the DDL that meets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import psycopg2.errors

from tidemark.db import rows, statements
from tidemark.errors import BadInput, Refused
from tidemark.records.outcome import DELETED, GIVEN, ONLY, OPTIONAL
from tidemark.sink.types import arrow_type, fits, postgres_type, rewrites, widened
from tidemark.spec.checks import POSTGRES_NAME_LIMIT
from tidemark.spec.model import Deletes

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "table.sql")

LINEAGE = (
    ("kafka_topic_id", "smallint"),
    ("kafka_partition", "integer"),
    ("kafka_offset", "bigint"),
    ("kafka_seq", "integer"),
)
"""A row's source record, and its number among that record's rows."""
MARK = (DELETED, "boolean")
"""Whether a row is deleted: a column of sinks with soft deletes, and of rows being loaded into any sink with deletes."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    not_null: bool = False
    has_default: bool = False
    generated: bool = False

    @property
    def must_be_given(self) -> bool:
        return self.not_null and not self.has_default and not self.generated


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are written to a sink: the data columns in COPY order, then the lineage columns.

    ``key``: columns of an upsert's key; empty for append. ``by_record``: each row comes from one record. Otherwise (aggregates) it comes
    from the whole batch, and its lineage is the start of the batch's first slice. ``error_detail``: the text of a failed record may quote
    values of its rows.
    """

    table: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    by_record: bool = True
    error_detail: bool = False
    deletes: Deletes = Deletes.REFUSE
    sink: str = ONLY
    """The sink's name in the spec."""

    @property
    def copy_columns(self) -> list[tuple[str, str]]:
        """Names and types of the columns that rows have while they are loaded."""
        deleted = () if self.deletes is Deletes.REFUSE else (MARK,)
        return [(column.name, column.type) for column in self.columns] + [*LINEAGE, *deleted]

    @property
    def with_default(self) -> list[str]:
        """Data columns with a default, which applies to rows without a value."""
        return [column.name for column in self.columns if column.has_default]

    @property
    def sink_columns(self) -> list[str]:
        """Columns of the sink that Tidemark writes."""
        deleted = (MARK,) if self.deletes is Deletes.SOFT else ()
        return [column.name for column in self.columns] + [name for name, _ in (*LINEAGE, *deleted)]


@dataclass(kw_only=True, eq=False)
class SinkMissing(Refused):
    """The table does not exist."""

    table: str

    def __str__(self) -> str:
        return f"Table {self.table} does not exist. `tidemark sink ddl NAME` prints the DDL that creates it."


@dataclass(kw_only=True, eq=False)
class SinkHidden(Refused):
    """The role lacks USAGE on the table's schema."""

    table: str
    role: str

    def __str__(self) -> str:
        schema = quoted(self.table.split(".")[0])
        grant = f"GRANT USAGE ON SCHEMA {schema} TO {quoted(self.role)};"
        return f"The role {self.role} may not use the schema of {self.table}. The schema's owner must run: {grant}"


@dataclass(kw_only=True, eq=False)
class SinkNoTable(Refused):
    """The relation is a view or similar: no constraint can ensure that a record is loaded only once."""

    table: str
    kind: str

    def __str__(self) -> str:
        return (
            f"{self.table} is a {self.kind}, which cannot have the unique index on the lineage columns. "
            "Set sink.table to a table: the one behind it, or a new one that you create with the DDL of `tidemark sink ddl NAME`."
        )


@dataclass(kw_only=True, eq=False)
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


@dataclass(kw_only=True, eq=False)
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


def quoted(identifier: str) -> str:
    """Quotes an identifier for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


def quoted_table(table: str) -> str:
    return ".".join(quoted(part) for part in table.split("."))


def on_table(statement: str, table: str) -> str:
    """Fills in ``{table}``, ready for parameter substitution."""
    return statement.replace("{table}", quoted_table(table).replace("%", "%%"))


def on_tables(statement: str, tables: Sequence[str]) -> str:
    """`on_table` for several tables: ``{table}`` becomes the lineage of all their rows."""
    if len(tables) == 1:
        return on_table(statement, tables[0])
    union = " UNION ALL ".join(on_table(SQL["lineage"], table) for table in tables)
    return statement.replace("{table}", f"({union})")


def listed(identifiers: Sequence[str]) -> str:
    return ", ".join(quoted(name) for name in identifiers)


def read_columns(cur: Cursor, table: str) -> list[Column]:
    """Reads the table's columns in order. Empty if the table does not exist. Raises `SinkHidden`."""
    try:
        cur.execute(SQL["columns"], {"table": quoted_table(table)})
    except psycopg2.errors.InsufficientPrivilege:
        raise SinkHidden(table=table, role=cur.connection.info.user) from None
    return [Column(**row) for row in rows(cur)]


def require_table(cur: Cursor, table: str) -> None:
    """Raises `SinkNoTable` for a view, a materialized view or a foreign table: none can enforce a unique index on writes."""
    cur.execute(SQL["kind"], {"table": quoted_table(table)})
    row = cur.fetchone()
    if row is not None and row[0] is not None:
        raise SinkNoTable(table=table, kind=row[0])


def require_copy(cur: Cursor, table: str) -> None:
    """Raises `SinkGuardsRows` if row-level security applies to this role on the table."""
    cur.execute(SQL["row_security"], {"table": quoted_table(table)})
    if cur.fetchone():
        raise SinkGuardsRows(table=table, role=cur.connection.info.user)


def partition_key(cur: Cursor, table: str) -> list[str]:
    """Reads the columns by which the table is partitioned."""
    cur.execute(SQL["partition_key"], {"table": quoted_table(table)})
    return [name for (name,) in cur.fetchall()]


def has_unique_index(cur: Cursor, table: str, columns: Sequence[str]) -> bool:
    """Whether ``ON CONFLICT`` can use a unique index on exactly these columns."""
    cur.execute(SQL["unique_index"], {"table": quoted_table(table), "columns": list(columns)})
    row = cur.fetchone()
    return bool(row and row[0])


def blocking_publication(cur: Cursor, table: str) -> str | None:
    """Reads the name of a publication that makes Postgres refuse updates and deletes in the table."""
    cur.execute(SQL["publication"], {"table": quoted_table(table)})
    row = cur.fetchone()
    return row[0] if row else None


def create_ddl(
    table: str, output: pa.Schema, view: str, *, key: Sequence[str] = (), soft: bool = False, partitions: int | None = None
) -> str:
    """Returns the complete DDL of a sink for this output: schema, table, primary key, unique lineage index, view of validated rows.

    The primary key, on the key or the lineage, serves as replica identity for logical replication.

    ``key``: key columns of an upsert sink. ``soft``: the sink keeps deleted rows. With ``partitions``, the table is LIST-partitioned by
    Kafka partition, so that each writer has its own index. Raises `SinkMismatch` for a column whose type has no counterpart in Postgres,
    and `BadInput` if both ``key`` and ``partitions`` are given.
    """
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
    own = [*LINEAGE, *([MARK] if soft else [])]
    width = max(len(quoted(name)) for name in [field.name for field in data] + [name for name, _ in own])
    lines = [f"    {quoted(field.name):<{width}} {_kind(field)}{' NOT NULL' * (field.name in key)}" for field in data]
    lines += [f"    {quoted(name):<{width}} {kind} NOT NULL{' DEFAULT false' * ((name, kind) == MARK)}" for name, kind in own]
    lines.append(f"    PRIMARY KEY ({_listed(key or _LINEAGE_NAMES)})")
    lines += [f"    {_unique(_LINEAGE_NAMES)}"] if key else []
    schema = table.split(".")[0]
    parts = [f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)};"] if schema != "public" else []
    parts.append(f"CREATE TABLE {quoted_table(table)} (\n" + ",\n".join(lines) + "\n)" + (_PARTITIONED if partitions else "") + ";")
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


def match(
    table: str,
    columns: Sequence[Column],
    output: pa.Schema,
    *,
    lineage_index: bool,
    key: Sequence[str] = (),
    key_index: bool = True,
    publication: str | None = None,
    partitioned_by: Sequence[str] = (),
    aggregates: bool = False,
    deletes: Deletes = Deletes.REFUSE,
) -> Layout:
    """Matches this output to these columns. Raises `SinkMismatch` with every difference and the DDL that fixes the table.

    ``lineage_index`` and ``key_index``: whether the unique indexes exist. The lineage index also covers ``partitioned_by``, the table's
    `partition_key`. ``publication``: `blocking_publication`. ``aggregates``: the output may lack the lineage columns, because no single
    record produced a row.
    """
    by_name = {column.name: column for column in columns}
    by_record = not aggregates or any(name in output.names for name in (*GIVEN, *OPTIONAL))
    differences = [
        *(_output_differences(output) if by_record else ()),
        *_lineage_differences(table, by_name, output, lineage_index=lineage_index, partitioned_by=partitioned_by),
        *(each for field in data_fields(output) if (each := _difference(table, field, by_name.get(field.name))) is not None),
        *_missing_required(columns, output),
        *_key_differences(table, by_name, output, key, key_index=key_index, partitioned_by=partitioned_by),
        *_deletes_differences(table, by_name, output, deletes),
        *_publication_differences(table, key, publication, partitioned_by),
    ]
    if differences:
        raise SinkMismatch(
            table=table,
            differences=differences,
            output=_shown(output),
            columns=[f"{column.name} {column.type}" for column in columns],
        )
    return Layout(table, tuple(by_name[field.name] for field in data_fields(output)), tuple(key), by_record, deletes=deletes)


def offers(table: str, columns: Sequence[Column], output: pa.Schema) -> list[Difference]:
    """Returns the columns that Postgres can widen, without a rewrite, to hold every value of this output."""
    fields = {field.name: field for field in data_fields(output)}
    wider = [_widened(table, fields[column.name], column) for column in columns if column.name in fields]
    return [each for each in wider if each is not None and each.change is Change.WIDEN]


def lineage_index_columns(partitioned_by: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*_LINEAGE_NAMES, *partitioned_by)))


def _lineage_differences(
    table: str, by_name: Mapping[str, Column], output: pa.Schema, *, lineage_index: bool, partitioned_by: Sequence[str]
) -> Iterator[Difference]:
    alter = f"ALTER TABLE {quoted_table(table)}"
    for name in dict.fromkeys(output.names):
        if output.names.count(name) > 1:
            yield Difference(f"the output has the column {name} {output.names.count(name)} times")
    for name, kind in LINEAGE:
        if name not in by_name:
            yield Difference(f"the table lacks the lineage column {name}", f"{alter} ADD COLUMN {quoted(name)} {kind} NOT NULL;")
        elif by_name[name].type != kind:
            problem = f"the table's {name} is {by_name[name].type}, but must be {kind}"
            yield Difference(problem, f"{alter} ALTER COLUMN {quoted(name)} TYPE {kind};")
    if not lineage_index:
        extra = f" and {', '.join(more)}" if (more := lineage_index_columns(partitioned_by)[len(_LINEAGE_NAMES) :]) else ""
        unique = _unique(lineage_index_columns(partitioned_by))
        yield Difference(f"the table has no unique index on its lineage columns{extra}", f"{alter} ADD {unique};")
    for field in output:
        if field.name in _FILLED_IN:
            yield Difference(f"the output has the lineage column {field.name}, which Tidemark fills in: remove it")


def _key_differences(
    table: str, by_name: Mapping[str, Column], output: pa.Schema, key: Sequence[str], *, key_index: bool, partitioned_by: Sequence[str]
) -> Iterator[Difference]:
    alter = f"ALTER TABLE {quoted_table(table)}"
    for name in key:
        if name not in output.names:
            yield Difference(f"the output lacks the key column {name}")
        if name in by_name and not by_name[name].not_null:
            yield Difference(f"the key column {name} is nullable", f"{alter} ALTER COLUMN {quoted(name)} SET NOT NULL;")
    if key and (outside := [name for name in partitioned_by if name not in key]):
        names = ", ".join(outside)
        yield Difference(f"the table is partitioned by {names}, so Postgres cannot keep a key without {names} unique: add it to sink.key")
    elif key and not key_index:
        yield Difference(f"the table has no unique index on the key {', '.join(key)}", f"{alter} ADD {_unique(key)};")


def _deletes_differences(table: str, by_name: Mapping[str, Column], output: pa.Schema, deletes: Deletes) -> Iterator[Difference]:
    name, kind = MARK
    if name in output.names:
        yield Difference(f"the output has the column {name}, which Tidemark fills in: remove it")
    elif deletes is Deletes.SOFT and name not in by_name:
        alter = f"ALTER TABLE {quoted_table(table)} ADD COLUMN {quoted(name)} {kind} NOT NULL DEFAULT false;"
        yield Difference(f"the table lacks the column {name}, which soft deletes set", alter)
    elif deletes is Deletes.SOFT and by_name[name].type != kind:
        yield Difference(f"the table's {name} is {by_name[name].type}, but must be {kind}")


def _publication_differences(
    table: str, key: Sequence[str], publication: str | None, partitioned_by: Sequence[str]
) -> Iterator[Difference]:
    if publication is not None:
        problem = (
            f"the publication {publication} includes the table, which has no primary key and no other replica identity, "
            "so Postgres refuses to change or delete its rows"
        )
        primary = _listed(key or lineage_index_columns(partitioned_by))
        yield Difference(problem, f"ALTER TABLE {quoted_table(table)} ADD PRIMARY KEY ({primary});")


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
    ddl = f"ALTER TABLE {quoted_table(table)} ALTER COLUMN {quoted(field.name)} TYPE {wider}; -- first drop views of the column"
    if rewrites(column.type, wider):
        return Difference("", f"{ddl}; rewrites the whole table")
    return Difference(f"column {field.name} could be {wider}, the table is {column.type}", ddl, Change.WIDEN)


def _missing_required(columns: Sequence[Column], output: pa.Schema) -> Iterator[Difference]:
    lineage = {name for name, _ in (*LINEAGE, MARK)}
    for column in columns:
        if column.must_be_given and column.name not in output.names and column.name not in lineage:
            yield Difference(f"column {column.name} is NOT NULL without a default, but the output lacks it")


def data_fields(output: pa.Schema) -> list[pa.Field]:
    """Returns the fields to store: all except lineage, ``disposition`` and ``error``."""
    return [field for field in output if field.name not in GIVEN and field.name not in OPTIONAL]


_FILLED_IN = tuple(name for name, _ in LINEAGE if name not in GIVEN)
_LINEAGE_NAMES = tuple(name for name, _ in LINEAGE)
_PARTITIONED = " PARTITION BY LIST (kafka_partition)"


def _unique(columns: Sequence[str]) -> str:
    return f"UNIQUE ({_listed(columns)})"


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(quoted(name) if name not in _LINEAGE_NAMES else name for name in columns)


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
