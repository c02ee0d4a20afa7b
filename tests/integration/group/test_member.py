"""Members of a group: real threads on a real Postgres, with short timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.black_hole import before
from tests.support.members import CONFIG, Group, Told, parts, wait_for
from tests.support.waiting import until

from tidemark.db import session
from tidemark.errors import TidemarkError
from tidemark.group.assignors import Assignment, Assignor, Metadata, Subscription
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import FencedInstanceId, InconsistentGroupProtocol
from tidemark.group.listener import RebalanceListener
from tidemark.group.member import MemberState
from tidemark.group.requests import Leaving
from tidemark.records.ranges import TopicPartition


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_partitions_are_shared_as_members_come_and_go(group: Group, assignor: str) -> None:
    """testNormalJoinGroupLeader, testNormalJoinGroupFollower. With every assignor, each partition is assigned to exactly one member."""
    first = group.join(assignor)
    assert first.state in (MemberState.UNJOINED, MemberState.REBALANCING)
    group.settle()
    assert group.told[first].calls == [("assigned", parts(0, 1, 2, 3))]
    assert (first.state, first.assignment, first.leads) == (MemberState.STABLE, parts(0, 1, 2, 3), True)
    second = group.join(assignor)
    group.settle()
    assert sorted(group.assignment()) == list(parts(0, 1, 2, 3))
    assert len(first.assignment) == len(second.assignment) == 2
    group.close(first)
    group.settle()
    assert second.assignment == parts(0, 1, 2, 3)


def test_eager_member_gives_all_back_before_it_joins_again(group: Group) -> None:
    first = group.join("range")
    group.settle()
    group.join("range")
    group.settle()
    assert group.told[first].calls == [("assigned", parts(0, 1, 2, 3)), ("revoked", parts(0, 1, 2, 3)), ("assigned", parts(0, 1))]


def test_cooperative_member_keeps_what_stays_its_own(group: Group) -> None:
    """Round 1 revokes the partitions that move, and round 2 gives them to the new owner. The others are never revoked."""
    first = group.join()
    group.settle()
    second = group.join()
    group.settle()
    revoked = [part for what, partitions in group.told[first].calls if what == "revoked" for part in partitions]
    assert set(revoked) == set(second.assignment)
    assert set(first.assignment) | set(revoked) == set(parts(0, 1, 2, 3))
    assert ("assigned", ()) in group.told[first].calls


def test_generation_is_known_before_the_listeners_are_told(group: Group) -> None:
    """shouldUpdateConsumerGroupMetadataBeforeCallbacks."""
    seen: list[int] = []

    class Asks(RebalanceListener):
        def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            seen.append(member.generation)

    member = group.join(listeners=[Asks()])
    group.settle()
    assert seen == [group.described().generation]


def test_listeners_of_the_user_hear_after_a_claim_and_before_a_release(group: Group) -> None:
    order: list[str] = []

    class Notes(RebalanceListener):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            order.append(f"{self.name} assigned")

        def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
            order.append(f"{self.name} revoked")

    member = group.join(listeners=[Notes("first"), Notes("second")])
    group.settle()
    group.close(member)
    assert order == ["first assigned", "second assigned", "second revoked", "first revoked"]


def test_first_error_of_a_listener_comes_out_of_poll_when_all_were_told(group: Group) -> None:
    """testOnPartitionsAssignExceptionThrownWhenNoPreviousThrownCallbacks, testRevokeExceptionThrownFirstNonBlockingSubCallbacks."""

    class Fails(RebalanceListener):
        def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
            raise ValueError(f"no room for {len(partitions)}")

    last = Told()
    member = group.join(listeners=[Fails(), Fails(), last])
    with pytest.raises(ValueError, match="no room for 4"):
        until(lambda: member.poll(1), "told")
    assert member.assignment == parts(0, 1, 2, 3)
    assert last.calls == [("assigned", parts(0, 1, 2, 3))]


def test_member_that_closes_leaves_the_group_at_once(group: Group) -> None:
    """testLeaveGroupOnClose, testMaybeLeaveGroup. This includes static members: after a run has ended, there is nothing to wait for."""
    for seat in ({}, {"instance_id": "dag/task/0"}):
        member = group.join(**seat)
        group.settle()
        group.close(member)
        assert group.told[member].calls[-1] == ("revoked", parts(0, 1, 2, 3))
        assert group.described().members == ()


def test_member_that_closes_before_it_has_joined_leaves_no_ghost(group: Group) -> None:
    """testPendingMemberShouldLeaveGroup."""
    first = group.join()
    group.settle()
    for _ in range(5):
        group.close(group.join())
    until(lambda: [member.member_id for member in group.described().members] == [first.member_id], "only the first is there")
    group.settle()


def test_slow_consumer_leaves_and_hears_of_its_loss_when_it_polls_again(group: Group) -> None:
    """The heartbeat thread runs, but `poll` is not called: after max.poll.interval, the partitions go to other members."""
    slow = group.join(max_poll_interval_ms=1500)
    group.settle()
    other = group.join()
    wait_for(other, lambda: other.assignment == parts(0, 1, 2, 3))
    assert slow in group.interrupted
    assert slow.state is MemberState.UNJOINED
    group.settle()
    assert ("lost", parts(0, 1, 2, 3)) in group.told[slow].calls
    assert len(slow.assignment) == 2


def test_slow_static_consumer_keeps_its_seat_until_its_session_is_over(group: Group) -> None:
    """As in Kafka, it stops its heartbeats instead of sending a LeaveGroup."""
    slow = group.join(instance_id="dag/task/0", max_poll_interval_ms=1000, session_timeout_ms=4000)
    group.settle()
    until(lambda: slow.state is MemberState.UNJOINED, "it has given itself up")
    assert len(group.described().members) == 1
    other = group.join()
    wait_for(other, lambda: other.assignment == parts(0, 1, 2, 3))
    group.settle()
    assert ("lost", parts(0, 1, 2, 3)) in group.told[slow].calls


def test_batch_that_keeps_an_eager_group_waiting_is_interrupted(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group cannot continue before this member gives up its partitions. The batch gets part of the rebalance timeout first."""
    monkeypatch.setattr("tidemark.group.member.OVERDUE", 0.2)
    busy = group.join("range", max_poll_interval_ms=15_000)
    group.settle()
    group.join("range")
    until(lambda: busy in group.interrupted, "interrupted")
    assert busy.assignment == parts(0, 1, 2, 3)
    group.settle()
    assert ("lost", parts(0, 1, 2, 3)) not in group.told[busy].calls


def test_member_that_was_removed_has_lost_its_partitions_and_joins_as_a_new_one(group: Group) -> None:
    """testUnknownMemberId, shouldLoseAllOwnedPartitionsBeforeRejoiningAfterDroppingOutOfTheGroup."""
    member = group.join()
    group.settle()
    before = member.member_id
    with session(group.url) as connection:
        assert Coordinator(connection, "g", CONFIG).leave([Leaving(before)]) == [None]
    wait_for(member, lambda: member.member_id != before)
    group.settle()
    assert group.told[member].calls[:3] == [("assigned", parts(0, 1, 2, 3)), ("lost", parts(0, 1, 2, 3)), ("assigned", parts(0, 1, 2, 3))]
    assert group.interrupted == [member]


def test_member_of_another_generation_has_lost_its_partitions_and_keeps_its_id(group: Group) -> None:
    """testIllegalGeneration, testHeartbeatIllegalGenerationResponseWithOldGeneration."""
    member = group.join()
    group.settle()
    before = member.member_id
    group.sql("UPDATE tidemark.consumer_group SET generation = nextval('tidemark.generation')")
    wait_for(member, lambda: ("lost", parts(0, 1, 2, 3)) in group.told[member].calls)
    group.settle()
    assert member.member_id == before
    assert member.assignment == parts(0, 1, 2, 3)


def test_next_process_of_a_seat_takes_its_partitions_without_a_rebalance(group: Group) -> None:
    """testHeartbeatRequestWithFencedInstanceIdException. The old process is fenced, and does not come back."""
    old = group.join(instance_id="dag/task/0")
    other = group.join(instance_id="dag/task/1")
    group.settle()
    generation, had = old.generation, old.assignment
    new = group.join(instance_id="dag/task/0")
    with pytest.raises(FencedInstanceId):
        until(lambda: old.poll(), "fenced")
    assert group.told[old].calls[-1] == ("lost", had)
    group.close(old)
    group.settle()
    assert (new.generation, new.assignment) == (generation, had)
    assert [what for what, _ in group.told[other].calls].count("assigned") <= 3


def test_seat_that_comes_back_gets_what_it_had(group: Group) -> None:
    """With a sticky assignor, remembered partitions stay with their seat, no matter which member joins first."""
    first = group.join(instance_id="b", remembered=parts(0, 1), generation=1, expected_members=2)
    second = group.join(instance_id="a", remembered=parts(2, 3), generation=1, expected_members=2)
    group.settle()
    assert (first.assignment, second.assignment) == (parts(0, 1), parts(2, 3))


def test_seat_that_remembers_more_than_its_share_lets_the_rest_go(group: Group) -> None:
    """The seat read everything alone in the previous run, and reports that it still owns it. A cooperative assignor therefore withholds
    partitions from the other members. They get them in a second round, although the new process never held them."""
    first = group.join(instance_id="b", remembered=parts(0, 1, 2, 3), generation=1, expected_members=2)
    second = group.join(instance_id="a", expected_members=2)
    group.settle()
    assert sorted(group.assignment()) == list(parts(0, 1, 2, 3))
    assert len(first.assignment) == len(second.assignment) == 2


def test_member_without_an_assignor_in_common_is_refused_and_disturbs_nobody(group: Group) -> None:
    """testJoinGroupInconsistentGroupProtocol."""
    first = group.join("range")
    group.settle()
    generation = first.generation
    stranger = group.join("roundrobin")
    with pytest.raises(InconsistentGroupProtocol):
        until(lambda: stranger.poll(), "refused")
    group.close(stranger)
    group.settle()
    assert first.generation == generation


def test_assignor_of_the_users_that_hands_over_an_owned_partition_at_once_is_refused(group: Group) -> None:
    """testPerformAssignmentShouldValidateCooperativeAssignment."""
    name = f"{__name__}:Greedy"
    first = group.join(name)
    group.settle()
    group.join(name)
    with pytest.raises(TidemarkError, match="reports it as its own"):
        until(lambda: first.poll(), "refused")


class Greedy(Assignor):
    """Gives everything to the member that owns the fewest partitions, such as a new one."""

    name = "greedy"
    protocol = "cooperative"

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        newest = min(subscriptions, key=lambda member: (len(subscriptions[member].owned), member))
        return {member: parts(0, 1, 2, 3) if member == newest else () for member in subscriptions}


def test_member_that_postgres_no_longer_answers_closes_without_an_error(
    group: Group, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has committed everything must not hang or fail because its member cannot leave. The member expires by itself."""
    monkeypatch.setattr("tidemark.group.member.CLOSE_S", 1.0)
    with before(database_url) as hole:
        group.url = hole.url
        member = group.join()
        group.settle()
        hole.swallow.set()
        group.members.remove(member)
        with ThreadPoolExecutor(1) as beside:
            beside.submit(member.close).result(60)
    assert group.told[member].calls[-1] == ("revoked", parts(0, 1, 2, 3))
