"""Watches for rewinds while a batch is in flight, and interrupts the batch: it can no longer commit the moved partitions."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from tidemark.db import DatabaseUrl, session, transaction
from tidemark.errors import TidemarkError
from tidemark.group.wake import Wakeups
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Slice

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""How often the epochs of a long batch are checked without a notification."""

CLOSE_S = 10.0
"""How long closing waits for a running check of the epochs: Postgres may not answer."""


class RewindWatch:
    """Listens on the group's channel in its own thread, from the first batch until it is closed."""

    def __init__(self, url: DatabaseUrl, group: str, group_id: int, interrupt: Callable[[], None]) -> None:
        self._url, self._group, self._group_id, self._interrupt = url, group, group_id, interrupt
        self._wakeups: Wakeups | None = None  # created by the first batch: a run with nothing to read needs none
        self._in_flight: Sequence[Slice] = ()
        self._changing = threading.Lock()
        self._stopping = False

    @contextlib.contextmanager
    def in_flight(self, slices: Sequence[Slice]) -> Iterator[None]:
        """Within this context, the batch is interrupted if one of its partitions is taken away. Later batches are not affected."""
        self._in_flight = slices
        if self._wakeups is None:
            self._wakeups = Wakeups(self._url, self._group)
            self._wakeups.wake()  # notifications sent before it listened were missed
            self._thread = threading.Thread(target=self._listen, args=[self._wakeups], name=f"rewinds {self._group}", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._changing:
                self._in_flight = ()

    def close(self) -> None:
        if self._wakeups is None:
            return
        self._stopping = True
        self._wakeups.wake()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._wakeups.close()

    def _listen(self, wakeups: Wakeups) -> None:
        while not self._stopping:
            wakeups.wait(LOOK_EVERY_S)
            slices = self._in_flight
            if not slices or self._stopping:
                continue
            fence = self._find_fence(slices)
            with self._changing:
                if fence is not None and self._in_flight is slices:
                    log.info("batch interrupted: %s", fence)
                    self._interrupt()
                    self._in_flight = ()

    def _find_fence(self, slices: Sequence[Slice]) -> OffsetFenced | None:
        """The fence that the batch would meet, if any."""
        with contextlib.suppress(TidemarkError):  # an outage ends the batch by itself
            try:
                with session(self._url, application="tidemark listen") as connection, transaction(connection) as cur:
                    store.require_held(cur, self._group_id, slices)
            except OffsetFenced as fence:
                return fence
        return None
