"""What is pending, lost, rewound and validated now, by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.metrics", "metrics.sql")


@dataclass(frozen=True, slots=True)
class GroupStates:
    """Groups that have nothing to report are missing."""

    unsettled: Mapping[tuple[str, str], int]
    """Failed records by group and state: ``WAITING``, ``HELD``, ``FAILED``."""
    overdue_s: Mapping[str, float]
    """How long the oldest due record has been due; 0 if none of the waiting records is due."""
    lost: Mapping[str, int]
    rewinds: Mapping[str, int]
    validations: Mapping[str, tuple[str, datetime]]
    """The last verdict, and when."""


def read(cur: Cursor) -> GroupStates:
    def found(name: str) -> list[dict[str, Any]]:
        cur.execute(SQL[name])
        return rows(cur)

    return GroupStates(
        unsettled={(row["group"], row["state"]): row["records"] for row in found("unsettled")},
        overdue_s={row["group"]: max(row["late_s"], 0.0) for row in found("due")},
        lost={row["group"]: row["records"] for row in found("lost")},
        rewinds={row["group"]: row["rewinds"] for row in found("rewinds")},
        validations={row["group"]: (row["verdict"], row["validated_at"]) for row in found("validations")},
    )
