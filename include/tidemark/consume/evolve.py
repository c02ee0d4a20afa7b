"""Adds the columns that a sink with ``evolve: add`` lacks, before a run's first commit.

1. Compare the run's rows with the tables. Any difference other than missing columns refuses the run.
2. Take turns with the other members. Compare again: one of them may have added the columns.
3. Add nullable columns, replace the view of validated rows if it is the standard one, and store the columns with the attempt, in one
   transaction. It waits at most `LOCK_MS` for a lock, because other
   transactions on the table wait behind it.
4. Compare again.

A run drops no column and changes no type. `tidemark sink diff` shows types that could be widened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psycopg2
import psycopg2.errors

from tidemark.db import EVOLVE_LOCK, data_error, described_sessions, limit_lock_waits, statements, transaction
from tidemark.errors import DatabaseUnavailable, Refused, Unavailable
from tidemark.quality.view import existing_view, validated_view, validated_view_ddl
from tidemark.sink.fit import SinkMismatch, add_column
from tidemark.sink.table import Column, Layout, quoted, quoted_table, read_columns

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.consume", "evolve.sql")

LOCK_MS = 5_000


class TableInUse(Unavailable):
    """Other transactions on the table lasted too long."""

    table: str
    columns: list[str]
    held_by: str

    def __str__(self) -> str:
        return (
            f"{self.table} lacks {', '.join(self.columns)}, and other transactions on it did not end within {LOCK_MS // 1000} s. "
            f"Nothing was loaded; the next run tries again. The table is in use by {self.held_by}."
        )


class ColumnsRefused(Refused):
    """This role cannot add columns to the table. ``owner``: the table's owner, if the role lacks the owner's rights."""

    table: str
    role: str
    owner: str | None
    message: str
    ddl: str

    def __str__(self) -> str:
        text = f"The role {self.role} cannot add columns to {self.table}: {self.message} Nothing was loaded."
        if self.owner is None:
            return text
        grant = f"GRANT {quoted(self.owner)} TO {quoted(self.role)};"
        return f"{text} Let the owner run\n{self.ddl}\nor make the role a member of the owner's: {grant}"


def evolve_tables(
    connection: Connection, attempt_id: int, layouts: Callable[[Connection], tuple[Layout, ...]], tables: Sequence[str]
) -> tuple[Layout, ...]:
    """Adds the columns that sinks with ``evolve: add`` lack, and returns the result of ``layouts``. Raises its errors, `TableInUse` and
    `ColumnsRefused`. ``tables``: the tables of these sinks."""
    unchanged = set(tables)
    while True:
        try:
            return layouts(connection)
        except SinkMismatch as error:
            if error.table not in unchanged or not error.to_add:
                raise
            unchanged.remove(error.table)
            _add_columns(connection, attempt_id, error.table, error.to_add)


def require_owner(cur: Cursor, table: str, columns: Sequence[Column]) -> None:
    """Raises `ColumnsRefused` if the session's role may not add these columns to the table."""
    cur.execute(SQL["owner"], {"quoted": quoted_table(table)})
    owner, is_member = cur.fetchone() or ("", True)
    if not is_member:
        raise _refused(cur.connection, table, columns, f"its owner is {owner}.", owner)


def _add_columns(connection: Connection, attempt_id: int, table: str, columns: Sequence[Column]) -> None:
    """Adds the columns that the table still lacks."""
    key = {"class": EVOLVE_LOCK, "table": table, "quoted": quoted_table(table)}
    try:
        with transaction(connection) as cur:
            limit_lock_waits(cur, LOCK_MS)
            cur.execute(SQL["take_turns"], key)
            existing = {column.name for column in read_columns(cur, table)}
            missing = [column for column in columns if column.name not in existing]
            if not missing:
                return
            require_owner(cur, table, missing)
            view = existing_view(cur, table)
            replaceable = view is not None and view.standard and view.mine
            for column in missing:
                cur.execute(add_column(table, column))
            if view is not None and replaceable:
                cur.execute(validated_view_ddl(table, view.groups))
            cur.execute(SQL["note"], {**key, "columns": [f"{column.name} {column.type}" for column in missing], "attempt_id": attempt_id})
    except DatabaseUnavailable as error:
        if not isinstance(error.__cause__, psycopg2.errors.LockNotAvailable):
            raise
        with transaction(connection) as cur:
            cur.execute(SQL["holders"], key)
            raise TableInUse(
                table=table, columns=[column.name for column in columns], held_by=described_sessions(cur) or "unknown"
            ) from None
    except psycopg2.Error as error:  # a reserved column name, or too many columns
        raise _refused(connection, table, columns, data_error(error).message) from None
    log.info("columns added attempt=%s table=%s columns=%s", attempt_id, table, ",".join(column.name for column in missing))
    if view is not None and not replaceable:  # it has another owner or another definition
        log.warning("view %s lacks the new columns until its statement is run again: tidemark sink ddl prints it", validated_view(table))


def _refused(connection: Connection, table: str, columns: Sequence[Column], message: str, owner: str | None = None) -> ColumnsRefused:
    ddl = "\n".join(add_column(table, column) for column in columns)
    return ColumnsRefused(table=table, role=connection.info.user, owner=owner, message=message, ddl=ddl)
