"""Starts processes that outlive the command, and finds them again in a later command.

A process is never identified by its pid alone, which may belong to another process after a reboot: a server by its program and one unique
argument, with the pid of the last start only as the first candidate; Airflow's processes by pid and start time, and their descendants by a
mark in the environment, because parent and group are lost when the parent dies or a child opens its own session.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tidemark.local.account import SystemUser, own_uids

_POLL_S = 0.05
_BEFORE = 3
"""Lines shown before an error, because Postgres logs the details first and the failure after them."""
_SHELL = '"$@" </dev/null >&2 & echo $!'
"""The shell exits at once, so that init adopts the process and it never becomes a zombie of a long-lived caller."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Identifies a process by its program's name and one whole argument, and by its user, because any user can choose the former two."""

    program: str
    argument: str

    def fits(self, process: psutil.Process) -> bool:
        try:
            command = process.cmdline()
            matches = bool(command) and Path(command[0]).name == self.program and self.argument in command
            return matches and process.uids().real in own_uids() and not gone(process)
        except psutil.Error:
            return False


def find(signature: Signature, pid: int | None) -> psutil.Process | None:
    """The running process with this signature: ``pid`` if it fits, else the oldest match."""
    if pid is not None and psutil.pid_exists(pid):
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            pass
        else:
            if signature.fits(process):
                return process
    matches = [process for process in psutil.process_iter() if signature.fits(process)]
    return min(matches, key=lambda process: process.create_time(), default=None)


def spawn(command: Sequence[str | Path], *, log: Path, folder: Path, account: SystemUser | None = None) -> int:
    """Starts a process that survives the caller, in its own session and with its output in ``log``, a new file, and returns its pid. Only
    this user can read the log, because servers quote rows in it."""
    words = ["/bin/sh", "-c", _SHELL, "sh", *(str(word) for word in command)]
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        shell = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=output, start_new_session=True, check=True, **_common_options(folder, account)
        )
    return int(shell.stdout)


def run(command: Sequence[str | Path], *, folder: Path, limit_s: float, account: SystemUser | None = None) -> str | None:
    """Runs a program to its end. Returns None on success, else the output, which may be empty."""
    try:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False, **_common_options(folder, account)
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} took longer than {limit_s:g} s and was ended"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    return None if process.returncode == 0 else process.stdout.decode(errors="replace")


def _common_options(folder: Path, account: SystemUser | None) -> dict[str, Any]:
    """No input, this folder and user, and the caller's environment without Postgres' own variables (``PGDATA``, ``PGPORT``, …)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {"stdin": subprocess.DEVNULL, "cwd": folder, "env": env, **(account.switch() if account else {})}


@dataclass(frozen=True, slots=True)
class Started:
    """A process started at ``created``, in seconds since 1970. It leads the process group of the same number."""

    pid: int
    created: float

    @classmethod
    def now(cls, pid: int) -> Started:
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def runs(self) -> bool:
        """Whether it still runs. Reaps it if it is a child of this process, which nothing else waits for."""
        try:
            process = psutil.Process(self.pid)
            # The start time is computed from the boot time, which shifts slightly when the clock is set.
            if abs(process.create_time() - self.created) >= 2:
                return False
            if process.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return False


def marked(variable: str, mark: str) -> list[psutil.Process]:
    """All other live processes whose environment has this ``mark``."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone meanwhile
            if process.pid != os.getpid() and process.environ().get(variable) == mark and not gone(process):
                matches.append(process)
    return matches


def alive(pid: int) -> bool:
    try:
        return not gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def gone(process: psutil.Process) -> bool:
    """Whether the process has ended. A zombie counts as ended: in a container without an init process it may never be reaped."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(processes: Iterable[psutil.Process], limit_s: float) -> bool:
    """Waits until all processes have ended; False if some still run after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    remaining = list(processes)
    while remaining := [process for process in remaining if not gone(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def log_end(path: Path) -> list[str]:
    """The last few hundred lines of a log; none if it does not exist."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 32_768))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def relevant_lines(lines: Sequence[str], count: int = 12) -> str:
    """The ``count`` most useful lines: around the last line with an error, else the last ones."""
    errors = [number for number, line in enumerate(lines) if " ERROR " in line or "FATAL: " in line or line.startswith("Exception")]
    start = max(0, errors[-1] - _BEFORE if errors else len(lines) - count)
    return "\n".join(lines[start : start + count])
