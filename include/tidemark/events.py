"""Reads the audit log: who did what.

Triggers write ``tidemark.audit_event`` in the transaction of each action (`sql/0009_audit.sql`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidemark.db import Connection, rows, statements, transaction
from tidemark.errors import Unavailable

SQL = statements("tidemark", "events.sql")

SETTLE_S = 60.0
"""How long a resuming reader waits for transactions that write events."""
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the audit log. ``database_role`` is Postgres' ``session_user``; ``claimed_by`` is the user that Airflow or the shell
    named. ``plan`` is the number of a rewind or redrive. ``group`` is `None` for actions on the whole database."""

    event_id: int
    at: datetime
    kind: str
    group: str | None
    database_role: str
    claimed_by: str | None
    dag_id: str | None
    run_id: str | None
    plan: int | None
    digest: str | None
    reason: str | None
    details: Mapping[str, Any]


class EventsUnfinished(Unavailable):
    """A transaction that writes an event has not ended in time."""

    waited_s: float

    def __str__(self) -> str:
        return f"An action that writes an event has not ended within {self.waited_s:.0f} s. Nothing was read. Try again when it has ended."


def read(connection: Connection, *, since: datetime | None = None, after: int | None = None, group: str | None = None) -> list[Event]:
    """The events, oldest first.

    ``after`` selects those with a higher id: a reader that resumes with the last id it has seen misses none and gets none twice. An event
    gets its id before its commit, so the read waits up to `SETTLE_S` for lower ids in flight. Raises `EventsUnfinished`.
    """
    last = None if after is None else _settled(connection)
    with transaction(connection) as cur:
        cur.execute(SQL["read"], {"since": since, "after": after, "last": last, "group": group})
        return [Event(**row) for row in rows(cur)]


def _settled(connection: Connection) -> int:
    """The newest event's id, once every event with a lower id is committed or rolled back."""
    with transaction(connection) as cur:
        cur.execute(SQL["last"])
        (last,) = cur.fetchone() or (0,)
    writers = _writers(connection)  # after `last`: later transactions get higher ids
    deadline = time.monotonic() + SETTLE_S
    while writers:
        if time.monotonic() > deadline:
            raise EventsUnfinished(waited_s=SETTLE_S)
        time.sleep(LOOK_EVERY_S)
        writers &= _writers(connection)
    return int(last)


def _writers(connection: Connection) -> set[str]:
    with transaction(connection) as cur:
        cur.execute(SQL["writers"])
        return {name for (name,) in cur.fetchall()}


def newest(
    connection: Connection,
    groups: Sequence[str],
    *,
    kind: str | None = None,
    person: str | None = None,
    whole: bool = False,
    limit: int = 100,
) -> list[Event]:
    """The newest events of these groups, newest first. ``kind`` is a prefix (``REWIND``), ``person`` a part of the user or the role.
    ``whole`` adds actions on the whole database."""
    filters = {"groups": list(groups), "kind": kind and _like(kind) + "%", "person": person and f"%{_like(person)}%"}
    with transaction(connection) as cur:
        cur.execute(SQL["newest"], {**filters, "whole": whole, "limit": limit})
        return [Event(**row) for row in rows(cur)]


def _like(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
