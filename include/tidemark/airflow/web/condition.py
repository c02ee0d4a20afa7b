"""How a consumer is doing, from what happened and without thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Condition(StrEnum):
    """Worst first: the order of the page."""

    BAD_SPEC = "bad spec"
    UNREACHABLE = "unreachable"
    RUN_FAILED = "run failed"
    BLOCKED = "blocked"
    RECORDS_FAILED = "records failed"
    PAUSED = "paused"
    REPLAYING = "replaying"
    RECORDS_WAIT = "records wait"
    RUNNING = "running"
    OK = "ok"
    NEW = "new"


RANK: Mapping[str, int] = {one.value: rank for rank, one in enumerate(Condition)}


def condition(row: Mapping[str, Any], *, valid: bool, dag_paused: bool | None) -> tuple[Condition, str]:
    """The condition of a consumer, and why. ``row``: what `overview.sql` says of its group, empty if that has never run. ``valid``: whether
    its file is."""
    if not valid:
        return Condition.BAD_SPEC, "Its file has problems; runs fail until they are fixed."
    if row.get("attempt_state") == "FAILED":
        return Condition.RUN_FAILED, f"The last run failed: {row.get('attempt_error') or 'unknown error'}"
    if row.get("verdict") == "critical":
        return Condition.BLOCKED, "The last validation failed; its rows are not published."
    if row.get("failed"):
        return Condition.RECORDS_FAILED, "Records have failed and are not tried again."
    if dag_paused and row:
        return Condition.PAUSED, "Its DAG is paused; no run starts."
    if row.get("paused"):
        return Condition.PAUSED, row.get("pause_reason") or "Reading is paused."
    if row.get("replaying"):
        return Condition.REPLAYING, "Reads records again after a rewind."
    if row.get("waiting"):
        return Condition.RECORDS_WAIT, "Records wait for their next try."
    if row.get("attempt_state") == "RUNNING":
        return Condition.RUNNING, "A run is in progress."
    if row.get("attempt_state") == "COMMITTED":
        return Condition.OK, ""
    return Condition.NEW, "It has not run yet. Start its DAG." if not dag_paused else "It has not run yet, and its DAG is paused."
