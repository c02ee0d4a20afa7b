"""Fetches what a statement returns, if it returns rows, as values that tests compare."""

from __future__ import annotations

from typing import Any


def fetched(cur: Any) -> list[Any]:
    """Returns all rows of the last statement; none of a statement without rows. ``SELECT FROM`` returns rows without columns, whose
    description is empty."""
    rows: list[Any] = [] if cur.description is None else cur.fetchall()
    return rows


def plain(value: Any) -> Any:
    """The value, as bytes if it is a bytea."""
    return bytes(value) if isinstance(value, memoryview) else value
