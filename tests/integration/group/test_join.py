"""JoinGroup, as Kafka's GroupCoordinatorTest and GroupMetadataManagerTest describe it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.integration.group.players import AT_ONCE, Player, Scene

from tidemark.errors import BadInput
from tidemark.group.coordinator import GroupConfig
from tidemark.group.errors import (
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidSessionTimeout,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMemberId,
)
from tidemark.group.states import GroupState

TWO = GroupConfig(initial_rebalance_delay_ms=0, max_size=2)

# ---- who may join


def test_a_lone_member_leads_a_group_of_one(scene: Scene) -> None:
    """Kafka: testValidJoinGroup, testNewMemberTimeoutCompletion. It is the leader and knows all members."""
    a = scene.player("a")
    joined = a.join()
    assert joined is not None
    assert (joined.leader, joined.protocol, list(joined.members), joined.skip_assignment) == (a.member_id, "range", [a.member_id], False)
    assert joined.members[a.member_id].metadata == {"topics": ["flights"]}
    assert a.member_id.startswith("a-")
    assert (scene.state, scene.leader) == (GroupState.COMPLETING_REBALANCE, a.member_id)


def test_a_dynamic_member_is_given_an_id_before_it_may_join(scene: Scene) -> None:
    """Kafka: KIP-394. Each JoinGroup without an id gets a different one, and none of them starts a rebalance."""
    a = scene.player("a")
    ids = []
    for _ in range(2):
        with pytest.raises(MemberIdRequired) as required:
            a.coordinator.join(a.request())
        ids.append(required.value.member_id)
    assert len(set(ids)) == 2
    assert (scene.state, scene.members()) == (GroupState.EMPTY, [])


def test_an_id_that_nobody_gave_out_makes_no_group(scene: Scene) -> None:
    """Kafka: testJoinGroupUnknownConsumerNewGroup."""
    a = scene.player("a")
    a.member_id = "made-up"
    with pytest.raises(UnknownMemberId):
        a.join()
    assert scene.state is None


@pytest.mark.parametrize("stable", [False, True], ids=["empty", "stable"])
def test_an_id_that_nobody_gave_out_does_not_join(scene: Scene, stable: bool) -> None:
    """Kafka: testJoinGroupUnknownConsumerExistingGroup."""
    a, forger = scene.player("a"), scene.player("forger")
    if stable:
        scene.start(a)
    else:
        a.ask_for_id()
    forger.member_id = "made-up"
    with pytest.raises(UnknownMemberId):
        forger.join()
    assert "forger" not in scene.members()


@pytest.mark.parametrize("timeout_ms", [5_999, 1_800_001], ids=["too small", "too large"])
def test_a_session_timeout_outside_of_the_limits_is_refused(scene: Scene, timeout_ms: int) -> None:
    """Kafka: testJoinGroupSessionTimeoutTooSmall, testJoinGroupSessionTimeoutTooLarge."""
    with pytest.raises(InvalidSessionTimeout) as refused:
        scene.player("a", session_ms=timeout_ms).join()
    assert (refused.value.min_ms, refused.value.max_ms) == (6_000, 1_800_000)
    assert scene.state is None


@pytest.mark.parametrize("timeout_ms", [6_000, 1_800_000])
def test_the_limits_of_the_session_timeout_are_allowed(scene: Scene, timeout_ms: int) -> None:
    """The counterpart of the previous test: the range includes its limits."""
    assert scene.player("a", session_ms=timeout_ms).join() is not None


def test_a_member_without_an_assignor_is_refused(scene: Scene) -> None:
    """Kafka: testJoinGroupWithEmptyGroupProtocol."""
    with pytest.raises(InconsistentGroupProtocol):
        scene.player("a", ()).join()
    assert scene.members() == []


def test_a_member_that_shares_no_assignor_with_all_others_is_refused(scene: Scene) -> None:
    """Kafka: testJoinGroupInconsistentGroupProtocol. The group is not disturbed."""
    a, b, c = scene.player("a", ("range", "sticky")), scene.player("b", ("range",)), scene.player("c", ("sticky",))
    scene.start(a, b)
    with pytest.raises(InconsistentGroupProtocol) as refused:
        c.join()
    assert (refused.value.offered, refused.value.supported) == ("sticky", "range")
    assert scene.state == GroupState.STABLE


def test_a_member_that_rejoins_without_a_common_assignor_is_refused(scene: Scene) -> None:
    """Kafka: testJoinGroupSecondJoinInconsistentProtocol. This includes the only member: a group changes its assignor in two rounds."""
    a = scene.player("a", ("range",))
    scene.start(a)
    a.protocols = (("sticky", {"topics": ["flights"]}),)
    with pytest.raises(InconsistentGroupProtocol):
        a.join()
    a.protocols = (("sticky", {"topics": ["flights"]}), ("range", {"topics": ["flights"]}))
    joined = a.join()
    assert joined is not None
    assert joined.protocol == "sticky"


@pytest.mark.parametrize(
    "metadata", [{"topics": [float("nan")]}, {"topics": ["a\0b"]}, {"topics": {"a set"}}], ids=["NaN", "U+0000", "no JSON"]
)  # fmt: skip
def test_metadata_that_postgres_cannot_store_is_refused(scene: Scene, metadata: object) -> None:
    """The error comes at once and names the protocol. It does not come from the database in the middle of a transaction."""
    with pytest.raises(BadInput, match="metadata of the protocol range"):
        scene.player("a", {"range": metadata}, instance="i").join()


@pytest.mark.parametrize("change", [{"rebalance_ms": 0}, {"instance": ""}, {"instance": "a\0b"}, {"expected": 0}])
def test_a_request_that_makes_no_sense_is_refused(scene: Scene, change: dict[str, object]) -> None:
    """Kafka's clients check these before they send."""
    with pytest.raises(BadInput):
        scene.player("a", **change).join()  # type: ignore[arg-type]
    assert scene.state is None


# ---- group size


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_full_group_takes_nobody_else(scene: Scene, static: bool) -> None:
    """Kafka: test{Dynamic,Static}MembersJoinGroupWithMaxSize, testJoinGroupShouldReceiveErrorIfGroupOverMaxSize.

    The group has exactly as many members as it may have. They may rejoin although it is full.
    """
    a, b, c = (scene.player(name, instance=f"i-{name}" if static else None) for name in "abc")
    for player in (a, b, c):
        player.coordinator = scene.coordinator(config=GroupConfig(max_size=2))
    assert (a.join(), b.join()) == (None, None)
    with pytest.raises(GroupMaxSizeReached):
        c.join()
    scene.pass_initial_delay()
    assert a.joined() is not None
    assert b.joined() is not None
    with pytest.raises(GroupMaxSizeReached):
        c.join()
    assert b.join() is not None
    scene.finish_sync(a, b)
    with pytest.raises(GroupMaxSizeReached):
        c.join()
    assert (scene.members(), scene.state) == (["a", "b"], GroupState.STABLE)


def test_ids_are_given_out_beyond_the_size_but_only_so_many_join(scene: Scene) -> None:
    """Kafka: testDynamicMembersJoinGroupWithMaxSizeAndRequiredKnownMember. The limit counts members, not ids that were given out."""
    players = [scene.player(name, config=GroupConfig(max_size=2)) for name in "abcd"]
    for player in players:
        player.ask_for_id()
    assert [player.join() for player in players[:2]] == [None, None]
    for player in players[2:]:
        with pytest.raises(GroupMaxSizeReached):
            player.join()
    assert scene.members() == ["a", "b"]


def test_all_members_of_a_full_group_may_join_again(scene: Scene) -> None:
    """Kafka: testDynamicMembersCanReJoinGroupWithMaxSizeWhileRebalancing."""
    a, b = scene.player("a", config=TWO), scene.player("b", config=TWO)
    scene.start(a, b)
    for player in (a, b):
        player.coordinator = scene.coordinator(config=TWO)
    a.join()
    a.join()
    b.join()
    scene.finish_join(a, b)


def test_when_the_size_was_lowered_the_last_to_rejoin_are_put_out(scene: Scene) -> None:
    """Kafka: testLastJoiningMembersAreKickedOutWhenReJoiningGroupWithMaxSize."""
    players = [scene.player(name) for name in "abcd"]
    scene.start(*players)
    for player in players:
        player.coordinator = scene.coordinator(config=TWO)
    assert players[0].join() is None
    assert players[1].join() is None
    assert players[0].join() is None, "it is among the first already"
    for player in players[2:]:
        with pytest.raises(GroupMaxSizeReached):
            player.join()
    scene.finish_join(*players[:2])
    assert scene.members() == ["a", "b"]


def test_a_static_members_next_process_gets_its_seat_in_a_full_group(scene: Scene) -> None:
    """Kafka's classic groups differ (KAFKA-20601 for the new ones): there, a retried task would be refused because of its own zombie."""
    a, b = scene.player("a", instance="i-a"), scene.player("b", instance="i-b")
    scene.start(a, b)
    again = scene.player("again", instance="i-b", config=TWO)
    assert again.join() is not None
    assert (scene.members(), scene.state) == (["a", "again"], GroupState.STABLE)


# ---- the initial rebalance delay


def test_the_first_join_phase_waits_for_the_initial_delay(scene: Scene) -> None:
    """Kafka: shouldDelayInitialRebalanceByGroupInitialRebalanceDelayOnEmptyGroup; the delay is 3 s."""
    a = scene.player("a", config=GroupConfig())
    assert a.join() is None
    assert a.joined() is None
    assert 2.5 < scene.of_group("extract(epoch FROM initial_until - state_since)::float") <= 3.01
    scene.pass_initial_delay()
    assert a.joined() is not None


def test_a_new_member_starts_the_initial_delay_again(scene: Scene) -> None:
    """Kafka: shouldResetRebalanceDelayWhenNewMemberJoinsGroupInInitialRebalance."""
    a, b = scene.player("a", config=GroupConfig()), scene.player("b", config=GroupConfig())
    a.join()
    before = scene.of_group("initial_until")
    scene.sql("UPDATE tidemark.consumer_group SET initial_until = initial_until - interval '2 s' WHERE name = %s", scene.group)
    assert b.join() is None
    assert scene.of_group("initial_until") > before
    a.join()  # a known member does not restart it
    assert scene.of_group("initial_until <= clock_timestamp() + interval '3 s'")
    scene.pass_initial_delay()
    scene.finish_join(a, b)


def test_the_initial_delay_ends_with_the_rebalance_timeout(scene: Scene) -> None:
    """Kafka: shouldDelayRebalanceUptoRebalanceTimeout. The number of new members does not matter."""
    players = [scene.player(name, rebalance_ms=1_000, config=GroupConfig()) for name in "abc"]
    for player in players:
        assert player.join() is None
    assert scene.of_group("initial_until = deadline")
    scene.pass_deadline()
    scene.finish_join(*players)


def test_a_group_goes_on_as_soon_as_those_it_expects_are_there(scene: Scene) -> None:
    """A run knows how many members it started. When the last of them has joined, there is nothing to wait for."""
    players = [scene.player(name, expected=3, config=GroupConfig()) for name in "abc"]
    assert [player.join() for player in players[:2]] == [None, None]
    assert players[2].join() is not None
    scene.finish_join(*players)


def test_a_group_does_not_wait_without_end_for_expected_members(scene: Scene) -> None:
    """The initial delay ends as usual; a member that joins later makes the group rebalance."""
    a, b = (scene.player(name, expected=5, config=GroupConfig()) for name in "ab")
    assert a.join() is None
    scene.pass_initial_delay()
    assert a.joined() is not None
    a.assign()
    b.join()
    scene.rebalance(a, b)


def test_a_group_that_was_used_before_has_its_initial_delay_again(scene: Scene) -> None:
    """As in Kafka's newer coordinator, the delay applies whenever the group was empty. The older one only delays the first generation."""
    a, b = scene.player("a"), scene.player("b", config=GroupConfig())
    scene.start(a)
    a.leave()
    assert scene.state == GroupState.EMPTY
    assert b.join() is None
    assert scene.of_group("initial_until IS NOT NULL")


# ---- members that rejoin


def test_a_follower_that_has_not_changed_does_not_disturb_the_group(scene: Scene) -> None:
    """Kafka: testJoinGroupFromUnchangedFollowerDoesNotRebalance, testJoinGroupExistingMemberDoesNotTriggerRebalanceInStableState."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    before = scene.generation
    joined = b.join()
    assert joined is not None
    assert (joined.generation, joined.leader, dict(joined.members)) == (before, a.member_id, {})
    assert scene.state == GroupState.STABLE


def test_the_leader_that_joins_again_has_the_group_rebalance(scene: Scene) -> None:
    """Kafka: testJoinGroupFromUnchangedLeaderShouldRebalance, testJoinGroupAsExistingLeaderTriggersRebalanceInStableState."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    assert a.join("topics changed") is None
    assert scene.state == GroupState.PREPARING_REBALANCE
    assert scene.of_group("rebalance_reason") == "the leader rejoins: topics changed"
    with pytest.raises(RebalanceInProgress):
        b.heartbeat()
    scene.rebalance(a, b)


def test_a_follower_with_other_metadata_has_the_group_rebalance(scene: Scene) -> None:
    """Kafka: testJoinGroupAsExistingMemberWithUpdatedMetadataTriggersRebalanceInStableState. The leader gets the new metadata."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    b.protocols = (("range", {"topics": ["flights", "delays"]}), b.protocols[1])
    assert b.join() is None
    joined = a.join()
    assert joined is not None
    assert joined.members[b.member_id].metadata == {"topics": ["flights", "delays"]}


@pytest.mark.parametrize("name", ["a", "b"], ids=["leader", "follower"])
def test_a_member_whose_answer_was_lost_gets_it_again(scene: Scene, name: str) -> None:
    """Kafka: a JoinGroup in CompletingRebalance with the same metadata gets the current generation and does not disturb the group."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    a.join()
    b.join()
    scene.finish_join(a, b)
    player = {"a": a, "b": b}[name]
    before = player.answer
    assert player.join() == before
    assert scene.state == GroupState.COMPLETING_REBALANCE


def test_a_member_that_has_changed_before_the_sync_has_the_group_rebalance_again(scene: Scene) -> None:
    """Kafka: testJoinGroupExistingMemberUpdatedMetadataTriggersRebalance."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    a.join()
    b.join()
    scene.finish_join(a, b)
    b.protocols = (("range", {"topics": []}), ("sticky", {"topics": []}))
    assert b.join() is None
    assert scene.state == GroupState.PREPARING_REBALANCE
    with pytest.raises(RebalanceInProgress):
        a.assign()


def test_joining_again_while_the_others_join_takes_over_what_is_said_last(scene: Scene) -> None:
    """Kafka: the JoinGroup of a known member in PreparingRebalance updates the member and is parked."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    assert a.join() is None
    a.protocols = (("range", {"topics": ["delays"]}),)
    assert a.join() is None
    b.join()
    joined = a.joined()
    assert joined is not None
    assert joined.members[a.member_id].metadata == {"topics": ["delays"]}


def test_every_rebalance_has_a_greater_generation(scene: Scene) -> None:
    """Kafka: testGenerationIdIncrementsOnRebalance. Here, they come from one sequence for the whole database, and are never used twice."""
    a = scene.player("a")
    seen = []
    for _ in range(3):
        joined = a.join()
        assert joined is not None
        seen.append(joined.generation)
        a.assign()
    a.leave()
    seen.append(scene.generation)  # an empty group gets a new one too: testInitNextGenerationEmptyGroup
    assert all(one < two for one, two in pairwise(seen))


def test_the_protocol_is_the_one_most_members_want(scene: Scene) -> None:
    """Kafka: testSelectProtocol. Only protocols that all members support can get votes."""
    a, b, c = scene.player("a", ("range", "sticky")), scene.player("b", ("sticky", "range")), scene.player("c", ("mine", "sticky", "range"))
    scene.start(a, b, c)
    assert {player.protocol for player in (a, b, c)} == {"sticky"}


@pytest.mark.parametrize(("first", "second"), [("range", "sticky"), ("sticky", "range")])
def test_where_the_vote_is_even_the_leader_decides(scene: Scene, first: str, second: str) -> None:
    """Kafka leaves this undefined (the order of a hash map)."""
    a, b = scene.player("a", (first, second)), scene.player("b", (second, first))
    scene.start(a, b)
    assert (scene.leader, scene.of_group("protocol")) == (a.member_id, first)


def test_members_are_listed_to_the_leader_in_the_order_in_which_they_came(scene: Scene) -> None:
    """Static members have their instance id. Assignors sort the members themselves."""
    players = [scene.player("c"), scene.player("a", instance="i-1"), scene.player("b")]
    scene.start(*players)
    answer = players[0].answer
    assert answer is not None
    assert list(answer.members) == [player.member_id for player in players]
    assert [member.instance_id for member in answer.members.values()] == [None, "i-1", None]


# ---- members that do not come back


def test_dynamic_members_that_have_not_rejoined_in_time_are_removed(scene: Scene) -> None:
    """Kafka: testCompleteJoinRemoveNotYetRejoinedDynamicMembers. Heartbeats alone do not save them."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b, c)
    a.join()
    b.join()
    with pytest.raises(RebalanceInProgress):
        c.heartbeat()
    assert a.joined() is None
    scene.pass_deadline()
    scene.finish_join(a, b)
    assert scene.members() == ["a", "b"]
    with pytest.raises(UnknownMemberId):
        c.heartbeat()


def test_a_leader_that_does_not_rejoin_is_followed_by_one_that_did(scene: Scene) -> None:
    """Kafka: testLeaderFailToRejoinBeforeFinalRebalanceTimeoutWithLongSessionTimeout."""
    a, b, c = (scene.player(name, session_ms=1_000_000) for name in "abc")
    scene.start(a, b, c)
    b.protocols = (*b.protocols, ("mine", {}))
    b.join()
    c.protocols = (*c.protocols, ("mine", {}))
    c.join()
    scene.pass_deadline()
    scene.finish_join(b, c)
    assert (scene.leader, scene.members()) == (b.member_id, ["b", "c"])
    with pytest.raises(UnknownMemberId):
        a.join()


def test_a_leader_that_rejoins_in_time_still_leads(scene: Scene) -> None:
    """Kafka: testLeaderRejoinBeforeFinalRebalanceTimeoutWithLongSessionTimeout, testMaybeElectNewJoinedLeaderChooseExisting."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    assert c.join() is None
    assert b.join() is None
    assert a.join() is not None
    scene.finish_join(b, c)
    assert scene.leader == a.member_id


def test_the_rebalance_timeout_is_that_of_the_most_patient_member(scene: Scene) -> None:
    """Kafka: the maximum over the members, both for the join phase and for the SyncGroups."""
    a, b = scene.player("a", rebalance_ms=20_000), scene.player("b", rebalance_ms=90_000)
    scene.start(a, b)
    a.join()
    assert 89 < scene.of_group("extract(epoch FROM deadline - clock_timestamp())::float") <= 90
    b.join()
    assert scene.state == GroupState.COMPLETING_REBALANCE
    assert 89 < scene.of_group("extract(epoch FROM deadline - clock_timestamp())::float") <= 90


def test_the_group_goes_on_without_a_static_member_that_does_not_rejoin(scene: Scene) -> None:
    """Kafka: testRebalanceCompletesBeforeMemberJoins. It stays a member until its session ends; its heartbeats have an old generation."""
    a, b = scene.player("a", instance="i-a"), scene.player("b")
    scene.start(a)
    old = a.generation
    b.join()
    with pytest.raises(RebalanceInProgress):
        a.heartbeat()
    scene.pass_deadline()
    joined = b.joined()
    assert joined is not None
    assert joined.leader == b.member_id
    assert scene.members() == ["a", "b"]
    with pytest.raises(IllegalGeneration) as fenced:
        a.heartbeat()
    assert (fenced.value.generation, fenced.value.current) == (old, b.generation)
    scene.expire(a)
    with pytest.raises(RebalanceInProgress):
        b.heartbeat()
    scene.rebalance(b)
    assert scene.members() == ["b"]


def test_a_new_member_that_no_longer_asks_is_removed(scene: Scene) -> None:
    """Kafka: testNewMemberJoinExpiration (there after 5 min, because a parked request is silent; here, a parked member repeats its
    request)."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    assert b.join() is None
    scene.expire(b)
    with pytest.raises(RebalanceInProgress):
        a.heartbeat()
    assert scene.members() == ["a"]
    scene.rebalance(a)


def test_a_member_that_waits_in_join_is_heard_of_whenever_it_asks(scene: Scene) -> None:
    """Kafka: testHasHeartbeatSatisfied. A parked member does not lose its session, however long the others take."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.join()
    for _ in range(4):
        scene.age(a, b, ms=9_000)
        with pytest.raises(RebalanceInProgress):
            a.heartbeat()
        assert b.joined() is None
    assert scene.members() == ["a", "b"]


@pytest.mark.parametrize("synced", [False, True], ids=["after the join", "after the sync"])
def test_a_new_member_that_dies_is_removed_after_its_session(scene: Scene, synced: bool) -> None:
    """Kafka: testNewMemberFailureAfterJoinGroupCompletion, testNewMemberFailureAfterSyncGroupCompletion."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.join()
    a.join()
    scene.finish_join(a, b)
    if synced:
        scene.finish_sync(a, b)
    scene.expire(b)
    with pytest.raises(RebalanceInProgress):
        a.heartbeat()
    scene.rebalance(a)
    assert scene.members() == ["a"]


def test_a_group_whose_members_all_died_is_empty(scene: Scene) -> None:
    """Kafka: testCompleteJoinPhaseInEmptyStateSkipsRebalance. The next caller finds the group empty."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    before = scene.generation
    scene.expire(a, b)
    assert scene.tick() == GroupState.EMPTY
    assert scene.generation > before
    assert (scene.leader, scene.of_group("protocol"), scene.members()) == (None, None, [])


def test_static_members_that_all_stay_away_keep_the_join_phase_open(scene: Scene) -> None:
    """Kafka: groupStuckInRebalanceTimeoutDueToNonjoinedStaticMember, testCompleteJoinPhaseNoMembersRejoinedExtendsJoinPhase."""
    a, b = scene.player("a", instance="i-a"), scene.player("b", instance="i-b")
    c = scene.player("c")
    scene.start(a, b, c)
    c.leave()
    for _ in range(2):
        scene.pass_deadline()
        assert scene.tick() == GroupState.PREPARING_REBALANCE
        assert scene.of_group("deadline > clock_timestamp() + interval '50 s'")
    assert a.join() is None
    scene.pass_deadline()
    assert a.joined() is not None
    assert (scene.leader, scene.members()) == (a.member_id, ["a", "b"])


# ---- ids that were given out


def test_an_id_that_was_given_out_does_not_disturb_a_stable_group(scene: Scene) -> None:
    """Kafka: testSecondMemberPartiallyJoinAndTimeout, testHeartbeatExpirationShouldRemovePendingMember."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.ask_for_id()
    a.heartbeat()
    scene.expire(b)
    a.heartbeat()
    assert scene.state == GroupState.STABLE
    with pytest.raises(UnknownMemberId):
        b.join()


def test_a_join_phase_waits_for_ids_that_were_given_out(scene: Scene) -> None:
    """Kafka: testJoinGroupCompletionWhenPendingMemberJoins."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    c.ask_for_id()
    assert (a.join(), b.join()) == (None, None)
    assert c.join() is not None
    scene.finish_join(a, b, c)


def test_a_join_phase_goes_on_when_such_an_id_has_expired(scene: Scene) -> None:
    """Kafka: testJoinGroupCompletionWhenPendingMemberTimesOut."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    c.ask_for_id()
    assert (a.join(), b.join()) == (None, None)
    scene.expire(c)
    scene.finish_join(a, b)


def test_a_join_phase_goes_on_when_such_an_id_leaves(scene: Scene) -> None:
    """Kafka: testPendingMembersLeavesGroup."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    c.ask_for_id()
    assert (a.join(), b.join()) == (None, None)
    assert c.leave() is None
    scene.finish_join(a, b)


def test_an_id_that_was_given_to_a_dynamic_member_is_no_static_members(scene: Scene) -> None:
    """Kafka: testJoinGroupExistingPendingMemberWithGroupInstanceIdThrowsException (an internal error there)."""
    a = scene.player("a")
    a.ask_for_id()
    a.instance_id = "i-a"
    with pytest.raises(UnknownMemberId):
        a.join()


def test_a_group_without_members_is_empty_whatever_ids_were_given_out(scene: Scene) -> None:
    """Kafka: the join phase of a group without members has a timeout of 0. A process with an id joins the empty group."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.ask_for_id()
    a.leave()
    assert scene.state == GroupState.EMPTY
    assert b.join() is not None


@pytest.mark.parametrize("request_name", ["heartbeat", "sync", "joined"])
def test_an_id_that_was_given_out_is_no_member_yet(scene: Scene, request_name: str) -> None:
    """Kafka: a pending member is in no generation, and only JoinGroup and LeaveGroup accept it."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.ask_for_id()
    b.generation = a.generation
    with pytest.raises(UnknownMemberId):
        getattr(b, request_name)()


def test_the_first_join_phase_does_not_wait_for_ids(scene: Scene) -> None:
    """As in Kafka, only the clock ends the initial delay. A process that joins with its id later makes the group rebalance."""
    a, b = scene.player("a", config=GroupConfig()), scene.player("b", config=GroupConfig())
    a.join()
    b.ask_for_id()
    scene.pass_initial_delay()
    assert a.joined() is not None
    a.coordinator = b.coordinator = scene.coordinator(config=AT_ONCE)
    assert b.join() is None
    scene.rebalance(b, a)


def parked(player: Player) -> bool:
    return player.answer is None


def test_a_parked_member_that_missed_its_generation_is_told_to_join_again(scene: Scene) -> None:
    """Kafka answers the parked JoinGroup, and the SyncGroup that follows gets REBALANCE_IN_PROGRESS; here, the next `joined` gets it."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a)
    b.join()
    assert parked(b)
    a.join()  # ends the join phase: b's answer is ready
    c.join()  # starts the next join phase
    with pytest.raises(RebalanceInProgress):
        b.joined()
    b.join()
    a.join()
    scene.finish_join(a, b, c)
