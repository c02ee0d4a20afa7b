"""Checks whether a rewind can be undone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.rewind.plan_model import Plan, RewindState
from tidemark.rewind.rows import overwritten
from tidemark.rewind.rows.archive import archives_of, open_archive
from tidemark.sink.table import read_columns

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "plan.sql")


def lock_archives(cur: Cursor, rewind_id: int) -> None:
    """Prevents the removal of the rows that an undo of the rewind restores, until the transaction ends."""
    for name in ("lock_groups", "lock_archives"):
        cur.execute(SQL[name], {"rewind_id": rewind_id})


def problems(cur: Cursor, plan: Plan, sinks: Mapping[int, Collection[str]]) -> list[str]:
    """Returns why a stored rewind cannot be undone; empty if it can. ``sinks`` are the tables of the requested groups, by group id."""
    rewind_id = plan.rewind_id
    if plan.state not in (RewindState.APPLIED, RewindState.UNDONE):
        return [f"Rewind {rewind_id} is {plan.state}: it was never applied, so there is nothing to undo."]
    if plan.state is RewindState.UNDONE:
        return [f"Rewind {rewind_id} has been undone already. To restore it, undo the undo."]
    reasons = []
    if {group.group_id for group in plan.groups} != set(sinks):
        reasons.append(f"Rewind {rewind_id} moved {', '.join(group.consumer for group in plan.groups)}: name exactly these consumers.")
    cur.execute(SQL["later_rewinds"], {"rewind_id": rewind_id})
    if later := [str(row[0]) for row in cur.fetchall()]:
        reasons.append(
            f"Rewind {rewind_id} is followed by rewinds of the same partitions that stand: {', '.join(later)}. Undo the newest first."
        )
    reasons += overwritten.problems(cur, rewind_id)
    for row in archives_of(cur, rewind_id):
        tables, archive = sinks.get(row["group_id"]), None if row["removed"] else open_archive(cur, row)
        if archive is None:
            reasons.append(f"The rows that rewind {rewind_id} took out of {row['sink']} are no longer kept ({row['rows']:,}).")
        elif tables is not None and row["sink"] not in tables:
            subject = "table is" if len(tables) == 1 else "tables are"
            reasons.append(f"Rewind {rewind_id} took rows out of {row['sink']}, but the consumer's {subject} now {', '.join(tables)}.")
        elif tables is not None:
            reasons += _misfits(cur, row["sink"], archive)
    return reasons


def _misfits(cur: Cursor, sink: str, archive: str) -> list[str]:
    """Returns why the rows of an archive no longer fit their table."""
    now = {column.name: column for column in read_columns(cur, sink)}
    archived = {column.name: column for column in read_columns(cur, archive)}
    misfits = [
        f"{sink} no longer has the column {name}, which {archive} has: its values would be lost."
        if name not in now
        else f"{sink}.{name} is now {now[name].type}; it was {column.type} when {archive} was made."
        for name, column in archived.items()
        if name not in now or now[name].type != column.type
    ]
    new = [column for name, column in now.items() if name not in archived and column.must_be_given]
    return misfits + [f"{sink} has a new column {column.name}, NOT NULL without a default, which {archive} lacks." for column in new]
