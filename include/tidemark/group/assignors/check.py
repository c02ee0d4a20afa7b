"""What an assignor answered, judged before the group hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidemark.errors import BadInput
from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription
from tidemark.group.assignors.sticky import CooperativeStickyAssignor
from tidemark.records.ranges import TopicPartition


def check_assignment(assignor: Assignor, metadata: Metadata, subscriptions: Mapping[str, Subscription], assignment: Assignment) -> None:
    """Refuses, with `BadInput`, an assignment that cannot be stored.

    That is one with a partition that does not exist, that is given twice, or given to somebody who is no member; and of a cooperative
    assignor one that hands over a partition which another member reports as its own, for two would then work on it. The built-in
    ``cooperative-sticky`` is not held to that last rule, as in Kafka: it keeps it, and knows better which claims are stale. Partitions of
    topics that a member does not subscribe to are allowed, as in Kafka.
    """
    given: dict[TopicPartition, str] = {}
    for member, parts in assignment.items():
        if member not in subscriptions:
            raise _refusal(assignor, f"{member!r} got partitions and is not a member of the group", "give partitions to members only")
        for part in parts:
            topic = metadata.topics.get(part.topic)
            if topic is None or not 0 <= part.partition < topic.partitions:
                raise _refusal(assignor, f"{part} was given to {member!r} and does not exist", "give away partitions of the metadata only")
            if part in given:
                raise _refusal(assignor, f"{part} was given to {given[part]!r} and to {member!r}", "give each partition to one member")
            given[part] = member
    if assignor.protocol == "cooperative" and type(assignor) is not CooperativeStickyAssignor:
        for part, holder in _let_go(subscriptions, given):
            member = given[part]
            if part not in subscriptions[member].owned:
                found = f"{part} was given to {member!r} while {holder!r} reports it as its own"
                fix = "Under the cooperative protocol leave such a partition out: its owner lets go of it, and the next round gives it away"
                raise _refusal(assignor, found, fix)


def _let_go(subscriptions: Mapping[str, Subscription], given: Mapping[TopicPartition, str]) -> Iterator[tuple[TopicPartition, str]]:
    """The partitions that a member reports and another one got, and who reports them."""
    for member, subscription in subscriptions.items():
        for part in subscription.owned:
            if given.get(part, member) != member:
                yield part, member


def _refusal(assignor: Assignor, found: str, fix: str) -> BadInput:
    return BadInput(what=f"the assignor {assignor.name!r}", found=found, fix=fix[0].upper() + fix[1:] + "; nothing was stored.")
