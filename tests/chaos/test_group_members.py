"""Members of a group as processes with Spark: one is killed, or stopped and continued, in the middle of a commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.chaos.postgres_server import PostgresServer
from tests.chaos.trial import Trial, failure
from tests.support.attempts import FAST_JVM, all_gone
from tests.support.members import Group, wait_for
from tests.support.points import Mark
from tests.support.waiting import until

from tidemark.consume.launch import DriverDied, Progress
from tidemark.sink.steps import Step

PARTITIONS, ROUNDS = 4, 3
SESSION_MS = 6000
"""The shortest session timeout that a group allows by default."""
TAKEOVER_S = SESSION_MS / 1000 + 120
"""The limit for the takeover of a dead member's partitions: its session timeout, a heartbeat of the surviving members, a rebalance."""


@pytest.fixture
def team(trial: Callable[..., Trial]) -> Trial:
    """A consumer with two members. A batch reads one round of the feed in one partition."""
    chaos = trial(PARTITIONS)
    chaos.feed.add(ROUNDS)
    chaos.scenario.set(members=2, batch={"max_records": chaos.feed.ends[0] // ROUNDS})
    kafka = {**chaos.scenario.connections.kafka, "session.timeout.ms": str(SESSION_MS), "heartbeat.interval.ms": "500"}
    chaos.scenario.connections = replace(chaos.scenario.connections, kafka=kafka, spark_master="local[1]", spark_conf=FAST_JVM)
    return chaos


def seats(chaos: Trial) -> list[str]:
    return [seat for (seat,) in chaos.scenario.sql("SELECT instance_id FROM tidemark.group_member")]


def owner(chaos: Trial, mark: Mark) -> str | None:
    found = chaos.scenario.sql("SELECT owner FROM tidemark.partition_offset WHERE partition = %s", mark.partition)
    return str(found[0][0]) if found else None


def test_partitions_of_a_killed_member_are_taken_over_within_its_session_timeout(team: Trial, record_property) -> None:
    """The other member is in the middle of a batch. It continues with its partitions, takes over, reads everything that is left, and
    ends."""
    point, others = team.points.at(Step.COMMIT), team.points.at(Step.COMMIT)
    members = [team.begin(0), team.begin(1)]
    mark = point.reached()
    others.reached()
    dead = next(member for member in members if any(process.pid == mark.pid for process in member.tree()))
    other = members[1 - members.index(dead)]
    before, tree = owner(team, mark), dead.tree()
    team.reader.look()
    assert dead.driver is not None
    dead.driver.kill()
    killed = time.monotonic()
    assert isinstance(failure(dead.wait()), DriverDied)
    until(lambda: all_gone(tree), "driver, JVM and workers gone")
    team.check_stored(mark, committed=False)
    until(lambda: len(seats(team)) == 1, "the group has removed it", TAKEOVER_S)
    others.release()
    until(lambda: owner(team, mark) not in (before, None), "the other has claimed its partition", TAKEOVER_S)
    record_property("takeover_s", round(time.monotonic() - killed, 1))
    record_property("session_timeout_s", SESSION_MS / 1000)
    assert isinstance(other.wait(), Progress)


@pytest.mark.parametrize("step", [Step.BEGIN, Step.COMMIT], ids=["before-it-asked-for-the-row", "while-it-held-the-row"])
def test_member_that_slept_through_its_session_commits_nothing_of_it_and_goes_on(team: Trial, step: Step) -> None:
    """All processes of a member are stopped (SIGSTOP) until the other member owns its partition, and then continued (SIGCONT). The slice is
    fenced. The member joins again and ends successfully."""
    point, others = team.points.at(step), team.points.at(Step.COMMIT)
    members = [team.begin(0), team.begin(1)]
    mark = point.reached()
    others.reached()
    asleep = next(member for member in members if any(process.pid == mark.pid for process in member.tree()))
    before, suspended = owner(team, mark), asleep.suspend()
    point.release()
    until(lambda: len(seats(team)) == 1, "the group has removed it", TAKEOVER_S)
    others.release()
    until(lambda: owner(team, mark) not in (before, None), "the other has claimed its partition", TAKEOVER_S + 15)
    for process in suspended:
        process.resume()
    for member in members:
        done = member.wait(90)
        assert isinstance(done, Progress), member.log
        assert done.state == "COMMITTED"


def test_members_outlive_a_restart_of_the_database(database_url: str, server: PostgresServer) -> None:
    """The members lose their sessions with Postgres, but not their seats: no member joins again, and the next heartbeats succeed."""
    group = Group(database_url)
    try:
        first, second = group.join(), group.join()
        group.settle()
        generation, ids = first.generation, {first.member_id, second.member_id}
        server.stop(0)
        server.up()
        seen = group.described().members
        wait_for(group, lambda: all(now.seen_at > before.seen_at for now, before in zip(group.described().members, seen, strict=True)))
        group.settle()
        assert (first.generation, {first.member_id, second.member_id}) == (generation, ids)
        group.close(first)
        wait_for(second, lambda: len(second.assignment) == PARTITIONS)
    finally:
        for member in group.members:
            member.close()
