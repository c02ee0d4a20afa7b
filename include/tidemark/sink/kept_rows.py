"""Keeps rows of an upsert sink that are overwritten while a rewind can still be undone, so that the undo restores them (I4).

Each rewound partition has a *floor*: an undo removes rows from offsets at or above it, and must restore rows below it. So before the merge
replaces a row below the floor, it copies the row to ``tidemark.rewound_row``, in the same transaction. A row from below the floor is
replaced by one from above it at most once, so there are never more copies than the sink had rows. A late row (from a backfill or a retry)
that loses to a newer row is copied as well, because the undo may remove the newer row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.records.ranges import Slice
from tidemark.sink.table import LINEAGE, Layout, listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "kept_rows.sql")


def has_floor(cur: Cursor, table: str, parts: Sequence[Slice]) -> bool:
    """Whether overwritten rows must be kept for these slices. If so, other writers of the same partitions wait for this transaction."""
    cur.execute(SQL["floors"], {"sink": table, **places(parts)})
    return bool(cur.fetchall())


def places(parts: Sequence[Slice]) -> dict[str, list[int]]:
    """Returns the partitions and starts of slices as parameters of statements."""
    return {
        "topic_ids": [part.topic_id for part in parts],
        "partitions": [part.partition.partition for part in parts],
        "starts": [part.start for part in parts],
    }


def keep_replaced(cur: Cursor, layout: Layout, source: str, *, any_partition: bool) -> None:
    """Copies the rows below the floor that a merge of ``source`` is about to replace. Needs the lock of `has_floor`; does not commit."""
    columns = kept_columns(cur, layout.table)
    values = array(f"present.{quoted(name)}::text" for name in columns)
    lineage = [name for name, _ in LINEAGE]
    cur.execute(
        SQL["keep_replaced"].format(
            **_parts(layout, source, [*layout.key, *lineage], columns),
            values=values,
            any_partition=str(any_partition).lower(),
            replaceable=replaceable("newer", any_partition=any_partition),
        )
    )


def keep_late(cur: Cursor, layout: Layout, source: str, *, newer: str | None = None) -> None:
    """Copies the rows of ``source`` below the floor that come too late for the sink. Otherwise like `keep_replaced`.

    ``newer``: SQL condition for the newer row that supersedes one (`newer_there`). Without it, deletions supersede all of them.
    """
    written = set(layout.sink_columns)
    columns = [name for name in kept_columns(cur, layout.table) if newer or name in written]
    values = array(f"{'newer' if name in written else 'present'}.{quoted(name)}::text" for name in columns)
    parts = _parts(layout, source, layout.sink_columns, columns)
    newer_row = f"JOIN {parts['sink']} present ON {parts['same_key']} AND ({newer})" if newer else ""
    cur.execute(SQL["keep_late"].format(**parts, values=values, newer_row=newer_row))


def kept_columns(cur: Cursor, table: str) -> dict[str, str]:
    """Reads the sink's columns to keep, with their types: all except generated ones."""
    cur.execute(SQL["columns"], {"table": quoted_table(table)})
    return dict(cur.fetchall())


def replaceable(newer: str, *, any_partition: bool) -> str:
    """Returns the SQL condition that ``newer`` may replace ``present``, a row of the same key that is not later."""
    if any_partition:
        return f"({SQL['newer_batch'].format(newer=newer)}) IS NOT TRUE"
    return f"({same_partition(newer)}) AND {SQL['not_newer'].format(newer=newer)}"


def newer_there(newer: str, *, any_partition: bool) -> str:
    """Returns the SQL condition that ``newer`` is not stored because ``present`` is later."""
    if any_partition:
        return SQL["newer_batch"].format(newer=newer)
    return f"({same_partition(newer)}) AND NOT ({SQL['not_newer'].format(newer=newer)})"


def same_partition(newer: str) -> str:
    """Returns the SQL condition that ``present`` and ``newer`` come from the same Kafka partition."""
    return SQL["same_partition"].format(newer=newer)


def same_key(key: Iterable[str]) -> str:
    """Returns the SQL condition that ``present`` and ``newer`` have the same key."""
    return " AND ".join(f"present.{name} = newer.{name}" for name in map(quoted, key))


def array(elements: Iterable[str]) -> str:
    return f"ARRAY[{', '.join(elements)}]"


def literal(text: str) -> str:
    """Quotes a text as an SQL literal, for statements without parameters."""
    return "'" + text.replace("'", "''") + "'"


def _parts(layout: Layout, source: str, columns: Sequence[str], kept_names: Iterable[str]) -> dict[str, str]:
    return {
        "latest": SQL["latest"].format(key=listed(layout.key), columns=listed(columns), source=source),
        "sink": quoted_table(layout.table),
        "sink_name": literal(layout.table),
        "of_sink": f"{literal(layout.table)} = ANY (coalesce(floor.sinks, ARRAY[floor.sink]))",
        "names": array(map(literal, kept_names)),
        "same_key": same_key(layout.key),
    }
