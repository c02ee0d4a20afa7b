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
CASES: dict[Condition, tuple[dict[str, Any], bool, bool | None]] = {
    Condition.BAD_SPEC: (DONE, False, False),
    Condition.RUN_FAILED: (DONE | {"attempt_state": "FAILED", "attempt_error": "BrokerUnavailable"}, True, False),
    Condition.BLOCKED: (DONE | {"verdict": "critical"}, True, False),
    Condition.RECORDS_FAILED: (DONE | {"failed": 1}, True, False),
    Condition.PAUSED: (DONE | {"paused": True}, True, False),
    Condition.REPLAYING: (DONE | {"lag": SimpleNamespace(verdict=Verdict.REPLAYING, why="Records left to read again.")}, True, False),
    Condition.RECORDS_WAIT: (DONE | {"waiting": 1}, True, False),
    Condition.RUNNING: (DONE | {"attempt_state": "RUNNING"}, True, False),
    Condition.OK: (DONE, True, False),
    Condition.NEW: ({}, True, False),
    Condition.LOSING: (DONE | {"lag": SimpleNamespace(verdict=Verdict.LOSING, why="Retention will pass.")}, True, False),
    Condition.STOPPED: (DONE | {"lag": SimpleNamespace(verdict=Verdict.STOP, why="No run.")}, True, False),
    Condition.STALLED: (DONE | {"lag": SimpleNamespace(verdict=Verdict.STALL, why="The lag grows.")}, True, False),
    Condition.CATCHING_UP: (DONE | {"lag": SimpleNamespace(verdict=Verdict.CATCHING_UP, why="The lag shrinks.")}, True, False),
}
"""For each condition: what is known about the group, whether its file is valid, and whether its DAG is paused."""


@pytest.mark.parametrize("expected", CASES)
def test_condition_is_the_worst_that_is_so(expected: Condition) -> None:
    row, valid, paused = CASES[expected]
    found, why = condition(row, valid=valid, dag_paused=paused)
    assert found is expected
    assert why or found is Condition.OK


def test_every_condition_but_that_of_the_database_has_a_case() -> None:
    assert set(CASES) | {Condition.UNREACHABLE} == set(Condition)


def test_paused_dag_of_a_group_that_has_run_is_said() -> None:
    assert condition(DONE, valid=True, dag_paused=True) == (Condition.PAUSED, "Its DAG is paused; no run starts.")
    assert condition({}, valid=True, dag_paused=True)[0] is Condition.NEW


def test_failed_run_is_named() -> None:
    row, valid, paused = CASES[Condition.RUN_FAILED]
    assert condition(row, valid=valid, dag_paused=paused)[1] == "The last run failed: BrokerUnavailable"


@given(st.lists(st.sampled_from([each for each in CASES if each not in (Condition.BAD_SPEC, Condition.NEW, Condition.OK)]), min_size=1))
def test_several_things_together_are_as_bad_as_the_worst(together: list[Condition]) -> None:
    """There is only one verdict on the lag at a time: the worst."""
    row = dict(DONE)
    for each in sorted(together, key=lambda one: RANK[one], reverse=True):
        row |= {name: value for name, value in CASES[each][0].items() if DONE.get(name) != value}
    assert condition(row, valid=True, dag_paused=False)[0] == min(together, key=lambda one: RANK[one])
