"""The result of a soak, as a table and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.checker import Anomaly, counted
from tests.soak.history import Outcome, Where
from tests.soak.plan import Fault

EXAMPLES = 20
FOR_GOOD = ("AttemptRefused", "AttemptBroken", "AttemptFailed")
"""Errors after which an attempt is not retried until someone has looked into it. No fault of a soak should cause one."""


@dataclass
class Result:
    """``contradictions``: differences between Kafka's log and what producers know. With any, the soak says nothing about consumers."""

    seed: int
    seconds: float
    rate: float
    took_s: float = 0.0
    records: Mapping[Outcome, int] = field(default_factory=dict)
    rows: int = 0
    rejected: int = 0
    batches: int = 0
    snapshots: int = 0
    faults: Mapping[Fault, int] = field(default_factory=dict)
    missed: Mapping[Fault, int] = field(default_factory=dict)
    at_step: Mapping[str, int] = field(default_factory=dict)
    attempts: Mapping[str, int] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    anomalies: Sequence[Anomaly] = ()
    contradictions: Sequence[str] = ()
    not_conserved: Sequence[str] = ()
    left_over: Sequence[str] = ()

    @property
    def produced(self) -> int:
        return sum(self.records.values())

    @property
    def ended_for_good(self) -> dict[str, int]:
        """The number of attempts by error, for errors that are not retried."""
        return {kind: count for kind, count in self.attempts.items() if kind.startswith(FOR_GOOD)}

    def problems(self) -> list[str]:
        """Everything that must not happen; empty after a good soak."""
        return [
            *_first_of_each(self.anomalies),
            *(f"producers and log contradict: {text}" for text in self.contradictions),
            *(f"not conserved: {text}" for text in self.not_conserved),
            *(f"{count} attempts ended as {kind}: {self.messages.get(kind, '')}" for kind, count in self.ended_for_good.items()),
            *(f"still running: {text}" for text in self.left_over),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "minutes": round(self.seconds / 60, 2),
            "took_s": round(self.took_s, 1),
            "rate": self.rate,
            "records": {"produced": self.produced, **{outcome.name.lower(): self.records.get(outcome, 0) for outcome in Outcome}},
            "rows": self.rows,
            "retried_or_failed": self.rejected,
            "batches": self.batches,
            "snapshots": self.snapshots,
            "faults": {fault.value: self.faults.get(fault, 0) for fault in Fault},
            "came_to_nothing": {fault.value: count for fault, count in self.missed.items()},
            "struck_at_step": dict(self.at_step),
            "attempts": dict(sorted(self.attempts.items())),
            "anomalies": {kind.value: count for kind, count in counted(self.anomalies).items()},
            "problems": self.problems()[:EXAMPLES],
        }


def _first_of_each(anomalies: Sequence[Anomaly]) -> list[str]:
    """The first anomaly of each kind in each partition: every later snapshot often shows the same anomaly again."""
    groups: dict[tuple[str, Where], list[Anomaly]] = defaultdict(list)
    for anomaly in anomalies:
        groups[anomaly.kind, anomaly.where].append(anomaly)
    return [f"{them[0]}{f' (and {len(them) - 1} more like it)' if len(them) > 1 else ''}" for them in groups.values()]


def write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.as_json(), indent=2) + "\n")


def show(result: Result, console: Console) -> None:
    table = Table(title=f"Soak of {result.seconds / 60:g} minutes, seed {result.seed}", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("how many", justify="right")
    for name, value in result.as_json().items():
        if isinstance(value, dict):
            table.add_section()
            for each, count in value.items():
                table.add_row(f"{name}: {each}", f"{count:,}")
        elif name not in ("seed", "minutes", "problems"):
            table.add_row(name, f"{value:,}")
    console.print(table)
    for problem in result.problems()[:EXAMPLES]:
        console.print(problem, markup=False)
