"""Retention of settled records' payloads. The rest of the row is kept permanently, because ledger and audit count it."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tidemark.db import single_row, statements, transaction

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

SQL = statements("tidemark.retry", "payload_retention.sql")

AT_A_TIME = 5_000


def empty_settled(connection: Connection, keep: timedelta, *, portion: int = AT_A_TIME) -> int:
    """Deletes key, value and headers of records that were loaded, skipped or discarded longer ago than ``keep``, and of their originals
    before edits, ``portion`` records per transaction. Returns how many records it emptied."""
    after: datetime | str = "-infinity"
    records, emptied = portion, 0
    while records == portion:
        with transaction(connection) as cur:
            cur.execute(SQL["empty"], {"after": after, "keep": keep, "records": portion})
            after, records = single_row(cur)
        emptied += records
    if emptied:
        log.info("payloads of settled records emptied records=%s", emptied)
    return emptied
