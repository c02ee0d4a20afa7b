"""Builds the DAGs that people start with a form: a plan, and a task that applies it, after an approval if one is required."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Never, Protocol, cast

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import DAG, AssetAlias, BaseOperator, Context, Param, get_parsing_context

from tidemark.airflow.access import access_of, shared_access
from tidemark.airflow.dags.consume import START, dag_id, declared, retrying
from tidemark.airflow.operators import final_errors_fail, requester
from tidemark.airflow.version_compat import AirflowFailException, DagRunTriggerException, await_answer, only_runs
from tidemark.errors import Unavailable
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection

APPROVE, REJECT = "Approve", "Reject"
WAIT_S, WAIT_LIMIT_S = 10.0, 600.0
"""Retry interval and limit for an unavailable service after an answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """A running task of a DAG of this kind. It knows its plan by the run's id, never by an XCom, which users can write."""

    kind: str
    context: Context
    log: Any

    @property
    def params(self) -> Mapping[str, Any]:
        return self.context["params"]

    @property
    def conf(self) -> Mapping[str, Any]:
        """What the client sent."""
        return self.context["dag_run"].conf or {}

    @property
    def run(self) -> dict[str, Any]:
        return {"dag_id": self.context["dag_run"].dag_id, "run_id": self.context["dag_run"].run_id}

    @property
    def requester(self) -> str:
        return requester(self.context)

    @property
    def own(self) -> str | None:
        """The consumer that this DAG is for, by the DAG's id: orders for ``rewind__orders``. None: its form names the consumers.

        Airflow has checked the user's permission for this id, so no field of the form may override it.
        """
        dag_id: str = self.run["dag_id"]
        name = dag_id.removeprefix(f"{self.kind}__")
        return None if name == dag_id else name

    def identity(self, number: int, digest: str) -> str:
        """Returns the text that identifies a plan in the question that Airflow records."""
        return f"{self.kind} {number}, digest {digest}"

    def session(self, spec: ConsumerSpec) -> contextlib.AbstractContextManager[Connection]:
        """Opens a session in the consumer's database."""
        from tidemark.airflow.connections import database_url
        from tidemark.db import session

        return session(database_url(spec), application=f"tidemark {self.kind}")

    def log_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.log.info("%s", line)


@dataclass(frozen=True, slots=True)
class Question:
    """An approval question. ``plan`` identifies the plan: a text with its digest, which no other plan has."""

    subject: str
    body: str
    plan: str
    within: timedelta


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer about ``plan`` as Airflow recorded it. ``by`` is None if nobody answered in time."""

    plan: str
    approved: bool
    by: str | None = None
    name: str | None = None

    def is_of(self, person: str) -> bool:
        return person in {self.by, self.name} - {None}

    def require_about(self, plan: str) -> None:
        """Raises `AirflowFailException` if the question was about another plan than this one."""
        if self.plan != plan:
            raise AirflowFailException(
                f"The answer was about {self.plan}, but this run's plan is {plan}. Nothing was changed; clear this task to ask again."
            )


class TaskFunctions(Protocol):
    """What the tasks of a kind of DAG do: the functions of the kind's module in `tidemark.airflow.tasks`. Every task can be retried."""

    def plan(self, task: Task) -> Any:
        """Checks the form and makes the plan. Changes nothing else. A run that has a plan keeps it. Returns what the task pushes."""

    def question(self, task: Task) -> Question | None:
        """Returns the question about the plan. None if it needs no approval. Raises `AirflowSkipException` if it must not be applied."""

    def apply(self, task: Task, answer: Answer | None) -> Any:
        """Applies the plan; with an answer, only if that is about this plan and approves it. Returns what the task pushes. May be called
        again after `Unavailable`."""


def _functions(kind: str) -> TaskFunctions:
    return cast("TaskFunctions", import_module(f"tidemark.airflow.tasks.{kind}"))


class PlanOperator(BaseOperator):
    """Checks the form, makes the plan and logs it. Pushes the plan's number, if it has one, for information only.

    ``kind``: the kind of DAG.
    """

    def __init__(self, *, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    @final_errors_fail
    def execute(self, context: Context) -> Any:
        return _functions(self.kind).plan(Task(self.kind, context, self.log))


class ApplyOperator(HITLOperator):
    """Asks for approval of a plan, if required, and then applies it, so that nothing can come between the answer and the action.

    The answer comes from the task's own row in Airflow's database, which only the scheduler and the answer endpoint write. Users can write
    XComs, so none is used. A user who marks the task as success has changed nothing. A cleared task asks again. It pushes what the function
    that acts returns. ``asks``, ``acts``: the functions of the kind's module.
    """

    template_fields: Sequence[str] = ()  # the task reads the plan when it runs; nothing is templated

    def __init__(self, *, kind: str, asks: str = "question", acts: str = "apply", **kwargs: Any) -> None:
        super().__init__(subject="Approve this plan?", options=[APPROVE, REJECT], defaults=REJECT, **kwargs)
        self.kind, self.asks, self.acts = kind, asks, acts

    def validate_params(self) -> None:
        """Does nothing: the question has no fields. In Airflow 3.1, those of the run's form would be checked, which have no values yet."""

    @final_errors_fail
    def execute(self, context: Context) -> Any:
        task = Task(self.kind, context, self.log)
        if question := self._function(self.asks)(task):
            self._ask(context, question)
        return self._function(self.acts)(task, None)

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(_functions(self.kind), name)
        return function

    def _ask(self, context: Context, question: Question) -> Never:
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
        await_answer(self, context["ti"].id, self.options, self.defaults or [], question.within, {"plan": question.plan})

    @final_errors_fail
    def execute_complete(self, context: Context, event: dict[str, Any], plan: str = "") -> Any:
        """Acts on the answer. Waits for unavailable services, because only this process has the answer; another try would ask again."""
        answer = _parse_answer(super().execute_complete(context, event), plan)
        self.log.info("answered plan=%s approved=%s by=%s", plan, answer.approved, answer.by)
        deadline = time.monotonic() + WAIT_LIMIT_S
        while True:
            try:
                return self._function(self.acts)(Task(self.kind, context, self.log), answer)
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                self.log.warning("%s", error)
                time.sleep(WAIT_S)


def _parse_answer(event: Mapping[str, Any], plan: str) -> Answer:
    who = event["responded_by_user"] or {}
    answer = Answer(plan, event["chosen_options"] == [APPROVE], who.get("id") or who.get("name"), who.get("name"))
    if answer.approved and answer.by is None:
        raise AirflowFailException("Airflow did not record who approved this. Nothing was changed; clear this task to ask again.")
    return answer


Form = Callable[[Sequence[ConsumerSpec], str | None], dict[str, Param]]
"""Returns the fields of a form that offers these consumers, or of the DAG of one consumer, which offers none."""


@dataclass(frozen=True, slots=True)
class ReviewedDag:
    """The DAG for all consumers, and one for each with ``access``. ``further`` adds the tasks after `apply`, with these arguments."""

    kind: str
    form: Form
    tag: str
    description: str
    doc: str
    plan_doc: str
    apply_doc: str
    outlets: Sequence[AssetAlias] = ()
    further: Callable[[ApplyOperator, dict[str, Any]], None] = lambda apply, common: None

    def build(self) -> dict[str, DAG]:
        """Returns the DAG ``kind`` for all consumers, and ``kind__<consumer>`` for each with ``access``, by id. In a task, only that task's
        DAG, whose form offers nothing.

        An invalid file's DAG stays too: a rewind may wait for approval in it.
        """
        kind, running = self.kind, get_parsing_context().dag_id
        consumers = declared(kind)
        specs: list[ConsumerSpec] = [consumer.spec for consumer in consumers]
        dags: list[DAG] = []
        if running in (None, kind):
            good = sorted((consumer.spec for consumer in consumers if consumer.error is None), key=lambda spec: spec.name)
            dags.append(self._dag(self.form(good, None), dag_id=kind, access_control=shared_access(specs)))
        for spec in specs:
            if spec.access is not None:
                display_name = f"{spec.name} ({kind})"  # Airflow's search matches from the beginning of this name
                words: dict[str, Any] = {"dag_id": dag_id(kind, spec.name), "dag_display_name": display_name}
                dags.append(self._dag(self.form((), spec.name), access_control=access_of(spec, specs), **words))
        return {dag.dag_id: dag for dag in dags}

    def _dag(self, params: dict[str, Param], **more: Any) -> DAG:
        common: dict[str, Any] = {"owner": "tidemark", **retrying()}
        with DAG(
            description=self.description,
            doc_md=self.doc,
            params=dict(params),
            schedule=None,
            start_date=START,
            catchup=False,
            **only_runs("manual"),
            is_paused_upon_creation=False,
            max_active_runs=16,  # several runs may wait for approval at once
            tags=["tidemark", self.tag],
            default_args={"owner": "tidemark"},
            **more,
        ) as dag:
            plan = PlanOperator(task_id="plan", kind=self.kind, doc_md=self.plan_doc, **common)
            apply = ApplyOperator(task_id="apply", kind=self.kind, doc_md=self.apply_doc, outlets=list(self.outlets), **common)
            plan >> apply
            self.further(apply, common)
        return dag


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
