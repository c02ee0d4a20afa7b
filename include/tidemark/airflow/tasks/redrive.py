"""What the tasks of the DAG ``redrive`` do."""

from __future__ import annotations

from datetime import timedelta

from tidemark.airflow import connections
from tidemark.airflow.approvals.records_form import ASK, NOTHING, REDRIVE_FIELDS, consumer_name, read_records
from tidemark.airflow.approvals.review import Answer, Question, Task
from tidemark.airflow.operators import ProgressLog, spec_of
from tidemark.airflow.version_compat import AirflowFailException, AirflowSkipException
from tidemark.kafka.cluster import Cluster
from tidemark.profiles import Profile
from tidemark.retry import redrive as redrives
from tidemark.retry.pending import relay_at_end
from tidemark.retry.redrive import Destination, Redrive, RedrivePhase, RedriveRequest
from tidemark.retry.redrive_text import lines, markdown
from tidemark.roles import require
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import counted, escaped

ANSWER_WITHIN = timedelta(hours=4)


def stored(task: Task) -> tuple[Redrive, ConsumerSpec]:
    """Returns the run's plan in its current state, and the consumer that the form names. Raises `AirflowFailException` if the run has no
    plan for it."""
    spec = spec_of(consumer_name(task.params, task.own))
    with task.session(spec) as connection:
        redrive = redrives.of_run(connection, **task.run)
    if redrive is None or redrive.group != spec.group:
        raise AirflowFailException(f"Run {task.run['run_id']} has no plan for {spec.name}. Nothing was changed; clear the task `plan`.")
    return redrive, spec


def plan(task: Task) -> int:
    request, params = read_records(task.params, task.conf, REDRIVE_FIELDS, task.own), task.params
    with task.session(request.spec) as connection:
        require(connection, Profile.OPERATOR)
        redrive = redrives.of_run(connection, **task.run)
        if redrive is not None:
            preview = redrives.preview(connection, redrive.redrive_id)
        else:
            preview = redrives.plan(
                connection,
                RedriveRequest(
                    request.spec,
                    request.filter,
                    reason=request.reason,
                    by=task.requester,
                    destination=Destination(params["to"]) if params["to"] else None,
                    **{name: params[name] for name in ("limit", "per_second", "max_redrives")},
                    **task.run,
                ),
            )
    task.log_lines(lines(preview))
    return preview.redrive.redrive_id


def question(task: Task) -> Question | None:
    if task.params["then"] == NOTHING:
        raise AirflowSkipException("dry run: the plan is stored, nothing is redriven")
    redrive, spec = stored(task)
    if task.params["then"] != ASK or redrive.state not in {RedrivePhase.PLANNED, RedrivePhase.STOPPED}:
        return None
    with task.session(spec) as connection:
        body = markdown(redrives.preview(connection, redrive.redrive_id))
    return Question(
        f"Redrive {redrive.redrive_id} of {escaped(redrive.consumer)}?",
        body,
        task.identity(redrive.redrive_id, redrive.digest),
        ANSWER_WITHIN,
    )


def apply(task: Task, answer: Answer | None) -> dict[str, int]:
    """Redrives the remaining records of the plan. Fails if the redrive was stopped meanwhile."""
    redrive, spec = stored(task)
    number = redrive.redrive_id
    if answer is not None:
        answer.require_about(task.identity(redrive.redrive_id, redrive.digest))
        if not answer.approved:
            raise AirflowSkipException(f"redrive {number} was not approved; nothing was redriven")
    resolved = connections.resolve(spec)
    progress = ProgressLog(task.log, "progress redriven=%s passed_over=%s of=%s", "redriven", "passed_over", "records")
    with task.session(spec) as connection:
        result = redrives.apply(
            connection,
            Cluster(resolved.kafka),
            spec_of,
            number,
            by=task.requester,
            approved_by=None if answer is None else answer.by,
            on_progress=progress,
        )
    task.log_lines(lines(result))
    for obstacle in relay_at_end(resolved, spec):
        task.log.warning("%s", obstacle)
    left = result.redrive.planned
    if left:
        raise AirflowFailException(
            f"redrive {number} was stopped: {counted(left, 'record')} left. Clear this task to continue the redrive."
        )
    return {"redriven": result.redrive.redriven, "passed_over": result.redrive.passed_over}
