"""Retries: what a hand-off costs a run, how fast the relay publishes, and how fast a drain retries.

Runs the product end to end, as in `benchmarks.product`, with one transform for all parts.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2

from benchmarks.product import _Product
from benchmarks.site import Job, Site, Topic
from benchmarks.stage import Stage
from tidemark.consume import run
from tidemark.db import session
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import TaskIdentity
from tidemark.retry.pending import busy
from tidemark.retry.relay import relay
from tidemark.retry.topics import ensure_topics
from tidemark.spec.model import RetrySettings, RetryTopics

CASES = ((1, (0, 10, 100)), (4, (100,)))
"""Partitions of the retry topic, and how many of 1000 records fail at first."""
FILE = "BENCH_FLAKY"
"""The environment variable with the path of the file that holds the share. Set before Spark starts, so that its workers inherit it."""
DELAY = "1s"


class Flaky(_Product):
    transform = "bench_flaky"

    def __init__(self, site: Site, *, delay: str = DELAY, partitions: int = 1) -> None:
        self._retry = RetrySettings(delays=(delay,), topics=RetryTopics(partitions=partitions))
        self._share = Path(os.environ[FILE])
        self.fails(0)
        super().__init__(site)

    def fails(self, share: int) -> None:
        """From the next batch on, so many of 1000 records fail."""
        self._share.write_text(str(share))

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        self._this = self._this.model_copy(update={"retry": self._retry})
        self._engine._engine._spec = self._this  # noqa: SLF001
        ensure_topics(Cluster(self._connections.kafka), self._this, create=True)

    @property
    def group(self) -> str:
        return self._this.group

    def waiting(self) -> bool:
        """Whether any record is waiting."""
        with session(self._site.database_url) as connection:
            return self.group in busy(connection)

    def relay(self, expected: int | None = None) -> None:
        """Publishes the outbox. Raises if it did not hold ``expected`` records."""
        with session(self._site.database_url) as connection:
            done = relay(connection, self._connections.kafka, self._this).records
        if expected is not None and done != expected:
            raise RuntimeError(f"{done:,} records were handed off and published; {expected:,} should have failed")

    def wait(self) -> None:
        """Waits until all waiting records are due."""
        with contextlib.closing(psycopg2.connect(self._site.database_url)) as connection, connection, connection.cursor() as cur:
            cur.execute("SELECT extract(epoch FROM max(due_at) - clock_timestamp()) FROM tidemark.failed_record WHERE state = 'WAITING'")
            (left,) = cur.fetchone() or (0,)
        time.sleep(max(0.0, float(left or 0)))

    def drain(self) -> None:
        attempt = run.open_attempt(self._site.database_url, self._this.group, TaskIdentity())
        run.consume(self._this, self._connections, attempt, lambda _records: self._engine, drain=True)


def measure(stage: Stage, site: Site, topic: Topic, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per case: median records/s of the run, the relay and the drain, and the time that each failed record adds to the run."""
    job, found = Job(topic), list[dict[str, Any]]()
    for partitions, shares in CASES:
        product = Flaky(site, partitions=partitions)
        try:
            _round(stage, product, job, shares[-1])
            for share in shares:
                taken = [_round(stage, product, job, share) for _ in range(rounds)]
                run_s, relay_s, drain_s = (statistics.median(times) for times in zip(*taken, strict=True))
                failed = job.rows * share // 1000
                row = {"share": share / 1000, "partitions": partitions, "records": job.rows, "failed": failed, "run_s": run_s}
                row |= {"run_per_s": job.rows / run_s}
                if failed:
                    added = (run_s - found[0]["run_s"]) / failed * 1e6
                    row |= {"added_us": added, "relay_per_s": failed / relay_s, "drain_per_s": failed / drain_s, "drain_s": drain_s}
                report(
                    ", ".join(f"{name} {value:,.3g}" if isinstance(value, float) else f"{name} {value:,}" for name, value in row.items())
                )
                found.append(row)
        finally:
            product.close()
    return found


def table(found: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    what = ("records/s of the run", "µs each failed one adds", "relay records/s", "drain records/s", "share of the run")
    columns = ["fail at first", "partitions of the retry topic", *what]
    rows = []
    for one in found:
        cells = [f"{one['share']:.0%}", str(one["partitions"]), f"{one['run_per_s']:,.0f}"]
        if one["failed"]:
            cells += [f"{one['added_us']:.0f}", f"{one['relay_per_s']:,.0f}", f"{one['drain_per_s']:,.0f}"]
            cells.append(f"{one['drain_per_s'] / one['run_per_s']:.0%}")
        rows.append(cells + [""] * (len(columns) - len(cells)))
    return "Retries, Arrow form", columns, rows


def _round(stage: Stage, product: Flaky, job: Job, share: int) -> tuple[float, float, float]:
    """Seconds of a run in which a share fails, of the relay, and of the drain that loads it. Checks that then every record is loaded."""
    stage.empty()
    product.fails(share)
    product.prepare(job)
    run_s = _timed(lambda: product.run(job))
    product.fails(0)
    relay_s = _timed(lambda: product.relay(job.rows * share // 1000))
    product.wait()
    drain_s = _timed(product.drain)
    if wrong := stage.wrong(job, "bench.events"):
        raise RuntimeError(f"after a drain: {wrong}")
    return run_s, relay_s, drain_s


def _timed(act: Callable[[], Any]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun
