"""What differs between Airflow 3.2 and 3.3. The rest of the package uses names that both have.

A task that asks a person is parked in 3.3, and waits in a triggerer in 3.2. Airflow 3.1 lacks names of the Task SDK that this package
imports, and Airflow 3.0 has no questions to people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Never

from airflow.sdk import BaseOperator, timezone
from airflow.utils.types import DagRunType

_RUN_TYPES = {run_type.value for run_type in DagRunType}


def run_types(*names: str) -> Any:
    """The given types of DAG runs without those that this Airflow lacks, for ``allowed_run_types``, whose type is private."""
    return [name for name in names if name in _RUN_TYPES]


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
