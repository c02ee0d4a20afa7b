"""Watches for rewinds while a batch is in flight, and interrupts it: what it reads of partitions that have moved could not be committed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from tidemark.db import session, transaction
from tidemark.errors import TidemarkError
from tidemark.group.wake import Wakeups
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Slice

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""How often the epochs of a batch that takes long are looked at where no notification comes."""

CLOSE_S = 10.0
"""How long a look at the epochs that is under way is waited for: Postgres may not answer it."""


class RewindWatch:
    """Listens on the group's channel, in a thread of its own, from the first batch on until it is closed."""

    def __init__(self, url: str, group: str, group_id: int, interrupt: Callable[[], None]) -> None:
        self._url, self._group, self._group_id, self._interrupt = url, group, group_id, interrupt
        self._wakeups: Wakeups | None = None  # a run that finds nothing to read needs none
        self._in_flight: Sequence[Slice] = ()
        self._changing = threading.Lock()
        self._stopping = False

    @contextlib.contextmanager
    def in_flight(self, slices: Sequence[Slice]) -> Iterator[None]:
        """A batch that is interrupted if one of its partitions is taken away; no other one ever is."""
        self._in_flight = slices
        if self._wakeups is None:
            self._wakeups = Wakeups(self._url, self._group)
            self._wakeups.wake()  # what came before it listened was not heard
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
            fence = self._fence(slices)
            with self._changing:
                if fence is not None and self._in_flight is slices:
                    log.info("batch is interrupted: %s", fence)
                    self._interrupt()
                    self._in_flight = ()

    def _fence(self, slices: Sequence[Slice]) -> OffsetFenced | None:
        with contextlib.suppress(TidemarkError):  # an outage ends the batch by itself
            try:
                with session(self._url, application="tidemark listen") as connection, transaction(connection) as cur:
                    store.require_held(cur, self._group_id, slices)
            except OffsetFenced as fence:
                return fence
        return None
