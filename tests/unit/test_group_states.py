"""The table of transitions, the vote, and the errors of the group protocol, without a database."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import Fenced, Refused, Unavailable
from tidemark.group import errors
from tidemark.group.coordinator import GroupConfig, JoinRequest
from tidemark.group.machine import Group, Member, topics_of, vote
from tidemark.group.states import TRANSITIONS, GroupState, IllegalTransition, Transition, Why, check_transition

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = (
    GroupState.EMPTY,
    GroupState.PREPARING_REBALANCE,
    GroupState.COMPLETING_REBALANCE,
    GroupState.STABLE,
    GroupState.DEAD,
)
LEGAL = {
    (EMPTY, PREPARING),
    (STABLE, PREPARING),
    (COMPLETING, PREPARING),
    (PREPARING, COMPLETING),
    (PREPARING, EMPTY),
    (COMPLETING, STABLE),
    (EMPTY, DEAD),
}
"""Kafka's GroupMetadata.validPreviousStates. In Kafka, any state also becomes Dead when the coordinator moves; ours does not move."""


@pytest.mark.parametrize(("source", "target", "why"), list(itertools.product(GroupState, GroupState, Why)))
def test_a_change_of_state_is_allowed_if_the_table_has_it(source: GroupState, target: GroupState, why: Why) -> None:
    """Kafka: GroupMetadataTest's test…To…Transition and test…To…IllegalTransition, all pairs of states with all reasons."""
    if Transition(source, target, why) in TRANSITIONS:
        check_transition(source, target, why)
    else:
        with pytest.raises(IllegalTransition) as refused:
            check_transition(source, target, why)
        assert (refused.value.source, refused.value.target, refused.value.why) == (source, target, why)


def test_the_table_has_kafkas_ways_and_no_other() -> None:
    """Kafka: testCanRebalanceWhen{Stable,CompletingRebalance}, testCannotRebalanceWhen{PreparingRebalance,Dead} and similar tests."""
    assert {(row.source, row.target) for row in TRANSITIONS} == LEGAL


def test_the_table_has_no_row_twice() -> None:
    """Each reason has exactly one target, because it says what happened."""
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)
    assert {why: len({row.target for row in TRANSITIONS if row.why is why}) for why in Why} == dict.fromkeys(Why, 1)


def test_nothing_leaves_dead_and_every_other_state_can_become_empty() -> None:
    """A deleted group stays deleted; a group whose members are all gone does not get stuck."""
    nexts = {state: {row.target for row in TRANSITIONS if row.source is state} for state in GroupState}
    assert nexts[DEAD] == set()
    for state in (PREPARING, COMPLETING, STABLE):
        reached = {state}
        for _ in GroupState:
            reached |= set().union(*(nexts[each] for each in reached))
        assert EMPTY in reached


# ---- the vote


def member(name: str, *protocols: str) -> Member:
    return Member(name, None, name, 10_000, 60_000, None, tuple((protocol, {}) for protocol in protocols))


def test_the_vote_is_for_the_first_protocol_that_all_support() -> None:
    """Kafka: testSelectProtocol, testSelectProtocolChoosesCompatibleProtocol, testVoteForPreferredProtocol."""
    assert vote([member("a", "range", "sticky")], "a") == "range"
    assert vote([member("a", "range", "sticky"), member("b", "sticky", "range"), member("c", "sticky", "range")], "a") == "sticky"
    assert vote([member("a", "range", "sticky"), member("b", "mine", "sticky")], "a") == "sticky"


@pytest.mark.parametrize("leader", ["a", "b"])
def test_an_even_vote_is_decided_by_the_leaders_order(leader: str) -> None:
    """In Kafka, the order of a hash map decides."""
    members = [member("a", "range", "sticky"), member("b", "sticky", "range")]
    assert vote(members, leader) == {"a": "range", "b": "sticky"}[leader]


def test_an_even_vote_is_decided_between_the_tied_only() -> None:
    """The leader's first choice counts only if no other protocol has more votes."""
    members = [member("leader", "mine", "a", "b"), *(member(f"a{n}", "a", "b", "mine") for n in range(2)),
               *(member(f"b{n}", "b", "a", "mine") for n in range(2))]  # fmt: skip
    assert vote(members, "leader") == "a"


names = st.permutations(["range", "sticky", "cooperative-sticky", "mine"]).flatmap(
    lambda order: st.integers(1, 4).map(lambda count: tuple(order[:count]))
)


@given(st.lists(names, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_vote_depends_on_nothing_but_the_lists_and_the_leader(lists: list[tuple[str, ...]], chance: object) -> None:
    """The order of the members does not matter. All members support the winner, and no protocol has more votes."""
    members = [member(str(number), "common", *protocols) if number % 2 else member(str(number), *protocols, "common")
               for number, protocols in enumerate(lists)]  # fmt: skip
    won = vote(members, "0")
    shuffled = list(members)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert vote(shuffled, "0") == won
    common = set.intersection(*({name for name, _ in each.protocols} for each in members))
    assert won in common
    votes = Counter(next(name for name, _ in each.protocols if name in common) for each in members)
    assert votes[won] == max(votes.values())


@pytest.mark.parametrize(
    ("metadata", "topics"),
    [
        ({"topics": ["a", "b"]}, {"a", "b"}),
        ({"topics": ("a",)}, {"a"}),
        ({"topics": []}, set()),
        ({"topics": "abc"}, set()),
        ({"topics": [1, "a", None]}, {"a"}),
        ({}, set()),
        (None, set()),
        ("topics", set()),
    ],
)
def test_topics_are_read_from_metadata_of_our_form_only(metadata: object, topics: set[str]) -> None:
    """Kafka: testSubscribedTopics(NonConsumerGroup). Metadata belongs to the assignor and may be anything."""
    assert topics_of(metadata) == topics


# ---- the machine without a database


def request(name: str, **changes: object) -> JoinRequest:
    values: dict[str, object] = {"member_id": "", "instance_id": name, "client_id": name, "protocols": (("range", {"topics": ["t"]}),)}
    return JoinRequest(**{**values, **changes})  # type: ignore[arg-type]


def group(**config: int | None) -> Group:
    return Group("departures", GroupConfig(**{"initial_rebalance_delay_ms": 0, **config}), itertools.count(1).__next__)  # type: ignore[arg-type]


def test_a_group_takes_its_generations_from_outside() -> None:
    """Kafka: testInitNextGeneration, testInitNextGenerationEmptyGroup. One when a join phase ends, and one when the group becomes empty."""
    it = group()
    joined = it.join(request("a"), "a-1")
    assert joined is not None
    assert (joined.generation, joined.protocol, it.state) == (1, "range", COMPLETING)
    assert it.sync("a-1", "a", 1, "range", {"a-1": 7}) == 7
    it.members["a-1"].expired = True
    it.run_due()
    assert (it.generation, it.protocol, it.leader, it.state) == (2, None, None, EMPTY)


def test_the_timers_say_what_the_database_is_to_do() -> None:
    """The machine does not know the time: it keeps a timer, starts it with a duration, or stops it."""
    it = group(initial_rebalance_delay_ms=3000)
    assert it.join(request("a", rebalance_timeout_ms=50_000), "a-1") is None
    assert (it.deadline.ms, it.initial.ms) == (50_000, 3000)
    it.initial.passed = True
    it.run_due()
    assert it.state is COMPLETING
    assert (it.initial.running, it.initial.ms) == (False, None)
    it.sync("a-1", "a", 1, "range", {})
    assert (it.deadline.running, it.deadline.changed, it.deadline.ms) == (False, True, None)


def test_what_is_due_is_run_in_the_order_of_its_causes() -> None:
    """One call removes members that did not sync and members whose sessions ended. The group becomes empty, and each change is recorded."""
    it = group(initial_rebalance_delay_ms=3000)
    for name in "ab":
        it.join(request(name), f"{name}-1")
    it.initial.passed = True
    it.run_due()
    it.members["a-1"].expired = True
    it.members["b-1"].expired = True
    it.deadline.passed = True
    it.moves.clear()
    it.run_due()
    assert it.moves == [Transition(COMPLETING, PREPARING, Why.SESSION_EXPIRES), Transition(PREPARING, EMPTY, Why.NOBODY_LEFT)]


# ---- errors

KINDS = {
    errors.UnknownMemberId: Fenced,
    errors.IllegalGeneration: Fenced,
    errors.FencedInstanceId: Fenced,
    errors.RebalanceInProgress: Unavailable,
    errors.MemberIdRequired: Refused,
    errors.InconsistentGroupProtocol: Refused,
    errors.GroupMaxSizeReached: Refused,
    errors.InvalidSessionTimeout: Refused,
    errors.NonEmptyGroup: Refused,
    errors.GroupIdNotFound: Refused,
    errors.GroupSubscribedToTopic: Refused,
    errors.OffsetHasResults: Refused,
}


def test_every_error_of_the_protocol_is_of_the_kind_that_a_client_acts_on() -> None:
    """Fenced: the member has lost what it held. Unavailable: it should join again. Refused: someone has to change something."""
    assert set(KINDS) == set(errors.GroupError.__subclasses__())
    for cls, kind in KINDS.items():
        assert issubclass(cls, kind), cls
    assert [cls.__name__ for cls in KINDS if cls.retriable] == ["RebalanceInProgress"]


def test_the_errors_have_kafkas_names() -> None:
    """Only `OffsetHasResults` has none, because Kafka knows no results."""
    spelled = {cls: "".join("_" + char if char.isupper() else char for char in cls.__name__).strip("_").upper() for cls in KINDS}
    assert {cls: cls.kafka_name for cls in KINDS} == {**spelled, errors.OffsetHasResults: None}
