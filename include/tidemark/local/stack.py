"""`LocalStack`: one Postgres and one Kafka broker whose state is one folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemark import project
from tidemark.local import folder as state_folder
from tidemark.local.kafka import Kafka
from tidemark.local.postgres import DATABASE, Postgres
from tidemark.local.server import Report, Server, ServerStatus


def _silent(_: str) -> None: ...


class LocalStack:
    """The embedded servers of ``folder``, `tidemark.project.state()` by default. They outlive this object and its process.

    Any number of objects and processes may stand for one folder: what is known stands in the folder, and those that change something
    take turns (`FolderBusy` for whoever comes second). ``postgres_port`` and ``kafka_port`` ask for a port; without, the last one is
    used again, and at the first start a free one. Ports that are asked for count at each start.
    """

    def __init__(self, folder: Path | None = None, *, postgres_port: int | None = None, kafka_port: int | None = None) -> None:
        self.folder = (folder or project.state()).resolve()
        self.postgres = Postgres(self.folder / "postgres", postgres_port)
        self.kafka = Kafka(self.folder / "kafka", kafka_port)

    @property
    def _servers(self) -> tuple[Server, ...]:
        return (self.kafka, self.postgres)  # the slower one first

    def up(self, report: Report = _silent) -> None:
        """Return when both servers answer, starting what does not run; ``report`` is told the steps.

        What this call started is stopped again if it fails. Raises the errors of `tidemark.local.errors`.
        """
        self._make_folders()
        with state_folder.held(self.folder):
            missing = [server for server in self._servers if not server.adopt()]
            self._start(missing, report)
            self.postgres.create_database(DATABASE)
            report("already up" if not missing else "up")

    def down(self) -> None:
        """Stop both servers and wait for their end. Nothing to do if none runs."""
        if self.folder.is_dir():
            with state_folder.held(self.folder):
                self._stop()

    def reset(self) -> None:
        """Stop both servers and delete their data, ports and password. Other files in the folder stay."""
        if not self.folder.is_dir():
            return
        with state_folder.held(self.folder):
            self._stop()
            for server in self._servers:
                if (server.folder / "server.json").exists():  # a folder of ours, not one that happens to have the name
                    shutil.rmtree(server.data, ignore_errors=True)  # first: a reset that is killed here can be repeated
                    shutil.rmtree(server.folder)
                elif server.folder.is_dir():
                    with contextlib.suppress(OSError):
                        server.folder.rmdir()
            (self.folder / "lock").unlink()
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()

    def status(self) -> list[ServerStatus]:
        """Postgres and Kafka as they are now. Changes nothing and takes no lock."""
        return [self.postgres.status(), self.kafka.status()]

    def env(self) -> dict[str, str]:
        """The environment that points Tidemark at this stack. Raises `NotUp` if a server does not run."""
        return {"TIDEMARK_DATABASE_URL": self.postgres.url(), "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers()}

    def create_database(self, name: str) -> str:
        """The URL of the database ``name``, which is made unless it is there. Raises `NotUp` if Postgres does not run."""
        self.postgres.create_database(name)
        return self.postgres.url(name)

    def start_postgres(self) -> None:
        self._start_one(self.postgres)

    def stop_postgres(self, *, immediate: bool = False) -> None:
        """Stop it in Postgres' mode fast, or immediate: then the next start recovers as after a crash."""
        with state_folder.held(self.folder):
            if immediate:
                self.postgres.stop_immediately()
            else:
                self.postgres.stop()

    def kill_postgres(self) -> None:
        """SIGKILL; its status is died until it is started again."""
        with state_folder.held(self.folder):
            self.postgres.kill()

    def start_kafka(self) -> None:
        self._start_one(self.kafka)

    def stop_kafka(self) -> None:
        with state_folder.held(self.folder):
            self.kafka.stop()

    def kill_kafka(self) -> None:
        """SIGKILL; its status is died until it is started again."""
        with state_folder.held(self.folder):
            self.kafka.kill()

    def _start_one(self, server: Server) -> None:
        self._make_folders()
        with state_folder.held(self.folder):
            self._start([] if server.adopt() else [server], _silent, only=server)

    def _start(self, missing: Sequence[Server], report: Report, *, only: Server | None = None) -> None:
        """Start ``missing`` side by side and wait until they, and those that run already, answer (or ``only`` this one)."""
        concerned = self._servers if only is None else (only,)
        for server in concerned:
            server.check_asked_port(running=server not in missing)
        for server in reversed(missing):  # Kafka may have to fetch its jars: not before Postgres is known to be able to start
            server.prepare(report)
        begun: list[Server] = []
        try:
            for server in missing:
                begun.append(server)
                server.start(report, besides=self._ports_besides(server))
            for server in concerned:
                server.wait(report, besides=self._ports_besides(server))
        except BaseException:
            for server in begun:
                server.stop()
            raise

    def _ports_besides(self, server: Server) -> set[int]:
        others = [other for other in self._servers if other is not server]
        known = [(other.asked_port, other.remembered().port, other.remembered().controller_port) for other in others]
        return {port for ports in known for port in ports if port is not None}

    def _stop(self) -> None:
        for server in self._servers:
            server.request_stop()
        for server in self._servers:
            server.await_stop()

    def _make_folders(self) -> None:
        state_folder.make(self.folder)
        for server in self._servers:
            state_folder.make(server.folder)

    @contextlib.contextmanager
    def running(self, report: Report = _silent) -> Iterator[LocalStack]:
        """The stack, up within the block and down after it."""
        self.up(report)
        try:
            yield self
        finally:
            self.down()
