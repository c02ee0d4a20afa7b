"""What there is to do between the runs of consumers: whose records are to be published, of whom something is due."""

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

if TYPE_CHECKING:
    from tidemark.connections import Connections
    from tidemark.db import Connection
    from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "pending.sql")


@dataclass(frozen=True, slots=True)
class DueRecords:
    """The records of a group that are due, and their lateness: for how long they have been."""

    records: int
    median: timedelta
    p99: timedelta
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class Tried:
    """The records of a group of which the last try was in the last 24 hours, and the lateness of these tries: from due to the commit."""

    records: int
    median: timedelta
    p99: timedelta
    longest: timedelta


def busy(connection: Connection) -> list[str]:
    """The groups of a database of which a record is to be published, or waits, by name. Of the others there is nothing to do."""
    with transaction(connection) as cur:
        cur.execute(SQL["busy"])
        return [name for (name,) in cur.fetchall()]


def due(connection: Connection, group: str) -> DueRecords | None:
    """What a drain of the group would find to try now; `None`: nothing. By the database's clock (I6)."""
    with transaction(connection) as cur:
        cur.execute(SQL["group_id"], {"group": group})
        found = cur.fetchone()
        if found is None or not store.due(cur, found[0]):
            return None
        cur.execute(SQL["lateness"], {"group_id": found[0]})
        (late,) = rows(cur)
        return DueRecords(**late) if late["records"] else None


def tried(connection: Connection, group: str) -> Tried | None:
    """How late the tries of the last 24 hours were; `None`: there were none. By the database's clock (I6)."""
    with transaction(connection) as cur:
        cur.execute(SQL["tried"], {"group": group})
        (late,) = rows(cur)
        return Tried(**late) if late["records"] else None


def relay_at_end(connections: Connections, spec: ConsumerSpec) -> list[str]:
    """Publishes what a run of a consumer has handed off, and says what keeps records from it.

    The run has committed, so nothing that goes wrong here is its fault, and nothing is raised: what is not published stays in the outbox,
    for the next relay.
    """
    try:
        with session(connections.database_url, application="tidemark relay") as connection:
            done = relay(connection, connections.kafka, spec)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run has committed
        return [f"What failed is not published yet: {trouble(error)}"]
    return obstacles(done, spec.name)


def trouble(error: Exception) -> str:
    """What to say of an error that ends one consumer's part and no other's. One that nobody expected is logged with its traceback."""
    if isinstance(error, TidemarkError | psycopg2.Error):
        return str(error).strip()
    log.error("unexpected error, going on with the rest error=%s", type(error).__name__, exc_info=error)
    return f"{type(error).__name__}: {error}"


def obstacles(done: Relayed, name: str) -> list[str]:
    """Why records of the consumer ``name`` are not published, a sentence for each topic, and what to do."""
    said = [f"{topic} takes nothing: {why}. See: tidemark retries topics {name}" for topic, why in sorted(done.blocked.items())]
    if done.refused:
        said.append(f"The broker did not take {done.refused} records. See: tidemark retries list {name} --refused")
    return said
