"""Retention of the payloads of settled records. The rest of the row is kept permanently: ledger and audit count it."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.db import statements, transaction

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "retention.sql")

AT_A_TIME = 5_000


def empty_settled(connection: Connection, keep: timedelta, *, portion: int = AT_A_TIME) -> int:
    """Deletes key, value and headers of records that were loaded, skipped or discarded longer ago than ``keep``, and of their originals
    before edits, ``portion`` records per transaction. Returns how many records it emptied."""
    after = emptied = 0
    while True:
        with transaction(connection) as cur:
            cur.execute(SQL["empty"], {"after": after, "keep": keep, "records": portion})
            last, records = map(int, cur.fetchone() or (0, 0))
        emptied += records
        if records < portion:
            break
        after = last
    if emptied:
        log.info("payloads of settled records emptied records=%s", emptied)
    return emptied
