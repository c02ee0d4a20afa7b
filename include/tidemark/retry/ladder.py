"""Computes the next retry of a record that was not loaded. Pure functions."""

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

    ``budget``: maximum time from hand-off or redrive until the last retry is due. `None`: no limit.
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

    def rung(self, number: int) -> Rung | None:
        """Returns the ``number``-th retry, counted from 1. `None` beyond the end of the ladder."""
        return self.rungs[number - 1] if 1 <= number <= len(self.delays) else None

    def after(self, tries: int, age: timedelta) -> Rung | None:
        """Returns the next retry of a record after a first try and ``tries`` retries, ``age`` after its hand-off. `None`: it has failed.

        The current ladder applies even to a record that began on an older one: its next rung is number ``tries + 1``.
        """
        rung = self.rung(tries + 1)
        over_budget = rung is not None and self.budget is not None and age + rung.delay > self.budget
        return None if over_budget else rung


NO_LADDER = Ladder("")
"""No retries: records that are not loaded fail, and are not published."""
