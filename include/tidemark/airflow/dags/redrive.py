"""The DAG ``redrive``, and ``redrive__<consumer>`` for consumers with ``access``: sends a consumer's failed records, chosen in a form,
through the retry topics again.

    plan     checks the form, fixes the list of records, logs counts and examples
    apply    asks for approval of the plan if the form says so; then redrives the records, within the rate limit, and publishes them
    drain    starts a drain at once if the form says ``now``

A consumer's file cannot require approval, because a redrive only loads what was meant to be loaded and removes nothing. A run has one
plan, which its tasks look up by the run's id. Every task can be retried. Clearing `apply` makes it continue with the remaining records.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, Context, Param
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark.airflow.approvals.form import (
    Answer,
    ApprovalOperator,
    Question,
    manual_dags,
    manual_only,
    own_consumer,
    requester,
    start_run,
)
from tidemark.airflow.approvals.records_form import (
    NUMBER,
    RECORDS_FIELDS,
    WHY,
    RecordsRequest,
    consumer_name,
    field,
    read_records,
    reason_field,
    records_fields,
)
from tidemark.airflow.dags.consume import REDRIVE, retrying
from tidemark.airflow.dags.retries import DRAIN_DAG
from tidemark.airflow.operators import PROGRESS_EVERY_S, refusals_fail, spec_of
from tidemark.retry.filter import RecordState
from tidemark.spec import ConsumerSpec
from tidemark.text.storable import BIGINT, INTEGER
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.retry.redrive import Redrive

APPLY, ASK, NOTHING = "apply", "ask", "nothing"
THEN = {APPLY: "redrive the records", ASK: "ask for approval first", NOTHING: "nothing (dry run)"}
PLACES = {"ladder": "all delays again, from the first", "now": "one try, at once"}
STATES = (RecordState.FAILED, RecordState.WAITING, RecordState.DISCARDED)
ANSWER_WITHIN = timedelta(hours=4)

_HOW = "Where to, and how fast"
_UNSET = "If empty: failed records, and those that the broker refused. *DISCARDED* records only if selected here."


def redrive_dags() -> dict[str, DAG]:
    """The DAGs by id: ``redrive`` for all consumers, and ``redrive__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return manual_dags(REDRIVE, _dag)


def _dag(good: Sequence[ConsumerSpec], own: str | None, **more: Any) -> DAG:
    """Builds the DAG whose form offers these consumers, or the DAG of the consumer ``own``."""
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    description = "Retry failed records: choose them in a form, review the plan, apply it."
    with DAG(schedule=None, **manual_only(_form(good, own), "retries", description=description, doc_md=_DOC, **more)) as dag:
        plan = PlanRedriveOperator(task_id="plan", doc_md="Fixes the list of records. Changes nothing.", **common)
        apply = ApplyRedriveOperator(
            task_id="apply",
            doc_md="Asks for approval, if requested; then redrives the records. Clear it to continue with the remaining records.",
            **common,
        )
        drain = StartDrainOperator(task_id="drain", doc_md=f"Starts a run of {DRAIN_DAG}, which tries the records at once.", **common)
        plan >> apply >> drain
    return dag


def _form(good: Sequence[ConsumerSpec], own: str | None) -> dict[str, Param]:
    """Returns the form's fields. The DAG of the consumer ``own`` has no field for consumers. A REST client sends the same keys in its
    conf."""
    return {
        **records_fields(good, own, "redrive", STATES, _UNSET),
        "to": field(
            "Where to", "", "string", "ladder", _HOW, enum=list(PLACES), values_display={k: f"{k}: {v}" for k, v in PLACES.items()}
        ),
        "limit": field("Maximum number of records", "Takes the first ones.", NUMBER, section=_HOW, minimum=1, maximum=BIGINT),
        "per_second": field("Maximum records per second", "Unlimited if empty.", NUMBER, section=_HOW, minimum=1, maximum=INTEGER),
        "max_redrives": field(
            "Maximum redrives per record",
            "A record that was redriven this often is not redriven again.",
            "integer",
            3,
            _HOW,
            minimum=1,
            maximum=INTEGER,
        ),
        "then": field(
            "After the plan",
            "A plan that is not applied now can be applied later: *tidemark redrive apply NUMBER*.",
            "string",
            APPLY,
            WHY,
            enum=list(THEN),
            values_display=THEN,
        ),
        "reason": reason_field("the service is back"),
    }


FIELDS = (*RECORDS_FIELDS, "to", "limit", "per_second", "max_redrives", "then", "reason")
"""The keys of the form, and of a REST client's conf."""


def read_form(params: Mapping[str, Any], conf: Mapping[str, Any], own: str | None = None) -> RecordsRequest:
    """Checks and parses the form. Raises as `read_records` does."""
    return read_records(params, conf, FIELDS, own)


class PlanRedriveOperator(BaseOperator):
    """Checks the form and stores the plan. Pushes the plan's number, for information only. A run that has a plan keeps it."""

    @refusals_fail
    def execute(self, context: Context) -> int:
        from tidemark.profiles import Profile
        from tidemark.retry.redrive import Destination, RedriveRequest, of_run, plan, preview
        from tidemark.roles import require

        params, run = context["params"], context["dag_run"]
        request = read_form(params, run.conf or {}, own_consumer(context, REDRIVE))
        with _session(request.spec) as connection:
            require(connection, Profile.OPERATOR)
            stored = of_run(connection, run.dag_id, run.run_id)
            if stored is not None:
                plan_preview = preview(connection, stored.redrive_id)
            else:
                plan_preview = plan(
                    connection,
                    RedriveRequest(
                        request.spec,
                        request.filter,
                        reason=request.reason,
                        by=requester(context),
                        destination=Destination(params["to"]),
                        limit=params["limit"],
                        per_second=params["per_second"],
                        max_redrives=params["max_redrives"],
                        dag_id=run.dag_id,
                        run_id=run.run_id,
                    ),
                )
        _log(self.log, plan_preview)
        return plan_preview.redrive.redrive_id


class ApplyRedriveOperator(ApprovalOperator):
    """Asks for approval if the form says ``ask`` and the redrive is not running yet. Then redrives the remaining records of the plan.

    Logs the result, and pushes how many records were redriven and how many were passed over. Fails if the redrive was stopped meanwhile.
    """

    @refusals_fail
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.retry.redrive import RedrivePhase, preview
        from tidemark.retry.redrive_text import markdown
        from tidemark.text.wording import escaped

        then = context["params"]["then"]
        if then == NOTHING:
            raise AirflowSkipException("dry run: the plan is stored, nothing is redriven")
        redrive, spec = _stored(context)
        if then == ASK and redrive.state in {RedrivePhase.PLANNED, RedrivePhase.STOPPED}:
            with _session(spec) as connection:
                body = markdown(preview(connection, redrive.redrive_id))
            subject = f"Redrive {redrive.redrive_id} of {escaped(redrive.consumer)}?"
            self.ask(context, Question(subject, body, _identity(redrive), ANSWER_WITHIN))
        return self._apply(context, redrive, spec, approved_by=None)

    @refusals_fail
    def answered(self, context: Context, plan: str, answer: Answer) -> dict[str, int]:
        redrive, spec = _stored(context)
        if plan != _identity(redrive):
            raise AirflowFailException(f"The answer was about {plan}, but this run's plan is {_identity(redrive)}. Nothing was changed.")
        if not answer.approved:
            raise AirflowSkipException(f"redrive {redrive.redrive_id} was not approved; nothing was redriven")
        return self._apply(context, redrive, spec, approved_by=answer.by)

    def _apply(self, context: Context, redrive: Redrive, spec: ConsumerSpec, *, approved_by: str | None) -> dict[str, int]:
        from tidemark.airflow.connections import resolve
        from tidemark.kafka.cluster import Cluster
        from tidemark.retry.pending import relay_at_end
        from tidemark.retry.redrive import apply

        number, connections = redrive.redrive_id, resolve(spec)
        by: dict[str, Any] = {"by": requester(context), "approved_by": approved_by}
        with _session(spec) as connection:
            result = apply(connection, Cluster(connections.kafka), spec_of, number, **by, on_progress=_Progress(self.log))
        _log(self.log, result)
        for obstacle in relay_at_end(connections, spec):
            self.log.warning("%s", obstacle)
        if result.redrive.planned:
            raise AirflowFailException(
                f"redrive {number} was stopped: {counted(result.redrive.planned, 'record')} left. Clear this task to continue the redrive."
            )
        return {"redriven": result.redrive.redriven, "passed_over": result.redrive.passed_over}


class StartDrainOperator(BaseOperator):
    """Starts a run ``redrive__<number>`` of the drain DAG and does not wait for it. Skipped if the records go to the first delay."""

    def execute(self, context: Context) -> None:
        if context["params"]["to"] != "now":
            raise AirflowSkipException("the records wait for their first delay")
        redrive, _ = _stored(context)
        raise start_run(DRAIN_DAG, f"redrive__{redrive.redrive_id}")


def _stored(context: Context) -> tuple[Redrive, ConsumerSpec]:
    """Returns this run's plan in its current state, and the consumer that the form names."""
    from tidemark.retry.redrive import of_run

    run, spec = context["dag_run"], spec_of(consumer_name(context["params"], own_consumer(context, REDRIVE)))
    with _session(spec) as connection:
        redrive = of_run(connection, run.dag_id, run.run_id)
    if redrive is None or redrive.group != spec.group:
        raise AirflowFailException(f"Run {run.run_id} has no plan for {spec.name}. Nothing was changed; clear the task `plan`.")
    return redrive, spec


def _identity(redrive: Redrive) -> str:
    """Returns the text that identifies the plan in the question that Airflow records."""
    return f"redrive {redrive.redrive_id}, digest {redrive.digest}"


class _Progress:
    """Logs the progress every `PROGRESS_EVERY_S`."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._logged_at = time.monotonic()

    def __call__(self, progress: Any) -> None:
        if time.monotonic() - self._logged_at >= PROGRESS_EVERY_S:
            self._logged_at = time.monotonic()
            self._log.info("progress redriven=%s passed_over=%s of=%s", progress.redriven, progress.passed_over, progress.records)


def _session(spec: ConsumerSpec) -> Any:
    from tidemark.airflow.connections import database_url
    from tidemark.db import session

    return session(database_url(spec), application="tidemark redrive")


def _log(log: Any, preview: Any) -> None:
    from tidemark.retry.redrive_text import lines

    for line in lines(preview):
        log.info("%s", line)


_DOC = """
Retries records that have failed permanently, for instance because the service is back or the records were edited
(`tidemark retries edit`).

| task | |
|---|---|
| plan | fixes the list of records; its log shows counts per error, and examples. Changes nothing |
| apply | waits for approval (*Required Actions*), if requested; then redrives the records. Skipped with *nothing* |
| drain | starts a run of `drain_retries`, which tries the records at once. Only with *now* |

`tidemark redrive list` shows all redrives. `tidemark redrive stop NUMBER` stops one after its current batch of records; clear `apply` to
continue it. Records that were loaded, discarded or withdrawn meanwhile are passed over. Who redrove what, when and why is kept permanently.

*ladder* sends a record to the first delay of its consumer (`retry: {delays: [5m, 30m]}`). *now* gives it one try in the next drain. A
drain validates what it loaded with the consumer's suite before it emits the asset event.
"""
