"""Side groups: groups without members, whose positions record how far a backfill or a replay beside has read, and fence its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "side.sql")


@dataclass(frozen=True, slots=True)
class SidePart:
    """A partition that a side group reads. It began at ``start``, has reached ``position``, and reads to ``end``."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    start: int
    position: int
    end: int

    @property
    def left(self) -> int:
        """Offsets still to be read."""
        return max(0, self.end - self.position)


@dataclass(frozen=True, slots=True)
class SideGroup:
    """A group of a rewind and its side group."""

    rewind_id: int
    group: str
    group_id: int
    side: str
    side_id: int
    parts: tuple[SidePart, ...]

    @property
    def left(self) -> int:
        return sum(part.left for part in self.parts)


def of_attempt(cur: Cursor, attempt_id: int) -> tuple[str, int, bool] | None:
    """Returns the group and the rewind for whose side group an attempt reads, and whether that is a replay beside. `None` for an ordinary
    run."""
    cur.execute(SQL["of_attempt"], {"attempt_id": attempt_id})
    return cur.fetchone()


def by_group(cur: Cursor) -> list[list[dict[str, Any]]]:
    """Returns the rows of a statement ``parts``, a list for each group of a rewind."""
    return [list(group_rows) for _, group_rows in groupby(rows(cur), key=lambda row: (row["rewind_id"], row["group_id"]))]


def group_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `SideGroup` without its parts."""
    return {name: row[name] for name in ("rewind_id", "group", "group_id", "side", "side_id")}


def part_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `SidePart`."""
    numbers = {name: row[name] for name in ("topic_id", "kafka_uuid", "start", "position", "end")}
    return {"partition": TopicPartition(row["topic"], row["partition"]), **numbers}


def places(cur: Cursor) -> list[tuple[int, int, TopicPartition]]:
    """Returns the rows of a statement ``to_lock``: group id, topic id and partition of each position."""
    return [(row["group_id"], row["topic_id"], TopicPartition(row["topic"], row["partition"])) for row in rows(cur)]
