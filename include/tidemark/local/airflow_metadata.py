"""Accesses the local Airflow's metadata database when its processes start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tidemark import db
from tidemark.local import airflow_settings as settings

TERMINATE_TIMEOUT_MS = 10_000


def revision(url: str) -> str | None:
    """The database's schema revision; None if it has no schema."""
    with _transaction(url) as cursor:
        cursor.execute("SELECT to_regclass('public.alembic_version') IS NOT NULL")
        if cursor.fetchone() != (True,):
            return None
        cursor.execute("SELECT version_num FROM public.alembic_version")
        row = cursor.fetchone()
        return str(row[0]) if row else None


def end_sessions(url: str, process: str) -> None:
    """Ends the sessions, and their transactions, that a predecessor of ``process`` left open.

    A task inherits its scheduler's sockets. If it survives a killed scheduler, Postgres sees no disconnect: an open transaction stays open
    and keeps the lock that every scheduler needs to queue tasks.
    """
    with _transaction(url) as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s",
            (TERMINATE_TIMEOUT_MS, settings.session_name(process)),
        )


@contextlib.contextmanager
def _transaction(url: str) -> Iterator[db.Cursor]:
    with db.session(url, application="tidemark local airflow") as connection, db.transaction(connection) as cursor:
        yield cursor
