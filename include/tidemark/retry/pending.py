"""The work between consumer runs: groups with records to publish, and groups with due records."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import rows, session, statements, transaction
from tidemark.errors import TidemarkError, message_of
from tidemark.offsets.store import find_group
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
    """A group's due records, and their lateness: the time since they came due."""

    records: int
    median: timedelta
    p99: timedelta
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class RecentTries:
    """A group's records last tried within 24 hours, and the lateness of these tries, from due time to commit."""

    records: int
    median: timedelta
    p99: timedelta
    longest: timedelta


def busy(connection: Connection) -> list[str]:
    """Reads the names of groups with records to publish, waiting or held. The others have no work."""
    with transaction(connection) as cur:
        cur.execute(SQL["busy"])
        return [name for (name,) in cur.fetchall()]


def due(connection: Connection, group: str) -> DueRecords | None:
    """Reads the records that a drain of the group would try now, by the database's clock (I6). `None`: none is due."""
    with transaction(connection) as cur:
        group_id = find_group(cur, group)
        if group_id is None or not store.due(cur, group_id):
            return None
        cur.execute(SQL["lateness"], {"group_id": group_id})
        (lateness,) = rows(cur)
        return DueRecords(**lateness) if lateness["records"] else None


def tried(connection: Connection, group: str) -> RecentTries | None:
    """Reads the lateness of the last 24 hours' tries, by the database's clock (I6). `None`: there were no tries."""
    with transaction(connection) as cur:
        cur.execute(SQL["tried"], {"group": group})
        (lateness,) = rows(cur)
        return RecentTries(**lateness) if lateness["records"] else None


def relay_at_end(connections: Connections, spec: ConsumerSpec) -> list[str]:
    """Publishes the records that a consumer's run has handed off. Returns the obstacles, if any.

    Raises nothing: the run has already committed, so a failure here must not fail it. Unpublished records stay in the outbox for the next
    relay.
    """
    try:
        with session(connections.database_url, application="tidemark relay") as connection:
            done = relay(connection, connections.kafka, spec)
    except Exception as error:  # noqa: BLE001 - the run has committed, so no error here may fail it
        return [f"Failed records are not published yet: {trouble(error)}"]
    return obstacles(done, spec.name)


def trouble(error: Exception) -> str:
    """Returns the text of an error that affects one consumer only. Logs an unexpected error with its traceback."""
    if isinstance(error, TidemarkError | psycopg2.Error):
        return str(error).strip()
    log.error("unexpected error, continuing with the rest error=%s", type(error).__name__, exc_info=error)
    return f"{type(error).__name__}: {message_of(error)}"


def obstacles(done: Relayed, name: str) -> list[str]:
    """Returns why the consumer's records are not published, and the fix: a sentence per topic, and one for refused records."""
    texts = blocked(done, name)
    if done.refused:
        texts.append(f"The broker rejected {counted(done.refused, 'record')}. See: tidemark retries list {name} --refused")
    return texts


def blocked(done: Relayed, name: str) -> list[str]:
    """Returns why topics cannot be published to, and the fix: a sentence for each."""
    return [f"Cannot publish to {topic}: {why}. See: tidemark retries topics {name}" for topic, why in sorted(done.blocked.items())]
