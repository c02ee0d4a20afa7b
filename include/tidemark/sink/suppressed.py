"""What erasures keep out of a sink, so that no replay brings an erased row back: records, and for upsert sinks keys (I3).

A commit asks after step ②. A suppressed record is skipped, whatever the transform made of it: no row, no failed record. The row of a
suppressed key is dropped like a row that came late: its record counts as loaded, and the sink keeps no row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemark.db import ERASE_LOCK, statements
from tidemark.offsets.store import locked_position
from tidemark.records.ranges import Slice
from tidemark.sink.kept_rows import literal
from tidemark.sink.table import Layout, quoted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "suppressed.sql")


def records(cur: Cursor, group_id: int, position_of: int, part: Slice) -> frozenset[int]:
    """The offsets of a slice that a commit of ``group_id`` must skip. Erasures of the group wait for this transaction.

    Raises `PositionLocked`, of the group ``position_of``, while an erasure is in progress.
    """
    key = {"class": ERASE_LOCK, "group_id": group_id, "topic_id": part.topic_id, "partition": part.partition.partition}
    with locked_position(position_of, part):
        cur.execute(SQL["records"], {**key, "start": part.start, "end": part.end})
    return frozenset(offset for (offset,) in cur.fetchall())


def without_keys(cur: Cursor, layout: Layout, parts: Sequence[Slice], source: str) -> str:
    """The relation ``source``, with rows of an upsert sink made from ``parts``, without the rows of suppressed keys."""
    places = [(part.topic_id, part.partition.partition, part.start) for part in parts]
    topic_ids, partitions, starts = map(list, zip(*places, strict=True))
    cur.execute(SQL["any_keys"], {"sink": layout.table, "topic_ids": topic_ids, "partitions": partitions, "starts": starts})
    found, salt = cur.fetchone() or (False, None)
    if not found:
        return source
    return SQL["other_keys"].format(source=source, sink=literal(layout.table), digest=digest(layout.key, "newer", bytes(salt)))


def digest(key: Sequence[str], row: str, salt: bytes) -> str:
    r"""SQL for the salted hash of a row's key. The binary form of values depends on no setting of the session."""
    columns = ", ".join(f"{row}.{quoted(name)}" for name in key)
    return rf"sha256('\x{salt.hex()}'::bytea || record_send(ROW({columns})))"
