"""DAGs made from consumers' files. Runs whenever Airflow parses: reads the files, nothing else."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Asset, ExceptionRetryPolicy, RetryAction, RetryRule

from tidemark import project
from tidemark.airflow.operators import ConsumeOperator, PublishOperator, ValidateOperator
from tidemark.spec import AirflowSettings, ConsumerSpec, Problem, Run, SpecInvalid, read_folder
from tidemark.spec.checks import CONSUMER_NAME_LIMIT
from tidemark.spec.duration import format_duration

START = datetime(2024, 1, 1, tzinfo=UTC)
"""Long ago and always the same: with ``catchup=False`` a schedule begins with its next interval."""

RETRY_POLICY = ExceptionRetryPolicy(
    rules=[
        RetryRule(exception="tidemark.errors.Fenced", action=RetryAction.FAIL, reason="a newer attempt owns the partitions"),
        RetryRule(exception="tidemark.errors.Refused", action=RetryAction.FAIL, reason="somebody has to mend what is named in the log"),
        RetryRule(exception="tidemark.errors.Broken", action=RetryAction.FAIL, reason="an invariant does not hold; somebody has to look"),
        RetryRule(exception="tidemark.errors.Unavailable", action=RetryAction.RETRY, reason="something was away; what is committed stays"),
    ]
)

MAX_RETRY_DELAY = timedelta(minutes=5)


def retrying(settings: AirflowSettings | None = None) -> dict[str, Any]:
    """How often a task is tried again, and when. With the default settings a broker or database may be away for 12 minutes; delays are
    doubled up to `MAX_RETRY_DELAY`, and Airflow makes each up to twice as long."""
    settings = settings or AirflowSettings()
    return {
        "retries": settings.retries,
        "retry_delay": settings.retry_delay,
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": max(settings.retry_delay, MAX_RETRY_DELAY),
        "retry_policy": RETRY_POLICY,
    }


def consume_dags() -> dict[str, DAG]:
    """One DAG ``consume__<consumer>`` for each file in the consumers' folder, by id.

    A file with problems makes a DAG all the same, without a schedule: its page tells the problems, and its task fails with them. So one
    bad file neither hides itself nor takes the others along.
    """
    good, bad = read_folder(project.consumers())
    dags = [_bad_dag(name, error) for error in bad for name in error.consumers] + [_dag(spec) for spec in good.values()]
    return {dag.dag_id: dag for dag in dags}


def _dag(spec: ConsumerSpec) -> DAG:
    settings = spec.airflow
    continuous = spec.run is Run.CONTINUOUS
    schedule = spec.run_for if continuous else spec.schedule
    runs = 2 if continuous else 1  # of continuous ones the next starts beside the last, and takes over from it
    reads = "comes" if continuous else "is in the topics when it starts"
    with DAG(**_common(spec.name, _doc(spec), settings, runs), schedule=schedule, description=spec.description) as dag:
        common: dict[str, Any] = {"owner": settings.owner, **retrying(settings)}
        if settings.pool is not None:
            common["pool"] = settings.pool
        asset = Asset(name=spec.sink.table)
        consuming: dict[str, Any] = {
            "task_id": "consume",
            "execution_timeout": settings.execution_timeout,
            "doc_md": f"Reads what {reads}, loads it, and commits offsets with the rows.",
            **common,
        }
        consume: Any
        if spec.members == 1:
            consume = ConsumeOperator(consumer=spec.name, **consuming)
        else:  # one Spark application a member; the map index is its seat in the group
            consume = ConsumeOperator.partial(map_index_template="member {{ task.member }}", **consuming).expand_kwargs(
                [{"consumer": spec.name, "member": member} for member in range(spec.members)]
            )
        validate = ValidateOperator(
            task_id="validate",
            consumer=spec.name,
            doc_md="Judges exactly the ranges that this run committed.",
            **common,
        )
        publish = PublishOperator(task_id="publish", asset=asset, outlets=[asset], doc_md="Emits the asset event.", **common)
        consume >> validate >> publish
    return dag


def _bad_dag(name: str, error: SpecInvalid) -> DAG:
    settings = AirflowSettings(tags=("bad spec",))
    doc = f"This consumer's file has problems; the DAG fails until they are mended.\n\n{''.join(map(_problem, error.problems))}"
    named = re.sub(r"[^\w.-]", "_", name)[:CONSUMER_NAME_LIMIT]  # a file may have any name; one that Airflow refuses would hide all DAGs
    with DAG(**_common(named, doc, settings), schedule=None) as dag:
        ConsumeOperator(task_id="consume", consumer=name, owner=settings.owner, retries=0, doc_md="Tells the problems.")
    return dag


def _common(name: str, doc: str, settings: AirflowSettings, runs: int = 1) -> dict[str, Any]:
    return {
        "dag_id": f"consume__{name}",
        "doc_md": doc,
        "tags": ["tidemark", "consume", *settings.tags],
        "start_date": START,
        "catchup": False,
        "max_active_runs": runs,
        "default_args": {"owner": settings.owner},
    }


def _doc(spec: ConsumerSpec) -> str:
    topics = ", ".join(f"`{topic}`" for topic in spec.topics) or f"topics that match `{_cell(spec.topic_pattern or '')}`"
    judged = f"the suite `{spec.validation.suite}` and the conservation check" if spec.validation else "the conservation check"
    rows = {
        "Group": f"`{spec.group}`",
        "Reads": f"{topics}, at most {spec.batch.max_records:,} records a batch",
        "Runs": f"one after the other, {format_duration(spec.run_for)} each" if spec.run is Run.CONTINUOUS else "to the ends that it finds",
        "Members": f"{spec.members}, partitions by {', '.join(f'`{_cell(name)}`' for name in spec.assignment)}",
        "Transform": f"`{spec.transform}`",
        "Loads": f"`{spec.sink.table}`, offsets in the transaction of the rows",
        "Judged by": judged,
        "Announced as": f"asset `{spec.sink.table}`",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        f"{spec.description or ''}\n\n| | |\n|---|---|\n{table}\n"
        f"`tidemark offsets {spec.name}` shows where the group stands, `tidemark consumers check {spec.name}` what is wrong with it.\n"
    ).lstrip()


def _problem(problem: Problem) -> str:
    """One entry of a list: Airflow's page joins the lines of a code block, so the text of the error cannot be shown as it is."""
    text = f"{problem.message}: {problem.fix}" if problem.fix else problem.message
    return f"- `{problem.file.name}:{problem.line}:{problem.column}` {_plain(text)}\n"


def _plain(text: str) -> str:
    """Text in which Markdown sees no marks: the stars of a schedule stay stars."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
