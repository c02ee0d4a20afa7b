"""Objectives: what is known about a consumer, whether it misses an objective, and what is reported."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidemark.objectives.judge import (
    Assessment,
    CountedPartition,
    Objective,
    ObjectiveFacts,
    PartitionSample,
    Status,
    age,
    current_at,
    judge,
    unreported,
)
from tidemark.spec import Objectives

NOON = datetime(2026, 3, 24, 12, tzinfo=UTC)


def ago(minutes: float) -> datetime:
    return NOON - timedelta(minutes=minutes)


def look(at: float = 1, position: int | None = 5, end: int = 9, lag: int | None = 4, next_at: float | None = 3) -> PartitionSample:
    """A sample. By default five records are read and four wait, the first of them for three minutes."""
    return PartitionSample(ago(at), position, end, lag, None if next_at is None else ago(next_at))


def held_up(since: datetime) -> PartitionSample:
    """Everything up to the last stable offset is read, and that has not moved since then."""
    return PartitionSample(ago(1), 9, 9, 0, None, since)


UNKNOWN = "lag is unknown since 2026-03-24T11:12:00Z, objective 10m"
LAG: dict[str, tuple[CountedPartition, Status, str]] = {
    "it waits for three minutes": (CountedPartition(5, ago(9), look()), Status.MET, ""),
    "it waits for too long": (CountedPartition(5, ago(9), look(next_at=14)), Status.MISSED, "lag is 14 min, objective 10m"),
    "an old sample, and the position has not moved": (
        CountedPartition(5, ago(90), look(60, next_at=61)),
        Status.MISSED,
        "lag is 61 min, objective 10m",
    ),
    "nothing waited a minute ago": (CountedPartition(9, ago(90), look(position=9, lag=0, next_at=None)), Status.MET, ""),
    "all that waited is read": (CountedPartition(9, ago(0), look(next_at=90)), Status.MET, ""),
    "nothing waited, long ago": (CountedPartition(9, ago(90), look(48, 9, lag=0, next_at=None)), Status.MISSED, UNKNOWN),
    "some of what waited is read": (CountedPartition(7, ago(0), look(next_at=90)), Status.UNCERTAIN, ""),
    "some of what waited long ago is read": (
        CountedPartition(7, ago(0), look(at=14, next_at=90)),
        Status.MISSED,
        "lag is 14 min, objective 10m",
    ),
    "no sample, committed lately": (CountedPartition(7, ago(2), None), Status.UNCERTAIN, ""),
    "no sample, committed long ago": (CountedPartition(7, ago(48), None), Status.MISSED, UNKNOWN),
    "truncated": (CountedPartition(5, ago(48), look(lag=None)), Status.MISSED, UNKNOWN),
    "claimed since the sample": (CountedPartition(0, ago(1), look(position=None, lag=None)), Status.UNCERTAIN, ""),
    "the first record's time is unknown": (CountedPartition(5, ago(9), look(next_at=None)), Status.UNCERTAIN, ""),
    "moved back by a reset": (CountedPartition(2, ago(1), look()), Status.UNCERTAIN, ""),
    "behind a transaction that stays open": (
        CountedPartition(9, ago(90), held_up(ago(14))),
        Status.MISSED,
        "lag is 13 min, objective 10m",
    ),
    "behind a transaction that is open": (CountedPartition(9, ago(90), held_up(ago(1))), Status.MET, ""),
    "read beyond it since": (CountedPartition(10, ago(0), held_up(ago(14))), Status.MET, ""),
    "the producer's clock is ahead": (CountedPartition(5, ago(9), look(next_at=-30)), Status.MET, ""),
}


@pytest.mark.parametrize(("part", "state", "text"), LAG.values(), ids=LAG)
def test_lag_is_the_age_of_the_first_record_that_is_not_committed(part: CountedPartition, state: Status, text: str) -> None:
    """An unknown lag is neither met nor missed, until it has been unknown for longer than the objective."""
    assert judge(Objectives(lag="10m"), ObjectiveFacts(NOON, (part,), 0)) == {Objective.LAG: Assessment(state, text)}


def test_worst_partition_decides() -> None:
    """A known miss is reported before an unknown lag; an uncertain partition hides neither."""
    met, uncertain = CountedPartition(5, ago(9), look()), CountedPartition(7, ago(0), look(next_at=90))
    unknown, missed = CountedPartition(7, ago(48), None), CountedPartition(5, ago(9), look(next_at=30))

    def worst(*parts: CountedPartition) -> Assessment:
        return judge(Objectives(lag="10m"), ObjectiveFacts(NOON, parts, 0))[Objective.LAG]

    assert worst() == worst(met) == Assessment(Status.MET)
    assert worst(met, uncertain).state is Status.UNCERTAIN
    assert worst(met, uncertain, unknown) == Assessment(Status.MISSED, UNKNOWN)
    assert worst(met, uncertain, unknown, missed) == Assessment(Status.MISSED, "lag is 30 min, objective 10m")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (CountedPartition(9, ago(300), look(position=9, lag=0, next_at=None)), ""),
        (CountedPartition(9, ago(300), held_up(ago(84))), "freshness is 84 min, objective 1h"),
        (CountedPartition(9, ago(30), None), ""),
        (CountedPartition(5, ago(300), look(at=1, next_at=5)), ""),
        (CountedPartition(5, ago(84), look(at=1, next_at=100)), "freshness is 84 min, objective 1h"),
        (CountedPartition(5, ago(100), look(at=1, next_at=84)), "freshness is 84 min, objective 1h"),
        (CountedPartition(7, ago(5), look(at=50, next_at=100)), ""),
        (CountedPartition(5, ago(84), look(at=1, lag=None)), "freshness is 84 min, objective 1h"),
        (CountedPartition(5, ago(84), look(at=1, next_at=None)), ""),
        (CountedPartition(9, ago(300), look(at=150, position=9, lag=0, next_at=None)), "freshness is 2.5 h, objective 1h"),
    ],
)
def test_consumer_is_fresh_unless_records_wait_without_any_commit(part: CountedPartition, text: str) -> None:
    """A topic without new records raises no alarm, as long as it is sampled."""
    verdict = judge(Objectives(freshness="60m"), ObjectiveFacts(NOON, (part,), 0))[Objective.FRESHNESS]
    assert verdict == Assessment(Status.MISSED if text else Status.MET, text)


@pytest.mark.parametrize(
    ("limit", "failed", "text"), [(0, 0, ""), (0, 1, "1 failed record, objective 0"), (1000, 1200, "1,200 failed records, objective 1,000")]
)
def test_failed_records_are_counted(limit: int, failed: int, text: str) -> None:
    verdict = judge(Objectives(failed=limit), ObjectiveFacts(NOON, (), failed))[Objective.FAILED]
    assert verdict == Assessment(Status.MISSED if text else Status.MET, text)


STEPS = st.lists(st.sampled_from(["append", "commit one", "commit all", "sample"]), max_size=30)


@given(steps=STEPS, gaps=st.lists(st.integers(0, 20), min_size=30, max_size=30), limit=st.integers(1, 60))
def test_verdict_never_contradicts_the_log(steps: list[str], gaps: list[int], limit: int) -> None:
    """For any order of appends, commits and samples, the true age is within the bounds. A lag reported as met is met, and one reported as
    missed is missed, unless it is reported as unknown."""
    now, committed_at, position, log, seen = NOON, NOON, 0, list[datetime](), None
    for step, gap in zip([*steps, "look"], [*gaps, 0], strict=False):
        now += timedelta(minutes=gap)
        if step == "append":
            log.append(now)
        elif step == "sample":
            waits = position < len(log)
            seen = PartitionSample(now, position, len(log), len(log) - position, log[position] if waits else None)
        elif step.startswith("commit") and position < len(log):
            position = len(log) if step == "commit all" else position + 1
            committed_at = now
        part = CountedPartition(position, committed_at, seen)
        true = now - log[position] if position < len(log) else timedelta()
        bounds = age(part, now)
        assert bounds.at_least <= true
        assert bounds.at_most is None or true <= bounds.at_most
        verdict = judge(Objectives(lag=f"{limit}m"), ObjectiveFacts(now, (part,), 0))[Objective.LAG]
        if verdict.state is Status.MET:
            assert true <= timedelta(minutes=limit)
        if verdict.state is Status.MISSED and "unknown" not in verdict.text:
            assert true > timedelta(minutes=limit)
        assert current_at(part) <= now


class Reporting(RuleBasedStateMachine):
    """Runs of the DAG ``watch``, with verdicts that change at any time. A run may die before it stores what it found. If it dies after
    that, its failed task reports a miss."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts = dict.fromkeys(Objective, Assessment(Status.MET))
        self.stored: set[Objective] = set()
        self.told: dict[Objective, list[str]] = {one: [] for one in Objective}

    @rule(one=st.sampled_from(Objective), state=st.sampled_from(Status))
    def change(self, one: Objective, state: Status) -> None:
        self.verdicts[one] = Assessment(state, "text" if state is Status.MISSED else "")

    @rule(one=st.sampled_from(Objective))
    def remove_from_the_file(self, one: Objective) -> None:
        self.verdicts.pop(one, None)

    @rule(dies_before_it_stores=st.booleans())
    def run(self, dies_before_it_stores: bool) -> None:
        found = unreported(self.verdicts, self.stored)
        if dies_before_it_stores:
            return
        self.stored = self.stored.union(found.missed).difference(found.recovered)
        for one in found.missed:
            self.told[one].append("missed")
        for one in found.recovered:
            self.told[one].append("met")

    @invariant()
    def each_miss_and_each_recovery_is_told_once(self) -> None:
        for told in self.told.values():
            assert told == ["missed", "met"] * (len(told) // 2) + ["missed"] * (len(told) % 2)

    def teardown(self) -> None:
        """The next run that completes reports everything that earlier runs did not. After it there is no more news."""
        uncertain = {one for one, verdict in self.verdicts.items() if verdict.state is Status.UNCERTAIN}
        before = self.stored
        self.run(dies_before_it_stores=False)
        assert self.stored - uncertain == {one for one, verdict in self.verdicts.items() if verdict.state is Status.MISSED}
        assert self.stored & uncertain == before & uncertain
        assert not unreported(self.verdicts, self.stored)


TestReporting: Any = Reporting.TestCase
