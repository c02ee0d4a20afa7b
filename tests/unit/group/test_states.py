"""The table of transitions, the vote, and the errors of the group protocol, without a database."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import Fenced, Refused, Unavailable
from tidemark.group import errors
from tidemark.group.machine import Group, MemberRow, topics_of, vote
from tidemark.group.requests import GroupConfig, JoinRequest
from tidemark.group.states import TRANSITIONS, GroupState, IllegalTransition, Transition, Why, check_transition

EMPTY, PREPARING, COMPLETING = GroupState.EMPTY, GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE
STABLE, DEAD = GroupState.STABLE, GroupState.DEAD
NEXT = {EMPTY: {PREPARING, DEAD}, PREPARING: {COMPLETING, EMPTY}, COMPLETING: {PREPARING, STABLE}, STABLE: {PREPARING}, DEAD: set()}
"""Kafka's GroupMetadata.validPreviousStates. In Kafka, any state also becomes Dead when the coordinator moves; ours does not move."""


def test_a_change_of_state_is_allowed_if_the_table_has_it() -> None:
    """Kafka: GroupMetadataTest's test…To…Transition and test…To…IllegalTransition, all pairs of states with all reasons."""
    for change in itertools.product(GroupState, GroupState, Why):
        with contextlib.nullcontext() if Transition(*change) in TRANSITIONS else pytest.raises(IllegalTransition) as refused:
            check_transition(*change)
        assert refused is None or (refused.value.source, refused.value.target, refused.value.why) == change


def test_the_table_has_kafkas_ways_and_no_other() -> None:
    """Kafka: testCanRebalanceWhen{Stable,CompletingRebalance}, testCannotRebalanceWhen{PreparingRebalance,Dead} and similar tests. Each
    reason has exactly one target, because it says what happened."""
    assert {state: {row.target for row in TRANSITIONS if row.source is state} for state in GroupState} == NEXT
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)
    assert {why: len({row.target for row in TRANSITIONS if row.why is why}) for why in Why} == dict.fromkeys(Why, 1)


# ---- the vote


def member(name: str, *protocols: str) -> MemberRow:
    return MemberRow(name, None, name, 10_000, 60_000, None, tuple((protocol, {}) for protocol in protocols))


def test_the_vote_is_for_the_first_protocol_that_all_support() -> None:
    """Kafka: testSelectProtocol, testSelectProtocolChoosesCompatibleProtocol, testVoteForPreferredProtocol."""
    a, b = member("a", "range", "sticky"), member("b", "sticky", "range")
    assert vote([a], "a") == "range"
    assert vote([a, b, member("c", "sticky", "range")], "a") == "sticky"
    assert vote([a, member("b", "mine", "sticky")], "a") == "sticky"
    assert (vote([a, b], "a"), vote([a, b], "b")) == ("range", "sticky"), "the leader decides; in Kafka, the order of a hash map"


def test_an_even_vote_is_decided_between_the_tied_only() -> None:
    """The leader's first choice counts only if no other protocol has more votes."""
    leader, ayes, bees = ("mine", "a", "b"), ("a", "b", "mine"), ("b", "a", "mine")
    members = [member(str(number), *protocols) for number, protocols in enumerate([leader, ayes, ayes, bees, bees])]
    assert vote(members, "0") == "a"


names = st.permutations(["range", "sticky", "cooperative-sticky", "mine"]).flatmap(
    lambda order: st.integers(1, 4).map(lambda count: tuple(order[:count]))
)


@given(st.lists(names, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_vote_depends_on_nothing_but_the_lists_and_the_leader(lists: list[tuple[str, ...]], chance: object) -> None:
    """The order of the members does not matter. All members support the winner, and no protocol has more votes."""
    both = [("common", *protocols) if number % 2 else (*protocols, "common") for number, protocols in enumerate(lists)]
    members = [member(str(number), *protocols) for number, protocols in enumerate(both)]
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
        ({"topics": [1, "a", None]}, {"a"}),
        *((other, set()) for other in ({"topics": []}, {"topics": "abc"}, {}, None, "topics")),
    ],
)
def test_topics_are_read_from_metadata_of_our_form_only(metadata: object, topics: set[str]) -> None:
    """Kafka: testSubscribedTopics(NonConsumerGroup). Metadata belongs to the assignor and may be anything."""
    assert topics_of(metadata) == topics


# ---- the machine without a database


def request(name: str) -> JoinRequest:
    return JoinRequest("", name, name, (("range", {"topics": ["t"]}),), rebalance_timeout_ms=50_000)


def group(delay_ms: int) -> Group:
    return Group("departures", GroupConfig(initial_rebalance_delay_ms=delay_ms), itertools.count(1).__next__)


def test_a_group_takes_its_generations_from_outside() -> None:
    """Kafka: testInitNextGeneration, testInitNextGenerationEmptyGroup. One when a join phase ends, and one when the group becomes empty."""
    it = group(delay_ms=0)
    joined = it.join(request("a"), "a-1")
    assert joined is not None
    assert (joined.generation, joined.protocol, it.state) == (1, "range", COMPLETING)
    assert it.sync("a-1", "a", 1, "range", {"a-1": 7}) == 7
    it.members["a-1"].expired = True
    it.run_due()
    assert (it.generation, it.protocol, it.leader, it.state) == (2, None, None, EMPTY)


def test_the_timers_say_what_the_database_is_to_do() -> None:
    """The machine does not know the time: it keeps a timer, starts it with a duration, or stops it."""
    it = group(delay_ms=3000)
    assert it.join(request("a"), "a-1") is None
    assert (it.deadline.ms, it.initial.ms) == (50_000, 3000)
    it.initial.passed = True
    it.run_due()
    assert it.state is COMPLETING
    assert (it.initial.running, it.initial.ms) == (False, None)
    it.sync("a-1", "a", 1, "range", {})
    assert (it.deadline.running, it.deadline.changed, it.deadline.ms) == (False, True, None)


def test_what_is_due_is_run_in_the_order_of_its_causes() -> None:
    """One call removes members that did not sync and members whose sessions ended. The group becomes empty, and each change is recorded."""
    it = group(delay_ms=3000)
    for name in "ab":
        it.join(request(name), f"{name}-1")
    it.initial.passed = True
    it.run_due()
    it.members["a-1"].expired = True
    it.members["b-1"].expired = True
    it.deadline.passed = True
    it.moves.clear()
    it.run_due()
    assert it.moves == [Transition(COMPLETING, PREPARING, Why.SESSION_EXPIRES), Transition(PREPARING, EMPTY, Why.LAST_MEMBER_LEFT)]


# ---- errors


def test_every_error_of_the_protocol_is_of_the_kind_that_a_client_acts_on() -> None:
    """Fenced: the member has lost what it held. Unavailable: it should join again. Refused: someone has to change something."""
    classes = set(errors.GroupError.__subclasses__())
    fenced = {errors.UnknownMemberId, errors.IllegalGeneration, errors.FencedInstanceId}
    assert {cls for cls in classes if issubclass(cls, Fenced)} == fenced
    assert {cls for cls in classes if issubclass(cls, Unavailable)} == {cls for cls in classes if cls.retriable}
    assert {cls for cls in classes if cls.retriable} == {errors.RebalanceInProgress}
    assert {cls for cls in classes if issubclass(cls, Refused)} == classes - fenced - {errors.RebalanceInProgress}


def test_the_errors_have_kafkas_names() -> None:
    """Only `OffsetHasResults` has none, because Kafka knows no results."""
    for cls in errors.GroupError.__subclasses__():
        spelled = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).upper()
        assert cls.kafka_name == (None if cls is errors.OffsetHasResults else spelled)
