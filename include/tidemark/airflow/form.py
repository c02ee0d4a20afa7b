"""What DAGs with a form have in common: a person starts them, all that was sent is checked, an approval may be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Never

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import Context, Param
from airflow.sdk.exceptions import DagRunTriggerException

from tidemark.airflow.dags import START
from tidemark.rewind.scenario import Problems
from tidemark.spec.problem import nearest, quoted

APPROVE, REJECT = "Approve", "Reject"


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


class ApproveOperator(HITLOperator):
    """Asks a person, who sees the plan as Markdown; pushes who said what: ``{"approved": true, "by": "ann"}``.

    A subclass' ``execute`` returns what `ask` does, or `LET_THROUGH` where nobody needs to be asked.
    """

    template_fields: Sequence[str] = ()  # the plan is read when the task runs, and nothing of it is a template

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(subject="May this be done?", options=[APPROVE, REJECT], defaults=REJECT, **kwargs)

    def ask(self, context: Context, subject: str, body: str, within: timedelta) -> Never:
        """Ends this process of the task. Who does not answer in time has rejected."""
        self.subject, self.body, self.response_timeout = subject, body, within
        HITLOperator.execute(self, context)
        raise AssertionError("a task that waits for an answer does not go on here")

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        answer = super().execute_complete(context, event)
        who = answer["responded_by_user"] or {}
        approved = answer["chosen_options"] == [APPROVE]
        self.log.info("answered approved=%s by=%s", approved, who.get("name"))
        return {"approved": approved, "by": who.get("id") or who.get("name"), "name": who.get("name")}


LET_THROUGH: Mapping[str, Any] = {"approved": True, "by": None}
"""The answer of nobody, who was not asked."""


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
