"""Fetches what a statement returns, if it returns rows."""

from __future__ import annotations

from typing import Any


def fetched(cur: Any) -> list[Any]:
    """Returns all rows of the last statement; none of a statement without rows. ``SELECT FROM`` returns rows without columns, whose
    description is empty."""
    rows: list[Any] = [] if cur.description is None else cur.fetchall()
    return rows
