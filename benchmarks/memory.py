"""The memory of a run: does a run with ten times as many records need more? Both forms, with drivers that are started as tasks start them.

    python -m benchmarks.memory                             1 and 10 million records
    python -m benchmarks.memory --records 100000 500000     only checks that it works

`tidemark.driver.launch.run_attempt` starts the driver. While it runs, the memory of the driver and all its descendants (JVM, Python
workers) is read twenty times a second, as PSS: a page that several processes share, as forked workers do, is divided among them, so the
sum is what the machine needs. Broker and Postgres are not included. The smaller run reads the end of the larger run's topic.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.product import TRANSFORMS, write_spec
from benchmarks.site import TABLE, Job, Site, Topic
from benchmarks.stage import Stage, set_up
from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.driver.launch import run_attempt
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity

FORMS = ("bench_arrow", "bench_spark")
FULL = (1_000_000, 10_000_000)
QUICK = (100_000, 500_000)
PARTITIONS = 4
EVERY_S = 0.05
KINDS = ("driver", "JVM", "workers")
MIB = 2**20


@dataclass(slots=True)
class Peak:
    """The peak of all processes together, and the peak of each kind of process, which may be at another time."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    samples: int = 0

    def take(self, by_kind: dict[str, int]) -> None:
        self.total = max(self.total, sum(by_kind.values()))
        self.by_kind = {kind: max(self.by_kind[kind], by_kind[kind]) for kind in KINDS}
        self.samples += 1


def measure(stage: Stage, site: Site, sizes: Sequence[int], width: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per form. ``runs``: one per size, with ``records``, seconds and peaks in MiB. ``ratio``: the last size's peak / the first's."""
    topic = stage.topic(Topic("events-large", PARTITIONS, max(sizes), width))
    rows = []
    for form in FORMS:
        runs = []
        for records in sizes:
            job = Job(topic, tail=records // PARTITIONS)
            stage.empty()
            began = time.monotonic()
            peak = _one(site, form, job)
            seconds = time.monotonic() - began
            if error := stage.wrong(job, TABLE):
                raise RuntimeError(f"{form}: {error}")
            mib = {kind: round(found / MIB) for kind, found in peak.by_kind.items()}
            runs.append({"records": records, "seconds": seconds, "peak_mib": round(peak.total / MIB), **mib, "samples": peak.samples})
            report(f"memory  {form:<12} {records:>10,} records  peak {peak.total / MIB:,.0f} MiB  {mib}  {seconds:.1f} s")
        ratio = runs[-1]["peak_mib"] / runs[0]["peak_mib"]
        report(f"memory  {form:<12} {sizes[-1]:,} records need {ratio:.2f} times what {sizes[0]:,} do")
        rows.append({"form": form.removeprefix("bench_"), "runs": runs, "ratio": ratio})
    return rows


def table(memory: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows, as `benchmarks.report` prints them."""
    rows = []
    for one in memory:
        for run in one["runs"]:
            share = run["peak_mib"] / one["runs"][0]["peak_mib"]
            figures = [f"{run[name]:,}" for name in ("records", "peak_mib", *KINDS)]
            rows.append([f"{one['form'].capitalize()} form", *figures, f"{share:.2f}"])
    return "Memory of a run at its peak, in MiB", ["", "records", "together", *KINDS, "to the first"], rows


def _one(site: Site, form: str, job: Job) -> Peak:
    """One run of a new group whose positions are at the start of the job."""
    folder = Path(site.folder)
    group = f"bench-memory-{form}-{time.monotonic_ns()}"
    write_spec(folder, form, [job.topic.name], group)
    with session(site.database_url) as connection, transaction(connection) as cur:
        group_id = store.ensure_group(cur, group)
        for number in range(job.topic.partitions):
            store.start_partition(cur, group_id, job.topic.topic_id, number, job.first)
    connections = Connections(site.database_url, {"bootstrap.servers": site.servers}, f"local[{site.cores}]")
    peak = Peak()
    with contextlib.ExitStack() as watching:
        run_attempt(
            form,
            connections,
            open_attempt(site.database_url, group, TaskIdentity()),
            folders={"consumers": [folder / "consumers"], "transforms": [TRANSFORMS]},
            on_log=lambda line: None,
            on_progress=lambda progress: None,
            on_start=lambda driver: watching.enter_context(_watched(driver.pid, peak)),
        )
    return peak


@contextlib.contextmanager
def _watched(pid: int, peak: Peak) -> Iterator[None]:
    """Reads the memory of a process and all its descendants while the block runs."""
    ended = threading.Event()

    def watch() -> None:
        driver = psutil.Process(pid)
        while not ended.wait(EVERY_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                peak.take(_resident(driver))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _resident(driver: psutil.Process) -> dict[str, int]:
    """PSS in bytes, by kind of process. A process that ends meanwhile counts as 0."""
    found = dict.fromkeys(KINDS, 0)
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            kind = "driver" if process == driver else "JVM" if process.name() == "java" else "workers"
            found[kind] += process.memory_full_info().pss
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="The memory of a run, by the records it reads.")
    parser.add_argument("--records", type=int, nargs="+", metavar="N", default=FULL, help="sizes of the runs (1,000,000 and 10,000,000)")
    parser.add_argument("--width", type=int, default=170, metavar="BYTES", help="about how long a record is; 155 at least (170)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep servers' data here, and find the topics again")
    arguments = parser.parse_args()
    sizes = sorted(records - records % PARTITIONS for records in arguments.records)
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-memory-") as folder, set_up(arguments.folder, print) as stage:
        site = Site(stage.database_url, stage.servers, folder, psutil.cpu_count() or 1)
        measure(stage, site, sizes, arguments.width, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
