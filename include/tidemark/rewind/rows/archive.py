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

from tidemark.db import is_outage, rows, statements
from tidemark.errors import Broken, Refused
from tidemark.profiles import ARCHIVE
from tidemark.rewind import guards
from tidemark.rewind.guards import RowsStay
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
    """The rows of one Kafka partition from offset ``start`` on."""

    topic_id: int
    partition: int
    start: int

    @property
    def key(self) -> dict[str, int]:
        """The span as statement parameters."""
        return {"topic_id": self.topic_id, "partition": self.partition, "start": self.start}


@dataclass(kw_only=True, eq=False)
class RowsRefused(Refused):
    """The sink does not take back rows that a rewind took out of it."""

    table: str
    archive: str
    message: str

    def __str__(self) -> str:
        return f"{self.table} does not take back the rows in {self.archive}: {self.message} Nothing was changed; the rows are kept."


@dataclass(kw_only=True, eq=False)
class ArchiveWrong(Broken):
    """An archive no longer holds the rows that were put into it."""

    archive: str
    stored: int
    found: int

    def __str__(self) -> str:
        return f"{self.archive} holds {counted(self.found, 'row')}, not the {self.stored:,} that were put into it. Nothing was changed."


@dataclass(kw_only=True, eq=False)
class ArchiveForged(Broken):
    """What ``tidemark.rewind_archive`` names is not the table that a rewind made."""

    rewind_id: int
    number: int
    problem: str

    def __str__(self) -> str:
        return (
            f"Archive {self.number} of rewind {self.rewind_id} cannot be trusted: {self.problem}. Nothing was read or changed. "
            "Find out who changed it."
        )


def take_out(cur: Cursor, rewind_id: int, group_id: int, sink: str, sinks: Sequence[str], spans: Iterable[Span]) -> None:
    """Move the rows of these spans into archives of the rewind and store their number; does not commit. ``sinks``: the group's tables.

    Memory use does not grow with the rows. If every row of a large table partition goes, it is moved whole where possible. Either way the
    rows of each span are counted before and after. Raises `RowsStay` if some stay, or if rows of other tables would go too.
    """
    names, cascaded = guards.hooks(cur, sink, "DELETE"), guards.cascaded(cur, sink, sinks)
    _take_out(cur, {"rewind_id": rewind_id, "group_id": group_id}, sink, spans, names)
    guards.require_alone(sink, cascaded, guards.cascaded(cur, sink, sinks))


def _take_out(cur: Cursor, key: Mapping[str, int], sink: str, spans: Iterable[Span], names: Sequence[str]) -> None:
    rewind_id = key["rewind_id"]
    cur.execute(SQL["last_number"], key)
    number = int(_one(cur)[0]) + 1
    cur.execute(SQL["table_partitions"], {"table": quoted_table(sink), "least": SWAP_ROWS})
    leaves = {row["bound"]: row for row in rows(cur)}
    left = []
    for span in spans:
        there = _there(cur, sink, span)
        leaf = leaves.get(f"FOR VALUES IN ({span.partition})")
        moved = 0 if leaf is None else _swap(cur, sink, leaf, _name(rewind_id, number), span)
        if moved:
            _note(cur, key, sink, number, moved, table_partition=True)
            _note_rows(cur, key, span, moved)
            _require_gone(cur, sink, span, there, moved, names)
            number += 1
        else:
            left.append((span, there))
    if not left:
        return
    archive, table = _relation(rewind_id, number), quoted_table(sink)
    try:
        cur.execute(SQL["make_archive"].format(archive=archive, table=table))
    except psycopg2.errors.DuplicateTable:
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"somebody has made a table {archive}") from None
    take = SQL["take_out"].format(archive=archive, table=_escaped(table))
    total = 0
    for span, there in left:
        with guards.answers(lambda message: RowsStay(table=sink, message=message + "".join(f" It has {name}." for name in names))):
            cur.execute(take, span.key)
        moved = cur.rowcount
        total += moved
        _note_rows(cur, key, span, moved)
        _require_gone(cur, sink, span, there, moved, names)
    if total:
        _note(cur, key, sink, number, total, table_partition=False)
    else:
        cur.execute(SQL["drop_archive"].format(archive=archive))


def put_back(cur: Cursor, rewind_id: int, group_id: int, sink: str, give_way: Callable[[str], None]) -> None:
    """Move the rows of a rewind's archives back into their sink and drop the archives; does not commit.

    ``give_way`` is called with each archive first, to move away sink rows that occupy the place of its rows. Raises `RowsRefused`, for
    instance for a key that another Kafka partition has taken since or rows that a trigger changes, and `ArchiveWrong`.
    """
    names = guards.hooks(cur, sink, "INSERT")
    cur.execute(SQL["kept"], {"rewind_id": rewind_id, "group_id": group_id, "sink": sink})
    for kept in rows(cur):
        archive = opened(cur, kept)
        if archive is None:
            raise ArchiveWrong(archive=kept["relation"], stored=kept["rows"], found=0)
        give_way(archive)
        cur.execute(SQL["columns"], {"archive": archive, "table": quoted_table(sink)})
        columns = [name for (name,) in cur.fetchall()]
        statement = {"archive": archive, "table": quoted_table(sink), "columns": listed(columns)}
        with refusals(sink, archive):
            cur.execute(SQL["put_back"].format(**statement))
        back = cur.rowcount
        if names:
            as_they_were = {side: ", ".join(f"{side}.{quoted(name)}" for name in columns) for side in ("kept", "now")}
            cur.execute(SQL["as_they_were"].format(**statement, **as_they_were))
            back = int(_one(cur)[0])
        if back != kept["rows"]:
            _require_whole(cur, archive, kept["rows"])
            raise changed(sink, archive, kept["rows"] - back, kept["rows"], names)
        cur.execute(SQL["drop_archive"].format(archive=archive))
        cur.execute(SQL["note_put_back"], {"rewind_id": rewind_id, "number": kept["number"]})


def refusals(sink: str, archive: str) -> contextlib.AbstractContextManager[None]:
    """Raise `RowsRefused` if Postgres or the table rejects rows."""
    return guards.answers(lambda message: RowsRefused(table=sink, archive=archive, message=message))


def changed(sink: str, archive: str, count: int, of: int, names: Sequence[str]) -> RowsRefused:
    """The error for rows that did not come back unchanged."""
    by = " and ".join(names) or "the table"
    return RowsRefused(
        table=sink,
        archive=archive,
        message=f"{count:,} of {counted(of, 'row was', 'rows were')} dropped or changed by {by}. Disable it for the undo.",
    )


def _require_whole(cur: Cursor, archive: str, stored: int) -> None:
    cur.execute(SQL["count"].format(archive=archive))
    found = int(_one(cur)[0])
    if found != stored:
        raise ArchiveWrong(archive=archive, stored=stored, found=found)


def _swap(cur: Cursor, sink: str, leaf: Mapping[str, Any], archive: str, span: Span) -> int:
    """Move a whole table partition, if every row of it goes; return its number of rows, 0 if it was not moved."""
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
        waits = _one(cur)[0]
        cur.execute(SQL["lock_out"].format(**names))
        alike = _is_whole(cur, name, span)  # other rows may have arrived while it waited
        if alike:
            cur.execute(SQL["swap"].format(**names))
            cur.execute(SQL["grants"], {"leaf": name})
            alike = _one(cur)[0] == leaf["grants"]
        cur.execute("SELECT set_config('lock_timeout', %s, true)", (waits,))
    except psycopg2.Error as error:
        if error.pgcode is None or (is_outage(error) and error.pgcode not in {"55P03", "40P01"}):
            raise  # the session is gone, or an operator ended it
        log.info("table partition not moved whole, moving its rows partition=%s cause=%s", name, " ".join(str(error).split()))
        alike = False
    if not alike:
        cur.execute("ROLLBACK TO SAVEPOINT swap")
        return 0
    cur.execute("RELEASE SAVEPOINT swap")
    cur.execute(SQL["count"].format(archive=names["archive"]))
    return int(_one(cur)[0])


def _is_whole(cur: Cursor, leaf: str, span: Span) -> bool:
    cur.execute(SQL["is_whole"].format(leaf=_escaped(leaf)), span.key)
    return bool(_one(cur)[0])


def _there(cur: Cursor, sink: str, span: Span) -> int:
    """The number of rows that the sink has of a span."""
    cur.execute(SQL["there"].format(table=_escaped(quoted_table(sink))), span.key)
    return int(_one(cur)[0])


def _require_gone(cur: Cursor, sink: str, span: Span, there: int, moved: int, names: Sequence[str]) -> None:
    left = _there(cur, sink, span) if names or there != moved else 0  # without triggers nothing adds new rows
    guards.require_gone(sink, there, moved, left, names)


def _note(cur: Cursor, key: Mapping[str, int], sink: str, number: int, count: int, *, table_partition: bool) -> None:
    relation = _relation(key["rewind_id"], number)
    said = {"sink": sink, "number": number, "relation": relation, "rows": count, "table_partition": table_partition}
    cur.execute(SQL["note_archive"], {**key, **said})


def _note_rows(cur: Cursor, key: Mapping[str, int], span: Span, count: int) -> None:
    cur.execute(SQL["note_rows"], {**key, "topic_id": span.topic_id, "partition": span.partition, "rows": count})


def _name(rewind_id: int, number: int) -> str:
    return f"rewound_{rewind_id}_{number}"


def _relation(rewind_id: int, number: int) -> str:
    return f"{ARCHIVE}.{_name(rewind_id, number)}"


def opened(cur: Cursor, archive: Mapping[str, Any]) -> str | None:
    """The table of an archive, ready for SQL: locked until the transaction ends, so that it stays what it is, and known to be a plain
    table that runs nobody's code when it is read. None: it no longer exists.

    ``archive`` has the columns ``rewind_id``, ``number``, ``sink`` and ``relation`` of ``tidemark.rewind_archive``. A role that may rewind
    can change these, and owns the table. Raises `ArchiveForged`.
    """
    rewind_id, number, relation = int(archive["rewind_id"]), int(archive["number"]), str(archive["relation"])
    expected = _relation(rewind_id, number)
    if relation not in (expected, f"tidemark.{_name(rewind_id, number)}"):  # the second one: before 0032
        problem = f"tidemark.rewind_archive names the relation {relation!r}, not {expected}"
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=problem)
    cur.execute(SQL["exists"], {"archive": relation})
    if not _one(cur)[0]:
        return None
    try:
        cur.execute(SQL["lock_archive"].format(archive=relation))
    except (psycopg2.errors.UndefinedTable, psycopg2.errors.WrongObjectType):
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"{relation} is not a table") from None
    cur.execute(SQL["strange"], {"archive": relation, "sink": quoted_table(archive["sink"]), "schema": ARCHIVE})
    if strange := [what for (what,) in cur.fetchall()]:
        raise ArchiveForged(rewind_id=rewind_id, number=number, problem=f"{relation} {strange[0]}")
    return relation


def _escaped(name: str) -> str:
    """Escaped for a statement with parameters."""
    return name.replace("%", "%%")


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
