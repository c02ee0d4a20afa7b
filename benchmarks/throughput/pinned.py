"""The Arrow form with the client on one core and the servers on another, with what is compiled from C and without it.

Broker and Postgres run on core 1 only. The client (driver, JVM, Python workers) runs on core 0, so its CPU time gives the rate per core of
the client.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import unittest.mock
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.site import Job
from benchmarks.harness.stage import Stage
from benchmarks.harness.turns import Harness, Run, figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME

CLIENT, SERVERS = 0, 1


def measure(bench: Bench, rounds: int) -> Figures:
    """A row with compiled code and one without; ``faster``: rows per CPU second of the client with it, divided by those without."""
    rows = []
    with contextlib.ExitStack() as stack:
        stack.callback(_pin_servers, bench.stage, os.sched_getaffinity(0))
        _pin_servers(bench.stage, {SERVERS})
        job = Job(bench.events())
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        for case, env in {"compiled code": {}, "without it": {"CC": "false", "TIDEMARK_CACHE": cache}}.items():
            of = figures(_runs(bench, env, job, rounds))
            cpu = of["cpu_us_per_row"].get("JVM", 0.0) + of["cpu_us_per_row"].get("Python", 0.0)
            rows.append({"case": case, "client_cpu_us": cpu, "per_cpu_s": 1e6 / cpu if cpu else None, **of})
            bench.report(f"pinned  {case:<44} {of['rows_per_s'] or 0:>9,.0f} rows/s  client {cpu:.2f} µs a row")
    compiled, without = (row["client_cpu_us"] for row in rows)
    return {"rows": rows, "faster": without / compiled if compiled and without else None}


def _runs(bench: Bench, env: Mapping[str, str], job: Job, rounds: int) -> list[Run]:
    """Runs a seat on the client's core."""
    site, cores = replace(bench.site, cores=1), os.sched_getaffinity(0)
    harness = Harness(bench.stage, site, logs=Path(site.folder) / "logs", report=bench.report)
    with unittest.mock.patch.dict(os.environ, env):
        os.sched_setaffinity(0, {CLIENT})
        try:
            return [harness.once(BY_NAME["arrow_transform"], job) for _ in range(rounds + 2)][2:]
        finally:
            harness.close()
            os.sched_setaffinity(0, cores)


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
    bars=[Bar("rows per CPU second of the client, compiled code / without", lambda of: of["faster"], at_least=1.5)],
    full={"rounds": 3},
    quick={"rounds": 1},
)
