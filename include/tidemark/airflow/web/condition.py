"""How a consumer is doing, from what happened and without thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from tidemark.offsets.verdict import Verdict


class Condition(StrEnum):
    """Worst first: the order of the page."""

    BAD_SPEC = "bad spec"
    UNREACHABLE = "unreachable"
    LOSING = "losing"
    RUN_FAILED = "run failed"
    STOPPED = "stopped"
    STALLED = "stalled"
    BLOCKED = "blocked"
    RECORDS_FAILED = "records failed"
    PAUSED = "paused"
    REPLAYING = "replaying"
    CATCHING_UP = "catching up"
    RECORDS_WAIT = "records wait"
    RUNNING = "running"
    UNVALIDATED = "not validated"
    OK = "ok"
    NEW = "new"


RANK: Mapping[str, int] = {one.value: rank for rank, one in enumerate(Condition)}


_OF_LAG: Mapping[Verdict, Condition] = {
    Verdict.LOSING: Condition.LOSING,
    Verdict.STOP: Condition.STOPPED,
    Verdict.STALL: Condition.STALLED,
    Verdict.REPLAYING: Condition.REPLAYING,
    Verdict.CATCHING_UP: Condition.CATCHING_UP,
}
"""The verdicts that are conditions by themselves. For the others there is more to say than the lag."""


def condition(row: Mapping[str, Any], *, valid: bool, dag_paused: bool | None) -> tuple[Condition, str]:
    """The condition of a consumer, and why: the worst that is so. ``row``: what `overview.sql` says of its group, empty if that has never
    run; its ``lag`` has the verdict of the last samples. ``valid``: whether its file is."""
    lag = row.get("lag")
    found = _without_lag(row, valid=valid, dag_paused=dag_paused)
    if lag is None or (of_lag := _OF_LAG.get(lag.verdict)) is None or RANK[found[0]] <= RANK[of_lag]:
        return found
    return of_lag, lag.why


def _without_lag(row: Mapping[str, Any], *, valid: bool, dag_paused: bool | None) -> tuple[Condition, str]:
    if not valid:
        return Condition.BAD_SPEC, "Its file has problems; runs fail until they are fixed."
    if row.get("attempt_state") == "FAILED":
        return Condition.RUN_FAILED, f"The last run failed: {row.get('attempt_error') or 'unknown error'}"
    if (stopped_by := row.get("stopped_by")) is not None:
        return Condition.BLOCKED, f"Validation {stopped_by} failed; the validated view stops before its rows."
    if row.get("verdict") == "critical":
        return Condition.BLOCKED, "The last validation failed; its rows are not published."
    if row.get("failed"):
        return Condition.RECORDS_FAILED, "Records have failed and are not tried again."
    if dag_paused and row:
        return Condition.PAUSED, "Its DAG is paused; no run starts."
    if row.get("paused"):
        return Condition.PAUSED, row.get("pause_reason") or "Reading is paused."
    if row.get("waiting"):
        return Condition.RECORDS_WAIT, "Records wait for their next try."
    if row.get("attempt_state") == "RUNNING":
        return Condition.RUNNING, "A run is in progress."
    if row.get("unvalidated"):
        return Condition.UNVALIDATED, "The validated view stops before rows without a verdict; the next validation judges them."
    if row.get("attempt_state") == "COMMITTED":
        return Condition.OK, ""
    return Condition.NEW, "It has not run yet. Start its DAG." if not dag_paused else "It has not run yet, and its DAG is paused."
