"""Deletes in an upsert sink: a record deletes the row of its key, and no older record that comes late brings the row back (I1, I4).

Each deletion is stored in ``tidemark.deletion`` with the lineage of its record. The result is the same as if all records had come in order:
a row is deleted if a deletion of its key follows it in its partition. With ``sink.deletes: hard`` the row moves to the first deletion after
it, in the same transaction; so a rewind that takes the deletion back can put the row back (`tidemark.rewind.rows.deletions`). With
``soft`` the row stays in the sink and is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.errors import Refused
from tidemark.records.outcome import DELETED
from tidemark.records.ranges import Slice
from tidemark.sink import kept_rows
from tidemark.sink.kept_rows import array, kept_columns, literal
from tidemark.sink.table import Layout, listed, quoted, quoted_table
from tidemark.spec.model import Deletes
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "deletes.sql")

IN_FORCE = "coalesce(present.parked_by, 0) = 0"
"""No rewind has parked the deletion. Not ``IS NULL``: without statistics of the table, Postgres would prefer a partial index with that
condition, and search all deletions of a partition for each row."""


@dataclass(kw_only=True, eq=False)
class RowsKept(Refused):
    """The sink did not let rows go that records delete."""

    table: str
    found: int
    gone: int

    def __str__(self) -> str:
        return (
            f"{self.table} kept {self.found - self.gone:,} of {counted(self.found, 'row')} that records delete: a trigger, a rule or row "
            "security prevents deletes. Remove it for Tidemark's role, or set sink.deletes to soft. Nothing of this slice was stored."
        )


def slice_columns(layout: Layout) -> str:
    """The SELECT list that gives a temporary table the columns of rows on their way to the sink."""
    names = [name for name, _ in layout.copy_columns]
    if layout.deletes is Deletes.HARD:  # the sink does not have the mark
        return f"{listed(names[:-1])}, NULL::boolean AS {DELETED}"
    return listed(names)


def asked(cur: Cursor, layout: Layout, parts: Sequence[Slice], source: str) -> bool:
    """Whether a merge of ``source``, made from ``parts``, has to do with deletions: it deletes rows, or may come after later deletions."""
    if layout.deletes is Deletes.REFUSE:
        return False
    places = [(part.topic_id, part.partition.partition, part.start) for part in parts]
    topic_ids, partitions, starts = map(list, zip(*places, strict=True))
    given = {"sink": layout.table, "topic_ids": topic_ids, "partitions": partitions, "starts": starts}
    cur.execute(SQL["asks"].replace("{source}", source.replace("%", "%%")), given)
    row = cur.fetchone()
    assert row is not None
    return any(row)


def deletes(source: str) -> str:
    """The relation of the rows in ``source`` that delete."""
    return SQL["deletes"].format(source=source)


def carry_out(cur: Cursor, layout: Layout, source: str, *, floor: bool) -> str:
    """Deletes what the rows in ``source`` delete; does not commit. Returns the relation of the rows that are then to be merged.

    ``floor``: rows below the floor must be kept (`tidemark.sink.kept_rows`). Raises `RowsKept`.
    """
    hard = layout.deletes is Deletes.HARD
    fill = _parts(cur, layout, source)
    cur.execute(SQL["enter"].format(**fill))
    if not hard:
        cur.execute(SQL["mark"].format(**fill))
        return SQL["marked"].format(**fill)
    if floor:
        kept_rows.keep_replaced(cur, layout, deletes(source), any_partition=False)
        kept_rows.keep_late(cur, layout, SQL["dying"].format(**fill))
    cur.execute(SQL["delete"].format(**fill))
    found, gone = cur.fetchone() or (0, 0)
    if found != gone:
        raise RowsKept(table=layout.table, found=found, gone=gone)
    given = {column.name for column in layout.columns}
    names = [name for name in kept_columns(cur, layout.table) if name in given or name.startswith("kafka_")]
    cur.execute(SQL["keep_dying"].format(**fill | {"keep": keep(names)}))
    return SQL["alive"].format(**fill)


def first_after(sink: str, key: Iterable[str] = (), *, digest: str | None = None, in_force: str = IN_FORCE) -> str:
    """SQL for the id of the first deletion after the row ``newer`` of a sink; null if there is none. ``key``: its key's values, as SQL;
    ``digest``: their hash, if it is known."""
    return SQL["first_after"].format(
        sink_name=literal(sink), digest=digest or hashed(key), in_force=in_force, same_partition=f"({kept_rows.same_partition('newer')})"
    )


def hashed(key: Iterable[str]) -> str:
    """SQL for the hash of a key with these values. The binary form of values depends on no setting of the session."""
    return f"sha256(record_send(ROW({', '.join(key)})))"


def keep(names: Sequence[str]) -> str:
    """SQL that keeps rows ``dying``, with these columns, with the first deletion after each."""
    return SQL["keep"].format(names=array(map(literal, names)), values=array(f"newer.{quoted(name)}::text" for name in names))


def _parts(cur: Cursor, layout: Layout, source: str) -> dict[str, str]:
    key = listed(layout.key)
    values = [f"newer.{quoted(name)}" for name in layout.key]
    return {
        "sink": quoted_table(layout.table),
        "sink_name": literal(layout.table),
        "source": source,
        "key": key,
        "columns": listed([name for name in layout.sink_columns if name != DELETED]),
        "digest": hashed(values),
        "key_values": f"jsonb_object({array(map(literal, layout.key))}, {array(f'{value}::text' for value in values)})",
        "same_key": " AND ".join(f"present.{name} = newer.{name}" for name in map(quoted, layout.key)),
        "replaceable": f"({kept_rows.replaceable('newer', any_partition=False)})",
        "first_after": first_after(layout.table, values),
        "doomed": SQL["doomed"].format(key=key, source=source),
        "keep": keep(list(kept_columns(cur, layout.table))),
    }
