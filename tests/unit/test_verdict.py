"""The verdict on a lag: the cases of the table in docs/operating.md, and properties of all cases."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import project
from tidemark.offsets.verdict import RANK, Facts, Runs, Schedule, Verdict, judge
from tidemark.offsets.window import Trend

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def facts(**changes: object) -> Facts:
    """One partition with 50 records to read, sampled a minute ago."""
    known = {"waiting": 50, "trends": frozenset({Trend.KEEPING_UP}), "committed_at": NOW - 2 * MINUTE}
    return Facts(now=NOW, sampled_at=NOW - MINUTE, **known | changes)  # type: ignore[arg-type]


def trend(*trends: Trend) -> dict[str, object]:
    return {"trends": frozenset(trends)}


NOTHING: dict[str, object] = {"waiting": 0, **trend(Trend.KEEPING_UP)}
WAITS = trend(Trend.WAITING)
HOURLY = Runs(7, "COMMITTED", began_at=NOW - 40 * MINUTE, ended_at=NOW - 39 * MINUTE, longest_pause=HOUR, longest_run=MINUTE)
RUNNING = replace(HOURLY, state="RUNNING", began_at=NOW - MINUTE, ended_at=None, running_since=NOW - MINUTE)
FAILED = replace(HOURLY, state="FAILED", error_kind="refused", error_type="TopicsMissing", error_text="Topics not found: orders.")
MISSED = replace(HOURLY, began_at=NOW - 3 * HOUR, ended_at=NOW - 3 * HOUR + MINUTE)
HUNG = replace(RUNNING, began_at=NOW - 3 * HOUR, running_since=NOW - 3 * HOUR)
LATE: dict[str, object] = {"losing_from": NOW - HOUR, "expires_at": NOW + 2 * HOUR}
DAG = Schedule("consume__orders", next_run_at=NOW + MINUTE)

# fmt: off
CASES = [
    ("Retention has deleted records before the position", facts(deleted=3), HOURLY, None, Verdict.LOSING),
    ("The first unread record has waited longer than retention leaves it, and is not approached",
     facts(**LATE), HOURLY, None, Verdict.LOSING),
    ("The same, but it waits for less than half of the retention so far",
     facts(**LATE | {"losing_from": NOW + HOUR}), HOURLY, None, Verdict.OK),
    ("Records wait; the last run failed", facts(**WAITS), FAILED, None, Verdict.STOP),
    ("Records wait; the last run was fenced", facts(**WAITS), replace(FAILED, error_kind="fenced", error_type="OffsetFenced",
     error_text="orders/0 is fenced."), None, Verdict.STOP),
    ("Records wait; no run has ever begun", facts(**WAITS), Runs(), None, Verdict.STOP),
    ("Records wait; hourly runs, the last one 3 hours ago", facts(**WAITS), MISSED, None, Verdict.STOP),
    ("Records wait; hourly runs, the current one has committed nothing for 3 hours",
     facts(committed_at=NOW - 4 * HOUR, **WAITS), HUNG, None, Verdict.STOP),
    ("Records wait; the DAG is paused", facts(**WAITS), HOURLY, replace(DAG, paused=True), Verdict.STOP),
    ("Records wait; no run is scheduled", facts(**WAITS), HOURLY, replace(DAG, next_run_at=None), Verdict.STOP),
    ("Records wait; the DAG is paused, and a run is queued", facts(**WAITS), HOURLY, replace(DAG, paused=True, queued=True), Verdict.OK),
    ("More waits than was read, and the lag grows", facts(**trend(Trend.FALLING_BEHIND)), RUNNING, None, Verdict.STALL),
    ("The same in one of several partitions", facts(partitions=3, **trend(Trend.FALLING_BEHIND, Trend.IDLE)), RUNNING, None, Verdict.STALL),
    ("The log was truncated below the position", facts(truncated=1, waiting=0, **trend()), HOURLY, None, Verdict.UNKNOWN),
    ("A partition was never claimed", facts(never_claimed=1, waiting=0, **trend()), HOURLY, None, Verdict.UNKNOWN),
    ("Nothing waited, but hourly runs have been missed since, without a sample",
     replace(facts(**NOTHING), sampled_at=NOW - 3 * HOUR), MISSED, None, Verdict.UNKNOWN),
    ("Nothing waited, but the last run failed, and nothing was sampled since",
     replace(facts(**NOTHING), sampled_at=NOW - HOUR), FAILED, None, Verdict.UNKNOWN),
    ("No sample yet", replace(facts(), sampled_at=None), HOURLY, None, Verdict.UNKNOWN),
    ("Reading is paused with `tidemark pause`", facts(paused=1, waiting=0, **trend()), HOURLY, None, Verdict.PAUSED),
    ("Reading of some partitions is paused", facts(partitions=3, paused=1), HOURLY, None, Verdict.PAUSED),
    ("A rewind moved the position back, and runs read", facts(replay=40, **trend(Trend.FALLING_BEHIND)), RUNNING, None, Verdict.REPLAYING),
    ("More waits than was read, and the lag shrinks", facts(**trend(Trend.CATCHING_UP)), RUNNING, None, Verdict.CATCHING_UP),
    ("Nothing waits; records are produced", facts(**NOTHING), HOURLY, None, Verdict.OK),
    ("Less waits than was read", facts(), HOURLY, None, Verdict.OK),
    ("Records wait, and a run is reading", facts(**WAITS), RUNNING, None, Verdict.OK),
    ("Records wait for the next hourly run", facts(**WAITS), HOURLY, None, Verdict.OK),
    ("Nothing waits, and nothing is produced", facts(waiting=0, **trend(Trend.IDLE)), HOURLY, None, Verdict.IDLE),
]
# fmt: on


@pytest.mark.parametrize(("situation", "given_facts", "runs", "schedule", "verdict"), CASES, ids=[case[0] for case in CASES])
def test_verdict_of_each_case(situation: str, given_facts: Facts, runs: Runs, schedule: Schedule | None, verdict: Verdict) -> None:
    assert judge(given_facts, runs, schedule).verdict is verdict


def test_table_in_the_docs_has_the_same_cases_verdicts_and_reasons() -> None:
    page = (project.root() / "docs" / "operating.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", page.split("<!-- verdicts -->")[1], re.MULTILINE)[2:]
    judged = [(case[0], judge(*case[1:4])) for case in CASES]
    assert table == [(situation, one.verdict.value, one.why) for situation, one in judged]


def test_every_verdict_has_a_case() -> None:
    assert {case[-1] for case in CASES} == set(Verdict)


moments = st.none() | st.timedeltas(timedelta(days=-40), timedelta(days=40)).map(NOW.__add__)
lengths = st.none() | st.timedeltas(timedelta(), timedelta(days=40))
any_facts = st.builds(
    Facts, now=st.just(NOW), sampled_at=moments, partitions=st.integers(1, 9), waiting=st.integers(0, 9), never_claimed=st.integers(0, 2),
    truncated=st.integers(0, 2), paused=st.integers(0, 9), deleted=st.integers(0, 1), losing_from=moments, expires_at=moments,
    trends=st.frozensets(st.sampled_from(Trend)), replay=st.integers(0, 9), committed_at=moments,
)  # fmt: skip
any_runs = st.builds(
    Runs, attempt_id=st.integers(1, 9), state=st.sampled_from([None, "RUNNING", "COMMITTED", "FAILED"]),
    error_kind=st.none() | st.just("fenced"),
    error_type=st.none() | st.text(max_size=5), error_text=st.none() | st.text(max_size=9), began_at=moments, ended_at=moments,
    running_since=moments, longest_pause=lengths, longest_run=lengths,
)  # fmt: skip
schedules = st.none() | st.builds(Schedule, st.just("dag"), st.booleans(), moments, st.booleans())


@given(any_facts, any_runs, schedules)
def test_every_situation_has_a_verdict_with_a_reason(given_facts: Facts, runs: Runs, schedule: Schedule | None) -> None:
    """The verdict is never STOP unless records wait. An unknown lag is never reported as good, and deleted records are the worst."""
    judged = judge(given_facts, runs, schedule)
    assert judged.why
    if not given_facts.waiting:
        assert judged.verdict is not Verdict.STOP
    if given_facts.never_claimed or given_facts.truncated or given_facts.sampled_at is None:
        assert RANK[judged.verdict] <= RANK[Verdict.UNKNOWN]
    assert RANK[Verdict.LOSING] == 0
    assert judge(replace(given_facts, deleted=1, sampled_at=NOW), runs, schedule).verdict is Verdict.LOSING
