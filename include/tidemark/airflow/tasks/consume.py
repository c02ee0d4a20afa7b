"""What the task ``consume`` does, in a consumer's DAG and in those for drains and rewinds."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context

from tidemark import project, waiting
from tidemark.airflow import connections
from tidemark.airflow.lineage import statistics
from tidemark.airflow.lineage.facets import Consumed
from tidemark.airflow.operators import ConsumeOperator, ProgressLog
from tidemark.airflow.tasks.validate import publishable, uses_keeper
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.driver.launch import DriverArguments, Progress, progress, run_attempt
from tidemark.driver.process import die_with_parent
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity, dag_run_planned
from tidemark.quality import unannounced, unjudged
from tidemark.retry.pending import relay_at_end
from tidemark.spec import ConsumerSpec


def run(operator: ConsumeOperator, context: Context, spec: ConsumerSpec, backfill_of: int | None) -> dict[str, Any]:
    """Runs an attempt to its end, with a driver unless there is nothing to read. Returns the attempt's id and counts."""
    die_with_parent()
    log, task_id, resolved = operator.log, operator.task_id, connections.resolve(spec)
    attempt_id = open_attempt(resolved.database_url, spec.group, _identity(context), backfill_of=backfill_of)
    topics = () if operator.drains else spec.topics
    addresses = resolved.kafka["bootstrap.servers"], resolved.database_url
    operator.consumed.append(Consumed(spec.group, attempt_id, spec.table_names, topics, *addresses))
    log.info("attempt begins group=%s attempt=%s try=%s", spec.group, attempt_id, context["ti"].try_number)
    waiting.watch()
    log_progress = ProgressLog(log, "progress attempt=%s committed=%s of=%s", "attempt_id", "records", "total")

    def on_progress(progress: Progress) -> None:
        if progress.planned:
            log_progress(progress)

    try:
        if consume(spec, resolved, attempt_id, None, drain=operator.drains):
            result = progress(resolved.database_url, attempt_id)
        else:
            result = run_attempt(
                DriverArguments(spec.name, attempt_id, project.consumers(), [project.transforms()], drain=operator.drains),
                resolved,
                on_log=operator.log_line,
                on_progress=on_progress,
                on_start=operator.remember_driver,
                with_keeper=uses_keeper(spec),
            )
    except TidemarkError:
        statistics.report_failed(spec, task_id, resolved.database_url, attempt_id)
        raise
    counts = statistics.counts_of(result)
    statistics.report(spec, task_id, counts)
    summary = {"attempt_id": attempt_id, **counts}
    fields = " ".join(f"{name}={value}" for name, value in summary.items() if value or name != "deleted")
    log.info("attempt is committed group=%s %s", spec.group, fields)
    if counts["retried"] or counts["failed"]:
        log.warning(
            "records not loaded group=%s retried=%s failed=%s; to see them: tidemark retries list %s",
            spec.group, counts["retried"], counts["failed"], spec.name,
        )  # fmt: skip
    for obstacle in relay_at_end(resolved, spec):
        log.warning("%s", obstacle)
    return summary


def leaves_nothing_to_do(spec: ConsumerSpec, attempt_id: int, *, announces: bool) -> bool:
    """Whether the DAG run has committed nothing, and earlier runs have left no rows to validate; ``announces``: nor to announce."""
    url = connections.database_url(spec)
    with session(url) as connection:
        with transaction(connection) as cur:
            if dag_run_planned(cur, attempt_id):
                return False
        if any(pending.running is None for pending in unjudged(connection, spec.group)):
            return False
    return not (announces and unannounced(url, spec.group, publishable(spec)).ranges)


def _identity(context: Context) -> TaskIdentity:
    ti = context["ti"]
    return TaskIdentity(ti.dag_id, ti.run_id, ti.task_id, ti.map_index if ti.map_index is not None else -1, ti.try_number)
