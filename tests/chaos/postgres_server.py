"""The chaos tests' Postgres, with the faults that a test can inject."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import psycopg2
from tests.support.fetching import fetched
from tests.support.ledger import in_thread
from tests.support.waiting import until

from tidemark.local import LocalStack
from tidemark.local.account import server_account

COMMIT_SESSIONS = "tidemark/%"
"""The ``application_name`` of the sessions that commit slices; there is one session for each slice in flight."""
DRIVER_SESSIONS = "tidemark driver %"


class PostgresServer:
    """Observes and strikes the server from a separate session in the test's database. Each strike returns when it has taken effect."""

    def __init__(self, stack: LocalStack, url: str) -> None:
        self._stack = stack
        self._url = url

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Executes one statement, outside any transaction."""
        with contextlib.closing(self._session()) as session, session.cursor() as cur:
            cur.execute(statement, parameters or None)
            return fetched(cur)

    def backends(self, application: str) -> list[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
        return [pid for (pid,) in self.sql(query, application)]

    def backend(self, application: str) -> int:
        """The only session of this name. One whose slice is committed lives a moment longer than its transaction."""
        (pid,) = until(lambda: len(found := self.backends(application)) == 1 and found, f"one session of {application}")
        return int(pid)

    def waits(self, pid: int, event: str) -> bool:
        """Whether the session waits for this event, or for one of this type."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND %s IN (wait_event, wait_event_type)"
        return self.sql(query, pid, event) == [(1,)]

    # ---- strikes

    def terminate(self, pid: int) -> None:
        """Terminates the session, as an administrator does."""
        assert self.sql("SELECT pg_terminate_backend(%s, 10000)", pid) == [(True,)]

    def kill(self, pid: int) -> None:
        """Sends SIGKILL: Postgres ends all other sessions too, and recovers as after a crash."""
        with contextlib.closing(self._session()) as witness:
            psutil.Process(pid).kill()
            until(lambda: _is_lost(witness), "Postgres has noticed")

    def stop(self, pid: int) -> None:
        """Stops the whole server to which the session ``pid`` belongs, in immediate mode."""
        self._stack.stop_postgres_immediately()

    def limit_files(self, pid: int) -> None:
        """Lets the process, unless it has ended, write to no file, as an exhausted disk quota does."""
        account = server_account()  # a process may limit those of its own user; root would need a capability for others
        switch = account.switch() if account else {}
        done = subprocess.run(["prlimit", "--pid", str(pid), "--fsize=0"], check=False, cwd="/", **switch)
        assert done.returncode == 0 or not psutil.pid_exists(pid), done

    def up(self) -> None:
        """Starts the server if it is down, and returns when it answers."""
        self._stack.start(self._stack.postgres)

    @contextlib.contextmanager
    def withholding_answers(self) -> Iterator[None]:
        """In the block, a COMMIT is written to disk and then waits for a standby that does not exist. A server that is restarted in the
        meantime does answer."""
        with contextlib.ExitStack() as ends:
            probes = ends.enter_context(contextlib.ExitStack())
            ends.callback(self.sql, "SELECT pg_reload_conf()")  # releases the probes
            ends.callback(self.sql, "ALTER SYSTEM RESET synchronous_standby_names")
            self.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            self.sql("SELECT pg_reload_conf()")
            until(lambda: self._probe_waits(probes), "commits wait")
            self.sql("ALTER SYSTEM RESET synchronous_standby_names")
            yield

    def _probe_waits(self, probes: contextlib.ExitStack) -> bool:
        """Whether a test commit waits. The server needs a moment to apply its settings."""
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
    with contextlib.suppress(psycopg2.Error), session.cursor() as cur:  # the session may end with the server
        cur.execute("SELECT pg_logical_emit_message(true, 'probe', '')")


def _is_lost(session: psycopg2.extensions.connection) -> bool:
    try:
        with session.cursor() as cur:
            cur.execute("SELECT 1")
    except (psycopg2.OperationalError, psycopg2.InterfaceError):
        return True
    return False
