"""Which objectives are missed, and what of that is news. Pure functions."""

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
    """Met or missed; the next look may tell. What was reported stays."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """``text`` says how an objective is missed. Empty unless it is."""

    state: Status
    text: str = ""


@dataclass(frozen=True, slots=True)
class PartitionSample:
    """What a sample said of a partition at the database's time ``at``. See ``tidemark.lag_partition``.

    ``position`` is `None` if the partition was never claimed, ``lag`` if it is unknown, ``next_at`` if no record waits or if the timestamp
    of the first one is unknown. ``open_since``: since when records after ``end`` cannot be read, because a transaction is open.
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
    """A partition that counts: not paused, and not being replayed after a rewind. ``look`` is `None` if it was never sampled."""

    position: int
    committed_at: datetime
    look: PartitionSample | None


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """What is known of a consumer at the database's time ``now``. ``failed``: its records in the state FAILED."""

    now: datetime
    parts: tuple[CountedPartition, ...]
    failed: int


@dataclass(frozen=True, slots=True)
class Age:
    """How long a partition's first record that is not committed has waited: at least ``known``, at most ``possible`` (`None`: unknown).

    ``unseen_since``: nothing newer is known than from that time. `None` if the age is known, or uncertain only because the position has
    moved since.
    """

    known: timedelta
    possible: timedelta | None
    unseen_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What is still to be reported of a consumer's objectives. ``missed`` has the texts."""

    missed: Mapping[Objective, str]
    recovered: tuple[Objective, ...]

    def __bool__(self) -> bool:
        return bool(self.missed or self.recovered)


def news(verdicts: Mapping[Objective, Assessment], reported: Collection[Objective]) -> News:
    """The changes since what was reported. An objective that was removed from the consumer's file has recovered."""
    missed = {one: verdict.text for one, verdict in verdicts.items() if verdict.state is Status.MISSED and one not in reported}
    recovered = [one for one in reported if one not in verdicts or verdicts[one].state is Status.MET]
    return News(missed, tuple(sorted(recovered)))


def judge(slo: Objectives, facts: ObjectiveFacts) -> dict[Objective, Assessment]:
    """A verdict for each objective that the consumer has."""
    verdicts = {}
    if slo.lag is not None:
        verdicts[Objective.LAG] = _lag(slo.lag, facts)
    if slo.failed is not None:
        missed = facts.failed > slo.failed
        text = f"{counted(facts.failed, 'failed record')}, objective {slo.failed:,}"
        verdicts[Objective.FAILED] = Assessment(Status.MISSED, text) if missed else Assessment(Status.MET)
    if slo.freshness is not None:
        age = max((facts.now - current_at(part) for part in facts.parts), default=NONE)
        text = f"freshness is {about(age.total_seconds())}, objective {format_duration(slo.freshness)}"
        verdicts[Objective.FRESHNESS] = Assessment(Status.MISSED, text) if age > slo.freshness else Assessment(Status.MET)
    return verdicts


def _lag(limit: timedelta, facts: ObjectiveFacts) -> Assessment:
    ages = [age(part, facts.now) for part in facts.parts]
    objective = f"objective {format_duration(limit)}"
    known = max((one.known for one in ages), default=NONE)
    if known > limit:
        return Assessment(Status.MISSED, f"lag is {about(known.total_seconds())}, {objective}")
    unseen = [one.unseen_since for one in ages if one.unseen_since is not None and facts.now - one.unseen_since > limit]
    if unseen:
        return Assessment(Status.MISSED, f"lag is unknown since {iso(min(unseen).replace(microsecond=0))}, {objective}")
    return Assessment(Status.UNCERTAIN if any(one.possible is None or one.possible > limit for one in ages) else Status.MET)


def age(part: CountedPartition, now: datetime) -> Age:
    """How long the partition's first record that is not committed has waited. An old sample is enough while the position stays where the
    sample found it: the first record is still the same."""
    look = part.look
    if look is None or (look.lag is None and look.position is not None):  # never sampled, or the log was truncated
        return Age(NONE, None, part.committed_at)
    since_look = max(now - look.at, NONE)
    if look.nothing_waited(part.position):
        if look.open_since is not None and part.position <= look.end:  # its first record came before that; since the look, it may be gone
            return Age(max(look.at - look.open_since, NONE), max(now - look.open_since, NONE))
        return Age(NONE, since_look, look.at)
    if look.position is None or look.next_at is None or part.position < look.position:
        return Age(NONE, None, look.at)
    waited = max(now - look.next_at, NONE)
    if part.position == look.position:
        return Age(waited, waited)
    return Age(min(since_look, waited), waited)  # a record that existed then is the first one now


def current_at(part: CountedPartition) -> datetime:
    """When the partition last had a commit, or no record that waited. That is also when its first waiting record arrived."""
    look = part.look
    if look is None or (look.lag is None and look.position is not None):
        return part.committed_at
    if look.nothing_waited(part.position) or look.next_at is None:
        return max(part.committed_at, look.open_since or look.at)
    return max(part.committed_at, look.next_at) if part.position == look.position else part.committed_at
