"""Waits for a group's next transition. A Postgres notification ends the wait early, but nothing depends on one arriving.

Every transition of a group sends a notification on the group's own channel when it commits. Where none can arrive, the wait lasts its
full time and the caller then reads the rows: if the connection was lost, and behind a pooler. LISTEN through a transaction pooler would
stay on a backend that other clients use.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import connect, pooled
from tidemark.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidemark.db import Connection, Cursor, DatabaseUrl
    from tidemark.group.states import GroupState

log = logging.getLogger(__name__)

MISSED = "notifications may have been missed"
"""The result of a wait that ended in a reconnect."""
RECONNECT_AFTER_S = 5.0
"""Wait this long between attempts to reconnect: connecting to an unreachable server can take long."""


def channel_of(group: str) -> str:
    """The channel for the group's transitions: a hash, because channel names are short."""
    return "tidemark_" + hashlib.md5(group.encode(), usedforsecurity=False).hexdigest()


def notice(state: GroupState, generation: int) -> str:
    """The payload of a transition's notification. A join phase begins under the last generation, which it ends."""
    return f"{state} {generation}"


def notify(cur: Cursor, group: str, payload: str) -> None:
    """Wakes the processes that wait for this group when the transaction commits."""
    cur.execute("SELECT pg_notify(%s, %s)", (channel_of(group), payload))


class Wakeups:
    """Ends waits when the group changes state. Call `wait` and `close` from one thread only; `wake` from any."""

    def __init__(self, url: DatabaseUrl, group: str) -> None:
        """Starts to listen on its own connection, if the server can be reached. Raises `BadInput` for a bad URL."""
        self._url, self._group = url, group
        self._connection: Connection | None = None
        self._next_try = 0.0
        self._read_end, self._write_end = os.pipe()
        self._pipe_lock = threading.Lock()  # never write to the pipe while it is being closed: its number may be another file's by then
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float) -> Collection[str]:
        """Returns when the group has changed state since the last call, when `wake` is called, or after ``timeout_s``.

        Returns the notifications' payloads (`notice`), or `MISSED` after a reconnect.
        """
        until = time.monotonic() + timeout_s
        if self._connection is None and self._listen():
            return (MISSED,)
        while True:
            if payloads := self._take_payloads():
                return payloads
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                return ()
            files = select.poll()  # not select(), which cannot handle file descriptors of 1024 and above
            for source in (self._read_end, self._connection):
                if source is not None:
                    files.register(source, select.POLLIN)
            if self._read_end in dict(files.poll(math.ceil(remaining_s * 1000))):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._read_end, 4096)
                return ()

    def wake(self) -> None:
        """Ends the current wait, or else the next one. Does nothing after `close`."""
        with self._pipe_lock:
            if self._write_end >= 0:
                with contextlib.suppress(BlockingIOError):  # full: the reader will wake up anyway
                    os.write(self._write_end, b"!")

    def close(self) -> None:
        """Closes the connection; may be called again."""
        self._drop()
        with self._pipe_lock:
            for end in (self._write_end, self._read_end):
                if end >= 0:
                    os.close(end)
            self._write_end = self._read_end = -1

    def _listen(self) -> bool:
        """Connects, unless the last attempt was too recent or found a pooler. Returns whether there is a connection."""
        if time.monotonic() < self._next_try:
            return False
        self._next_try = time.monotonic() + RECONNECT_AFTER_S
        try:
            self._connection = connect(self._url, application="tidemark listen")
            if pooled(self._connection):
                log.info("no notifications behind a pooler, polling instead group=%s", self._group)
                self._drop()
                self._next_try = math.inf
                return False
            self._connection.autocommit = True
            with self._connection.cursor() as cur:
                cur.execute(f"LISTEN {channel_of(self._group)}")
        except (DatabaseUnavailable, psycopg2.Error) as error:
            log.warning("no notifications, polling instead group=%s cause=%s", self._group, " ".join(str(error).split()))
            self._drop()
            return False
        return True

    def _take_payloads(self) -> Collection[str]:
        """Returns the payloads of the notifications that have arrived, and clears them. Drops a lost connection."""
        if self._connection is None:
            return ()
        try:
            self._connection.poll()
            payloads = {notification.payload for notification in self._connection.notifies}
            self._connection.notifies.clear()
        except psycopg2.Error as error:
            log.warning("notifications lost, polling instead group=%s cause=%s", self._group, " ".join(str(error).split()))
            self._drop()
            return ()
        return payloads

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
        self._connection = None
