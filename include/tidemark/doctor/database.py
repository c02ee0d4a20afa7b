"""Examines Postgres with this role, from this host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from rich.filesize import decimal

from tidemark import migrations, roles
from tidemark.author.explanation import table_rights
from tidemark.db import Connection, Cursor, DatabaseUrl, pooled, rows, session, statements, transaction
from tidemark.doctor.finding import Finding, attempted, failure, ok, warning
from tidemark.errors import TidemarkError
from tidemark.keep import default_keep
from tidemark.profiles import Profile
from tidemark.spec import ConsumerSpec, Sink
from tidemark.spec.model import Evolve
from tidemark.text.duration import format_duration, parse_duration
from tidemark.text.wording import counted

SQL = statements("tidemark.doctor", "database.sql")

CLOCKS_AGREE_S = 5.0
FEW_SESSIONS = 10
COMMIT_S = 120
"""A commit may wait this long for a row alone (see docs/architecture.md, "What waits")."""
OVERDUE = timedelta(days=2)
"""How far past its retention data shows that ``maintain`` does not run."""


def examine_database(url: DatabaseUrl, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """Examines the database. Raises `TidemarkError` without a session."""
    with session(url, application="tidemark doctor") as connection:
        server = _row(connection, "server")
        yield ok("postgres", f"version {server['version']}, role {server['role']}")
        try:
            migrations.require_version(connection)
        except TidemarkError as error:
            yield failure("postgres version", str(error), "")
            return
        if pooled(connection):
            yield ok("postgres pooler", "found; runs and members poll instead of listening for notifications")
        yield from _writable(server)
        yield from _durable(server)
        yield from _statement_timeout(server)
        yield from _clock(connection)
        yield from _sessions(connection, server)
        try:
            migrations.require_current(connection)
        except TidemarkError as error:
            yield failure("schema", str(error), "")
            return
        yield ok("schema", f"migrated up to {migrations.known()[-1]}")
        yield from _profiles(connection)
        yield from attempted("retention", lambda: _retention(connection))
        for spec in specs:
            for sink in spec.sinks.values():
                yield from _sink(connection, spec, sink)


def _writable(server: dict[str, Any]) -> Iterator[Finding]:
    if server["replica"] or server["read_only"]:
        kind = "a replica" if server["replica"] else "read-only"
        yield failure("postgres primary", f"this server is {kind}", "Name all hosts in the URL and add target_session_attrs=read-write.")


def _durable(server: dict[str, Any]) -> Iterator[Finding]:
    if disabled := [f"{name} is off" for name in ("fsync", "synchronous_commit") if server[name] == "off"]:
        fix = "Set it to on: after a crash, committed offsets and rows may be lost, or the database damaged."
        yield warning("postgres durability", " and ".join(disabled), fix)


def _statement_timeout(server: dict[str, Any]) -> Iterator[Finding]:
    limit = float(server["statement_timeout_s"])
    if limit:
        fix = f"ALTER ROLE {server['role']} SET statement_timeout = 0; a large slice or a rewind is one statement."
        summary = f"statement_timeout is {limit:g} s for this role"
        yield failure("postgres timeouts", summary, fix) if limit < COMMIT_S else warning("postgres timeouts", summary, fix)


def _clock(connection: Connection) -> Iterator[Finding]:
    ahead = clock_ahead_s(connection)
    if abs(ahead) > CLOCKS_AGREE_S:
        fix = "Synchronize both with NTP. Tidemark decides by the database's clock; times in logs and in Airflow differ from it."
        yield warning("clocks", f"this host is {ahead:+.1f} s from Postgres", fix)
    else:
        yield ok("clocks", f"this host is {ahead:+.1f} s from Postgres")


def clock_ahead_s(connection: Connection) -> float:
    """How far this host's clock is ahead of the database's, in seconds, assuming that the answer takes half of the round trip."""
    with transaction(connection) as cur:
        before = time.time()
        database = clock(cur)
        return (before + time.time()) / 2 - database


def clock(cur: Cursor) -> float:
    """The database's clock, in seconds since 1970."""
    cur.execute(SQL["clock"])
    (seconds,) = cur.fetchone() or (0.0,)
    return float(seconds)


def _sessions(connection: Connection, server: dict[str, Any]) -> Iterator[Finding]:
    used, most = _row(connection, "sessions")["count"], server["max_sessions"]
    summary = f"{used} of {most} sessions are in use"
    if most - used < FEW_SESSIONS:
        yield warning(
            "postgres sessions", summary, "Raise max_connections, or put a pooler before Postgres: a run has a session for each core."
        )
    else:
        yield ok("postgres sessions", summary)


def _profiles(connection: Connection) -> Iterator[Finding]:
    with transaction(connection) as cur:
        missing = {profile: roles.missing(cur, profile) for profile in Profile}
    if lacking := missing[Profile.RUNNER]:
        fix = f"As the schema's owner, run: tidemark migrate --grant-to {connection.info.user} --as {Profile.RUNNER}"
        yield failure("profiles", f"this role lacks {counted(len(lacking), 'right')} of the profile runner, such as {lacking[0]}", fix)
    else:
        yield ok("profiles", ", ".join(profile for profile in Profile if not missing[profile]))


def _retention(connection: Connection) -> Iterator[Finding]:
    keep = default_keep()
    row = _row(connection, "kept", overdue=parse_duration(keep) + OVERDUE)
    summary = f"{counted(row['archives'], 'archive')} ({decimal(row['archive_bytes'])}), failed records {decimal(row['failed_bytes'])}"
    if row["overdue"]:
        last = row["maintained_at"]
        since = f"last maintained {last:%Y-%m-%d}" if last else "never maintained"
        late = f"{counted(row['overdue'], 'archive')} more than {format_duration(OVERDUE)} past the retention of {keep}"
        yield warning("retention", f"{summary}; {late}, {since}", "Unpause the DAG maintain, or run: tidemark maintain")
    else:
        yield ok("retention", summary)


def _sink(connection: Connection, spec: ConsumerSpec, sink: Sink) -> Iterator[Finding]:
    subject = f"{spec.name}: sink"
    schema, table = sink.table.split(".")
    sinks = _rows(connection, "sink", schema=schema, table=table, privileges=table_rights(sink))
    if not sinks:  # the consumer's check says so
        return
    if missing := sinks[0]["missing"]:
        lacks = ", ".join(missing)
        yield failure(subject, f"this role lacks {lacks} on {sink.table}", f"GRANT {lacks} ON {sink.table} TO {connection.info.user};")
    elif sink.evolve is Evolve.ADD and not sinks[0]["mine"]:
        fix = f"ALTER TABLE {sink.table} OWNER TO {connection.info.user}; or remove evolve: add"
        yield warning(subject, f"this role does not own {sink.table}, so it cannot add columns", fix)
    else:
        yield ok(subject, sink.table)


def _row(connection: Connection, statement: str, **values: Any) -> dict[str, Any]:
    (row,) = _rows(connection, statement, **values)
    return row


def _rows(connection: Connection, statement: str, **values: Any) -> list[dict[str, Any]]:
    with transaction(connection) as cur:
        cur.execute(SQL[statement], values)
        return rows(cur)
