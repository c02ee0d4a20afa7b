"""Judges which objectives are missed, and which changes are not yet reported. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tidemark.spec import Objectives
from tidemark.text.duration import format_duration
from tidemark.text.moment import iso
from tidemark.text.wording import about, counted

NONE = timedelta()


class Objective(StrEnum):
    LAG = "lag"
    FAILED = "failed"
    FRESHNESS = "freshness"


class Status(StrEnum):
    MET = "met"
    MISSED = "missed"
    UNCERTAIN = "uncertain"
    """Met or missed; the next sample may decide. The reported state stays."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """An objective's status. ``text`` describes the miss; empty unless missed."""

    state: Status
    text: str = ""


@dataclass(frozen=True, slots=True)
class PartitionSample:
    """A partition's sample at the database's time ``at``. See ``tidemark.lag_partition``.

    ``position`` is `None` if the partition was never claimed, ``lag`` if it is unknown, ``next_at`` if no record waits or if the timestamp
    of the first one is unknown. ``open_since``: since when an open transaction hides the records after ``end``.
    """

    at: datetime
    position: int | None
    end: int
    lag: int | None
    next_at: datetime | None
    open_since: datetime | None = None

    def nothing_waited(self, position: int) -> bool:
        """Whether all records that existed then lie before ``position``."""
        return self.lag == 0 or position >= self.end


@dataclass(frozen=True, slots=True)
class CountedPartition:
    """A partition that counts: not paused, and not being replayed after a rewind. ``sample`` is `None` if it was never sampled."""

    position: int
    committed_at: datetime
    sample: PartitionSample | None


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """A consumer's state at the database's time ``now``. ``failed``: its records in the state FAILED."""

    now: datetime
    parts: tuple[CountedPartition, ...]
    failed: int


@dataclass(frozen=True, slots=True)
class Age:
    """Bounds of the age of a partition's first uncommitted record. ``at_most`` is `None` if unknown.

    ``unseen_since``: the time of the newest information. `None` if the age is known, or uncertain only because the position has moved
    since.
    """

    at_least: timedelta
    at_most: timedelta | None
    unseen_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class ObjectiveChanges:
    """Unreported changes of a consumer's objectives. ``missed`` has the texts."""

    missed: Mapping[Objective, str]
    recovered: tuple[Objective, ...]

    def __bool__(self) -> bool:
        return bool(self.missed or self.recovered)


def unreported(verdicts: Mapping[Objective, Assessment], reported: Collection[Objective]) -> ObjectiveChanges:
    """Returns the changes since the last report. An objective that was removed from the consumer's file has recovered."""
    missed = {name: verdict.text for name, verdict in verdicts.items() if verdict.state is Status.MISSED and name not in reported}
    recovered = [name for name in reported if name not in verdicts or verdicts[name].state is Status.MET]
    return ObjectiveChanges(missed, tuple(sorted(recovered)))


def judge(slo: Objectives, facts: ObjectiveFacts) -> dict[Objective, Assessment]:
    """Returns a verdict for each objective of the consumer."""
    verdicts = {}
    if slo.lag is not None:
        verdicts[Objective.LAG] = _lag(slo.lag, facts)
    if slo.failed is not None:
        missed = facts.failed > slo.failed
        text = f"{counted(facts.failed, 'failed record')}, objective {slo.failed:,}"
        verdicts[Objective.FAILED] = Assessment(Status.MISSED, text) if missed else Assessment(Status.MET)
    if slo.freshness is not None:
        oldest = max((facts.now - current_at(part) for part in facts.parts), default=NONE)
        text = f"freshness is {about(oldest.total_seconds())}, objective {format_duration(slo.freshness)}"
        verdicts[Objective.FRESHNESS] = Assessment(Status.MISSED, text) if oldest > slo.freshness else Assessment(Status.MET)
    return verdicts


def _lag(limit: timedelta, facts: ObjectiveFacts) -> Assessment:
    ages = [age(part, facts.now) for part in facts.parts]
    objective = f"objective {format_duration(limit)}"
    at_least = max((bounds.at_least for bounds in ages), default=NONE)
    if at_least > limit:
        return Assessment(Status.MISSED, f"lag is {about(at_least.total_seconds())}, {objective}")
    unseen = [bounds.unseen_since for bounds in ages if bounds.unseen_since is not None and facts.now - bounds.unseen_since > limit]
    if unseen:
        return Assessment(Status.MISSED, f"lag is unknown since {iso(min(unseen).replace(microsecond=0))}, {objective}")
    return Assessment(Status.UNCERTAIN if any(bounds.at_most is None or bounds.at_most > limit for bounds in ages) else Status.MET)


def age(part: CountedPartition, now: datetime) -> Age:
    """Returns the age of the partition's first uncommitted record. An old sample is enough while the position is unchanged: the first
    record is still the same."""
    sample = part.sample
    if sample is None or (sample.lag is None and sample.position is not None):  # never sampled, or the log was truncated
        return Age(NONE, None, part.committed_at)
    since_sample = max(now - sample.at, NONE)
    if sample.nothing_waited(part.position):
        if sample.open_since is not None and part.position <= sample.end:  # the first record is older; the transaction may have ended since
            return Age(max(sample.at - sample.open_since, NONE), max(now - sample.open_since, NONE))
        return Age(NONE, since_sample, sample.at)
    if sample.position is None or sample.next_at is None or part.position < sample.position:
        return Age(NONE, None, sample.at)
    waited = max(now - sample.next_at, NONE)
    if part.position == sample.position:
        return Age(waited, waited)
    return Age(min(since_sample, waited), waited)  # the first record now existed at the sample


def current_at(part: CountedPartition) -> datetime:
    """Returns the last time at which the partition had a commit, or no waiting record (until its first waiting record arrived)."""
    sample = part.sample
    if sample is None or (sample.lag is None and sample.position is not None):
        return part.committed_at
    if sample.nothing_waited(part.position) or sample.next_at is None:
        return max(part.committed_at, sample.open_since or sample.at)
    return max(part.committed_at, sample.next_at) if part.position == sample.position else part.committed_at
