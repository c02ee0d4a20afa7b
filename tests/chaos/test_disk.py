"""Postgres runs out of disk space or quota while a slice stands at each step in turn: an outage that needs nothing but free space to
end."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.chaos.postgres_server import COMMIT_SESSIONS, PostgresServer
from tests.chaos.trial import committed_before

from tidemark.errors import DatabaseUnavailable
from tidemark.local import LocalStack
from tidemark.local.account import server_account
from tidemark.sink.steps import Step

ROUNDS, VALUE_BYTES = 8, 1500
"""The rows of one slice of such records, and its failed records, fill more pages than a table may have free."""
CAP_SYS_ADMIN = 21

NO_PAGE, NO_LOG = "could not extend file", "server closed the connection unexpectedly"


def test_quota_that_is_used_up_at_any_step_fails_the_run_as_unavailable(trial, server: PostgresServer):
    """From this step on, Postgres cannot write to any file. Extending a table fails at ③ or ④. If those steps are already done, writing the
    WAL fails at ⑥: Postgres stops and recovers. Once there is space again, the next try loads what is missing."""
    chaos = trial(2, value_bytes=VALUE_BYTES)
    for step in Step:
        with chaos.held_here(step, rounds=ROUNDS) as held:
            for pid in server.backends(COMMIT_SESSIONS):  # there are none before ⑦
                server.limit_files(pid)
            held.point.release()
            error = held.run.exception(180)
            server.up()
        if committed_before(step):
            assert error is None
        else:
            assert isinstance(error, DatabaseUnavailable), step
            assert (NO_PAGE if step <= Step.COPY_FAILED else NO_LOG) in error.cause, step
        chaos.check_stored(held.mark, committed=committed_before(step))
        assert chaos.run_here().records == (0 if committed_before(step) else held.mark.end - held.mark.start)


Full = Callable[[int], AbstractContextManager[None]]
"""In the block, this backend has no space in the tablespace ``small``."""


@pytest.fixture
def full(stack: LocalStack) -> Iterator[Full]:
    """A tablespace ``small`` on a separate disk. If this process may not mount one, a quota of the backend simulates it."""
    folder = stack.folder / "small"
    folder.mkdir()
    server = PostgresServer(stack, stack.postgres.url())
    with _disk(folder) if _may_mount() else contextlib.nullcontext():
        if (account := server_account()) is not None:
            account.own(folder)
        server.sql(f"CREATE TABLESPACE small LOCATION '{folder}'")
        yield _filled(folder) if _may_mount() else _limited(server)
        server.sql("DROP TABLESPACE small")


def test_full_disk_of_any_table_fails_the_run_as_unavailable(full: Full, trial, server: PostgresServer):
    """The table may be the ledger, the sink or that of the failed records: the whole slice is rolled back."""
    chaos = trial(1, value_bytes=VALUE_BYTES)
    tables = {Step.LEDGER: "tidemark.batch", Step.COPY_ROWS: chaos.scenario.table, Step.COPY_FAILED: "tidemark.failed_record"}
    for step, table in tables.items():  # the ledger first, while it has no page
        server.sql(f"ALTER TABLE {table} SET TABLESPACE small")
        with chaos.held_here(step, rounds=ROUNDS) as held, full(server.backend(COMMIT_SESSIONS)):
            held.point.release()
            error = held.run.exception(180)
            assert isinstance(error, DatabaseUnavailable), step
            assert NO_PAGE in error.cause
            chaos.check_stored(held.mark, committed=False)
        assert chaos.run_here().records == held.mark.end - held.mark.start


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tidemark-small", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _filled(folder: Path) -> Full:
    @contextlib.contextmanager
    def full(_: int) -> Iterator[None]:
        ballast = folder / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert shutil.disk_usage(folder).free == 0
            yield
        finally:
            ballast.unlink()

    return full


def _limited(server: PostgresServer) -> Full:
    @contextlib.contextmanager
    def full(pid: int) -> Iterator[None]:
        server.limit_files(pid)
        yield

    return full
