"""Deletes in an upsert sink: a record deletes the row of its key, and late older records do not bring the row back (I1, I4).

Each deletion is stored in ``tidemark.deletion`` with its record's lineage. The result is the same as if all records had arrived in order:
a row is deleted if a deletion of its key follows it in its partition. With ``sink.deletes: hard`` the row moves to the first deletion after
it, in the same transaction, so that a rewind that reverts the deletion can restore the row (`tidemark.rewind.rows.deletions`). With
``soft`` the row stays in the sink and is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tidemark.db import single_row, statements
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
"""No rewind has parked the deletion. Not ``IS NULL``: without table statistics, Postgres would prefer a partial index with that condition,
and scan all deletions of a partition for each row."""


class RowsKept(Refused):
    """The sink did not delete all rows that records delete."""

    table: str
    to_delete: int
    deleted: int

    def __str__(self) -> str:
        return (
            f"{self.table} kept {self.to_delete - self.deleted:,} of {counted(self.to_delete, 'row')} that records delete: a trigger, "
            "a rule or row security prevents deletes. Remove it for Tidemark's role, or set sink.deletes to soft. Nothing of this slice "
            "was stored."
        )


def slice_columns(layout: Layout) -> str:
    """Returns the SELECT list that gives a temporary table `Layout.copy_columns`."""
    names = [name for name, _ in layout.copy_columns]
    if layout.deletes is Deletes.HARD:  # the sink does not have the mark
        return f"{listed(names[:-1])}, NULL::boolean AS {DELETED}"
    return listed(names)


def has_deletions(cur: Cursor, layout: Layout, parts: Sequence[Slice], source: str) -> bool:
    """Whether a merge of ``source``, with rows from ``parts``, involves deletions: it deletes rows, or later deletions may exist."""
    if layout.deletes is Deletes.REFUSE:
        return False
    cur.execute(SQL["any_deletions"].replace("{source}", source.replace("%", "%%")), {"sink": layout.table, **kept_rows.places(parts)})
    return any(single_row(cur))


def deletes(source: str) -> str:
    """Returns the relation of the deleting rows in ``source``."""
    return SQL["deletes"].format(source=source)


def apply(cur: Cursor, layout: Layout, source: str, *, floor: bool) -> str:
    """Applies the deletes in ``source``; does not commit. Returns the relation of the rows that remain to be merged.

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
    to_delete, deleted = cur.fetchone() or (0, 0)
    if to_delete != deleted:
        raise RowsKept(table=layout.table, to_delete=to_delete, deleted=deleted)
    data_columns = {column.name for column in layout.columns}
    names = [name for name in kept_columns(cur, layout.table) if name in data_columns or name.startswith("kafka_")]
    cur.execute(SQL["keep_dying"].format(**fill | {"keep": keep(names)}))
    return SQL["alive"].format(**fill)


def first_after(sink: str, key: Iterable[str] = (), *, digest: str | None = None, in_force: str = IN_FORCE) -> str:
    """Returns SQL for the id of the first deletion after the row ``newer``, or null. ``key``: SQL of the key's values; ``digest``: SQL of
    their hash, if available."""
    return SQL["first_after"].format(
        sink_name=literal(sink), digest=digest or hashed(key), in_force=in_force, same_partition=f"({kept_rows.same_partition('newer')})"
    )


def hashed(key: Iterable[str]) -> str:
    """Returns SQL for the hash of a key. The binary form of values does not depend on session settings."""
    return f"sha256(record_send(ROW({', '.join(key)})))"


def keep(names: Sequence[str]) -> str:
    """Returns SQL that stores these columns of the rows ``dying`` with the first deletion after each row."""
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
        "same_key": kept_rows.same_key(layout.key),
        "replaceable": f"({kept_rows.replaceable('newer', any_partition=False)})",
        "first_after": first_after(layout.table, values),
        "last_deletion": SQL["last_deletion"].format(key=key, source=source),
        "keep": keep(list(kept_columns(cur, layout.table))),
    }
