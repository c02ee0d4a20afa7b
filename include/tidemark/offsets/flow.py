"""What an operator has said about a group's reading: pauses, priorities of topics, how far one topic may run ahead of another.

Rows of ``tidemark.flow``, so that they outlive rebalances and restarts; every member looks before each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.records.ranges import Claim, TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.offsets", "flow.sql")


@dataclass(frozen=True, slots=True)
class Target:
    """All of a group, a topic or a partition."""

    topic: str | None = None
    partition: int | None = None

    def covers(self, partition: TopicPartition) -> bool:
        return self.topic in (None, partition.topic) and self.partition in (None, partition.partition)

    def __str__(self) -> str:
        return "everything" if self.topic is None else self.topic if self.partition is None else f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Flow:
    """``priorities`` by topic, 0 where nothing is said."""

    paused: frozenset[Target] = frozenset()
    priorities: Mapping[str, int] = field(default_factory=dict)
    max_ahead: timedelta | None = None

    def is_paused(self, partition: TopicPartition) -> bool:
        return any(target.covers(partition) for target in self.paused)

    def open(self, claims: Iterable[Claim], ends: Mapping[TopicPartition, int]) -> list[Claim]:
        """Those that have something to read now: not paused, and of the topics with the highest priority that have any."""
        todo = [claim for claim in claims if ends[claim.partition] > claim.position and not self.is_paused(claim.partition)]
        best = max((self._priority(claim) for claim in todo), default=0)
        return [claim for claim in todo if self._priority(claim) == best]

    def bounded(
        self,
        claims: Collection[Claim],
        ends: Mapping[TopicPartition, int],
        times_at: Callable[[Mapping[TopicPartition, int]], Mapping[TopicPartition, int]],
        offsets_for: Callable[[Collection[TopicPartition], int], Mapping[TopicPartition, int]],
    ) -> dict[TopicPartition, int]:
        """The ends of ``claims``, none further ahead in event time than `max_ahead` beyond the next records of the other topics.

        ``times_at`` tells the timestamp (ms) of the next record of each partition, ``offsets_for`` the first offset whose timestamp is
        that or later. The partition that is furthest behind always has something to read. Where a record before its position has a later
        timestamp than the bound, ``offsets_for`` tells nothing of it, and its end stays as it is.
        """
        found = {claim.partition: ends[claim.partition] for claim in claims}
        if self.max_ahead is None or len({partition.topic for partition in found}) < 2:
            return found
        times = times_at({claim.partition: claim.position for claim in claims})
        if not times:
            return found
        last = min(times, key=lambda partition: (times[partition], partition))
        ahead_ms = int(self.max_ahead.total_seconds() * 1000)
        behind = [partition for partition in found if partition.topic == last.topic]
        limits = dict(offsets_for([partition for partition in found if partition.topic != last.topic], times[last] + ahead_ms))
        if others := [time for partition, time in times.items() if partition.topic != last.topic]:
            bound = min(others) + ahead_ms
            at = {claim.partition: claim.position for claim in claims}
            within = {last, *(one for one in behind if times.get(one, bound) < bound)}  # their next records are, whatever came before
            limits |= {one: limit for one, limit in offsets_for(behind, bound).items() if limit > at[one] or one not in within}
        return {partition: min(end, limits.get(partition, end)) for partition, end in found.items()}

    def _priority(self, claim: Claim) -> int:
        return self.priorities.get(claim.partition.topic, 0)


def read(cur: Cursor, group_id: int) -> Flow:
    """What holds for a group now. Locks nothing."""
    cur.execute(SQL["read"], {"group_id": group_id})
    paused, priorities, max_ahead = set(), {}, None
    for topic, partition, is_paused, priority, ahead in cur.fetchall():
        if is_paused:
            paused.add(Target(topic, partition))
        if priority:
            priorities[topic] = priority
        max_ahead = ahead or max_ahead
    return Flow(frozenset(paused), priorities, max_ahead)


def pause(cur: Cursor, group_id: int, targets: Iterable[Target], reason: str) -> None:
    for target in targets:
        cur.execute(SQL["pause"], {**_key(group_id, target), "reason": reason})


def resume(cur: Cursor, group_id: int, targets: Iterable[Target]) -> list[Target]:
    """Ends the pauses of these, and of what is below them; returns those that were ended."""
    ended = []
    for target in targets:
        cur.execute(SQL["resume"], _key(group_id, target))
        ended += [Target(*row) for row in cur.fetchall()]
    return ended


def prioritize(cur: Cursor, group_id: int, topic: str, priority: int) -> None:
    cur.execute(SQL["prioritize"], {**_key(group_id, Target(topic)), "priority": priority})


def limit_ahead(cur: Cursor, group_id: int, max_ahead: timedelta | None) -> None:
    cur.execute(SQL["limit_ahead"], {**_key(group_id, Target()), "max_ahead": max_ahead})


def _key(group_id: int, target: Target) -> dict[str, int | str | None]:
    return {"group_id": group_id, "topic": target.topic, "partition": target.partition}
