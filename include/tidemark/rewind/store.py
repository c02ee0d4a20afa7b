"""Reads, lists and rejects stored rewinds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.errors import Refused
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.backfill import backfills
from tidemark.rewind.plan_model import GroupPlan, PartitionPlan, Plan, RewindState
from tidemark.rewind.scenarios.scenario import from_json
from tidemark.text.problems import only

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

SQL = statements("tidemark.rewind", "store.sql")
TOTALS = SQL["read_totals"].replace("{partitions}", SQL["read_partitions"].rstrip().removesuffix(";"))


class AlreadyDecided(Refused):
    """The rewind is in another state: already applied, undone, rejected or discarded, or its replay beside has not begun or ended."""

    rewind_id: int
    state: str
    by: str | None
    at: datetime | None

    @classmethod
    def of(cls, plan: Plan) -> AlreadyDecided:
        rejected = plan.state is RewindState.REJECTED
        by, at = (plan.decided_by, plan.decided_at) if rejected else (plan.applied_by, plan.applied_at)
        return cls(rewind_id=plan.rewind_id, state=plan.state.value, by=by, at=at)

    def __str__(self) -> str:
        if self.state == RewindState.PLANNED:
            return f"Rewind {self.rewind_id} has no replay beside: it is only planned. Nothing was changed. Apply it to begin one."
        if self.state == RewindState.BESIDE:
            return f"The replay of rewind {self.rewind_id} is neither swapped nor discarded. Nothing was changed. Do one of both first."
        if self.state == RewindState.DISCARDED:
            return f"The replay of rewind {self.rewind_id} was discarded. Nothing was changed. Make a new plan."
        decision = "rejected" if self.state == RewindState.REJECTED else "applied"
        undone = ", and has been undone since" if self.state == RewindState.UNDONE else ""
        return f"Rewind {self.rewind_id} was {decision} by {self.by} at {self.at}{undone}. Nothing was changed. Make a new plan."


def read(connection: Connection, rewind_id: int) -> Plan:
    """Reads a stored rewind in any state. Raises `BadInput` if it does not exist."""
    with transaction(connection) as cur:
        return read_plan(cur, rewind_id)


def of_run(connection: Connection, dag_id: str, run_id: str) -> Plan | None:
    """Returns the first rewind that an Airflow run planned, in any state; `None` if it has not planned one yet."""
    with transaction(connection) as cur:
        cur.execute(SQL["of_run"], {"dag_id": dag_id, "run_id": run_id})
        row = cur.fetchone()
        return read_plan(cur, row[0]) if row else None


def history(connection: Connection, *consumers: str | None, limit: int = 100) -> list[Plan]:
    """Returns the rewinds of any of these consumers, or (without a name) all rewinds, newest first."""
    with transaction(connection) as cur:
        return _read(cur, None, [name for name in consumers if name is not None] or None, limit)


def summaries(connection: Connection, *consumers: str, limit: int, state: str | None = None) -> list[tuple[Plan, dict[str, int]]]:
    """Returns the newest rewinds of any of these consumers without partitions: for each, their number, and the sums of `Plan.groups`.

    ``state``: only those in this `RewindState`, or ``EXPIRED`` for plans that can no longer be applied.
    """
    with transaction(connection) as cur:
        rewinds = _rewinds(cur, None, consumers, limit, state)
        cur.execute(TOTALS, {"rewind_ids": [row["rewind_id"] for row in rewinds]})
        totals = {row.pop("rewind_id"): row for row in rows(cur)}
        return [(plan, totals[plan.rewind_id]) for plan in _plans(cur, rewinds, {})]


def reject(connection: Connection, rewind_id: int, *, by: str) -> Plan:
    """Rejects a plan and stores who did; rejecting it again changes nothing.

    Raises `AlreadyDecided` if it was applied, and `BadInput` if it does not exist.
    """
    with transaction(connection) as cur:
        cur.execute(SQL["reject"], {"rewind_id": rewind_id, "by": by})
        plan = read_plan(cur, rewind_id)
    if plan.state is not RewindState.REJECTED:
        raise AlreadyDecided.of(plan)
    return plan


def approve(connection: Connection, rewind_id: int, *, by: str) -> None:
    """Stores who approved the swap of a replay beside. Who approved it first stays. Raises `AlreadyDecided` without a replay beside."""
    with transaction(connection) as cur:
        cur.execute(SQL["approve"], {"rewind_id": rewind_id, "by": by})
        if cur.fetchone() is None:
            raise AlreadyDecided.of(read_plan(cur, rewind_id))


def read_plan(cur: Cursor, rewind_id: int) -> Plan:
    """Like `read`, in the caller's transaction."""
    return only(_read(cur, rewind_id, None, 1), "rewind", rewind_id, "tidemark rewind list")


def _read(cur: Cursor, rewind_id: int | None, consumers: Sequence[str] | None, limit: int) -> list[Plan]:
    rewinds = _rewinds(cur, rewind_id, consumers, limit)
    filled = [row["rewind_id"] for row in rewinds if row["backfill"]]
    backfill_left = {
        (backfill.rewind_id, backfill.group_id, part.topic_id, part.partition): part.left
        for backfill in (backfills(cur, rewind_ids=filled) if filled else ())
        for part in backfill.parts
    }
    cur.execute(SQL["read_partitions"], {"rewind_ids": [row["rewind_id"] for row in rewinds]})
    partitions: dict[tuple[int, int], list[PartitionPlan]] = defaultdict(list)
    for row in rows(cur):
        key = (row.pop("rewind_id"), row.pop("group_id"))
        row["partition"] = TopicPartition(row.pop("topic"), row["partition"])
        left = backfill_left.get((*key, row["topic_id"], row["partition"]))
        partitions[key].append(PartitionPlan(**row, backfill_left=left))
    return _plans(cur, rewinds, partitions)


def _rewinds(
    cur: Cursor, rewind_id: int | None, consumers: Sequence[str] | None, limit: int, state: str | None = None
) -> list[dict[str, Any]]:
    names = None if consumers is None else list(consumers)
    cur.execute(SQL["read_rewinds"], {"rewind_id": rewind_id, "consumers": names, "limit": limit, "state": state})
    return rows(cur)


def _plans(cur: Cursor, rewinds: list[dict[str, Any]], partitions: Mapping[tuple[int, int], list[PartitionPlan]]) -> list[Plan]:
    cur.execute(SQL["read_groups"], {"rewind_ids": [row["rewind_id"] for row in rewinds]})
    groups: dict[int, list[GroupPlan]] = defaultdict(list)
    for row in rows(cur):
        rewind = row.pop("rewind_id")
        row |= {"tables": tuple(row["tables"]), "announced_assets": tuple(row["announced_assets"])}
        groups[rewind].append(GroupPlan(**row, partitions=tuple(partitions.get((rewind, row["group_id"]), ()))))
    return [
        Plan(**{
            **row,
            "state": RewindState(row["state"]),
            "scenario": from_json(row["scenario"]),
            "groups": tuple(groups[row["rewind_id"]]),
        })
        for row in rewinds
    ]  # fmt: skip
