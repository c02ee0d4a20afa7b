"""Who held which partition before: members' claims, with the rules for those that contradict each other (KIP-792)."""

from __future__ import annotations

from dataclasses import dataclass

from tidemark.group.assignors.numbered import NumberedGroup

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Claims:
    """``owner`` is the believed owner of each partition, or `NOBODY`; ``contested`` are those that two claimed in one generation.

    ``previous`` is, for partitions claimed by members that have missed generations, the newest of those members.
    """

    owner: list[int]
    contested: frozenset[int]
    previous: dict[int, int]


def settle(group: NumberedGroup) -> Claims:
    """Decides every claim: the only claimant is believed, of several the one of the highest generation, of equals nobody."""
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
            held = owner[part]
            if held == NOBODY or generation > believed[part]:
                owner[part], believed[part] = member, generation
                contested.discard(part)
            elif held != member and generation == believed[part]:
                contested.add(part)
            if stale and (part not in previous or generation > generations[previous[part]]):
                previous[part] = member
    for part in contested:
        owner[part] = NOBODY
    return Claims(owner, frozenset(contested), previous)


def moving(group: NumberedGroup, after: list[int]) -> dict[int, int]:
    """Partitions that a member would get although another, as far as that one knows, still holds them: partition -> who would get it.

    Under a cooperative protocol these stay with nobody for a round, until their holders have let go.
    """
    let_go: set[int] = set()
    kept: set[int] = set()
    for member, subscription in enumerate(group.subscriptions):
        for claim in subscription.owned:
            part = group.number(claim)
            if part is not None:
                (kept if after[part] == member else let_go).add(part)
    return {part: after[part] for part in sorted(let_go - kept) if after[part] != NOBODY}
