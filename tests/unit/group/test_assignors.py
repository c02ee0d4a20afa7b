"""How assignors are found by name, which assignments the group refuses, and what members report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from tidemark.errors import BadInput
from tidemark.group.assignors import (
    ASSIGNORS,
    Assignor,
    Metadata,
    Subscription,
    TopicInfo,
    check_assignment,
    find_assignor,
    member_order,
)
from tidemark.group.assignors.random import RandomAssignor
from tidemark.group.assignors.sticky import CooperativeStickyAssignor, StickyAssignor
from tidemark.records.ranges import TopicPartition


def parts(topic: str, *numbers: int) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, number) for number in numbers)


class Unnamed(Assignor):
    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Mapping[str, Sequence[TopicPartition]]:
        return {}


class Unfinished(Assignor):
    name = "unfinished"


class Eager(Unnamed):
    name = "eager-of-ones-own"


class Cooperative(Unnamed):
    name = "cooperative-of-ones-own"
    protocol = "cooperative"


class Hasty(Eager):
    protocol = "hasty"  # type: ignore[assignment]


def test_assignor_is_found_by_kafkas_name_or_by_module_and_class():
    """The names are those of Kafka's ``partition.assignment.strategy``. The example of a custom assignor also has a short name."""
    for name in ("range", "roundrobin", "sticky", "cooperative-sticky", "random"):
        found = find_assignor(name)
        assert (found.name, found.protocol) == (name, "cooperative" if name == "cooperative-sticky" else "eager")
    assert type(find_assignor("tidemark.group.assignors.random:RandomAssignor")) is RandomAssignor


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uniform", "no assignor has this name"),
        (":Class", "no assignor has this name"),
        ("no_such_module_here:Class", "cannot be imported"),
        ("json:NoSuchClass", "json has no NoSuchClass"),
        ("json:JSONDecoder", "JSONDecoder does not implement"),
    ],
)
def test_unknown_assignor_is_refused_with_the_names_that_are_known(name, said):
    with pytest.raises(BadInput, match=said) as refused:
        find_assignor(name)
    assert all(known in str(refused.value) for known in ASSIGNORS)


@pytest.mark.parametrize(
    ("cls", "said"), [(Unnamed, "has no name"), (Unfinished, "does not implement assign"), (Hasty, "neither eager nor cooperative")]
)
def test_class_that_is_only_half_an_assignor_is_refused(cls, said):
    """This happens before the group starts, not in its first rebalance."""
    with pytest.raises(BadInput, match=said):
        find_assignor(f"{__name__}:{cls.__name__}")


METADATA = Metadata.of(flights=3)
TWO = {"a": Subscription(topics=("flights",), owned=parts("flights", 0, 1)), "b": Subscription(topics=("flights",))}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"a": parts("flights", 3)}, "flights/3 was assigned to 'a' but does not exist"),
        ({"a": parts("trains", 0)}, "trains/0 was assigned to 'a' but does not exist"),
        ({"a": parts("flights", 0), "b": parts("flights", 0)}, "flights/0 was assigned to 'a' and 'b'"),
        ({"a": parts("flights", 0, 0)}, "flights/0 was assigned to 'a' and 'a'"),
        ({"c": parts("flights", 0)}, "'c' got partitions but is not a member"),
    ],
)
def test_assignment_that_cannot_be_carried_out_is_refused(answer, said):
    """This holds for both protocols and for any assignor."""
    for assignor in (Eager(), CooperativeStickyAssignor()):
        with pytest.raises(BadInput, match=said):
            check_assignment(assignor, METADATA, TWO, answer)


def test_custom_cooperative_assignor_that_hands_over_an_owned_partition_is_refused():
    """Kafka's leader does the same (ConsumerCoordinatorTest.testPerformAssignmentShouldValidateCooperativeAssignment)."""
    answer = {"a": parts("flights", 0), "b": parts("flights", 1)}
    with pytest.raises(BadInput, match="flights/1 was assigned to 'b' while 'a' reports it as its own"):
        check_assignment(Cooperative(), METADATA, TWO, answer)
    check_assignment(Cooperative(), METADATA, TWO, {**answer, "b": parts("flights", 2)})  # flights/1 has no owner in this round
    check_assignment(Eager(), METADATA, TWO, answer)  # all members have revoked all partitions
    check_assignment(CooperativeStickyAssignor(), METADATA, TWO, answer)  # as ...ShouldSkipValidateForBuiltInCooperativeStickyAssignor
    holder = Subscription(topics=("flights",), owned=parts("flights", 1), generation=7)
    check_assignment(Cooperative(), METADATA, {**TWO, "b": holder}, answer)  # the claim of a is stale


def test_subscription_survives_json():
    """Postgres stores it as jsonb: it is equal when read back, and equal subscriptions have equal JSON. Of a newer member's subscription,
    unknown fields are ignored."""
    one = Subscription(
        topics=frozenset({"flights", "trains"}),
        owned=(*parts("flights", 0, 4), *parts("trains", 1)),
        generation=12,
        rack="eu-1a",
        instance_id="consume/0",
        user_data={"weight": 2},
    )
    assert Subscription.from_json(json.loads(json.dumps(one.to_json()))) == one
    other, same = Subscription(topics=("b", "a"), owned=parts("t", 1, 0)), Subscription(topics=("a", "b"), owned=parts("t", 0, 1))
    assert other.to_json() == same.to_json()
    assert Subscription.from_json({"topics": ["t"], "colour": "blue"}) == Subscription(topics=frozenset({"t"}))


def test_members_are_served_static_first_by_instance_id_then_dynamic_by_member_id():
    """As AbstractPartitionAssignorTest.testMemberInfoSortingSomeGroupInstanceId."""
    instances = {"m-1": None, "m-9": "a", "m-0": None, "m-2": "b"}
    members = {member: Subscription(topics=(), instance_id=instance) for member, instance in instances.items()}
    assert member_order(members) == ["m-9", "m-2", "m-0", "m-1"]


def test_zombie_that_comes_back_does_not_take_partitions_from_the_newer_generation():
    """If several members claim a partition, the newest generation counts, whichever is read first (KIP-792)."""
    back, here = (Subscription(topics=("flights",), owned=parts("flights", 0, 1), generation=generation) for generation in (1, 2))
    for group in ({"back": back, "here": here}, {"here": here, "back": back}):
        assert StickyAssignor().assign(Metadata.of(flights=4), group) == {
            "back": list(parts("flights", 2, 3)),
            "here": list(parts("flights", 0, 1)),
        }


def test_previous_owner_that_no_longer_subscribes_gets_nothing_back():
    """Kafka 4.3 gives a partition to a member of an older generation that claimed it, even if that member has since unsubscribed."""
    members = {
        "m00": Subscription(topics=("t0",), owned=parts("t0", 1), generation=3),
        "m01": Subscription(topics=("t2",), owned=(*parts("t0", 7, 4, 1), *parts("t1", 1)), generation=3),
        "m02": Subscription(topics=("t2",), owned=parts("t0", 6, 1)),
        "m03": Subscription(topics=("t2", "t1"), owned=parts("t0", 4), generation=3),
        "m04": Subscription(topics=("t1", "t2", "t0"), generation=2),
        "m05": Subscription(topics=("t1", "t2", "t0"), owned=(*parts("t0", 0, 3, 4, 1, 7), *parts("t2", 0)), generation=3),
    }
    assigned = StickyAssignor().assign(Metadata.of(t0=8, t1=2, t2=1), members)
    assert {part.topic for part in assigned["m02"]} <= {"t2"}


def test_topic_that_shrank_takes_claims_to_its_lost_partitions_with_it():
    """A deleted and re-created topic may have fewer partitions. No member keeps one that no longer exists."""
    members = {"a": Subscription(topics=("t",), owned=parts("t", 0, 5), generation=1), "b": Subscription(topics=("t",))}
    for assignor in (StickyAssignor(), CooperativeStickyAssignor()):
        assert assignor.assign(Metadata.of(t=2), members) == {"a": list(parts("t", 0)), "b": list(parts("t", 1))}


def test_racks_are_looked_at_only_where_they_can_matter():
    """KIP-881: if all partitions are on the same racks, or members have none, the answer is the same as without racks."""
    plain = {member: Subscription(topics=("t",)) for member in ("a", "b")}
    racked = {member: Subscription(topics=("t",), rack=rack) for member, rack in (("a", "east"), ("b", "west"))}
    apart = Metadata({"t": TopicInfo(2, [["west"], ["east"]])})
    everywhere = Metadata({"t": TopicInfo(2, [["west", "east"], ["east", "west"]])})
    for name in ("range", "sticky", "cooperative-sticky"):
        assignor = find_assignor(name)
        assert assignor.assign(apart, racked) == {"a": list(parts("t", 1)), "b": list(parts("t", 0))}
        assert assignor.assign(everywhere, racked) == assignor.assign(Metadata.of(t=2), plain)
        assert assignor.assign(apart, plain) == assignor.assign(Metadata.of(t=2), plain)
