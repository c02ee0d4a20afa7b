"""Flow control by operators: pauses, topic priorities, how far one topic may run ahead of the others.

The settings are rows of ``tidemark.flow``, so that they survive rebalances and restarts. Every member reads them before each batch.
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
class FlowTarget:
    """A whole group, a topic or a partition."""

    topic: str | None = None
    partition: int | None = None

    def covers(self, partition: TopicPartition) -> bool:
        return self.topic in (None, partition.topic) and self.partition in (None, partition.partition)

    def __str__(self) -> str:
        return "everything" if self.topic is None else self.topic if self.partition is None else f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Flow:
    """A group's settings. ``priorities`` are by topic (default: 0)."""

    paused: frozenset[FlowTarget] = frozenset()
    priorities: Mapping[str, int] = field(default_factory=dict)
    max_ahead: timedelta | None = None

    def is_paused(self, partition: TopicPartition) -> bool:
        return any(target.covers(partition) for target in self.paused)

    def open(self, claims: Iterable[Claim], ends: Mapping[TopicPartition, int]) -> list[Claim]:
        """Returns the claims to read now: the ones with the highest priority among unpaused claims with records."""
        readable = [claim for claim in claims if ends[claim.partition] > claim.position and not self.is_paused(claim.partition)]
        highest = max((self._priority(claim) for claim in readable), default=0)
        return [claim for claim in readable if self._priority(claim) == highest]

    def bounded(
        self,
        claims: Collection[Claim],
        ends: Mapping[TopicPartition, int],
        times_at: Callable[[Mapping[TopicPartition, int]], Mapping[TopicPartition, int]],
        offsets_for: Callable[[Collection[TopicPartition], int], Mapping[TopicPartition, int]],
    ) -> dict[TopicPartition, int]:
        """Returns the ends of ``claims``, limited to `max_ahead` in event time ahead of the other topics' next records.

        ``times_at`` returns the timestamp (ms) of each partition's next record, ``offsets_for`` the first offset with a given or a later
        timestamp. The partition that is furthest behind always has records to read: if a record before its position has a timestamp
        beyond the bound, ``offsets_for`` gives no usable limit, and its end stays unchanged.
        """
        claim_ends = {claim.partition: ends[claim.partition] for claim in claims}
        if self.max_ahead is None or len({partition.topic for partition in claim_ends}) < 2:
            return claim_ends
        times = times_at({claim.partition: claim.position for claim in claims})
        if not times:
            return claim_ends
        furthest = min(times, key=lambda partition: (times[partition], partition))
        ahead_ms = int(self.max_ahead.total_seconds() * 1000)
        same_topic = [partition for partition in claim_ends if partition.topic == furthest.topic]
        limits = dict(offsets_for([partition for partition in claim_ends if partition.topic != furthest.topic], times[furthest] + ahead_ms))
        if others := [time for partition, time in times.items() if partition.topic != furthest.topic]:
            bound = min(others) + ahead_ms
            position_of = {claim.partition: claim.position for claim in claims}
            within = {furthest, *(part for part in same_topic if times.get(part, bound) < bound)}  # by their next records
            offsets = offsets_for(same_topic, bound)
            limits |= {part: limit for part, limit in offsets.items() if limit > position_of[part] or part not in within}
        return {partition: min(end, limits.get(partition, end)) for partition, end in claim_ends.items()}

    def _priority(self, claim: Claim) -> int:
        return self.priorities.get(claim.partition.topic, 0)


def read(cur: Cursor, group_id: int) -> Flow:
    """Reads a group's current settings. Locks nothing."""
    cur.execute(SQL["read"], {"group_id": group_id})
    paused, priorities, max_ahead = set(), {}, None
    for topic, partition, is_paused, priority, ahead in cur.fetchall():
        if is_paused:
            paused.add(FlowTarget(topic, partition))
        if priority:
            priorities[topic] = priority
        max_ahead = ahead or max_ahead
    return Flow(frozenset(paused), priorities, max_ahead)


def pause(cur: Cursor, group_id: int, targets: Iterable[FlowTarget], reason: str) -> None:
    for target in targets:
        cur.execute(SQL["pause"], {**_key(group_id, target), "reason": reason})


def resume(cur: Cursor, group_id: int, targets: Iterable[FlowTarget]) -> list[FlowTarget]:
    """Ends the pauses of these targets and of everything below them; returns the ended pauses."""
    ended = []
    for target in targets:
        cur.execute(SQL["resume"], _key(group_id, target))
        ended += [FlowTarget(*row) for row in cur.fetchall()]
    return ended


def prioritize(cur: Cursor, group_id: int, topic: str, priority: int) -> None:
    cur.execute(SQL["prioritize"], {**_key(group_id, FlowTarget(topic)), "priority": priority})


def limit_ahead(cur: Cursor, group_id: int, max_ahead: timedelta | None) -> None:
    cur.execute(SQL["limit_ahead"], {**_key(group_id, FlowTarget()), "max_ahead": max_ahead})


def _key(group_id: int, target: FlowTarget) -> dict[str, int | str | None]:
    return {"group_id": group_id, "topic": target.topic, "partition": target.partition}
