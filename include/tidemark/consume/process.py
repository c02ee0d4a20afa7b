"""A process that never outlives the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT = "TIDEMARK_PARENT_PID"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. To be called by whoever must not be orphaned.

    A driver also compares ``TIDEMARK_PARENT_PID`` with its parent, because the parent may have died before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        expected = os.environ.get(PARENT)
        if expected and os.getppid() != int(expected):
            os._exit(1)


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a child that calls `die_with_parent`."""
    return {**env, PARENT: str(os.getpid())}
