"""A small scheduled run, cold: seconds from the start of the driver to the first commit, by stage.

Starts a driver as the operator does, and observes it from outside: the driver's log lines, the start of the JVM and of the Python workers,
and the numbered steps of the commit through ``TIDEMARK_STEP_HOOK``. What Airflow does between the schedule and the task (scheduler,
supervisor, parsing of the DAG) is not included.

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
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.harness.consumer import FORMS, drive, write_spec
from benchmarks.harness.processes import spread
from benchmarks.harness.site import ROOT, TABLE, Job, Topic
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.driver import keeper_client
from tidemark.driver.launch import Driver
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
STEPS = {"BEGIN": "begin", "RECEIPT": "committed"}


def mark(step: Step, _part: Slice) -> None:
    """The step hook: writes down when each step was reached, in the process that commits."""
    with Path(os.environ[MARKS]).open("a") as out:
        out.write(f"{step.name} {time.time()}\n")


def measure(bench: Bench, rounds: int) -> Figures:
    """For each form, rows of stage and seconds, which are medians; ``warm``: a row per form."""
    topic = bench.stage.topic(Topic("events-small", 1, RECORDS, bench.width))
    bench.report("the class-data archive")
    subprocess.run([sys.executable, "-m", "tidemark.spark.build_archive"], check=True)
    figures: dict[str, Any] = {"warm": []}
    for form in FORMS:
        cold = [_one(bench, form, topic, kept=False) for _ in range(rounds)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIDEMARK_STATE", bench.site.folder)
            try:
                warm = [_one(bench, form, topic, kept=True) for _ in range(WARM_UP + rounds)][WARM_UP:]
            finally:
                keeper_client.stop_keepers()
        first, committed = (spread([one["committed"] for one in runs]) for runs in (cold, warm))
        end, kept_end = (statistics.median(one["end"] for one in runs) for runs in (cold, warm))
        befores = ("start", *(name for name, _ in STAGES))
        stages = [(what, statistics.median(one[name] - one[before] for one in cold)) for (name, what), before in zip(STAGES, befores)]  # noqa: B905
        rows = [
            *((what, f"{seconds:.1f}") for what, seconds in stages),
            ("first commit", f"{first['median']:.1f} ({first['min']:.1f} to {first['max']:.1f})"),
            ("end of the run", f"{end:.1f}"),
            ("in the shared application: first commit", f"{committed['median']:.2f} (at most {committed['max']:.2f})"),
            ("in the shared application: end of the run", f"{kept_end:.2f}"),
        ]
        figures[form] = [{"stage": stage, "s": seconds} for stage, seconds in rows]
        figures["warm"].append({"form": form, "first_commit_s": committed["median"], "runs": {"cold": cold, "warm": warm}})
    return figures


def _one(bench: Bench, form: str, topic: Topic, *, kept: bool) -> dict[str, float]:
    """Seconds from the start of a run to each event."""
    bench.stage.empty()
    spec = write_spec(bench.site, FORMS[form], [topic.name], f"bench-cold-{time.monotonic_ns()}")
    marks = Path(bench.site.folder, f"marks-{time.monotonic_ns()}")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    moments: dict[str, float] = {}
    start, watchers = time.time(), list[threading.Thread]()

    def on_log(line: str) -> None:
        if "partitions claimed" in line:
            moments.setdefault("claimed", _logged(line, start))

    def on_start(driver: Driver) -> None:
        watchers.append(threading.Thread(target=_watch, args=(driver.pid, moments), daemon=True))
        watchers[0].start()

    hooks: dict[str, Any] = {} if kept else {"on_start": on_start}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TIDEMARK_STEP_HOOK": "benchmarks.run.cold:mark", "PYTHONPATH": path, MARKS: str(marks)}.items():
            patch.setenv(name, value)
        drive(bench.site, spec, on_log=on_log, with_keeper=kept, **hooks)
    moments["end"] = time.time()
    for watcher in watchers:
        watcher.join(5)
    for line in marks.read_text().splitlines():
        step, _, at = line.partition(" ")
        if step in STEPS:
            moments.setdefault(STEPS[step], float(at))
    if error := bench.stage.wrong(Job(topic), TABLE):
        raise RuntimeError(f"{form} form: {error}")
    moments = {"start": 0.0, **{name: at - start for name, at in moments.items()}}
    times = f"first commit after {moments['committed']:.2f} s, end {moments['end']:.2f} s"
    bench.report(f"{'warm' if kept else 'cold'} run, {form} form: {times}")
    return moments


def _logged(line: str, start: float) -> float:
    """When a log line was written, by its own timestamp: lines arrive here up to half a second later."""
    with contextlib.suppress(ValueError):
        written = time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) + int(line[20:23]) / 1000
        if start <= written <= time.time():
            return written
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


MEASUREMENT = Measurement(
    "cold",
    measure,
    *(Table(f"A cold run of 1,000 records, {form} form", "stage | s", "{stage} | {s}", form) for form in FORMS),
    bars=[Bar("first commit of a warm run, {form} form, s", lambda row: row["first_commit_s"], "warm", at_most=1.5)],
    full={"rounds": 3},
    quick={"rounds": 1},
)
