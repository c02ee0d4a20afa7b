"""Reads what is known of a consumer's objectives, and stores what was reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemark.db import rows, statements
from tidemark.objectives.judge import CountedPartition, News, Objective, ObjectiveFacts, PartitionSample, judge, news
from tidemark.offsets import flow
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.store import replays
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.objectives", "store.sql")


def changes(cur: Cursor, spec: ConsumerSpec) -> News:
    """What is still to be reported of a consumer's objectives; if it has none any more, that those it had are over. Nothing if it has never
    run. Changes nothing."""
    cur.execute(SQL["now"], {"group": spec.group})
    found = cur.fetchone()
    if found is None:
        return News({}, ())
    group_id, now = found
    verdicts = {}
    if spec.slo is not None:
        cur.execute(SQL["failed"], {"group_id": group_id})
        failed = cur.fetchall()[0][0]
        verdicts = judge(spec.slo, ObjectiveFacts(now, _parts(cur, spec, group_id), failed))
    cur.execute(SQL["reported"], {"group_id": group_id})
    return news(verdicts, [Objective(name) for (name,) in cur.fetchall()])


def report(cur: Cursor, spec: ConsumerSpec) -> News:
    """The same changes, stored: the caller commits, and must then report them. Of two sessions, only one gets a change."""
    due = changes(cur, spec)
    if not due:
        return due
    cur.execute(SQL["now"], {"group": spec.group})
    group_id = cur.fetchall()[0][0]
    missed = {}
    for one, text in due.missed.items():
        cur.execute(SQL["miss"], {"group_id": group_id, "objective": one.value, "missed": text})
        if cur.fetchone():
            missed[one] = text
    recovered = []
    for one in due.recovered:
        cur.execute(SQL["meet"], {"group_id": group_id, "objective": one.value})
        if cur.fetchone():
            recovered.append(one)
    return News(missed, tuple(recovered))


def _parts(cur: Cursor, spec: ConsumerSpec, group_id: int) -> tuple[CountedPartition, ...]:
    """The partitions that count. Those that a rewind made lag, and those that an operator has paused, do not."""
    settings = flow.read(cur, group_id)
    replayed = {one.partition for one in replays(cur, spec.group)}
    cur.execute(SQL["parts"], {"group_id": group_id})
    found = rows(cur)
    sampled_at = max((row["sampled_at"] for row in found if row["sampled_at"]), default=None)
    parts = []
    for row in found:
        partition = TopicPartition(row["topic"], row["partition"])
        gone = row["sampled_at"] != sampled_at  # a sample has all partitions of the group that are in Kafka
        if gone or not spec.names(partition) or partition in replayed or settings.is_paused(partition):
            continue
        look = (
            PartitionSample(row["sampled_at"], row["position"], row["log_end"], row["lag"], row["next_at"], row["open_since"])
            if sampled_at
            else None
        )
        parts.append(CountedPartition(row["next_offset"], row["committed_at"], look))
    return tuple(parts)
