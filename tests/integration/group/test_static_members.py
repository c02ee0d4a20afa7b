"""Static members (KIP-345), as Kafka's GroupCoordinatorTest describes them: a retried task takes the place of its zombie."""

from __future__ import annotations

import pytest
from tests.integration.group.players import Player, Scene

from tidemark.group.errors import FencedInstanceId, IllegalGeneration, RebalanceInProgress, UnknownMemberId
from tidemark.group.states import GroupState


def pair(scene: Scene) -> tuple[Player, Player]:
    """A static leader and a static follower in a Stable group."""
    leader, follower = scene.player("leader", instance="i-leader"), scene.player("follower", instance="i-follower")
    scene.start(leader, follower)
    return leader, follower


def next_process(scene: Scene, player: Player, *protocols: str, topics: tuple[str, ...] = ("flights",)) -> Player:
    """Another process with the same instance id, which knows nothing about the first."""
    return scene.player(player.name + "'", protocols or ("range", "sticky"), instance=player.instance_id, topics=topics)


def test_a_parked_static_member_is_told_its_id_when_the_join_phase_ends(scene: Scene) -> None:
    """Until then, it asks by its instance id, on the `Coordinator` with which it joined. Another one could not tell it from its zombie."""
    leader, _ = pair(scene)
    new = scene.player("new", instance="i-new")
    assert new.join() is None
    assert new.joined() is None
    assert new.member_id == ""
    with pytest.raises(UnknownMemberId):
        scene.coordinator().joined("", "i-new")
    leader.join()
    scene.pass_deadline()
    assert new.joined() is not None
    assert new.member_id.startswith("i-new-")


def test_a_parked_static_member_whose_place_was_taken_is_fenced(scene: Scene) -> None:
    """Kafka: staticMemberFenceDuplicateRejoinedFollower, for the parked JoinGroup of the old process."""
    pair(scene)
    old, new = scene.player("old", instance="i-new"), scene.player("new", instance="i-new")
    assert old.join() is None
    assert new.join() is None
    with pytest.raises(FencedInstanceId):
        old.joined()
    assert new.joined() is None


def test_an_id_that_is_not_the_instances_is_fenced(scene: Scene) -> None:
    """Kafka: staticMemberReJoinWithExplicitUnknownMemberId, staticMemberRejoinAsFollowerWithMismatchedMemberId, …AsLeader….
    An id does not come with an unknown instance either: staticMemberJoinWithUnknownInstanceIdAndKnownMemberId."""
    leader, follower = pair(scene)
    forger = scene.player("forger", instance="i-leader")
    for member_id in ("made-up", follower.member_id):
        forger.member_id = member_id
        with pytest.raises(FencedInstanceId) as fenced:
            forger.join()
        assert fenced.value.current == leader.member_id
    forger.instance_id = "i-unknown"
    with pytest.raises(UnknownMemberId):
        forger.join()
    assert scene.state == GroupState.STABLE


def test_the_next_process_of_a_follower_gets_its_assignment_and_no_rebalance(scene: Scene) -> None:
    """Kafka: staticMemberRejoinAsFollowerWithUnknownMemberId, testReplaceStaticMemberInStableStateNoError, …Succeeds."""
    leader, follower = pair(scene)
    assignment = {"of": follower.member_id, "generation": follower.generation}
    new = next_process(scene, follower)
    joined = new.join()
    assert (joined.generation, joined.leader, dict(joined.members)) == (follower.generation, leader.member_id, {})
    assert new.sync() == assignment
    assert (scene.state, scene.members()) == (GroupState.STABLE, ["leader", "follower'"])
    new.heartbeat()
    leader.heartbeat()


def test_the_next_process_of_the_leader_leads_but_does_not_assign(scene: Scene) -> None:
    """Kafka: staticMemberRejoinWithLeaderIdAndUnknownMemberId, KIP-814. It gets the member list, to watch the topics."""
    leader, follower = pair(scene)
    new = next_process(scene, leader)
    joined = new.join()
    assert (joined.leader, joined.skip_assignment, list(joined.members)) == (new.member_id, True, [new.member_id, follower.member_id])
    assert scene.leader == new.member_id
    assert new.sync() == {"of": leader.member_id, "generation": leader.generation}
    assert scene.state == GroupState.STABLE


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_restart_that_would_change_the_vote_has_the_group_rebalance(scene: Scene, who: str) -> None:
    """Kafka: staticMemberRejoinWithUnknownMemberIdAndChangeOfProtocolWithSelectedProtocolChanged, …UpdatedProtocolTriggersRebalance."""
    protocols = ("sticky", "range")
    leader, follower = (scene.player(name, protocols, instance=f"i-{name}") for name in ("leader", "follower"))
    scene.start(leader, follower)
    assert scene.of_group("protocol") == "sticky"
    old, other = (leader, follower) if who == "leader" else (follower, leader)
    new = next_process(scene, old, "range")
    assert new.join() is None
    with pytest.raises(RebalanceInProgress):
        other.heartbeat()
    other.join()
    scene.finish_join(new, other)
    assert scene.of_group("protocol") == "range"
    assert scene.leader == (new if who == "leader" else other).member_id


def test_a_restart_with_another_list_but_the_same_vote_disturbs_nobody(scene: Scene) -> None:
    """Kafka: staticMemberRejoinWithUnknownMemberIdAndChangeOfProtocolWhileSelectProtocolUnchanged."""
    leader, follower = pair(scene)
    new = next_process(scene, follower, "range", "mine")
    assert new.join() is not None
    assert (scene.state, scene.generation, scene.leader) == (GroupState.STABLE, follower.generation, leader.member_id)


def test_a_restart_with_other_topics_has_the_group_rebalance(scene: Scene) -> None:
    """Kafka differs, because it only compares the protocol's name: there, the new topics wait until another member causes a rebalance."""
    leader, follower = pair(scene)
    new = next_process(scene, follower, topics=("flights", "delays"))
    assert new.join() is None
    assert scene.state == GroupState.PREPARING_REBALANCE
    joined = leader.join()
    assert joined.members[new.joined().member_id].metadata == {"topics": ["flights", "delays"]}


def test_a_restart_takes_over_the_new_timeouts(scene: Scene) -> None:
    """Kafka: staticMemberRejoinWithUpdatedSessionAndRebalanceTimeoutsAndPersistChange."""
    _, follower = pair(scene)
    new = next_process(scene, follower)
    new.session_timeout_ms, new.rebalance_timeout_ms = 7_000, 70_000
    new.join()
    assert scene.sql(
        "SELECT session_timeout_ms, rebalance_timeout_ms FROM tidemark.group_member WHERE member_id = %s", new.member_id
    ) == [(7_000, 70_000)]  # fmt: skip


def test_a_replacement_before_the_sync_has_the_group_rebalance(scene: Scene) -> None:
    """Kafka: testReplaceStaticMemberInCompletingRebalanceStateTriggersRebalance. The leader may just be computing for the old id.

    Also staticMemberFenceDuplicateSyncingFollowerAfterMemberIdChanged, for the parked SyncGroup of the old process.
    """
    leader, follower = pair(scene)
    leader.join()
    follower.join()
    scene.finish_join(leader, follower)
    assert follower.sync() is None
    new = next_process(scene, follower)
    assert new.join() is None
    with pytest.raises(FencedInstanceId):
        follower.sync()
    with pytest.raises(RebalanceInProgress):
        leader.assign()
    leader.join()
    scene.finish_join(leader, new)


def test_a_replacement_while_the_others_join_takes_the_parked_place(scene: Scene) -> None:
    """Kafka: staticMemberFenceDuplicateRejoiningFollowerAfterMemberIdChanged."""
    leader, follower = pair(scene)
    leader.protocols = leader.protocols[:1]
    assert leader.join() is None
    new = next_process(scene, follower)
    assert new.join() is not None
    with pytest.raises(FencedInstanceId):
        follower.join()
    assert scene.members() == ["leader", "follower'"]


def test_a_leader_that_is_replaced_while_the_others_join_still_leads(scene: Scene) -> None:
    """Kafka: staticMemberRejoinWithKnownLeaderIdToTriggerRebalanceAndFollowerWithChangeOfProtocol, with a restart in between."""
    leader, follower = pair(scene)
    assert leader.join() is None
    new = next_process(scene, leader)
    assert new.join() is None
    joined = follower.join()
    assert joined is not None
    answer = new.joined()
    assert (scene.leader, answer.skip_assignment) == (new.member_id, False)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_the_group_goes_on_at_the_deadline_without_a_static_member(scene: Scene, who: str) -> None:
    """Kafka: testStaticMember{Follower,Leader}FailToRejoinBeforeRebalanceTimeout, testRebalanceCompletesBeforeMemberJoins. It stays a
    member until its session ends; its requests have an old generation."""
    leader, follower = pair(scene)
    away, here = (leader, follower) if who == "leader" else (follower, leader)
    new = scene.player("new")
    assert (new.join(), here.join()) == (None, None)
    scene.pass_deadline()
    scene.finish_join(here, new)
    assert scene.leader == here.member_id
    assert set(scene.members()) == {"leader", "follower", "new"}
    with pytest.raises(IllegalGeneration) as fenced:
        away.sync()
    assert (fenced.value.generation, fenced.value.current) == (away.generation, here.generation)
    assert away.join() is not None  # unchanged: it gets the current generation, which includes it
    away.heartbeat()
    scene.expire(away)
    with pytest.raises(RebalanceInProgress):
        here.heartbeat()
    assert set(scene.members()) == {here.name, "new"}


def test_what_the_old_process_of_a_static_member_asks_does_not_extend_the_new_ones_session(scene: Scene) -> None:
    """Kafka: staticMember{SyncAsLeader,HeartbeatLeader}WithInvalidMemberId."""
    leader, _ = pair(scene)
    new = next_process(scene, leader)
    new.join()
    scene.age(new, ms=5_000)
    for ask in (leader.heartbeat, leader.sync, leader.joined, leader.join):
        with pytest.raises(FencedInstanceId):
            ask()
    scene.age(new, ms=5_500)
    with pytest.raises(UnknownMemberId):
        new.heartbeat()
