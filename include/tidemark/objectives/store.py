"""Reads the facts for a consumer's objectives, and stores reported changes."""

from __future__ import annotations

from tidemark.db import Cursor, rows, statements
from tidemark.objectives.judge import CountedPartition, Objective, ObjectiveChanges, ObjectiveFacts, PartitionSample, judge, unreported
from tidemark.offsets import flow
from tidemark.offsets.samples import replays
from tidemark.records.ranges import TopicPartition
from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.objectives", "store.sql")


def changes(cur: Cursor, spec: ConsumerSpec) -> ObjectiveChanges:
    """Returns the unreported changes of a consumer's objectives; objectives that were removed have recovered. Empty if it has never run.
    Only reads."""
    cur.execute(SQL["now"], {"group": spec.group})
    row = cur.fetchone()
    if row is None:
        return ObjectiveChanges({}, ())
    group_id, now = row
    verdicts = {}
    if spec.slo is not None:
        cur.execute(SQL["failed"], {"group_id": group_id})
        failed = cur.fetchall()[0][0]
        verdicts = judge(spec.slo, ObjectiveFacts(now, _parts(cur, spec, group_id), failed))
    cur.execute(SQL["reported"], {"group_id": group_id})
    return unreported(verdicts, [Objective(name) for (name,) in cur.fetchall()])


def report(cur: Cursor, spec: ConsumerSpec) -> ObjectiveChanges:
    """Stores and returns `changes`: the caller commits, and must then report them. Of two sessions, only one gets a change."""
    due = changes(cur, spec)

    def is_stored(statement: str, objective: Objective, **values: str) -> bool:
        cur.execute(SQL[statement], {"group": spec.group, "objective": objective.value, **values})
        return cur.fetchone() is not None

    missed = {objective: text for objective, text in due.missed.items() if is_stored("miss", objective, missed=text)}
    return ObjectiveChanges(missed, tuple(objective for objective in due.recovered if is_stored("meet", objective)))


def _parts(cur: Cursor, spec: ConsumerSpec, group_id: int) -> tuple[CountedPartition, ...]:
    """Returns the partitions that count: neither being replayed after a rewind nor paused by an operator."""
    settings = flow.read(cur, group_id)
    replayed = {replay.partition for replay in replays(cur, spec.group)}
    cur.execute(SQL["parts"], {"group_id": group_id})
    positions = rows(cur)
    sampled_at = max((row["sampled_at"] for row in positions if row["sampled_at"]), default=None)
    parts = []
    for row in positions:
        partition = TopicPartition(row["topic"], row["partition"])
        gone = row["sampled_at"] != sampled_at  # a sample has all partitions of the group that are in Kafka
        if gone or not spec.names(partition) or partition in replayed or settings.is_paused(partition):
            continue
        sample = (
            PartitionSample(row["sampled_at"], row["position"], row["log_end"], row["lag"], row["next_at"], row["open_since"])
            if sampled_at
            else None
        )
        parts.append(CountedPartition(row["next_offset"], row["committed_at"], sample))
    return tuple(parts)
