"""Builds one DAG for each consumer's file. Runs whenever Airflow parses DAG files, and reads only the consumers' files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk import DAG, Asset, get_parsing_context
from airflow.settings import TIMEZONE

from tidemark import project
from tidemark.airflow.access import AccessControl, access_of, problems, shared_access
from tidemark.airflow.operators import ConsumeOperator, PublishOperator, ValidateOperator
from tidemark.airflow.version_compat import DOUBLING, only_runs
from tidemark.spec import (
    AirflowSettings,
    ConsumerSpec,
    Objectives,
    OffsetReset,
    Problem,
    RetryOrder,
    RunMode,
    SpecInvalid,
    partial_spec,
    read_folder,
)
from tidemark.spec.checks import CONSUMER_NAME_LIMIT
from tidemark.spec.model import Access, Approval
from tidemark.spec.partial import UNKNOWN_TABLE
from tidemark.text.duration import format_duration
from tidemark.text.wording import counted, escaped

START = datetime(2024, 1, 1, tzinfo=UTC)
"""A fixed date in the past. With ``catchup=False`` a schedule begins with its next interval. Airflow takes a schedule's zone from it."""

ANY_RUN_BUT_BACKFILL = only_runs("scheduled", "manual", "operator_triggered", "asset_triggered", "asset_materialization")
"""All but ``backfill``: a run reads what is in the topics now, so backfilling past intervals makes no sense."""

MAX_RETRY_DELAY = timedelta(minutes=5)


def retrying(settings: AirflowSettings | None = None) -> dict[str, Any]:
    """A task's retry settings. With the defaults a task survives a broker or database outage of 12 minutes. Each delay doubles, up to
    `MAX_RETRY_DELAY`, and Airflow's jitter makes it up to twice as long."""
    settings = settings or AirflowSettings()
    return {
        "retries": settings.retries,
        "retry_delay": settings.retry_delay,
        "retry_exponential_backoff": DOUBLING,
        "max_retry_delay": max(settings.retry_delay, MAX_RETRY_DELAY),
    }


CONSUME, REWIND, REDRIVE, DISCARD = "consume", "rewind", "redrive", "discard"
"""Kinds of DAGs of one consumer, and their ids: ``rewind__orders``. The DAGs ``rewind``, ``redrive`` and ``discard`` are for all
consumers."""


def consume_dags() -> dict[str, DAG]:
    """Builds the DAGs, by id: one ``consume__<consumer>`` for each file in the consumers' folder. In a task, only the DAG of that task.

    An invalid file also gets a DAG, with the schedule, owner and tags that can still be read. The DAG's page lists the problems, and its
    runs fail with them. So one bad file does not disappear from the UI, and the other consumers keep running. `refuse_broken_files`
    raises the matching import error.
    """
    consumers = declared(CONSUME)
    specs = [consumer.spec for consumer in consumers]
    dags = [_dag(consumer.spec, consumer.error, access_of(consumer.spec, specs)) for consumer in consumers]
    return {dag.dag_id: dag for dag in dags}


def refuse_broken_files() -> None:
    """Raises `SpecInvalid` with the problems of all consumers' files, also those of an ``access`` that is not in force. Called from a DAG
    file of its own, so that Airflow's home page shows them as an import error."""
    consumers = declared()
    errors = [consumer.error for consumer in consumers if consumer.error]
    broken = [problem for error in errors for problem in error.problems]
    denied = [problem for consumer in consumers for problem in problems(consumer.spec)]
    if broken or denied:
        raise SpecInvalid(consumers=tuple(name for error in errors for name in error.consumers), problems=(*broken, *denied))


@dataclass(frozen=True, slots=True)
class DeclaredConsumer:
    """A consumer's file. With ``error``, ``spec`` holds the valid parts of an invalid file."""

    spec: ConsumerSpec
    error: SpecInvalid | None = None


def declared(kind: str = "") -> list[DeclaredConsumer]:
    """Reads the consumers' files. Invalid ones come first: if one has the DAG id of a valid one, the valid one wins. In a task, only the
    consumer whose DAG of this kind is running, if any."""
    own = get_parsing_context().dag_id
    if own is not None and not own.startswith(f"{kind}__"):
        return []
    good, bad = read_folder(project.consumers(), lambda name: own in (None, dag_id(kind, name)))
    return [*(DeclaredConsumer(partial_spec(error.problems[0].file), error) for error in bad), *map(DeclaredConsumer, good.values())]


def shared_dag(dag_id: str, tag: str, schedule: Any, **more: Any) -> DAG:
    """Builds a DAG that acts on all consumers by itself. It starts unpaused: otherwise nobody is alarmed, records are not retried, and
    archives and payloads grow without limit."""
    return DAG(
        dag_id=dag_id,
        schedule=schedule,
        start_date=START,
        catchup=False,
        max_active_runs=1,
        **ANY_RUN_BUT_BACKFILL,
        is_paused_upon_creation=False,
        tags=["tidemark", tag],
        default_args={"owner": "tidemark"},
        access_control=shared_access(consumer.spec for consumer in declared()),
        **more,
    )


def _dag(spec: ConsumerSpec, error: SpecInvalid | None, access: AccessControl | None) -> DAG:
    """Builds the DAG of a consumer. With ``error``, that of an invalid file: ``spec`` holds the valid parts, and the tasks fail at once."""
    settings = spec.airflow
    continuous = spec.run is RunMode.CONTINUOUS
    schedule = spec.run_for if continuous else spec.schedule
    runs = 2 if continuous else 1  # the next continuous run starts while the last one still runs, and takes over from it
    reads = "arrives" if continuous else "is in the topics when it starts"
    doc, tags = (_doc(spec), settings.tags) if error is None else (_problems(error), ("bad spec", *settings.tags))
    if denied := problems(spec):
        doc, tags = f"{_denied(denied)}\n\n{doc}", ("bad access", *tags)
    with DAG(
        dag_id=dag_id(CONSUME, spec.name),
        dag_display_name=f"{spec.name} (consume)",  # Airflow's search matches from the beginning of this name
        description=spec.description,
        doc_md=doc,
        schedule=schedule,
        start_date=START.replace(tzinfo=TIMEZONE if spec.timezone is None else ZoneInfo(spec.timezone)),
        catchup=False,
        max_active_runs=runs,
        **ANY_RUN_BUT_BACKFILL,
        tags=["tidemark", "consume", *tags],
        default_args={"owner": settings.owner},
        access_control=access,
    ) as dag:
        common: dict[str, Any] = {"owner": settings.owner, **retrying(settings)}
        if error is not None:
            common["retries"] = 0
        if settings.pool is not None:
            common["pool"] = settings.pool
        consuming: dict[str, Any] = {
            "task_id": "consume",
            "execution_timeout": settings.execution_timeout,
            "doc_md": f"Reads what {reads}, loads it, and commits the offsets together with the rows.",
            **common,
        }
        consume: Any
        if spec.members == 1:
            consume = ConsumeOperator(consumer=spec.name, **consuming)
        else:  # one Spark application per member; the map index is part of its group.instance.id
            consume = ConsumeOperator.partial(map_index_template="member {{ task.member }}", **consuming).expand_kwargs(
                [{"consumer": spec.name, "member": member} for member in range(spec.members)]
            )
        validate = ValidateOperator(
            task_id="validate",
            consumer=spec.name,
            doc_md="Validates exactly the ranges that this run committed.",
            **common,
        )
        consume >> validate
        if spec.table_names != (UNKNOWN_TABLE,):
            assets = [Asset(name=table) for table in spec.table_names]
            validate >> PublishOperator(task_id="publish", assets=assets, doc_md="Emits the asset events.", **common)
    return dag


def dag_id(kind: str, name: str) -> str:
    """Returns the id of a consumer's DAG, which is valid for any file name: an id that Airflow refuses would hide all DAGs."""
    valid_name = re.sub(r"[^\w.-]", "_", name)[:CONSUMER_NAME_LIMIT]
    return f"{kind}__{valid_name}"


def _doc(spec: ConsumerSpec) -> str:
    topics = ", ".join(f"`{topic}`" for topic in spec.topics) or f"topics that match `{_cell(spec.topic_pattern or '')}`"
    if spec.partitions is not None:
        topics = f"only the partitions `{spec.fixed}`"
    validation = "conservation check"
    if spec.validation:
        suites = ", ".join(f"`{suite}`" for suite in spec.suites.values())
        word = "suite" if len(spec.suites) == 1 else "suites"
        validation = f"{word} {suites} and {validation}; on a critical failure: {spec.validation.on_failure}"
    tables = ", ".join(f"`{table}`" for table in spec.table_names)
    rows = {
        "Group": f"`{spec.group}`",
        "Reads": f"{topics}, at most {counted(spec.batch.max_records, 'record')} per batch",
        "Runs": f"back to back, {format_duration(spec.run_for)} each"
        if spec.run is RunMode.CONTINUOUS
        else "to the end offsets seen at its start",
        "Members": f"{spec.members}, assigned by {', '.join(f'`{_cell(name)}`' for name in spec.assignment)}",
        "Starts at": _start(spec),
        **({"Schedule": f"{escaped(spec.schedule)} in {zone_of(spec)}"} if spec.schedule else {}),
        "Transform": f"`{spec.transform}`" if spec.transform else f"none: the fields of the {spec.format.value} values become columns",
        "Loads into": f"{tables}, offsets in the same transaction as the rows",
        "Retries": _ladder(spec),
        "Validated by": validation,
        **({"Objectives": _objectives(spec.slo)} if spec.slo else {}),
        "Rewinds": _approval(spec),
        **({"Access": _access(spec.access)} if spec.access else {}),
        "Asset" if len(spec.sinks) == 1 else "Assets": tables,
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        f"{spec.description or ''}\n\n| | |\n|---|---|\n{table}\n"
        f"`tidemark offsets {spec.name}` shows the group's positions. `tidemark consumers check {spec.name}` shows what is wrong with it.\n"
    ).lstrip()


def zone_of(spec: ConsumerSpec) -> str:
    """The zone of the consumer's schedule."""
    return spec.timezone or str(TIMEZONE.name)


def _start(spec: ConsumerSpec) -> str:
    if spec.offset_reset is None:
        return "the earliest record; fails if its position is no longer in the log"
    return "its position only; fails without one" if spec.offset_reset is OffsetReset.NONE else f"the {spec.offset_reset} record"


def _ladder(spec: ConsumerSpec) -> str:
    if not spec.retry.delays:
        return "none; a record that cannot be loaded fails at once"
    order = ", in order per key" if spec.retry.order is RetryOrder.KEY else ""
    return f"after {', '.join(map(format_duration, spec.retry.delays))}{order}; run by the DAG `drain_retries`"


def _approval(spec: ConsumerSpec) -> str:
    if spec.rewind.approval is Approval.NONE:
        return "without approval"
    return "with approval" if spec.rewind.own else "with approval by someone other than the requester"


def _objectives(slo: Objectives) -> str:
    limits = [f"{name} {format_duration(limit)}" for name, limit in (("lag", slo.lag), ("freshness", slo.freshness)) if limit is not None]
    if slo.failed is not None:
        limits.append(f"at most {counted(slo.failed, 'failed record')}")
    return f"{', '.join(limits)}; watched by the DAG `watch`"


def _access(access: Access) -> str:
    roles = {"edit": access.edit, "view": access.view}
    return "; ".join(f"{key}: {', '.join(map(escaped, names))}" for key, names in roles.items() if names) or "administrators only"


def _denied(denied: Sequence[Problem]) -> str:
    return f"The access that this consumer's file declares is not in force:\n\n{''.join(map(_problem, denied))}"


def _problems(error: SpecInvalid) -> str:
    return f"This consumer's file is invalid. Its runs fail until these problems are fixed:\n\n{''.join(map(_problem, error.problems))}"


def _problem(problem: Problem) -> str:
    """A problem as a list entry. Airflow's page joins the lines of a code block, so the error's own text cannot be shown as is."""
    text = f"{problem.message}: {problem.fix}" if problem.fix else problem.message
    return f"- `{problem.file.name}:{problem.line}:{problem.column}` {escaped(text)}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
