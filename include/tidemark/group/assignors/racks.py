"""Which members are near which partitions (KIP-881). All replicas count, in sync or not."""

from __future__ import annotations

import numpy as np

from tidemark.group.assignors.base import Metadata
from tidemark.group.assignors.numbered import NumberedGroup


class Racks:
    """Racks as bits: a member's rack is one bit (0: unknown), a partition's are the bits of all its replicas' racks.

    ``matter`` says whether racks can change an assignment: members have racks, some of these are also brokers' racks, and not every
    partition is on every rack. ``force`` (for tests) uses racks even if every partition is on every rack; the result must be the same.
    """

    def __init__(self, group: NumberedGroup, metadata: Metadata, *, force: bool = False) -> None:
        self._bits: dict[str, int] = {}
        self.member = [self._bit(subscription.rack) for subscription in group.subscriptions]
        self.partition: list[int] = [0] * group.total
        self.matter = False
        if any(self.member):
            for topic, start, count in zip(group.topics, group.starts, group.counts, strict=False):
                racks = metadata.topics[topic].racks
                for part, replicas in zip(range(start, start + count), racks or (), strict=False):
                    for replica in replicas:
                        self.partition[part] |= self._bit(replica)
            self.matter = matter(set(self.member), self.partition, force=force)
        self._near: dict[tuple[int, int], int] = {}

    def far(self, member: int, part: int) -> bool:
        """Whether the member has a rack without any replica of the partition."""
        return self.member[member] != 0 and not self.member[member] & self.partition[part]

    def fewest_near_first(self, group: NumberedGroup, parts: list[int]) -> list[int]:
        """Sorts partitions by the number of subscribers on their racks, fewest first: these have the least choice. The sort is stable."""
        topics = group.topic_of[parts].tolist() if parts else []
        keys = [self._count_near(group, group.audience_of[topic], self.partition[part]) for topic, part in zip(topics, parts, strict=True)]
        return [parts[at] for at in np.argsort(np.array(keys, dtype=np.int64), kind="stable").tolist()]

    def _count_near(self, group: NumberedGroup, audience: int, bits: int) -> int:
        near = self._near.get((audience, bits))
        if near is None:
            near = self._near[audience, bits] = sum(bool(self.member[member] & bits) for member in group.audiences[audience])
        return near

    def _bit(self, rack: str | None) -> int:
        return self._bits.setdefault(rack, 1 << len(self._bits)) if rack else 0


def matter(members: set[int], partitions: list[int], *, force: bool) -> bool:
    """Whether the racks of these members and partitions can change an assignment."""
    distinct = set(partitions)
    of_brokers = of_members = 0
    for bits in distinct:
        of_brokers |= bits
    for bits in members:
        of_members |= bits
    return bool(of_brokers & of_members) and (force or distinct != {of_brokers})


def split(bits: int) -> list[int]:
    """The individual bits of a set of racks, lowest first."""
    single = []
    while bits:
        single.append(bits & -bits)
        bits &= bits - 1
    return single
