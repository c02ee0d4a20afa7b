"""SyncGroup, Heartbeat and the session, as Kafka's GroupCoordinatorTest describes them."""

from __future__ import annotations

import pytest
from tests.integration.group.players import Player, Scene

from tidemark.group.errors import IllegalGeneration, InconsistentGroupProtocol, RebalanceInProgress, UnknownMemberId
from tidemark.group.states import GroupState


def joined_pair(scene: Scene) -> tuple[Player, Player]:
    """Two members whose join phase is over; the first leads, the second is static."""
    a, b = scene.player("a"), scene.player("b", instance="i-b")
    scene.start(a, b)
    a.join()
    b.join()
    scene.finish_join(a, b)
    return a, b


# ---- SyncGroup


def test_a_follower_that_syncs_first_waits_for_the_leaders_first_assignment(scene: Scene) -> None:
    """Kafka: testSyncGroupLeaderAfterFollower, testSyncGroupFollowerAfterLeader. Assignments from a follower are ignored, and so are those
    that the leader sends later. Each SyncGroup may be repeated."""
    a, b = joined_pair(scene)
    other = {a.member_id: "other", b.member_id: "other"}
    assert b.sync(other) is b.sync() is None
    assert scene.state == GroupState.COMPLETING_REBALANCE
    first = a.assign()
    assert first == a.sync(other) == {"of": a.member_id, "generation": a.generation}
    assert b.sync() == b.sync() == {"of": b.member_id, "generation": b.generation}


def test_a_leader_without_an_assignment_does_not_stand_in_anybodys_way(scene: Scene) -> None:
    """It has to ask again, and does not count as synced: the sync deadline applies to it as to the others."""
    a, b = joined_pair(scene)
    assert a.sync() is None
    assert b.sync() is None
    scene.pass_deadline()
    with pytest.raises(RebalanceInProgress):
        b.sync()
    assert scene.members() == ["b"]


def test_an_assignment_comes_back_as_it_was_given_and_is_empty_if_none_was(scene: Scene) -> None:
    """Kafka: testSyncGroupEmptyAssignment. The coordinator does not interpret the JSON, and ignores assignments for unknown members."""
    a, b = joined_pair(scene)
    given = {"flights": [1, 2], "user data": {"ü": [1.5, True, None]}}
    assert a.sync({a.member_id: given, "somebody": 7}) == given
    assert b.sync() == {}
    assert scene.state == GroupState.STABLE


def test_another_protocol_is_refused(scene: Scene) -> None:
    """Kafka: testSyncGroupReturnsAnErrorWhenProtocolNameIsInconsistent, …SucceedWhenProtocolTypeAndNameAreNotProvided / …AreConsistent."""
    _, b = joined_pair(scene)
    with pytest.raises(InconsistentGroupProtocol):
        b.sync(protocol="sticky")
    assert b.sync(protocol=None) is None
    assert b.sync(protocol="range") is None


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
    """Kafka: testRebalanceTimesOutWhenSyncRequestIsNotReceived, …FromFollowers, …FromLeaders. The deadline applies in Stable too, and
    to static and dynamic members."""
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


# ---- Heartbeat and the session


def test_heartbeats_while_the_others_join_say_so_and_keep_the_session(scene: Scene) -> None:
    """Kafka: testHeartbeatDuringRebalanceCausesRebalanceInProgress, testHeartbeatRebalanceInProgress."""
    a, b = joined_pair(scene)
    scene.finish_sync(a, b)
    a.join()
    for _ in range(4):
        scene.age(a, b, ms=6_000)
        with pytest.raises(RebalanceInProgress):
            b.heartbeat()
        assert a.joined() is None
    assert scene.members() == ["a", "b"]


def test_heartbeats_maintain_the_session_and_a_member_without_them_is_removed(scene: Scene) -> None:
    """Kafka: testHeartbeatMaintainsSession, testSessionTimeout. A heartbeat comes too late even if no other call has checked the session in
    between."""
    a = scene.player("a")
    scene.start(a)
    for _ in range(3):
        scene.age(a, ms=6_000)
        a.heartbeat()
    assert scene.state == GroupState.STABLE
    scene.age(a, ms=10_000)
    with pytest.raises(UnknownMemberId):
        a.heartbeat()
    assert (scene.state, scene.members()) == (GroupState.EMPTY, [])


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
        scene.age(b, ms=6_000)
        ask()
    a.assign()
    for _ in range(2):
        scene.age(b, ms=6_000)
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
