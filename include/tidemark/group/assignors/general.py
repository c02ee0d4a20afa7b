"""Sticky division among members with different subscriptions: as even as these allow, with as few moves as possible."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

from tidemark.group.assignors.numbered import NumberedGroup
from tidemark.group.assignors.previous_owners import NOBODY, Claims
from tidemark.group.assignors.racks import Racks, split

_FREE_PASSES = 100
"""After this many passes, only moves that improve the balance are made: the swaps that keep moves one-way could loop endlessly."""


def divide(group: NumberedGroup, claims: Claims, racks: Racks) -> list[list[int]]:
    """The partitions of each member.

    ① Members keep the partitions that they own and still subscribe to. ② Free partitions go to the subscriber that has the fewest: topics
    with few subscribers first, and partitions with a near subscriber before the rest. ③ Partitions move from a member to a subscriber that
    has at least two fewer: first those that were free, then all, until no move is left. ④ If ③ did not improve the balance, it is undone.
    """
    if not group.members:
        return []
    return _Balance(group, claims, racks).run()


class _Balance:
    def __init__(self, group: NumberedGroup, claims: Claims, racks: Racks) -> None:
        self._group = group
        self._racks = racks
        self._previous = claims.previous
        self._topic_of: list[int] = group.topic_of.tolist()
        self._owner = list(claims.owner)
        self._freed_any = self._free_unsuitable()
        self._sizes = [0] * len(group.members)
        for member in self._owner:
            if member != NOBODY:
                self._sizes[member] += 1
        self._pools = _Pools(group, racks, self._sizes)
        self._moves = _Moves()

    def run(self) -> list[list[int]]:
        group = self._group
        fresh = not any(self._sizes)
        order = sorted(range(len(group.topics)), key=lambda topic: (len(group.audiences[group.audience_of[topic]]), topic))
        every = [part for topic in order for part in range(group.starts[topic], group.starts[topic + 1])]
        free = [part for part in every if self._owner[part] == NOBODY]
        self._give_free(free)

        shared = [len(group.audiences[audience]) > 1 for audience in group.audience_of]
        free = [part for part in free if shared[self._topic_of[part]]]
        every = [part for part in every if shared[self._topic_of[part]]]
        before, sizes = list(self._owner), list(self._sizes)
        if not self._freed_any:
            self._even_out(free)
        moved = self._even_out(every)
        if moved and not fresh:
            participants = self._participants(shared, sizes, before)
            if _unevenness([self._sizes[m] for m in participants]) >= _unevenness([sizes[m] for m in participants]):
                self._owner = before
        parts: list[list[int]] = [[] for _ in group.members]
        for part, member in enumerate(self._owner):
            parts[member].append(part)
        return parts

    def _free_unsuitable(self) -> bool:
        """Frees partitions whose owner no longer subscribes to them or is far from them. Returns whether there were any."""
        lost = False
        for part, member in enumerate(self._owner):
            if member != NOBODY and (
                not self._group.subscribes(member, self._topic_of[part]) or (self._racks.matter and self._racks.far(member, part))
            ):
                self._owner[part] = NOBODY
                lost = True
        return lost

    def _give_free(self, free: list[int]) -> None:
        far = free
        if self._racks.matter:
            far = []
            for part in free:
                near = self._pools.least_near(self._topic_of[part], part)
                if near is None:
                    far.append(part)
                else:
                    self._give(part, near)
        for part in far:
            self._give(part, self._pools.least(self._topic_of[part]))

    def _give(self, part: int, member: int) -> None:
        self._owner[part] = member
        self._sizes[member] += 1
        self._pools.changed(member)

    def _even_out(self, parts: list[int]) -> bool:
        """Moves partitions from larger to smaller members while that improves the balance. Returns whether any moved."""
        moved_any = False
        for passes in range(1_000_000):
            moved = False
            if not self._uneven(parts):
                break
            for part in parts:
                target = self._better_owner(part)
                if target is not None:
                    moved |= self._move(part, target, guarded=passes >= _FREE_PASSES)
            moved_any |= moved
            if not moved:
                break
        return moved_any

    def _uneven(self, parts: list[int]) -> bool:
        """Whether any partition can move at all: a quick check before a pass over all of them."""
        if not parts:
            return False
        least = [self._sizes[self._pools.least_of(audience)] for audience in range(len(self._group.audiences))]
        by_topic = np.array([least[audience] for audience in self._group.audience_of])
        sizes = np.array(self._sizes)[np.array(self._owner)[parts]]
        return bool(np.any(sizes > by_topic[self._group.topic_of[parts]] + 1))

    def _better_owner(self, part: int) -> int | None:
        """A subscriber that should have the partition instead: its previous owner, or the smallest subscriber, whatever its rack."""
        owner, topic = self._owner[part], self._topic_of[part]
        most = self._sizes[owner] - 1
        before = self._previous.get(part)
        if before is not None and self._sizes[before] < most and self._group.subscribes(before, topic):
            return before
        least = self._pools.least(topic)
        return least if self._sizes[least] < most else None

    def _move(self, part: int, target: int, *, guarded: bool) -> bool:
        topic = self._topic_of[part]
        part = self._moves.instead_of(topic, part, self._owner[part], target)
        source = self._owner[part]
        if guarded and self._sizes[source] <= self._sizes[target] + 1:
            return False
        self._moves.record(topic, part, source, target)
        self._owner[part] = target
        self._sizes[source] -= 1
        self._sizes[target] += 1
        self._pools.changed(source)
        self._pools.changed(target)
        return True

    def _participants(self, shared: list[bool], sizes: list[int], owner: list[int]) -> list[int]:
        """Members that could have gained or lost partitions: they lack subscribed partitions, or own ones that others subscribe to."""
        group = self._group
        most = [sum(group.counts[topic] for topic in topics) for topics in group.kind_topics]
        owners_of_shared = {member for part, member in enumerate(owner) if shared[self._topic_of[part]]}
        return [m for m in range(len(group.members)) if sizes[m] < most[group.kind_of[m]] or m in owners_of_shared]


def _unevenness(sizes: list[int]) -> int:
    """The sum of the differences between all pairs."""
    ascending = sorted(sizes)
    return sum(at * size - below for at, (size, below) in enumerate(zip(ascending, accumulate(ascending, initial=0), strict=False)))


class _Pools:
    """The smallest member (by size, then by order) of every audience, and of every rack in it.

    Uses heaps of ``size * width + member``. An entry with an outdated size is dropped when it reaches the top.
    """

    def __init__(self, group: NumberedGroup, racks: Racks, sizes: list[int]) -> None:
        self._group = group
        self._racks = racks
        self._sizes = sizes
        self._width = max(1, len(sizes))
        self._heaps: dict[tuple[int, int | None], list[int]] = {}  # size * width + member, by audience and rack (None: all racks)
        self._of_member: list[list[list[int]]] = [[] for _ in sizes]
        for audience, members in enumerate(group.audiences):
            for member in members:
                for rack in (None, racks.member[member]) if racks.matter else (None,):
                    heap = self._heaps.setdefault((audience, rack), [])
                    heap.append(sizes[member] * self._width + member)
                    self._of_member[member].append(heap)
        for heap in self._heaps.values():
            heap.sort()

    def changed(self, member: int) -> None:
        """Records that the member's size has changed."""
        key = self._sizes[member] * self._width + member
        for heap in self._of_member[member]:
            heappush(heap, key)

    def least(self, topic: int) -> int:
        return self.least_of(self._group.audience_of[topic])

    def least_of(self, audience: int) -> int:
        key = self._top(self._heaps[audience, None])
        return key % self._width

    def least_near(self, topic: int, part: int) -> int | None:
        """The smallest subscriber that is not known to be far from the partition."""
        audience = self._group.audience_of[topic]
        heaps = [self._heaps.get((audience, rack)) for rack in (0, *split(self._racks.partition[part]))]
        keys = [self._top(heap) for heap in heaps if heap]
        return min(keys) % self._width if keys else None

    def _top(self, heap: list[int]) -> int:
        while True:
            size, member = divmod(heap[0], self._width)
            if self._sizes[member] == size:
                return heap[0]
            heappop(heap)


class _Moves:
    """The moves made so far. They keep two members from swapping partitions of a topic: an earlier one goes back instead."""

    def __init__(self) -> None:
        self._pair: dict[int, tuple[int, int]] = {}  # partition -> from, to
        self._moved: dict[tuple[int, int, int], dict[int, None]] = {}  # topic, from, to -> partitions

    def instead_of(self, topic: int, part: int, source: int, target: int) -> int:
        """The partition to move from ``source`` to ``target``: ``part``, or one that came the opposite way."""
        if part in self._pair:
            source = self._pair[part][0]
        reverse = self._moved.get((topic, target, source))
        return max(reverse) if reverse else part

    def record(self, topic: int, part: int, source: int, target: int) -> None:
        if part in self._pair:
            origin, last = self._pair.pop(part)
            del self._moved[topic, origin, last][part]
            source = origin
        if source != target:
            self._pair[part] = source, target
            self._moved.setdefault((topic, source, target), {})[part] = None
