"""`LocalStack`: one Postgres, one Kafka broker and, on request, one schema registry, with all state in one folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemark import project
from tidemark.local import folder as state_folder
from tidemark.local.kafka import Kafka
from tidemark.local.postgres import DATABASE, Postgres
from tidemark.local.registry_server import RegistryServer
from tidemark.local.server import Report, Server, ServerStatus, silent


class LocalStack:
    """The embedded servers of ``folder`` (default: `tidemark.project.state()`). They outlive this object and its process.

    Any number of objects and processes can use one folder: all state is in the folder, and only one at a time can change it (others get
    `FolderBusy`). ``postgres_port`` and ``kafka_port`` request a port at each start (default: the last one, at the first start a free one).
    """

    def __init__(self, folder: Path | None = None, *, postgres_port: int | None = None, kafka_port: int | None = None) -> None:
        self.folder = (folder or project.state()).resolve()
        self.postgres = Postgres(self.folder / "postgres", postgres_port)
        self.kafka = Kafka(self.folder / "kafka", kafka_port)
        self.registry = RegistryServer(self.folder / "registry", None)

    @property
    def _servers(self) -> tuple[Server, ...]:
        return (self.registry, self.kafka, self.postgres)  # the slowest one first

    def up(self, report: Report = silent, *, registry: bool = False) -> None:
        """Starts missing servers and waits until all answer; ``report`` gets the steps.

        Without ``registry``, the schema registry stays as it is. Stops the servers that it started if it fails. Raises the errors of
        `tidemark.local.errors`.
        """
        servers = [server for server in self._servers if registry or server is not self.registry]
        self._make_folders(servers)
        with state_folder.held(self.folder):
            missing = [server for server in servers if not server.adopt()]
            self._start(missing, report, servers)
            self.postgres.create_database(DATABASE)
            report("already up" if not missing else "up")

    def down(self) -> None:
        """Stops all servers and waits for their end. Does nothing if none runs."""
        if self.folder.is_dir():
            with state_folder.held(self.folder):
                self._stop()

    def reset(self) -> None:
        """Stops all servers and deletes their data, ports and password. Other files in the folder stay."""
        if not self.folder.is_dir():
            return
        with state_folder.held(self.folder):
            self._stop()
            for server in self._servers:
                if (server.folder / "server.json").exists():  # otherwise not our folder, but one of the same name
                    shutil.rmtree(server.data, ignore_errors=True)  # first, so that a reset killed here can be repeated
                    shutil.rmtree(server.folder)
                elif server.folder.is_dir():
                    with contextlib.suppress(OSError):
                        server.folder.rmdir()
            (self.folder / "lock").unlink()
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()

    def status(self) -> list[ServerStatus]:
        """The status of Postgres, Kafka and, after its first start, the schema registry. Changes nothing and takes no lock."""
        return [self.postgres.status(), self.kafka.status(), *([self.registry.status()] if self.registry.data.exists() else [])]

    def env(self) -> dict[str, str]:
        """The environment variables that point Tidemark at this stack. Raises `NotUp` if Postgres or Kafka does not run."""
        variables = {"TIDEMARK_DATABASE_URL": self.postgres.url(), "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers()}
        if self.registry.process() is not None:
            variables["TIDEMARK_REGISTRY_URL"] = self.registry.url()
        return variables

    def create_database(self, name: str) -> str:
        """Creates the database ``name`` unless it exists, and returns its URL. Raises `NotUp` if Postgres does not run."""
        self.postgres.create_database(name)
        return self.postgres.url(name)

    def start(self, server: Server) -> None:
        """Starts one of the servers unless it runs."""
        self._make_folders([server])
        with state_folder.held(self.folder):
            self._start([] if server.adopt() else [server], silent, [server])

    def stop(self, server: Server) -> None:
        with state_folder.held(self.folder):
            server.stop()

    def stop_postgres_immediately(self) -> None:
        """Stops it without a checkpoint; the next start replays the WAL, as after a crash."""
        with state_folder.held(self.folder):
            self.postgres.stop_immediately()

    def kill(self, server: Server) -> None:
        """Sends SIGKILL; the status is died until the next start."""
        with state_folder.held(self.folder):
            server.kill()

    def _start(self, missing: Sequence[Server], report: Report, servers: Sequence[Server]) -> None:
        """Starts ``missing`` in parallel, then waits until all ``servers`` answer."""
        for server in servers:
            server.check_requested_port(running=server not in missing)
        for server in reversed(missing):  # Postgres first: fetching the jars of the others is wasted if it cannot start
            server.prepare(report)
        started: list[Server] = []
        try:
            for server in missing:
                started.append(server)
                server.start(report, exclude=self._ports_of_others(server))
            for server in servers:
                server.wait(report, exclude=self._ports_of_others(server))
        except BaseException:
            for server in started:
                server.stop()
            raise

    def _ports_of_others(self, server: Server) -> set[int]:
        others = [other for other in self._servers if other is not server]
        assigned = [(other.requested_port, other.remembered().port, other.remembered().controller_port) for other in others]
        return {port for ports in assigned for port in ports if port is not None}

    def _stop(self) -> None:
        for server in self._servers:
            server.request_stop()
        for server in self._servers:
            server.await_stop()

    def _make_folders(self, servers: Sequence[Server]) -> None:
        state_folder.make(self.folder)
        for server in servers:
            state_folder.make(server.folder)
            if server is not self.postgres:  # which may run as another user, and protects its data itself
                server.folder.chmod(0o700)

    @contextlib.contextmanager
    def running(self, report: Report = silent) -> Iterator[LocalStack]:
        """The stack, started for the block and stopped after it."""
        self.up(report)
        try:
            yield self
        finally:
            self.down()
