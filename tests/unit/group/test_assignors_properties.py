"""What holds for every group, however strange: each partition is assigned once, to a subscriber, evenly, stickily and deterministically."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conformance import judge
from tests.conformance.cases import as_parts
from tests.support.sampling import examples

from tidemark.group.assignors import Metadata, Subscription, TopicInfo, check_assignment, find_assignor
from tidemark.records.ranges import TopicPartition

TOPICS = ("t0", "t1", "t2", "t3", "t4")
RACKS = ("a", "b", "c")
EVERY = ("range", "roundrobin", "sticky", "cooperative-sticky", "random")
STICKY = ("sticky", "cooperative-sticky")
some = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])

Group = tuple[Metadata, dict[str, Subscription]]


@st.composite
def groups(draw: st.DrawFn, *, racks: bool | None = None, claims: str = "any") -> Group:
    """Groups with topics that no member reads, members that read nothing, static and dynamic members, and claims of all kinds.

    ``claims``: ``any`` (stale, contradictory, or of partitions that do not exist), ``honest`` (of at most one member, which subscribes to
    the topic), ``none``.
    """
    counts = {topic: draw(st.integers(0, 7)) for topic in draw(st.sets(st.sampled_from(TOPICS)))}
    racks = draw(st.booleans()) if racks is None else racks
    near = st.lists(st.sampled_from((*RACKS, None)), max_size=3)
    metadata = Metadata(
        {topic: TopicInfo(count, [draw(near) for _ in range(count)] if racks else None) for topic, count in sorted(counts.items())}
    )
    equal = draw(st.none() | st.sets(st.sampled_from(TOPICS)))
    members: dict[str, Subscription] = {}
    for number in range(draw(st.integers(1, 7))):
        topics = draw(st.sets(st.sampled_from(TOPICS))) if equal is None else equal
        members[f"m{number}"] = Subscription(
            topics=frozenset(topics),
            rack=draw(st.sampled_from((*RACKS, None))) if racks else None,
            instance_id=draw(st.none() | st.just(f"i{9 - number}")),
        )
    exist = [TopicPartition(topic, number) for topic, count in sorted(counts.items()) for number in range(count)]
    owned: dict[str, set[TopicPartition]] = {member: set() for member in members}
    if claims == "any":
        strange = st.builds(TopicPartition, st.sampled_from(TOPICS), st.integers(0, 8))
        for mine in owned.values():
            mine |= draw(st.sets(strange, max_size=8))
    elif claims == "honest":
        for part in exist:
            takers = [member for member, one in members.items() if part.topic in one.topics]
            if takers:
                taker = draw(st.none() | st.sampled_from(takers))
                owned.get(taker or "", set()).add(part)
    for member, one in members.items():
        generation = draw(st.integers(-1, 3)) if claims == "any" else 1
        members[member] = dataclasses.replace(one, owned=tuple(sorted(owned[member])), generation=generation)
    return metadata, members


def each(members: dict[str, Subscription], **changes: Any) -> dict[str, Subscription]:
    return {member: dataclasses.replace(one, **changes) for member, one in members.items()}


def holding(members: dict[str, Subscription], parts: Mapping[str, Iterable[TopicPartition]]) -> dict[str, Subscription]:
    """The members, each of which reports what it was assigned."""
    return {member: dataclasses.replace(one, owned=tuple(parts[member]), generation=1) for member, one in members.items()}


@pytest.mark.parametrize("name", EVERY)
@some
@given(group=groups())
def test_every_subscribed_partition_is_given_once_and_to_a_subscriber(name, group: Group):
    """This holds whatever the members claim. Under the cooperative protocol, all partitions are assigned as soon as no member holds any."""
    metadata, members = group
    assignor = find_assignor(name)
    after = assignor.assign(metadata, members)
    check_assignment(assignor, metadata, members, after)
    assert judge.validity(metadata, members, as_parts(after), complete=assignor.protocol == "eager") == []
    if assignor.protocol == "cooperative":
        members = each(members, owned=())
        assert judge.validity(metadata, members, as_parts(assignor.assign(metadata, members)), complete=True) == []


@pytest.mark.parametrize("name", EVERY)
@some
@given(group=groups(), dice=st.randoms(use_true_random=False))
def test_equal_input_has_an_equal_answer_whatever_the_order_of_dictionaries(name, group: Group, dice):
    """Two leaders with the same input give the same answer, including the order of each member's partitions."""
    metadata, members = group

    def shuffled(mapping):
        items = list(mapping.items())
        dice.shuffle(items)
        return dict(items)

    other = {
        member: dataclasses.replace(one, topics=tuple(dice.sample(sorted(one.topics), len(one.topics))), owned=tuple(reversed(one.owned)))
        for member, one in shuffled(members).items()
    }
    again = find_assignor(name).assign(Metadata(shuffled(metadata.topics)), other)
    assert again == find_assignor(name).assign(metadata, members)


@pytest.mark.parametrize("name", STICKY)
@some
@given(group=groups(racks=False, claims="honest"))
def test_sticky_assignment_is_as_balanced_as_subscriptions_allow_and_moves_nothing_without_a_reason(name, group: Group):
    """AbstractStickyAssignorTest.verifyValidityAndBalance: members whose sizes differ by two or more share no assigned topic; isSticky:
    no two members give each other partitions of the same topic. An assignment that is reported back does not change."""
    metadata, members = group
    rounds, problems = judge.run_rounds(find_assignor(name), metadata, members)
    assert problems == []
    assert judge.validity(metadata, members, rounds[-1], complete=True) == []
    assert judge.balance(metadata, members, rounds[-1]) == []
    assert judge.one_way(members, rounds[-1]) == []
    assert as_parts(find_assignor(name).assign(metadata, holding(members, rounds[-1]))) == rounds[-1]
    if len({one.topics for one in members.values()}) == 1:
        sizes = [len(parts) for parts in rounds[-1].values()]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", STICKY)
@some
@given(group=groups(racks=False, claims="none"), data=st.data())
def test_those_that_stay_keep_everything_when_a_member_of_an_equal_group_leaves(name, group: Group, data):
    """Only the partitions of the member that left are assigned to others."""
    metadata, members = group
    members = each(members | {"stays": Subscription(topics=())}, topics=frozenset(TOPICS))
    before = as_parts(find_assignor(name).assign(metadata, members))
    gone = data.draw(st.sampled_from(sorted(set(members) - {"stays"})))
    rest = holding({member: one for member, one in members.items() if member != gone}, before)
    after = as_parts(find_assignor(name).assign(metadata, rest))
    assert all(before[member] <= after[member] for member in rest)


@some
@given(group=groups())
def test_cooperative_round_takes_no_partition_from_one_and_gives_it_to_another(group: Group):
    """The oracle of CooperativeStickyAssignorTest, for claims of any kind and with racks."""
    metadata, members = group
    after = as_parts(find_assignor("cooperative-sticky").assign(metadata, members))
    assert judge.handed_over(members, after) == []


@some
@given(group=groups(racks=False))
def test_cooperative_rebalances_are_over_after_four_rounds(group: Group):
    """Each member reports what it was assigned, until no member has to revoke anything.

    Tested without racks: with racks and unequal subscriptions, nearness and balance can move a partition back and forth, in Kafka too.
    """
    metadata, members = group
    rounds, problems = judge.run_rounds(find_assignor("cooperative-sticky"), metadata, members)
    assert problems == []
    assert len(rounds) <= judge.MOST_ROUNDS


@pytest.mark.parametrize("name", ["range", *STICKY])
@some
@given(group=groups(racks=True, claims="none"))
def test_racks_do_not_change_how_many_partitions_a_member_of_an_equal_group_has(name, group: Group):
    """KIP-881: balance comes before nearness."""
    metadata, members = group
    members = each(members, topics=frozenset(TOPICS))
    near, plain = (as_parts(find_assignor(name).assign(metadata, some)) for some in (members, each(members, rack=None)))
    for topics in [{topic} for topic in TOPICS] if name == "range" else [set(TOPICS)]:  # range divides topic by topic
        sizes = [sorted(sum(part.topic in topics for part in parts) for parts in found.values()) for found in (near, plain)]
        assert sizes[0] == sizes[1]
