"""The Arrow form with the client on one core and the servers on another, and on a Spark cluster with one and with two executors.

Broker and Postgres run on core 1 only. The client (driver, JVM, Python workers) runs on core 0, so its CPU time gives the rate per core of
the client. There is no third core: a second executor runs on core 1, beside the servers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.site import Job
from benchmarks.harness.stage import Stage
from benchmarks.harness.turns import Harness, Run, figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME
from tests.support import spark_cluster

from tidemark.wires import AUTHENTICATE

CLIENT, SERVERS = 0, 1
EXECUTORS = {"spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.scheduler.minRegisteredResourcesRatio": "1.0"}


def measure(bench: Bench, rounds: int) -> Figures:
    """A row per case; ``faster``: rows per CPU second of the client with the compiled reader, divided by those without it."""
    rows, cost = [], {}
    with contextlib.ExitStack() as stack:
        stack.callback(_pin_servers, bench.stage, os.sched_getaffinity(0))
        _pin_servers(bench.stage, {SERVERS})
        job = Job(bench.events())
        for case, settings, env, beside in _cases(stack):
            of = figures(_runs(bench, settings, env, beside, job, rounds))
            cpu = of["cpu_us_per_row"].get("JVM", 0.0) + of["cpu_us_per_row"].get("Python", 0.0)
            cost[case] = cpu
            rows.append({"case": case, "client_cpu_us": cpu, "per_cpu_s": 1e6 / cpu if cpu else None, **of})
            bench.report(f"pinned  {case:<44} {of['rows_per_s'] or 0:>9,.0f} rows/s  client {cpu:.2f} µs a row")
    local, messages, *_ = cost.values()
    return {"rows": rows, "faster": messages / local if local and messages else None}


def _cases(stack: contextlib.ExitStack) -> Iterator[tuple[str, dict[str, Any], dict[str, str], list[int]]]:
    """Yields name, settings of the site, environment, and the processes that work for the client."""
    yield "local, 1 core", {}, {}, []
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    yield "local, 1 core, without the compiled reader", {}, {"CC": "false", "TIDEMARK_CACHE": cache}, []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-cluster-", ignore_cleanup_errors=True)))
    with spark_cluster.running(folder) as cluster:
        workers = [process.pid for process in cluster.processes[1:]]
        for pid, core in zip(workers, (CLIENT, SERVERS), strict=True):  # executors are their children
            _pin(pid, {core})

        def settings(cores: str) -> dict[str, Any]:
            return {"master": cluster.master, "spark_conf": EXECUTORS | {"spark.cores.max": cores, AUTHENTICATE: "false"}}

        yield "cluster, 2 executors on cores 0 and 1", settings("2"), {}, workers
        last = cluster.processes.pop()
        last.kill()
        last.wait()
        yield "cluster, 1 executor on core 0", settings("1"), {}, workers[:1]


def _runs(bench: Bench, settings: Mapping[str, Any], env: Mapping[str, str], beside: list[int], job: Job, rounds: int) -> list[Run]:
    """Runs a seat on the client's core."""
    before, cores = dict(os.environ), os.sched_getaffinity(0)
    os.environ.update(env)
    os.sched_setaffinity(0, {CLIENT})
    site = replace(bench.site, cores=1, **settings)
    harness = Harness(bench.stage, site, logs=Path(site.folder) / "logs", report=bench.report, beside=beside)
    try:
        return [harness.once(BY_NAME["arrow_transform"], job) for _ in range(rounds + 2)][2:]
    finally:
        harness.close()
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(before)


def _pin_servers(stage: Stage, cores: set[int]) -> None:
    for family in stage.processes().values():
        for process in family:
            _pin(process.pid, cores)


def _pin(pid: int, cores: set[int]) -> None:
    """Pins all its threads. Threads and processes that it starts later inherit this."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - numbers
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)


MEASUREMENT = Measurement(
    "pinned",
    measure,
    Table(
        "Arrow form, servers on core 1",
        "| rows/s | CPU µs a row of the client | rows per CPU second of the client",
        "{case} | {rows_per_s:,.0f} | {client_cpu_us:.2f} | {per_cpu_s:,.0f}",
    ),
    bars=[Bar("rows per CPU second of the client, compiled reader / without", lambda of: of["faster"], at_least=1.5)],
    full={"rounds": 3},
    quick={"rounds": 1},
)
