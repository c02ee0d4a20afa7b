"""A real Airflow on loopback for `make up`, `make demo` and the end-to-end tests.

Four processes, each in its own process group, and a metadata database that the caller provides::

    api-server ── scheduler ── LocalExecutor's workers ── tasks ── drivers
        │             │
        ├─ dag-processor ── parsers
        └─ triggerer

All state is in one folder, Airflow's home: ``state.json`` (port, processes), ``secrets.json`` and ``passwords.json`` (owner only),
``logs/`` (one file per process, and Airflow's own logs). A process is identified by pid and start time; its descendants by a mark in their
environment, which survives dead parents and new sessions. So `LocalAirflow.up` cleans up after a killed run, and `LocalAirflow.down` leaves
no process behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tidemark import project
from tidemark.errors import BadInput
from tidemark.local import airflow_metadata as metadata
from tidemark.local import airflow_settings as settings
from tidemark.local import ports, processes
from tidemark.local.airflow_client import POLL_S, AirflowClient, AirflowUnavailable
from tidemark.local.errors import PortInUse
from tidemark.local.folder import write_private
from tidemark.local.processes import Started
from tidemark.local.server import Report, silent

if TYPE_CHECKING:
    from tidemark.local.stack import LocalStack

PROCESSES: Mapping[str, tuple[str, ...]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""The four processes and their arguments. `airflow_settings.QUICK` explains why there are no log servers."""
STOP_ORDER = ((("scheduler",), 8), (("dag-processor", "triggerer"), 4), (("api-server",), 8))
"""The processes to stop, step by step, and the seconds from SIGTERM to SIGKILL.

Tasks report their end to the api-server, so it stops last: otherwise the scheduler's supervisors wait many seconds for it. A scheduler ends
within 3 s if its tasks' ``on_kill`` ends them; a task without one keeps running, and so does its scheduler. A triggerer ends within 2 s, or
within 10 s if it misses the end of its child, which is not worth the wait.
"""
UP_TIMEOUT_S = 300
"""The first start of a fresh installation compiles all of Airflow; later starts take 7 s."""
KILL_TIMEOUT_S = 10
LOG_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One of the four processes: ``pid`` is None if it does not run; ``healthy``: it has sent a recent heartbeat."""

    name: str
    pid: int | None
    healthy: bool


@dataclass(frozen=True, slots=True)
class AirflowStatus:
    """The four processes, in the order of `PROCESSES`."""

    url: str | None
    processes: tuple[ProcessStatus, ...]

    @property
    def healthy(self) -> bool:
        return all(process.healthy for process in self.processes)


@dataclass(frozen=True, slots=True)
class _State:
    """The state that outlives this Python process, in ``state.json``."""

    port: int | None = None
    fingerprint: str = ""
    schema: str = ""
    processes: Mapping[str, Started] = field(default_factory=dict)


class LocalAirflow:
    """The Airflow in ``folder``. Several objects and processes can manage the same folder: `up` and `down` take turns."""

    user = settings.ADMIN

    def __init__(
        self,
        folder: Path,
        *,
        metadata_url: str,
        env: Mapping[str, str],
        dags: Path,
        plugins: Path | None,
        port: int | None = None,
    ) -> None:
        """All four processes, and so all tasks, get ``env``. ``port`` defaults to the last one used, or any free one."""
        self.folder = folder.absolute()
        self.metadata_url = metadata_url
        self.env = dict(env)
        self.dags = dags.absolute()
        self.plugins = plugins.absolute() if plugins else None
        self.port = port

    @classmethod
    def at(cls, folder: Path) -> LocalAirflow:
        """The existing Airflow in ``folder``, to stop or query it. Starting it needs the constructor's arguments."""
        return cls(folder, metadata_url="", env={}, dags=folder / "dags", plugins=None)

    @classmethod
    def on(cls, stack: LocalStack, folder: Path, *, port: int | None = None, spark_master: str = "local[2]") -> LocalAirflow:
        """The Airflow of a running stack: metadata in its Postgres, the project's DAGs, connections to its servers."""
        env = stack.env()
        plugins = project.root() / "plugins"
        return cls(
            folder,
            metadata_url=stack.create_database("airflow"),
            env=settings.connections_env(
                env["TIDEMARK_DATABASE_URL"],
                {"bootstrap.servers": env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]},
                spark_master,
                env.get("TIDEMARK_REGISTRY_URL"),
            )
            | {"TIDEMARK_HOME": str(project.root())},
            dags=project.root() / "dags",
            plugins=plugins if plugins.is_dir() else None,
            port=port,
        )

    @property
    def url(self) -> str:
        """The api-server's URL, available after the first `up`."""
        return f"http://127.0.0.1:{self._known_port()}"

    @property
    def password(self) -> str:
        """The admin's password; created on first use."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return settings.Secrets.of(self.folder).admin_password

    def client(self) -> AirflowClient:
        """A client for the admin; the caller closes it."""
        return AirflowClient(self.url, user=self.user, password=self.password)

    def up(self, report: Report = silent) -> None:
        """Starts missing processes and waits until all four are healthy. Does nothing if they are and their settings have not changed.

        Starts a dead process again after ending its remaining children. If the settings changed, all four restart.
        Raises `PortInUse`, and `AirflowUnavailable` with the end of the log if a process dies or does not become healthy.
        """
        with self._lock():
            state = self._state()
            port = self.port or state.port
            if port is None or state.fingerprint != settings.fingerprint(self._overlay(port)):
                missing = list(PROCESSES)
            else:
                missing = [name for name in PROCESSES if not self._running(name)]
            if missing:
                self._stop(missing, report)
                missing = self._claim_port(missing, report)
                self._migrate(report)
                report(f"Airflow: starting {', '.join(missing)}")
            for name in missing:
                self._launch(name)
            self._wait_healthy()

    def down(self, report: Report = silent) -> None:
        """Stops all four and all of their descendants, even in other sessions: SIGTERM first, then SIGKILL."""
        if not self.folder.exists():
            return
        with self._lock():
            self._stop(PROCESSES, report)
            self._store(replace(self._state(), processes={}))

    def status(self) -> AirflowStatus:
        """The four processes' current status."""
        state = self._state()
        healthy = self._healthy()
        statuses = []
        for name in PROCESSES:
            runs = self._running(name)
            statuses.append(ProcessStatus(name=name, pid=state.processes[name].pid if runs else None, healthy=runs and name in healthy))
        return AirflowStatus(url=None if state.port is None else self.url, processes=tuple(statuses))

    # State

    def _state(self) -> _State:
        try:
            stored = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return _State()
        return _State(**{**stored, "processes": {name: Started(**started) for name, started in stored["processes"].items()}})

    def _store(self, state: _State) -> None:
        write_private(self.folder / "state.json", json.dumps(asdict(state)))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        for path in (self.folder, self.folder / "logs", self.folder / "plugins"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _overlay(self, port: int) -> dict[str, str]:
        return settings.overlay(
            folder=self.folder,
            port=port,
            secrets=settings.Secrets.of(self.folder),
            metadata_url=self.metadata_url,
            env=self.env,
            dags=self.dags,
            plugins=self.plugins,
        )

    def _known_port(self) -> int:
        port = self._state().port
        if port is None:
            raise BadInput(what="local Airflow", found=f"{self.folder} has never been started", fix="Call up() first.")
        return port

    # Starting

    def _claim_port(self, names: list[str], report: Report) -> list[str]:
        """Stores the port. Returns the processes to start: all four if the port had to change."""
        state = self._state()
        port = self.port or state.port
        if "api-server" in names and (port is None or not ports.is_free(port)):
            if self.port is not None:
                raise PortInUse(server="Airflow", port=self.port, option="--port")
            self._stop(PROCESSES, report)
            names, port = list(PROCESSES), ports.find_free()
        assert port is not None, "the api-server runs, so its port was stored"
        self._store(replace(state, port=port, fingerprint=settings.fingerprint(self._overlay(port))))
        return names

    def _migrate(self, report: Report) -> None:
        """Migrates the metadata database to this Airflow's schema, unless this version has already done so."""
        version = importlib.metadata.version("apache-airflow")
        if (revision := metadata.revision(self.metadata_url)) and self._state().schema == f"{version} {revision}":
            return
        report("Airflow: preparing the metadata database")
        log = self.folder / "logs" / "db-migrate.log"
        with log.open("wb") as output:
            process = subprocess.run(
                settings.command("db", "migrate"),
                env=self._environment("db-migrate"),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if process.returncode:
            cause = f"`airflow db migrate` ended with {process.returncode}"
            raise AirflowUnavailable(process="metadata database", cause=cause, log=_tail(log))
        self._store(replace(self._state(), schema=f"{version} {metadata.revision(self.metadata_url)}"))

    def _environment(self, process: str) -> dict[str, str]:
        return settings.environment(os.environ, self._overlay(self._known_port()), process=process)

    def _launch(self, name: str) -> None:
        metadata.end_sessions(self.metadata_url, name)
        log = self._log(name)
        if log.exists():
            shutil.move(log, log.with_suffix(".log.1"))
        with log.open("wb") as output:
            process = subprocess.Popen(
                settings.command(*PROCESSES[name]),
                env=self._environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.returncode = 0  # nothing waits for it; otherwise Popen would warn at garbage collection
        state = self._state()
        started = Started.now(process.pid)
        self._store(replace(state, processes={**state.processes, name: started}))

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + UP_TIMEOUT_S
        while missing := [name for name in PROCESSES if name not in self._healthy()]:
            for name in missing:
                if not self._running(name):
                    raise AirflowUnavailable(process=name, cause="it ended while it was starting", log=_tail(self._log(name)))
            if time.monotonic() > deadline:
                cause, log = f"not healthy after {UP_TIMEOUT_S} s", self._log(missing[0])
                raise AirflowUnavailable(process=missing[0], cause=cause, log=_tail(log))
            time.sleep(POLL_S)

    def _healthy(self) -> set[str]:
        """The running processes that have sent a heartbeat since their start.

        Airflow only checks the time of the last heartbeat: a killed scheduler, or its successor, counts as healthy for 30 s.
        """
        state = self._state()
        if state.port is None or not self._running("api-server"):
            return set()
        try:
            with AirflowClient(self.url, user=self.user, password="") as client:
                answer = client.health()
        except AirflowUnavailable:
            return set()
        healthy = {"api-server"} if answer["metadatabase"]["status"] == "healthy" else set()
        for name in ("scheduler", "dag-processor", "triggerer"):
            key = name.replace("-", "_")
            heartbeat = answer[key][f"latest_{key}_heartbeat"]
            if answer[key]["status"] == "healthy" and heartbeat and self._running(name):
                started_at = datetime.fromtimestamp(state.processes[name].created, UTC)
                if datetime.fromisoformat(heartbeat) > started_at:
                    healthy.add(name)
        return healthy

    # Stopping

    def _stop(self, names: Iterable[str], report: Report) -> None:
        """Stops ``names`` and their descendants: SIGTERM in `STOP_ORDER`, then SIGKILL to every process with the mark."""
        names = set(names)
        if any(self.family(name) for name in names):
            report(f"Airflow: stopping {', '.join(name for name in PROCESSES if name in names)}")
        for step, timeout_s in STOP_ORDER:
            running = [name for name in step if name in names and self._running(name)]
            family = [member for name in running for member in self.family(name)]
            for name in running:
                self._terminate(name)
            processes.wait_gone(family, timeout_s)
            for name in names.intersection(step):
                self._kill_family(name)

    def _terminate(self, name: str) -> None:
        """Sends SIGTERM; for the scheduler, to its whole group: supervisors pass it to their tasks, for which the scheduler waits.

        The others stop their children themselves, and wait longer for a child that got a signal from elsewhere.
        """
        pid = self._state().processes[name].pid
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if name == "scheduler" else os.kill)(pid, signal.SIGTERM)

    def _kill_family(self, name: str) -> None:
        """Sends SIGKILL to every process with the mark of ``name`` until none is left."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while family := self.family(name):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            if not processes.wait_gone(family, deadline - time.monotonic()):
                pids = ", ".join(str(member.pid) for member in family)
                raise AirflowUnavailable(process=name, cause=f"some of its processes {pids} survived SIGKILL for {KILL_TIMEOUT_S} s")

    # Processes

    def _running(self, name: str) -> bool:
        started = self._state().processes.get(name)
        return started is not None and started.runs()

    def family(self, name: str) -> list[psutil.Process]:
        """The process ``name`` and all of its live descendants in this folder."""
        return processes.marked(settings.MARK, settings.mark(name, self.folder))

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def _tail(log: Path) -> str:
    return "\n".join(processes.log_end(log)[-LOG_TAIL_LINES:])
