"""Builds one DAG for each consumer's file. Runs whenever Airflow parses DAG files, and reads only the consumers' files."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Asset, ExceptionRetryPolicy, RetryAction, RetryRule, get_parsing_context

from tidemark import project
from tidemark.airflow.operators import ConsumeOperator, PublishOperator, ValidateOperator
from tidemark.spec import (
    AirflowSettings,
    ConsumerSpec,
    OffsetReset,
    Order,
    Problem,
    RunMode,
    SpecInvalid,
    load_consumers,
    partial_spec,
    read_folder,
)
from tidemark.spec.checks import CONSUMER_NAME_LIMIT
from tidemark.spec.model import Approval
from tidemark.spec.partial import UNKNOWN_TABLE
from tidemark.text.duration import format_duration
from tidemark.text.wording import counted

START = datetime(2024, 1, 1, tzinfo=UTC)
"""A fixed date in the past. With ``catchup=False`` a schedule begins with its next interval."""

RUN_TYPES: Any = ("scheduled", "manual", "operator_triggered", "asset_triggered", "asset_materialization")  # Airflow's enum is private
"""All but ``backfill``: a run reads what is in the topics now, so backfilling past intervals makes no sense."""

RETRY_POLICY = ExceptionRetryPolicy(
    rules=[
        RetryRule(exception="tidemark.errors.Fenced", action=RetryAction.FAIL, reason="a newer attempt owns the partitions"),
        RetryRule(exception="tidemark.errors.Refused", action=RetryAction.FAIL, reason="the log says what to fix"),
        RetryRule(exception="tidemark.errors.Broken", action=RetryAction.FAIL, reason="an invariant does not hold; investigate"),
        RetryRule(exception="tidemark.errors.Unavailable", action=RetryAction.RETRY, reason="unavailable; committed work is kept"),
    ]
)

MAX_RETRY_DELAY = timedelta(minutes=5)


def retrying(settings: AirflowSettings | None = None) -> dict[str, Any]:
    """A task's retry settings. With the defaults a task survives a broker or database outage of 12 minutes. Each delay doubles, up to
    `MAX_RETRY_DELAY`, and Airflow's jitter makes it up to twice as long."""
    settings = settings or AirflowSettings()
    return {
        "retries": settings.retries,
        "retry_delay": settings.retry_delay,
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": max(settings.retry_delay, MAX_RETRY_DELAY),
        "retry_policy": RETRY_POLICY,
    }


def consume_dags() -> dict[str, DAG]:
    """The DAGs by id: one ``consume__<consumer>`` for each file in the consumers' folder. In a task, only the DAG of that task.

    An invalid file also gets a DAG, with the schedule, owner and tags that can still be read. The DAG's page lists the problems, and its
    runs fail with them. So one bad file does not disappear from the UI, and the other consumers keep running. `refuse_broken_files`
    raises the matching import error.
    """
    own = get_parsing_context().dag_id
    good, bad = read_folder(project.consumers(), lambda name: own in (None, _dag_id(name)))
    dags = [_dag(spec) for spec in good.values()]
    for error in bad:
        dags.append(_dag(partial_spec(error.problems[0].file), error))
    return {dag.dag_id: dag for dag in dags}


def refuse_broken_files() -> None:
    """Raises `SpecInvalid` with the problems of all consumers' files. Called from a DAG file of its own, so that Airflow's home page shows
    them as an import error."""
    if get_parsing_context().dag_id is None:
        load_consumers(project.consumers())


def form_consumers() -> dict[str, ConsumerSpec]:
    """The consumers that a form offers, by name. Empty in a task, which shows no form."""
    if get_parsing_context().dag_id is not None:
        return {}
    good, _ = read_folder(project.consumers())
    return good


def _dag(spec: ConsumerSpec, error: SpecInvalid | None = None) -> DAG:
    """The DAG of a consumer. With ``error``, the DAG of an invalid file: ``spec`` holds what could be read, and the tasks fail at once."""
    settings = spec.airflow
    continuous = spec.run is RunMode.CONTINUOUS
    schedule = spec.run_for if continuous else spec.schedule
    runs = 2 if continuous else 1  # the next continuous run starts while the last one still runs, and takes over from it
    reads = "arrives" if continuous else "is in the topics when it starts"
    doc, tags = (_doc(spec), settings.tags) if error is None else (_problems(error), ("bad spec", *settings.tags))
    with DAG(
        dag_id=_dag_id(spec.name),
        dag_display_name=f"{spec.name} (consume)",  # Airflow's search matches from the beginning of this name
        description=spec.description,
        doc_md=doc,
        schedule=schedule,
        start_date=START,
        catchup=False,
        max_active_runs=runs,
        allowed_run_types=RUN_TYPES,
        tags=["tidemark", "consume", *tags],
        default_args={"owner": settings.owner},
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
        if spec.sink.table != UNKNOWN_TABLE:
            asset = Asset(name=spec.sink.table)
            validate >> PublishOperator(task_id="publish", asset=asset, outlets=[asset], doc_md="Emits the asset event.", **common)
    return dag


def _dag_id(name: str) -> str:
    """The DAG's id, made valid whatever the file's name: an id that Airflow refuses would hide all DAGs."""
    named = re.sub(r"[^\w.-]", "_", name)[:CONSUMER_NAME_LIMIT]
    return f"consume__{named}"


def _doc(spec: ConsumerSpec) -> str:
    topics = ", ".join(f"`{topic}`" for topic in spec.topics) or f"topics that match `{_cell(spec.topic_pattern or '')}`"
    if spec.partitions is not None:
        topics = f"only the partitions `{spec.fixed}`"
    judged = "conservation check"
    if spec.validation:
        judged = f"suite `{spec.validation.suite}` and {judged}; on a critical failure: {spec.validation.on_failure}"
    rows = {
        "Group": f"`{spec.group}`",
        "Reads": f"{topics}, at most {counted(spec.batch.max_records, 'record')} per batch",
        "Runs": f"back to back, {format_duration(spec.run_for)} each"
        if spec.run is RunMode.CONTINUOUS
        else "to the end offsets seen at its start",
        "Members": f"{spec.members}, assigned by {', '.join(f'`{_cell(name)}`' for name in spec.assignment)}",
        "Starts at": _start(spec),
        "Transform": f"`{spec.transform}`",
        "Loads into": f"`{spec.sink.table}`, offsets in the same transaction as the rows",
        "Retries": _ladder(spec),
        "Validated by": judged,
        "Rewinds": _approval(spec),
        "Asset": f"`{spec.sink.table}`",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        f"{spec.description or ''}\n\n| | |\n|---|---|\n{table}\n"
        f"`tidemark offsets {spec.name}` shows the group's positions. `tidemark consumers check {spec.name}` shows what is wrong with it.\n"
    ).lstrip()


def _start(spec: ConsumerSpec) -> str:
    if spec.offset_reset is None:
        return "the earliest record; fails if its position is no longer in the log"
    return "its position only; fails without one" if spec.offset_reset is OffsetReset.NONE else f"the {spec.offset_reset} record"


def _ladder(spec: ConsumerSpec) -> str:
    if not spec.retry.delays:
        return "none; a record that cannot be loaded fails at once"
    order = ", in order per key" if spec.retry.order is Order.KEY else ""
    return f"after {', '.join(map(format_duration, spec.retry.delays))}{order}; run by the DAG `drain_retries`"


def _approval(spec: ConsumerSpec) -> str:
    if spec.rewind.approval is Approval.NONE:
        return "without approval"
    return "with approval" if spec.rewind.own else "with approval by someone other than the requester"


def _problems(error: SpecInvalid) -> str:
    return f"This consumer's file is invalid. Its runs fail until these problems are fixed:\n\n{''.join(map(_problem, error.problems))}"


def _problem(problem: Problem) -> str:
    """A problem as a list entry. Airflow's page joins the lines of a code block, so the error's own text cannot be shown as is."""
    text = f"{problem.message}: {problem.fix}" if problem.fix else problem.message
    return f"- `{problem.file.name}:{problem.line}:{problem.column}` {_plain(text)}\n"


def _plain(text: str) -> str:
    """Escapes Markdown, so that the asterisks of a schedule stay asterisks."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
