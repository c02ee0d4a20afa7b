"""All consumers in one table, worst first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from tidemark.airflow.dags.consume import CONSUME, DeclaredConsumer, dag_id, zone_of
from tidemark.airflow.web.consumers import ask_each
from tidemark.airflow.web.dag_facts import read_dags
from tidemark.db import Connection, rows, statements, transaction
from tidemark.offsets import lag
from tidemark.offsets.health import NEVER_RUN, RANK, Dag, Health, Judgement, LedgerFacts, judge
from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.airflow.web", "overview.sql")

TREND = timedelta(hours=3)
"""The period of the lag's trend in the table."""
LAG = ("records", "known_records", "seconds", "replay_records", "sampled_at")
"""The fields of a `Lag` in the table."""


def groups(consumers: Mapping[str, DeclaredConsumer]) -> dict[str, Any]:
    """Returns ``{"groups": [...], "banners": [...]}``."""
    with ThreadPoolExecutor(1) as executor:  # the two halves take about as long as each other
        dags_future = executor.submit(read_dags, {name: dag_id(CONSUME, name) for name in consumers})
        answers = ask_each(consumers, lambda connection, specs: _read_lags(connection, specs, dags_future))
        dags = dags_future.result()
    silent = {name: banner for banner in answers.banners for name in banner["consumers"]}
    group_rows = [_row(consumer, answers.by_consumer.get(name), silent.get(name), dags.get(name)) for name, consumer in consumers.items()]
    group_rows.sort(key=lambda row: (RANK[row["health"]], row["consumer"]))
    return {"groups": group_rows, "banners": list(answers.banners), "most": lag.MOST}


def trends(consumers: Mapping[str, DeclaredConsumer]) -> dict[str, Any]:
    """Returns ``{"trends": {consumer: [records, ...]}}``: the lag of the last hours in steps of five minutes, oldest first."""

    def ask(connection: Connection, specs: Collection[ConsumerSpec]) -> dict[str, list[int]]:
        names = {spec.group: spec.name for spec in specs}
        with transaction(connection) as cur:
            cur.execute(SQL["trends"], {"groups": list(names), "period": TREND})
            return {names[row["group"]]: row["records"] for row in rows(cur)}

    return {"trends": ask_each(consumers, ask).by_consumer}


def _read_lags(connection: Connection, specs: Collection[ConsumerSpec], dags: Future[dict[str, Dag]]) -> dict[str, dict[str, Any]]:
    names = {spec.group: spec.name for spec in specs}

    def by_group() -> dict[str, Dag]:
        return {group: dags.result()[name] for group, name in names.items() if name in dags.result()}

    with transaction(connection) as cur:
        return {names[group.lag.group]: _group_columns(group) for group in lag.each_group(cur, by_group, names)}


def _row(
    consumer: DeclaredConsumer, group_columns: dict[str, Any] | None, silent: Mapping[str, Any] | None, dag: Dag | None
) -> dict[str, Any]:
    spec = consumer.spec
    columns = group_columns or {}
    if (judgement := _judgement(consumer, group_columns is not None, silent, dag)) is not None:
        columns = columns | {"health": judgement.health, "why": judgement.why, "fix": judgement.fix}
    return {
        **columns,
        "fix": columns["fix"].replace("NAME", spec.name),
        "consumer": spec.name,
        "group": spec.group,
        "description": spec.description,
        "topics": spec.topics or (spec.topic_pattern or "",),
        "table": spec.shown_tables,
        "owner": spec.airflow.owner,
        "tags": spec.airflow.tags,
        "dag_id": dag_id(CONSUME, spec.name),
        "schedule": spec.schedule and f"{spec.schedule} in {zone_of(spec)}",
        "problems": problems(consumer),
        "dag": dag and {"is_paused": dag.paused, "next_run": dag.next_run_at},
    }


def _judgement(consumer: DeclaredConsumer, has_run: bool, silent: Mapping[str, Any] | None, dag: Dag | None) -> Judgement | None:
    """Returns the judgement of a consumer whose facts are not in its database."""
    if consumer.error is not None:
        return Judgement(Health.BAD_SPEC, "Its file has problems; runs fail until they are fixed.")
    if silent is not None:
        return Judgement(Health.UNREACHABLE, f"Database {silent['connection']}: {silent['problem'].rstrip('.')}.", silent["fix"])
    return None if has_run else judge(NEVER_RUN, None, dag, LedgerFacts())


def _group_columns(group: lag.GroupLag) -> dict[str, Any]:
    runs = group.runs
    return {
        "health": group.lag.health,
        "why": group.lag.why,
        "fix": group.lag.fix,
        "partitions": group.lag.partitions,
        "waiting": group.ledger.retrying,
        "failed": group.ledger.failed,
        "blocked_by": group.ledger.blocked_by,
        "validation_id": group.validation_id,
        "verdict": group.verdict,
        "committed_at": group.lag.committed_at,
        "attempt_state": runs.state,
        "attempt_id": runs.attempt_id,
        "run_id": runs.run_id,
        "started_at": runs.began_at,
        "ended_at": runs.ended_at,
        "lag": None if group.lag.sampled_at is None else {name: getattr(group.lag, name) for name in LAG},
    }


def problems(consumer: DeclaredConsumer) -> list[dict[str, Any]]:
    """Returns the problems of a consumer's file."""
    file_problems = [] if consumer.error is None else consumer.error.problems
    return [
        {"at": f"{problem.file.name}:{problem.line}:{problem.column}", "message": problem.message, "fix": problem.fix}
        for problem in file_problems
    ]
