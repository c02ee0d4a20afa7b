"""The DAG ``discard``, and ``discard__<consumer>`` for consumers with ``access``: settles failed records, chosen in a form, without
loading them.

    plan     checks the form, logs counts and examples
    apply    asks for approval if the form says so; then discards the records

An approved discard settles exactly the records that were shown: the question contains the digest of their numbers, and the transaction
that discards compares it. Every task can be retried. Nothing is left to discard then, if the first try committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, Context, Param
from airflow.sdk.exceptions import AirflowSkipException

from tidemark.airflow.approvals.form import Answer, ApprovalOperator, Question, manual_dags, manual_only, own_consumer, requester
from tidemark.airflow.approvals.records_form import RECORDS_FIELDS, WHY, RecordsRequest, field, read_records, reason_field, records_fields
from tidemark.airflow.dags.consume import DISCARD, retrying
from tidemark.airflow.operators import refusals_fail
from tidemark.retry.filter import RecordState
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import counted, escaped

if TYPE_CHECKING:
    from tidemark.retry.admin import Selection

APPLY, ASK, NOTHING = "apply", "ask", "nothing"
THEN = {APPLY: "discard the records", ASK: "ask for approval first", NOTHING: "nothing (dry run)"}
STATES = (RecordState.FAILED, RecordState.WAITING, RecordState.HELD)
ANSWER_WITHIN = timedelta(hours=4)

FIELDS = (*RECORDS_FIELDS, "then", "reason")
"""The keys of the form, and of a REST client's conf."""


def discard_dags() -> dict[str, DAG]:
    """The DAGs by id: ``discard`` for all consumers, and ``discard__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return manual_dags(DISCARD, _dag)


def _dag(good: Sequence[ConsumerSpec], own: str | None, **more: Any) -> DAG:
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    description = "Discard failed records: choose them in a form, review the plan, apply it."
    with DAG(schedule=None, **manual_only(_form(good, own), "retries", description=description, doc_md=_DOC, **more)) as dag:
        plan = PlanDiscardOperator(task_id="plan", doc_md="Logs which records match. Changes nothing.", **common)
        apply = ApplyDiscardOperator(task_id="apply", doc_md="Asks for approval, if requested; then discards the records.", **common)
        plan >> apply
    return dag


def _form(good: Sequence[ConsumerSpec], own: str | None) -> dict[str, Param]:
    return {
        **records_fields(good, own, "discard", STATES, "If empty: all of these. At least one field must choose records."),
        "then": field(
            "After the plan", "*ask* discards exactly the records shown.", "string", ASK, WHY, enum=list(THEN), values_display=THEN
        ),
        "reason": reason_field("test flights of last week"),
    }


class PlanDiscardOperator(BaseOperator):
    """Checks the form and logs the matching records."""

    @refusals_fail
    def execute(self, context: Context) -> None:
        request = _request(context)
        _log(self.log, request, _selection(request))


class ApplyDiscardOperator(ApprovalOperator):
    """Asks for approval if the form says ``ask`` and records match. Then discards the records, and pushes how many."""

    @refusals_fail
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.retry.redrive_text import selection_lines

        then, request = context["params"]["then"], _request(context)
        if then == NOTHING:
            raise AirflowSkipException("dry run: nothing is discarded")
        if then == ASK:
            selection = _selection(request)
            if not selection.records:
                return {"discarded": 0}
            body = "  \n".join(map(escaped, selection_lines(request.spec.name, request.filter, request.reason, selection)))
            subject = f"Discard {counted(selection.records, 'record')} of {escaped(request.spec.name)}?"
            identity = f"discard of {counted(selection.records, 'record')}, digest {selection.digest}"
            self.ask(context, Question(subject, body, identity, ANSWER_WITHIN))
        return self._apply(context, request)

    @refusals_fail
    def answered(self, context: Context, plan: str, answer: Answer) -> dict[str, int]:
        if not answer.approved:
            raise AirflowSkipException("the discard was not approved; nothing was discarded")
        return self._apply(context, _request(context), only=plan.rpartition(" ")[2], approved_by=answer.by)

    def _apply(
        self, context: Context, request: RecordsRequest, *, only: str | None = None, approved_by: str | None = None
    ) -> dict[str, int]:
        from tidemark.retry.admin import discard

        reason = request.reason if approved_by is None else f"{request.reason} (approved by {approved_by})"
        with _session(request.spec) as connection:
            records = discard(connection, request.spec.group, request.filter, reason=reason, by=requester(context), only=only)
        self.log.info("%s discarded", counted(records, "record"))
        return {"discarded": records}


def read_form(params: Mapping[str, Any], conf: Mapping[str, Any], own: str | None = None) -> RecordsRequest:
    """Checks and parses the form. Raises as `read_records` does."""
    return read_records(params, conf, FIELDS, own)


def _request(context: Context) -> RecordsRequest:
    return read_form(context["params"], context["dag_run"].conf or {}, own_consumer(context, DISCARD))


def _selection(request: RecordsRequest) -> Selection:
    from tidemark.profiles import Profile
    from tidemark.retry.admin import select_to_discard
    from tidemark.roles import require

    with _session(request.spec) as connection:
        require(connection, Profile.OPERATOR)
        return select_to_discard(connection, request.spec.group, request.filter)


def _session(spec: ConsumerSpec) -> Any:
    from tidemark.airflow.connections import database_url
    from tidemark.db import session

    return session(database_url(spec), application="tidemark discard")


def _log(log: Any, request: RecordsRequest, selection: Selection) -> None:
    from tidemark.retry.redrive_text import selection_lines

    for line in selection_lines(request.spec.name, request.filter, request.reason, selection):
        log.info("%s", line)


_DOC = """
Settles waiting, held or failed records without loading them. They stay in the table and are never tried again, unless you redrive them
(state *DISCARDED*).

| task | |
|---|---|
| plan | its log shows counts per error, and examples. Changes nothing |
| apply | waits for approval (*Required Actions*), if requested; then discards the records. Skipped with *nothing* |

If other records match at the time of the answer, none is discarded. `tidemark retries actions CONSUMER` shows who discarded what, when and
why. Records are edited with `tidemark retries edit` only, because Airflow stores and shows what is typed in a form.
"""
