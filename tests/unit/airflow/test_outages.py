"""How long a task waits for an unavailable broker or database, with the settings that every DAG gives its tasks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from tidemark.airflow.dags.consume import retrying
from tidemark.airflow.operators import final_errors_fail
from tidemark.driver.launch import AttemptBroken, AttemptFenced, AttemptRefused, AttemptUnavailable, DriverDied
from tidemark.errors import BadInput, BrokerUnavailable, DatabaseReadOnly, DatabaseUnavailable
from tidemark.spec import AirflowSettings


def shortest_delays(task: dict[str, Any]) -> list[float]:
    """How long Airflow waits at least before each retry (`TaskInstance.next_retry_datetime`); its jitter only adds to that."""
    delay, most = task["retry_delay"].total_seconds(), task["max_retry_delay"].total_seconds()
    return [min(most, delay * task["retry_exponential_backoff"] ** number) for number in range(task["retries"])]


def test_ten_minutes_of_outage_cost_no_red_run_at_the_defaults() -> None:
    """There is still a retry after ten minutes. A long delay in the file is not shortened."""
    assert sum(shortest_delays(retrying())) >= 600
    settings = AirflowSettings.model_validate({"retries": 3, "retry_delay": "20m"})
    assert shortest_delays(retrying(settings)) == [1200, 1200, 1200]


BROKEN = {"attempt_id": 1, "type": "x", "text": "x"}


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (DatabaseUnavailable(cause="x"), "retry"),
        (DatabaseReadOnly(cause="x"), "retry"),
        (BrokerUnavailable(cause="x"), "retry"),
        (DriverDied(attempt_id=1, status=-9), "retry"),
        (AttemptUnavailable(**BROKEN), "retry"),
        (BadInput(what="x", found="x", fix="x"), "fail"),
        (AttemptRefused(**BROKEN), "fail"),
        (AttemptFenced(**BROKEN), "fail"),
        (AttemptBroken(**BROKEN), "fail"),
        (ValueError("x"), "retry"),
    ],
)
def test_outage_is_tried_again_and_what_another_try_cannot_help_fails_at_once(error: Exception, action: str) -> None:
    """Airflow decides about errors that Tidemark does not know."""

    @final_errors_fail
    def execute(self: Any, context: Any) -> None:
        raise error

    with pytest.raises(AirflowFailException if action == "fail" else type(error)) as raised:
        execute(SimpleNamespace(log=logging.getLogger()), {})  # type: ignore[arg-type]
    assert str(raised.value) == str(error)
