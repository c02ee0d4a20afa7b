"""How long the payload of a settled record is kept. All else of the record is kept for ever: ledger and audit count it."""

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
    """Takes key, value and headers out of records that were loaded, skipped or discarded longer ago than ``keep``, and out of what they
    were before edits; so many in each transaction. Returns how many records that were."""
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
