"""The work between consumer runs: which groups have records to publish, and which have records due."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import rows, session, statements, transaction
from tidemark.errors import TidemarkError
from tidemark.retry import store
from tidemark.retry.relay import Relayed, relay
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.connections import Connections
    from tidemark.db import Connection
    from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "pending.sql")


@dataclass(frozen=True, slots=True)
class DueRecords:
    """The due records of a group and their lateness, the time since they came due."""

    records: int
    median: timedelta
    p99: timedelta
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class RecentTries:
    """The records of a group last tried within 24 hours, and the lateness of these tries: from the due time to the commit."""

    records: int
    median: timedelta
    p99: timedelta
    longest: timedelta


def busy(connection: Connection) -> list[str]:
    """The groups of a database with records to publish, waiting or held, by name. The others need nothing."""
    with transaction(connection) as cur:
        cur.execute(SQL["busy"])
        return [name for (name,) in cur.fetchall()]


def due(connection: Connection, group: str) -> DueRecords | None:
    """The records that a drain of the group would try now, by the database's clock (I6). `None`: nothing is due."""
    with transaction(connection) as cur:
        cur.execute(SQL["group_id"], {"group": group})
        found = cur.fetchone()
        if found is None or not store.due(cur, found[0]):
            return None
        cur.execute(SQL["lateness"], {"group_id": found[0]})
        (late,) = rows(cur)
        return DueRecords(**late) if late["records"] else None


def tried(connection: Connection, group: str) -> RecentTries | None:
    """The lateness of the last 24 hours' tries, by the database's clock (I6). `None`: there were no tries."""
    with transaction(connection) as cur:
        cur.execute(SQL["tried"], {"group": group})
        (late,) = rows(cur)
        return RecentTries(**late) if late["records"] else None


def relay_at_end(connections: Connections, spec: ConsumerSpec) -> list[str]:
    """Publishes what a consumer's run has handed off. Returns the obstacles, if any.

    The run has already committed, so a failure here must not fail it: nothing is raised. Unpublished records stay in the outbox for the
    next relay.
    """
    try:
        with session(connections.database_url, application="tidemark relay") as connection:
            done = relay(connection, connections.kafka, spec)
    except Exception as error:  # noqa: BLE001 - the run has committed, so no error here may fail it
        return [f"Failed records are not published yet: {trouble(error)}"]
    return obstacles(done, spec.name)


def trouble(error: Exception) -> str:
    """Text for an error that stops one consumer's part only. An unexpected error is logged with its traceback."""
    if isinstance(error, TidemarkError | psycopg2.Error):
        return str(error).strip()
    log.error("unexpected error, continuing with the rest error=%s", type(error).__name__, exc_info=error)
    return f"{type(error).__name__}: {error}"


def obstacles(done: Relayed, name: str) -> list[str]:
    """Why records of the consumer ``name`` are not published, and what to do: a sentence for each topic, and one for refused records."""
    said = blocked(done, name)
    if done.refused:
        said.append(f"The broker rejected {counted(done.refused, 'record')}. See: tidemark retries list {name} --refused")
    return said


def blocked(done: Relayed, name: str) -> list[str]:
    """Why nothing can be published to a topic, and what to do: a sentence for each."""
    return [f"Cannot publish to {topic}: {why}. See: tidemark retries topics {name}" for topic, why in sorted(done.blocked.items())]
