"""Retries: what a hand-off costs a run, how fast the relay publishes, and how fast a drain retries.

Runs the product end to end, as in `benchmarks.harness.consumer`, with one transform for all parts.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.consumer import Consumer
from benchmarks.harness.processes import timed
from benchmarks.harness.site import TABLE, Job, Site
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.transforms.bench_arrow import FILE

from tidemark.db import session
from tidemark.kafka.cluster import Cluster
from tidemark.retry.relay import relay
from tidemark.retry.topics import ensure_topics
from tidemark.spec.model import RetrySettings

SHARES = (0, 100)
"""How many of 1000 records fail at first."""
TRANSFORM = "bench_arrow:flaky"
DELAY = "1s"


class Failing(Consumer):
    """The environment variable `FILE` names the file that holds the share. It is set before Spark starts: its workers inherit it."""

    def __init__(self, site: Site) -> None:
        self.fails(0)
        super().__init__(site, TRANSFORM)

    def fails(self, share: int) -> None:
        """From the next batch on, so many of 1000 records fail."""
        Path(os.environ[FILE]).write_text(str(share))

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        self.reads(self.spec.model_copy(update={"retry": RetrySettings.model_validate({"delays": (DELAY,)})}))
        ensure_topics(Cluster(self._connections.kafka), self.spec, create=True)

    def relay(self, expected: int) -> None:
        """Publishes the outbox. Raises if it did not hold ``expected`` records."""
        with session(self._site.database_url) as connection:
            done = relay(connection, self._connections.kafka, self.spec).records
        if done != expected:
            raise RuntimeError(f"{done:,} records were handed off and published; {expected:,} should have failed")

    def wait(self) -> None:
        """Waits until all waiting records are due."""
        with autocommit(self._site.database_url) as cur:
            cur.execute("SELECT extract(epoch FROM max(due_at) - clock_timestamp()) FROM tidemark.failed_record WHERE state = 'WAITING'")
            ((left,),) = cur.fetchall()
        time.sleep(max(0.0, float(left or 0)))


def measure(bench: Bench, rounds: int) -> Figures:
    """A row for each of `SHARES`: median records/s of the run, the relay and the drain, and the time that each failed record adds to the
    run."""
    job, rows = Job(bench.events()), list[dict[str, Any]]()
    with contextlib.closing(Failing(bench.site)) as consumer:
        _round(bench.stage, consumer, job, SHARES[-1])
        for share in SHARES:
            taken = [_round(bench.stage, consumer, job, share) for _ in range(rounds)]
            run_s, relay_s, drain_s = (statistics.median(times) for times in zip(*taken, strict=True))
            failed = job.topic.records * share // 1000
            row = {"share": share / 1000, "failed": failed, "run_s": run_s, "run_per_s": job.topic.records / run_s}
            if failed:
                row |= {"added_us": (run_s - rows[0]["run_s"]) / failed * 1e6, "relay_per_s": failed / relay_s}
                row |= {"drain_per_s": failed / drain_s, "of_run": failed / drain_s / row["run_per_s"]}
            bench.report("retries " + ", ".join(f"{name} {value:,.3g}" for name, value in row.items()))
            rows.append(row)
    return {"rows": rows, "most": rows[-1:]}


def _round(stage: Stage, consumer: Failing, job: Job, share: int) -> tuple[float, float, float]:
    """Seconds of a run in which a share fails, of the relay, and of the drain that loads it. Checks that then every record is loaded."""
    stage.empty()
    consumer.fails(share)
    consumer.prepare(job)
    run_s = timed(lambda: consumer.run(job))
    consumer.fails(0)
    relay_s = timed(lambda: consumer.relay(job.topic.records * share // 1000))
    consumer.wait()
    drain_s = timed(lambda: consumer.run(job, drain=True))
    if wrong := stage.wrong(job, TABLE):
        raise RuntimeError(f"after a drain: {wrong}")
    return run_s, relay_s, drain_s


MEASUREMENT = Measurement(
    "retries",
    measure,
    Table(
        "Retries, Arrow form",
        "fail at first | records/s of the run | µs each failed one adds | relay records/s | drain records/s | share of the run",
        "{share:.0%} | {run_per_s:,.0f} | {added_us:.0f} | {relay_per_s:,.0f} | {drain_per_s:,.0f} | {of_run:.0%}",
    ),
    bars=[
        Bar("relay, records/s, {share:.0%} fail at first", lambda row: row["relay_per_s"], "most", at_least=40_000),
        Bar("drain, records/s, {share:.0%} fail at first", lambda row: row["drain_per_s"], "most", at_least=100_000),
    ],
    full={"rounds": 3},
    quick={"rounds": 1},
)
