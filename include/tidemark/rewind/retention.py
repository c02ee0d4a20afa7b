"""How long the rows that rewinds took out are kept. What was moved, by whom and why is kept for ever."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.db import rows, statements, transaction

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "retention.sql")

KEEP = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Removed:
    """An archive that is gone: its rewind cannot be undone or verified any more."""

    rewind_id: int
    relation: str
    rows: int


def remove_archives(connection: Connection, keep: timedelta = KEEP) -> list[Removed]:
    """Drops the archives of rewinds that were applied longer ago than ``keep``, each in a transaction of its own."""
    with transaction(connection) as cur:
        cur.execute(SQL["outdated"], {"keep": keep})
        outdated = rows(cur)
    removed = []
    for archive in outdated:
        with transaction(connection) as cur:
            cur.execute(SQL["remove"], archive)
            if cur.fetchone() is None:
                continue
            cur.execute(f"DROP TABLE IF EXISTS {archive['relation']}")
        removed.append(Removed(archive["rewind_id"], archive["relation"], archive["rows"]))
        log.info("archive removed rewind=%s table=%s rows=%s", archive["rewind_id"], archive["relation"], archive["rows"])
    return removed
