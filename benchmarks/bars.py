"""Every bar, and the figure that is compared with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import fleet, model, pinned, rewind
from benchmarks.contestants import RATIOS

FIRST_COMMIT_S = 1.5
SMALL_PARTITIONS_S = 8.0
MANY_TO_FEW = 0.9
REBALANCE_S = 2.0
RELAY, DRAIN = 40_000, 100_000


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    measured: float
    bar: float
    at_least: bool
    """True: the figure must not be lower than the bar. False: it must not be higher."""

    @property
    def met(self) -> bool:
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar

    def __str__(self) -> str:
        return f"{self.what}: {_said(self.measured)}, {self.bound}"

    @property
    def bound(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {_said(self.bar)}"


def bars(found: Mapping[str, Any], only: set[str]) -> list[Bar]:
    """The bars of the sections in ``only`` that were measured. ``found``: the contents of ``bench.json``."""
    of: dict[str, Callable[[Any], Iterator[Bar]]] = {
        "ratios": _ratios,
        "cold": _cold,
        "dag_run": _dag_run,
        "fleet": _fleet,
        "growth": _growth,
        "group": _group,
        "retries": _retries,
        "rewind": _rewind,
        "pinned": _pinned,
        "model": _model,
    }
    return [bar for name, bars_of in of.items() if name in only and name in found for bar in bars_of(found[name])]


def table(found: Mapping[str, Any], only: set[str]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows of the table of bars."""
    rows = [[one.what, _said(one.measured), one.bound, "yes" if one.met else "**no**"] for one in bars(found, only)]
    return "Bars on 2 cores", ["", "measured", "bar", "met"], rows


def _ratios(ratios: Mapping[str, float]) -> Iterator[Bar]:
    for ratio in RATIOS:
        if ratio.bar is not None and ratio.name in ratios:
            yield Bar(ratio.name, ratios[ratio.name], ratio.bar, at_least=True)


def _cold(forms: list[dict[str, Any]]) -> Iterator[Bar]:
    for one in forms:
        seconds = one["warm"]["first_commit_s"]
        yield Bar(f"first commit of a warm run, {one['form'].capitalize()} form, s", seconds, FIRST_COMMIT_S, at_least=False)


def _dag_run(runs: list[dict[str, Any]]) -> Iterator[Bar]:
    for one in runs:
        yield Bar(f"CPU s of a DAG run with {one['records']:,} records", one["cpu_s"]["median"], one["bar"], at_least=False)


def _fleet(found: Mapping[str, Any]) -> Iterator[Bar]:
    small = f"{found['consumers']} small consumers: "
    yield Bar(f"{small}runs missed", found["due"] - found["succeeded"], 0, at_least=False)
    yield Bar(f"{small}s from a run's start to its last row, p99", found["loaded_after_s"]["p99"], fleet.LATE_S, at_least=False)
    yield Bar(f"{small}share of the CPU", found["cpu_share"], fleet.CPU_SHARE, at_least=False)
    yield Bar(f"{small}GiB of memory", found["memory_gib"], fleet.MEMORY_GIB, at_least=False)


def _growth(cases: list[dict[str, Any]]) -> Iterator[Bar]:
    of = {one["value"]: one for one in cases if one["form"] == "arrow_transform" and one["series"] == "partitions"}
    many, few = (of[value]["rows_per_s"]["median"] if value in of else None for value in ("64", "4"))
    if many and few:
        yield Bar("rows/s with 64 partitions / with 4", many / few, MANY_TO_FEW, at_least=True)
    if small := of.get("1,000 of 100 records"):
        seconds = statistics.median(run["seconds"] for run in small["runs"])
        yield Bar("1,000 partitions with 100 records each, s", seconds, SMALL_PARTITIONS_S, at_least=False)


def _group(found: Mapping[str, Any]) -> Iterator[Bar]:
    for one in found["rebalances"]:
        if one["members"] == 200:
            yield Bar(f"rebalance of 200 members, {one['assignor']}, p99, s", one["p99_s"], REBALANCE_S, at_least=False)


def _retries(cases: list[dict[str, Any]]) -> Iterator[Bar]:
    most = [one for one in cases if one["partitions"] == 1][-1]  # the default of a consumer's file
    yield Bar(f"relay, records/s, {most['share']:.0%} fail at first", most["relay_per_s"], RELAY, at_least=True)
    yield Bar(f"drain, records/s, {most['share']:.0%} fail at first", most["drain_per_s"], DRAIN, at_least=True)


def _rewind(found: Mapping[str, Any]) -> Iterator[Bar]:
    yield Bar(rewind.RATIO, found["ratio"], found["bar"], at_least=False)


def _pinned(cases: list[dict[str, Any]]) -> Iterator[Bar]:
    cost = {one["case"]: one["client_cpu_us"] for one in cases}
    if cost.get(pinned.LOCAL) and cost.get(pinned.MESSAGES):
        faster = cost[pinned.MESSAGES] / cost[pinned.LOCAL]
        yield Bar("rows per CPU second of the client, compiled reader / without", faster, pinned.FASTER, at_least=True)


def _model(forms: Mapping[str, Any]) -> Iterator[Bar]:
    for form, one in forms.items():
        for what, costs in (("CPU", ("client", "Postgres", "broker")), ("WAL", ("WAL",))):
            off, load = model.worst(one["checks"], costs)
            yield Bar(f"{what} of {load}, {form}: predicted, off by", off, model.WITHIN, at_least=False)


def _said(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:.2f}"
