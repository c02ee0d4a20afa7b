"""Sticky division among members that all subscribe to the same topics: each gets the even share, or one more."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tidemark.group.assignors.numbered import NumberedGroup
from tidemark.group.assignors.previous_owners import Claims
from tidemark.group.assignors.racks import Racks, split


@dataclass(frozen=True, slots=True)
class Division:
    """The partitions of each member, and those that their owners must give up first: partition -> new member."""

    parts: list[list[int]]
    moving: dict[int, int]


def divide(group: NumberedGroup, claims: Claims, racks: Racks) -> Division:
    """Members keep their partitions up to their share; the rest is assigned round robin, near racks first.

    ① Each member keeps its partitions up to its share, lowest partition numbers first, so that shares stay even topic by topic.
    ② Partitions with a replica on the rack of a member with room go to that member. ③ The rest goes round robin to the members below the
    even share, then one each to those that may have one more.
    """
    if not group.members:
        return Division([], {})
    shares = _Shares(group, claims)
    shares.keep(racks)
    rest = np.flatnonzero(~shares.assigned).tolist()
    if racks.matter:
        rest = shares.deal_near(racks.fewest_near_first(group, rest), racks)
    shares.deal(rest)
    return Division(shares.parts, shares.moving)


class _Shares:
    def __init__(self, group: NumberedGroup, claims: Claims) -> None:
        self._group = group
        self._claims = claims
        self.parts: list[list[int]] = [[] for _ in group.members]
        self.assigned = np.zeros(group.total, dtype=bool)
        self.moving: dict[int, int] = {}
        self._taken_away = set(claims.contested)
        self._share, self._larger = divmod(group.total, len(group.members))
        """The even share, and how many members may still have one more."""
        self._most = self._share + (self._larger > 0)
        self._below: list[int] = []  # members below the even share
        self._even: deque[int] = deque()  # members that have it and may have one more

    def keep(self, racks: Racks) -> None:
        group = self._group
        owner = np.array(self._claims.owner, dtype=np.int64)
        held = np.flatnonzero(owner >= 0)
        if racks.matter:
            near = np.array([not racks.far(self._claims.owner[part], part) for part in held.tolist()], dtype=bool)
            self._taken_away.update(held[~near].tolist())
            held = held[near]
        topic = group.topic_of[held]
        number = held - np.array(group.starts)[topic]
        held = held[np.lexsort((topic, number, owner[held]))]
        ends = np.searchsorted(owner[held], np.arange(len(group.members) + 1)).tolist()
        in_order = held.tolist()
        for member, (start, end) in enumerate(pairwise(ends)):
            self._keep_one(member, in_order[start:end])
        if not self._larger:
            self._even.clear()

    def _keep_one(self, member: int, owned: list[int]) -> None:
        if len(owned) < self._share:
            self._below.append(member)
            retained = owned
        elif len(owned) >= self._most and self._larger:
            self._larger -= 1
            retained = owned[: self._most]
        else:
            retained = owned[: self._share]
            self._even.append(member)
        self.parts[member] = retained
        self.assigned[retained] = True
        self._taken_away.update(owned[len(retained) :])

    def deal_near(self, parts: list[int], racks: Racks) -> list[int]:
        """Assigns the partitions with a replica on the rack of a member with room; returns the rest."""
        below, even = _Ring(self._below, racks), _Queue(self._even, racks)
        rest = []
        for part in parts:
            bits = split(racks.partition[part])
            member = below.next(bits)
            if member is not None:
                if len(self.parts[member]) + 1 >= self._share:
                    below.remove(member)
                    if self._larger:
                        even.append(member)
            elif self._larger and (member := even.pop(bits)) is not None:
                self._larger -= 1
            if member is None:
                rest.append(part)
            else:
                self._give(part, member)
        self._below = below.members()
        self._even = deque(even.members() if self._larger else ())
        return rest

    def deal(self, parts: list[int]) -> None:
        """Deals round robin to members below the even share, then one each to members that have it."""
        remaining = iter(parts)
        below = self._below
        while below:
            still = []
            for member in below:
                part = next(remaining, None)
                if part is None:
                    return
                self._give(part, member)
                if len(self.parts[member]) < self._share:
                    still.append(member)
                else:
                    self._even.append(member)
            below = still
        for part in remaining:
            self._give(part, self._even.popleft())

    def _give(self, part: int, member: int) -> None:
        self.parts[member].append(part)
        if part in self._taken_away and member != self._claims.owner[part]:
            self.moving[part] = member


class _Ring:
    """Members in a circle; finds the next one on any of the given racks."""

    def __init__(self, members: list[int], racks: Racks) -> None:
        self._rack_of = racks.member
        self._on_rack: dict[int, list[int]] = {}
        for member in sorted(members):
            self._on_rack.setdefault(self._rack_of[member], []).append(member)
        self._turn = 0

    def next(self, bits: list[int]) -> int | None:
        """The next member in the circle on any of these racks; the search then continues after it."""
        nearest: tuple[bool, int] | None = None
        for bit in bits:
            if on_rack := self._on_rack.get(bit):
                at = bisect_left(on_rack, self._turn)
                candidate = (False, on_rack[at]) if at < len(on_rack) else (True, on_rack[0])
                nearest = candidate if nearest is None else min(nearest, candidate)
        if nearest is None:
            return None
        self._turn = nearest[1] + 1
        return nearest[1]

    def remove(self, member: int) -> None:
        self._on_rack[self._rack_of[member]].remove(member)

    def members(self) -> list[int]:
        every: list[int] = []
        for on_rack in self._on_rack.values():
            for member in on_rack:
                insort(every, member)
        return every


class _Queue:
    """Members in order of arrival; finds the first one on any of the given racks."""

    def __init__(self, members: deque[int], racks: Racks) -> None:
        self._rack_of = racks.member
        self._on_rack: dict[int, deque[tuple[int, int]]] = {}
        self._arrivals = 0
        for member in members:
            self.append(member)

    def append(self, member: int) -> None:
        self._on_rack.setdefault(self._rack_of[member], deque()).append((self._arrivals, member))
        self._arrivals += 1

    def pop(self, bits: list[int]) -> int | None:
        first = min((self._on_rack[bit][0] for bit in bits if self._on_rack.get(bit)), default=None)
        if first is None:
            return None
        return self._on_rack[self._rack_of[first[1]]].popleft()[1]

    def members(self) -> list[int]:
        return [member for _, member in sorted(entry for queue in self._on_rack.values() for entry in queue)]
