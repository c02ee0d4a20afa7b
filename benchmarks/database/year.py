"""A year of `tidemark maintain` in a database that small runs fill month by month.

Each attempt is inserted, planned and ended; its slices are committed and validated; some records fail and are loaded later. Tables are
vacuumed when autovacuum would vacuum them. After each month, `tidemark maintain` runs twice while slices are committed: first it removes
what the month has left, then it finds nothing to remove. Reports how long both took, how long a commit took meanwhile, the size of the
tables, and the bytes per row, including indexes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.processes import repeated, timed
from benchmarks.harness.stage import autocommit, created
from benchmarks.measurement import Bench, Figures, Table
from tests.support.ledger import all_loaded, payloads

from tidemark import migrations
from tidemark.db import Cursor, session, statements, transaction
from tidemark.keep import KEEP
from tidemark.maintenance import maintain
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.sink.commit import commit_slice
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target
from tidemark.text.duration import parse_duration

SQL = statements("benchmarks.database", "year.sql")
LAYOUT = Layout("shop.orders", (Column("city", "text"), Column("population", "bigint")))
SLICES, FAILS, TICKS = 2, 10, 288
"""Slices per run; one run in so many has a failed record; runs per day."""
CHANGES = {"attempt": 2.0, "batch": float(SLICES), "failed_record": 1 / FAILS}
"""How many rows of these tables an attempt updates after inserting them."""


TABLES = (
    Table(
        "A year of tidemark maintain: {consumers} consumers, a run every five minutes",
        "month | attempts so far | maintain, s | with nothing to remove, s | longest commit meanwhile, s | MiB of our tables",
        "{month} | {attempts:,} | {month_s:.2f} | {again_s:.2f} | {commit_s:.2f} | {mib:,.0f}",
        "months",
    ),
    Table(
        "Disk space, indexes included",
        "table | rows | bytes a row | bytes a day of a consumer",
        "{table} | {rows:,} | {bytes_a_row:,.0f} | {bytes_a_day:,.0f}",
        "sizes",
    ),
)


def measure(bench: Bench, consumers: int, months: int, days: int) -> Figures:
    """``months``, of so many days: the seconds of both runs of `maintain`, and the size of all tables. ``sizes``: of each table."""
    rows = []
    with created(bench.stage.database_url, "history") as url:
        migrations.migrate(url)
        with autocommit(url) as cur:
            quiet(cur)
            cur.execute(SQL["consumers"].format(consumers=consumers))
            cur.execute("SET enable_seqscan TO off")  # a cached plan for `attempt_id >= first` assumes a third of the table
            vacuumed = dict.fromkeys(CHANGES, 0)
            for day in range(1, months * days + 1):
                values = {"day": day, "age": months * days - day + 1, "slices": SLICES, "fails": FAILS, "ticks": TICKS}
                cur.execute(SQL["day"].format(consumers=consumers, **values))
                attempts = consumers * TICKS * day
                _vacuum(cur, attempts, vacuumed)
                if day % days == 0:
                    rows.append({"month": day // days, "attempts": attempts, **_maintained(url, cur)})
                    bench.report("history " + ", ".join(f"{name} {value:,.3g}" for name, value in rows[-1].items()))
            sizes = _sizes(cur, consumers * months * days)
    return {"consumers": consumers, "months": rows, "sizes": sizes}


def quiet(cur: Cursor) -> None:
    """Turns off autovacuum for our tables, and triggers and foreign keys for this session: the rows are right by construction."""
    cur.execute(
        "SELECT format('ALTER TABLE tidemark.%I SET (autovacuum_enabled = off)', tablename) FROM pg_tables WHERE schemaname = 'tidemark'"
    )
    for (statement,) in cur.fetchall():
        cur.execute(statement)
    cur.execute("SET session_replication_role TO replica; SET synchronous_commit TO off; SET maintenance_work_mem TO '1GB'; SET jit TO off")


def _vacuum(cur: Cursor, attempts: int, vacuumed: dict[str, int]) -> None:
    """Vacuums as autovacuum does by default: once a fifth of a table's rows have changed."""
    for table, changes in CHANGES.items():
        rows_of_each = 1 if table == "attempt" else changes
        if (attempts - vacuumed[table]) * changes > attempts * rows_of_each * 0.2 + 50:
            cur.execute(f"VACUUM (ANALYZE) tidemark.{table}")
            vacuumed[table] = attempts


def _maintained(url: str, cur: Cursor) -> dict[str, float]:
    with session(url, application="tidemark maintain") as connection, _committing(url) as commits:
        taken = [timed(lambda: maintain(connection, parse_duration(KEEP), by="bench")) for _ in range(2)]
    cur.execute(
        "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r' AND relnamespace = 'tidemark'::regnamespace"
    )
    ((size,),) = cur.fetchall()
    return {"month_s": taken[0], "again_s": taken[1], "commit_s": max(commits), "mib": size / 2**20}


@contextlib.contextmanager
def _committing(url: str) -> Iterator[list[float]]:
    """Commits one slice after the other while the block runs. Yields the seconds of each."""
    seconds: list[float] = []
    with session(url) as connection, transaction(connection) as cur:
        attempt = store.new_attempt(cur, 1, TaskIdentity())
        claim = store.claim(cur, 1, 1, TopicPartition("shop.orders-0", 0), store.Owner(store.next_generation(cur), "me"))
    position = itertools.count(claim.position, 10)

    def commit() -> None:
        start = next(position)
        part = Slice(claim.partition, 1, start, start + 10, claim.epoch)
        began = time.perf_counter()
        commit_slice(Target(url, 1, attempt, (LAYOUT,)), part, all_loaded(part), payloads)
        seconds.append(time.perf_counter() - began)

    with repeated(commit):
        yield seconds
    with session(url) as connection, transaction(connection) as cur:
        store.end_attempt(cur, attempt)


def _sizes(cur: Cursor, days: int) -> list[dict[str, Any]]:
    """``days``: the runs of all consumers together."""
    sizes = []
    for table in ("attempt", "batch", "validation", "validation_result", "failed_record", "maintenance", "audit_event"):
        cur.execute(f"SELECT count(*), pg_total_relation_size('tidemark.{table}') FROM tidemark.{table}")
        ((count, size),) = cur.fetchall()
        if count:
            sizes.append({"table": table, "rows": count, "bytes_a_row": size / count, "bytes_a_day": size / days})
    return sizes
