"""Shared by the DAGs with a form: the manual start, the check of the input, and the approval step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Never, Protocol, TypeVar

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import DAG, Context, Param, get_parsing_context
from airflow.sdk.exceptions import AirflowFailException, DagRunTriggerException, TaskAwaitingInput

from tidemark.airflow.access import access_of, shared_access
from tidemark.airflow.dags.consume import START, dag_id, declared
from tidemark.errors import Unavailable
from tidemark.spec import ConsumerSpec
from tidemark.text.problems import Problems
from tidemark.text.wording import nearest, quoted

T = TypeVar("T")

APPROVE, REJECT = "Approve", "Reject"
WAIT_S, WAIT_LIMIT_S = 10.0, 600.0
"""Retry interval and limit for an unavailable service after an answer."""


class Build(Protocol):
    """Builds a DAG whose form offers the consumers ``good``, or the DAG of the consumer ``own``, whose form offers none. ``more``: further
    arguments of the DAG."""

    def __call__(self, good: Sequence[ConsumerSpec], own: str | None, **more: Any) -> DAG: ...


def manual_dags(kind: str, build: Build) -> dict[str, DAG]:
    """Builds the DAG ``kind`` for all consumers, and ``kind__<consumer>`` for each with ``access``. In a task, only that task's DAG, whose
    form offers nothing.

    An invalid file's DAG stays too: a rewind may wait for approval in it.
    """
    running = get_parsing_context().dag_id
    consumers = declared(kind)
    specs: list[ConsumerSpec] = [consumer.spec for consumer in consumers]
    dags: list[DAG] = []
    if running in (None, kind):
        good = sorted((consumer.spec for consumer in consumers if consumer.error is None), key=lambda spec: spec.name)
        dags.append(build(good, None, dag_id=kind, access_control=shared_access(specs)))
    for spec in specs:
        if spec.access is not None:
            display_name = f"{spec.name} ({kind})"  # Airflow's search matches from the beginning of this name
            access = access_of(spec, specs)
            dags.append(build((), spec.name, dag_id=dag_id(kind, spec.name), dag_display_name=display_name, access_control=access))
    return {dag.dag_id: dag for dag in dags}


def manual_only(params: Mapping[str, Param], *tags: str, **more: Any) -> dict[str, Any]:
    """Returns the arguments of a DAG that is only started manually. Several of its runs may wait for approval at once."""
    return {
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


def own_consumer(context: Context, kind: str) -> str | None:
    """Returns the consumer that this DAG is for, by the DAG's id: orders for ``rewind__orders``. None: its form names the consumers.

    Airflow has checked the user's permission for this id, so no field of the form may override it.
    """
    name = str(context["dag_run"].dag_id).removeprefix(f"{kind}__")
    return None if name == context["dag_run"].dag_id else name


def refuse_unknown(problems: Problems, conf: Mapping[str, Any], fields: Sequence[str], fixed: str, own: str | None) -> None:
    """Adds a problem for each key of ``conf`` that is not a field of the form, and suggests the closest field. Airflow accepts any key.

    In a DAG of the consumer ``own``, the field ``fixed``, which names consumers, is unknown as well.
    """
    if own is not None and fixed in conf:
        problems.add("conf", f"{fixed} cannot be set: this DAG is for {own} only", "Remove the key.")
    for key in sorted(set(conf) - set(fields)):
        closest = nearest(key, fields)
        problems.add("conf", f"unknown key {quoted(key)}", f"Write {closest}." if closest else f"Valid keys: {', '.join(fields)}.")


def requester(context: Context) -> str:
    """The Airflow user who started the run."""
    return context["dag_run"].triggering_user_name or "airflow"


@dataclass(frozen=True, slots=True)
class Question:
    """An approval question. ``plan`` identifies the stored plan: a text with its number and digest, which no other plan has."""

    subject: str
    body: str
    plan: str
    within: timedelta


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer as Airflow recorded it. ``by`` is None if nobody answered in time."""

    approved: bool
    by: str | None = None
    name: str | None = None

    def is_of(self, person: str) -> bool:
        return person in {self.by, self.name} - {None}


class ApprovalOperator(HITLOperator):
    """A task that asks for approval of a plan and then applies it, so that nothing can come between the answer and the action.

    ``execute`` applies the plan if no approval is needed, and otherwise calls `ask`. `answered` gets the answer. The answer comes from the
    task's own row in Airflow's database, which only the scheduler and the answer endpoint write. Users can write XComs, so none is used.
    A user who marks the task as success has changed nothing. A cleared task asks again.
    """

    template_fields: Sequence[str] = ()  # the task reads the plan when it runs; nothing is templated

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(subject="Approve this plan?", options=[APPROVE, REJECT], defaults=REJECT, **kwargs)

    def ask(self, context: Context, question: Question) -> Never:
        """Asks, and ends this process of the task. No answer in time counts as a rejection.

        Later tries still show the question of the first try. Raises `AirflowFailException` if that was about another plan.
        """
        from airflow.sdk.execution_time.comms import CreateHITLDetailPayload
        from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

        stored: Any = SUPERVISOR_COMMS.send(
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
        if question.plan not in (stored.body or ""):
            raise AirflowFailException(
                f"Airflow still shows the question about another plan, not {question.plan}. Nothing was changed; start a new run."
            )
        self.log.info("waiting for an answer plan=%s within=%s", question.plan, question.within)
        raise TaskAwaitingInput(method_name="execute_complete", timeout=question.within, kwargs={"plan": question.plan})

    def execute_complete(self, context: Context, event: dict[str, Any], plan: str = "") -> Any:
        """Acts on the answer. Waits for unavailable services, because only this process has the answer; another try would ask again."""
        answer = self._parse_answer(super().execute_complete(context, event))
        self.log.info("answered plan=%s approved=%s by=%s", plan, answer.approved, answer.by)
        deadline = time.monotonic() + WAIT_LIMIT_S
        while True:
            try:
                return self.answered(context, plan, answer)
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                self.log.warning("%s", error)
                time.sleep(WAIT_S)

    def answered(self, context: Context, plan: str, answer: Answer) -> Any:
        """Acts on the answer if ``plan`` is still this run's plan. May be called again after `Unavailable`."""
        raise NotImplementedError

    def _parse_answer(self, event: Mapping[str, Any]) -> Answer:
        who = event["responded_by_user"] or {}
        answer = Answer(event["chosen_options"] == [APPROVE], who.get("id") or who.get("name"), who.get("name"))
        if answer.approved and answer.by is None:
            raise AirflowFailException("Airflow did not record who approved this. Nothing was changed; clear this task to ask again.")
        return answer


def start_run(dag_id: str, run_id: str) -> DagRunTriggerException:
    """Returns an exception to raise: it starts a run of a DAG without waiting for it. If that run already exists, the task is skipped."""
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
