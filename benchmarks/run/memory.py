"""The memory of a run: does a run with ten times as many records need more? Both forms, with drivers that are started as tasks start them.

While a driver runs, the memory of the driver and all its descendants (JVM, Python workers) is read twenty times a second, as PSS: a page
that several processes share, as forked workers do, is divided among them, so the sum is what the machine needs. Broker and Postgres are not
included.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from benchmarks.harness.consumer import FORMS, drive, write_spec
from benchmarks.harness.processes import MIB, pss, repeated
from benchmarks.harness.site import TABLE, Job
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

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
    topics = [bench.events(records) for records in sizes]
    rows: list[dict[str, Any]] = []
    for form, transform in FORMS.items():
        first = 0.0
        for topic in topics:
            peak = Peak()
            bench.stage.empty()
            with contextlib.ExitStack() as watching:

                def watch(driver: Any, peak: Peak = peak, watching: contextlib.ExitStack = watching) -> None:
                    watching.enter_context(repeated(partial(peak.take, psutil.Process(driver.pid)), EVERY_S))

                drive(bench.site, write_spec(bench.site, transform, topic.name, f"memory-{time.monotonic_ns()}"), on_start=watch)
            if error := bench.stage.wrong(Job(topic), TABLE):
                raise RuntimeError(f"{form} form: {error}")
            together = round(peak.total / MIB)
            first = first or together
            mib = {kind: round(size / MIB) for kind, size in peak.by_kind.items()}
            rows.append({"form": form, "records": topic.records, "together": together, **mib, "to_the_first": together / first})
            bench.report("memory  " + ", ".join(f"{name} {figure}" for name, figure in rows[-1].items()))
    return {"rows": rows, "large": [row for row in rows if row["records"] == max(sizes)]}


MEASUREMENT = Measurement(
    "memory",
    measure,
    Table(
        "Memory of a run at its peak, in MiB",
        f"| records | together | {' | '.join(KINDS)} | to the first",
        "{form} form | {records:,} | {together:,} | {driver:,} | {JVM:,} | {workers:,} | {to_the_first:.2f}",
    ),
    bars=[Bar("memory of {records:,} records / of a tenth, {form} form", lambda row: row["to_the_first"], "large", at_most=1.5)],
    full={"sizes": (1_000_000, 10_000_000)},
    quick={"sizes": (20_000, 200_000)},
)
