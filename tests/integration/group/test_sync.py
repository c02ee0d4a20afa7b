"""SyncGroup, Heartbeat and the session, as Kafka's GroupCoordinatorTest describes them."""

from __future__ import annotations

import pytest
from tests.integration.group.players import Player, Scene

from tidemark.group.errors import IllegalGeneration, InconsistentGroupProtocol, RebalanceInProgress, UnknownMemberId
from tidemark.group.states import GroupState


def joined_pair(scene: Scene) -> tuple[Player, Player]:
    """Two members whose join phase is over; the first leads."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    a.join()
    b.join()
    scene.finish_join(a, b)
    return a, b


# ---- SyncGroup


def test_a_follower_that_syncs_first_waits_for_the_leader(scene: Scene) -> None:
    """Kafka: testSyncGroupLeaderAfterFollower."""
    a, b = joined_pair(scene)
    assert b.sync() is None
    assert b.sync() is None
    assert a.assign() == {"of": a.member_id, "generation": a.generation}
    assert b.sync() == {"of": b.member_id, "generation": b.generation}


def test_a_follower_that_syncs_last_gets_its_assignment_at_once(scene: Scene) -> None:
    """Kafka: testSyncGroupFollowerAfterLeader."""
    a, b = joined_pair(scene)
    a.assign()
    assert scene.state == GroupState.STABLE
    assert b.sync() == {"of": b.member_id, "generation": b.generation}


def test_sync_may_be_asked_again(scene: Scene) -> None:
    """Kafka: a SyncGroup in Stable gets the assignment; other assignments that the leader sends later are ignored."""
    a, b = joined_pair(scene)
    first = a.assign()
    assert a.sync({a.member_id: "other", b.member_id: "other"}) == first
    assert b.sync() == b.sync() == {"of": b.member_id, "generation": b.generation}


def test_only_the_leader_assigns(scene: Scene) -> None:
    """Kafka: assignments from a follower are ignored."""
    a, b = joined_pair(scene)
    assert b.sync({a.member_id: "mine", b.member_id: "mine"}) is None
    assert scene.state == GroupState.COMPLETING_REBALANCE
    a.assign()
    assert b.sync() == {"of": b.member_id, "generation": b.generation}


def test_a_leader_without_an_assignment_does_not_stand_in_anybodys_way(scene: Scene) -> None:
    """It has to ask again, and does not count as synced: the sync deadline applies to it as to the others."""
    a, b = joined_pair(scene)
    assert a.sync() is None
    assert b.sync() is None
    scene.pass_deadline()
    with pytest.raises(RebalanceInProgress):
        b.sync()
    assert scene.members() == ["b"]


def test_who_is_left_out_of_the_assignment_gets_an_empty_one(scene: Scene) -> None:
    """Kafka: testSyncGroupEmptyAssignment. Assignments for unknown members are ignored."""
    a, b = joined_pair(scene)
    assert a.sync({a.member_id: ["flights/0"], "somebody": ["flights/1"]}) == ["flights/0"]
    assert b.sync() == {}
    assert scene.state == GroupState.STABLE


def test_an_assignment_comes_back_as_it_was_given(scene: Scene) -> None:
    """It may be any JSON, because the coordinator does not interpret it."""
    a, b = joined_pair(scene)
    given = {"flights": [1, 2], "user data": {"ü": [1.5, True, None]}}
    assert a.sync({a.member_id: given, b.member_id: 7}) == given
    assert b.sync() == 7


def test_a_group_that_does_not_exist_knows_no_member(scene: Scene) -> None:
    """Kafka: testSyncGroupFromUnknownGroup, testHeartbeatUnknownGroup."""
    a = scene.player("a")
    a.member_id, a.generation = "a-1", 1
    for ask in (a.sync, a.heartbeat, a.joined):
        with pytest.raises(UnknownMemberId):
            ask()
    assert scene.state is None


def test_a_stranger_is_unknown(scene: Scene) -> None:
    """Kafka: testSyncGroupFromUnknownMember, testHeartbeatUnknownConsumerExistingGroup, testHeartbeatEmptyGroup."""
    a, stranger = scene.player("a"), scene.player("stranger")
    scene.start(a)
    stranger.member_id, stranger.generation = "made-up", a.generation
    for ask in (stranger.sync, stranger.heartbeat, stranger.joined):
        with pytest.raises(UnknownMemberId):
            ask()
    a.leave()
    with pytest.raises(UnknownMemberId):
        a.heartbeat()


@pytest.mark.parametrize("by", [-1, 1, 1_000_000])
def test_another_generation_is_refused(scene: Scene, by: int) -> None:
    """Kafka: testSyncGroupFromIllegalGeneration, testHeartbeatIllegalGeneration. This includes greater generations."""
    a, _ = joined_pair(scene)
    for ask in (a.sync, a.heartbeat):
        with pytest.raises(IllegalGeneration):
            ask(generation=a.generation + by)
    assert scene.state == GroupState.COMPLETING_REBALANCE


def test_another_protocol_is_refused(scene: Scene) -> None:
    """Kafka: testSyncGroupReturnsAnErrorWhenProtocolNameIsInconsistent, …SucceedWhenProtocolTypeAndNameAreNotProvided / …AreConsistent."""
    _, b = joined_pair(scene)
    with pytest.raises(InconsistentGroupProtocol):
        b.sync(protocol="sticky")
    assert b.sync(protocol=None) is None
    assert b.sync(protocol="range") is None


def test_who_syncs_while_the_others_join_again_is_told_so(scene: Scene) -> None:
    """Kafka: a SyncGroup in PreparingRebalance gets REBALANCE_IN_PROGRESS, even if it was parked before."""
    a, b = joined_pair(scene)
    assert b.sync() is None
    scene.player("c").join()
    for player in (a, b):
        with pytest.raises(RebalanceInProgress):
            player.sync()


def test_a_leader_that_dies_before_it_has_assigned_has_the_others_join_again(scene: Scene) -> None:
    """Kafka: testLeaderFailureInSyncGroup."""
    a, b = joined_pair(scene)
    assert b.sync() is None
    scene.expire(a)
    with pytest.raises(RebalanceInProgress):
        b.sync()
    joined = b.join()
    assert joined is not None
    assert (joined.leader, list(joined.members)) == (b.member_id, [b.member_id])


def test_an_assignment_of_an_older_generation_is_never_stored(scene: Scene) -> None:
    """A leader that takes too long to compute finds the next generation, or the join phase before it, and changes nothing."""
    a, b = joined_pair(scene)
    old, leads = a.generation, dict.fromkeys([a.member_id, b.member_id], "old")
    scene.player("c").join()
    with pytest.raises(RebalanceInProgress):
        a.sync(leads)
    a.join()
    b.join()
    with pytest.raises(IllegalGeneration):
        a.sync(leads, generation=old)
    assert scene.state == GroupState.COMPLETING_REBALANCE
    assert scene.sql("SELECT DISTINCT assignment FROM tidemark.group_member JOIN tidemark.consumer_group USING (group_id) WHERE name = %s",
                     scene.group) == [(None,)]  # fmt: skip


# ---- the sync deadline


def test_nobody_that_has_synced_is_removed_at_the_deadline(scene: Scene) -> None:
    """Kafka: testRebalanceDoesNotTimeOutWhenAllSyncAreReceived."""
    a, b = joined_pair(scene)
    a.assign()
    assert scene.of_group("deadline IS NOT NULL")
    b.sync()
    assert scene.of_group("deadline IS NULL")
    assert scene.tick() == GroupState.STABLE


@pytest.mark.parametrize("who", ["nobody", "leader", "follower"])
def test_who_has_not_synced_by_the_deadline_is_removed_even_if_it_heartbeats(scene: Scene, who: str) -> None:
    """Kafka: testRebalanceTimesOutWhenSyncRequestIsNotReceived, …FromFollowers, …FromLeaders. The deadline applies in Stable too."""
    a, b = joined_pair(scene)
    if who == "leader":
        a.assign()
    if who == "follower":
        b.sync()
    for player in (a, b):
        player.heartbeat()
    scene.pass_deadline()
    state = scene.tick()
    assert scene.members() == {"nobody": [], "leader": ["a"], "follower": ["b"]}[who]
    assert state == (GroupState.EMPTY if who == "nobody" else GroupState.PREPARING_REBALANCE)


def test_a_static_member_that_has_not_synced_is_removed_too(scene: Scene) -> None:
    """Kafka: members with a pending SyncGroup are removed, whether static or dynamic."""
    a, b = scene.player("a"), scene.player("b", instance="i-b")
    scene.start(a, b)
    a.join()
    b.join()
    scene.finish_join(a, b)
    a.assign()
    scene.pass_deadline()
    with pytest.raises(RebalanceInProgress):
        a.heartbeat()
    assert scene.members() == ["a"]
    with pytest.raises(UnknownMemberId):
        b.sync()


# ---- Heartbeat and the session


def test_heartbeats_are_fine_from_the_end_of_the_join_phase_on(scene: Scene) -> None:
    """Kafka: testValidHeartbeat. In CompletingRebalance, the answer is NONE as in Kafka's code (whose comment says otherwise)."""
    a, b = joined_pair(scene)
    a.heartbeat()
    b.heartbeat()
    scene.finish_sync(a, b)
    a.heartbeat()
    b.heartbeat()


def test_heartbeats_while_the_others_join_say_so_and_keep_the_session(scene: Scene) -> None:
    """Kafka: testHeartbeatDuringRebalanceCausesRebalanceInProgress, testHeartbeatRebalanceInProgress."""
    a, b = joined_pair(scene)
    scene.finish_sync(a, b)
    a.join()
    for _ in range(4):
        scene.age(a, b, ms=9_000)
        with pytest.raises(RebalanceInProgress):
            b.heartbeat()
        assert a.joined() is None
    assert scene.members() == ["a", "b"]


def test_heartbeats_maintain_the_session(scene: Scene) -> None:
    """Kafka: testHeartbeatMaintainsSession."""
    a = scene.player("a")
    scene.start(a)
    for _ in range(3):
        scene.age(a, ms=9_000)
        a.heartbeat()
    assert scene.state == GroupState.STABLE


def test_a_member_that_is_not_heard_of_for_its_session_timeout_is_removed(scene: Scene) -> None:
    """Kafka: testSessionTimeout. Its heartbeat comes too late even if no other call has checked the session in between."""
    a = scene.player("a")
    scene.start(a)
    scene.age(a, ms=10_000)
    with pytest.raises(UnknownMemberId):
        a.heartbeat()
    assert (scene.state, scene.members()) == (GroupState.EMPTY, [])


def test_a_session_that_ends_while_others_join_lets_them_go_on(scene: Scene) -> None:
    """Kafka: testSessionTimeoutDuringRebalance."""
    a, b = joined_pair(scene)
    scene.finish_sync(a, b)
    assert a.join() is None
    scene.expire(b)
    assert a.joined() is not None
    assert scene.members() == ["a"]


def test_heartbeats_of_an_older_generation_do_not_maintain_the_session(scene: Scene) -> None:
    """Kafka: a refused Heartbeat does not count."""
    a, b = scene.player("a", instance="i-a"), scene.player("b")
    scene.start(a)
    b.join()
    scene.pass_deadline()
    scene.finish_join(b)
    before = scene.sql("SELECT seen_at FROM tidemark.group_member WHERE member_id = %s", a.member_id)
    with pytest.raises(IllegalGeneration):
        a.heartbeat()
    assert scene.sql("SELECT seen_at FROM tidemark.group_member WHERE member_id = %s", a.member_id) == before


def test_sync_and_join_count_as_heartbeats(scene: Scene) -> None:
    """Every accepted request of a member restarts its session."""
    a, b = joined_pair(scene)
    for ask in (b.sync, b.sync, b.join, b.joined):
        scene.age(b, ms=9_000)
        ask()
    a.assign()
    for _ in range(2):
        scene.age(b, ms=9_000)
        b.sync()
    assert scene.members() == ["a", "b"]


def test_the_sessions_start_again_when_the_server_was_restarted(scene: Scene) -> None:
    """Kafka: testOnLoadedSchedulesClassicGroupMemberHeartbeats. While the server was down, members could not send heartbeats."""
    a, b = joined_pair(scene)
    scene.expire(a, b)
    scene.pass_deadline()
    scene.sql("UPDATE tidemark.consumer_group SET server_start = server_start - interval '1 h' WHERE name = %s", scene.group)
    b.heartbeat()
    scene.finish_sync(a, b)
    assert scene.members() == ["a", "b"]
    scene.expire(a, b)  # the restart counts only once
    assert scene.tick() == GroupState.EMPTY
