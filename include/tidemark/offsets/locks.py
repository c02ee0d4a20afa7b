"""Logs which sessions hold a lock while a caller waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemark.db import described_sessions, statements

if TYPE_CHECKING:
    from tidemark.db import Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.offsets", "locks.sql")


class LockWait:
    """A wait for a lock that is requested repeatedly. ``what``: the lock's name in the log."""

    def __init__(self, what: str) -> None:
        self._what, self._since, self._next_s = what, time.monotonic(), 0.0

    def report_holders(self, cur: Cursor, key: Mapping[str, Any]) -> None:
        """Logs who holds the lock, on the first call and then at growing intervals.

        ``key``: the ``class`` and ``group_id`` of a group's advisory lock, and the ``topic_id`` and ``partition`` of a position, or `None`.
        """
        waited_s = time.monotonic() - self._since
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        _refresh_sessions(cur)
        cur.execute(SQL["holders"], key)
        log.warning("waiting for a lock what=%s waited_s=%.0f held_by=%s", self._what, waited_s, described_sessions(cur) or "unknown")


def _refresh_sessions(cur: Cursor) -> None:
    """Discards the snapshot of sessions that Postgres keeps until the transaction ends: it would hide newer sessions."""
    cur.execute("SELECT pg_stat_clear_snapshot()")


def held_by_writer(cur: Cursor, group_id: int, topic_id: int, partition: int) -> bool:
    """Whether a commit of a consumer or a drain holds this position. Ignores rewinds and sessions that are not Tidemark's."""
    _refresh_sessions(cur)
    cur.execute(SQL["writers"], {"group_id": group_id, "topic_id": topic_id, "partition": partition, "end": False})
    return cur.fetchone() is not None
