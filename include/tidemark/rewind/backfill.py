"""Backfills read records that a forward rewind skipped, into the same sink, exactly once.

A backfill has a *side group*: a group without members whose positions record how far each skipped range has been read, and fence its
runs. A backfill run (`tidemark.consume.run`) commits slices like any other run, with two differences, both in the slice's transaction: it
moves the side group's position, and it turns the head of the rewind's ``lost_range`` row into a batch of the group's own ledger. So a
skipped offset is lost or read, never both.

If the group is later rewound back into the range, it reads the rest of the range itself. The backfill then ends at the new position
(the statement `cut`); undoing that rewind restores its end. Both raise the side group's epochs, so that no run continues with an old end.

Locks: the side groups' positions, after those of the groups themselves. A commit of a backfill locks only its own position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemark.db import scalar, statements
from tidemark.errors import BadInput, Refused
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.side import SideGroup, SidePart, by_group, group_fields, part_fields, places

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "backfill.sql")


@dataclass(frozen=True, slots=True)
class BackfillPart(SidePart):
    """A partition of a backfill.

    ``skipped_to`` is the forward rewind's target. ``end`` is less once a later rewind has gone back into the range.
    """

    skipped_to: int


@dataclass(frozen=True, slots=True)
class Backfill(SideGroup):
    """The backfill of one group of a rewind. Batches, rows and failed records belong to ``group``, positions to ``side``."""

    parts: tuple[BackfillPart, ...]

    @property
    def skipped(self) -> int:
        """Offsets that the rewind skipped."""
        return sum(part.skipped_to - part.start for part in self.parts)


class SkippedTopicRecreated(Refused):
    """The topic of a skipped range was deleted, and the range with it."""

    topic: str
    rewind_id: int

    def __str__(self) -> str:
        return (
            f"Topic {self.topic} was deleted and created again after rewind {self.rewind_id} skipped a part of it. That part can no longer "
            "be read and stays stored as lost. Nothing was read."
        )


def backfills(cur: Cursor, group: str | None = None, rewind_ids: Sequence[int] | None = None) -> list[Backfill]:
    """Returns the backfills of a group, of some rewinds, or of both, ordered by rewind. Includes finished ones."""
    cur.execute(SQL["parts"], {"group": group, "rewind_ids": None if rewind_ids is None else list(rewind_ids)})
    return [Backfill(**group_fields(parts[0]), parts=tuple(map(_part, parts))) for parts in by_group(cur)]


def find(cur: Cursor, group: str, rewind_id: int) -> Backfill:
    """Returns the backfill of a rewind. Raises `BadInput` if the rewind left none for this group."""
    matches = backfills(cur, group, [rewind_id])
    if not matches:
        fix = "Name an applied rewind that was planned with --backfill and skips records. tidemark offsets shows the backfills."
        raise BadInput(what="rewind", found=f"rewind {rewind_id} left no backfill for group {group}", fix=fix)
    return matches[0]


def unfinished(cur: Cursor, group: str) -> list[int]:
    """Returns the rewinds with unfinished backfills, in the order of their plans."""
    return [backfill.rewind_id for backfill in backfills(cur, group) if backfill.left]


def ends(cur: Cursor, backfill: Backfill) -> dict[TopicPartition, int]:
    """Returns the current ends of the backfill's parts; empty if its group was deleted. A rewind that lowers an end after this look-up
    fences earlier claims."""
    return {part.partition: part.end for each in backfills(cur, backfill.group, [backfill.rewind_id]) for part in each.parts}


def end_now(cur: Cursor, backfill: Backfill, topic_id: int, partition: TopicPartition) -> int:
    """Like `ends`, for one part."""
    key = {"rewind_id": backfill.rewind_id, "group_id": backfill.group_id, "topic_id": topic_id, "partition": partition.partition}
    cur.execute(SQL["end_now"], key)
    return int(scalar(cur))


# ---- In the transaction that applies a rewind


def to_lock(cur: Cursor, key: Mapping[str, Any]) -> list[tuple[int, int, TopicPartition]]:
    """Returns group id, topic id and partition of each side group position that `follow` may change, in lock order."""
    cur.execute(SQL["to_lock"], key)
    return places(cur)


def follow(cur: Cursor, key: Mapping[str, Any], *, make: bool) -> None:
    """Updates the backfills that a rewind (``rewind_id``, ``undo_of``) affects, once its ledger is final; does not commit.

    A backfill whose range the rewind goes back into now ends at the rewind's target. An undo restores the ends that the undone rewind
    lowered. With ``make``, creates a backfill of the ranges that this rewind skips. Needs the locks of the positions of `to_lock`.
    """
    cur.execute(SQL["cut"], key)
    if key["undo_of"] is not None:
        cur.execute(SQL["give_back"], key)
        cur.execute(SQL["shorten_put_back"], key)
    if make:
        cur.execute(SQL["make"], key)


def _part(row: Mapping[str, Any]) -> BackfillPart:
    return BackfillPart(**part_fields(row), skipped_to=row["skipped_to"])
