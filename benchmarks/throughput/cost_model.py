"""What a load costs: a linear model, fitted to some loads and checked against others.

    cost of a run  =  a run + slices * a slice + rows * a row + bytes * a byte

Costs are CPU seconds of the client (driver, JVM, Python workers), of Postgres and of the broker, and bytes of write-ahead log. A slice is
one partition of one batch. Bytes count the records' values only. `benchmarks.harness.consumer` runs the loads; the start of a run is not
included.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.harness.site import Job, Topic
from benchmarks.harness.turns import Run
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME
from scipy.optimize import nnls

FORMS = ("arrow_transform", "spark_transform")
PER = ("run", "slice", "row", "byte")
COSTS = ("client", "Postgres", "broker", "WAL")
BARS = {"CPU": ("client", "Postgres", "broker"), "WAL": ("WAL",)}
"""The sums of costs whose prediction has a bar."""


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

    @property
    def topic(self) -> Topic:
        name = f"model-{self.partitions}-{self.records}-{self.width}"
        return Topic(name, self.partitions, self.partitions * self.records, self.width)

    def __str__(self) -> str:
        return f"{self.partitions:,} x {self.records:,} records of {self.width:,} B"


def measure(bench: Bench, fitted: Sequence[Load], checked: Sequence[Load], rounds: int) -> Figures:
    """``coefficients``: a row per form and cost, with seconds or bytes for each of `PER`; ``checks``: a row per form, load and cost;
    ``off``: the largest relative error of each sum that has a bar."""
    topics = {load: bench.stage.topic(load.topic) for load in (*fitted, *checked)}
    coefficients, checks, off = [], [], []
    for form in FORMS:
        title, measured = BY_NAME[form].title, dict[Load, dict[str, float]]()
        for load, topic in topics.items():
            measured[load] = _costs([bench.harness.once(BY_NAME[form], Job(topic)) for _ in range(rounds + 1)][1:])
            costs = "  ".join(f"{cost} {value:,.3g}" for cost, value in measured[load].items())
            bench.report(f"model  {title:<40} {load!s:<40} {costs}")
        per = {cost: _fitted({load: measured[load][cost] for load in fitted}) for cost in COSTS}
        coefficients += [{"title": title, "cost": cost, "of": per[cost], "text": _units(cost, per[cost])} for cost in COSTS]
        predicted = {load: {cost: _predicted(per[cost], load) for cost in COSTS} for load in checked}
        for load, cost in itertools.product(checked, COSTS):
            both = {"measured": measured[load][cost], "predicted": predicted[load][cost]}
            off_by = both["predicted"] / both["measured"] - 1 if both["measured"] else 0.0
            checks.append({"title": title, "load": str(load), "cost": cost, **both, "off": off_by, "text": _amounts(cost, **both)})
        for what, costs_of in BARS.items():
            errors = {str(load): _error(measured[load], predicted[load], costs_of) for load in checked}
            worst = max(errors, key=lambda load: errors[load])
            off.append({"what": what, "form": form, "load": worst, "error": errors[worst]})
    return {"coefficients": coefficients, "checks": checks, "off": off}


def _error(measured: Mapping[str, float], predicted: Mapping[str, float], costs: Sequence[str]) -> float:
    return abs(sum(predicted[cost] for cost in costs) / sum(measured[cost] for cost in costs) - 1)


def _predicted(coefficients: Mapping[str, float], load: Load) -> float:
    return sum(coefficients[name] * amount for name, amount in zip(PER, load.amounts, strict=True))


def _costs(runs: Sequence[Run]) -> dict[str, float]:
    """Medians. Raises `RuntimeError` if a run lost rows."""
    if errors := [run.error for run in runs if run.error]:
        raise RuntimeError(errors[0])
    costs = [run.cpu_s | {"client": run.cpu_s["JVM"] + run.cpu_s["Python"], "WAL": float(run.wal_bytes)} for run in runs]
    return {cost: statistics.median(one[cost] for one in costs) for cost in COSTS}


def _fitted(measured: Mapping[Load, float]) -> dict[str, float]:
    """The coefficients, none below zero, by least squares of relative errors, so that small loads count as much as large ones."""
    costs = np.array([max(cost, 1e-3) for cost in measured.values()])
    amounts = np.array([load.amounts for load in measured], float)
    scale = amounts.max(axis=0)
    solution, _ = nnls(amounts / scale / costs[:, None], np.ones(len(costs)))
    return dict(zip(PER, (solution / scale).tolist(), strict=True))


def _amounts(cost: str, **seconds_or_bytes: float) -> dict[str, str]:
    return {name: f"{value / 1e6:.1f} MB" if cost == "WAL" else f"{value:.2f} s" for name, value in seconds_or_bytes.items()}


def _units(cost: str, of: Mapping[str, float]) -> dict[str, str]:
    """A coefficient for each of `PER`, as the page prints it."""
    large, small, smallest = ("kB", "B", "B") if cost == "WAL" else ("CPU ms", "µs", "ns")
    scale = (1e-3, 1, 1) if cost == "WAL" else (1e3, 1e6, 1e9)
    run, part = (of[name] * scale[0] for name in ("run", "slice"))
    row, byte = of["row"] * scale[1], of["byte"] * scale[2]
    return {"run": f"{run:.1f} {large}", "slice": f"{part:.2f} {large}", "row": f"{row:.2f} {small}", "byte": f"{byte:.2f} {smallest}"}


MEASUREMENT = Measurement(
    "model",
    measure,
    Table(
        "What a load costs: fitted",
        "| cost | a run | a slice | a row | a byte",
        "{title} | {cost} | {text[run]} | {text[slice]} | {text[row]} | {text[byte]}",
        "coefficients",
    ),
    Table(
        "What a load costs: loads that were not fitted",
        "| load | cost | measured | predicted | off by",
        "{title} | {load} | {cost} | {text[measured]} | {text[predicted]} | {off:+.0%}",
        "checks",
    ),
    bars=[Bar("{what} of {load}, {form}: predicted, off by", lambda row: row["error"], "off", at_most=0.25)],
    needs=FORMS,
    full={
        "fitted": [
            Load(*each)
            for each in ((1, 1_000, 170), (4, 250_000, 170), (4, 50_000, 2_000), (500, 200, 170), (64, 6_000, 500), (100, 2_500, 170))
        ],
        "checked": [Load(16, 40_000, 300), Load(200, 1_000, 170), Load(8, 25_000, 1_200)],
        "rounds": 3,
    },
    quick={"fitted": [Load(1, 1_000, 170), Load(4, 10_000, 500), Load(32, 100, 170)], "checked": [Load(8, 1_000, 300)], "rounds": 1},
)
