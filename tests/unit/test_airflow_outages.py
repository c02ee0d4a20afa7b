"""How long a task waits for an unavailable broker or database, with the settings that every DAG gives its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemark.consume.launch import AttemptBroken, AttemptFenced, AttemptRefused, AttemptUnavailable, DriverDied
from tidemark.errors import BadInput, BrokerUnavailable, DatabaseReadOnly, DatabaseUnavailable
from tidemark.spec import AirflowSettings


@pytest.fixture
def dags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with a temporary folder for Airflow."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    from tidemark.airflow import dags

    return dags


def shortest_delays(task: dict[str, Any]) -> list[float]:
    """How long Airflow waits at least before each retry (`TaskInstance.next_retry_datetime`); its jitter only adds to that."""
    delay, most = task["retry_delay"].total_seconds(), task["max_retry_delay"].total_seconds()
    return [min(most, delay * task["retry_exponential_backoff"] ** number) for number in range(task["retries"])]


def test_ten_minutes_of_outage_cost_no_red_run_at_the_defaults(dags: Any) -> None:
    """There is still a retry after ten minutes."""
    assert sum(shortest_delays(dags.retrying())) >= 600


def test_delay_of_the_file_is_where_the_delays_begin(dags: Any) -> None:
    """A long delay is not shortened."""
    settings = AirflowSettings.model_validate({"retries": 3, "retry_delay": "20m"})
    assert shortest_delays(dags.retrying(settings)) == [1200, 1200, 1200]


@pytest.mark.parametrize(
    "error",
    [
        DatabaseUnavailable(cause="x"),
        DatabaseReadOnly(cause="x"),
        BrokerUnavailable(cause="x"),
        DriverDied(attempt_id=1, status=-9),
        AttemptUnavailable(attempt_id=1, type="x", text="x"),
    ],
)
def test_outage_is_tried_again(dags: Any, error: Exception) -> None:
    """The task's delays apply: the policy sets none."""
    decision = dags.RETRY_POLICY.evaluate(error, 1, 5)
    assert (decision.action.value, decision.retry_delay) == ("retry", None)


@pytest.mark.parametrize(
    "error",
    [
        BadInput(what="x", found="x", fix="x"),
        *(kind(attempt_id=1, type="x", text="x") for kind in (AttemptRefused, AttemptFenced, AttemptBroken)),
    ],
)
def test_what_another_try_cannot_help_fails_at_once(dags: Any, error: Exception) -> None:
    """This holds however many retries are left."""
    assert dags.RETRY_POLICY.evaluate(error, 1, 5).action.value == "fail"
