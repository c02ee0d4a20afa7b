"""All consumers in one table, worst first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tidemark.airflow.dags import CONSUME, Declared, dag_id, zone_of
from tidemark.airflow.retries import DRAIN_DAG
from tidemark.airflow.web.condition import RANK, Condition, condition
from tidemark.airflow.web.consumers import ask_each
from tidemark.db import rows, statements, transaction
from tidemark.offsets import lag
from tidemark.offsets.verdict import Schedule

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.airflow.web", "overview.sql")

MOST = 10_000
"""Failed records are counted up to here."""
TREND = timedelta(hours=3)
"""How much of the lag's history the table shows."""
LAG = ("verdict", "why", "records", "known_records", "seconds", "replay_records", "sampled_at")
"""What the table shows of a `Lag`."""


def groups(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """``{"groups": [...], "banners": [...]}``."""
    airflow = _airflow([dag_id(CONSUME, name) for name in consumers])
    schedules = {one.spec.group: schedule(dag_id(CONSUME, name), airflow) for name, one in consumers.items()}
    with ThreadPoolExecutor(1) as beside:  # each half takes as long as the other
        asked = beside.submit(ask_each, consumers, lambda connection, specs: _lags(connection, specs, schedules))
        answers = ask_each(consumers, _ask)
        lags = asked.result()
    for name, found in lags.found.items():
        answers.found.setdefault(name, {})["lag"] = found
    banners = {banner["connection"]: banner for banner in (*lags.banners, *answers.banners)}
    silent = {name: banner for banner in banners.values() for name in banner["consumers"]}
    made = [_row(one, answers.found.get(name), silent.get(name), airflow.get(dag_id(CONSUME, name))) for name, one in consumers.items()]
    made.sort(key=lambda row: (RANK[row["condition"]], row["consumer"]))
    return {"groups": made, "banners": list(banners.values()), "most": MOST}


def trends(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """``{"trends": {consumer: [records, ...]}}``: the lag of the last hours in steps of five minutes, oldest first."""

    def ask(connection: Connection, specs: Collection[ConsumerSpec]) -> dict[str, list[int]]:
        names = {spec.group: spec.name for spec in specs}
        with transaction(connection) as cur:
            cur.execute(SQL["trends"], {"groups": list(names), "period": TREND})
            return {names[row["group"]]: row["records"] for row in rows(cur)}

    return {"trends": ask_each(consumers, ask).found}


def _ask(connection: Connection, specs: Collection[ConsumerSpec]) -> dict[str, dict[str, Any]]:
    names = [spec.group for spec in specs]
    wanted = {"groups": names, "most": MOST, "drain": DRAIN_DAG}
    with transaction(connection) as cur:
        cur.execute(SQL["groups"], wanted)
        found = {row["group"]: row for row in rows(cur)}
    return {spec.name: found.get(spec.group, {}) for spec in specs}


def _lags(connection: Connection, specs: Collection[ConsumerSpec], schedules: Mapping[str, Schedule | None]) -> dict[str, lag.Lag]:
    names = {spec.group: spec.name for spec in specs}
    known = {name: found_schedule for name, found_schedule in schedules.items() if found_schedule is not None}
    with transaction(connection) as cur:
        found = [one.lag for one in lag.groups(cur, known, names)]
    return {names[one.group]: one for one in found if one.sampled_at is not None}


def _row(one: Declared, found: Mapping[str, Any] | None, silent: Mapping[str, Any] | None, dag: Mapping[str, Any] | None) -> dict[str, Any]:
    spec = one.spec
    said = {
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
        "dag": dag,
    }
    if silent is not None and one.error is None:
        return said | {"condition": Condition.UNREACHABLE, "why": f"Database {silent['connection']}: {silent['problem']}"}
    known = dict(found or {})
    state, why = condition(known, valid=one.error is None, dag_paused=None if dag is None else dag["is_paused"])
    behind = known.pop("lag", None)
    return known | said | {"condition": state, "why": why, "lag": behind and {name: getattr(behind, name) for name in LAG}}


def schedule(dag: str, airflow: Mapping[str, Mapping[str, Any]]) -> Schedule | None:
    """A DAG's schedule for the verdict on its lag; None if Airflow does not know the DAG."""
    found = airflow.get(dag)
    return found and Schedule(dag, found["is_paused"], found["next_run"], found["queued"])  # type: ignore[return-value]


def problems(one: Declared) -> list[dict[str, Any]]:
    """The problems of a consumer's file."""
    found = [] if one.error is None else one.error.problems
    return [{"at": f"{each.file.name}:{each.line}:{each.column}", "message": each.message, "fix": each.fix} for each in found]


def _airflow(dags: Collection[str]) -> dict[str, dict[str, Any]]:
    """What Airflow knows of these DAGs: paused, next run, whether a run waits to start."""
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from sqlalchemy import select

    columns = (DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after)
    with create_session() as airflow:
        found = airflow.execute(select(*columns).where(DagModel.dag_id.in_(dags))).all()
        queued = set(airflow.scalars(select(DagRun.dag_id).where(DagRun.dag_id.in_(dags), DagRun.state == DagRunState.QUEUED)))
    return {dag: {"is_paused": paused, "next_run": None if paused else after, "queued": dag in queued} for dag, paused, after in found}
