"""Rows of an upsert sink that are written over while a rewind can still be undone: kept, so that the undo gives them back (I4).

Each partition that was rewound has a *floor*: what was made from there on goes if the rewind is undone. What lies below it stays, and must
be there then as it was. So the merge copies each such row into ``tidemark.rewound_row`` before it replaces it, in the same transaction; a
row is written over by rows from below the floor to rows from above it once at most, so that the copies are no more than the sink had rows.
A row that comes late (from a backfill, a retry) and finds a newer one in its place is copied likewise: the undo may take that one away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.records.ranges import Slice
from tidemark.sink.table import LINEAGE, Layout, listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "overwritten.sql")


def has_floor(cur: Cursor, table: str, parts: Sequence[Slice]) -> bool:
    """Must rows that are written over for these slices be kept? Then who writes rows of the same partitions waits for this transaction."""
    places = {"topic_ids": [part.topic_id for part in parts], "partitions": [part.partition.partition for part in parts]}
    cur.execute(SQL["floors"], {"sink": table, **places})
    return bool(cur.fetchall())


def keep_replaced(cur: Cursor, layout: Layout, source: str, *, any_partition: bool) -> None:
    """Copies what a merge of ``source`` is about to replace below the floor. Needs the lock of `has_floor`; does not commit."""
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


def keep_older(cur: Cursor, layout: Layout, source: str, *, any_partition: bool) -> None:
    """Copies what a merge of ``source`` has not stored because newer rows are there, below the floor. As `keep_replaced` otherwise."""
    columns = kept_columns(cur, layout.table)
    given = {column.name for column in layout.columns} | {name for name, _ in LINEAGE}
    values = array(f"{'newer' if name in given else 'present'}.{quoted(name)}::text" for name in columns)
    cur.execute(
        SQL["keep_older"].format(
            **_parts(layout, source, layout.copy_columns, columns),
            values=values,
            newer_there=newer_there("newer", any_partition=any_partition),
        )
    )


def kept_columns(cur: Cursor, table: str) -> dict[str, str]:
    """The columns of a sink that are kept, with their types: all but those that the table computes."""
    cur.execute(SQL["columns"], {"table": quoted_table(table)})
    return dict(cur.fetchall())


def replaceable(newer: str, *, any_partition: bool) -> str:
    """The condition that the row ``present`` may be replaced by the row ``newer`` of the same key: it is none that came later."""
    if any_partition:
        return f"({SQL['newer_batch'].format(newer=newer)}) IS NOT TRUE"
    return f"({same_partition(newer)}) AND {SQL['not_newer'].format(newer=newer)}"


def newer_there(newer: str, *, any_partition: bool) -> str:
    """The condition that ``newer`` is not stored because ``present`` is the later one."""
    if any_partition:
        return SQL["newer_batch"].format(newer=newer)
    return f"({same_partition(newer)}) AND NOT ({SQL['not_newer'].format(newer=newer)})"


def same_partition(newer: str) -> str:
    """The condition that ``present`` and ``newer`` come from one Kafka partition."""
    return SQL["same_partition"].format(newer=newer)


def array(elements: Iterable[str]) -> str:
    return f"ARRAY[{', '.join(elements)}]"


def literal(text: str) -> str:
    """Text as SQL takes it in a statement without parameters."""
    return "'" + text.replace("'", "''") + "'"


def _parts(layout: Layout, source: str, columns: Sequence[str], kept: Mapping[str, str]) -> dict[str, str]:
    return {
        "latest": SQL["latest"].format(key=listed(layout.key), columns=listed(columns), source=source),
        "sink": quoted_table(layout.table),
        "sink_name": literal(layout.table),
        "names": array(map(literal, kept)),
        "same_key": " AND ".join(f"present.{name} = newer.{name}" for name in map(quoted, layout.key)),
    }
