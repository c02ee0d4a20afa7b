"""The statements that a connection sends, without BEGIN and COMMIT."""

from __future__ import annotations

from tests.support.deaths import hooked
from tidemark.db import Connection

COMMIT = 5
"""A slice's limits, the compare-and-set of the position, the look-up of suppressed records, COPY, and the ledger row."""


def counted(connection: Connection, sent: list[str]) -> Connection:
    """Returns the connection, whose cursors note their statements in ``sent``. A COPY is a statement, too."""
    connection.cursor_factory = hooked(before=lambda _cursor, _number, query: sent.append(query))
    return connection
