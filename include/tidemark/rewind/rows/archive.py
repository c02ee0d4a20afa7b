"""Archives hold the rows that a rewind takes out of a sink until an undo puts them back. Rows are moved, never just deleted.

Rows are superseded by lineage, also in an upsert sink. There, a row that a superseded record had overwritten is already gone and comes
back only with the replay: until the replay passes the rewind's old position, the sink lacks the keys whose last record was superseded.
For rows from before the rewind that the replay overwrites, see `tidemark.rewind.rows.overwritten`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from tidemark.db import is_outage, rows, scalar, statements
from tidemark.errors import Broken, Refused
from tidemark.profiles import ARCHIVE
from tidemark.rewind import guards
from tidemark.sink.table import listed, quoted, quoted_table
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind.rows", "archive.sql")

SWAP_ROWS = 100_000
"""A table partition with at least this many rows is moved whole. That locks all readers out of the sink for a moment; deleting fewer
rows takes no longer."""
SWAP_WAIT_MS = 2_000
"""How long a swap waits for the sink's lock, while new readers queue behind it. On a timeout the rows are moved one by one."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one Kafka partition from offset ``start`` on, up to ``end`` (exclusive) if it is given."""

    topic_id: int
    partition: int
    start: int
    end: int = 2**63 - 1

    @property
    def key(self) -> dict[str, int]:
        """The span as statement parameters."""
        return {"topic_id": self.topic_id, "partition": self.partition, "start": self.start, "end": self.end}


class RowsRefused(Refused):
    """The sink rejects restored rows."""

    table: str
    archive: str
    message: str

    def __str__(self) -> str:
        return f"{self.table} rejects the rows restored from {self.archive}: {self.message} Nothing was changed; the rows are kept."


class ArchiveWrong(Broken):
    """The row count of an archive has changed."""

    archive: str
    stored: int
    found: int

    def __str__(self) -> str:
        return f"{self.archive} holds {counted(self.found, 'row')}, not the {self.stored:,} that were put into it. Nothing was changed."


class ArchiveForged(Broken):
    """A table named in ``tidemark.rewind_archive`` was not created by a rewind."""

    rewind_id: int
    number: int
    problem: str

    def __str__(self) -> str:
        return (
            f"Archive {self.number} of rewind {self.rewind_id} cannot be trusted: {self.problem}. Nothing was read or changed. "
            "Find out who changed it."
        )


def take_out(cur: Cursor, key: Mapping[str, Any], sink: str, sinks: Sequence[str], spans: Iterable[Span], *, whole: bool) -> None:
    """Moves the rows of these spans into archives of the rewind and stores their number; does not commit. ``key`` has the ids of the rewind
    and the group; ``sinks`` are the group's tables.

    Memory use does not grow with the rows. If every row of a large table partition goes, it is moved whole where possible, and if ``whole``
    allows it. Either way the rows of each span are counted before and after. Raises `RowsStay` if some stay, or if rows of other tables
    would go too.
    """
    names, cascaded = guards.hooks(cur, sink, "DELETE"), guards.cascaded(cur, sink, sinks)
    leaves = _leaves(cur, sink) if whole else {}
    _take_out(cur, key, sink, spans, names, leaves)
    guards.require_alone(sink, cascaded, guards.cascaded(cur, sink, sinks))


def _leaves(cur: Cursor, sink: str) -> dict[str, Mapping[str, Any]]:
    """Returns the table partitions that may be moved whole, by their bounds."""
    cur.execute(SQL["table_partitions"], {"table": quoted_table(sink), "least": SWAP_ROWS})
    return {row["bound"]: row for row in rows(cur)}


def _take_out(
    cur: Cursor,
    key: Mapping[str, Any],
    sink: str,
    spans: Iterable[Span],
    names: Sequence[str],
    leaves: Mapping[str, Mapping[str, Any]],
) -> None:
    rewind_id = key["rewind_id"]
    cur.execute(SQL["last_number"], key)
    number = int(scalar(cur)) + 1
    remaining = []
    for span in spans:
        before = _count_rows(cur, sink, span)
        leaf = leaves.get(f"FOR VALUES IN ({span.partition})")
        moved = 0 if leaf is None else _swap(cur, sink, leaf, _name(rewind_id, number), span)
        if moved:
            _store_archive(cur, key, sink, number, moved, table_partition=True)
            _add_rows(cur, key, span, moved)
            _require_gone(cur, sink, span, before, moved, names)
            number += 1
        else:
            remaining.append((span, before))
    if not remaining:
        return
    archive, table = relation_of(rewind_id, number), quoted_table(sink)
    try:
        cur.execute(SQL["make_archive"].format(archive=archive, table=table))
    except psycopg2.errors.DuplicateTable:
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"the table {archive} already exists") from None
    move_rows = SQL["take_out"].format(archive=archive, table=_escaped(table))
    total = 0
    for span, before in remaining:
        with guards.rows_stay(sink, names):
            cur.execute(move_rows, span.key)
        moved = cur.rowcount
        total += moved
        _add_rows(cur, key, span, moved)
        _require_gone(cur, sink, span, before, moved, names)
    if total:
        _store_archive(cur, key, sink, number, total, table_partition=False)
    else:
        cur.execute(SQL["drop_archive"].format(archive=archive))


def archives_of(cur: Cursor, rewind_id: int) -> list[dict[str, Any]]:
    """Returns the archives of a rewind that no undo has put back; ``removed``: the table is gone."""
    cur.execute(SQL["archives"], {"rewind_id": rewind_id})
    return rows(cur)


def put_back(cur: Cursor, rewind_id: int, group_id: int, sink: str, give_way: Callable[[str], None], *, shadow: bool = False) -> None:
    """Moves the rows of a rewind's archives back into their sink and drops the archives; does not commit. ``shadow``: moves the rows of its
    shadow instead (`tidemark.rewind.beside`).

    Calls ``give_way`` with each archive first, to move away sink rows with the keys of its rows. Raises `RowsRefused`, for instance for a
    key that another Kafka partition has taken since or rows that a trigger changes, and `ArchiveWrong`.
    """
    names = guards.hooks(cur, sink, "INSERT")
    cur.execute(SQL["sink_archives"], {"rewind_id": rewind_id, "group_id": group_id, "sink": sink, "shadow": shadow})
    for entry in rows(cur):
        archive = open_archive(cur, entry)
        if archive is None:
            raise ArchiveWrong(archive=entry["relation"], stored=entry["rows"], found=0)
        give_way(archive)
        cur.execute(SQL["columns"], {"archive": archive, "table": quoted_table(sink), "shadow": shadow})
        columns = [name for (name,) in cur.fetchall()]
        statement = {"archive": archive, "table": quoted_table(sink), "columns": listed(columns)}
        with rows_refused(sink, archive):
            cur.execute(SQL["put_back"].format(**statement))
        restored = cur.rowcount
        if names:
            unchanged_rows = {side: ", ".join(f"{side}.{quoted(name)}" for name in columns) for side in ("kept", "now")}
            cur.execute(SQL["count_unchanged"].format(**statement, **unchanged_rows))
            restored = int(scalar(cur))
        if restored != entry["rows"]:
            _require_whole(cur, archive, entry["rows"])
            raise rows_changed(sink, archive, entry["rows"] - restored, entry["rows"], names)
        drop_restored(cur, entry)


def copy_in(cur: Cursor, sink: str, shadow: str, spans: Iterable[Span]) -> None:
    """Copies the rows of these spans from a shadow into its sink, which has no triggers; does not commit. Raises `RowsRefused`."""
    cur.execute(SQL["columns"], {"archive": shadow, "table": quoted_table(sink), "shadow": True})
    columns = listed([name for (name,) in cur.fetchall()])
    statement = SQL["copy_in"].format(archive=_escaped(shadow), table=_escaped(quoted_table(sink)), columns=_escaped(columns))
    for span in spans:
        with rows_refused(sink, shadow):
            cur.execute(statement, span.key)


def drop_restored(cur: Cursor, archive: Mapping[str, Any]) -> None:
    """Drops an archive or a shadow whose rows are in the sink."""
    cur.execute(SQL["drop_archive"].format(archive=archive["relation"]))
    cur.execute(SQL["mark_put_back"], {"rewind_id": archive["rewind_id"], "number": archive["number"]})


def rows_refused(sink: str, archive: str) -> contextlib.AbstractContextManager[None]:
    """Raises `RowsRefused` if Postgres or the table rejects rows in the block."""
    return guards.errors_as(lambda message: RowsRefused(table=sink, archive=archive, message=message))


def rows_changed(sink: str, archive: str, count: int, total: int, names: Sequence[str]) -> RowsRefused:
    """Returns the error for rows that did not come back unchanged."""
    by = " and ".join(names) or "the table"
    return RowsRefused(
        table=sink,
        archive=archive,
        message=f"{count:,} of {counted(total, 'row was', 'rows were')} dropped or changed by {by}. Disable it meanwhile.",
    )


def _require_whole(cur: Cursor, archive: str, stored: int) -> None:
    cur.execute(SQL["count"].format(archive=archive))
    count = int(scalar(cur))
    if count != stored:
        raise ArchiveWrong(archive=archive, stored=stored, found=count)


def _swap(cur: Cursor, sink: str, leaf: Mapping[str, Any], archive: str, span: Span) -> int:
    """Moves a whole table partition, if all of its rows go; returns its number of rows, 0 if it was not moved."""
    name = f"{quoted(leaf['schema'])}.{quoted(leaf['name'])}"
    if not _is_whole(cur, name, span):
        return 0
    names = {
        "table": quoted_table(sink),
        "leaf": name,
        "schema": ARCHIVE,
        "moved": f"{ARCHIVE}.{quoted(leaf['name'])}",
        "name": archive,
        "archive": f"{ARCHIVE}.{archive}",
        "owner": leaf["owner"],
        "partition": span.partition,
    }
    cur.execute("SAVEPOINT swap")
    try:
        cur.execute("SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)", (str(SWAP_WAIT_MS),))
        lock_timeout = scalar(cur)
        cur.execute(SQL["lock_out"].format(**names))
        swapped = _is_whole(cur, name, span)  # other rows may have arrived during the wait
        if swapped:
            cur.execute(SQL["swap"].format(**names))
            cur.execute(SQL["grants"], {"leaf": name})
            swapped = scalar(cur) == leaf["grants"]
        cur.execute("SELECT set_config('lock_timeout', %s, true)", (lock_timeout,))
    except psycopg2.Error as error:
        if error.pgcode is None or (is_outage(error) and error.pgcode not in {"55P03", "40P01"}):
            raise  # the session is gone, or an operator ended it
        log.info("table partition not moved whole, moving its rows partition=%s cause=%s", name, " ".join(str(error).split()))
        swapped = False
    if not swapped:
        cur.execute("ROLLBACK TO SAVEPOINT swap")
        return 0
    cur.execute("RELEASE SAVEPOINT swap")
    cur.execute(SQL["count"].format(archive=names["archive"]))
    return int(scalar(cur))


def _is_whole(cur: Cursor, leaf: str, span: Span) -> bool:
    cur.execute(SQL["is_whole"].format(leaf=_escaped(leaf)), span.key)
    return bool(scalar(cur))


def _count_rows(cur: Cursor, sink: str, span: Span) -> int:
    cur.execute(SQL["count_span"].format(table=_escaped(quoted_table(sink))), span.key)
    return int(scalar(cur))


def _require_gone(cur: Cursor, sink: str, span: Span, before: int, moved: int, names: Sequence[str]) -> None:
    left = _count_rows(cur, sink, span) if names or before != moved else 0  # without triggers nothing adds new rows
    guards.require_gone(sink, before, moved, left, names)


def _store_archive(cur: Cursor, key: Mapping[str, int], sink: str, number: int, count: int, *, table_partition: bool) -> None:
    relation = relation_of(key["rewind_id"], number)
    entry = {"sink": sink, "number": number, "relation": relation, "rows": count, "table_partition": table_partition}
    cur.execute(SQL["add_archive"], {**key, **entry})


def _add_rows(cur: Cursor, key: Mapping[str, int], span: Span, count: int) -> None:
    cur.execute(SQL["add_rows"], {**key, "topic_id": span.topic_id, "partition": span.partition, "rows": count})


def _name(rewind_id: int, number: int) -> str:
    return f"rewound_{rewind_id}_{number}"


def relation_of(rewind_id: int, number: int) -> str:
    """Returns the relation of a rewind's archive, ready for SQL."""
    return f"{ARCHIVE}.{_name(rewind_id, number)}"


def open_archive(cur: Cursor, archive: Mapping[str, Any]) -> str | None:
    """Checks that an archive is a plain table that runs no code when it is read, locks it until the transaction ends, so that it stays one,
    and returns its name for SQL. `None` if it no longer exists.

    ``archive`` has the columns ``rewind_id``, ``number``, ``sink`` and ``relation`` of ``tidemark.rewind_archive``. A role that may rewind
    can change these, and owns the table. Raises `ArchiveForged`.
    """
    rewind_id, number, relation = int(archive["rewind_id"]), int(archive["number"]), str(archive["relation"])
    expected = relation_of(rewind_id, number)
    if relation != expected:
        problem = f"tidemark.rewind_archive names the relation {relation!r}, not {expected}"
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=problem)
    cur.execute(SQL["exists"], {"archive": relation})
    if not scalar(cur):
        return None
    try:
        cur.execute(SQL["lock_archive"].format(archive=relation))
    except (psycopg2.errors.UndefinedTable, psycopg2.errors.WrongObjectType):
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"{relation} is not a table") from None
    cur.execute(SQL["archive_problems"], {"archive": relation, "sink": quoted_table(archive["sink"]), "schema": ARCHIVE})
    if problems := [problem for (problem,) in cur.fetchall()]:
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"{relation} {problems[0]}")
    return relation


def _escaped(name: str) -> str:
    """Escapes a name for a statement with parameters."""
    return name.replace("%", "%%")
