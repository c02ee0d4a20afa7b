"""Checks that every record is accounted for (I3): compares the ledger with the sink, the failed records and the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tidemark.db import rows, statements
from tidemark.offsets.store import require_group
from tidemark.sink.table import on_tables

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
    ViolationKind.LOADED: "records loaded: {expected} in the ledger, {found} in the sink",
    ViolationKind.SINK_ROWS: "rows written: {expected} in the ledger, {found} in the sink",
    ViolationKind.RETRIED: "records handed to retry: {expected} in the ledger, {found} stored",
    ViolationKind.FAILED: "failed records: {expected} in the ledger, {found} stored",
    ViolationKind.GAP: "the ledger does not account for these offsets",
    ViolationKind.OVERLAP: "two ledger rows, or a ledger row and a lost range, cover these offsets",
    ViolationKind.POSITION: "the ledger ends at {expected}, the position is {found}",
    ViolationKind.ORPHAN_ROWS: "rows that no ledger row accounts for: {found} in the sink",
    ViolationKind.ORPHAN_FAILED_RECORDS: "failed records that no ledger row accounts for: {found} stored",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """Offsets ``[start, end)`` of a partition on which the tables disagree."""

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
    cursor: Cursor, group: str, tables: Sequence[str], *, batch_ids: Sequence[int] | None = None, upsert: bool = False
) -> list[Violation]:
    """Returns every disagreement between the group's ledger, sink, failed records and positions.

    Checks that
    - the rows and failed records of each batch match its ledger row;
    - the ledger of a partition has no gaps (except lost ranges) and no overlaps, and ends at the position;
    - the sink has no rows of the group's topics, and ``tidemark.failed_record`` none of the group, outside the ledger.

    With ``batch_ids``, checks only these batches and the edges to their neighbours, and does not search for orphans. In an ``upsert`` sink
    a later record may replace the row of an earlier one, so fewer rows than in the ledger are not a violation. The ledger counts the rows
    of all ``tables`` together, so one upsert sink relaxes the check for all.

    Reads only; never commits. Use a REPEATABLE READ transaction if the group is running: each of the three statements is consistent, but
    they are not consistent with each other. Raises `BadInput` for an unknown group.
    """
    group_id = require_group(cursor, group)
    parameters = {"group_id": group_id, "batch_ids": list(batch_ids) if batch_ids is not None else None, "upsert": upsert}
    names = ["batch_violations", "ledger_violations"] + (["orphans"] if batch_ids is None else [])
    violations: list[Violation] = []
    for name in names:
        cursor.execute(on_tables(SQL[name], tables), parameters)
        violations += read_violations(cursor)
    return violations


def read_violations(cursor: Cursor) -> list[Violation]:
    """Reads the rows of one of the statements."""
    return [Violation(**row | {"kind": ViolationKind(row["kind"])}) for row in rows(cursor)]
