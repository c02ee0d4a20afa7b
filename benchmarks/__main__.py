"""``python -m benchmarks``, also as ``make bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import (
    assignors,
    backlog,
    bars,
    cold,
    dag_run,
    deletes,
    fleet,
    group,
    growth,
    history,
    latency,
    memory,
    model,
    packages,
    page,
    parse,
    pinned,
    report,
    retries,
    rewind,
    where,
)
from benchmarks.contestants import ALL, BY_NAME, REGISTRY, Contestant, Needs, Reads
from benchmarks.harness import ROOT, Figure, Harness
from benchmarks.packages import Unobtainable
from benchmarks.site import Job, Site, Topic
from benchmarks.stage import Stage, set_up

BUILD = ROOT / "build"
DOCS = ROOT / "docs" / "benchmarks.md"
PARTITIONS = 4
SHARE = 4
"""Contestants of `Reads.PART` read one record in 4."""
TOPICS = {
    Reads.ALL: ("events", "json", 1),
    Reads.PART: ("events-part", "json", SHARE),
    Reads.WITH_SCHEMA: ("events-schema", "connect", SHARE),
    Reads.AVRO: ("events-avro", "avro", 1),
    Reads.PROTOBUF: ("events-protobuf", "protobuf", 1),
    Reads.CHANGES: ("accounts", "accounts", SHARE),
    Reads.CHANGES_AVRO: ("accounts-avro", "accounts-avro", SHARE),
}
"""Name, form, and the share of the records."""


@dataclass(frozen=True, slots=True)
class Options:
    what: tuple[str, ...]
    records: int
    rounds: int
    width: int
    contestants: tuple[Contestant, ...]
    folder: Path | None
    output: Path
    quick: bool
    strict: bool


class _Sections:
    """The results, by section. Each is written to ``output`` as soon as it is measured, so a later failure does not lose it."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def __setitem__(self, name: str, found: Any) -> None:
        self.add({name: found})

    def add(self, found: dict[str, Any]) -> dict[str, Any]:
        """Returns all sections, including those of earlier runs."""
        return report.merge(self._output, found)


def main() -> int:
    arguments = _parser().parse_args()
    console = Console(width=max(Console().width, 150), highlight=False)
    if arguments.report:
        report.write_docs(report.merge(arguments.output, {}), DOCS)
        return 0
    options = _options(arguments)
    began = time.monotonic()
    sections = _Sections(options.output)
    with contextlib.ExitStack() as stack:
        registry = "ratios" in options.what and any(one.reads in REGISTRY for one in options.contestants)
        stage = stack.enter_context(set_up(options.folder, lambda text: console.print(text, markup=False), registry=registry))
        _measure(options, stage, stack, sections, console)
    found = sections.add({})
    report.show(console, found, set(options.what))
    console.print(f"{options.output} written after {(time.monotonic() - began) / 60:.1f} minutes", markup=False)
    below = [bar for bar in bars.bars(found, set(options.what)) if not bar.met]
    for bar in below:
        console.print(f"misses its bar: {bar}", markup=False)
    return 1 if options.strict and below else 0


def _measure(options: Options, stage: Stage, stack: contextlib.ExitStack, sections: _Sections, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-seats-", ignore_cleanup_errors=True)))
    os.environ[retries.FILE] = str(folder / "share")
    jars, quix, skipped = _packages(options, say)
    cores = psutil.cpu_count() or 1
    site = Site(stage.database_url, stage.servers, str(folder), cores, jars, stage.registry)
    harness = Harness(stage, site, quix_python=quix, logs=options.output.parent / "bench-logs", report=say)
    stack.callback(harness.close)
    sections["machine"] = {**report.machine(), **stage.versions}
    if "ratios" in options.what:  # a part measured later does not change what the ratios were made of
        sections["settings"] = {"records": options.records, "partitions": PARTITIONS, "width": options.width, "rounds": options.rounds}
    if "ratios" in options.what:
        stage.empty()
        jobs = [(one, job) for one, job in _jobs(options, stage) if one.name not in skipped]
        skipped |= harness.warm(jobs)
        jobs = [(one, job) for one, job in jobs if one.name not in skipped]
        figures: dict[str, Figure] = harness.rounds(jobs, options.rounds)
        sections.add(report.ratio_section(figures, skipped, {one.name: job.rows for one, job in jobs}))
    harness.close_all_but([BY_NAME[form] for form in growth.FORMS])
    rounds = 1 if options.quick else 2
    if "growth" in options.what:
        extent = growth.QUICK if options.quick else growth.FULL
        sections["growth"] = growth.measure(stage, harness, extent, options.width, rounds, say)
    if "model" in options.what:
        sections["model"] = model.measure(stage, harness, model.QUICK if options.quick else model.FULL, say)
    harness.close_all_but([BY_NAME["arrow_transform"]])
    if "group" in options.what:
        sections["group"] = group.measure(stage, harness, group.QUICK if options.quick else group.FULL, options.width, say)
    harness.close()
    _measure_alone(options, stage, site, sections, say)
    _measure_deployments(options, stage, sections, say)


def _measure_alone(options: Options, stage: Stage, site: Site, sections: _Sections, say: Callable[[str], None]) -> None:
    """Measures what needs no contestants."""
    if "cold" in options.what:
        sections["cold"] = cold.measure(stage, site, options.width, 1 if options.quick else 3, say)
    if "latency" in options.what:
        sections["latency"] = latency.measure(stage, site, options.width, 5 if options.quick else 60, say)
    if "rewind" in options.what:
        sections["rewind"] = rewind.measure(stage, rewind.QUICK if options.quick else rewind.FULL, say)
    if "retries" in options.what:
        records = min(options.records, 1_000_000)
        topic = stage.topic(Topic(f"events-{records}", PARTITIONS, records, options.width))
        sections["retries"] = retries.measure(stage, site, topic, 1 if options.quick else 3, say)
    if "deletes" in options.what:
        records = min(options.records, 1_000_000)
        sections["deletes"] = deletes.measure(stage, site, records, PARTITIONS, options.width, 1 if options.quick else 3, say)
    if "backlog" in options.what:
        sections["backlog"] = backlog.measure(stage, site, backlog.QUICK if options.quick else backlog.FULL, options.width, say)
    if "where" in options.what:
        records = min(options.records, 1_000_000)
        topic = stage.topic(Topic(f"events-{records}", PARTITIONS, records, options.width))
        sections["where"] = where.measure(stage, site, topic, 1 if options.quick else 5, say)
    if "pinned" in options.what:
        records = min(options.records, 1_000_000)
        topic = stage.topic(Topic(f"events-{records}", PARTITIONS, records, options.width))
        sections["pinned"] = pinned.measure(stage, site, topic, 1 if options.quick else 3, say)
    if "assignors" in options.what and not options.quick:
        sections["assignors"] = assignors.measure(say)
    if "parse" in options.what:
        sections["parse"] = parse.measure(1 if options.quick else 5, say)
    if "memory" in options.what:
        sections["memory"] = memory.measure(stage, site, memory.QUICK if options.quick else memory.FULL, options.width, say)


def _measure_deployments(options: Options, stage: Stage, sections: _Sections, say: Callable[[str], None]) -> None:
    """Measures what needs an Airflow, or a database with a long history."""
    if "dag_run" in options.what:
        sections["dag_run"] = dag_run.measure(stage, 1 if options.quick else 5, say)
    if "fleet" in options.what:
        sections["fleet"] = fleet.measure(stage, fleet.QUICK if options.quick else fleet.FULL, say)
    if "page" in options.what:
        sections["page"] = page.measure(stage, page.QUICK if options.quick else page.FULL, say)
    if "history" in options.what:
        sections["history"] = history.measure(stage, history.QUICK if options.quick else history.FULL, say)


def _jobs(options: Options, stage: Stage) -> list[tuple[Contestant, Job]]:
    topics: dict[Reads, Topic] = {}
    jobs = []
    for one in options.contestants:
        if one.reads not in topics:
            name, form, share = TOPICS[one.reads]
            topic = Topic(name, PARTITIONS, options.records // share, options.width, form=form)
            topics[one.reads] = stage.topic(topic)
        jobs.append((one, Job(topics[one.reads], parameters=one.parameters)))
    return jobs


def _packages(options: Options, say: Any) -> tuple[dict[str, list[str]], Path | None, dict[str, str]]:
    """Returns jars by configuration, the interpreter for Quix Streams, and the contestants whose packages are unavailable, with reasons."""
    wanted = {one.needs for one in options.contestants if one.needs} if "ratios" in options.what else set()
    jars: dict[str, list[str]] = {}
    quix, missing = None, {}
    for need in sorted(wanted):
        try:
            if need is Needs.QUIX:
                quix = packages.quix_python(BUILD, say)
            else:
                jars[need.value] = [str(jar) for jar in packages.jars(need.value, say)]
        except Unobtainable as error:
            missing[need] = str(error)
            say(f"skipped, because {need.value} is unavailable: {error}")
    return jars, quix, {one.name: missing[one.needs] for one in options.contestants if one.needs in missing}


def _options(arguments: argparse.Namespace) -> Options:
    what = report.WHAT if "all" in arguments.what else tuple(arguments.what)
    names = [one.name for one in ALL]
    chosen = set(arguments.only or names) - set(arguments.skip)
    if unknown := (chosen | set(arguments.skip)) - set(names):
        raise SystemExit(f"no contestant is called {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    records = arguments.records or (100_000 if arguments.quick else 2_000_000)
    return Options(
        what,
        records - records % (PARTITIONS * SHARE),
        arguments.rounds or (1 if arguments.quick else 5),
        arguments.width,
        tuple(one for one in ALL if one.name in chosen),
        arguments.folder,
        arguments.output,
        arguments.quick,
        arguments.strict,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Tidemark's claims about speed, measured.")
    parser.add_argument("--what", nargs="+", choices=[*report.WHAT, "all"], default=["ratios"], help="what to measure (ratios)")
    parser.add_argument("--quick", action="store_true", help="small data, 1 round: checks that everything works, and claims nothing")
    parser.add_argument("--records", type=int, metavar="N", help="records of the topic (2,000,000)")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds of the ratios (5)")
    parser.add_argument("--width", type=int, default=170, metavar="BYTES", help="about how long a record is (170)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="all but these")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep servers' data here, and find the topics again; else a temporary one"
    )
    parser.add_argument("--output", type=Path, default=BUILD / "bench.json", metavar="FILE", help="where the figures go (build/bench.json)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a ratio misses its bar")
    parser.add_argument("--report", action="store_true", help="only write the figures of the last run into docs/benchmarks.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
