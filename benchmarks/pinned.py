"""The Arrow form with the client on one core and the servers on another, and on a Spark cluster with one and with two executors.

Broker and Postgres run on core 1 only. The client (driver, JVM, Python workers) runs on core 0, so its CPU time gives the rate per core of
the client. There is no third core: a second executor runs on core 1, beside the servers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import spark_cluster

from benchmarks.contestants import BY_NAME
from benchmarks.harness import Figure, Harness, Run
from benchmarks.site import Job, Site, Topic
from benchmarks.stage import Stage
from tidemark.wires import AUTHENTICATE

CLIENT, SERVERS = 0, 1
LOCAL, MESSAGES, ONE, TWO = (
    "local, 1 core",
    "local, 1 core, without the compiled reader",
    "cluster, 1 executor on core 0",
    "cluster, 2 executors on cores 0 and 1",
)
FASTER = 1.5
"""The bar: rows per CPU second of the client with the compiled reader / without it."""
EXECUTORS = {"spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.scheduler.minRegisteredResourcesRatio": "1.0"}


def measure(stage: Stage, site: Site, topic: Topic, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per case, with the figure of `benchmarks.harness`."""
    found = []
    with contextlib.ExitStack() as stack:
        everything = os.sched_getaffinity(0)
        stack.callback(_pin, stage, everything)
        _pin(stage, {SERVERS})
        for case, settings, env, beside in _cases(stack):
            runs = _runs(stage, replace(site, cores=1, **settings), env, beside, Job(topic), rounds, report)
            figure = Figure(runs)
            cpu = figure.cpu_us_a_row
            found.append({"case": case, "client_cpu_us": cpu.get("JVM", 0.0) + cpu.get("Python", 0.0), **figure.to_dict()})
            report(f"pinned  {case:<44} {figure.median or 0:>9,.0f} rows/s  client {found[-1]['client_cpu_us']:.2f} µs a row")
    return found


def _cases(stack: contextlib.ExitStack) -> Iterator[tuple[str, dict[str, Any], dict[str, str], list[int]]]:
    """Yields name, settings of the site, environment, and the processes that work for the client."""
    yield LOCAL, {}, {}, []
    yield MESSAGES, {}, {"CC": "false", "TIDEMARK_CACHE": stack.enter_context(tempfile.TemporaryDirectory())}, []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-cluster-", ignore_cleanup_errors=True)))
    with spark_cluster.running(folder) as cluster:
        workers = [process.pid for process in cluster.processes[1:]]
        for pid, core in zip(workers, (CLIENT, SERVERS), strict=True):  # executors are their children
            _pin_process(pid, {core})
        yield TWO, {"master": cluster.master, "spark_conf": EXECUTORS | {"spark.cores.max": "2", AUTHENTICATE: "false"}}, {}, workers
        last = cluster.processes.pop()
        last.kill()
        last.wait()
        yield ONE, {"master": cluster.master, "spark_conf": EXECUTORS | {"spark.cores.max": "1", AUTHENTICATE: "false"}}, {}, workers[:1]


def _runs(
    stage: Stage, site: Site, env: dict[str, str], beside: list[int], job: Job, rounds: int, report: Callable[[str], None]
) -> tuple[Run, ...]:
    """Runs a seat on the client's core."""
    before, cores = dict(os.environ), os.sched_getaffinity(0)
    os.environ.update(env)
    os.sched_setaffinity(0, {CLIENT})
    harness = Harness(stage, site, quix_python=None, logs=Path(site.folder) / "logs", report=report, beside=beside)
    try:
        return tuple(harness.once(BY_NAME["arrow_transform"], job) for _ in range(rounds + 2))[2:]
    finally:
        harness.close()
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(before)


def _pin(stage: Stage, cores: set[int]) -> None:
    for family in stage.processes().values():
        for process in family:
            _pin_process(process.pid, cores)


def _pin_process(pid: int, cores: set[int]) -> None:
    """Pins all its threads. Threads and processes that it starts later inherit this."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - numbers
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)


def table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows, as `benchmarks.report` prints them."""
    cells = [
        [one["case"], f"{one['rows_per_s']['median'] or 0:,.0f}", f"{one['client_cpu_us']:.2f}", f"{1e6 / one['client_cpu_us']:,.0f}"]
        for one in rows
        if one["client_cpu_us"]
    ]
    return "Arrow form, servers on core 1", ["", "rows/s", "CPU µs a row of the client", "rows per CPU second of the client"], cells
