"""The condition of a consumer, as the page shows it: each case, and that a worse condition hides a better one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.airflow.web.condition import RANK, Condition, condition
from tidemark.offsets.verdict import Verdict

DONE: dict[str, Any] = {"attempt_state": "COMMITTED", "verdict": "passed", "waiting": 0, "failed": 0}
LAGS = {
    Condition.REPLAYING: Verdict.REPLAYING,
    Condition.LOSING: Verdict.LOSING,
    Condition.STOPPED: Verdict.STOP,
    Condition.STALLED: Verdict.STALL,
    Condition.CATCHING_UP: Verdict.CATCHING_UP,
}
WORSE: dict[Condition, dict[str, Any]] = {
    Condition.RUN_FAILED: DONE | {"attempt_state": "FAILED", "attempt_error": "BrokerUnavailable"},
    Condition.BLOCKED: DONE | {"verdict": "critical"},
    Condition.RECORDS_FAILED: DONE | {"failed": 1},
    Condition.PAUSED: DONE | {"paused": True},
    Condition.RECORDS_WAIT: DONE | {"waiting": 1},
    Condition.RUNNING: DONE | {"attempt_state": "RUNNING"},
    Condition.UNVALIDATED: DONE | {"unvalidated": True},
    **{one: DONE | {"lag": SimpleNamespace(verdict=verdict, why="Its lag.")} for one, verdict in LAGS.items()},
}
"""What is known about a group in each condition that is worse than OK."""


@pytest.mark.parametrize("expected", WORSE)
def test_each_condition_has_a_reason(expected: Condition) -> None:
    found, why = condition(WORSE[expected], valid=True, dag_paused=False)
    assert found is expected
    assert why


def test_reasons_say_which_file_dag_or_run_it_is() -> None:
    assert condition(DONE, valid=True, dag_paused=False)[0] is Condition.OK
    assert condition(DONE, valid=False, dag_paused=False)[0] is Condition.BAD_SPEC
    assert condition(DONE, valid=True, dag_paused=True) == (Condition.PAUSED, "Its DAG is paused; no run starts.")
    assert condition({}, valid=True, dag_paused=True)[0] is Condition.NEW
    blocked = (Condition.BLOCKED, "Validation 7 failed; the validated view stops before its rows.")
    assert condition(DONE | {"stopped_by": 7}, valid=True, dag_paused=False) == blocked
    assert condition(WORSE[Condition.RUN_FAILED], valid=True, dag_paused=False)[1] == "The last run failed: BrokerUnavailable"
    assert set(WORSE) | {Condition.OK, Condition.NEW, Condition.BAD_SPEC, Condition.UNREACHABLE} == set(Condition)


@given(st.lists(st.sampled_from([*WORSE]), min_size=1))
def test_several_things_together_are_as_bad_as_the_worst(together: list[Condition]) -> None:
    """There is only one verdict on the lag at a time: the worst."""
    row = dict(DONE)
    for each in sorted(together, key=lambda one: RANK[one], reverse=True):
        row |= {name: value for name, value in WORSE[each].items() if DONE.get(name) != value}
    assert condition(row, valid=True, dag_paused=False)[0] == min(together, key=lambda one: RANK[one])
