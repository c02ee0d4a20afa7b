"""What deletes cost an upsert sink: one record for each row of a table replaces or deletes it. A share of the records are tombstones.

Runs the product end to end without code, as in `benchmarks.product`. Earlier in the topic there is a record for each row; it is not read,
because one statement fills the table.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import psycopg2

from benchmarks import data
from benchmarks.product import _Product
from benchmarks.site import TABLE, Job, Site, Topic
from benchmarks.stage import Stage

SHARES = (0, 10, 50)
"""So many of 100 records are tombstones."""
KEY = "event_id"


class Deletes(_Product):
    keys: Mapping[str, str] = {
        "format": "{value: json, key: string}",
        "sink": f"{{table: {TABLE}, mode: upsert, key: [{KEY}], deletes: hard}}",
    }


def measure(
    stage: Stage, site: Site, records: int, partitions: int, width: int, rounds: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row per share: median records/s, and how much longer a tombstone takes than a record that replaces a row."""
    product, found = Deletes(site), []
    try:
        for share in SHARES:
            topic = stage.topic(Topic(f"deletes-{share}-{records}", partitions, 2 * records, width, form="deletes", deletes=share))
            job = Job(topic, topic.each // 2)
            _round(stage, product, job)
            seconds = statistics.median(_round(stage, product, job) for _ in range(rounds))
            row = {"share": share / 100, "records": job.rows, "seconds": seconds, "per_s": job.rows / seconds}
            if share:
                row["added_us"] = (seconds - found[0]["seconds"]) / (job.rows * share / 100) * 1e6
            report("deletes  " + ", ".join(f"{name} {value:,.3g}" for name, value in row.items()))
            found.append(row)
    finally:
        product.close()
    return found


def table(found: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    columns = ["tombstones", "records/s", "s", "µs each tombstone adds"]
    rows = [
        [f"{one['share']:.0%}", f"{one['per_s']:,.0f}", f"{one['seconds']:.1f}", f"{one['added_us']:+.1f}" if "added_us" in one else ""]
        for one in found
    ]
    return f"An upsert of {found[0]['records']:,} rows that exist, with hard deletes, without code", columns, rows


def _round(stage: Stage, product: Deletes, job: Job) -> float:
    """Seconds of one load."""
    stage.empty(key=KEY)
    with contextlib.closing(psycopg2.connect(stage.database_url)) as connection, connection, connection.cursor() as cur:
        cur.execute(
            f"INSERT INTO {TABLE} SELECT number, '2026-01-01', 'customer', 'visit', 0, 0, repeat('x', 20), %(topic)s,"
            f" number %% %(parts)s, number / %(parts)s, 0 FROM generate_series(0, %(rows)s - 1) number",
            {"topic": job.topic.topic_id, "parts": job.topic.partitions, "rows": job.rows},
        )
    product.prepare(job)
    begun = time.monotonic()
    product.run(job)
    seconds = time.monotonic() - begun
    left = [row for row in range(job.rows) if not data.deletes(job.topic, row)]
    with contextlib.closing(psycopg2.connect(stage.database_url)) as connection, connection, connection.cursor() as cur:
        old = "count(*) FILTER (WHERE kafka_offset < %s)"
        cur.execute(f"SELECT count(*), coalesce(sum({KEY}), 0)::bigint, {old} FROM {TABLE}", (job.first,))
        rows = cur.fetchone()
    if rows != (expected := (len(left), sum(left), 0)):
        raise RuntimeError(f"after deletes: rows, their sum and rows that were not replaced are {rows}; expected {expected}")
    return seconds
