"""The common part of the servers: folder, log, remembered port and pid, start, wait and stop.

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

from tidemark.local import ports, processes
from tidemark.local.errors import NotUp, PortInUse, RunningOnAnotherPort, ServerFailed

Report = Callable[[str], None]

START_LIMIT_S = 90
"""Several times what a slow, busy machine needs, including recovery after a power cut."""
_KILL_LIMIT_S = 10
_POLL_S = 0.05
_AGAIN_S = 0.5


class ServerState(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    DIED = "died"
    """It should run but does not: it was killed, or the machine went down."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The current status of a server. Unknown values, and those that a stopped server does not have, are None."""

    name: str
    state: ServerState
    pid: int | None
    address: str | None
    version: str | None
    data_bytes: int
    log: Path


@dataclass(frozen=True, slots=True)
class Remembered:
    """State that a start stores for later commands. The pid is set from a start until a stop."""

    port: int | None = None
    controller_port: int | None = None
    pid: int | None = None


class Server(ABC):
    """A server whose state is one folder. The stack's lock ensures that one process at a time calls the methods that change it."""

    name: ClassVar[str]
    option: ClassVar[str]
    """The command line option for its port."""

    def __init__(self, folder: Path, asked_port: int | None) -> None:
        self.folder = folder
        self.asked_port = asked_port
        self.data = folder / "data"
        self.log = folder / "log.txt"

    def own_tmp(self) -> str:
        """An option for a JVM: its temporary files, too, are in the server's folder."""
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return f"-Djava.io.tmpdir={folder}"

    @abstractmethod
    def prepare(self, report: Report) -> None:
        """Check and fetch what a start needs, before any server is started. Raises a server-specific `Refused` or `Unavailable`."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves clients; polled during a start."""

    def request_stop(self) -> None:
        """Ask the running server to stop cleanly, without waiting for it."""
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
        """Create initial data in ``fresh``, which does not exist yet; files whose names begin with its name are removed later.

        Returns None, or the output of the failed program.
        """

    @abstractmethod
    def _launch(self, port: int) -> int:
        """Start the process and return its pid."""

    stop_limit_s: ClassVar[float]

    def process(self) -> psutil.Process | None:
        return processes.find(self.signature, self.remembered().pid)

    def remembered(self) -> Remembered:
        try:
            return Remembered(**json.loads((self.folder / "server.json").read_bytes()))
        except (OSError, ValueError, TypeError):  # missing, or truncated by a power cut: everything in it can be found again
            return Remembered()

    def remember(self, known: Remembered) -> None:
        fresh = self.folder / "server.json.new"
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(asdict(known)))
        fresh.replace(self.folder / "server.json")

    def port(self) -> int:
        """The port of the running server. Raises `NotUp` if it does not run."""
        port = self.remembered().port
        if port is None or self.process() is None:
            raise NotUp(server=self.name, folder=self.folder.parent)
        return port

    def check_asked_port(self, *, running: bool) -> None:
        """Raises `RunningOnAnotherPort` or `PortInUse` if the requested port is not available."""
        if self.asked_port is None:
            return
        known = self.remembered().port
        if running and known is not None and known != self.asked_port:
            raise RunningOnAnotherPort(server=self.name, port=known, asked=self.asked_port)
        if not running and not ports.is_free(self.asked_port):
            raise PortInUse(server=self.name, port=self.asked_port, option=self.option)

    def start(self, report: Report, *, besides: Collection[int] = ()) -> None:
        """Start it on the requested port, else on the last one, else on a free one not in ``besides``; does not wait."""
        known = self.remembered()
        port = self.asked_port or known.port
        if port is None or port in besides or not ports.is_free(port):
            if self.asked_port is not None:
                raise PortInUse(server=self.name, port=self.asked_port, option=self.option)
            if port is not None:
                report(f"{self.name}: port {port} is now in use by another program, using another port")
            port = ports.find_free(besides=besides)
        self.remember(replace(known, port=port, pid=None))
        if not self.data.exists():
            report(f"{self.name}: creating its initial data")
            fresh = self.folder / f"data.new-{secrets.token_hex(4)}"  # the program of a killed start may still be writing to its folder
            problem = self._initialise(fresh)
            if problem is not None:
                raise ServerFailed(server=self.name, what="could not create its initial data", log=self._write_log(problem), lines=problem)
            fresh.rename(self.data)
        self._clear()
        if self.log.exists():
            self.log.replace(self.folder / "log.1.txt")
        pid = self._launch(port)
        self.remember(replace(self.remembered(), pid=pid))

    def wait(self, report: Report, *, besides: Collection[int] = ()) -> None:
        """Return when it answers. Raises `ServerFailed` with the end of its log if it ends, or does not answer in time.

        Starts it again if the free port was taken just before it could listen, or if a killed server's children still held the data.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            pid = self.remembered().pid
            ended = pid is None or not processes.alive(pid)
            if not ended and self.answers():
                return
            late = time.monotonic() > deadline
            if late or (ended and not self.passing("\n".join(processes.log_end(self.log)))):
                what = "ended while starting" if ended else f"did not answer within {START_LIMIT_S} s"
                lines = processes.telling_lines(processes.log_end(self.log))
                raise ServerFailed(server=self.name, what=what, log=self.log, lines=lines)
            if ended:
                time.sleep(_AGAIN_S)
                self.start(report, besides=besides)
            time.sleep(_POLL_S)

    def adopt(self) -> bool:
        """Whether it runs, even if its start was killed before it stored the pid, which is then stored."""
        process = self.process()
        if process is not None and process.pid != self.remembered().pid:
            self.remember(replace(self.remembered(), pid=process.pid))
        return process is not None

    def passing(self, lines: str) -> bool:
        """Whether the last lines of the log show a problem that passes on its own or with another port."""
        return "ddress already in use" in lines

    def await_stop(self) -> None:
        """Wait for the stop that `request_stop` requested; kill the process if it takes too long."""
        process = self.process()
        if process is not None and not processes.wait_gone(process, self.stop_limit_s):
            self.kill()
        if self.remembered().pid is not None:
            self.remember(replace(self.remembered(), pid=None))

    def stop(self) -> None:
        self.request_stop()
        self.await_stop()

    def kill(self) -> None:
        """Kill the process, as a power cut would. Its state is then died, not stopped."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            processes.wait_gone(process, _KILL_LIMIT_S)

    def status(self) -> ServerStatus:
        known, process = self.remembered(), self.process()
        state = ServerState.RUNNING if process else ServerState.DIED if known.pid is not None else ServerState.STOPPED
        return ServerStatus(
            name=self.name,
            state=state,
            pid=process.pid if process else None,
            address=f"{ports.HOST}:{known.port}" if known.port else None,
            version=self.version() if self.data.exists() else None,
            data_bytes=_size(self.data),
            log=self.log,
        )

    def _clear(self) -> None:
        """Remove leftovers of creating initial data, from this start or a killed one."""
        for stale in self.folder.glob("data.new*"):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)

    def _write_log(self, text: str) -> Path:
        self.log.write_text(text)
        return self.log


def _size(folder: Path) -> int:
    """The disk space of all files below ``folder``; files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118 - a Path each would double the time
    return total
