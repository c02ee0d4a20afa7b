"""All consumers in one table, worst first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tidemark.airflow.dags import CONSUME, Declared, dag_id
from tidemark.airflow.retries import DRAIN_DAG
from tidemark.airflow.web.condition import RANK, Condition, condition
from tidemark.airflow.web.consumers import ask_each
from tidemark.db import rows, statements, transaction

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.airflow.web", "overview.sql")

MOST = 10_000
"""Failed records are counted up to here."""


def groups(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """``{"groups": [...], "banners": [...]}``."""
    answers = ask_each(consumers, _ask)
    silent = {name: banner for banner in answers.banners for name in banner["consumers"]}
    airflow = _airflow([dag_id(CONSUME, name) for name in consumers])
    made = [_row(one, answers.found.get(name), silent.get(name), airflow.get(dag_id(CONSUME, name))) for name, one in consumers.items()]
    made.sort(key=lambda row: (RANK[row["condition"]], row["consumer"]))
    return {"groups": made, "banners": answers.banners, "most": MOST}


def _ask(connection: Connection, specs: Collection[ConsumerSpec]) -> dict[str, dict[str, Any]]:
    wanted = {"groups": [spec.group for spec in specs], "most": MOST, "drain": DRAIN_DAG}
    with transaction(connection) as cur:
        cur.execute(SQL["groups"], wanted)
        found = {row["group"]: row for row in rows(cur)}
        cur.execute(SQL["replaying"], wanted)
        for row in rows(cur):
            found[row["group"]]["replaying"] = row["partitions"]
    return {spec.name: found.get(spec.group, {}) for spec in specs}


def _row(one: Declared, found: Mapping[str, Any] | None, silent: Mapping[str, Any] | None, dag: Mapping[str, Any] | None) -> dict[str, Any]:
    spec = one.spec
    said = {
        "consumer": spec.name,
        "group": spec.group,
        "description": spec.description,
        "topics": list(spec.topics) or [spec.topic_pattern or ""],
        "table": spec.sink.table,
        "owner": spec.airflow.owner,
        "tags": list(spec.airflow.tags),
        "dag_id": dag_id(CONSUME, spec.name),
        "problems": problems(one),
        "dag": dag,
    }
    if silent is not None and one.error is None:
        return said | {"condition": Condition.UNREACHABLE, "why": f"Database {silent['connection']}: {silent['problem']}"}
    known = dict(found or {})
    state, why = condition(known, valid=one.error is None, dag_paused=None if dag is None else dag["is_paused"])
    return known | said | {"condition": state, "why": why}


def problems(one: Declared) -> list[dict[str, Any]]:
    """The problems of a consumer's file."""
    found = [] if one.error is None else one.error.problems
    return [{"at": f"{each.file.name}:{each.line}:{each.column}", "message": each.message, "fix": each.fix} for each in found]


def _airflow(dags: Collection[str]) -> dict[str, dict[str, Any]]:
    """What Airflow knows of these DAGs: paused, next run."""
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    columns = (DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after, DagModel.has_import_errors)
    with create_session() as airflow:
        found = airflow.execute(select(*columns).where(DagModel.dag_id.in_(dags))).all()
    return {dag: {"is_paused": paused, "next_run": None if paused else after, "import_errors": bad} for dag, paused, after, bad in found}
