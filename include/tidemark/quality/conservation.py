"""Is every record accounted for (I3)? The ledger against the sink, the failed records and the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements
from tidemark.errors import BadInput
from tidemark.sink.table import on_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.quality", "conservation.sql")


class ViolationKind(StrEnum):
    LOADED = "loaded"
    SINK_ROWS = "sink rows"
    RETRIED = "retried"
    FAILED = "failed"
    GAP = "gap"
    OVERLAP = "overlap"
    POSITION = "position"
    ORPHAN_ROWS = "orphan rows"
    ORPHAN_FAILED_RECORDS = "orphan failed records"


_TEXTS = {
    ViolationKind.LOADED: "the ledger says {expected} records were loaded, the sink holds {found} of them",
    ViolationKind.SINK_ROWS: "the ledger says {expected} rows were written, the sink holds {found}",
    ViolationKind.RETRIED: "the ledger says {expected} records were handed to retry, {found} are stored",
    ViolationKind.FAILED: "the ledger says {expected} records failed, {found} are stored",
    ViolationKind.GAP: "the ledger does not say what became of these offsets",
    ViolationKind.OVERLAP: "two ledger rows, or a ledger row and a lost range, cover these offsets",
    ViolationKind.POSITION: "the ledger ends at {expected}, the position is {found}",
    ViolationKind.ORPHAN_ROWS: "the sink holds {found} rows that no ledger row accounts for",
    ViolationKind.ORPHAN_FAILED_RECORDS: "{found} failed records are stored that no ledger row accounts for",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """Offsets ``[start, end)`` of a partition about which the tables disagree."""

    kind: ViolationKind
    topic: str
    partition: int
    start: int
    end: int
    expected: int
    found: int

    def __str__(self) -> str:
        text = _TEXTS[self.kind].format(expected=self.expected, found=self.found)
        return f"{self.topic}/{self.partition} [{self.start}, {self.end}): {text}"


def check_conservation(
    cursor: Cursor, group: str, table: str, *, batch_ids: Sequence[int] | None = None, upsert: bool = False
) -> list[Violation]:
    """Everything about which the group's ledger, its sink, its failed records and its positions disagree; empty is good.

    Checked are the rows and failed records of each batch against its ledger row; that the ledger of a partition has neither gap nor
    overlap (lost ranges bridge it) and ends at the position; and that the sink holds no row of the group's topics, and
    ``tidemark.failed_record`` none of the group, outside the ledger. With ``batch_ids`` only these batches and their seams to their
    neighbours are looked at, and no orphans are searched. In an ``upsert`` sink a later record takes an earlier one's row away, so
    there fewer rows than the ledger says are no violation.

    Reads only; never commits. Compare in one statement or one REPEATABLE READ transaction if the group is running: each of the three
    statements is consistent in itself, two of them are not. Raises `BadInput` for a group that is not known.
    """
    group_id = group_number(cursor, group)
    parameters = {"group_id": group_id, "batch_ids": list(batch_ids) if batch_ids is not None else None, "upsert": upsert}
    names = ["batch_violations", "ledger_violations"] + (["orphans"] if batch_ids is None else [])
    found: list[Violation] = []
    for name in names:
        cursor.execute(on_table(SQL[name], table), parameters)
        found += [_violation(row) for row in rows(cursor)]
    return found


def group_number(cursor: Cursor, group: str) -> int:
    """``group_id``; raises `BadInput` for a group that no consumer has ever started."""
    cursor.execute("SELECT group_id FROM tidemark.consumer_group WHERE name = %s", (group,))
    row = cursor.fetchone()
    if row is None:
        raise BadInput(what="group", found=f"no group {group!r} has ever run here", fix="Name a group that tidemark groups lists.")
    return int(row[0])


def _violation(row: dict[str, Any]) -> Violation:
    return Violation(**(row | {"kind": ViolationKind(row["kind"])}))
