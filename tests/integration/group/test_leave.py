"""LeaveGroup for one member, in a batch and by an operator, as Kafka's GroupCoordinatorTest describes it."""

from __future__ import annotations

import pytest
from tests.integration.group.players import Scene

from tidemark.group.errors import FencedInstanceId, UnknownMemberId
from tidemark.group.requests import Leaving
from tidemark.group.states import GroupState


def kinds(answers: list[object]) -> list[type | None]:
    return [None if answer is None else type(answer) for answer in answers]


def test_a_join_phase_goes_on_when_the_last_that_was_missing_leaves(scene: Scene) -> None:
    """Kafka: a LeaveGroup completes the join phase."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    assert a.join() is None
    b.leave()
    assert a.joined() is not None
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


def test_several_leave_at_once_with_one_rebalance_and_an_answer_each(scene: Scene) -> None:
    """Kafka: testStaticMembers{Valid,FencedInstance,UnknownInstance}BatchLeaveGroup. One member's error does not affect the others. An
    operator needs only the instance id."""
    players = [scene.player(name, instance=f"i-{name}") for name in "abcd"]
    scene.start(*players)
    c = players[2].member_id
    answers = [
        (Leaving("", "i-a"), None),
        (Leaving("made-up", "i-b"), FencedInstanceId),
        (Leaving(c, "i-unknown"), UnknownMemberId),
        (Leaving(c, "i-c"), None),
        (Leaving("nobody"), UnknownMemberId),
        (Leaving("", "i-a"), UnknownMemberId),
    ]
    assert kinds(scene.coordinator().leave([leaving for leaving, _ in answers])) == [answer for _, answer in answers]
    assert scene.members() == ["b", "d"]
    assert scene.state == GroupState.PREPARING_REBALANCE


def test_ids_that_were_given_out_leave_too(scene: Scene) -> None:
    """Kafka: testPendingMemberBatchLeaveGroup, testJoinedMemberPendingMemberBatchLeaveGroup(WithUnknownMember). Alone, they cause no
    rebalance."""
    a, b, pending, second = (scene.player(name) for name in ("a", "b", "pending", "second"))
    scene.start(a, b)
    pending.ask_for_id()
    assert pending.leave() is None
    assert scene.state == GroupState.STABLE
    leaving = [Leaving(second.ask_for_id()), Leaving("made-up"), Leaving(b.member_id)]
    assert kinds(scene.coordinator().leave(leaving)) == [None, UnknownMemberId, None]
    assert scene.members() == ["a"]
    for player in (pending, second):
        with pytest.raises(UnknownMemberId):
            player.join()


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
