"""The chaos tests' Postgres, as a test strikes at it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import psycopg2
from tests.ledger import in_thread
from tests.points import until

from tidemark.local import LocalStack
from tidemark.local.account import server_account

COMMIT_SESSIONS = "tidemark/%"
"""The ``application_name`` of the sessions that commit slices; there is one for each slice in flight."""
DRIVER_SESSIONS = "tidemark driver %"


class PostgresServer:
    """Looks and strikes from a session of its own in the test's database. Each strike returns when it has happened."""

    def __init__(self, stack: LocalStack, url: str) -> None:
        self._stack = stack
        self._url = url

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """One statement, outside any transaction."""
        with contextlib.closing(self._session()) as session, session.cursor() as cur:
            cur.execute(statement, parameters or None)
            return cur.fetchall() if cur.description else []

    def backends(self, application: str) -> list[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
        return [pid for (pid,) in self.sql(query, application)]

    def backend(self, application: str) -> int:
        (pid,) = self.backends(application)
        return pid

    def waits(self, pid: int, event: str) -> bool:
        """Is it waiting for this event, or for one of this type?"""
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND %s IN (wait_event, wait_event_type)"
        return self.sql(query, pid, event) == [(1,)]

    # ---- strikes

    def terminate(self, pid: int) -> None:
        """As an administrator does."""
        assert self.sql("SELECT pg_terminate_backend(%s, 10000)", pid) == [(True,)]

    def kill(self, pid: int) -> None:
        """SIGKILL: Postgres ends all other sessions too, and recovers as from a crash."""
        with contextlib.closing(self._session()) as witness:
            psutil.Process(pid).kill()
            until(lambda: _is_lost(witness), "Postgres has noticed")

    def stop(self, pid: int) -> None:
        """The whole server in the mode immediate, whose session ``pid`` is."""
        self._stack.stop_postgres(immediate=True)

    def limit_files(self, pid: int, size: int) -> None:
        """The process can make no file larger than ``size`` bytes, as under a disk quota that is used up."""
        account = server_account()  # a process may limit its own user's processes; root would need a capability for others'
        switch = account.switch() if account else {}
        subprocess.run(["prlimit", "--pid", str(pid), f"--fsize={size}"], check=True, cwd="/", **switch)

    def up(self) -> None:
        """Return when it answers, whatever was done to it."""
        self._stack.start_postgres()

    @contextlib.contextmanager
    def withholding_answers(self) -> Iterator[None]:
        """Within the block a COMMIT is on disk and then waits for a standby that there is not. A server that is started anew meanwhile
        answers."""
        with contextlib.ExitStack() as ends:
            probes = ends.enter_context(contextlib.ExitStack())
            ends.callback(self.sql, "SELECT pg_reload_conf()")  # lets the probes go
            ends.callback(self.sql, "ALTER SYSTEM RESET synchronous_standby_names")
            self.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            self.sql("SELECT pg_reload_conf()")
            until(lambda: self._probe_waits(probes), "commits wait")
            self.sql("ALTER SYSTEM RESET synchronous_standby_names")
            yield

    def _probe_waits(self, probes: contextlib.ExitStack) -> bool:
        """Does a commit of our own wait? The server takes a moment to heed its settings."""
        session = probes.enter_context(contextlib.closing(self._session()))
        pid = session.get_backend_pid()
        probe = probes.enter_context(in_thread(lambda: _write(session)))
        until(lambda: probe.done() or self.waits(pid, "SyncRep"), "a commit waits or ends")
        return not probe.done()

    def _session(self) -> psycopg2.extensions.connection:
        session = psycopg2.connect(self._url, application_name="striker")
        session.autocommit = True
        return session


def _write(session: psycopg2.extensions.connection) -> None:
    with contextlib.suppress(psycopg2.Error), session.cursor() as cur:  # it goes down with the server
        cur.execute("SELECT pg_logical_emit_message(true, 'probe', '')")


def _is_lost(session: psycopg2.extensions.connection) -> bool:
    try:
        with session.cursor() as cur:
            cur.execute("SELECT 1")
    except (psycopg2.OperationalError, psycopg2.InterfaceError):
        return True
    return False
