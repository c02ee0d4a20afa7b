"""The memory of a run: does a run with ten times as many records need more? Both forms, with drivers that are started as tasks start them.

While a driver runs, the memory of the driver and all its descendants (JVM, Python workers) is read twenty times a second, as PSS: a page
that several processes share, as forked workers do, is divided among them, so the sum is what the machine needs. Broker and Postgres are not
included. The smaller run reads the end of the larger run's topic.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from benchmarks.harness.consumer import FORMS, drive, start_group, write_spec
from benchmarks.harness.processes import MIB, pss, repeated, timed
from benchmarks.harness.site import PARTITIONS, TABLE, Job, Site, Topic
from benchmarks.measurement import Bench, Figures, Measurement, Table

from tidemark.spec import ConsumerSpec

EVERY_S = 0.05
KINDS = ("driver", "JVM", "workers")


@dataclass(slots=True)
class Peak:
    """Bytes: the peak of all processes together, and the peak of each kind of process, which may be at another time."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def take(self, driver: psutil.Process) -> None:
        now = dict.fromkeys(KINDS, 0)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (driver, *driver.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    kind = "driver" if process == driver else "JVM" if process.name() == "java" else "workers"
                    now[kind] += pss(process)
        self.total = max(self.total, sum(now.values()))
        self.by_kind = {kind: max(self.by_kind[kind], now[kind]) for kind in KINDS}


def measure(bench: Bench, sizes: Sequence[int]) -> Figures:
    """A row per form and size: peaks in MiB, and ``to_the_first``, the peak divided by that of the first size."""
    topic = bench.stage.topic(Topic("events-large", PARTITIONS, max(sizes), bench.width))
    rows: list[dict[str, Any]] = []
    for form, transform in FORMS.items():
        first = 0.0
        for records in sizes:
            job, peak = Job(topic, tail=records // PARTITIONS), Peak()
            bench.stage.empty()
            group = start_group(bench.site, f"memory-{time.monotonic_ns()}", job)
            spec = write_spec(bench.site, transform, [topic.name], group)
            seconds = timed(lambda spec=spec, peak=peak: drive_watched(bench.site, spec, peak))
            if error := bench.stage.wrong(job, TABLE):
                raise RuntimeError(f"{form} form: {error}")
            together = round(peak.total / MIB)
            first = first or together
            mib = {kind: round(size / MIB) for kind, size in peak.by_kind.items()}
            row = {"form": form, "records": records, "seconds": seconds, "together": together, **mib, "to_the_first": together / first}
            bench.report("memory  " + ", ".join(f"{name} {figure}" for name, figure in row.items()))
            rows.append(row)
    return {"rows": rows}


def drive_watched(site: Site, spec: ConsumerSpec, peak: Peak, **options: Any) -> None:
    """One attempt in a driver of its own, whose memory is read while it runs."""
    with contextlib.ExitStack() as watching:

        def watch(driver: Any) -> None:
            process = psutil.Process(driver.pid)
            watching.enter_context(repeated(lambda: peak.take(process), EVERY_S))

        drive(site, spec, on_start=watch, **options)


MEASUREMENT = Measurement(
    "memory",
    measure,
    Table(
        "Memory of a run at its peak, in MiB",
        f"| records | together | {' | '.join(KINDS)} | to the first",
        "{form} form | {records:,} | {together:,} | {driver:,} | {JVM:,} | {workers:,} | {to_the_first:.2f}",
    ),
    full={"sizes": (1_000_000, 10_000_000)},
    quick={"sizes": (100_000, 500_000)},
)
