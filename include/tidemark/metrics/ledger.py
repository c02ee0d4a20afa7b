"""Counts commits while the metrics process runs, from the rows added to the ledger since the last scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tidemark.db import Cursor, rows, statements

SQL = statements("tidemark.metrics", "metrics.sql")

SETTLED = timedelta(minutes=5)
"""A row older than this is visible, or never will be: a commit ends right after its ledger row, or within a minute."""
OUTCOMES = ("loaded", "skipped", "retried", "failed", "unaccounted")
COMMIT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Totals:
    """A group's totals since the process began."""

    records: Counter[str] = field(default_factory=Counter)
    """Records by outcome. A retried record counts again."""
    rows: int = 0
    deleted: int = 0
    """The deleting ones of ``rows``."""
    commits: int = 0
    commit_seconds: float = 0.0
    slower_than: Counter[float] = field(default_factory=Counter)
    """Commits by the smallest of `COMMIT_BUCKETS_S` that they do not exceed, or ``inf``."""
    attempts: Counter[str] = field(default_factory=Counter)
    """Attempts by result: ``committed``, or the kind of the error: ``refused``, ``fenced``, ``unavailable``, ``broken``."""


class LedgerTotals:
    """The totals of each group. Ids follow the order of insertion, not of commit, so recent rows are reread and recognized by id."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self._after: int | None = None
        self._since: datetime | None = None
        self._batches: dict[int, datetime] = {}
        self._attempts: dict[int, datetime] = {}

    def read(self, cur: Cursor) -> None:
        """Adds the commits since the last call. The first call counts nothing."""
        cur.execute(SQL["newest"])
        (newest,) = rows(cur)
        first = self._after is None or self._since is None
        if first:
            self._after, self._since = newest["batch_id"], newest["now"] - SETTLED
        cur.execute(SQL["batches"], {"after": self._after})
        for row in rows(cur):
            if row["batch_id"] not in self._batches and not first:
                self._count_batch(row)
            self._batches[row["batch_id"]] = row["committed_at"]
        cur.execute(SQL["attempts"], {"since": self._since})
        for row in rows(cur):
            if row["attempt_id"] not in self._attempts and not first:
                self.totals[row["group"]].attempts[row["kind"] or "committed"] += 1
            self._attempts[row["attempt_id"]] = row["ended_at"]
        self._forget(newest["now"] - SETTLED)

    def _count_batch(self, row: dict[str, Any]) -> None:
        totals = self.totals[row["group"]]
        for outcome in OUTCOMES:
            totals.records[outcome] += row[outcome]
        totals.rows += row["sink_rows"]
        totals.deleted += row["deleted"]
        totals.commits += 1
        if (seconds := row["seconds"]) is not None:
            totals.commit_seconds += seconds
            totals.slower_than[next((limit for limit in COMMIT_BUCKETS_S if seconds <= limit), float("inf"))] += 1

    def _forget(self, before: datetime) -> None:
        """Drops the ids of rows that no later call reads."""
        self._since = before
        self._after = max([self._after or 0, *(number for number, at in self._batches.items() if at < before)])
        self._batches = {number: at for number, at in self._batches.items() if number > self._after}
        self._attempts = {number: at for number, at in self._attempts.items() if at >= before}
