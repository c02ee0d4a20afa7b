"""All consumers in one table, worst first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tidemark.airflow.dags.consume import CONSUME, Declared, dag_id, zone_of
from tidemark.airflow.web.consumers import ask_each
from tidemark.airflow.web.dag_facts import read_dags
from tidemark.db import rows, statements, transaction
from tidemark.offsets import lag
from tidemark.offsets.health import NEVER_RUN, RANK, Dag, Health, Judgement, LedgerFacts, judge

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.airflow.web", "overview.sql")

TREND = timedelta(hours=3)
"""How much of the lag's history the table shows."""
LAG = ("records", "known_records", "seconds", "replay_records", "sampled_at")
"""What the table shows of a `Lag`."""


def groups(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """``{"groups": [...], "banners": [...]}``."""
    with ThreadPoolExecutor(1) as beside:  # the two halves take about as long as each other
        reading = beside.submit(read_dags, {name: dag_id(CONSUME, name) for name in consumers})
        answers = ask_each(consumers, lambda connection, specs: _ask(connection, specs, reading))
        dags = reading.result()
    silent = {name: banner for banner in answers.banners for name in banner["consumers"]}
    listed = [_row(one, answers.found.get(name), silent.get(name), dags.get(name)) for name, one in consumers.items()]
    listed.sort(key=lambda row: (RANK[row["health"]], row["consumer"]))
    return {"groups": listed, "banners": list(answers.banners), "most": lag.MOST}


def trends(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """``{"trends": {consumer: [records, ...]}}``: the lag of the last hours in steps of five minutes, oldest first."""

    def ask(connection: Connection, specs: Collection[ConsumerSpec]) -> dict[str, list[int]]:
        names = {spec.group: spec.name for spec in specs}
        with transaction(connection) as cur:
            cur.execute(SQL["trends"], {"groups": list(names), "period": TREND})
            return {names[row["group"]]: row["records"] for row in rows(cur)}

    return {"trends": ask_each(consumers, ask).found}


def _ask(connection: Connection, specs: Collection[ConsumerSpec], dags: Future[dict[str, Dag]]) -> dict[str, lag.GroupLag]:
    names = {spec.group: spec.name for spec in specs}

    def by_group() -> dict[str, Dag]:
        return {group: dags.result()[name] for group, name in names.items() if name in dags.result()}

    with transaction(connection) as cur:
        listed = lag.groups(cur, by_group, names)
    return {names[one.lag.group]: one for one in listed}


def _row(one: Declared, group: lag.GroupLag | None, silent: Mapping[str, Any] | None, dag: Dag | None) -> dict[str, Any]:
    spec = one.spec
    judged = _judged(one, group, silent, dag)
    return {
        **asdict(judged),
        "consumer": spec.name,
        "group": spec.group,
        "description": spec.description,
        "topics": list(spec.topics) or [spec.topic_pattern or ""],
        "table": spec.shown_tables,
        "owner": spec.airflow.owner,
        "tags": list(spec.airflow.tags),
        "dag_id": dag_id(CONSUME, spec.name),
        "schedule": spec.schedule and f"{spec.schedule} in {zone_of(spec)}",
        "problems": problems(one),
        "dag": dag and {"is_paused": dag.paused, "next_run": dag.next_run_at},
        **({} if group is None else _of_group(group)),
    }


def _judged(one: Declared, group: lag.GroupLag | None, silent: Mapping[str, Any] | None, dag: Dag | None) -> Judgement:
    if one.error is not None:
        return Judgement(Health.BAD_SPEC, "Its file has problems; runs fail until they are fixed.")
    if silent is not None:
        return Judgement(Health.UNREACHABLE, f"Database {silent['connection']}: {silent['problem'].rstrip('.')}.", silent["fix"])
    if group is None:
        return judge(NEVER_RUN, None, dag, LedgerFacts())
    return Judgement(group.lag.health, group.lag.why, group.lag.fix)


def _of_group(group: lag.GroupLag) -> dict[str, Any]:
    runs = group.runs
    return {
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


def problems(one: Declared) -> list[dict[str, Any]]:
    """The problems of a consumer's file."""
    found = [] if one.error is None else one.error.problems
    return [{"at": f"{each.file.name}:{each.line}:{each.column}", "message": each.message, "fix": each.fix} for each in found]
