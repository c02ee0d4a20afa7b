"""What a partition's sample says compared with earlier ones: counters, trend, rates. Pure functions.

Two earlier samples stay with each partition. Every `WINDOW`, the last sample becomes ``mid``, and the ``mid`` before it ``base``. So the
base is one to two windows old where samples are frequent, and the sample before the last where they are rare. A run that starts begins a
new window: the pause before it does not count as slow reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

WINDOW = timedelta(minutes=5)
LATEST = timedelta(days=365_000)
"""With longer times, a date could overflow."""


class Trend(StrEnum):
    """How a partition's reading compares with its lag since the base, as of the last sample that found something consumed."""

    IDLE = "IDLE"
    """Nothing waits, and nothing was produced."""
    KEEPING_UP = "KEEPING UP"
    """Nothing waits, or not more than was consumed."""
    CATCHING_UP = "CATCHING UP"
    """More waits than was consumed, and the lag shrinks."""
    FALLING_BEHIND = "FALLING BEHIND"
    """More waits than was consumed, and the lag does not shrink."""
    WAITING = "WAITING"
    """Records wait, and nothing was consumed since the last sample."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An earlier sample, as far as later ones compare themselves with it."""

    at: datetime
    lag: int | None
    next_at: datetime | None
    produced: int
    consumed: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What Postgres and Kafka say of a partition. ``at`` is the database's time when it read ``position``; Kafka was asked after that.

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
    """A row of ``lag_partition``: an observation, and what it says compared with earlier ones."""

    seen: Observation
    produced: int
    consumed: int
    base: Mark
    mid: Mark
    trend: Trend | None
    """`None`: unknown, because the lag is, now or then, or because this is the first sample in its window."""
    open_since: datetime | None = None
    """The first sample since which the last stable offset has not moved though there are records after it. `None`: there are none."""

    @property
    def mark(self) -> Mark:
        return Mark(self.seen.at, self.seen.lag, self.seen.next_at, self.produced, self.consumed)

    @property
    def losing_from(self) -> datetime | None:
        """When the first unread record has waited for as long as retention still leaves it.

        `None` if that is unknown, or if the reading moves at least as fast as retention does: then it cannot be overtaken.
        """
        seen = self.seen
        if seen.next_at is None or not seen.lag or seen.retention is None:
            return None
        if self.base.next_at is not None and seen.at > self.base.at and seen.next_at - self.base.next_at >= seen.at - self.base.at:
            return None
        return seen.next_at + seen.retention / 2


def advance(before: Sample | None, seen: Observation, moved: int = 0, *, new_window: bool = False) -> Sample:
    """The sample after ``before``. ``moved``: by how much rewinds and resets have moved the position since then; forward is positive.

    A rewind begins a new window: the lag that it made is not a trend.
    """
    if before is None:
        mark = Mark(seen.at, seen.lag, seen.next_at, 0, 0)
        return Sample(seen, 0, 0, mark, mark, _trend(mark, mark, before), _open_since(before, seen))
    last = before.seen
    produced = before.produced + max(0, seen.log_end - last.log_end)
    consumed = before.consumed
    if last.position is not None and seen.position is not None:
        consumed += max(0, seen.position - last.position - moved)
    mark = Mark(seen.at, seen.lag, seen.next_at, produced, consumed)
    base, mid = before.base, before.mid
    if new_window or seen.applied_no != last.applied_no:
        base = mid = mark
    elif seen.at - mid.at >= WINDOW:
        base, mid = mid, mark
    return Sample(seen, produced, consumed, base, mid, _trend(mark, base, before), _open_since(before, seen))


def _open_since(before: Sample | None, seen: Observation) -> datetime | None:
    if seen.high_watermark is None or seen.high_watermark <= seen.log_end:
        return None
    same = before is not None and before.seen.log_end == seen.log_end and before.open_since is not None
    return before.open_since if same and before is not None else seen.at


def _trend(now: Mark, base: Mark, before: Sample | None) -> Trend | None:
    consumed = now.consumed - base.consumed
    if now.lag == 0:
        return Trend.IDLE if now.produced == base.produced and not consumed else Trend.KEEPING_UP
    if now.lag is None or base.lag is None or before is None or now.at <= base.at:
        return None
    if now.consumed == before.consumed:  # what grows between two runs is no slow reading
        return before.trend if before.trend in (Trend.CATCHING_UP, Trend.FALLING_BEHIND) else Trend.WAITING
    if now.lag <= consumed:
        return Trend.KEEPING_UP
    return Trend.CATCHING_UP if now.lag < base.lag else Trend.FALLING_BEHIND


def rate(now: int, then: int, length: timedelta) -> float | None:
    """Offsets a second; `None` if no time has passed."""
    return (now - then) / length.total_seconds() if length > timedelta() else None


def catch_up(records: int, produced_per_s: float | None, consumed_per_s: float | None) -> timedelta | None:
    """How long until ``records`` are read. `None`: the rates are unknown, or the lag does not shrink (see `grows`)."""
    if not records:
        return timedelta()
    if produced_per_s is None or consumed_per_s is None or consumed_per_s <= produced_per_s:
        return None
    return bounded(records / (consumed_per_s - produced_per_s))


def grows(records: int, produced_per_s: float | None, consumed_per_s: float | None) -> bool:
    """Whether the lag will never be read at these rates. False also if they are unknown, or if nobody reads."""
    return bool(records and consumed_per_s and produced_per_s is not None and consumed_per_s <= produced_per_s)


def bounded(seconds: float) -> timedelta:
    """As a duration that a date can be moved by."""
    return timedelta(seconds=min(seconds, LATEST.total_seconds()))
