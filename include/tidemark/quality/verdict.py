"""What a validation is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from tidemark.spec import OnFailure, Validation


class Verdict(StrEnum):
    PASSED = "passed"
    WARNING = "warning"
    """Something of severity warning or info failed: it is reported and holds nobody up."""
    CRITICAL = "critical"
    """Something of severity critical failed: the rows must not be used."""


class Reaction(StrEnum):
    """What follows from a verdict."""

    PUBLISH = "publish"
    BLOCK = "block"
    """The task fails, nothing is published, the rows stay."""
    REWIND = "rewind"
    """As block, and what the run wrote is taken back."""


class Severity(StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


def reaction(outcome: Verdict, validation: Validation | None, *, may_rewind: bool = False) -> Reaction:
    """What a consumer's file wants done about a verdict. ``may_rewind``: what was judged is the whole of an Airflow run of the consumer.

    Drains and backfills block instead of rewinding, because their rows lie among those of other runs; so do runs outside Airflow.
    """
    on_failure = OnFailure.BLOCK if validation is None else validation.on_failure
    if outcome is not Verdict.CRITICAL or on_failure is OnFailure.REPORT:
        return Reaction.PUBLISH
    return Reaction.REWIND if on_failure is OnFailure.REWIND and may_rewind else Reaction.BLOCK


@dataclass(frozen=True, slots=True)
class ValidatedRun:
    """All attempts of one Airflow dag run, ``Run("consume__departures", "scheduled__…")``, or one attempt, ``Run(attempt_id=7)``."""

    dag_id: str | None = None
    run_id: str | None = None
    attempt_id: int | None = None

    def __post_init__(self) -> None:
        in_airflow = self.dag_id is not None and self.run_id is not None
        if in_airflow == (self.attempt_id is not None) or (self.dag_id is None) != (self.run_id is None):
            raise ValueError("a run is dag_id and run_id, or attempt_id")

    def __str__(self) -> str:
        return f"attempt {self.attempt_id}" if self.attempt_id is not None else f"{self.dag_id} {self.run_id}"


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Sums over the ledger rows of the run: records by what became of them, and rows in the sink."""

    loaded: int = 0
    skipped: int = 0
    retried: int = 0
    failed: int = 0
    unaccounted: int = 0
    sink_rows: int = 0


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """One expectation's answer; number 0 is the conservation check, 1 is the first of the suite."""

    number: int
    expectation: str
    severity: Severity
    success: bool
    text: str
    """One line for people: what was expected, what was found."""
    failing_rows: int | None = None
    """How many rows failed; none where the expectation is about the whole and not about rows."""
    detail: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """As stored: the arguments, what was observed, examples. JSON."""


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What was found about a run."""

    verdict: Verdict
    group: str
    suite: str | None = None
    ranges: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """``{"flights/3": [[0, 500]]}``: the offsets that were judged, ``[start, end)``; of a drain, where its records were read first."""
    counts: RunCounts = field(default_factory=RunCounts)
    results: tuple[ExpectationResult, ...] = ()
    validation_id: int | None = None
    """The row in ``tidemark.validation``; none if the run committed nothing, so that there was nothing to judge."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For an asset event or an XCom: everything but the results' stored details."""
        results = [{name: value for name, value in asdict(result).items() if name != "detail"} for result in self.results]
        return asdict(self) | {"results": results}


def outcome(results: tuple[ExpectationResult, ...]) -> Verdict:
    """Critical if anything critical failed, warning if anything else did."""
    failed = {result.severity for result in results if not result.success}
    if Severity.CRITICAL in failed:
        return Verdict.CRITICAL
    return Verdict.WARNING if failed else Verdict.PASSED
