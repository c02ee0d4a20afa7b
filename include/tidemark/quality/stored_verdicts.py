"""Reads stored verdicts: the validations of groups, and a single one with its failing expectations and rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.errors import BadInput

if TYPE_CHECKING:
    from tidemark.db import Connection

SQL = statements("tidemark.quality", "stored_verdicts.sql")

FAILING_ROWS = 100
"""Maximum number of rows read for an expectation."""


def newest(connection: Connection, groups: Collection[str], *, of_each: int, most: int, verdict: str | None = None) -> list[dict[str, Any]]:
    """Returns the newest validations of these groups, with any or this `Verdict`, newest first. ``failing`` counts expectations."""
    with transaction(connection) as cur:
        cur.execute(SQL["newest"], {"groups": list(groups), "of_each": of_each, "most": most, "verdict": verdict})
        return rows(cur)


def read_validation(connection: Connection, group: str, validation_id: int) -> dict[str, Any]:
    """Reads a validation with its ``results``, each with its failing ``rows``. Raises `BadInput` if the group has no such validation."""
    key = {"group": group, "validation_id": validation_id}
    with transaction(connection) as cur:
        cur.execute(SQL["validation"], key)
        validations = rows(cur)
        if not validations:
            raise BadInput(what="validation", found=f"group {group} has no validation {validation_id}", fix="List the group's validations.")
        cur.execute(SQL["results"], key)
        results = rows(cur)
        cur.execute(SQL["failing_rows"], {**key, "limit": FAILING_ROWS})
        failing = rows(cur)
    for result in results:
        result["rows"] = [{k: v for k, v in row.items() if k != "number"} for row in failing if row["number"] == result["number"]]
    return validations[0] | {"results": results}
