"""JoinGroup, as Kafka's GroupCoordinatorTest and GroupMetadataManagerTest describe it."""

from __future__ import annotations

import pytest
from tests.integration.group.players import AT_ONCE, Scene

from tidemark.errors import BadInput
from tidemark.group.errors import (
    GroupMaxSizeReached,
    InconsistentGroupProtocol,
    InvalidSessionTimeout,
    RebalanceInProgress,
    UnknownMemberId,
)
from tidemark.group.requests import GroupConfig
from tidemark.group.states import GroupState

TWO = GroupConfig(initial_rebalance_delay_ms=0, max_size=2)

# ---- who may join


def test_a_lone_member_leads_a_group_of_one(scene: Scene) -> None:
    """Kafka: testValidJoinGroup, testNewMemberTimeoutCompletion. It is the leader and knows all members."""
    a = scene.player("a")
    joined = a.join()
    assert (joined.leader, joined.protocol, list(joined.members), joined.skip_assignment) == (a.member_id, "range", [a.member_id], False)
    assert joined.members[a.member_id].metadata == {"topics": ["flights"]}
    assert a.member_id.startswith("a-")
    assert (scene.state, scene.leader) == (GroupState.COMPLETING_REBALANCE, a.member_id)


def test_each_first_request_of_a_dynamic_member_gets_another_id(scene: Scene) -> None:
    """Kafka: KIP-394. None of the requests starts a rebalance."""
    a = scene.player("a")
    assert a.ask_for_id() != scene.player("a").ask_for_id()
    assert (scene.state, scene.members()) == (GroupState.EMPTY, [])


def test_a_session_timeout_must_be_within_the_limits(scene: Scene) -> None:
    """Kafka: testJoinGroupSessionTimeoutTooSmall, testJoinGroupSessionTimeoutTooLarge. The range includes its limits."""
    for timeout_ms in (5_999, 1_800_001):
        with pytest.raises(InvalidSessionTimeout) as refused:
            scene.player("a", session_ms=timeout_ms).join()
        assert (refused.value.min_ms, refused.value.max_ms) == (6_000, 1_800_000)
    assert scene.state is None
    for timeout_ms in (6_000, 1_800_000):
        scene.player("a", session_ms=timeout_ms).ask_for_id()


def test_a_member_that_shares_no_assignor_with_all_others_is_refused(scene: Scene) -> None:
    """Kafka: testJoinGroupInconsistentGroupProtocol, testJoinGroupWithEmptyGroupProtocol. The group is not disturbed."""
    with pytest.raises(InconsistentGroupProtocol):
        scene.player("a", ()).join()
    a, b = scene.player("a", ("range", "sticky")), scene.player("b", ("range",))
    scene.start(a, b)
    with pytest.raises(InconsistentGroupProtocol) as refused:
        scene.player("c", ("sticky",)).join()
    assert (refused.value.offered, refused.value.supported) == ("sticky", "range")
    assert (scene.state, scene.members()) == (GroupState.STABLE, ["a", "b"])


def test_a_member_that_rejoins_without_a_common_assignor_is_refused(scene: Scene) -> None:
    """Kafka: testJoinGroupSecondJoinInconsistentProtocol. This includes the only member: a group changes its assignor in two rounds."""
    a = scene.player("a", ("range",))
    scene.start(a)
    a.protocols = (("sticky", {"topics": ["flights"]}),)
    with pytest.raises(InconsistentGroupProtocol):
        a.join()
    a.protocols = (("sticky", {"topics": ["flights"]}), ("range", {"topics": ["flights"]}))
    joined = a.join()
    assert joined.protocol == "sticky"


@pytest.mark.parametrize(
    "metadata", [{"topics": [float("nan")]}, {"topics": ["a\0b"]}, {"topics": {"a set"}}], ids=["NaN", "U+0000", "no JSON"]
)  # fmt: skip
def test_metadata_that_postgres_cannot_store_is_refused(scene: Scene, metadata: object) -> None:
    """The error comes at once and names the protocol. It does not come from the database in the middle of a transaction."""
    with pytest.raises(BadInput, match="metadata of the protocol range"):
        scene.player("a", {"range": metadata}, instance="i").join()


def test_an_instance_id_that_postgres_cannot_store_is_refused(scene: Scene) -> None:
    with pytest.raises(BadInput):
        scene.player("a", instance="a\0b").join()
    assert scene.state is None


# ---- group size


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_full_group_takes_nobody_else(scene: Scene, static: bool) -> None:
    """Kafka: test{Dynamic,Static}MembersJoinGroupWithMaxSize, testJoinGroupShouldReceiveErrorIfGroupOverMaxSize. Its members may rejoin."""
    config = GroupConfig(max_size=2)
    a, b, c = (scene.player(name, instance=f"i-{name}" if static else None, config=config) for name in "abc")
    assert (a.join(), b.join()) == (None, None)
    for end in (scene.pass_initial_delay, lambda: scene.finish_join(a, b), b.join, lambda: scene.finish_sync(a, b)):
        with pytest.raises(GroupMaxSizeReached):
            c.join()
        end()
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
    """Kafka: shouldDelayInitialRebalanceByGroupInitialRebalanceDelayOnEmptyGroup; the delay is 3 s. As in Kafka's newer coordinator, it
    applies whenever the group was empty."""
    for _ in range(2):
        a = scene.player("a", config=GroupConfig())
        assert a.join() is None
        assert a.joined() is None
        assert 2.5 < scene.of_group("extract(epoch FROM initial_until - state_since)::float") <= 3.01
        scene.pass_initial_delay()
        assert a.joined() is not None
        a.leave()
        assert scene.state == GroupState.EMPTY


def test_a_new_member_starts_the_initial_delay_again(scene: Scene) -> None:
    """Kafka: shouldResetRebalanceDelayWhenNewMemberJoinsGroupInInitialRebalance."""
    a, b = scene.player("a", config=GroupConfig()), scene.player("b", config=GroupConfig())
    a.join()
    before = scene.of_group("initial_until")
    scene.sql("UPDATE tidemark.consumer_group SET initial_until = initial_until - interval '100 ms' WHERE name = %s", scene.group)
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


@pytest.mark.parametrize("came", [2, 3])
def test_a_group_goes_on_as_soon_as_those_it_expects_are_there(scene: Scene, came: int) -> None:
    """A run knows how many members it started. If some stay away, the initial delay ends as usual."""
    players = [scene.player(name, expected=3, config=GroupConfig()) for name in "abc"[:came]]
    assert [player.join() for player in players[:2]] == [None, None]
    if came < 3:
        scene.pass_initial_delay()
    else:
        assert players[2].join() is not None
    scene.finish_join(*players)


# ---- members that rejoin


def test_a_member_that_has_not_changed_gets_its_answer_again_and_does_not_disturb_the_group(scene: Scene) -> None:
    """Kafka: testJoinGroupFromUnchangedFollowerDoesNotRebalance, testJoinGroupExistingMemberDoesNotTriggerRebalanceInStableState. In
    CompletingRebalance, any member may repeat a JoinGroup whose answer was lost."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    before = scene.generation
    joined = b.join()
    assert (joined.generation, joined.leader, dict(joined.members)) == (before, a.member_id, {})
    assert scene.state == GroupState.STABLE
    a.join()
    b.join()
    scene.finish_join(a, b)
    for player in (a, b):
        answer = player.answer
        assert player.join() == answer
    assert scene.state == GroupState.COMPLETING_REBALANCE


def test_joining_again_while_the_others_join_takes_over_what_is_said_last(scene: Scene) -> None:
    """Kafka: the JoinGroup of a known member in PreparingRebalance updates the member and is parked."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    assert a.join() is None
    a.protocols = (("range", {"topics": ["delays"]}),)
    assert a.join() is None
    b.join()
    joined = a.joined()
    assert joined.members[a.member_id].metadata == {"topics": ["delays"]}


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
    assert list(answer.members) == [player.member_id for player in players]
    assert [member.instance_id for member in answer.members.values()] == [None, "i-1", None]


# ---- members that do not come back


def test_at_the_deadline_the_oldest_that_has_rejoined_leads_and_dynamic_members_that_have_not_are_removed(scene: Scene) -> None:
    """Kafka: testLeaderFailToRejoinBeforeFinalRebalanceTimeoutWithLongSessionTimeout, testCompleteJoinRemoveNotYetRejoinedDynamicMembers.
    Heartbeats alone do not save them."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b, c)
    for player in (b, c):
        player.protocols = (*player.protocols, ("mine", {}))
        assert player.join() is None
    with pytest.raises(RebalanceInProgress):
        a.heartbeat()
    assert b.joined() is None
    scene.pass_deadline()
    scene.finish_join(b, c)
    assert (scene.leader, scene.members()) == (b.member_id, ["b", "c"])
    for ask in (a.heartbeat, a.join):
        with pytest.raises(UnknownMemberId):
            ask()


def test_a_join_phase_goes_on_without_members_whose_sessions_end(scene: Scene) -> None:
    """Kafka: testSessionTimeoutDuringRebalance, testNewMemberJoinExpiration (there after 5 min, because a parked request is silent; here, a
    parked member repeats its request)."""
    a, b, new = (scene.player(name) for name in ("a", "b", "new"))
    scene.start(a, b)
    assert (new.join(), a.join()) == (None, None)
    scene.expire(b, new)
    assert a.joined() is not None
    assert scene.members() == ["a"]


def test_the_rebalance_timeout_is_that_of_the_most_patient_member(scene: Scene) -> None:
    """Kafka: the maximum over the members, both for the join phase and for the SyncGroups."""
    a, b = scene.player("a", rebalance_ms=20_000), scene.player("b", rebalance_ms=90_000)
    scene.start(a, b)
    for player, state in ((a, GroupState.PREPARING_REBALANCE), (b, GroupState.COMPLETING_REBALANCE)):
        player.join()
        assert scene.state == state
        assert 60 < scene.of_group("extract(epoch FROM deadline - clock_timestamp())::float") <= 90


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


def test_an_id_that_was_given_out_is_no_member_yet_and_does_not_disturb_a_stable_group(scene: Scene) -> None:
    """Kafka: testSecondMemberPartiallyJoinAndTimeout, testHeartbeatExpirationShouldRemovePendingMember. A pending member may only send
    JoinGroup and LeaveGroup."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a)
    b.ask_for_id()
    b.generation = a.generation
    for ask in (b.heartbeat, b.sync, b.joined):
        with pytest.raises(UnknownMemberId):
            ask()
    a.heartbeat()
    scene.expire(b)
    a.heartbeat()
    assert scene.state == GroupState.STABLE
    with pytest.raises(UnknownMemberId):
        b.join()


@pytest.mark.parametrize("ending", ["joins", "expires", "leaves"])
def test_a_join_phase_waits_until_an_id_that_was_given_out(scene: Scene, ending: str) -> None:
    """Kafka: testJoinGroupCompletionWhenPendingMember{Joins,TimesOut}, testPendingMembersLeavesGroup."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    c.ask_for_id()
    assert (a.join(), b.join()) == (None, None)
    if ending == "joins":
        assert c.join() is not None
    elif ending == "expires":
        scene.expire(c)
    else:
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
