"""An observer that reads the tables continuously, from a separate session, while commits are struck."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2.extensions import ISOLATION_LEVEL_REPEATABLE_READ, connection, cursor
from tests.chaos.feed import Log

PAUSE_S = 0.01
AWAY_S = 0.1
LIMIT_S = 120
COUNTS = ("loaded", "skipped", "retried", "failed", "unaccounted")


@dataclass(frozen=True, slots=True)
class Batch:
    """A ledger row."""

    start: int
    end: int
    counts: dict[str, int]
    sink_rows: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is stored for one topic, as one transaction sees it. By partition: the position, the ledger in order, the offsets of
    the sink's rows, and those of the failed records."""

    positions: dict[int, int]
    ledger: dict[int, list[Batch]]
    rows: dict[int, list[int]]
    failed: dict[int, list[int]]


def problems(log: Log, seen: Snapshot, before: Snapshot | None = None) -> list[str]:
    """Returns what is wrong in a snapshot, and what it has lost since the one before. Empty if nothing is wrong.

    Below the position of its partition, each record is stored as a row or a failed record, or counted as skipped, exactly once; none at or
    above it is. The ledger covers the offsets below the position without gaps or overlaps, and the counts in each of its rows match the
    topic. Nothing that was stored disappears, and no position moves back.
    """
    found = []
    for partition in {*seen.positions, *seen.ledger, *seen.rows, *seen.failed}:
        position = seen.positions.get(partition, 0)
        ledger = seen.ledger.get(partition, [])
        for what, kinds, stored in (("rows", "l", seen.rows), ("failed records", "fr", seen.failed)):
            if stored.get(partition, []) != (meant := log.offsets(partition, kinds, position)):
                found.append(f"partition {partition} at {position}: {what} of offsets {stored.get(partition, [])}, not {meant}")
        at = 0
        for batch in ledger:
            if batch.start != at:
                found.append(f"partition {partition}: the ledger goes from {at} to {batch.start}")
            expected = log.expected(partition, batch.start, batch.end)
            if batch.counts != {name: expected[name] for name in COUNTS} or batch.sink_rows != expected["loaded"]:
                found.append(f"partition {partition}: {batch} counts wrongly, it should be {dict(expected)}")
            at = batch.end
        if at != position:
            found.append(f"partition {partition}: the ledger ends at {at}, the position is {position}")
        if before is not None:
            if position < (once := before.positions.get(partition, 0)):
                found.append(f"partition {partition}: the position went back from {once} to {position}")
            known = before.ledger.get(partition, [])
            if ledger[: len(known)] != known:
                found.append(f"partition {partition}: ledger rows have changed from {known} to {ledger}")
    return found


class Reader:
    """Takes snapshots in a thread, one after another, until it is closed. While Postgres is down, it waits and tries again. With
    ``rewinds``, checks each snapshot separately: a rewind moves positions back and removes ledger rows."""

    def __init__(self, url: str, table: str, topic: str, log: Log, *, pause_s: float = PAUSE_S, rewinds: bool = False) -> None:
        self._url, self._table, self._topic, self._log, self._pause_s, self._rewinds = url, table, topic, log, pause_s, rewinds
        self.snapshots = 0
        self.outages = 0
        self._problems: list[str] = []
        self._last: Snapshot | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def look(self) -> Snapshot:
        """Returns a good snapshot that began after this call. Fails if any snapshot so far was not good."""
        with self._changed:
            enough = self.snapshots + 2  # the next one to finish may have begun before this call
            self._changed.wait_for(lambda: self.snapshots >= enough or not self._thread.is_alive(), LIMIT_S)
            self._check()
            assert self.snapshots >= enough, "the reader has stopped looking"
            assert self._last is not None
            return self._last

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        assert not self._problems, f"in {self.snapshots} snapshots: {self._problems}"

    def _look(self) -> None:
        session: connection | None = None
        try:
            while not self._stop.wait(self._pause_s):
                try:
                    session = session or _session(self._url)
                    with session, session.cursor() as cur:
                        seen = snapshot(cur, self._table, self._topic)
                except (psycopg2.OperationalError, psycopg2.InterfaceError):
                    self.outages += 1
                    _closed(session)
                    session = None
                    self._stop.wait(AWAY_S)
                else:
                    self._note(seen)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._error = error
        finally:
            _closed(session)
            with self._changed:
                self._changed.notify_all()

    def _note(self, seen: Snapshot) -> None:
        with self._changed:
            self._problems += problems(self._log, seen, None if self._rewinds else self._last)
            self._last = seen
            self.snapshots += 1
            self._changed.notify_all()


def snapshot(cur: cursor, table: str, topic: str) -> Snapshot:
    """Returns everything that is stored for a topic. It is consistent if the transaction is REPEATABLE READ."""
    of_topic = "JOIN tidemark.topic USING (topic_id) WHERE name = %s"

    def ask(statement: str) -> list[tuple[Any, ...]]:
        cur.execute(statement, (topic,))
        return cur.fetchall()

    positions = dict(ask(f"SELECT partition, next_offset FROM tidemark.partition_offset {of_topic}"))
    ledger = defaultdict(list)
    columns = f"start_offset, end_offset, {', '.join(COUNTS)}, sink_rows"
    for partition, start, end, *counts, rows in ask(f"SELECT partition, {columns} FROM tidemark.batch {of_topic} ORDER BY 1, 2, 3"):
        ledger[partition].append(Batch(start, end, dict(zip(COUNTS, counts, strict=True)), rows))
    stored = ask(
        f"SELECT kafka_partition, array_agg(kafka_offset ORDER BY kafka_offset) FROM {table}"
        " JOIN tidemark.topic ON topic_id = kafka_topic_id WHERE name = %s GROUP BY 1"
    )
    failed = ask(f"SELECT partition, array_agg(record_offset ORDER BY record_offset) FROM tidemark.failed_record {of_topic} GROUP BY 1")
    return Snapshot(positions, dict(ledger), dict(stored), dict(failed))


def _session(url: str) -> connection:
    session = psycopg2.connect(url, application_name="reader", connect_timeout=5)
    session.set_session(isolation_level=ISOLATION_LEVEL_REPEATABLE_READ, readonly=True)
    return session


def _closed(session: connection | None) -> None:
    if session is not None:
        with contextlib.suppress(psycopg2.Error):
            session.close()
