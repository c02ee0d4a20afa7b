"""Facts about the consumers' DAGs that only Airflow's own database holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC
from functools import partial
from os.path import commonprefix
from typing import Any

from tidemark.offsets.health import Dag


def read_dags(dag_ids: Mapping[str, str]) -> dict[str, Dag]:
    """Returns the DAGs by the keys of ``dag_ids``. Omits DAGs that Airflow does not know."""
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from sqlalchemy import func, select

    of_project = partial(_begins_with, commonprefix(list(dag_ids.values())))  # noqa: RUF071 - of strings
    ended = select(func.max(DagRun.id)).where(of_project(DagRun.dag_id), DagRun.state.in_([DagRunState.SUCCESS, DagRunState.FAILED]))
    last = select(DagRun.dag_id, DagRun.run_id, DagRun.end_date).where(DagRun.id.in_(ended.group_by(DagRun.dag_id)))
    columns = (DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after)
    with create_session() as airflow:
        models = {dag: (paused, after) for dag, paused, after in airflow.execute(select(*columns).where(of_project(DagModel.dag_id)))}
        queued = set(airflow.scalars(select(DagRun.dag_id).where(of_project(DagRun.dag_id), DagRun.state == DagRunState.QUEUED)))
        failed = {dag: (run, at) for dag, run, at in airflow.execute(last.where(DagRun.state == DagRunState.FAILED))}
        stuck = _stuck(airflow, of_project)
    dags: dict[str, Dag] = {}
    for key, dag in dag_ids.items():
        if dag in models:
            paused, after = models[dag]
            run, at = failed.get(dag, (None, None))
            dags[key] = Dag(dag, paused, None if paused else after, dag in queued, run, at, stuck.get(dag, ""))
    return dags


def _begins_with(prefix: str, column: Any) -> Any:
    """Matches a prefix instead of a list of names: a statement with a thousand names takes longer to write than to run."""
    return column.startswith(prefix, autoescape=True)


def _stuck(airflow: Any, of_project: Callable[[Any], Any]) -> dict[str, str]:
    """Returns, by DAG, what blocks its runs until somebody acts: a pool without slots, a missing pool, a logical date in the future."""
    from airflow.models.dagrun import DagRun
    from airflow.models.pool import Pool
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.state import DagRunState, TaskInstanceState
    from sqlalchemy import func, or_, select

    waiting = of_project(TaskInstance.dag_id), TaskInstance.state.in_([TaskInstanceState.SCHEDULED, TaskInstanceState.QUEUED])
    pools = select(TaskInstance.dag_id, TaskInstance.pool, Pool.slots).outerjoin(Pool, Pool.pool == TaskInstance.pool).where(*waiting)
    running = of_project(DagRun.dag_id), DagRun.state.in_([DagRunState.QUEUED, DagRunState.RUNNING])
    future = select(DagRun.dag_id, DagRun.logical_date).where(*running, DagRun.logical_date > func.now())
    stuck = {dag: f"waits for its logical date, {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" for dag, at in airflow.execute(future)}
    for dag, pool, slots in airflow.execute(pools.where(or_(Pool.slots == 0, Pool.slots.is_(None)))):
        stuck[dag] = f"waits for the pool {pool}, which {'does not exist' if slots is None else 'has no slots'}"
    return stuck
