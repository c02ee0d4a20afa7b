"""After an outage, a million waiting records are published and drained. With steady failures: how late are the retries?

A run in which every record fails creates the backlog. All of it is made due at once, and a separate driver, started as a task starts it,
drains it; its memory is read as in `benchmarks.memory`. Then 100,000 records an hour arrive, and each fails at first. Run, relay and drain
follow each other at a fixed interval on a warm Spark session. This part lasts minutes, not an hour.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import psycopg2

from benchmarks.data import value
from benchmarks.memory import KINDS, MIB, Peak, _watched
from benchmarks.product import TRANSFORMS, write_spec
from benchmarks.retries import Flaky
from benchmarks.site import TABLE, Job, Site, Topic
from benchmarks.stage import Stage
from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.db import session
from tidemark.driver.launch import run_attempt
from tidemark.offsets.store import TaskIdentity
from tidemark.retry.pending import due, tried

PARTITIONS = 4
FULL, QUICK = (1_000_000, 180.0), (40_000, 15.0)
"""Records of the backlog, and seconds of the steady part."""
PER_HOUR = 100_000
EVERY_S, DELAY = 10.0, "7s"  # not multiples of each other; otherwise every record would be tried as soon as it is due


def measure(stage: Stage, site: Site, extent: tuple[int, float], width: int, report: Callable[[str], None]) -> dict[str, Any]:
    """``backlog``: seconds of hand-off, relay, look-up and drain, and the drain's peak memory in MiB; ``steady``: lateness in seconds."""
    records, seconds = extent
    found = {"backlog": _backlog(stage, site, records, width), "steady": _steady(stage, site, seconds, width)}
    for name, one in found.items():
        report(f"{name}: " + ", ".join(f"{key} {each:,.1f}" if isinstance(each, float) else f"{key} {each:,}" for key, each in one.items()))
    return found


def tables(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    one, steady = found["backlog"], found["steady"]
    columns = ["records", "handed off, s", "published, s", "drained, s", "records/s", *(f"{kind}, MiB" for kind in KINDS), "relay, MiB"]
    numbers = [f"{one[name]:,.0f}" for name in ("records", "run_s", "relay_s", "drain_s", "drain_per_s", *KINDS, "relay_mib")]
    late = [f"{steady[name]:.1f}" for name in ("minutes", "every_s", "p50_s", "p99_s", "max_s")]
    return [
        ("A backlog of retries", columns, [numbers]),
        (
            f"Lateness at {PER_HOUR:,} failing records an hour",
            ["records", "minutes", "run, relay and drain every s", "median s", "p99 s", "longest s"],
            [[f"{steady['records']:,}", *late]],
        ),
    ]


def _backlog(stage: Stage, site: Site, records: int, width: int) -> dict[str, Any]:
    topic = stage.topic(Topic(f"events-{records}", PARTITIONS, records, width))
    product, job = Flaky(site, delay=DELAY, partitions=PARTITIONS), Job(topic)
    stage.empty()
    try:
        product.fails(1000)
        product.prepare(job)
        run_s = _timed(lambda: product.run(job))
    finally:
        product.close()
    before = psutil.Process().memory_info().rss
    relay_s = _timed(lambda: product.relay(records))
    relay_mib = max(0, psutil.Process().memory_info().rss - before) / MIB
    product.fails(0)
    product.wait()
    with session(site.database_url) as connection:
        due_s = _timed(lambda: due(connection, product.group))
    peak = Peak()
    drain_s = _timed(lambda: _drain(site, topic, product.group, peak))
    if wrong := stage.wrong(job, TABLE):
        raise RuntimeError(f"after a drain: {wrong}")
    times = {"run_s": run_s, "relay_s": relay_s, "due_s": due_s, "drain_s": drain_s, "drain_per_s": records / drain_s}
    return {"records": records, **times, "relay_mib": relay_mib, **{kind: size / MIB for kind, size in peak.by_kind.items()}}


def _drain(site: Site, topic: Topic, group: str, peak: Peak) -> None:
    folder = Path(site.folder)
    write_spec(folder, Flaky.transform, [topic.name], group, retry=f"{{delays: [{DELAY}], topics: {{partitions: {PARTITIONS}}}}}")
    with contextlib.ExitStack() as watching:
        run_attempt(
            Flaky.transform,
            Connections(site.database_url, {"bootstrap.servers": site.servers}, f"local[{site.cores}]"),
            open_attempt(site.database_url, group, TaskIdentity()),
            folders={"consumers": [folder / "consumers"], "transforms": [TRANSFORMS]},
            on_log=lambda line: None,
            on_progress=lambda progress: None,
            on_start=lambda driver: watching.enter_context(_watched(driver.pid, peak)),
            drain=True,
        )


def _steady(stage: Stage, site: Site, seconds: float, width: int) -> dict[str, Any]:
    from confluent_kafka import Producer

    topic = stage.topic(Topic(f"failing-{time.monotonic_ns()}", PARTITIONS, 0, width))
    producer = Producer({"bootstrap.servers": site.servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 3})
    product, job, turn, made = Flaky(site, delay=DELAY), Job(topic), 0, 0
    stage.empty()
    try:
        product.prepare(job)
        began = time.monotonic()
        while time.monotonic() - began < seconds or product.waiting():
            wanted = int(min(seconds, time.monotonic() - began) * PER_HOUR / 3600)
            for number in range(made, wanted):
                producer.produce(topic.name, value=value(number, width), partition=number % PARTITIONS)
            made = wanted
            producer.flush(10)
            product.fails(1000)
            product.run(job)
            product.relay()
            product.fails(0)
            product.drain()
            turn += 1
            time.sleep(max(0.0, began + turn * EVERY_S - time.monotonic()))
    finally:
        product.close()
    with session(site.database_url) as connection:
        late = tried(connection, product.group)
    with contextlib.closing(psycopg2.connect(site.database_url)) as connection, connection.cursor() as cur:
        cur.execute(f"SELECT count(*) FROM {TABLE}")
        ((loaded,),) = cur.fetchall()
    if late is None or (late.records, loaded) != (made, made):
        raise RuntimeError(f"of {made} records {loaded} were loaded, {late and late.records} by a retry")
    lateness = {"p50_s": late.median.total_seconds(), "p99_s": late.p99.total_seconds(), "max_s": late.longest.total_seconds()}
    return {"records": made, "minutes": seconds / 60, "every_s": EVERY_S, **lateness}


def _timed(act: Callable[[], Any]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun
