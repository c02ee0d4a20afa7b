"""`sticky` and `cooperative-sticky`: balanced assignments in which members keep their partitions where possible."""

from __future__ import annotations

from collections.abc import Mapping

from tidemark.group.assignors import general, uniform
from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription
from tidemark.group.assignors.numbered import NumberedGroup
from tidemark.group.assignors.previous_owners import moving, settle
from tidemark.group.assignors.racks import Racks
from tidemark.records.ranges import TopicPartition


class StickyAssignor(Assignor):
    """Kafka's ``sticky`` (KIP-54): as balanced as the subscriptions allow, with few moves.

    Racks are used where they matter (KIP-881): balance comes before nearness, and nearness before stickiness. Members are served in order
    of their ids.
    """

    name = "sticky"

    def __init__(self, *, force_racks: bool = False) -> None:
        self._force = force_racks

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        group, parts, _ = self._divide(metadata, subscriptions)
        return group.assignment(parts)

    def transferring(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> dict[TopicPartition, str]:
        """The partitions that move away from a member that reports them, each with its new member."""
        group, _, moves = self._divide(metadata, subscriptions)
        names = [TopicPartition(topic, number) for topic, count in zip(group.topics, group.counts, strict=True) for number in range(count)]
        return {names[part]: group.members[member] for part, member in moves.items()}

    def _divide(
        self, metadata: Metadata, subscriptions: Mapping[str, Subscription]
    ) -> tuple[NumberedGroup, list[list[int]], dict[int, int]]:
        group = NumberedGroup(metadata, subscriptions, sorted(subscriptions))
        racks = Racks(group, metadata, force=self._force)
        claims = settle(group)
        if group.equal:
            division = uniform.divide(group, claims, racks)
            return group, division.parts, division.moving
        parts = general.divide(group, claims, racks)
        owner = [0] * group.total
        for member, mine in enumerate(parts):
            for part in mine:
                owner[part] = member
        return group, parts, moving(group, owner)


class CooperativeStickyAssignor(StickyAssignor):
    """Kafka's ``cooperative-sticky`` (KIP-429): as `sticky`, but a partition that another member still owns stays unassigned for one round.

    Four rounds are enough, with one exception that Kafka shares: with racks *and* unequal subscriptions, nearness can take a partition from
    a member and balance can give it back, round after round. This is rare (1 of 1,700 random groups).
    """

    name = "cooperative-sticky"
    protocol = "cooperative"

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        group, parts, moves = self._divide(metadata, subscriptions)
        return group.assignment([part for part in mine if part not in moves] if moves else mine for mine in parts)
