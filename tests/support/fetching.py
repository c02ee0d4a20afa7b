"""Runs statements, and fetches what they return, as values that tests compare."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg2


def fetched(cur: Any) -> list[Any]:
    """Returns all rows of the last statement; none of a statement without rows. ``SELECT FROM`` returns rows without columns, whose
    description is empty."""
    rows: list[Any] = [] if cur.description is None else cur.fetchall()
    return rows


def execute(url: str, *statements: str) -> list[Any]:
    """Runs each statement in a transaction of its own, or in none if it takes none, and returns the rows of the last one."""
    with contextlib.closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            for statement in statements:
                cur.execute(statement)
            return fetched(cur)


def plain(value: Any) -> Any:
    """The value, as bytes if it is a bytea."""
    return bytes(value) if isinstance(value, memoryview) else value
