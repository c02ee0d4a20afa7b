"""A failed batch of a group member is read again from the last commits, in the same generation (seek on failure).

Kafka and Postgres are real, and the driver runs in a thread. The group has another member, which must not notice anything.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from tests.support.ledger import in_thread
from tests.support.members import QUICK, Told, wait_for
from tests.support.scenario import Scenario

from tidemark.consume.membership import TRIES, metadata_of
from tidemark.driver.launch import Progress
from tidemark.errors import BrokerUnavailable, DatabaseUnavailable
from tidemark.group.assignors import find_assignor
from tidemark.group.coordinator import Coordinator
from tidemark.group.member import Member, MemberSettings
from tidemark.group.requests import Joined, JoinRequest
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice, TopicPartition

PARTITIONS, RECORDS = 4, 100
"""Each of two members has two partitions. A batch holds all records of both."""
TASK = TaskIdentity("consume__team", "run", "consume", 0, 1)

Strike = Callable[[Scenario, Slice], None]


class Team:
    """A run that is a member of a group of two, and the state of the group at the start of each slice. The other member reads nothing."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.topic = scenario, scenario.topics.create(PARTITIONS)
        for partition in range(PARTITIONS):
            scenario.topics.produce(self.topic, [f"{partition}-{number}" for number in range(RECORDS)], partition=partition)
        scenario.write(topics=self.topic, members=2).make_sink()
        self.slices: list[Slice] = []
        self.joins: list[str] = []
        self.seen: list[tuple[int, int]] = []
        """The group's generation, and how many JoinGroups it has received, at the start of each slice."""

    def generation(self) -> int:
        ((generation,),) = self.scenario.sql("SELECT generation FROM tidemark.consumer_group WHERE name = %s", self.scenario.spec.group)
        return int(generation)

    def run(self, fail: Callable[[Slice], None]) -> Progress:
        """Calls ``fail`` before each slice. An error that it raises becomes the slice's outcome."""

        def before(part: Slice) -> None:
            self.slices.append(part)
            self.seen.append((self.generation(), len(self.joins)))
            fail(part)

        return self.scenario.run(before=before, task=TASK)

    def run_beside(self, other: Member, fail: Callable[[Slice], None]) -> Progress:
        """The same while the other member polls."""
        with in_thread(lambda: self.run(fail)) as done:
            wait_for(other, done.done)
            return done.result()

    def rest(self) -> None:
        """Reads the remaining records in a run outside the group, and checks that every record is stored once."""
        self.scenario.set(members=None)
        self.scenario.run()
        found = self.scenario.rows()
        assert found == [f"{partition}-{number}".encode() for partition in range(PARTITIONS) for number in range(RECORDS)]
        self.scenario.check()


@pytest.fixture
def team(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Team:
    team = Team(scenario)
    join = Coordinator.join

    def noted(self: Coordinator, request: JoinRequest) -> Joined | None:
        team.joins.append(request.client_id)
        return join(self, request)

    monkeypatch.setattr(Coordinator, "join", noted)
    return team


@pytest.fixture
def other(team: Team) -> Iterator[Member]:
    """A member that is already in the group and has all partitions."""
    cluster, told = Cluster(team.scenario.connections.kafka), Told()
    member = Member(
        team.scenario.database_url,
        MemberSettings(group=team.scenario.spec.group, client_id="other", **QUICK),
        [find_assignor("cooperative-sticky")],
        lambda: (team.topic,),
        lambda topics: metadata_of(cluster, topics),
        [told],
    )
    with closing(member):
        wait_for(member, lambda: len(member.assignment) == PARTITIONS)
        yield member


def broker_is_away(scenario: Scenario, part: Slice) -> None:
    raise BrokerUnavailable(cause="it does not answer")


def database_is_away(scenario: Scenario, part: Slice) -> None:
    raise DatabaseUnavailable(cause="it does not answer")


def partition_is_taken(scenario: Scenario, part: Slice) -> None:
    """Raises the epoch, as a rewind does. The commit that follows is fenced."""
    scenario.sql("UPDATE tidemark.partition_offset SET owner_epoch = owner_epoch + 1 WHERE partition = %s", part.partition.partition)


class Strikes:
    """Strikes the first ``count`` tries of each slice: of the partition that starts first or, with ``everywhere``, of all partitions."""

    def __init__(self, scenario: Scenario, strike: Strike, count: int, *, everywhere: bool = False) -> None:
        self._scenario, self._strike, self._count, self._everywhere = scenario, strike, count, everywhere
        self._lock = threading.Lock()
        self._struck: Counter[tuple[TopicPartition, int]] = Counter()
        self.partition: TopicPartition | None = None

    def __call__(self, part: Slice) -> None:
        with self._lock:
            self.partition = self.partition or part.partition
            meant = self._everywhere or part.partition == self.partition
            self._struck[part.partition, part.start] += 1
            meant = meant and self._struck[part.partition, part.start] <= self._count
        if meant:
            self._strike(self._scenario, part)


@pytest.mark.parametrize("strike", [broker_is_away, database_is_away, partition_is_taken])
def test_failed_batch_is_read_again_from_the_last_commits_on_without_a_rebalance(team: Team, other: Member, strike: Strike) -> None:
    """Only slices that were not committed are read again. Each time the partitions are claimed again, so that nothing of the failed batch
    can commit late. Generation and number of JoinGroups stay the same, for both members."""
    strikes = Strikes(team.scenario, strike, TRIES - 1)
    done = team.run_beside(other, strikes)
    assert (done.state, done.records) == ("COMMITTED", 2 * RECORDS)
    struck = [part for part in team.slices if part.partition == strikes.partition]
    spared = [part for part in team.slices if part.partition != strikes.partition]
    assert [(part.start, part.end) for part in struck] == [(0, RECORDS)] * TRIES
    assert [(part.start, part.end) for part in spared] == [(0, RECORDS)]
    assert sorted({part.epoch for part in struck}) == [part.epoch for part in struck]
    assert len(set(team.seen)) == 1
    team.rest()


def test_success_in_between_is_the_end_of_a_failure(team: Team, other: Member) -> None:
    """The limit on tries applies to one batch: a run may fail any number of times as long as it makes progress."""
    team.scenario.set(batch={"max_records": RECORDS // 2})
    done = team.run_beside(other, Strikes(team.scenario, broker_is_away, TRIES - 1, everywhere=True))
    assert (done.state, done.records) == ("COMMITTED", 2 * RECORDS)
    assert len(team.slices) == 4 * TRIES
    assert len(set(team.seen)) == 1
    team.rest()


def test_batch_that_fails_too_often_ends_the_attempt_with_what_is_committed(team: Team, other: Member) -> None:
    """Only then does the member leave and the group rebalance, which gives its partitions to the other member."""
    strikes = Strikes(team.scenario, broker_is_away, TRIES)
    with pytest.raises(BrokerUnavailable):
        team.run_beside(other, strikes)
    assert len(set(team.seen)) == 1
    assert len(team.slices) == TRIES + 1
    assert team.scenario.attempt()["state"] == "FAILED"
    assert team.scenario.attempt()["error"]["kind"] == "unavailable"
    assert sorted(team.scenario.positions().values()) == [0, RECORDS]
    wait_for(other, lambda: len(other.assignment) == PARTITIONS)
    assert team.generation() > team.seen[0][0]
    team.rest()
