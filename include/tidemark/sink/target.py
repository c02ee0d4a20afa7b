"""The target of a slice's commit: database, group and attempt, sinks, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidemark.retry.breaker import Breaker
from tidemark.retry.ladder import NO_LADDER, Ladder
from tidemark.sink.table import Layout

if TYPE_CHECKING:
    from tidemark.db import Cursor

MAX_REJECTED = 1000
"""Default maximum of records per slice that Postgres may reject."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a slice's commit."""

    database_url: str = field(repr=False)
    group_id: int
    attempt_id: int
    layouts: tuple[Layout, ...]
    """The tables, in load order."""
    max_rejected: int = MAX_REJECTED
    """Maximum records per slice that Postgres may reject; one more fails the slice."""
    ladder: Ladder = NO_LADDER
    """The retry topics for records that are not loaded."""
    breaker: Breaker | None = None
    max_held: int | None = None
    """With an order by key: maximum held records per partition. `None`: no order."""
    side_id: int | None = None
    """For a backfill: the side group whose positions move. Ledger, failed records and rows belong to ``group_id``."""
    before_rows: Callable[[Cursor], None] | None = None
    """For a replay beside: called in each commit before its first row, to check the tables (`tidemark.rewind.beside.open_shadows`)."""

    @property
    def tables(self) -> str:
        """Table names for display."""
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
