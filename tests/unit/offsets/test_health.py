"""How a consumer does: the cases of the table in docs/operating.md, and properties of all cases."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import project
from tidemark.offsets.health import PAGE_ONLY, RANK, Dag, Health, LagFacts, LedgerFacts, Runs, judge
from tidemark.offsets.window import Trend

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


def facts(**changes: object) -> LagFacts:
    """One partition with 50 records to read, sampled a minute ago."""
    known = {"waiting": 50, "trends": frozenset({Trend.KEEPING_UP}), "committed_at": NOW - 2 * MINUTE}
    return LagFacts(now=NOW, sampled_at=NOW - MINUTE, **known | changes)  # type: ignore[arg-type]


def trend(*trends: Trend) -> dict[str, object]:
    return {"trends": frozenset(trends)}


NOTHING: dict[str, object] = {"waiting": 0, **trend(Trend.KEEPING_UP)}
WAITS = trend(Trend.WAITING)
HOURLY = Runs(
    7,
    "COMMITTED",
    began_at=NOW - 40 * MINUTE,
    ended_at=NOW - 39 * MINUTE,
    longest_pause=HOUR,
    longest_run=MINUTE,
    dag_id="consume__orders",
    run_id="r7",
)
RUNNING = replace(HOURLY, state="RUNNING", began_at=NOW - MINUTE, ended_at=None, running_since=NOW - MINUTE)
FAILED = replace(HOURLY, state="FAILED", error_kind="refused", error_type="TopicsMissing", error_text="Topics not found: orders.")
MISSED = replace(HOURLY, began_at=NOW - 3 * HOUR, ended_at=NOW - 3 * HOUR + MINUTE)
HUNG = replace(RUNNING, began_at=NOW - 3 * HOUR, running_since=NOW - 3 * HOUR)
LATE: dict[str, object] = {"losing_from": NOW - HOUR, "expires_at": NOW + 2 * HOUR}
DAG = Dag("consume__orders", next_run_at=NOW + MINUTE)
FAILED_DAG = replace(DAG, failed_run="r8", failed_at=NOW - 10 * MINUTE)
OPEN: dict[str, object] = {"open": 100, "open_for": 16 * MINUTE}
FINE = LedgerFacts()

# fmt: off
CASES = [
    ("Retention has deleted records before the position", facts(deleted=3), HOURLY, None, FINE, Health.LOSING),
    ("The first unread record has waited longer than retention leaves it, and is not approached",
     facts(**LATE), HOURLY, None, FINE, Health.LOSING),
    ("The same, but it waits for less than half of the retention so far",
     facts(**LATE | {"losing_from": NOW + HOUR}), HOURLY, None, FINE, Health.OK),
    ("The last run failed", facts(**NOTHING), FAILED, None, FINE, Health.RUN_FAILED),
    ("The last run was fenced", facts(**WAITS), replace(FAILED, error_kind="fenced", error_type="OffsetFenced",
     error_text="orders/0 is fenced."), None, FINE, Health.RUN_FAILED),
    ("The last run of the DAG failed before it had an attempt: a connection is missing, its file is broken",
     facts(**WAITS), HOURLY, FAILED_DAG, FINE, Health.RUN_FAILED),
    ("The last run of the DAG failed in `publish`", facts(**NOTHING), HOURLY, replace(FAILED_DAG, failed_run="r7"), FINE,
     Health.RUN_FAILED),
    ("The last run of the DAG failed, and a later run from the command line was good",
     facts(**NOTHING), replace(HOURLY, began_at=NOW - MINUTE), FAILED_DAG, FINE, Health.OK),
    ("Records wait in a partition; the last run failed", facts(**WAITS), FAILED, None, None, Health.STOPPED),
    ("Records wait; no run has ever begun", facts(**WAITS), Runs(), None, FINE, Health.STOPPED),
    ("Records wait; hourly runs, the last one 3 hours ago", facts(**WAITS), MISSED, None, FINE, Health.STOPPED),
    ("Records wait; hourly runs, the current one has committed nothing for 3 hours",
     facts(committed_at=NOW - 4 * HOUR, **WAITS), HUNG, None, FINE, Health.STOPPED),
    ("The same, and it committed 2 minutes ago: it catches up", facts(**WAITS), HUNG, None, FINE, Health.RUNNING),
    ("Records wait; the DAG is paused", facts(**WAITS), HOURLY, replace(DAG, paused=True), FINE, Health.STOPPED),
    ("Records wait; no run is scheduled", facts(**WAITS), HOURLY, replace(DAG, next_run_at=None), FINE, Health.STOPPED),
    ("Records wait; the DAG is paused, and a run is queued", facts(**WAITS), HOURLY, replace(DAG, paused=True, queued=True), FINE,
     Health.PAUSED),
    ("A run waits for a pool without slots", facts(**NOTHING), HOURLY,
     replace(DAG, stuck="waits for the pool one, which has no slots"), FINE, Health.STOPPED),
    ("A run waits for a logical date in the future", facts(**NOTHING), Runs(),
     replace(DAG, stuck="waits for its logical date, 2027-01-01 00:00 UTC"), FINE, Health.STOPPED),
    ("A transaction has been open for more than 15 minutes", facts(**NOTHING, **OPEN), HOURLY, None, FINE, Health.STOPPED),
    ("A transaction has been open for less", facts(**NOTHING, **OPEN | {"open_for": MINUTE}), HOURLY, None, FINE, Health.OK),
    ("More waits than was read, and the lag grows", facts(**trend(Trend.FALLING_BEHIND)), RUNNING, None, FINE, Health.STALLED),
    ("The same in one of several partitions", facts(partitions=3, **trend(Trend.FALLING_BEHIND, Trend.IDLE)), RUNNING, None, FINE,
     Health.STALLED),
    ("A validation is critical", facts(**NOTHING), HOURLY, None, LedgerFacts(blocked_by=7), Health.BLOCKED),
    ("The last run of the DAG failed in `validate`", facts(**NOTHING), HOURLY, replace(FAILED_DAG, failed_run="r7"),
     LedgerFacts(unvalidated=True), Health.RUN_FAILED),
    ("The same, so its DAG run failed", facts(**NOTHING), HOURLY, replace(FAILED_DAG, failed_run="r7"), LedgerFacts(blocked_by=7),
     Health.BLOCKED),
    ("An objective is missed", facts(**NOTHING), HOURLY, None, LedgerFacts(objectives=("lag is 20 min, objective 10m",)),
     Health.OBJECTIVE_MISSED),
    ("Records have failed for good", facts(**NOTHING), HOURLY, None, LedgerFacts(failed=1), Health.RECORDS_FAILED),
    ("The log was truncated below the position", facts(truncated=1, waiting=0, **trend()), HOURLY, None, FINE, Health.UNKNOWN),
    ("A partition was never claimed", facts(never_claimed=1, waiting=0, **trend()), HOURLY, None, FINE, Health.UNKNOWN),
    ("Nothing waited, but hourly runs have been missed since, without a sample",
     replace(facts(**NOTHING), sampled_at=NOW - 3 * HOUR), MISSED, None, FINE, Health.UNKNOWN),
    ("Nothing waited in a partition, but the last run failed, and nothing was sampled since",
     replace(facts(**NOTHING), sampled_at=NOW - HOUR), FAILED, None, None, Health.UNKNOWN),
    ("A run has begun, and there is no sample yet", replace(facts(), sampled_at=None), HOURLY, None, FINE, Health.UNKNOWN),
    ("Reading is paused with `tidemark pause`", facts(paused=1, waiting=0, **trend()), HOURLY, None, LedgerFacts(pause_reason="Audit."),
     Health.PAUSED),
    ("Reading of some partitions is paused", facts(partitions=3, paused=1), HOURLY, None, FINE, Health.PAUSED),
    ("The DAG is paused, and nothing waits", facts(**NOTHING), HOURLY, replace(DAG, paused=True), FINE, Health.PAUSED),
    ("A rewind moved the position back, and runs read", facts(replay=40, **trend(Trend.FALLING_BEHIND)), RUNNING, None, FINE,
     Health.REPLAYING),
    ("More waits than was read, and the lag shrinks", facts(**trend(Trend.CATCHING_UP)), RUNNING, None, FINE, Health.CATCHING_UP),
    ("Failed records wait for their next try", facts(**NOTHING), HOURLY, None, LedgerFacts(retrying=3), Health.RECORDS_WAIT),
    ("A run is reading", facts(**WAITS), RUNNING, None, FINE, Health.RUNNING),
    ("Rows have no verdict", facts(**NOTHING), HOURLY, None, LedgerFacts(unvalidated=True), Health.UNVALIDATED),
    ("Nothing waits; records are produced", facts(**NOTHING), HOURLY, None, FINE, Health.OK),
    ("Less waits than was read", facts(), HOURLY, None, FINE, Health.OK),
    ("Records wait for the next hourly run", facts(**WAITS), HOURLY, None, FINE, Health.OK),
    ("Nothing waits, and nothing is produced", facts(waiting=0, **trend(Trend.IDLE)), HOURLY, None, FINE, Health.IDLE),
    ("Runs find no topic that matches the pattern", replace(facts(), sampled_at=None, partitions=0), HOURLY, None, FINE, Health.IDLE),
    ("It has never run", replace(facts(), sampled_at=None), Runs(), None, FINE, Health.NEW),
    ("It has never run, and its DAG is paused", replace(facts(), sampled_at=None), Runs(), replace(DAG, paused=True), FINE, Health.NEW),
]
# fmt: on


@pytest.mark.parametrize(("situation", "given_facts", "runs", "dag", "ledger", "health"), CASES, ids=[case[0] for case in CASES])
def test_health_of_each_case(
    situation: str, given_facts: LagFacts, runs: Runs, dag: Dag | None, ledger: LedgerFacts | None, health: Health
) -> None:
    assert judge(given_facts, runs, dag, ledger).health is health


def page() -> str:
    return (project.root() / "docs" / "operating.md").read_text(encoding="utf-8")


def test_table_in_the_docs_has_the_same_cases_reasons_and_ways_out() -> None:
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.*) \|$", page().split("<!-- health -->")[1], re.MULTILINE)[2:]
    judged = [(case[0], judge(*case[1:5])) for case in CASES]
    assert table == [(situation, one.health.value, one.why, one.fix or "-") for situation, one in judged]


def test_docs_list_every_health_worst_first() -> None:
    section = page().split("### Health")[1].split("<!-- health -->")[0]
    assert re.findall(r"^\| ([a-z ]+) \| ", section, re.MULTILINE)[1:] == [one.value for one in Health]


def test_every_health_has_a_case() -> None:
    assert {case[-1] for case in CASES} | PAGE_ONLY == set(Health)


def test_what_nobody_needs_to_see_to_has_no_way_out() -> None:
    """And everything else says what ends it."""
    for case in CASES:
        one = judge(*case[1:5])
        assert bool(one.fix) == (one.health not in {
            Health.REPLAYING, Health.CATCHING_UP, Health.RECORDS_WAIT, Health.RUNNING, Health.OK, Health.IDLE,
        }), case[0]  # fmt: skip


moments = st.none() | st.timedeltas(timedelta(days=-40), timedelta(days=40)).map(NOW.__add__)
lengths = st.none() | st.timedeltas(timedelta(), timedelta(days=40))
any_facts = st.builds(
    LagFacts, now=st.just(NOW), sampled_at=moments, partitions=st.integers(1, 9), waiting=st.integers(0, 9),
    never_claimed=st.integers(0, 2),
    truncated=st.integers(0, 2), paused=st.integers(0, 9), deleted=st.integers(0, 1), losing_from=moments, expires_at=moments,
    trends=st.frozensets(st.sampled_from(Trend)), replay=st.integers(0, 9), open=st.none() | st.integers(0, 9), open_for=lengths,
    committed_at=moments,
)  # fmt: skip
any_runs = st.builds(
    Runs, attempt_id=st.integers(1, 9), state=st.sampled_from([None, "RUNNING", "COMMITTED", "FAILED"]),
    error_kind=st.none() | st.just("fenced"),
    error_type=st.none() | st.text(max_size=5), error_text=st.none() | st.text(max_size=9), began_at=moments, ended_at=moments,
    running_since=moments, longest_pause=lengths, longest_run=lengths, dag_id=st.none() | st.just("dag"), run_id=st.none() | st.just("r1"),
)  # fmt: skip
dags = st.none() | st.builds(
    Dag, st.just("dag"), st.booleans(), moments, st.booleans(), st.none() | st.sampled_from(["r1", "r2"]), moments,
    st.sampled_from(["", "waits for the pool one, which has no slots"]),
)  # fmt: skip
ledgers = st.none() | st.builds(
    LedgerFacts, st.integers(0, 1), st.integers(0, 1), st.none() | st.just(7), st.booleans(), st.sampled_from([(), ("lag is 1 h",)]),
)  # fmt: skip


@given(any_facts, any_runs, dags, ledgers)
def test_every_situation_has_a_health_with_a_reason(facts: LagFacts, runs: Runs, dag: Dag | None, ledger: LedgerFacts | None) -> None:
    """What is not known is never reported as good, and nothing hides what is worse."""
    one = judge(facts, runs, dag, ledger)
    assert one.why
    if facts.never_claimed or facts.truncated or (facts.sampled_at is None and facts.partitions):
        assert RANK[one.health] <= RANK[Health.UNKNOWN]
    assert judge(replace(facts, deleted=1, sampled_at=NOW), runs, dag, ledger).health is Health.LOSING
    for changes, health in (
        ({"blocked_by": 7}, Health.BLOCKED),
        ({"failed": 1}, Health.RECORDS_FAILED),
        ({"unvalidated": True}, Health.UNVALIDATED),
        ({"objectives": ("lag is 1 h",)}, Health.OBJECTIVE_MISSED),
    ):
        worse = judge(facts, runs, dag, replace(ledger or LedgerFacts(), **changes))  # type: ignore[arg-type]
        assert RANK[worse.health] <= RANK[health]
