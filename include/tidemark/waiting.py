"""Logs long waits of a process, with their reason and duration, so that a silent log always has an explanation."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
REPORT_AFTER_S = 30.0
"""When to report a wait first; then each time its duration has doubled."""


@dataclass(eq=False, slots=True)
class _Wait:
    what: str
    since: float = field(default_factory=time.monotonic)
    reported_s: float = 0.0


_waits: set[_Wait] = set()  # of this process; add and discard are atomic


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Marks the block as waiting for ``what``. Costs almost nothing unless `watch` was called."""
    wait = _Wait(what)
    _waits.add(wait)
    try:
        yield
    finally:
        _waits.discard(wait)


@functools.cache
def watch() -> None:
    """Starts a thread that reports long waits of this process until it ends."""
    threading.Thread(target=_watch, name="waits", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_EVERY_S)
        report(time.monotonic())


def report(now: float) -> None:
    """Logs a line for each wait that is due for a report."""
    for wait in sorted(_waits.copy(), key=lambda wait: wait.since):
        since_s = now - wait.since
        if since_s >= max(REPORT_AFTER_S, 2 * wait.reported_s):
            wait.reported_s = since_s
            log.info("waiting for=%s since_s=%.0f", wait.what, since_s)
