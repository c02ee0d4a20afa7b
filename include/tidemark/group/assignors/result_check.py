"""Checks an assignor's result before it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidemark.errors import BadInput
from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription
from tidemark.group.assignors.sticky import CooperativeStickyAssignor
from tidemark.records.ranges import TopicPartition


def check_assignment(assignor: Assignor, metadata: Metadata, subscriptions: Mapping[str, Subscription], assignment: Assignment) -> None:
    """Raises `BadInput` for an assignment that cannot be stored.

    Every partition must exist, be assigned only once, and be assigned to a member. A cooperative assignor must also not assign a partition
    that another member reports as its own, because two members would then work on it. As in Kafka, the built-in ``cooperative-sticky`` is
    exempt from this last check: it keeps the rule and knows which claims are stale. Members may get partitions of topics that they do not
    subscribe to, as in Kafka.
    """
    owners: dict[TopicPartition, str] = {}
    for member, parts in assignment.items():
        if member not in subscriptions:
            raise _refusal(assignor, f"{member!r} got partitions but is not a member of the group", "assign partitions to members only")
        for part in parts:
            topic = metadata.topics.get(part.topic)
            if topic is None or not 0 <= part.partition < topic.partitions:
                raise _refusal(assignor, f"{part} was assigned to {member!r} but does not exist", "assign partitions of the metadata only")
            if part in owners:
                raise _refusal(assignor, f"{part} was assigned to {owners[part]!r} and {member!r}", "assign each partition to one member")
            owners[part] = member
    if assignor.protocol == "cooperative" and type(assignor) is not CooperativeStickyAssignor:
        for part, holder in _transferred(subscriptions, owners):
            member = owners[part]
            if part not in subscriptions[member].owned:
                problem = f"{part} was assigned to {member!r} while {holder!r} reports it as its own"
                fix = "Under the cooperative protocol, leave it unassigned: its owner gives it up, and the next round assigns it"
                raise _refusal(assignor, problem, fix)


def _transferred(subscriptions: Mapping[str, Subscription], owners: Mapping[TopicPartition, str]) -> Iterator[tuple[TopicPartition, str]]:
    """Yields partitions assigned to another member than their reported owner, each with that owner."""
    for member, subscription in subscriptions.items():
        for part in subscription.owned:
            if owners.get(part, member) != member:
                yield part, member


def _refusal(assignor: Assignor, problem: str, fix: str) -> BadInput:
    return BadInput(what=f"the assignor {assignor.name!r}", found=problem, fix=fix[0].upper() + fix[1:] + "; nothing was stored.")
