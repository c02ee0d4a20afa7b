"""What differs between Airflow 3.1, 3.2 and 3.3. The rest of the package uses names that all of them have, and the names below.

A task that asks a person is parked in 3.3; before, it waits in a triggerer. Tasks of Airflow 3.0 cannot ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Never

from airflow import __version__
from airflow.sdk import BaseOperator, timezone
from airflow.utils.types import DagRunType

_IS_3_1 = __version__.startswith("3.1.")

if TYPE_CHECKING or not _IS_3_1:
    from airflow.sdk import AssetOrTimeSchedule, BaseBranchOperator, CronTriggerTimetable
    from airflow.sdk.exceptions import (
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
        DagRunTriggerException,
        DownstreamTasksSkipped,
    )
    from airflow.sdk.observability import stats
else:
    from airflow.exceptions import (
        AirflowFailException,
        AirflowNotFoundException,
        AirflowSkipException,
        AirflowTaskTimeout,
        DagRunTriggerException,
        DownstreamTasksSkipped,
    )
    from airflow.providers.standard.operators.branch import BaseBranchOperator
    from airflow.stats import Stats as stats
    from airflow.timetables.assets import AssetOrTimeSchedule
    from airflow.timetables.trigger import CronTriggerTimetable

__all__ = [
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowSkipException",
    "AirflowTaskTimeout",
    "AssetOrTimeSchedule",
    "BaseBranchOperator",
    "CronTriggerTimetable",
    "DagRunTriggerException",
    "DownstreamTasksSkipped",
    "stats",
]

_RUN_TYPES = {run_type.value for run_type in DagRunType}
DOUBLING: Any = True if _IS_3_1 else 2.0
"""``retry_exponential_backoff`` of tasks whose retry delay doubles."""


def only_runs(*types: str) -> dict[str, Any]:
    """A DAG's argument that allows these types of runs only, without those that this Airflow lacks. Airflow 3.1 allows all types."""
    return {} if _IS_3_1 else {"allowed_run_types": [name for name in types if name in _RUN_TYPES]}


def await_answer(
    operator: BaseOperator, ti_id: Any, options: Sequence[str], defaults: Sequence[str], within: timedelta, kwargs: Mapping[str, Any]
) -> Never:
    """Ends this process of a task until somebody has answered its question, or ``within`` has passed. Then ``execute_complete`` gets the
    answer and ``kwargs``."""
    try:
        from airflow.sdk.exceptions import TaskAwaitingInput
    except ImportError:
        from airflow.providers.standard.triggers.hitl import HITLTrigger

        trigger = HITLTrigger(
            ti_id=ti_id,
            options=list(options),
            defaults=list(defaults),
            params={},
            multiple=False,
            timeout_datetime=timezone.utcnow() + within,
        )
        operator.defer(trigger=trigger, method_name="execute_complete", kwargs=dict(kwargs))
    raise TaskAwaitingInput(method_name="execute_complete", timeout=within, kwargs=dict(kwargs))
