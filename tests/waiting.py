"""Waits for conditions, not for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_S, LONGEST_S = 0.02, 0.1
"""Pauses between two looks. They grow, because some conditions ask Airflow or look at all processes."""


def until(condition: Callable[[], T], what: str = "", within_s: float = 180.0) -> T:
    """Polls ``condition`` and returns its first true result. Fails after ``within_s``; the message then says ``what`` was expected."""
    deadline, pause_s = time.monotonic() + within_s, FIRST_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, LONGEST_S)
    return found
