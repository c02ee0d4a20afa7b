"""Identifies processes that outlive their starter: by pid and start time, and their descendants by a mark in the environment.

A pid alone may have been reused; parent and group are lost when the parent dies or a child opens its own session.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tidemark.local import airflow_settings as settings

POLL_S = 0.05
LOG_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Started:
    """A process started at ``created``, in seconds since 1970. It leads the process group of the same number."""

    pid: int
    created: float

    @classmethod
    def now(cls, pid: int) -> Started:
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def runs(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            # The start time is computed from the boot time, which shifts slightly when the clock is set.
            return alive(process) and abs(process.create_time() - self.created) < 2
        except psutil.NoSuchProcess:
            return False


def family(mark: str) -> list[psutil.Process]:
    """All other live processes with this ``mark``."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone meanwhile
            if process.pid != os.getpid() and process.environ().get(settings.MARK) == mark and alive(process):
                members.append(process)
    return members


def alive(process: psutil.Process) -> bool:
    """Whether the process runs. Zombies do not; reaps this process's own."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
    except psutil.NoSuchProcess:
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return False


def group_of(process: psutil.Process) -> int | None:
    """The process group; None if the process is gone."""
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> bool:
    """Waits until all processes have ended; False if some still run after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    remaining = list(processes)
    while remaining := [process for process in remaining if alive(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def tail(log: Path) -> str:
    """The last lines of a log; empty if it does not exist."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])
