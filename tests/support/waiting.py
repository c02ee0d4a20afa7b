"""Waits for conditions, not for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential

if TYPE_CHECKING:
    from tidemark.local.airflow_client import AirflowClient

PAUSES = wait_exponential(multiplier=0.02, exp_base=1.2, max=0.1)
"""Seconds between two looks. They grow, because some conditions ask Airflow or look at all processes."""


def until(condition: Callable[[], Any], what: str = "", within_s: float = 180.0) -> Any:
    """Polls ``condition`` and returns its first true result. Fails after ``within_s``; the message then says ``what`` was expected."""
    try:
        return Retrying(retry=retry_if_result(lambda found: not found), stop=stop_after_delay(within_s), wait=PAUSES)(condition)
    except RetryError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


def until_scheduler_looped(client: AirflowClient) -> None:
    """Waits until Airflow's scheduler knows that a task waits for input: it loses answers that arrive before its next loop."""
    now = time.time()
    heartbeat = "latest_scheduler_heartbeat"
    until(lambda: datetime.fromisoformat(client.health()["scheduler"][heartbeat] or "").timestamp() > now + 1, "the scheduler has looped")
