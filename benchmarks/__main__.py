"""``python -m benchmarks``, also as ``make bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks import report
from benchmarks.airflow import dag_run, fleet, page
from benchmarks.database import rewind
from benchmarks.group import rebalances
from benchmarks.harness.consumer import TRANSFORMS
from benchmarks.harness.site import PARTITIONS, ROOT, Site
from benchmarks.harness.stage import set_up
from benchmarks.harness.turns import Harness
from benchmarks.measurement import Bench, Measurement
from benchmarks.retries import failing
from benchmarks.run import latency, memory, warm
from benchmarks.throughput import cost_model, partitions, pinned, ratios, replay
from benchmarks.throughput.contestants import ALL, BY_NAME, SHARE
from benchmarks.transforms.bench_arrow import FILE

BUILD = ROOT / "build"
PAGE = ROOT / "docs" / "benchmarks.md"
_MODULES = (
    ratios,
    partitions,
    warm,
    memory,
    rebalances,
    latency,
    rewind,
    replay,
    dag_run,
    fleet,
    failing,
    cost_model,
    pinned,
    page,
)
MEASUREMENTS: tuple[Measurement, ...] = tuple(module.MEASUREMENT for module in _MODULES)
"""All, in the order of the page. They run in the order of how many warm contestants they need."""


def main() -> int:
    arguments = _parser().parse_args()
    console = Console(width=max(Console().width, 150), highlight=False)
    if arguments.report:
        report.write_page(report.merge(arguments.output, {}), MEASUREMENTS, PAGE)
        return 0
    options = _options(arguments)
    began = time.monotonic()
    _measure(options, console)
    everything = report.merge(options.output, {})
    report.show(console, everything, options.what)
    console.print(f"{options.output} written after {(time.monotonic() - began) / 60:.1f} minutes", markup=False)
    missed = [one for one in report.judged(everything, options.what) if not one.met]
    for one in missed:
        console.print(f"misses its bar: {', '.join(one.cells[:3])}", markup=False)
    return 1 if options.strict and missed else 0


def _measure(options: argparse.Namespace, console: Console) -> None:
    """Writes each measurement's figures as soon as it is done, so a later failure does not lose them."""

    def say(text: str) -> None:
        console.print(text, markup=False)

    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(set_up(options.folder, say))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-seats-", ignore_cleanup_errors=True))
        os.environ[FILE] = f"{folder}/share"
        Path(folder, "transforms").symlink_to(TRANSFORMS)
        site = Site(stage.database_url, stage.servers, folder, psutil.cpu_count() or 1)
        harness = Harness(stage, site, logs=options.output.parent / "bench-logs", report=say)
        stack.callback(harness.close)
        bench = Bench(stage, site, harness, options.contestants, options.records, options.rounds, options.width, say)
        report.merge(options.output, {"machine": {**report.machine(), **stage.versions}})
        for one in sorted(options.what, key=lambda one: -len(one.needs)):
            harness.close_all_but([BY_NAME[name] for name in one.needs])
            stage.empty()
            report.merge(options.output, {one.name: one.run(bench, **(one.quick if options.quick else one.full))})


def _options(arguments: argparse.Namespace) -> argparse.Namespace:
    """Replaces the names of measurements and contestants by what they name, and what is not given by its default."""
    names = [one.name for one in ALL]
    chosen = set(arguments.only or names)
    if unknown := chosen - set(names):
        raise SystemExit(f"no contestant is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    arguments.what = tuple(one for one in MEASUREMENTS if one.name in arguments.what or "all" in arguments.what)
    arguments.contestants = tuple(one for one in ALL if one.name in chosen)
    records = arguments.records or (100_000 if arguments.quick else 2_000_000)
    arguments.records = records - records % (PARTITIONS * SHARE)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Tidemark's claims about speed, measured.")
    what = [*(one.name for one in MEASUREMENTS), "all"]
    parser.add_argument("--what", nargs="+", choices=what, default=["ratios"], help="what to measure (ratios)")
    parser.add_argument("--quick", action="store_true", help="small data, 1 round: checks that everything works, and claims nothing")
    parser.add_argument("--records", type=int, metavar="N", help="records of the topic (2,000,000)")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds of the ratios (5)")
    parser.add_argument("--width", type=int, default=170, metavar="BYTES", help="about how long a record is (170)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants")
    folder = "keep servers' data here, and find the topics again; else a temporary one"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--output", type=Path, default=BUILD / "bench.json", metavar="FILE", help="where the figures go (build/bench.json)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--report", action="store_true", help="only write the figures of the last run into docs/benchmarks.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
