"""What only Airflow's own database knows of the consumers' DAGs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC
from functools import partial
from os.path import commonprefix
from typing import Any

from tidemark.offsets.health import Dag


def read_dags(wanted: Mapping[str, str]) -> dict[str, Dag]:
    """The DAGs by the keys of ``wanted``, whose values are DAG ids. Those that Airflow does not know are missing."""
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from sqlalchemy import func, select

    ours = partial(_begins_with, commonprefix(list(wanted.values())))  # noqa: RUF071 - of strings
    ended = select(func.max(DagRun.id)).where(ours(DagRun.dag_id), DagRun.state.in_([DagRunState.SUCCESS, DagRunState.FAILED]))
    last = select(DagRun.dag_id, DagRun.run_id, DagRun.end_date).where(DagRun.id.in_(ended.group_by(DagRun.dag_id)))
    columns = (DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after)
    with create_session() as airflow:
        models = {dag: (paused, after) for dag, paused, after in airflow.execute(select(*columns).where(ours(DagModel.dag_id)))}
        queued = set(airflow.scalars(select(DagRun.dag_id).where(ours(DagRun.dag_id), DagRun.state == DagRunState.QUEUED)))
        failed = {dag: (run, at) for dag, run, at in airflow.execute(last.where(DagRun.state == DagRunState.FAILED))}
        stuck = _stuck(airflow, ours)
    dags: dict[str, Dag] = {}
    for key, dag in wanted.items():
        if dag in models:
            paused, after = models[dag]
            run, at = failed.get(dag, (None, None))
            dags[key] = Dag(dag, paused, None if paused else after, dag in queued, run, at, stuck.get(dag, ""))
    return dags


def _begins_with(prefix: str, column: Any) -> Any:
    """Instead of a list of names: a statement with a thousand of them takes longer to write than to run."""
    return column.startswith(prefix, autoescape=True)


def _stuck(airflow: Any, ours: Callable[[Any], Any]) -> dict[str, str]:
    """What blocks runs until somebody acts, by DAG: a pool without slots, a missing pool, a logical date in the future."""
    from airflow.models.dagrun import DagRun
    from airflow.models.pool import Pool
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.state import DagRunState, TaskInstanceState
    from sqlalchemy import func, or_, select

    waiting = ours(TaskInstance.dag_id), TaskInstance.state.in_([TaskInstanceState.SCHEDULED, TaskInstanceState.QUEUED])
    pools = select(TaskInstance.dag_id, TaskInstance.pool, Pool.slots).outerjoin(Pool, Pool.pool == TaskInstance.pool).where(*waiting)
    going = ours(DagRun.dag_id), DagRun.state.in_([DagRunState.QUEUED, DagRunState.RUNNING])
    future = select(DagRun.dag_id, DagRun.logical_date).where(*going, DagRun.logical_date > func.now())
    stuck = {dag: f"waits for its logical date, {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" for dag, at in airflow.execute(future)}
    for dag, pool, slots in airflow.execute(pools.where(or_(Pool.slots == 0, Pool.slots.is_(None)))):
        stuck[dag] = f"waits for the pool {pool}, which {'does not exist' if slots is None else 'has no slots'}"
    return stuck
