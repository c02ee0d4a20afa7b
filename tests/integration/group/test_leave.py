"""LeaveGroup for one member, in a batch and by an operator, as Kafka's GroupCoordinatorTest describes it."""

from __future__ import annotations

import pytest
from tests.integration.group.players import Scene

from tidemark.group.coordinator import Leaving
from tidemark.group.errors import FencedInstanceId, RebalanceInProgress, UnknownMemberId
from tidemark.group.states import GroupState


def kinds(answers: list[object]) -> list[type | None]:
    return [None if answer is None else type(answer) for answer in answers]


def test_the_last_member_leaves_an_empty_group(scene: Scene) -> None:
    """Kafka: testValidLeaveGroup."""
    a = scene.player("a")
    scene.start(a)
    assert a.leave("the run is over") is None
    assert (scene.state, scene.members()) == (GroupState.EMPTY, [])
    assert isinstance(a.leave(), UnknownMemberId)


def test_a_group_that_does_not_exist_knows_nobody(scene: Scene) -> None:
    """Kafka: testLeaveGroupUnknownGroup, testStaticMembersUnknownGroupBatchLeaveGroup. Each member gets an answer."""
    leaving = [Leaving("a-1"), Leaving("", "i-b")]
    assert kinds(scene.coordinator().leave(leaving)) == [UnknownMemberId, UnknownMemberId]
    assert scene.state is None


def test_a_stranger_does_not_leave(scene: Scene) -> None:
    """Kafka: testLeaveGroupUnknownConsumerExistingGroup."""
    a = scene.player("a")
    scene.start(a)
    assert kinds(scene.coordinator().leave([Leaving("made-up")])) == [UnknownMemberId]
    assert scene.state == GroupState.STABLE


@pytest.mark.parametrize("phase", [GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, GroupState.STABLE])
def test_the_others_go_on_without_who_leaves(scene: Scene, phase: GroupState) -> None:
    """Kafka: a LeaveGroup completes the join phase or starts one."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    if phase is not GroupState.STABLE:
        a.join()
    if phase is GroupState.COMPLETING_REBALANCE:
        b.join()
        a.joined()
    assert scene.state == phase
    assert b.leave("redeployed") is None
    if phase is GroupState.PREPARING_REBALANCE:
        assert a.joined() is not None
    else:
        with pytest.raises(RebalanceInProgress):
            a.heartbeat()
        assert scene.of_group("rebalance_reason") == "a member leaves: redeployed"
        scene.rebalance(a)
    assert scene.members() == ["a"]


def test_when_the_leader_leaves_another_one_leads(scene: Scene) -> None:
    """Kafka chooses any of the members that have joined; here, the oldest of them leads."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b, c)
    a.leave()
    c.join()
    b.join()
    scene.finish_join(b, c)
    assert scene.leader == b.member_id


def test_an_operator_removes_a_static_member_by_its_instance_id(scene: Scene) -> None:
    """Kafka: testLeaveGroupStaticMemberWithUnknownMemberId. The member id, which only the process knows, is not needed."""
    a, b = scene.player("a", instance="i-a"), scene.player("b")
    scene.start(a, b)
    assert scene.coordinator().leave([Leaving("", "i-a", "it is gone for good")]) == [None]
    assert scene.members() == ["b"]
    with pytest.raises(UnknownMemberId):
        a.heartbeat()


def test_an_instance_that_is_another_member_is_fenced(scene: Scene) -> None:
    """Kafka: testLeaveGroupWithFencedInstanceId, testStaticMembersFencedInstanceBatchLeaveGroup."""
    a = scene.player("a", instance="i-a")
    scene.start(a)
    assert kinds(scene.coordinator().leave([Leaving("made-up", "i-a")])) == [FencedInstanceId]
    assert scene.members() == ["a"]


def test_an_instance_that_nobody_has_is_unknown(scene: Scene) -> None:
    """Kafka: testStaticMembersUnknownInstanceBatchLeaveGroup."""
    a = scene.player("a", instance="i-a")
    scene.start(a)
    leaving = [Leaving("", "i-unknown"), Leaving(a.member_id, "i-unknown")]
    assert kinds(scene.coordinator().leave(leaving)) == [UnknownMemberId, UnknownMemberId]


def test_several_leave_at_once_with_one_rebalance_and_an_answer_each(scene: Scene) -> None:
    """Kafka: testStaticMembersValidBatchLeaveGroup. One member's error does not affect the others."""
    players = [scene.player(name, instance=f"i-{name}") for name in "abcd"]
    scene.start(*players)
    a, b, c, _ = players
    leaving = [Leaving("", "i-a"), Leaving("made-up", "i-b"), Leaving(c.member_id, "i-c"), Leaving("nobody"), Leaving("", "i-a")]
    assert kinds(scene.coordinator().leave(leaving)) == [None, FencedInstanceId, None, UnknownMemberId, UnknownMemberId]
    assert scene.members() == ["b", "d"]
    assert scene.state == GroupState.PREPARING_REBALANCE
    assert a.member_id != b.member_id


def test_ids_that_were_given_out_leave_too(scene: Scene) -> None:
    """Kafka: testPendingMemberBatchLeaveGroup, testJoinedMemberPendingMemberBatchLeaveGroup(WithUnknownMember)."""
    a, b, pending = scene.player("a"), scene.player("b"), scene.player("pending")
    scene.start(a, b)
    pending.ask_for_id()
    leaving = [Leaving(pending.member_id), Leaving("made-up"), Leaving(b.member_id)]
    assert kinds(scene.coordinator().leave(leaving)) == [None, UnknownMemberId, None]
    assert scene.members() == ["a"]
    with pytest.raises(UnknownMemberId):
        pending.join()


def test_an_id_that_was_given_out_leaves_a_stable_group_in_peace(scene: Scene) -> None:
    """Kafka: removing a pending member does not cause a rebalance."""
    a, pending = scene.player("a"), scene.player("pending")
    scene.start(a)
    pending.ask_for_id()
    assert pending.leave() is None
    assert scene.state == GroupState.STABLE


def test_a_long_reason_is_cut_off(scene: Scene) -> None:
    """Kafka: KIP-800, 255 characters (testHandleNormalLeaveGroupResponseAndTruncatedLeaveReason)."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    b.leave("x" * 1000)
    assert scene.of_group("rebalance_reason") == "a member leaves: " + "x" * 255


def test_only_an_operators_removal_is_an_event(scene: Scene) -> None:
    """A member that leaves or expires is not an event, even if it expires during the operator's call."""
    a, b, c = scene.player("a"), scene.player("b", instance="i-b"), scene.player("c")
    scene.start(a, b, c)
    assert c.leave("the run is over") is None
    scene.expire(a)
    assert kinds(scene.coordinator().leave([Leaving("", "i-b", "its host is gone")], by="ann@host")) == [None]
    assert scene.members() == []
    assert scene.sql(
        "SELECT kind, group_name, claimed_by, reason, details FROM tidemark.audit_event WHERE group_name = %s", scene.group
    ) == [
        ("MEMBER REMOVED", scene.group, "ann@host", "its host is gone", {"member": b.member_id, "instance": "i-b"}),
    ]
