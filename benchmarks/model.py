"""What a load costs: a linear model, fitted to some loads and checked against others.

    cost of a run  =  a run + slices * a slice + rows * a row + bytes * a byte

Costs are CPU seconds of the client (driver, JVM, Python workers), of Postgres and of the broker, and bytes of write-ahead log. A slice is
one partition of one batch. Bytes are those of the records' values. `benchmarks.product` runs the loads; the start of a run is not included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.contestants import BY_NAME
from benchmarks.harness import Harness, Run
from benchmarks.site import Job, Topic
from benchmarks.stage import Stage

FORMS = ("arrow_transform", "spark_transform")
PER = ("run", "slice", "row", "byte")
COSTS = ("client", "Postgres", "broker", "WAL")
WITHIN = 0.25
"""The bar: how far a prediction may be off."""


@dataclass(frozen=True, slots=True)
class Load:
    partitions: int
    records: int
    """Records of each partition."""
    width: int

    @property
    def amounts(self) -> tuple[int, int, int, int]:
        """The number of each of `PER`."""
        rows = self.partitions * self.records
        return 1, self.partitions, rows, rows * self.width

    def __str__(self) -> str:
        return f"{self.partitions:,} x {self.records:,} records of {self.width:,} B"


@dataclass(frozen=True, slots=True)
class Extent:
    fitted: tuple[Load, ...]
    checked: tuple[Load, ...]
    rounds: int


FULL = Extent(
    fitted=(
        Load(1, 1_000, 170),
        Load(4, 250_000, 170),
        Load(4, 50_000, 2_000),
        Load(500, 200, 170),
        Load(64, 6_000, 500),
        Load(100, 2_500, 170),
    ),
    checked=(Load(16, 40_000, 300), Load(200, 1_000, 170), Load(8, 25_000, 1_200)),
    rounds=3,
)
QUICK = Extent(fitted=(Load(1, 1_000, 170), Load(4, 10_000, 500), Load(32, 100, 170)), checked=(Load(8, 1_000, 300),), rounds=1)


def measure(stage: Stage, harness: Harness, extent: Extent, report: Callable[[str], None]) -> dict[str, Any]:
    """By form: ``coefficients`` by cost (seconds or bytes for each of `PER`), and ``checks``, a row per load and cost."""
    topics = {load: stage.topic(_topic(load)) for load in (*extent.fitted, *extent.checked)}
    found = {}
    for form in FORMS:
        measured = {}
        for load, topic in topics.items():
            runs = [harness.once(BY_NAME[form], Job(topic)) for _ in range(extent.rounds + 1)][1:]
            measured[load] = _costs(runs)
            said = "  ".join(f"{cost} {value:,.3g}" for cost, value in measured[load].items())
            report(f"model  {BY_NAME[form].title:<40} {load!s:<40} {said}")
        coefficients = {cost: _fitted({load: measured[load][cost] for load in extent.fitted}) for cost in COSTS}
        checks = [
            {"load": str(load), "cost": cost, "measured": measured[load][cost], "predicted": predicted(coefficients[cost], load)}
            for load in extent.checked
            for cost in COSTS
        ]
        found[form] = {"coefficients": coefficients, "checks": checks}
    return found


def predicted(coefficients: Mapping[str, float], load: Load) -> float:
    return sum(coefficients[name] * amount for name, amount in zip(PER, load.amounts, strict=True))


def _topic(load: Load) -> Topic:
    return Topic(f"model-{load.partitions}-{load.records}-{load.width}", load.partitions, load.partitions * load.records, load.width)


def _costs(runs: Sequence[Run]) -> dict[str, float]:
    """Medians. Raises `RuntimeError` if a run lost rows."""
    if errors := [run.error for run in runs if run.error]:
        raise RuntimeError(errors[0])
    of = {
        "client": [run.cpu_s["JVM"] + run.cpu_s["Python"] for run in runs],
        "Postgres": [run.cpu_s["Postgres"] for run in runs],
        "broker": [run.cpu_s["broker"] for run in runs],
        "WAL": [float(run.wal_bytes) for run in runs],
    }
    return {cost: statistics.median(of[cost]) for cost in COSTS}


def _fitted(measured: Mapping[Load, float]) -> dict[str, float]:
    """The coefficients, none below zero, by least squares of relative errors, so that small loads count as much as large ones."""
    costs = np.array([max(cost, 1e-3) for cost in measured.values()])
    amounts = np.array([load.amounts for load in measured], float)
    scale = amounts.max(axis=0)
    solution, _ = nnls(amounts / scale / costs[:, None], np.ones(len(costs)))
    return dict(zip(PER, (solution / scale).tolist(), strict=True))


def tables(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and rows, as `benchmarks.report` prints them."""
    coefficients, checks = [], []
    for form, one in found.items():
        for cost, of in one["coefficients"].items():
            unit, run, ms, row, byte = ("kB", 1e3, 1e3, 1, 1) if cost == "WAL" else ("CPU ms", 1e-3, 1e-3, 1e-6, 1e-9)
            cells = [f"{of['run'] / run:.1f} {unit}", f"{of['slice'] / ms:.2f} {unit}"]
            small = ("B", "B") if cost == "WAL" else ("µs", "ns")
            cells += [f"{of['row'] / row:.2f} {small[0]}", f"{of['byte'] / byte:.2f} {small[1]}"]
            coefficients.append([BY_NAME[form].title, cost, *cells])
        for check in one["checks"]:
            measured, said = (
                f"{check[name] / 1e6:.1f} MB" if check["cost"] == "WAL" else f"{check[name]:.2f} s" for name in ("measured", "predicted")
            )
            off = check["predicted"] / check["measured"] - 1 if check["measured"] else 0.0
            checks.append([BY_NAME[form].title, check["load"], check["cost"], measured, said, f"{off:+.0%}"])
    return [
        ("What a load costs: fitted", ["", "cost", *(f"a {name}" for name in PER)], coefficients),
        ("What a load costs: loads that were not fitted", ["", "load", "cost", "measured", "predicted", "off by"], checks),
    ]


def worst(checks: Sequence[Mapping[str, Any]], costs: Sequence[str]) -> tuple[float, str]:
    """The largest relative error of a predicted sum of these costs, and its load."""
    off = {}
    for load in dict.fromkeys(check["load"] for check in checks):
        of = [check for check in checks if check["load"] == load and check["cost"] in costs]
        measured, said = (sum(check[name] for check in of) for name in ("measured", "predicted"))
        off[load] = abs(said / measured - 1)
    return max((share, load) for load, share in off.items())
