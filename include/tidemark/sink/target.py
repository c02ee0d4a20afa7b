"""Where a slice is committed, as whom, and by which rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemark.retry.breaker import Breaker
from tidemark.retry.ladder import NO_LADDER, Ladder
from tidemark.sink.table import Layout


@dataclass(frozen=True, slots=True)
class Target:
    """Where and as whom a slice is committed."""

    database_url: str = field(repr=False)
    group_id: int
    attempt_id: int
    layout: Layout
    max_rejected: int = 1000
    """Records of one slice that Postgres may refuse before the slice is given up."""
    ladder: Ladder = NO_LADDER
    """Where records go that are not loaded."""
    breaker: Breaker | None = None
    max_held: int | None = None
    """Of a consumer that orders by key: how many records of a partition may be held. `None`: it has no order."""
    side_id: int | None = None
    """Of a backfill: the side group whose positions are moved. Ledger, failed records and rows are those of ``group_id`` all the same."""

    @property
    def application(self) -> str:
        """The session's ``application_name``; a newer attempt ends the sessions of older ones by it."""
        return f"tidemark/{self.group_id}/{self.attempt_id}"

    @property
    def position_of(self) -> int:
        """The group whose positions are moved."""
        return self.group_id if self.side_id is None else self.side_id
