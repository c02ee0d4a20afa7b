"""A small scheduled run, cold: seconds from the start of the driver to the first commit, by stage.

Calls `tidemark.driver.launch.run_attempt`, as the operator does, and observes it from outside: the driver's log lines, the start of the
JVM and of the Python workers, and the numbered steps of the commit through ``TIDEMARK_STEP_HOOK``. What Airflow does between the schedule
and the task (scheduler, supervisor, parsing of the DAG) is not included.

Also measures warm runs: the same, started by a keeper whose shared application is running.

Except for the first run in an environment, every run finds the class-data archive of `tidemark.spark.class_archive`, so it is built before
the first round.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.product import TRANSFORMS, write_spec
from benchmarks.site import Job, Site, Topic
from benchmarks.stage import Stage
from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.driver import keeper_client
from tidemark.driver.launch import Driver, run_attempt
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice
from tidemark.sink.steps import Step

RECORDS = 1000
WARM_UP = 3
MARKS = "TIDEMARK_BENCH_MARKS"
STAGES = (
    ("claimed", "attempt's row, Python, imports, look-ups in Kafka, claims"),
    ("jvm", "the plan, pyspark, Spark's launcher"),
    ("worker", "the JVM, Spark session, guard of the sink, the job's way to a Python worker"),
    ("begin", "worker: imports, first records, transform"),
    ("committed", "the transaction"),
)
"""The event that ends each stage, in order."""


def mark(step: Step, _part: Slice) -> None:
    """The step hook: writes down when each step was reached, in the process that commits."""
    with Path(os.environ[MARKS]).open("a") as out:
        out.write(f"{step.name} {time.time()}\n")


def measure(stage: Stage, site: Site, width: int, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per form, with medians: ``seconds`` to the first commit and to the end of the run, and the seconds of each stage."""
    topic = stage.topic(Topic("events-small", 1, RECORDS, width))
    report("the class-data archive")
    subprocess.run([sys.executable, "-m", "tidemark.spark.build_archive"], check=True)
    rows = []
    for form in ("bench_arrow", "bench_spark"):
        runs = []
        for number in range(rounds):
            stage.empty()
            moments = _one(site, form, topic)
            error = stage.wrong(Job(topic), "bench.events")
            if error:
                raise RuntimeError(f"{form}: {error}")
            runs.append(moments)
            report(
                f"cold run {number + 1}/{rounds}  {form:<12} first commit after {moments['committed']:.1f} s, end {moments['end']:.1f} s"
            )
        stages, before = {}, "start"
        for name, what in STAGES:
            stages[what] = statistics.median(one[name] - one[before] for one in runs)
            before = name
        first = [one["committed"] for one in runs]
        rows.append(
            {
                "form": form.removeprefix("bench_"),
                "first_commit_s": {"median": statistics.median(first), "min": min(first), "max": max(first)},
                "end_s": statistics.median(one["end"] for one in runs),
                "stages_s": stages,
                "warm": _warm(stage, site, form, topic, rounds, report),
            }
        )
    return rows


def _warm(stage: Stage, site: Site, form: str, topic: Topic, rounds: int, report: Callable[[str], None]) -> dict[str, float]:
    """Seconds to the first commit and to the end of runs in the shared application: medians and maxima."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_STATE", site.folder)
        try:
            for number in range(WARM_UP + rounds):
                stage.empty()
                moments = _one(site, form, topic, kept=True)
                if error := stage.wrong(Job(topic), "bench.events"):
                    raise RuntimeError(f"{form}: {error}")
                report(f"warm run {form:<12} first commit after {moments['committed']:.2f} s, end {moments['end']:.2f} s")
                if number >= WARM_UP:
                    runs.append(moments)
        finally:
            keeper_client.stop_keepers()
    first, end = ([one[name] for one in runs] for name in ("committed", "end"))
    return {"first_commit_s": statistics.median(first), "first_commit_max_s": max(first), "end_s": statistics.median(end)}


def _one(site: Site, form: str, topic: Topic, *, kept: bool = False) -> dict[str, float]:
    """Seconds from the start to each event."""
    folder = Path(site.folder)
    group = f"bench-cold-{form}-{time.monotonic_ns()}"
    write_spec(folder, form, [topic.name], group)
    marks = folder / f"marks-{time.monotonic_ns()}"
    os.environ.update({"TIDEMARK_STEP_HOOK": "benchmarks.cold:mark", MARKS: str(marks), "PYTHONPATH": _python_path()})
    connections = Connections(site.database_url, {"bootstrap.servers": site.servers}, f"local[{site.cores}]")
    moments: dict[str, float] = {}
    start = time.time()
    lines: list[str] = []

    def on_log(line: str) -> None:
        lines.append(line)
        if "partitions claimed" in line:
            moments.setdefault("claimed", _logged(line, start))

    watcher: threading.Thread | None = None

    def on_start(driver: Driver) -> None:
        nonlocal watcher
        watcher = threading.Thread(target=_watch, args=(driver.pid, moments), daemon=True)
        watcher.start()

    try:
        attempt = open_attempt(site.database_url, group, TaskIdentity())
        folders = {"consumers": [folder / "consumers"], "transforms": [TRANSFORMS]}
        hooks: dict[str, Any] = {} if kept else {"on_start": on_start}
        run_attempt(form, connections, attempt, folders=folders, on_log=on_log, on_progress=lambda _: None, with_keeper=kept, **hooks)
    finally:
        for name in ("TIDEMARK_STEP_HOOK", MARKS):
            os.environ.pop(name, None)
    moments["end"] = time.time()
    if watcher is not None:
        watcher.join(5)
    for line in marks.read_text().splitlines():
        step, _, at = line.partition(" ")
        name = {"BEGIN": "begin", "RECEIPT": "committed"}.get(step)
        if name:
            moments.setdefault(name, float(at))
    return {"start": 0.0, **{name: at - start for name, at in moments.items()}}


def _python_path() -> str:
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([root, *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root)])


def _logged(line: str, start: float) -> float:
    """When a log line was written, by its own timestamp: lines arrive here up to half a second later."""
    with contextlib.suppress(ValueError):
        said = time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) + int(line[20:23]) / 1000
        if start <= said <= time.time():
            return said
    return time.time()


def _watch(pid: int, moments: dict[str, float]) -> None:
    """Notes when the driver's JVM starts (not those that print its version or its command), and the first Python process below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        driver = psutil.Process(pid)
        while "worker" not in moments and driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
            for child in driver.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    words = child.cmdline()
                    if child.name() == "java" and "pyspark-shell" in words and "org.apache.spark.launcher.Main" not in words:
                        moments.setdefault("jvm", time.time())
                    elif "tidemark.spark.daemon" in words:
                        moments.setdefault("worker", time.time())
            time.sleep(0.02)
