"""Waits for a lock for as long as the sessions that hold it exist, and logs which sessions these are."""

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
    """One wait for a lock that is requested repeatedly. ``what``: the lock's name in the log."""

    def __init__(self, what: str) -> None:
        self._what, self._since, self._next_s = what, time.monotonic(), 0.0

    def say(self, cur: Cursor, key: Mapping[str, Any]) -> None:
        """Logs who holds the lock, on the first call and then at growing intervals.

        ``key``: the ``class`` and ``group_id`` of a group's advisory lock, and the ``topic_id`` and ``partition`` of a position, or `None`.
        """
        waited_s = time.monotonic() - self._since
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        _look_again(cur)
        cur.execute(SQL["holders"], key)
        log.warning("waiting for a lock what=%s waited_s=%.0f held_by=%s", self._what, waited_s, described_sessions(cur) or "unknown")


def _look_again(cur: Cursor) -> None:
    """Postgres remembers which sessions there are until a transaction ends: a long one would never see sessions that began later."""
    cur.execute("SELECT pg_stat_clear_snapshot()")


def held_by_writer(cur: Cursor, group_id: int, topic_id: int, partition: int) -> bool:
    """Does a commit of a consumer or a drain hold this position? A rewind does not count, nor does a session that is not Tidemark's."""
    _look_again(cur)
    cur.execute(SQL["writers"], {"group_id": group_id, "topic_id": topic_id, "partition": partition})
    return cur.fetchone() is not None
