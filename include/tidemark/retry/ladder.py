"""The retries of records that were not loaded: their delays and topics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.spec.retry_topics import failed_topic, retry_topic

if TYPE_CHECKING:
    from tidemark.spec import ConsumerSpec


@dataclass(frozen=True, slots=True)
class Rung:
    """The ``number``-th retry of a record: after ``delay``, through ``topic``."""

    number: int
    delay: timedelta
    topic: str


@dataclass(frozen=True, slots=True)
class Ladder:
    """A group's delays in order, with one topic per distinct delay. Without delays, records that are not loaded fail at once.

    The current ladder applies even to a record that began on an older one: its next retry is the one after those that it has had.
    ``budget``: maximum time from hand-off or redrive until the last retry is due, at least the first delay. `None`: no limit.
    """

    group: str
    delays: tuple[timedelta, ...] = ()
    budget: timedelta | None = None

    @classmethod
    def of(cls, spec: ConsumerSpec) -> Ladder:
        return cls(spec.group, spec.retry.delays, spec.retry.budget)

    def __bool__(self) -> bool:
        return bool(self.delays)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return tuple(Rung(number, delay, retry_topic(self.group, delay)) for number, delay in enumerate(self.delays, 1))

    @property
    def topics(self) -> tuple[str, ...]:
        """The retry topics, in the order of a record's retries."""
        return tuple(dict.fromkeys(rung.topic for rung in self.rungs))

    @property
    def failed_topic(self) -> str | None:
        """The topic for permanently failed records. `None` without a ladder: they stay in the table."""
        return failed_topic(self.group) if self.delays else None

    @property
    def first(self) -> Rung | None:
        """A record's first retry. `None` without a ladder."""
        return next(iter(self.rungs), None)


NO_LADDER = Ladder("")
"""No retries: records that are not loaded fail, and are not published."""
