"""The audit log: who did what.

Triggers write ``tidemark.audit_event`` in the transaction of each action (`sql/0015_roles.additive.sql`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction

if TYPE_CHECKING:
    from tidemark.db import Connection

SQL = statements("tidemark", "events.sql")


@dataclass(frozen=True, slots=True)
class Event:
    """``database_role`` is Postgres' ``session_user``; ``claimed_by`` is the user that Airflow or the shell named. ``plan`` is the number
    of a rewind or redrive. ``group`` is `None` for actions on the whole database."""

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


def read(connection: Connection, *, since: datetime | None = None, group: str | None = None) -> list[Event]:
    """The events, oldest first."""
    with transaction(connection) as cur:
        cur.execute(SQL["read"], {"since": since, "group": group})
        return [Event(**row) for row in rows(cur)]


def newest(
    connection: Connection,
    groups: Sequence[str],
    *,
    kind: str | None = None,
    person: str | None = None,
    whole: bool = False,
    before: int | None = None,
    limit: int = 100,
) -> list[Event]:
    """The newest events of these groups, newest first. ``kind`` is its beginning (``REWIND``), ``person`` a part of the user or the role.
    ``whole`` adds the actions on the whole database. ``before`` continues a list."""
    wanted = {"groups": list(groups), "kind": kind and _like(kind) + "%", "person": person and f"%{_like(person)}%"}
    with transaction(connection) as cur:
        cur.execute(SQL["newest"], {**wanted, "whole": whole, "before": before, "limit": limit})
        return [Event(**row) for row in rows(cur)]


def _like(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
