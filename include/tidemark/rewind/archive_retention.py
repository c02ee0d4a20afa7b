"""Removes old archives of rewinds. The rewinds themselves (who moved what, when and why) are kept permanently."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from psycopg2.errors import LockNotAvailable

from tidemark.db import rows, statements, transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.rewind.rows.archive import ArchiveForged, open_archive
from tidemark.rewind.rows.overwritten import KEPT

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "archive_retention.sql")
LOCK_WAIT_S = 10
"""An archive that is locked for this long is left for the next call."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed archive, or removed overwritten rows. The rewind can no longer be undone or, without its archive, verified."""

    rewind_id: int
    relation: str
    rows: int


def remove_archives(connection: Connection, keep: timedelta) -> list[Removed]:
    """Drops the archives of rewinds that were applied longer ago than ``keep``, and the overwritten rows kept for them, each in its own
    transaction. Also removes rows that were deleted longer ago. Raises `ArchiveForged` for the first forged archive, after the others were
    dropped."""
    with transaction(connection) as cur:
        cur.execute(SQL["outdated"], {"keep": keep})
        outdated = rows(cur)
    removed, forged = [], []
    for archive in outdated:
        try:
            with transaction(connection) as cur:
                cur.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'")
                cur.execute(SQL["remove"], archive)
                if cur.fetchone() is None:
                    continue
                if (relation := open_archive(cur, archive)) is not None:
                    cur.execute(f"DROP TABLE {relation}")
        except ArchiveForged as error:
            forged.append(error)
            continue
        except DatabaseUnavailable as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            log.warning("archive not removed, another session holds it rewind=%s table=%s", archive["rewind_id"], archive["relation"])
            continue
        removed.append(Removed(archive["rewind_id"], archive["relation"], archive["rows"]))
        log.info("archive removed rewind=%s table=%s rows=%s", archive["rewind_id"], archive["relation"], archive["rows"])
    with transaction(connection) as cur:
        cur.execute(SQL["forget_deletions"], {"keep": keep})
        cur.execute(SQL["forget_deleted_rows"], {"keep": keep})
    removed += _remove_overwritten(connection, keep)
    if forged:
        raise forged[0]
    return removed


def _remove_overwritten(connection: Connection, keep: timedelta) -> list[Removed]:
    with transaction(connection) as cur:
        cur.execute(SQL["outdated_groups"], {"keep": keep})
        outdated = rows(cur)
    removed = []
    for group in outdated:
        with transaction(connection) as cur:
            cur.execute(SQL["forget"], group)
            if cur.fetchone() is None:
                continue
            cur.execute(SQL["drop_floors"], group)
            cur.execute(SQL["remove_rows"], group)
            count = cur.rowcount
        if count:
            removed.append(Removed(group["rewind_id"], KEPT, count))
        log.info("overwritten rows removed rewind=%s rows=%s", group["rewind_id"], count)
    return removed
