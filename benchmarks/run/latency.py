"""From a record to its commit, in a continuous run with 1,000 records a second and a driver that is started as a task starts it.

The clock starts when a record is handed to the producer and stops when its ledger row is written, the last statement before COMMIT. Both
times are of this machine's clock. Records that are produced while the JVM still compiles are excluded.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.consumer import FORMS, connections, write_spec
from benchmarks.harness.processes import repeated, spread
from benchmarks.harness.site import PARTITIONS, Topic
from benchmarks.harness.stage import autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.records.events import fill, value
from tests.support.attempts import Attempt
from tests.support.waiting import until

from tidemark.offsets.store import TaskIdentity

RATE = 1_000
WARM_S = 30.0
AFTER_S = 3.0
"""Seconds in which records are still produced after the next run has taken over."""
LIMIT_S = 90.0
TICK_S = 0.01


def measure(bench: Bench, seconds: float) -> Figures:
    """A row per form. ``handover_ms``: the longest wait of a record while the next run took over."""
    rows = []
    for form in FORMS:
        bench.stage.empty()
        rows.append({"form": form.lower(), **_one(bench, form, seconds)})
        bench.report("latency " + ", ".join(f"{name} {figure:.0f}" if name != "form" else figure for name, figure in rows[-1].items()))
    return {"rows": rows}


def _one(bench: Bench, form: str, seconds: float) -> dict[str, Any]:
    topic = f"live-{form.lower()}-{time.monotonic_ns()}"
    fill(bench.site.servers, Topic(topic, PARTITIONS, 0, bench.width))
    spec = write_spec(bench.site, FORMS[form], topic, topic, run="continuous", run_for="1h")
    url = bench.site.database_url
    with contextlib.ExitStack() as stack:

        def start() -> Attempt:
            attempt = Attempt(spec, connections(bench.site), Path(bench.site.folder), TaskIdentity())
            stack.callback(attempt.end)
            return attempt

        first = start()
        with _producing(bench.site.servers, topic, bench.width) as produced:
            until(lambda: _commits(url, first), "the first commit", LIMIT_S)
            time.sleep(WARM_S)
            began = time.time()
            time.sleep(seconds)
            ended = time.time()
            second = start()
            until(lambda: not first.running, "the next run taking over", LIMIT_S)
            time.sleep(AFTER_S)
        ends = dict.fromkeys(range(PARTITIONS), len(produced[0]))
        until(lambda: {partition: end for partition, _, end, _ in _commits(url, second)} == ends, "all records committed", LIMIT_S)
        commits = [*_commits(url, first), *_commits(url, second)]
    waited = [
        (then, committed.timestamp() - then) for partition, start, end, committed in commits for then in produced[partition][start:end]
    ]
    steady = [wait * 1000 for then, wait in waited if began <= then < ended]
    return {
        **{f"{what}_ms": value for what, value in spread(steady).items()},
        "handover_ms": max(wait for then, wait in waited if then >= ended) * 1000,
    }


def _commits(url: str, attempt: Attempt) -> list[tuple[int, int, int, datetime]]:
    """Partition, start, end and time of each commit."""
    columns = "partition, start_offset, end_offset, committed_at"
    with autocommit(url) as cur:
        cur.execute(f"SELECT {columns} FROM tidemark.batch WHERE attempt_id = %s ORDER BY 1, 2", (attempt.attempt_id,))
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
        "{form} | {median_ms:.0f} | {p99_ms:.0f} | {max_ms:.0f} | {handover_ms:.0f}",
    ),
    bars=[
        Bar(
            "continuous run, {form} form: p99 from produce to commit, ms",
            lambda row: row["p99_ms"],
            "rows",
            at_most=1_000,
        )
    ],
    full={"seconds": 60.0},
    quick={"seconds": 5.0},
)
