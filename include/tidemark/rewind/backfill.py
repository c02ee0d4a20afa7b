"""Reading later what a rewind forward has skipped, into the same sink, exactly once.

A backfill has a *side group*: a group without members whose positions say how far each skipped range has been read, and fence who reads it.
A run of it (`tidemark.consume.run`) commits slices as any other does, with two differences, both in the transaction of the slice: the
position that is moved is the side group's, and the head of the ``lost_range`` row, which the rewind has left, becomes a batch of the
group's own ledger. So a skipped offset is lost or read, and never both.

A rewind of the group back into the range makes the group read a part of it again. From there on nothing is left for the backfill, whose
end comes down to there (`cut`); its undo gives that back. Both raise the side group's epochs, so that no run goes on with an older end.

Locks: the side groups' positions, behind those of the groups themselves. A commit of a backfill holds its own, and waits for no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements
from tidemark.errors import BadInput, Refused
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "backfill.sql")


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of a backfill: ``[start, end)`` is to be read, and has been up to ``position``.

    ``end`` is nearer than ``skipped_to``, where the rewind went, once a later rewind has gone back into the range.
    """

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    start: int
    position: int
    end: int
    skipped_to: int

    @property
    def left(self) -> int:
        """Offsets that are still to be read."""
        return max(0, self.end - self.position)


@dataclass(frozen=True, slots=True)
class Backfill:
    """What a rewind has skipped of a group. Ledger, rows and failed records are those of ``group``, positions those of ``side``."""

    rewind_id: int
    group: str
    group_id: int
    side: str
    side_id: int
    parts: tuple[Part, ...]

    @property
    def left(self) -> int:
        return sum(part.left for part in self.parts)

    @property
    def skipped(self) -> int:
        """Offsets that the rewind had skipped."""
        return sum(part.skipped_to - part.start for part in self.parts)


@dataclass(kw_only=True, eq=False)
class SkippedTopicRecreated(Refused):
    """What was skipped of a topic went with it."""

    topic: str
    rewind_id: int

    def __str__(self) -> str:
        return (
            f"Topic {self.topic} was deleted and created again since rewind {self.rewind_id} skipped a part of it: that cannot be read any "
            "more, and stays stored as lost. Nothing was read."
        )


def backfills(cur: Cursor, group: str | None = None, rewind_ids: Sequence[int] | None = None) -> list[Backfill]:
    """The backfills of a group, of some rewinds, or of both, by rewind; those of which nothing is left among them."""
    cur.execute(SQL["parts"], {"group": group, "rewind_ids": None if rewind_ids is None else list(rewind_ids)})
    found = []
    for _, of_one in groupby(rows(cur), key=lambda row: (row["rewind_id"], row["group_id"])):
        parts = list(of_one)
        whose = {name: parts[0][name] for name in ("rewind_id", "group", "group_id", "side", "side_id")}
        found.append(Backfill(**whose, parts=tuple(_part(row) for row in parts)))
    return found


def find(cur: Cursor, group: str, rewind_id: int) -> Backfill:
    """The backfill of a rewind. Raises `BadInput` if it has none of this group."""
    found = backfills(cur, group, [rewind_id])
    if not found:
        fix = "Name a rewind that skips records, was planned with --backfill and is applied: tidemark offsets shows what is left of them."
        raise BadInput(what="rewind", found=f"rewind {rewind_id} has left no backfill of group {group}", fix=fix)
    return found[0]


def unfinished(cur: Cursor, group: str) -> list[int]:
    """The rewinds of which something is left to be read, in the order in which they were planned."""
    return [one.rewind_id for one in backfills(cur, group) if one.left]


def of_attempt(cur: Cursor, attempt_id: int) -> Backfill | None:
    """What an attempt is to read; `None` if that is what is new in its group's topics."""
    cur.execute(SQL["of_attempt"], {"attempt_id": attempt_id})
    row = cur.fetchone()
    return None if row is None or row[0] is None else find(cur, row[1], row[0])


def ends(cur: Cursor, one: Backfill) -> dict[TopicPartition, int]:
    """Up to where its parts go now. What was claimed before this look is fenced by whoever draws an end nearer after it."""
    cur.execute(SQL["ends"], {"rewind_id": one.rewind_id, "group_id": one.group_id, "group": one.group})
    return {TopicPartition(topic, partition): end for topic, partition, end in cur.fetchall()}


def end_now(cur: Cursor, one: Backfill, topic_id: int, partition: TopicPartition) -> int:
    """As `ends`, of one part."""
    key = {"rewind_id": one.rewind_id, "group_id": one.group_id, "topic_id": topic_id, "partition": partition.partition}
    cur.execute(SQL["end_now"], key)
    (end,) = cur.fetchone() or (0,)
    return int(end)


# ---- in the transaction that applies a rewind


def to_lock(cur: Cursor, key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``group_id, topic_id, topic, partition`` of each side group's position that `follow` may need, in the order of the locks."""
    cur.execute(SQL["to_lock"], key)
    return rows(cur)


def follow(cur: Cursor, key: Mapping[str, Any], *, make: bool) -> None:
    """What a rewind (``rewind_id``, and ``undo_of``) means for backfills, once its ledger is as it will be; does not commit.

    Those of ranges that it goes back into end where it goes to; those whose ends the undone rewind had drawn nearer have them again; and
    with ``make`` what it skips itself gets one. Needs the locks of the positions of `to_lock`.
    """
    cur.execute(SQL["cut"], key)
    if key["undo_of"] is not None:
        cur.execute(SQL["give_back"], key)
        cur.execute(SQL["shorten_put_back"], key)
    if make:
        cur.execute(SQL["make"], key)


def _part(row: Mapping[str, Any]) -> Part:
    names = ("topic_id", "kafka_uuid", "start", "position", "end", "skipped_to")
    return Part(TopicPartition(row["topic"], row["partition"]), **{name: row[name] for name in names})
