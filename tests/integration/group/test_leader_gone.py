"""The leader dies or stalls between its JoinGroup and its SyncGroup: in its assignor, where no other member can do its work.

GroupCoordinatorTest.testLeaderFailureInSyncGroup, testSyncGroupFollowerAfterLeader and the sync deadline, with real members: threads with
separate sessions, and a process in one test.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.support.members import Group, parts, wait_for
from tests.support.waiting import until

from tidemark.group.assignors import Assignment, Assignor, Metadata, Subscription, find_assignor
from tidemark.group.member import Member
from tidemark.group.states import GroupState

ALL = parts(0, 1, 2, 3)
SLACK_S = 60
"""For a busy machine. A heartbeat of 0.1 s, two parked SyncGroups of at most 1 s each and two phases of a rebalance take about 3 s."""
LONG = {"session_timeout_ms": 120_000, "max_poll_interval_ms": 240_000}


class Assigns(Assignor):
    """Assigns like ``range``."""

    name = "stands"

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        return find_assignor("range").assign(metadata, subscriptions)


class Stands(Assigns):
    """The same assignor under the same name, but with ``least`` or more members it blocks in the call until it may continue."""

    least = 2

    def __init__(self, inside: Any, go_on: Any) -> None:
        self.inside, self.go_on = inside, go_on

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        if len(subscriptions) >= self.least:
            self.inside.set()
            self.go_on.wait()
        return super().assign(metadata, subscriptions)


@pytest.fixture
def group(database_url: str) -> Iterator[Group]:
    with Group(database_url, seat=LONG, assignor=Assigns()) as group:
        yield group


@pytest.fixture
def stands() -> Iterator[Stands]:
    assignor = Stands(threading.Event(), threading.Event())
    yield assignor
    assignor.go_on.set()


def have_all(group: Group, but: Member | None = None) -> bool:
    """Whether the members except ``but`` have settled, with an assignment that covers all partitions."""
    others = [member for member in group.members if member is not but]
    return sorted(part for member in others for part in member.assignment) == list(ALL) and all(member.settled for member in others)


def test_followers_get_an_assignment_from_another_leader_at_the_deadline_of_the_sync_groups(group: Group, stands: Stands) -> None:
    """The leader's session goes on."""
    stands.least = 3  # so that it blocks in the generation of both followers, however late the second one joins
    leader = group.join(stands, max_poll_interval_ms=10_000)
    group.settle()
    followers = [group.join(max_poll_interval_ms=10_000) for _ in range(2)]
    wait_for(group, stands.inside.is_set)
    began = time.monotonic()
    wait_for(group, lambda: have_all(group, but=leader))
    assert time.monotonic() - began < 10 + SLACK_S
    assert sum(follower.leads for follower in followers) == 1
    assert [len(follower.assignment) for follower in followers] == [2, 2]


def test_leader_that_goes_on_later_finds_that_its_assignment_is_not_asked_for(group: Group, stands: Stands) -> None:
    """Its session ends first, because its heartbeats stop, too, and another leader assigns. Its SyncGroup gets UNKNOWN_MEMBER_ID. It
    joins as a new member and follower, and the assignment that it has computed is dropped."""
    leader = group.join(stands, session_timeout_ms=4000)
    group.settle()
    before = leader.member_id
    group.join()
    group.join()
    wait_for(group, stands.inside.is_set)
    began = time.monotonic()
    wait_for(group, lambda: have_all(group, but=leader))
    assert time.monotonic() - began < 4 + SLACK_S
    stands.go_on.set()
    group.settle()
    assert leader.member_id != before
    assert not leader.leads
    assert sorted(group.assignment()) == list(ALL)
    assert group.told[leader].calls[:2] == [("assigned", ALL), ("revoked", ALL)]


def test_leader_that_comes_back_within_the_deadline_is_waited_for(group: Group, stands: Stands) -> None:
    """Meanwhile, its followers repeat their requests, which keeps their sessions alive. No member is removed, and the generation stays."""
    stands.least = 3  # so that it blocks in the generation of both followers, however late the second one joins
    leader = group.join(stands, session_timeout_ms=20_000)
    group.settle()
    followers = [group.join(session_timeout_ms=4000) for _ in range(2)]  # so that a parked SyncGroup is repeated every second
    wait_for(group, stands.inside.is_set)
    generation = group.described().generation
    heard = {each.member_id: each.seen_at for each in group.described().members}

    def asked() -> bool:
        now = {each.member_id: each.seen_at for each in group.described().members}
        return all((now[each.member_id] - heard[each.member_id]).total_seconds() > 4.5 for each in followers)

    wait_for(group, asked)
    stands.go_on.set()
    group.settle()
    assert leader.leads
    assert group.described().generation == generation
    assert sorted(len(member.assignment) for member in group.members) == [1, 1, 2]


def lead(url: str, inside: Any, go_on: Any) -> None:
    """Runs the leader, in a separate process."""
    member = Group(url, seat=LONG).join(Stands(inside, go_on), session_timeout_ms=6000)
    while True:
        member.poll(0.1)


def test_leader_whose_process_is_killed_in_its_assignor_is_replaced_when_its_session_ends(group: Group) -> None:
    """With SIGKILL, there is no LeaveGroup, Postgres finds the session closed, and no process is left to send the assignment."""
    context = multiprocessing.get_context("spawn")
    inside, never = context.Event(), context.Event()
    process = context.Process(target=lead, args=(group.url, inside, never), daemon=True)
    process.start()
    try:
        until(lambda: (found := group.describe()) is not None and found.state == GroupState.STABLE, "it leads a group of its own")
        followers = [group.join() for _ in range(2)]
        wait_for(group, inside.is_set)
        process.kill()
        killed = time.monotonic()
        wait_for(group, lambda: have_all(group))
        assert time.monotonic() - killed < 6 + SLACK_S
        group.settle()
        assert sum(follower.leads for follower in followers) == 1
    finally:
        process.kill()
        process.join(120)
