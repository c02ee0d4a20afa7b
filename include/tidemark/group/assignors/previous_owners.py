"""Previous owners: members' claims to partitions, and the rules for claims that contradict each other (KIP-792)."""

from __future__ import annotations

from dataclasses import dataclass

from tidemark.group.assignors.numbered import NumberedGroup

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Claims:
    """``owner`` is the accepted owner of each partition, or `NOBODY`. ``contested`` are partitions that two members claimed in the same
    generation.

    ``previous`` is for partitions claimed by members that have missed generations: the member with the newest such claim.
    """

    owner: list[int]
    contested: frozenset[int]
    previous: dict[int, int]


def settle(group: NumberedGroup) -> Claims:
    """Decides every claim: a single claim is accepted; of several, that of the highest generation; with equal generations, none."""
    owner = [NOBODY] * group.total
    believed = [NOBODY] * group.total  # the generation of the owner
    contested: set[int] = set()
    previous: dict[int, int] = {}
    generations = [subscription.generation for subscription in group.subscriptions]
    newest = max(generations, default=NOBODY)
    starts = {topic: (group.starts[number], group.counts[number]) for topic, number in group.number_of.items()}
    for member, subscription in enumerate(group.subscriptions):
        generation = subscription.generation
        stale = generation < newest
        for claim in subscription.owned:
            start, count = starts.get(claim.topic, (0, 0))
            if not 0 <= claim.partition < count:
                continue
            part = start + claim.partition
            current = owner[part]
            if current == NOBODY or generation > believed[part]:
                owner[part], believed[part] = member, generation
                contested.discard(part)
            elif current != member and generation == believed[part]:
                contested.add(part)
            if stale and (part not in previous or generation > generations[previous[part]]):
                previous[part] = member
    for part in contested:
        owner[part] = NOBODY
    return Claims(owner, frozenset(contested), previous)


def moving(group: NumberedGroup, after: list[int]) -> dict[int, int]:
    """Partitions assigned to one member while another still believes that it owns them: partition -> new member.

    Under a cooperative protocol they stay unassigned for one round, until their owners have given them up.
    """
    given_up: set[int] = set()
    retained: set[int] = set()
    for member, subscription in enumerate(group.subscriptions):
        for claim in subscription.owned:
            part = group.number(claim)
            if part is not None:
                (retained if after[part] == member else given_up).add(part)
    return {part: after[part] for part in sorted(given_up - retained) if after[part] != NOBODY}
