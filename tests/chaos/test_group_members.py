"""Members of a group as processes with Spark: one is killed, or stopped and continued, in the middle of a commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.chaos.postgres_server import PostgresServer
from tests.chaos.trial import Trial, failure
from tests.support.attempts import all_gone
from tests.support.members import Group, wait_for
from tests.support.waiting import until

from tidemark.driver.launch import DriverDied, Progress
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
    chaos.share(SESSION_MS, slice_offsets=chaos.feed.ends[0] // ROUNDS)
    return chaos


def seats(chaos: Trial) -> list[str]:
    return [seat for (seat,) in chaos.scenario.sql("SELECT instance_id FROM tidemark.group_member")]


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("step", [Step.BEGIN, Step.COMMIT], ids=["before-it-asked-for-the-row", "while-it-held-the-row"])
def test_member_that_slept_through_its_session_commits_nothing_of_it_and_takes_over_when_the_other_is_killed(team: Trial, step: Step):
    """All processes of a member are stopped (SIGSTOP) until the other member owns its partition, and then continued (SIGCONT). The slice is
    fenced, and the member joins again. The other one is killed in the middle of the slice that it has taken over. Within its session
    timeout, the first has its partitions, reads everything that is left, and ends."""
    point, others = team.points.at(step), team.points.at(Step.COMMIT)
    members = [team.begin(0), team.begin(1)]
    mark = point.reached()
    others.reached()
    asleep = next(member for member in members if any(process.pid == mark.pid for process in member.tree()))
    other = members[1 - members.index(asleep)]
    taken = team.points.at(Step.COMMIT, partition=mark.partition, epoch=mark.epoch + 1)
    suspended = asleep.suspend()
    point.release()
    until(lambda: len(seats(team)) == 1, "the group has removed it", TAKEOVER_S)
    others.release()
    again = taken.reached()
    assert again.start == mark.start
    for process in suspended:
        process.resume()
    until(lambda: len(seats(team)) == 2, "it has joined again", TAKEOVER_S)
    tree = other.tree()
    team.reader.look()
    other.driver.kill()
    assert isinstance(failure(other.wait()), DriverDied)
    until(lambda: all_gone(tree), "driver, JVM and workers gone")
    team.check_stored(again, committed=False)
    until(lambda: len(seats(team)) == 1, "the group has removed the other", TAKEOVER_S)
    done = asleep.wait(TAKEOVER_S)
    assert isinstance(done, Progress), asleep.log
    assert done.state == "COMMITTED"


def test_members_outlive_a_restart_of_the_database(database_url: str, server: PostgresServer) -> None:
    """The members lose their sessions with Postgres, but not their seats: no member joins again, and the next heartbeats succeed."""
    with Group(database_url, seat={"session_timeout_ms": 120_000}) as group:
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
