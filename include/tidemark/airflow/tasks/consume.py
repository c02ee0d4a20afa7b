"""What the task ``consume`` does, in a consumer's DAG and in those for drains and rewinds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Never

from airflow.sdk import Context, timezone

from tidemark import project, waiting
from tidemark.airflow import connections
from tidemark.airflow.lineage import statistics
from tidemark.airflow.lineage.facets import Consumed
from tidemark.airflow.operators import ConsumeOperator, ProgressLog
from tidemark.airflow.tasks.validate import publishable, uses_keeper
from tidemark.airflow.triggers.attempt import AttemptTrigger, Fired, WakeReason
from tidemark.airflow.version_compat import AirflowTaskTimeout
from tidemark.connections import Connections
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.driver.launch import DriverArguments, Progress, outcome, progress, run_attempt
from tidemark.driver.on_cluster import FIRST_LOOK_S, DriverStopped, attempt_to_follow, examine, follow, next_look_s, start, stop
from tidemark.driver.process import die_with_parent
from tidemark.driver.submission import DEFAULT_START_LIMIT, cluster_settings
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity, dag_run_planned
from tidemark.quality import unannounced, unjudged
from tidemark.retry.pending import relay_at_end
from tidemark.spec import ConsumerSpec


def run(operator: ConsumeOperator, context: Context, spec: ConsumerSpec, of_rewind: int | None) -> dict[str, Any]:
    """Runs an attempt to its end, with a driver unless there is nothing to read. Returns the attempt's id and counts.

    If the driver of an earlier try still runs on a cluster, follows it instead.
    """
    die_with_parent()
    log, resolved, task = operator.log, connections.resolve(spec), _identity(context)
    cluster = cluster_settings(spec, resolved)
    followed = None if cluster is None else attempt_to_follow(resolved, spec.group, task, log.info, of_rewind=of_rewind)
    attempt_id = followed or open_attempt(resolved.database_url, spec.group, task, of_rewind=of_rewind)
    log.info("attempt begins group=%s attempt=%s try=%s", spec.group, attempt_id, context["ti"].try_number)
    waiting.watch()
    with _reported(operator, spec, resolved, attempt_id) as on_progress:
        arguments = DriverArguments(spec.name, attempt_id, project.consumers(), [project.transforms()], drain=operator.drains)
        if followed is None and consume(spec, resolved, attempt_id, None, drain=operator.drains):
            result = progress(resolved.database_url, attempt_id)
        elif cluster is None:
            result = run_attempt(
                arguments,
                resolved,
                on_log=operator.log_line,
                on_progress=on_progress,
                on_start=operator.remember_driver,
                with_keeper=uses_keeper(spec),
            )
        else:
            if followed is None:
                start(arguments, resolved, cluster, on_log=log.info, stopped=operator.was_killed)
            if operator.deferrable:
                limit = operator.execution_timeout
                _defer(operator, spec, attempt_id, FIRST_LOOK_S, 0.0, None if limit is None else str(timezone.utcnow() + limit))
            result = follow(
                attempt_id,
                resolved,
                cluster.start_limit,
                on_log=log.info,
                on_progress=on_progress,
                on_start=operator.remember_application,
                stopped=operator.was_killed,
            )
    return _summary(operator, spec, resolved, result)


def resume(
    operator: ConsumeOperator, context: Context, spec: ConsumerSpec, event: dict[str, Any], attempt_id: int, deadline: str | None
) -> dict[str, Any]:
    """Continues with a driver on a cluster once the trigger has fired: ends like `run`, or defers the task again."""
    die_with_parent()
    fired, resolved = Fired.of(event), connections.resolve(spec)
    cluster = cluster_settings(spec, resolved)
    limit = DEFAULT_START_LIMIT if cluster is None else cluster.start_limit
    with _reported(operator, spec, resolved, attempt_id):
        driver, problem = progress(resolved.database_url, attempt_id).driver, None
        if fired.why is WakeReason.TIMEOUT:
            timeout = AirflowTaskTimeout(f"attempt {attempt_id} ran into the task's execution_timeout")
            stop(resolved.database_url, attempt_id, timeout)
            raise timeout
        if fired.why is WakeReason.UNSEEN and driver is not None:
            operator.remember_application(driver.application)
            problem = None if driver.alive else examine(attempt_id, driver, fired.unseen_s, limit, operator.log.info)
            if problem is None:
                look_after_s, unseen_s = (FIRST_LOOK_S, 0.0) if driver.alive else (next_look_s(fired.unseen_s), fired.unseen_s)
                _defer(operator, spec, attempt_id, look_after_s, unseen_s, deadline)
        result = outcome(resolved.database_url, attempt_id, problem or DriverStopped(attempt_id=attempt_id))
    return _summary(operator, spec, resolved, result)


def _defer(
    operator: ConsumeOperator, spec: ConsumerSpec, attempt_id: int, look_after_s: float, unseen_s: float, deadline: str | None
) -> Never:
    trigger = AttemptTrigger(spec.connections.postgres, attempt_id, look_after_s, unseen_s, deadline)
    operator.defer(trigger=trigger, method_name="resume", kwargs={"attempt_id": attempt_id, "deadline": deadline})


@contextlib.contextmanager
def _reported(
    operator: ConsumeOperator, spec: ConsumerSpec, resolved: Connections, attempt_id: int
) -> Iterator[Callable[[Progress], None]]:
    """Notes the attempt for lineage, and reports its failure within the block. Returns what logs its progress."""
    topics = () if operator.drains else spec.topics
    addresses = resolved.kafka["bootstrap.servers"], resolved.database_url
    operator.consumed.append(Consumed(spec.group, attempt_id, spec.table_names, topics, *addresses))
    log_progress = ProgressLog(operator.log, "progress attempt=%s committed=%s of=%s", "attempt_id", "records", "total")

    def on_progress(progress: Progress) -> None:
        if progress.planned:
            log_progress(progress)

    try:
        yield on_progress
    except TidemarkError:
        statistics.report_failed(spec, operator.task_id, resolved.database_url, attempt_id)
        raise


def _summary(operator: ConsumeOperator, spec: ConsumerSpec, resolved: Connections, result: Progress) -> dict[str, Any]:
    log, counts = operator.log, statistics.counts_of(result)
    statistics.report(spec, operator.task_id, counts)
    summary = {"attempt_id": result.attempt_id, **counts}
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
