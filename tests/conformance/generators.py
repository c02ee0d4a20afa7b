"""Cases too large to be written out: made by the rule that the file states in words, judged by properties and by a time limit."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping

from tests.conformance import judge
from tests.conformance.cases import Case, as_parts
from tidemark.group.assignors import Assignment, Metadata, Subscription, TopicInfo

DEFAULT_LIMIT_S = 90.0
_RACKS = ("a", "b", "c", "d")

Step = tuple[Metadata, dict[str, Subscription]]


def run(case: Case, *, scale: int = 1) -> list[str]:
    """What is wrong with the answers to a generated case; its groups are ``scale`` times smaller than the file says, each way."""
    assert case.generator is not None
    rule = next((rule for name, rule in _RULES.items() if name in case.name), None)
    if rule is None:
        return [f"no rule is known for this generator; known are {', '.join(_RULES)}"]
    limit_s = min([float(found[1]) for text in case.properties if (found := re.search(r"timeout (\d+) s", text))], default=DEFAULT_LIMIT_S)
    sizes = {name: max(2, value // scale) for name, value in case.generator.items() if isinstance(value, int)}
    variants = [(sizes, False)]
    if "rack_aware_variant" in case.generator:
        found = re.match(r"(\d+) topics", case.generator["rack_aware_variant"])
        variants.append(({**sizes, "topics": max(2, int(found[1]) // scale) if found else sizes["topics"]}, True))
    problems = []
    for variant, racks in variants:
        spent_s, wrong = _run(case, rule(variant, random.Random(case.name)), racks=racks)
        problems += [f"{'with racks: ' if racks else ''}{text}" for text in wrong]
        if spent_s > limit_s:
            problems.append(f"took {spent_s:.1f} s, the limit is {limit_s:.0f} s")
    return problems


def _run(case: Case, steps: Iterator[Callable[[Assignment], Step]], *, racks: bool) -> tuple[float, list[str]]:
    """Seconds spent in the assignor, and what is wrong. Each step is made from the assignment before it."""
    assignor = case.make()
    assignment: Assignment = {}
    spent_s, problems = 0.0, []
    for step in steps:
        metadata, subscriptions = step(assignment)
        if racks:
            metadata, subscriptions = _with_racks(metadata, subscriptions)
        started = time.process_time()
        assignment = assignor.assign(metadata, subscriptions)
        spent_s += time.process_time() - started
        after = as_parts(assignment)
        if assignor.protocol == "cooperative":
            problems += judge.handed_over(subscriptions, after)
            if judge.anybody_lost(subscriptions, after):
                rounds, wrong = judge.run_rounds(assignor, metadata, fed_back(subscriptions, assignment))
                problems += wrong
                after = rounds[-1]
                assignment = {member: sorted(parts) for member, parts in after.items()}
        problems += judge.validity(metadata, subscriptions, after, complete=True)
        if not racks:
            problems += judge.balance(metadata, subscriptions, after)
            problems += judge.one_way(subscriptions, after)
    return spent_s, problems


def _with_racks(metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Step:
    """Three replicas on four racks, members on the same four."""
    topics = {
        topic: TopicInfo(info.partitions, [[_RACKS[(at + one) % 4] for one in range(3)] for at in range(info.partitions)])
        for topic, info in metadata.topics.items()
    }
    members = {member: dataclasses.replace(one, rack=_RACKS[at % 4]) for at, (member, one) in enumerate(subscriptions.items())}
    return Metadata(topics), members


Sizes = Mapping[str, int]
Rule = Callable[[Sizes, random.Random], Iterator[Callable[[Assignment], Step]]]


def _topics(sizes: Sizes) -> Metadata:
    return Metadata({f"t{at:04}": TopicInfo(sizes["partitions_each"]) for at in range(sizes["topics"])})


def _members(count: int, topics_of: Callable[[int], frozenset[str]]) -> dict[str, Subscription]:
    return {f"consumer{at:04}": Subscription(topics=topics_of(at)) for at in range(count)}


def fed_back(subscriptions: Mapping[str, Subscription], assignment: Assignment) -> dict[str, Subscription]:
    """The members with what they were assigned, as of generation 1."""
    return {member: dataclasses.replace(one, owned=tuple(assignment[member]), generation=1) for member, one in subscriptions.items()}


def _without_first(metadata: Metadata, members: Mapping[str, Subscription]) -> Iterator[Callable[[Assignment], Step]]:
    """A fresh assignment, then one in which the first member is gone."""
    yield lambda before: (metadata, dict(members))
    rest = dict(members)
    del rest[min(rest)]
    yield lambda before: (metadata, fed_back(rest, before))


def _equal(sizes: Sizes, dice: random.Random) -> Iterator[Callable[[Assignment], Step]]:
    metadata = _topics(sizes)
    every = frozenset(metadata.topics)
    return _without_first(metadata, _members(sizes["members"], lambda at: every))


def _one_differs(sizes: Sizes, dice: random.Random) -> Iterator[Callable[[Assignment], Step]]:
    metadata = _topics(sizes)
    every, first = frozenset(metadata.topics), frozenset([min(metadata.topics)])
    return _without_first(metadata, _members(sizes["members"], lambda at: first if at == sizes["members"] - 1 else every))


def _halves(sizes: Sizes, dice: random.Random) -> Iterator[Callable[[Assignment], Step]]:
    metadata = _topics(sizes)
    names = sorted(metadata.topics)
    lower, upper = frozenset(names[: len(names) // 2]), frozenset(names[len(names) // 2 :])
    return _without_first(metadata, _members(sizes["members"], lambda at: lower if at % 4 == 0 else upper))


def _many_leave(sizes: Sizes, dice: random.Random) -> Iterator[Callable[[Assignment], Step]]:
    metadata = Metadata({f"t{at:04}": TopicInfo(dice.randint(1, 10)) for at in range(sizes["topics"])})
    names = sorted(metadata.topics)
    members = _members(sizes["members"], lambda at: frozenset(dice.choices(names, k=dice.randint(1, 19))))
    wanted = frozenset().union(*(one.topics for one in members.values()))
    metadata = Metadata({topic: info for topic, info in metadata.topics.items() if topic in wanted})
    yield lambda before: (metadata, members)
    stay = sorted(dice.sample(sorted(members), len(members) - dice.randint(1, len(members) // 4)))
    yield lambda before: (metadata, fed_back({member: members[member] for member in stay}, before))


def _random_rounds(sizes: Sizes, dice: random.Random) -> Iterator[Callable[[Assignment], Step]]:
    for _ in range(sizes.get("rounds", 100)):
        metadata = Metadata({f"t{at:04}": TopicInfo(at + 1) for at in range(dice.randint(10, 19))})
        names = sorted(metadata.topics)

        def some(at: int, names: list[str] = names) -> frozenset[str]:
            return frozenset(dice.sample(names, dice.randint(1, len(names))))

        count = dice.randint(20, 39)
        for again in (False, True):
            members = _members(count, some)
            yield lambda before, metadata=metadata, members=members, again=again: (  # type: ignore[misc]
                metadata,
                fed_back(members, before) if again else members,
            )


_RULES: dict[str, Rule] = {
    "testLargeAssignmentAndGroupWithUniformSubscription": _equal,
    "testLargeAssignmentAndGroupWithNonEqualSubscription": _one_differs,
    "testAssignmentAndGroupWithNonEqualSubscriptionNotTimeout": _halves,
    "testLargeAssignmentWithMultipleConsumersLeavingAndRandomSubscription": _many_leave,
    "testReassignmentWithRandomSubscriptionsAndChanges": _random_rounds,
}
"""The file states each rule in a sentence, ``subscriptions_rule``; which one it is follows from the name of Kafka's test."""
