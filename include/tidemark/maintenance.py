"""Removes what is kept for a time only: what rewinds took out, and payloads of settled failed records. Ends attempts without a driver.

What is removed cannot be brought back, so each time is recorded in ``tidemark.maintenance`` before anything is removed: who, when, and how
old things had to be. What may be asked for says `tidemark.keep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.db import statements, transaction
from tidemark.offsets import store
from tidemark.retry.retention import empty_settled
from tidemark.rewind.retention import Removed, remove_archives

if TYPE_CHECKING:
    from tidemark.db import Connection

SQL = statements("tidemark", "maintenance.sql")


@dataclass(frozen=True, slots=True)
class Maintained:
    """What was removed, how many records were emptied, and which attempts were ended."""

    removed: Sequence[Removed]
    emptied: int
    ended: Sequence[int]


def maintain(connection: Connection, keep: timedelta, *, by: str, dag_id: str | None = None, run_id: str | None = None) -> Maintained:
    """Removes what is older than ``keep`` (of `tidemark.keep.parse_keep`) from a database. One that is killed has removed a part, and may
    be repeated."""
    with transaction(connection) as cur:
        cur.execute(SQL["begin"], {"by": by, "dag_id": dag_id, "run_id": run_id, "keep": keep})
        (maintenance_id,) = cur.fetchone() or (0,)
    removed = remove_archives(connection, keep)
    emptied = empty_settled(connection, keep)
    with transaction(connection) as cur:
        ended = store.end_abandoned(cur)
        done = {"archives": len(removed), "rows": sum(one.rows for one in removed), "payloads": emptied}
        cur.execute(SQL["end"], {**done, "maintenance_id": maintenance_id})
    return Maintained(removed, emptied, ended)
