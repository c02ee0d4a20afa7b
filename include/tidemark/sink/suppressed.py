"""Suppression of erased records, and for upsert sinks of erased keys, so that no replay restores an erased row (I3).

A commit checks after step ②. A suppressed record is skipped, whatever the transform returned: no row, no failed record. The row of a
suppressed key is dropped like a late row: its record counts as loaded, but leaves no row in the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemark.db import ERASE_LOCK, statements
from tidemark.offsets.store import locked_position
from tidemark.records.ranges import Slice
from tidemark.sink.kept_rows import literal, places
from tidemark.sink.table import Layout, quoted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "suppressed.sql")


def records(cur: Cursor, group_id: int, position_of: int, part: Slice) -> frozenset[int]:
    """Reads the offsets of a slice that a commit of ``group_id`` must skip. Erasures of the group wait for this transaction.

    Raises `PositionLocked` for the group ``position_of`` while an erasure is in progress.
    """
    key = {"class": ERASE_LOCK, "group_id": group_id, "topic_id": part.topic_id, "partition": part.partition.partition}
    with locked_position(position_of, part):
        cur.execute(SQL["records"], {**key, "start": part.start, "end": part.end})
    return frozenset(offset for (offset,) in cur.fetchall())


def without_keys(cur: Cursor, layout: Layout, parts: Sequence[Slice], source: str) -> str:
    """Returns ``source``, a relation with an upsert sink's rows from ``parts``, without the rows of suppressed keys."""
    sink = layout.shadow_of or layout.table
    cur.execute(SQL["any_keys"], {"sink": sink, **places(parts)})
    any_suppressed, salt = cur.fetchone() or (False, None)
    if not any_suppressed:
        return source
    return SQL["other_keys"].format(source=source, sink=literal(sink), digest=digest(layout.key, "newer", bytes(salt)))


def digest(key: Sequence[str], row: str, salt: bytes) -> str:
    r"""Returns SQL for the salted hash of a row's key. The binary form of values does not depend on session settings."""
    columns = ", ".join(f"{row}.{quoted(name)}" for name in key)
    return rf"sha256('\x{salt.hex()}'::bytea || record_send(ROW({columns})))"
