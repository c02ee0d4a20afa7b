"""After an outage, a million waiting records are published and drained. With steady failures: how late are the retries?

A run in which every record fails creates the backlog. All of it is made due at once, and a separate driver, started as a task starts it,
drains it; its memory is read as in `benchmarks.run.memory`. Then 100,000 records an hour arrive, and each fails at first. Run, relay and
drain follow each other at a fixed interval on a warm Spark session. This part lasts minutes, not an hour.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil
from benchmarks.harness.consumer import write_spec
from benchmarks.harness.processes import MIB, timed
from benchmarks.harness.site import PARTITIONS, TABLE, Job, Topic
from benchmarks.harness.stage import autocommit
from benchmarks.measurement import Bench, Figures, Measurement, Table
from benchmarks.records.events import value
from benchmarks.retries.failing import TRANSFORM, Failing
from benchmarks.run.memory import KINDS, Peak, drive_watched

from tidemark.db import session
from tidemark.retry.pending import tried

PER_HOUR = 100_000
EVERY_S, DELAY = 10.0, "7s"  # not multiples of each other; otherwise every record would be tried as soon as it is due


def measure(bench: Bench, records: int, seconds: float) -> Figures:
    """``backlog``: seconds of hand-off, relay and drain, and the drain's peak memory in MiB; ``steady``: lateness in seconds."""
    figures = {"backlog": _backlog(bench, records), "steady": _steady(bench, seconds)}
    for name, row in figures.items():
        bench.report(f"{name}: " + ", ".join(f"{key} {each:,.1f}" for key, each in row.items()))
    return {name: [row] for name, row in figures.items()}


def _backlog(bench: Bench, records: int) -> dict[str, Any]:
    topic = bench.events(records)
    consumer, job, peak = Failing(bench.site, delay=DELAY, partitions=PARTITIONS), Job(topic), Peak()
    with contextlib.closing(consumer):
        consumer.fails(1000)
        consumer.prepare(job)
        run_s = timed(lambda: consumer.run(job))
    before = psutil.Process().memory_info().rss
    relay_s = timed(lambda: consumer.relay(records))
    relay_mib = max(0, psutil.Process().memory_info().rss - before) / MIB
    consumer.fails(0)
    consumer.wait()
    retry = f"{{delays: [{DELAY}], topics: {{partitions: {PARTITIONS}}}}}"
    spec = write_spec(bench.site, TRANSFORM, [topic.name], consumer.spec.group, retry=retry)
    drain_s = timed(lambda: drive_watched(bench.site, spec, peak, drain=True))
    if wrong := bench.stage.wrong(job, TABLE):
        raise RuntimeError(f"after a drain: {wrong}")
    row = {"records": records, "run_s": run_s, "relay_s": relay_s, "drain_s": drain_s, "per_s": records / drain_s, "relay": relay_mib}
    return {**row, **{kind: size / MIB for kind, size in peak.by_kind.items()}}


def _steady(bench: Bench, seconds: float) -> dict[str, Any]:
    from confluent_kafka import Producer

    topic = bench.stage.topic(Topic(f"failing-{time.monotonic_ns()}", PARTITIONS, 0, bench.width))
    producer = Producer({"bootstrap.servers": bench.site.servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 3})
    job, turn, produced = Job(topic), 0, 0
    bench.stage.empty()
    with contextlib.closing(Failing(bench.site, delay=DELAY)) as consumer:
        consumer.prepare(job)
        began = time.monotonic()
        while time.monotonic() - began < seconds or consumer.waiting():
            wanted = int(min(seconds, time.monotonic() - began) * PER_HOUR / 3600)
            for number in range(produced, wanted):
                producer.produce(topic.name, value=value(number, bench.width), partition=number % PARTITIONS)
            produced = wanted
            producer.flush(10)
            consumer.fails(1000)
            consumer.run(job)
            consumer.relay()
            consumer.fails(0)
            consumer.run(job, drain=True)
            turn += 1
            time.sleep(max(0.0, began + turn * EVERY_S - time.monotonic()))
    with session(bench.site.database_url) as connection:
        late = tried(connection, consumer.spec.group)
    with autocommit(bench.site.database_url) as cur:
        cur.execute(f"SELECT count(*) FROM {TABLE}")
        ((loaded,),) = cur.fetchall()
    if late is None or (late.records, loaded) != (produced, produced):
        raise RuntimeError(f"of {produced} records {loaded} were loaded, {late and late.records} by a retry")
    lateness = {"p50_s": late.median.total_seconds(), "p99_s": late.p99.total_seconds(), "max_s": late.longest.total_seconds()}
    return {"records": produced, "minutes": seconds / 60, "every_s": EVERY_S, **lateness}


_MIB = " | ".join(f"{{{kind}:,.0f}}" for kind in (*KINDS, "relay"))
MEASUREMENT = Measurement(
    "backlog",
    measure,
    Table(
        "A backlog of retries",
        f"records | handed off, s | published, s | drained, s | records/s | {', MiB | '.join(KINDS)}, MiB | relay, MiB",
        f"{{records:,}} | {{run_s:.0f}} | {{relay_s:.0f}} | {{drain_s:.0f}} | {{per_s:,.0f}} | {_MIB}",
        "backlog",
    ),
    Table(
        f"Lateness at {PER_HOUR:,} failing records an hour",
        "records | minutes | run, relay and drain every s | median s | p99 s | longest s",
        "{records:,} | {minutes:.1f} | {every_s:.1f} | {p50_s:.1f} | {p99_s:.1f} | {max_s:.1f}",
        "steady",
    ),
    full={"records": 1_000_000, "seconds": 180.0},
    quick={"records": 40_000, "seconds": 15.0},
)
