"""What is still to be announced: verdicts that no asset event has mentioned yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, session, statements, transaction
from tidemark.quality.conservation import group_number
from tidemark.quality.ranges import united
from tidemark.quality.verdict import RunCounts, Verdict

if TYPE_CHECKING:
    from tidemark.db import DatabaseUrl

SQL = statements("tidemark.quality", "announcements.sql")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The content of an asset event. ``validation_ids``: the verdicts that it announces, oldest first. ``verdict``: the worst of them."""

    group: str
    validation_ids: Sequence[int] = ()
    verdict: Verdict = Verdict.PASSED
    ranges: Mapping[str, list[list[int]]] = field(default_factory=dict)
    counts: RunCounts = field(default_factory=RunCounts)

    def as_json(self) -> dict[str, Any]:
        """``validation_id`` is the newest."""
        return asdict(self) | {"validation_id": max(self.validation_ids, default=None)}


def unannounced(connection_url: DatabaseUrl, group: str, verdicts: Collection[Verdict], *, again: int | None = None) -> Announcement:
    """All verdicts of these kinds on rows of the group that have not been announced, as one announcement. ``again``: the number of one that
    is among them in any case.

    Verdicts that newer ones have replaced, and those whose rows a rewind has taken out, are not among them.
    """
    with session(connection_url, application="tidemark publish") as connection, transaction(connection) as cursor:
        cursor.execute(
            SQL["unannounced"], {"group_id": group_number(cursor, group), "verdicts": [each.value for each in verdicts], "again": again}
        )
        found = rows(cursor)
        ids = [int(row["validation_id"]) for row in found]
        cursor.execute(SQL["counts"], {"validation_ids": ids})
        (counts,) = rows(cursor)
    worst = max((Verdict(row["verdict"]) for row in found), key=[*Verdict].index, default=Verdict.PASSED)
    return Announcement(group, ids, worst, united(row["ranges"] for row in found), RunCounts(**counts))


def announced(connection_url: DatabaseUrl, validation_ids: Collection[int]) -> None:
    """Notes that an event has announced these verdicts."""
    with session(connection_url, application="tidemark publish") as connection, transaction(connection) as cursor:
        cursor.execute(SQL["announced"], {"validation_ids": [*validation_ids]})
