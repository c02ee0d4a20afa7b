"""What deletes cost an upsert sink: one record for each row of a table replaces or deletes it. A share of the records are tombstones.

Runs the product end to end without code, as in `benchmarks.harness.consumer`. Earlier in the topic there is a record for each row; it is
not read, because one statement fills the table.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from benchmarks.harness.consumer import Consumer
from benchmarks.harness.processes import timed
from benchmarks.harness.site import PARTITIONS, TABLE, Job, Topic
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bench, Figures, Measurement, Table
from benchmarks.records import events

SHARES = (0, 10, 50)
"""So many of 100 records are tombstones."""
KEY = "event_id"
SINK = f"{{table: {TABLE}, mode: upsert, key: [{KEY}], deletes: hard}}"


def measure(bench: Bench, rounds: int) -> Figures:
    """A row per share: median records/s, and how much longer a tombstone takes than a record that replaces a row."""
    records, rows = min(bench.records, 1_000_000), list[dict[str, Any]]()
    with contextlib.closing(Consumer(bench.site, format="{value: json, key: string}", sink=SINK)) as consumer:
        for share in SHARES:
            name = f"deletes-{share}-{records}"
            topic = bench.stage.topic(Topic(name, PARTITIONS, 2 * records, bench.width, form="deletes", deletes=share))
            job = Job(topic, topic.each // 2)
            seconds = statistics.median([_round(bench.stage, consumer, job) for _ in range(rounds + 1)][1:])
            row = {"share": share / 100, "records": job.rows, "seconds": seconds, "per_s": job.rows / seconds}
            if share:
                row["added_us"] = (seconds - rows[0]["seconds"]) / (job.rows * share / 100) * 1e6
            bench.report("deletes  " + ", ".join(f"{name} {value:,.3g}" for name, value in row.items()))
            rows.append(row)
    return {"records": records, "rows": rows}


def _round(stage: Stage, consumer: Consumer, job: Job) -> float:
    """Seconds of one load."""
    stage.empty(key=KEY)
    with autocommit(stage.database_url) as cur:
        cur.execute(
            f"INSERT INTO {TABLE} SELECT number, '2026-01-01', 'customer', 'visit', 0, 0, repeat('x', 20), %(topic)s,"
            f" number %% %(parts)s, number / %(parts)s, 0 FROM generate_series(0, %(rows)s - 1) number",
            {"topic": job.topic.topic_id, "parts": job.topic.partitions, "rows": job.rows},
        )
    consumer.prepare(job)
    seconds = timed(lambda: consumer.run(job))
    left = [row for row in range(job.rows) if not events.deletes(job.topic, row)]
    with autocommit(stage.database_url) as cur:
        old = "count(*) FILTER (WHERE kafka_offset < %s)"
        cur.execute(f"SELECT count(*), coalesce(sum({KEY}), 0)::bigint, {old} FROM {TABLE}", (job.first,))
        rows = cur.fetchone()
    if rows != (expected := (len(left), sum(left), 0)):
        raise RuntimeError(f"after deletes: rows, their sum and rows that were not replaced are {rows}; expected {expected}")
    return seconds


MEASUREMENT = Measurement(
    "deletes",
    measure,
    Table(
        "An upsert of {records:,} rows that exist, with hard deletes, without code",
        "tombstones | records/s | s | µs each tombstone adds",
        "{share:.0%} | {per_s:,.0f} | {seconds:.1f} | {added_us:+.1f}",
    ),
    full={"rounds": 3},
    quick={"rounds": 1},
)
