"""Compares a partition's sample with earlier ones: counters, trend, rates. Pure functions.

Two earlier samples are kept for each partition. Every `WINDOW`, the last sample becomes ``mid``, and the ``mid`` before it ``base``. So the
base is one to two windows old if samples are frequent, and the sample before the last if they are rare. The start of a run begins a new
window: the pause before it does not count as slow reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

WINDOW = timedelta(minutes=5)
LATEST = timedelta(days=365_000)
"""Longer durations could overflow a date."""


class Trend(StrEnum):
    """Compares a partition's reading with its lag since the base, as of the last sample with newly consumed records."""

    IDLE = "IDLE"
    """No lag, no new records."""
    KEEPING_UP = "KEEPING UP"
    """No lag, or at most as much as was consumed."""
    CATCHING_UP = "CATCHING UP"
    """The lag exceeds what was consumed, and shrinks."""
    FALLING_BEHIND = "FALLING BEHIND"
    """The lag exceeds what was consumed, and does not shrink."""
    WAITING = "WAITING"
    """Lag, and nothing consumed since the last sample."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The values of an earlier sample that later ones are compared with."""

    at: datetime
    lag: int | None
    next_at: datetime | None
    produced: int
    consumed: int


@dataclass(frozen=True, slots=True)
class Observation:
    """A partition's state in Postgres and Kafka. ``at`` is the database's time when ``position`` was read; Kafka was read after that.

    ``log_end`` is the last stable offset. ``next_at``: timestamp of the first record at or after the position; `None`: none or unknown.
    ``retention`` is `None` if records are kept permanently, or if it is unknown.
    """

    at: datetime
    position: int | None
    log_start: int
    log_end: int
    high_watermark: int | None = None
    truncated: bool = False
    next_at: datetime | None = None
    retention: timedelta | None = None
    committed_at: datetime | None = None
    applied_no: int = 0
    replay_until: int | None = None

    @property
    def lag(self) -> int | None:
        """Records to read, counted from the log start if the position is before it. `None`: unknown."""
        if self.position is None or self.truncated or self.position > self.log_end:
            return None
        return self.log_end - max(self.position, self.log_start)


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of ``lag_partition``: an observation, compared with earlier ones."""

    observation: Observation
    produced: int
    consumed: int
    base: Mark
    mid: Mark
    trend: Trend | None
    """`None`: unknown, because the lag is or was unknown, or because this is the first sample in its window."""
    open_since: datetime | None = None
    """Time of the first sample since which the last stable offset has not moved, despite records after it. `None`: no such records."""

    @property
    def mark(self) -> Mark:
        return Mark(self.observation.at, self.observation.lag, self.observation.next_at, self.produced, self.consumed)

    @property
    def losing_from(self) -> datetime | None:
        """When half of the retention of the first unread record has passed.

        `None` if that is unknown, or if reading is at least as fast as retention, which then cannot overtake it.
        """
        now, base = self.observation, self.base
        if now.next_at is None or not now.lag or now.retention is None:
            return None
        if base.next_at is not None and now.at > base.at and now.next_at - base.next_at >= now.at - base.at:
            return None
        return now.next_at + now.retention / 2


def advance(before: Sample | None, observation: Observation, moved: int = 0, *, new_window: bool = False) -> Sample:
    """Returns the sample after ``before``. ``moved``: how far rewinds and resets have moved the position since; forward is positive.

    A rewind begins a new window: the lag that it causes is not a trend.
    """
    if before is None:
        mark = Mark(observation.at, observation.lag, observation.next_at, 0, 0)
        return Sample(observation, 0, 0, mark, mark, _trend(mark, mark, before), _open_since(before, observation))
    last = before.observation
    produced = before.produced + max(0, observation.log_end - last.log_end)
    consumed = before.consumed
    if last.position is not None and observation.position is not None:
        consumed += max(0, observation.position - last.position - moved)
    mark = Mark(observation.at, observation.lag, observation.next_at, produced, consumed)
    base, mid = before.base, before.mid
    if new_window or observation.applied_no != last.applied_no:
        base = mid = mark
    elif observation.at - mid.at >= WINDOW:
        base, mid = mid, mark
    return Sample(observation, produced, consumed, base, mid, _trend(mark, base, before), _open_since(before, observation))


def _open_since(before: Sample | None, observation: Observation) -> datetime | None:
    if observation.high_watermark is None or observation.high_watermark <= observation.log_end:
        return None
    same = before is not None and before.observation.log_end == observation.log_end and before.open_since is not None
    return before.open_since if same and before is not None else observation.at


def _trend(now: Mark, base: Mark, before: Sample | None) -> Trend | None:
    consumed = now.consumed - base.consumed
    if now.lag == 0:
        return Trend.IDLE if now.produced == base.produced and not consumed else Trend.KEEPING_UP
    if now.lag is None or base.lag is None or before is None or now.at <= base.at:
        return None
    if now.consumed == before.consumed:  # lag that grows between two runs is not slow reading
        return before.trend if before.trend in (Trend.CATCHING_UP, Trend.FALLING_BEHIND) else Trend.WAITING
    if now.lag <= consumed:
        return Trend.KEEPING_UP
    return Trend.CATCHING_UP if now.lag < base.lag else Trend.FALLING_BEHIND


def catch_up(records: int, produced_per_s: float | None, consumed_per_s: float | None) -> timedelta | None:
    """Returns the time to read ``records``. `None`: the rates are unknown, or the lag does not shrink (see `grows`)."""
    if not records:
        return timedelta()
    if produced_per_s is None or consumed_per_s is None or consumed_per_s <= produced_per_s:
        return None
    return bounded(records / (consumed_per_s - produced_per_s))


def grows(records: int, produced_per_s: float | None, consumed_per_s: float | None) -> bool:
    """Whether the lag never ends at these rates. False if they are unknown, or if nothing is consumed."""
    return bool(records and consumed_per_s and produced_per_s is not None and consumed_per_s <= produced_per_s)


def bounded(seconds: float) -> timedelta:
    """Returns a duration that can be added to a date."""
    return timedelta(seconds=min(seconds, LATEST.total_seconds()))
