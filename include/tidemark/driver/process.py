"""Child processes that never outlive their parent (Linux).

python -m tidemark.driver.process COMMAND...        # a command that ends with its parent
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

PARENT = "TIDEMARK_PARENT_PID"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Call it in a child that must not be orphaned.

    Also compares ``TIDEMARK_PARENT_PID`` with the parent, which may have died before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        expected = os.environ.get(PARENT)
        if expected and os.getppid() != int(expected):
            os._exit(1)


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a child that calls `die_with_parent`."""
    return {**env, PARENT: str(os.getpid())}


def children() -> set[int]:
    """The ids of this process's children. Empty if the kernel does not list them (Linux does)."""
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids |= set(map(int, file.read_text().split()))
    return pids


def renew_random() -> None:
    """Seeds NumPy's generator in a fork of a process that has imported it: each fork would draw the same numbers. Python seeds its own."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def main() -> None:
    die_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the kernel keeps what `die_with_parent` has asked for


if __name__ == "__main__":
    main()
