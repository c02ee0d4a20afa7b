"""Where a record goes that was not loaded. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.spec.retry_topics import failed_topic, retry_topic

if TYPE_CHECKING:
    from tidemark.spec import ConsumerSpec


@dataclass(frozen=True, slots=True)
class Rung:
    """The ``number``-th retry of a record: after ``delay``, by way of ``topic``."""

    number: int
    delay: timedelta
    topic: str


@dataclass(frozen=True, slots=True)
class Ladder:
    """A group's delays in order; one topic for each distinct delay. Without delays a record that was not loaded has failed at once.

    ``budget``: no try is begun that would come due later than this after the record was handed off, or redriven; `None`: no limit.
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
    def topics(self) -> tuple[str, ...]:
        """The retry topics, in the order in which a record comes to them."""
        return tuple(dict.fromkeys(retry_topic(self.group, delay) for delay in self.delays))

    @property
    def failed_topic(self) -> str | None:
        """Where records go that failed for good; `None`: without a ladder they stay in their table."""
        return failed_topic(self.group) if self.delays else None

    def rung(self, number: int) -> Rung | None:
        """The ``number``-th retry, from 1; `None` beyond the end of the ladder."""
        if not 1 <= number <= len(self.delays):
            return None
        delay = self.delays[number - 1]
        return Rung(number, delay, retry_topic(self.group, delay))

    def after(self, tries: int, age: timedelta) -> Rung | None:
        """Where a record goes that has failed at its first reading and ``tries`` retries, and has been on its way for ``age``.

        The ladder is the one of now, also for a record that began on another: its next delay is the one behind as many as it has had.
        `None`: it has failed.
        """
        rung = self.rung(tries + 1)
        over = rung is not None and self.budget is not None and age + rung.delay > self.budget
        return None if over else rung


NO_LADDER = Ladder("")
"""What is not loaded has failed, and is published nowhere."""
