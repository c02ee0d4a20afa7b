"""The properties that every assignment must have, whichever assignor computed it, and the verdict on a case."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from tests.conformance.cases import Case, Parts, as_parts
from tidemark.group.assignors import Assignor, Metadata, Subscription, check_assignment
from tidemark.group.assignors.sticky import StickyAssignor
from tidemark.records.ranges import TopicPartition

MOST_ROUNDS = 4
"""A cooperative group is stable after at most this many rebalances."""


def judge(case: Case) -> list[str]:
    """Returns what is wrong with the assignor's answer to a case; empty if nothing is."""
    assignor = case.make()
    most = 1 if _first_only(case) else MOST_ROUNDS
    rounds, problems = run_rounds(assignor, case.metadata, case.subscriptions, most)
    first, last = rounds[0], rounds[-1]
    through = most > 1 or assignor.protocol == "eager"
    problems += validity(case.metadata, case.subscriptions, last, complete=through)
    sticky = isinstance(assignor, StickyAssignor)
    if sticky and through and not _far_owned(case):
        problems += balance(case.metadata, case.subscriptions, last)
    answer = last if case.final else first
    if case.expected is not None and not case.order_of_hashes and answer != case.expected:
        problems.append(difference(case.expected, answer))
    for want, got in zip(() if case.order_of_hashes else case.rounds or (), rounds, strict=False):
        problems += [difference(want, got)] if want != got else []
    if case.order_of_hashes and sticky:
        problems += one_way(case.subscriptions, last)
        if case.expected is not None and _sizes(case.expected) != _sizes(answer):
            problems.append(f"sizes {_sizes(answer)} instead of {_sizes(case.expected)}")
    if isinstance(assignor, StickyAssignor) and case.transferring is not None and not case.order_of_hashes:
        moves = assignor.transferring(case.metadata, case.subscriptions)
        if moves != case.transferring:
            problems.append(f"transferring {_named(moves)} instead of {_named(case.transferring)}")
    if case.rack_mismatches is not None and not case.order_of_hashes:
        far = rack_mismatches(case.metadata, case.subscriptions, answer)
        if far != case.rack_mismatches:
            problems.append(f"{far} rack mismatches instead of {case.rack_mismatches}")
    return problems


def run_rounds(
    assignor: Assignor, metadata: Metadata, subscriptions: Mapping[str, Subscription], most: int = MOST_ROUNDS
) -> tuple[list[Parts], list[str]]:
    """Returns the assignments of a rebalance and, under the cooperative protocol, of those that follow until no member revokes anything.
    Also returns what is wrong with them."""
    rounds: list[Parts] = []
    problems: list[str] = []
    while True:
        assignment = assignor.assign(metadata, subscriptions)
        check_assignment(assignor, metadata, subscriptions, assignment)
        after = as_parts(assignment)
        rounds.append(after)
        problems += validity(metadata, subscriptions, after, complete=False)
        if assignor.protocol == "eager":
            return rounds, problems
        problems += handed_over(subscriptions, after)
        if not anybody_lost(subscriptions, after):
            return rounds, problems
        if len(rounds) == most:
            return rounds, [*problems, f"not through after {most} rounds"] if most > 1 else problems
        newest = max(one.generation for one in subscriptions.values()) + 1
        subscriptions = {
            member: dataclasses.replace(one, owned=tuple(sorted(after[member])), generation=max(newest, 1))
            for member, one in subscriptions.items()
        }


def validity(metadata: Metadata, subscriptions: Mapping[str, Subscription], after: Parts, *, complete: bool) -> list[str]:
    """Every member is present. Partitions exist, and each goes to only one member, which subscribes to it. With ``complete``, all
    partitions that some member wants are assigned."""
    problems = []
    if set(after) != set(subscriptions):
        problems.append(f"members {sorted(after)} instead of {sorted(subscriptions)}")
    given: set[TopicPartition] = set()
    for member, parts in after.items():
        strange = sorted(part for part in parts if part.topic not in set(subscriptions[member].topics))
        if strange:
            problems.append(f"{member} got {strange[0]} without subscribing to it")
        twice = sorted(parts & given)
        if twice:
            problems.append(f"{twice[0]} was given twice")
        given |= parts
    if complete:
        topics: set[str] = set().union(*(one.topics for one in subscriptions.values()))
        wanted = {TopicPartition(name, at) for name in topics & set(metadata.topics) for at in range(metadata.topics[name].partitions)}
        if given != wanted:
            problems.append(f"{len(wanted - given)} partitions given to nobody, {len(given - wanted)} that nobody could get")
    return problems


def balance(metadata: Metadata, subscriptions: Mapping[str, Subscription], after: Parts) -> list[str]:
    """No member has two more partitions than another one that subscribes to the topic of one of them."""
    largest: dict[str, tuple[int, str]] = {}
    for member, parts in after.items():
        for topic in {part.topic for part in parts}:
            largest[topic] = max(largest.get(topic, (0, "")), (len(parts), member))
    for member, one in subscriptions.items():
        for topic in sorted(set(one.topics) & set(largest)):
            size, owner = largest[topic]
            if size > len(after[member]) + 1:
                return [f"unbalanced: {owner} has {size} partitions, {member} has {len(after[member])} and could take one of {topic}"]
    return []


def one_way(subscriptions: Mapping[str, Subscription], after: Parts) -> list[str]:
    """Stickiness: no two members gave each other partitions of the same topic."""
    owner = {part: member for member, parts in after.items() for part in parts}
    claims = Counter(part for one in subscriptions.values() for part in one.owned)
    moves = set()
    for member, one in subscriptions.items():
        for part in one.owned:
            if claims[part] == 1 and owner.get(part, member) != member:
                moves.add((part.topic, member, owner[part]))
    both = sorted(move for move in moves if (move[0], move[2], move[1]) in moves)
    return [f"{both[0][1]} and {both[0][2]} gave each other partitions of {both[0][0]}"] if both else []


def handed_over(subscriptions: Mapping[str, Subscription], after: Parts) -> list[str]:
    """Cooperative protocol: no partition moves from one member to another within one round."""
    taken = {part for member, one in subscriptions.items() for part in one.owned if part not in after[member]}
    gained = {part for member, parts in after.items() for part in parts - frozenset(subscriptions[member].owned)}
    return [f"{part} changed hands within one round" for part in sorted(taken & gained)[:1]]


def anybody_lost(subscriptions: Mapping[str, Subscription], after: Parts) -> bool:
    """Whether some member must give up a partition, so that another round follows."""
    return any(not frozenset(one.owned) <= after[member] for member, one in subscriptions.items())


def rack_mismatches(metadata: Metadata, subscriptions: Mapping[str, Subscription], after: Parts) -> int:
    """Counts the partitions without a replica on their member's rack. Members without a rack do not count."""
    count = 0
    for member, parts in after.items():
        rack = subscriptions[member].rack
        for part in parts if rack else ():
            racks = metadata.topics[part.topic].racks
            count += rack not in (racks[part.partition] if racks else ())
    return count


def difference(expected: Parts, answer: Parts) -> str:
    """Describes the members whose partitions are not the expected ones."""
    texts = []
    for member in sorted(set(expected) | set(answer)):
        want, got = expected.get(member), answer.get(member)
        if want != got:
            texts.append(f"{member}: {_list(got)} instead of {_list(want)}")
    return "; ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _list(parts: frozenset[TopicPartition] | None) -> str:
    return "absent" if parts is None else "[" + ", ".join(map(str, sorted(parts))) + "]"


def _named(moves: Mapping[TopicPartition, str]) -> dict[str, str]:
    return {str(part): member for part, member in sorted(moves.items())}


def _sizes(parts: Parts) -> list[int]:
    return sorted(map(len, parts.values()))


def _first_only(case: Case) -> bool:
    """Whether the file has only the first answer, and nothing about the rounds after it. With racks, Kafka's own assignor may never
    finish."""
    return case.expected is not None and not case.final and any(one.rack for one in case.subscriptions.values())


def _far_owned(case: Case) -> bool:
    """Whether balance cannot be required. Kafka promises it only without racks: with few partitions, rack locality may prevent it."""
    return case.rack_mismatches is not None
