"""What the tasks of the DAG ``discard`` do. It stores no plan: an approved discard settles exactly the records that were shown. The
question contains the digest of their numbers, and the transaction that discards compares it."""

from __future__ import annotations

from datetime import timedelta

from tidemark.airflow.approvals.records_form import ASK, DISCARD_FIELDS, NOTHING, RecordsRequest, read_records
from tidemark.airflow.approvals.review import Answer, Question, Task
from tidemark.airflow.version_compat import AirflowSkipException
from tidemark.profiles import Profile
from tidemark.retry import admin
from tidemark.retry.redrive_text import selection_lines
from tidemark.roles import require
from tidemark.text.wording import counted, escaped

ANSWER_WITHIN = timedelta(hours=4)


def plan(task: Task) -> None:
    request = _request(task)
    task.log_lines(_lines(request, _selection(task, request)))


def question(task: Task) -> Question | None:
    then, request = task.params["then"], _request(task)
    if then == NOTHING:
        raise AirflowSkipException("dry run: nothing is discarded")
    selection = _selection(task, request) if then == ASK else None
    if selection is None or not selection.records:
        return None
    records = counted(selection.records, "record")
    body = "  \n".join(map(escaped, _lines(request, selection)))
    subject = f"Discard {records} of {escaped(request.spec.name)}?"
    return Question(subject, body, f"discard of {records}, digest {selection.digest}", ANSWER_WITHIN)


def apply(task: Task, answer: Answer | None) -> dict[str, int]:
    """Returns how many records were discarded."""
    request = _request(task)
    if answer is None and task.params["then"] == ASK:  # no record matched when somebody should have been asked; some may match by now
        return {"discarded": 0}
    if answer is not None and not answer.approved:
        raise AirflowSkipException("the discard was not approved; nothing was discarded")
    only = None if answer is None else answer.plan.rpartition(" ")[2]
    reason = request.reason if answer is None else f"{request.reason} (approved by {answer.by})"
    with task.session(request.spec) as connection:
        records = admin.discard(connection, request.spec.group, request.filter, reason=reason, by=task.requester, only=only)
    task.log.info("%s discarded", counted(records, "record"))
    return {"discarded": records}


def _request(task: Task) -> RecordsRequest:
    return read_records(task.params, task.conf, DISCARD_FIELDS, task.own)


def _selection(task: Task, request: RecordsRequest) -> admin.Selection:
    with task.session(request.spec) as connection:
        require(connection, Profile.OPERATOR)
        return admin.select_to_discard(connection, request.spec.group, request.filter)


def _lines(request: RecordsRequest, selection: admin.Selection) -> list[str]:
    return selection_lines(request.spec.name, request.filter, request.reason, selection)
