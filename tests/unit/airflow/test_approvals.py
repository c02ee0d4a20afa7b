"""What happens to the answer to an approval."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from tidemark import errors
from tidemark.airflow.approvals import review


class Deeds:
    """The functions of the kind "deed". The first call of `apply` finds Kafka unavailable."""

    def __init__(self) -> None:
        self.outages = 1

    def question(self, task: review.Task) -> None:
        """No approval is required."""

    def apply(self, task: review.Task, answer: review.Answer | None) -> Any:
        if answer is None:
            return "nobody was asked"
        if self.outages:
            self.outages -= 1
            raise errors.BrokerUnavailable(cause="x")
        answer.require_about("plan 1")
        return [answer.approved, answer.by, answer.is_of("ann"), answer.is_of("bob")]


@pytest.fixture(autouse=True)
def _deeds(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Deeds()
    monkeypatch.setattr(review, "_functions", lambda kind: functions)
    monkeypatch.setattr(review, "WAIT_S", 0.0)


def answered(who: dict[str, str] | None, chosen: str, plan: str = "plan 1") -> Any:
    event = {"chosen_options": [chosen], "params_input": {}, "responded_at": datetime.now(UTC), "responded_by_user": who}
    context: Any = {}
    return review.ApplyOperator(task_id="deed", kind="deed").execute_complete(context, event=event, plan=plan)


def test_answer_is_a_persons_and_is_kept_while_kafka_is_away() -> None:
    """No answer in time means a rejection; an approval without a recorded user is refused. The task waits for the end of an outage between
    answer and action, because a retry would ask again."""
    ann = {"id": "17", "name": "ann"}
    assert answered(ann, "Approve") == [True, "17", True, False]
    assert answered(ann, "Reject") == [False, "17", True, False]
    assert answered(None, "Reject") == [False, None, False, False]
    with pytest.raises(AirflowFailException, match=r"^Airflow did not record who approved this\. Nothing was changed"):
        answered(None, "Approve")


def test_answer_about_another_plan_changes_nothing() -> None:
    with pytest.raises(AirflowFailException, match=r"about plan 2, but this run's plan is plan 1\. Nothing was changed"):
        answered({"id": "17", "name": "ann"}, "Approve", plan="plan 2")


def test_plan_that_needs_no_approval_is_applied_at_once() -> None:
    context: Any = {}
    assert review.ApplyOperator(task_id="deed", kind="deed").execute(context) == "nobody was asked"
