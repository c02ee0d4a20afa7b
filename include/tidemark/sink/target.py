"""Where a slice is committed, as whom, and under which rules."""

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
    layouts: tuple[Layout, ...]
    """The tables, in the order in which their rows are loaded."""
    max_rejected: int = 1000
    """Maximum number of records of one slice that Postgres may reject before the slice is given up."""
    ladder: Ladder = NO_LADDER
    """Where records that are not loaded go."""
    breaker: Breaker | None = None
    max_held: int | None = None
    """With an order by key: maximum number of held records per partition. `None`: no order."""
    side_id: int | None = None
    """For a backfill: the side group whose positions move. Ledger, failed records and rows still belong to ``group_id``."""

    @property
    def tables(self) -> str:
        """The names of the tables, for people."""
        return ", ".join(layout.table for layout in self.layouts)

    @property
    def by_record(self) -> bool:
        """Whether each row comes from one record. See `Layout`."""
        return all(layout.by_record for layout in self.layouts)

    @property
    def application(self) -> str:
        """The session's ``application_name``. A newer attempt uses it to terminate the sessions of older ones."""
        return f"tidemark/{self.group_id}/{self.attempt_id}"

    @property
    def position_of(self) -> int:
        """The group whose positions move."""
        return self.group_id if self.side_id is None else self.side_id
