"""`range`: every member gets one contiguous range of partitions of each topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription, member_order
from tidemark.group.assignors.numbered import NumberedGroup
from tidemark.group.assignors.racks import Racks, matter


class RangeAssignor(Assignor):
    """Kafka's ``range``: divides the topics one by one; the first members get the larger shares.

    Topics with equal numbers of partitions and the same subscribers are co-partitioned: partition *n* of all of them goes to the same
    member. With racks (KIP-881), a member first gets partitions that have a replica on its rack, as long as the shares stay the same and
    co-partitioned.
    """

    name = "range"

    def __init__(self, *, force_racks: bool = False) -> None:
        self._force = force_racks

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        group = NumberedGroup(metadata, subscriptions, member_order(subscriptions))
        racks = Racks(group, metadata)
        mine: list[list[int]] = [[] for _ in group.members]
        topics = [_Topic(group, racks, number, mine, force=self._force) for number in range(len(group.topics)) if group.counts[number]]
        if any(topic.racks_matter for topic in topics):
            _near_ones(topics, racks)
        for topic in topics:
            topic.fill(lambda member, part: True)
        return group.assignment(sorted(parts) for parts in mine)


class _Topic:
    """A topic while it is divided: its unassigned partitions, and how many more each subscriber may take."""

    def __init__(self, group: NumberedGroup, racks: Racks, number: int, mine: list[list[int]], *, force: bool) -> None:
        self.audience = group.audience_of[number]
        self.count = group.counts[number]
        self.start = group.starts[number]
        self.subscribers = group.audiences[self.audience]
        self.free = list(range(self.start, self.start + self.count))
        self._mine = mine
        self._share, self._larger = divmod(self.count, len(self.subscribers))
        self._taken = dict.fromkeys(self.subscribers, 0)
        members = {racks.member[member] for member in self.subscribers}
        self.racks_matter = matter(members, racks.partition[self.start : self.start + self.count], force=force)

    def room(self, member: int) -> int:
        """How many more partitions the member may take: one above the even share while larger shares are left."""
        return max(0, self._share + (self._larger > 0) - self._taken[member])

    def take(self, member: int, parts: list[int]) -> None:
        self._mine[member] += parts
        self._taken[member] += len(parts)
        self._larger -= self._taken[member] > self._share
        taken = set(parts)
        self.free = [part for part in self.free if part not in taken] if parts != self.free[: len(parts)] else self.free[len(parts) :]

    def fill(self, suits: Callable[[int, int], bool]) -> None:
        """Gives each subscriber, in order, the free partitions that suit it, lowest numbers first."""
        for member in self.subscribers:
            room = self.room(member)
            chosen: list[int] = []
            for part in self.free:
                if len(chosen) == room:
                    break
                if suits(member, part):
                    chosen.append(part)
            if chosen:
                self.take(member, chosen)


def _near_ones(topics: list[_Topic], racks: Racks) -> None:
    """Assigns partitions that have a replica on the member's rack. Co-partitioned topics are assigned together, or not at all."""
    side_by_side: dict[tuple[int, int], list[_Topic]] = {}
    for topic in topics:
        side_by_side.setdefault((topic.audience, topic.count), []).append(topic)
    for group in side_by_side.values():
        if len(group) > 1:
            _near_rows(group, racks)
        elif group[0].racks_matter:
            group[0].fill(lambda member, part: not racks.far(member, part))


def _near_rows(group: list[_Topic], racks: Racks) -> None:
    """Assigns rows: partition *n* of each topic of the group, to the first member that has room and is near all of them."""
    open_to = list(group[0].subscribers)
    for row in range(group[0].count):
        for member in open_to:
            if all(topic.room(member) and not racks.far(member, topic.start + row) for topic in group):
                for topic in group:
                    topic.take(member, [topic.start + row])
                if not any(topic.room(member) for topic in group):
                    open_to.remove(member)
                break
