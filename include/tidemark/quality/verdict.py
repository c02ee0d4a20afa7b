"""The input and the results of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from tidemark.records.outcome import RecordCounts
from tidemark.spec import OnFailure, Validation


class Verdict(StrEnum):
    PASSED = "passed"
    WARNING = "warning"
    """An expectation of severity warning or info failed. It is reported and blocks nothing."""
    CRITICAL = "critical"
    """A check of severity critical failed. The rows must not be used."""


class Reaction(StrEnum):
    """The consequence of a verdict."""

    PUBLISH = "publish"
    BLOCK = "block"
    """The task fails, no asset event is published, the rows stay."""
    REWIND = "rewind"
    """Like block, and the run is rewound."""


class Severity(StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


def reaction(outcome: Verdict, validation: Validation | None, *, may_rewind: bool = False) -> Reaction:
    """Returns the reaction that a consumer's file configures. ``may_rewind``: a whole Airflow run of the consumer was judged.

    Drains and backfills block instead of rewinding, because their rows lie among those of other runs. So do runs outside Airflow.
    """
    on_failure = OnFailure.BLOCK if validation is None else validation.on_failure
    if outcome is not Verdict.CRITICAL or on_failure is OnFailure.REPORT:
        return Reaction.PUBLISH
    return Reaction.REWIND if on_failure is OnFailure.REWIND and may_rewind else Reaction.BLOCK


@dataclass(frozen=True, slots=True)
class ValidatedRun:
    """One attempt, ``ValidatedRun(attempt_id=7)``, or a whole DAG run, ``ValidatedRun("consume__departures", "scheduled__…")``."""

    dag_id: str | None = None
    run_id: str | None = None
    attempt_id: int | None = None

    def __post_init__(self) -> None:
        in_airflow = self.dag_id is not None and self.run_id is not None
        if in_airflow == (self.attempt_id is not None) or (self.dag_id is None) != (self.run_id is None):
            raise ValueError("give dag_id and run_id, or attempt_id")

    def __str__(self) -> str:
        return f"attempt {self.attempt_id}" if self.attempt_id is not None else f"{self.dag_id} {self.run_id}"


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """One expectation's result. Number 0 is the conservation check, 1 the first expectation of the suite."""

    number: int
    expectation: str
    severity: Severity
    success: bool
    text: str
    """One line for display: expected and observed."""
    failing_rows: int | None = None
    """Number of failing rows; `None` if the expectation does not judge single rows."""
    detail: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """As stored, in JSON: arguments, observations, examples."""


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of validating a run."""

    verdict: Verdict
    group: str
    suite: str | None = None
    ranges: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """``{"flights/3": [[0, 500]]}``: the judged offsets, ``[start, end)``. For a drain, where its records were first read."""
    counts: RecordCounts = field(default_factory=RecordCounts)
    """Sums over the run's ledger rows."""
    results: tuple[ExpectationResult, ...] = ()
    validation_id: int | None = None
    """The row in ``tidemark.validation``; `None` if the run committed nothing."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns the payload of an asset event or XCom: everything except the results' stored details."""
        results = [{name: value for name, value in asdict(result).items() if name != "detail"} for result in self.results]
        return asdict(self) | {"results": results}


def outcome(results: tuple[ExpectationResult, ...]) -> Verdict:
    """Returns critical if anything critical failed, warning if anything else failed."""
    failed = {result.severity for result in results if not result.success}
    if Severity.CRITICAL in failed:
        return Verdict.CRITICAL
    return Verdict.WARNING if failed else Verdict.PASSED
