"""Reads pending, lost, rewound and validated records by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidemark.db import Cursor, rows, statements

SQL = statements("tidemark.metrics", "metrics.sql")


@dataclass(frozen=True, slots=True)
class GroupStates:
    """States by group, without groups that have nothing to report."""

    unsettled: Mapping[tuple[str, str], int]
    """Failed records by group and state: ``WAITING``, ``HELD``, ``FAILED``."""
    overdue_s: Mapping[str, float]
    """How long the oldest due record has been due; 0 if no waiting record is due."""
    lost: Mapping[str, int]
    rewinds: Mapping[str, int]
    validations: Mapping[str, tuple[str, datetime]]
    """The last verdict and its time."""


def read(cur: Cursor) -> GroupStates:
    def read_rows(name: str) -> list[dict[str, Any]]:
        cur.execute(SQL[name])
        return rows(cur)

    return GroupStates(
        unsettled={(row["group"], row["state"]): row["records"] for row in read_rows("unsettled")},
        overdue_s={row["group"]: max(row["late_s"], 0.0) for row in read_rows("due")},
        lost={row["group"]: row["records"] for row in read_rows("lost")},
        rewinds={row["group"]: row["rewinds"] for row in read_rows("rewinds")},
        validations={row["group"]: (row["verdict"], row["validated_at"]) for row in read_rows("validations")},
    )
