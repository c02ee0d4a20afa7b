"""Reads and marks verdicts that no asset event has announced yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, session, statements, transaction
from tidemark.offsets.store import require_group
from tidemark.quality.merged_ranges import by_name, merge_ranges
from tidemark.quality.validation import counts_of, loaded_by
from tidemark.quality.verdict import Verdict
from tidemark.records.outcome import RecordCounts

if TYPE_CHECKING:
    from tidemark.db import DatabaseUrl

SQL = statements("tidemark.quality", "announcements.sql")


@dataclass(frozen=True, slots=True)
class Announcement:
    """Payload of an asset event. ``validation_ids``: the announced verdicts, oldest first. ``verdict``: the worst of them."""

    group: str
    validation_ids: Sequence[int] = ()
    verdict: Verdict = Verdict.PASSED
    ranges: Mapping[str, list[list[int]]] = field(default_factory=dict)
    counts: RecordCounts = field(default_factory=RecordCounts)

    def as_json(self) -> dict[str, Any]:
        """``validation_id`` is the newest."""
        return asdict(self) | {"validation_id": max(self.validation_ids, default=None)}


def unannounced(connection_url: DatabaseUrl, group: str, verdicts: Collection[Verdict], *, again: int | None = None) -> Announcement:
    """Combines all verdicts of these kinds on rows of the group that have not been announced. ``again``: a validation to include even if it
    was announced.

    Omits verdicts that newer ones have replaced, and rows that a rewind has taken out since.
    """
    with session(connection_url, application="tidemark publish") as connection, transaction(connection) as cursor:
        group_id = require_group(cursor, group)
        cursor.execute(SQL["unannounced"], {"group_id": group_id, "verdicts": [verdict.value for verdict in verdicts], "again": again})
        validations = rows(cursor)
        validation_ids = [int(row["validation_id"]) for row in validations]
        cursor.execute(SQL["batches"], {"validation_ids": validation_ids})
        batches = rows(cursor)
        drained = [batch["batch_id"] for batch in batches if batch["drained"]]
        slices = [batch for batch in batches if not batch["drained"]] + (loaded_by(cursor, group_id, drained) if drained else [])
        ranges = merge_ranges((part["topic"], part["partition"], part["start_offset"], part["end_offset"]) for part in slices)
    worst = max((Verdict(row["verdict"]) for row in validations), key=[*Verdict].index, default=Verdict.PASSED)
    return Announcement(group, validation_ids, worst, by_name(ranges), counts_of(batches))


def announced(connection_url: DatabaseUrl, validation_ids: Collection[int]) -> None:
    """Marks these verdicts as announced."""
    with session(connection_url, application="tidemark publish") as connection, transaction(connection) as cursor:
        cursor.execute(SQL["announced"], {"validation_ids": [*validation_ids]})
