"""What DAGs with a form have in common: a person starts them, all that was sent is checked, an approval may be asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Never, TypeVar

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import Context, Param
from airflow.sdk.exceptions import AirflowFailException, DagRunTriggerException, TaskAwaitingInput

from tidemark.airflow.dags import START
from tidemark.errors import Unavailable
from tidemark.text.problems import Problems
from tidemark.text.wording import nearest, quoted

T = TypeVar("T")

APPROVE, REJECT = "Approve", "Reject"
WAIT_S, WAIT_LIMIT_S = 10.0, 600.0
"""How often and how long something that is away is waited for after an answer."""


def by_hand(dag_id: str, params: Mapping[str, Param], *tags: str, **more: Any) -> dict[str, Any]:
    """The arguments of a DAG that a person starts, and nothing else; of its runs several may wait for their approvals at once."""
    return {
        "dag_id": dag_id,
        "params": dict(params),
        "tags": ["tidemark", *tags],
        "start_date": START,
        "catchup": False,
        "allowed_run_types": ["manual"],
        "is_paused_upon_creation": False,
        "max_active_runs": 16,
        "default_args": {"owner": "tidemark"},
        **more,
    }


def refuse_unknown(problems: Problems, conf: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Notes each key of ``conf`` that a form does not have, with the nearest that it has: Airflow takes any key without a word."""
    for key in sorted(set(conf) - set(fields)):
        near = nearest(key, fields)
        problems.add("conf", f"unknown key {quoted(key)}", f"Write {near}." if near else f"It may have {', '.join(fields)}.")


def requester(context: Context) -> str:
    """Who started the run, as Airflow knows them."""
    return context["dag_run"].triggering_user_name or "airflow"


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked, and about which stored plan: ``plan`` has its number and digest, in words that no other plan has."""

    subject: str
    body: str
    plan: str
    within: timedelta


@dataclass(frozen=True, slots=True)
class Answer:
    """What Airflow has recorded of a person's answer. ``by``: nobody answered in time."""

    approved: bool
    by: str | None = None
    name: str | None = None

    def is_of(self, person: str) -> bool:
        return person in {self.by, self.name} - {None}


class AskThenDo(HITLOperator):
    """One task that asks a person about a plan and then does what was approved, so that nothing lies between the answer and the deed.

    ``execute`` either does it, where nobody needs to be asked, or ends in `ask`. The answer comes to `answered`. It reaches the task with
    its own row in Airflow's database, which only the scheduler and the endpoint for answers write; users can write XComs, and mark the
    task a success, which then has done nothing. A cleared task asks again.
    """

    template_fields: Sequence[str] = ()  # the plan is read when the task runs, and nothing of it is a template

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(subject="May this be done?", options=[APPROVE, REJECT], defaults=REJECT, **kwargs)

    def ask(self, context: Context, question: Question) -> Never:
        """Ends this process of the task. Who does not answer in time has rejected.

        Airflow shows the question of the first try also in later ones: `AirflowFailException` where that was about another plan.
        """
        from airflow.sdk.execution_time.comms import CreateHITLDetailPayload
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        shown: Any = SUPERVISOR_COMMS.send(
            CreateHITLDetailPayload(
                ti_id=context["ti"].id,
                options=self.options,
                defaults=self.defaults,
                subject=question.subject,
                body=f"{question.body}\n\n{question.plan}\n",
                params={},
                assigned_users=[],
            )
        )
        if question.plan not in (shown.body or ""):
            raise AirflowFailException(
                f"Airflow still shows another question, and cannot ask about {question.plan}. Nothing was changed; start a new run."
            )
        self.log.info("waiting for an answer plan=%s within=%s", question.plan, question.within)
        raise TaskAwaitingInput(method_name="execute_complete", timeout=question.within, kwargs={"plan": question.plan})

    def execute_complete(self, context: Context, event: dict[str, Any], plan: str = "") -> Any:
        """Does what was answered. What is away is waited for: the answer is for this process only, and the next one would ask again."""
        answer = self._read(super().execute_complete(context, event))
        self.log.info("answered plan=%s approved=%s by=%s", plan, answer.approved, answer.by)
        until = time.monotonic() + WAIT_LIMIT_S
        while True:
            try:
                return self.answered(context, plan, answer)
            except Unavailable as error:
                if time.monotonic() > until:
                    raise
                self.log.warning("%s", error)
                time.sleep(WAIT_S)

    def answered(self, context: Context, plan: str, answer: Answer) -> Any:
        """Does what was approved, if ``plan`` is still the one of this run; may be called again after `Unavailable`."""
        raise NotImplementedError

    def _read(self, event: Mapping[str, Any]) -> Answer:
        who = event["responded_by_user"] or {}
        answer = Answer(event["chosen_options"] == [APPROVE], who.get("id") or who.get("name"), who.get("name"))
        if answer.approved and answer.by is None:
            raise AirflowFailException("Airflow does not know who approved this. Nothing was changed; clear this task to be asked again.")
        return answer


def start_run(dag_id: str, run_id: str) -> DagRunTriggerException:
    """To be raised: starts a run of a DAG and does not wait for it; the task is skipped if there is such a run already."""
    return DagRunTriggerException(
        trigger_dag_id=dag_id,
        dag_run_id=run_id,
        conf=None,
        logical_date=None,
        reset_dag_run=False,
        skip_when_already_exists=True,
        wait_for_completion=False,
        allowed_states=[],
        failed_states=[],
        poke_interval=0,
        deferrable=False,
    )
