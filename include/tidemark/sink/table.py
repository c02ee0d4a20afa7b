"""The sink's table: its columns, how rows are written to it, and its names in SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg2.errors

from tidemark.db import rows, statements
from tidemark.errors import Refused
from tidemark.records.outcome import DELETED, ONLY
from tidemark.spec.model import Deletes

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "table.sql")

LINEAGE = (
    ("kafka_topic_id", "smallint"),
    ("kafka_partition", "integer"),
    ("kafka_offset", "bigint"),
    ("kafka_seq", "integer"),
)
"""A row's source record, and its number among that record's rows."""
LINEAGE_NAMES = tuple(name for name, _ in LINEAGE)
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
    shadow_of: str | None = None
    """For a shadow of a replay beside: the sink's table."""

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


class SinkMissing(Refused):
    """The table does not exist."""

    table: str

    def __str__(self) -> str:
        return f"Table {self.table} does not exist. `tidemark sink ddl NAME` prints the DDL that creates it."


class SinkHidden(Refused):
    """The role lacks USAGE on the table's schema."""

    table: str
    role: str

    def __str__(self) -> str:
        schema = quoted(self.table.split(".")[0])
        grant = f"GRANT USAGE ON SCHEMA {schema} TO {quoted(self.role)};"
        return f"The role {self.role} may not use the schema of {self.table}. The schema's owner must run: {grant}"


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


def first_value(cur: Cursor, statement: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """Returns the first column of a statement's first row, or `None` without a row."""
    cur.execute(statement, parameters)
    row = cur.fetchone()
    return None if row is None else row[0]
