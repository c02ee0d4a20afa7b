"""The rows that a rewind takes out of a sink, and that an undo puts back: moved, never only deleted.

Rows are superseded by lineage, also in an upsert sink. There a row that a superseded record had written over is gone already, and comes
back only with the replay: until that has passed the rewind's old position, the sink lacks the keys whose last record was superseded. Rows
from before the rewind that the replay writes over are another matter, see `tidemark.rewind.overwritten`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from tidemark.db import is_outage, rows, statements
from tidemark.errors import Broken, Refused
from tidemark.sink.table import listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "archive.sql")

SWAP_ROWS = 100_000
"""From so many rows on a table partition is moved as it is. That locks out all readers of the sink for a moment; deleting fewer rows takes
no longer than that."""
SWAP_WAIT_MS = 2_000
"""How long a swap waits for the sink's lock, while new readers wait behind it; then the rows are moved one by one."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one Kafka partition from ``start`` on."""

    topic_id: int
    partition: int
    start: int


@dataclass(kw_only=True, eq=False)
class RowsRefused(Refused):
    """The sink does not take rows back that were taken out of it."""

    table: str
    archive: str
    message: str

    def __str__(self) -> str:
        return f"{self.table} does not take back the rows in {self.archive}: {self.message} Nothing was changed; the rows are kept."


@dataclass(kw_only=True, eq=False)
class ArchiveWrong(Broken):
    """An archive does not hold what was put into it."""

    archive: str
    stored: int
    found: int

    def __str__(self) -> str:
        return f"{self.archive} holds {self.found} rows; {self.stored} were put into it. Nothing was changed."


def take_out(cur: Cursor, rewind_id: int, group_id: int, sink: str, spans: Iterable[Span]) -> None:
    """Moves the rows of these spans into archives of the rewind, and notes how many they were; does not commit.

    Memory does not grow with the rows. A large table partition of which nothing stays is moved as it is, where that is possible.
    """
    key = {"rewind_id": rewind_id, "group_id": group_id}
    cur.execute(SQL["last_number"], key)
    number = int(_one(cur)[0]) + 1
    cur.execute(SQL["table_partitions"], {"table": quoted_table(sink), "least": SWAP_ROWS})
    leaves = {row["bound"]: row for row in rows(cur)}
    left = []
    for span in spans:
        leaf = leaves.get(f"FOR VALUES IN ({span.partition})")
        moved = 0 if leaf is None else _swap(cur, sink, leaf, f"rewound_{rewind_id}_{number}", span)
        if moved:
            _note(cur, key, sink, number, moved, table_partition=True)
            _note_rows(cur, key, span, moved)
            number += 1
        else:
            left.append(span)
    if not left:
        return
    archive, table = _relation(rewind_id, number), quoted_table(sink)
    cur.execute(SQL["make_archive"].format(archive=archive, table=table))
    take = SQL["take_out"].format(archive=archive, table=_escaped(table))
    total = 0
    for span in left:
        cur.execute(take, {"topic_id": span.topic_id, "partition": span.partition, "start": span.start})
        total += cur.rowcount
        _note_rows(cur, key, span, cur.rowcount)
    if total:
        _note(cur, key, sink, number, total, table_partition=False)
    else:
        cur.execute(SQL["drop_archive"].format(archive=archive))


def put_back(cur: Cursor, rewind_id: int, group_id: int, sink: str, give_way: Callable[[str], None]) -> None:
    """Moves the rows of a rewind's archives back into their sink, and drops the archives; does not commit.

    ``give_way`` is called with each archive before: rows of the sink that stand in the place of its rows may be moved away. Raises
    `RowsRefused`, for instance for a key that another Kafka partition has taken since, and `ArchiveWrong`.
    """
    cur.execute(SQL["kept"], {"rewind_id": rewind_id, "group_id": group_id})
    for kept in rows(cur):
        give_way(kept["relation"])
        cur.execute(SQL["columns"], {"archive": kept["relation"], "table": quoted_table(sink)})
        names = {"archive": kept["relation"], "table": quoted_table(sink), "columns": listed([name for (name,) in cur.fetchall()])}
        with refusals(sink, kept["relation"]):
            cur.execute(SQL["put_back"].format(**names))
        if cur.rowcount != kept["rows"]:
            raise ArchiveWrong(archive=kept["relation"], stored=kept["rows"], found=cur.rowcount)
        cur.execute(SQL["drop_archive"].format(**names))
        cur.execute(SQL["note_put_back"], {"rewind_id": rewind_id, "number": kept["number"]})


@contextlib.contextmanager
def refusals(sink: str, archive: str) -> Iterator[None]:
    """What Postgres says of rows that it does not take, as `RowsRefused`."""
    try:
        yield
    except psycopg2.Error as error:
        if is_outage(error) or error.pgcode is None or error.pgcode[:2] not in {"22", "23", "44"}:
            raise
        said = " ".join(text for text in (error.diag.message_primary, error.diag.message_detail) if text)
        raise RowsRefused(table=sink, archive=archive, message=said) from error


def _swap(cur: Cursor, sink: str, leaf: Mapping[str, Any], archive: str, span: Span) -> int:
    """Moves a table partition of which no row stays; returns its rows, 0 where it was not done."""
    name = f"{quoted(leaf['schema'])}.{quoted(leaf['name'])}"
    cur.execute(SQL["is_whole"].format(leaf=_escaped(name)), {"topic_id": span.topic_id, "partition": span.partition, "start": span.start})
    if not _one(cur)[0]:
        return 0
    names = {
        "table": quoted_table(sink),
        "leaf": name,
        "moved": f"tidemark.{quoted(leaf['name'])}",
        "name": archive,
        "archive": f"tidemark.{archive}",
        "owner": leaf["owner"],
        "partition": span.partition,
    }
    cur.execute("SAVEPOINT swap")
    try:
        cur.execute("SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)", (str(SWAP_WAIT_MS),))
        waits = _one(cur)[0]
        cur.execute(SQL["swap"].format(**names))
        cur.execute(SQL["grants"], {"leaf": name})
        alike = _one(cur)[0] == leaf["grants"]
        cur.execute("SELECT set_config('lock_timeout', %s, true)", (waits,))
    except psycopg2.Error as error:
        if error.pgcode is None or (is_outage(error) and error.pgcode not in {"55P03", "40P01"}):
            raise  # the session is gone, or an operator ended it
        log.info("table partition not moved, its rows are partition=%s cause=%s", name, " ".join(str(error).split()))
        alike = False
    if not alike:
        cur.execute("ROLLBACK TO SAVEPOINT swap")
        return 0
    cur.execute("RELEASE SAVEPOINT swap")
    cur.execute(SQL["count"].format(archive=names["archive"]))
    return int(_one(cur)[0])


def _note(cur: Cursor, key: Mapping[str, int], sink: str, number: int, count: int, *, table_partition: bool) -> None:
    relation = _relation(key["rewind_id"], number)
    said = {"sink": sink, "number": number, "relation": relation, "rows": count, "table_partition": table_partition}
    cur.execute(SQL["note_archive"], {**key, **said})


def _note_rows(cur: Cursor, key: Mapping[str, int], span: Span, count: int) -> None:
    cur.execute(SQL["note_rows"], {**key, "topic_id": span.topic_id, "partition": span.partition, "rows": count})


def _relation(rewind_id: int, number: int) -> str:
    return f"tidemark.rewound_{rewind_id}_{number}"


def _escaped(name: str) -> str:
    """For a statement that goes through parameter substitution."""
    return name.replace("%", "%%")


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
