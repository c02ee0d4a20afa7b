"""The common base of the servers: folder, log, remembered port and pid, start, wait and stop.

```
                 start                       answers
    stopped ───────────────▶ (starting) ───────────────▶ running
       ▲                          │ ends, or too late        │
       └────── stop ◀─────────────┴──────── stop ◀───────────┤
                                            died ◀───────────┘ kill -9, power cut: the next start recovers
```
Initial data is created in ``data.new`` and renamed to ``data``, so ``data`` is complete whenever it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import psutil

from tidemark.local import folder as state_folder
from tidemark.local import ports, processes
from tidemark.local.errors import NotUp, PortInUse, RunningOnAnotherPort, ServerFailed

Report = Callable[[str], None]

START_LIMIT_S = 90
"""Several times what a slow, busy machine needs, including recovery after a power cut."""
_KILL_LIMIT_S = 10
_POLL_S = 0.05
_RESTART_PAUSE_S = 0.5


def silent(_: str) -> None:
    """Discards the report."""


class ServerState(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    DIED = "died"
    """The server should run but does not: it was killed, or the machine went down."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The current status of a server. Values that are unknown, or that a stopped server lacks, are None."""

    name: str
    state: ServerState
    pid: int | None
    address: str | None
    version: str | None
    data_bytes: int
    log: Path


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state that a start stores for later commands. The pid is set from a start until a stop."""

    port: int | None = None
    controller_port: int | None = None
    pid: int | None = None


class Server(ABC):
    """A server whose state is one folder. The stack's lock serializes the methods that change it across processes."""

    name: ClassVar[str]
    option: ClassVar[str]
    """The command line option for its port."""

    def __init__(self, folder: Path, requested_port: int | None) -> None:
        self.folder = folder
        self.requested_port = requested_port
        self.data = folder / "data"
        self.log = folder / "log.txt"

    def own_tmp(self) -> str:
        """A JVM option that puts temporary files into the server's folder."""
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return f"-Djava.io.tmpdir={folder}"

    @abstractmethod
    def prepare(self, report: Report) -> None:
        """Checks and downloads a start's requirements, before any server starts. Raises a server-specific `Refused` or `Unavailable`."""

    def answers(self) -> bool:
        """Whether the server serves clients; polled during a start."""
        port = self.remembered().port
        return port is not None and ports.accepts(port) and self._answers(port)

    @abstractmethod
    def _answers(self, port: int) -> bool:
        """Whether the server that accepts connections on the port is this one, and serves clients."""

    def request_stop(self) -> None:
        """Asks the running server to stop cleanly, without waiting for it."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    @abstractmethod
    def version(self) -> str | None: ...

    @property
    @abstractmethod
    def signature(self) -> processes.Signature: ...

    @abstractmethod
    def _initialise(self, fresh: Path) -> str | None:
        """Creates initial data in ``fresh``, which does not exist yet. Files whose names begin with its name are removed later.

        Returns None, or the output of the failed program.
        """

    @abstractmethod
    def _launch(self, port: int) -> int:
        """Starts the process and returns its pid."""

    stop_limit_s: ClassVar[float]

    def process(self) -> psutil.Process | None:
        return processes.find(self.signature, self.remembered().pid)

    def remembered(self) -> Remembered:
        try:
            return Remembered(**json.loads((self.folder / "server.json").read_bytes()))
        except (OSError, ValueError, TypeError):  # missing, or truncated by a power cut; all of it can be recovered
            return Remembered()

    def remember(self, state: Remembered) -> None:
        state_folder.write_private(self.folder / "server.json", json.dumps(asdict(state)))

    def port(self) -> int:
        """The running server's port. Raises `NotUp` if it does not run."""
        port = self.remembered().port
        if port is None or self.process() is None:
            raise NotUp(server=self.name, folder=self.folder.parent)
        return port

    def check_requested_port(self, *, running: bool) -> None:
        """Raises `RunningOnAnotherPort` or `PortInUse` if the requested port is not available."""
        if self.requested_port is None:
            return
        port = self.remembered().port
        if running and port is not None and port != self.requested_port:
            raise RunningOnAnotherPort(server=self.name, port=port, requested=self.requested_port)
        if not running and not ports.is_free(self.requested_port):
            raise PortInUse(server=self.name, port=self.requested_port, option=self.option)

    def start(self, report: Report, *, exclude: Collection[int] = ()) -> None:
        """Starts the server without waiting: on the requested port, else the last one, else a free one not in ``exclude``."""
        state = self.remembered()
        port = self.requested_port or state.port
        if port is None or port in exclude or not ports.is_free(port):
            if self.requested_port is not None:
                raise PortInUse(server=self.name, port=self.requested_port, option=self.option)
            if port is not None:
                report(f"{self.name}: port {port} is now in use by another program, using another port")
            port = ports.find_free(exclude=exclude)
        self.remember(replace(state, port=port, pid=None))
        if not self.data.exists():
            report(f"{self.name}: creating its initial data")
            fresh = self.folder / f"data.new-{secrets.token_hex(4)}"  # a killed start's program may still write to its own folder
            problem = self._initialise(fresh)
            if problem is not None:
                self.log.write_text(problem)
                raise ServerFailed(server=self.name, what="could not create its initial data", log=self.log, lines=problem)
            fresh.rename(self.data)
        self._clear()
        if self.log.exists():
            self.log.replace(self.folder / "log.1.txt")
        pid = self._launch(port)
        self.remember(replace(self.remembered(), pid=pid))

    def wait(self, report: Report, *, exclude: Collection[int] = ()) -> None:
        """Waits until the server answers. Raises `ServerFailed` with the end of its log if it ends, or does not answer in time.

        Restarts it if another program took the free port first, or if a killed server's children still held the data.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            pid = self.remembered().pid
            ended = pid is None or not processes.alive(pid)
            if not ended and self.answers():
                return
            late = time.monotonic() > deadline
            if late or (ended and not self.is_transient("\n".join(processes.log_end(self.log)))):
                what = "ended while starting" if ended else f"did not answer within {START_LIMIT_S} s"
                lines = processes.relevant_lines(processes.log_end(self.log))
                raise ServerFailed(server=self.name, what=what, log=self.log, lines=lines)
            if ended:
                time.sleep(_RESTART_PAUSE_S)
                self.start(report, exclude=exclude)
            time.sleep(_POLL_S)

    def adopt(self) -> bool:
        """Returns whether the server runs. Stores its pid if a killed start did not."""
        process = self.process()
        if process is not None and process.pid != self.remembered().pid:
            self.remember(replace(self.remembered(), pid=process.pid))
        return process is not None

    def is_transient(self, lines: str) -> bool:
        """Whether the last lines of the log show a problem that goes away by itself or with another port."""
        return "ddress already in use" in lines

    def await_stop(self) -> None:
        """Waits for the stop that `request_stop` requested, and kills the process after `stop_limit_s`."""
        process = self.process()
        if process is not None and not processes.wait_gone([process], self.stop_limit_s):
            self.kill()
        if self.remembered().pid is not None:
            self.remember(replace(self.remembered(), pid=None))

    def stop(self) -> None:
        self.request_stop()
        self.await_stop()

    def kill(self) -> None:
        """Kills the process, as a power cut would. The server's state is then died, not stopped."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            processes.wait_gone([process], _KILL_LIMIT_S)

    def status(self) -> ServerStatus:
        saved, process = self.remembered(), self.process()
        state = ServerState.RUNNING if process else ServerState.DIED if saved.pid is not None else ServerState.STOPPED
        return ServerStatus(
            name=self.name,
            state=state,
            pid=process.pid if process else None,
            address=f"{ports.HOST}:{saved.port}" if saved.port else None,
            version=self.version() if self.data.exists() else None,
            data_bytes=_size(self.data),
            log=self.log,
        )

    def _clear(self) -> None:
        """Removes temporary files of creating initial data, from this start or a killed one."""
        for stale in self.folder.glob("data.new*"):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)


def _size(folder: Path) -> int:
    """The disk space of all files below ``folder``; skips files that vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118 - a Path each would double the time
    return total
