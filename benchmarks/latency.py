"""From a record to its commit, in a continuous run with 1,000 records a second and a driver that is started as a task starts it.

The clock starts when a record is handed to the producer and stops when its ledger row is written, the last statement before COMMIT. Both
times are of this machine's clock. Records that are produced while the JVM still compiles are excluded.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg2

from benchmarks.data import fill, value
from benchmarks.product import TRANSFORMS, write_spec
from benchmarks.site import Site, Topic
from benchmarks.stage import Stage
from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.driver.launch import kill_group, run_attempt
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity

RATE, PARTITIONS = 1_000, 4
WARM_S = 30.0
AFTER_S = 3.0
"""Seconds in which records are still produced after the next run has taken over."""
LIMIT_S = 90.0
TICK_S = 0.01


def measure(stage: Stage, site: Site, width: int, seconds: float, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per form: ``p50_ms, p99_ms, max_ms`` of ``records`` in ``commits``, and ``handover_ms``, the longest wait of a record while the
    next run took over."""
    rows = []
    for form in ("bench_arrow", "bench_spark"):
        stage.empty()
        row = {"form": form.removeprefix("bench_"), **_one(site, form, width, seconds)}
        times = ", ".join(f"{name.removesuffix('_ms')} {row[name]:.0f} ms" for name in ("p50_ms", "p99_ms", "max_ms", "handover_ms"))
        report(f"latency {form:<12} {times}, {row['records']} records in {row['commits']} commits")
        rows.append(row)
    return rows


def _one(site: Site, form: str, width: int, seconds: float) -> dict[str, Any]:
    topic = f"live-{form.replace('_', '-')}-{time.monotonic_ns()}"
    fill(site.servers, Topic(topic, PARTITIONS, 0, width))
    spec = write_spec(Path(site.folder), form, [topic], group=topic, run="continuous", run_for="1h")
    with contextlib.ExitStack() as stack:
        first = _Run(site, form, spec.group, stack)
        with _Source(site.servers, topic, width) as source:
            _until(lambda: first.commits(), "the first commit")
            time.sleep(WARM_S)
            began = time.time()
            time.sleep(seconds)
            ended = time.time()
            second = _Run(site, form, spec.group, stack)
            _until(lambda: not first.alive, "the next run taking over")
            time.sleep(AFTER_S)
        records = len(source.produced[0])
        _until(lambda: second.ends() == dict.fromkeys(range(PARTITIONS), records), "all records committed")
        commits = [*first.commits(), *second.commits()]
    waited = [
        (then, committed.timestamp() - then)
        for partition, start, end, committed in commits
        for then in source.produced[partition][start:end]
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

    def __init__(self, site: Site, form: str, group: str, stack: contextlib.ExitStack) -> None:
        self._site, self._form = site, form
        self._connections = Connections(site.database_url, {"bootstrap.servers": site.servers}, f"local[{site.cores}]")
        self._attempt = open_attempt(site.database_url, group, TaskIdentity())
        self._thread = threading.Thread(target=self._follow)
        stack.callback(self._thread.join, LIMIT_S)
        stack.callback(self._kill)
        self._drivers: list[subprocess.Popen[str]] = []
        self._thread.start()

    def _follow(self) -> None:
        folders = {"consumers": [Path(self._site.folder) / "consumers"], "transforms": [TRANSFORMS]}
        told: dict[str, Any] = {"on_log": lambda _: None, "on_progress": lambda _: None, "on_start": self._drivers.append}
        with contextlib.suppress(TidemarkError):  # it was killed
            run_attempt(self._form, self._connections, self._attempt, folders=folders, **told)

    def _kill(self) -> None:
        for driver in self._drivers:
            kill_group(driver)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def commits(self) -> list[tuple[int, int, int, datetime]]:
        """Partition, start, end and time of each commit."""
        columns = "partition, start_offset, end_offset, committed_at"
        with contextlib.closing(psycopg2.connect(self._site.database_url)) as connection, connection.cursor() as cur:
            cur.execute(f"SELECT {columns} FROM tidemark.batch WHERE attempt_id = %s ORDER BY 1, 2", (self._attempt,))
            return cur.fetchall()

    def ends(self) -> dict[int, int]:
        return {partition: end for partition, _, end, _ in self.commits()}


class _Source:
    """Produces at the rate, round robin, in a thread. ``produced`` has the time of each record, by partition and offset."""

    def __init__(self, servers: str, topic: str, width: int) -> None:
        from confluent_kafka import Producer

        self.produced: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 0, "log_level": 3})
        self._topic, self._width = topic, width
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce)

    def __enter__(self) -> _Source:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._producer.flush(LIMIT_S):
            raise RuntimeError(f"{self._topic}: the broker did not take all records")

    def _produce(self) -> None:
        start, number = time.time(), 0
        while not self._stop.wait(TICK_S):
            due = (time.time() - start) * RATE
            while number < due or number % PARTITIONS:  # whole rounds
                self.produced[number % PARTITIONS].append(time.time())
                self._producer.produce(self._topic, value=value(number, self._width), partition=number % PARTITIONS)
                number += 1
            self._producer.poll(0)


def _until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.2)
