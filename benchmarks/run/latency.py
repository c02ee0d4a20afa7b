"""From a record to its commit, in a continuous run with 1,000 records a second and a driver that is started as a task starts it.

The clock starts when a record is handed to the producer and stops when its ledger row is written, the last statement before COMMIT. Both
times are of this machine's clock. Records that are produced while the JVM still compiles are excluded.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from benchmarks.harness.consumer import FORMS, drive, write_spec
from benchmarks.harness.processes import repeated
from benchmarks.harness.site import PARTITIONS, Site, Topic
from benchmarks.harness.stage import autocommit
from benchmarks.measurement import Bench, Figures, Measurement, Table
from benchmarks.records.events import fill, value
from tests.support.waiting import until

from tidemark.consume.run import open_attempt
from tidemark.driver.launch import kill_group
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity
from tidemark.spec import ConsumerSpec

RATE = 1_000
WARM_S = 30.0
AFTER_S = 3.0
"""Seconds in which records are still produced after the next run has taken over."""
LIMIT_S = 90.0
TICK_S = 0.01


def measure(bench: Bench, seconds: float) -> Figures:
    """A row per form: percentiles of ``records`` in ``commits``, and ``handover_ms``, the longest wait of a record while the next run took
    over."""
    rows = []
    for form in FORMS:
        bench.stage.empty()
        rows.append({"form": form.lower(), **_one(bench, form, seconds)})
        bench.report("latency " + ", ".join(f"{name} {figure:.0f}" if name != "form" else figure for name, figure in rows[-1].items()))
    return {"rows": rows}


def _one(bench: Bench, form: str, seconds: float) -> dict[str, Any]:
    topic = f"live-{form.lower()}-{time.monotonic_ns()}"
    fill(bench.site.servers, Topic(topic, PARTITIONS, 0, bench.width))
    spec = write_spec(bench.site, FORMS[form], [topic], topic, run="continuous", run_for="1h")
    with contextlib.ExitStack() as stack:
        first = _Run(bench.site, spec, stack)
        with _producing(bench.site.servers, topic, bench.width) as produced:
            until(first.commits, "the first commit", LIMIT_S)
            time.sleep(WARM_S)
            began = time.time()
            time.sleep(seconds)
            ended = time.time()
            second = _Run(bench.site, spec, stack)
            until(lambda: not first.alive, "the next run taking over", LIMIT_S)
            time.sleep(AFTER_S)
        ends = dict.fromkeys(range(PARTITIONS), len(produced[0]))
        until(lambda: {partition: end for partition, _, end, _ in second.commits()} == ends, "all records committed", LIMIT_S)
        commits = [*first.commits(), *second.commits()]
    waited = [
        (then, committed.timestamp() - then) for partition, start, end, committed in commits for then in produced[partition][start:end]
    ]
    steady = sorted(wait for then, wait in waited if began <= then < ended)
    return {
        "p50_ms": statistics.median(steady) * 1000,
        "p99_ms": steady[int(len(steady) * 0.99)] * 1000,
        "max_ms": steady[-1] * 1000,
        "handover_ms": max(wait for then, wait in waited if then >= ended) * 1000,
        "records": len(steady),
        "commits": sum(began <= committed.timestamp() < ended for *_, committed in commits),
    }


class _Run:
    """A run that is started as a task starts it. Its driver is killed at the end of the measurement."""

    def __init__(self, site: Site, spec: ConsumerSpec, stack: contextlib.ExitStack) -> None:
        self._site, self._spec = site, spec
        self._attempt = open_attempt(site.database_url, spec.group, TaskIdentity())
        self._drivers: list[subprocess.Popen[str]] = []
        self._thread = threading.Thread(target=self._follow)
        stack.callback(self._thread.join, LIMIT_S)
        stack.callback(self._kill)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.suppress(TidemarkError):  # it was killed
            drive(self._site, self._spec, self._attempt, on_start=self._drivers.append)

    def _kill(self) -> None:
        for driver in self._drivers:
            kill_group(driver)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def commits(self) -> list[tuple[int, int, int, datetime]]:
        """Partition, start, end and time of each commit."""
        columns = "partition, start_offset, end_offset, committed_at"
        with autocommit(self._site.database_url) as cur:
            cur.execute(f"SELECT {columns} FROM tidemark.batch WHERE attempt_id = %s ORDER BY 1, 2", (self._attempt,))
            return list(cur.fetchall())


@contextlib.contextmanager
def _producing(servers: str, topic: str, width: int) -> Iterator[list[list[float]]]:
    """Produces at the rate, round robin, while the block runs. Yields the time of each record, by partition and offset."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 0, "log_level": 3})
    produced: list[list[float]] = [[] for _ in range(PARTITIONS)]
    start, numbers = time.time(), itertools.count()

    def produce() -> None:
        due = (time.time() - start) * RATE
        while len(produced[0]) * PARTITIONS < due:  # whole rounds
            for partition, number in zip(range(PARTITIONS), numbers):  # noqa: B905
                produced[partition].append(time.time())
                producer.produce(topic, value=value(number, width), partition=partition)
        producer.poll(0)

    with repeated(produce, TICK_S):
        yield produced
    if producer.flush(LIMIT_S):
        raise RuntimeError(f"{topic}: the broker did not take all records")


MEASUREMENT = Measurement(
    "latency",
    measure,
    Table(
        "A continuous run at 1,000 records/s: milliseconds from produce to commit",
        "form | p50 | p99 | max | max while the next run takes over",
        "{form} | {p50_ms:.0f} | {p99_ms:.0f} | {max_ms:.0f} | {handover_ms:.0f}",
    ),
    full={"seconds": 60.0},
    quick={"seconds": 5.0},
)
