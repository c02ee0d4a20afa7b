"""Runs of a consumer with several members, with threads as drivers and a real Kafka and Postgres. The rows are exact, whenever members
join."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.consume import claims
from tidemark.db import session
from tidemark.driver import launch
from tidemark.errors import BadInput, DatabaseUnavailable, Fenced
from tidemark.group.coordinator import Coordinator
from tidemark.group.member import Member, MemberSettings
from tidemark.group.requests import GroupConfig, Leaving
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice

PARTITIONS, RECORDS = 4, 100


@dataclass
class Team:
    """Members of one consumer, each a mapped task of one DAG run."""

    scenario: Scenario
    topic: str
    run_id: int = 0
    produced: list[int] = field(default_factory=lambda: [0] * PARTITIONS)

    def produce(self, count: int = RECORDS) -> None:
        for partition in range(PARTITIONS):
            first = self.produced[partition]
            self.scenario.topics.produce(self.topic, [f"{partition}-{first + number}" for number in range(count)], partition=partition)
            self.produced[partition] += count

    def next_run(self) -> None:
        """Starts another DAG run with as much to read."""
        self.run_id += 1
        self.produce()

    def task(self, member: int, try_number: int = 1) -> TaskIdentity:
        return TaskIdentity("consume__team", f"run {self.run_id}", "consume", member, try_number)

    def seats(self) -> dict[int, str]:
        return dict(self.scenario.sql("SELECT partition, instance_id FROM tidemark.partition_offset ORDER BY 1"))

    def check(self) -> None:
        """Checks that every record is in the sink exactly once."""
        for partition, count in enumerate(self.produced):
            found = [payload.decode() for payload in self.scenario.rows("payload", where=f"kafka_partition = {partition}")]
            assert found == [f"{partition}-{number}" for number in range(count)]
        self.scenario.check()

    def describe(self) -> int:
        with session(self.scenario.database_url) as connection:
            found = Coordinator(connection, self.scenario.spec.group).describe()
        return 0 if found is None else len(found.members)


@pytest.fixture
def team(scenario: Scenario) -> Team:
    team = Team(scenario, scenario.topics.create(PARTITIONS))
    scenario.write(topics=team.topic, members=2, batch={"max_records": 120}).make_sink()
    team.produce()
    return team


def test_members_of_a_run_share_its_partitions_and_keep_them(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other, read what they were assigned, and leave. The order in which they join does not matter."""
    seen = []
    with monkeypatch.context() as patient, ThreadPoolExecutor(2) as pool:
        settings = partial(MemberSettings, config=GroupConfig(initial_rebalance_delay_ms=60_000))
        patient.setattr("tidemark.group.member.MemberSettings", settings)
        for order in ((0, 1), (1, 0)):
            runs = [pool.submit(team.scenario.run, task=team.task(member)) for member in order]
            assert [run.result(180).records for run in runs] == [2 * RECORDS] * 2
            assert team.describe() == 0
            seen.append(team.seats())
            team.next_run()
    assert seen[0] == seen[1]
    assert set(seen[0].values()) == {"consume__team/consume/0", "consume__team/consume/1"}
    team.scenario.run(task=team.task(0))
    team.check()


def test_run_with_fewer_slots_than_members_ends_with_everything_read(team: Team) -> None:
    """The first does not wait for the second, which starts when the first has ended and finds nothing to read."""
    assert team.scenario.run(task=team.task(0)).records == PARTITIONS * RECORDS
    assert team.scenario.run(task=team.task(1)).records == 0
    team.check()


def test_member_that_comes_late_takes_its_share(team: Team) -> None:
    """The group rebalances between two batches of the first member."""
    team.produce(1000)
    stands, go_on = threading.Event(), threading.Event()

    def slow(_: Slice) -> None:
        stands.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first: Future[launch.Progress] = pool.submit(team.scenario.run, task=team.task(0), before=slow)
        assert stands.wait(60)
        second = pool.submit(team.scenario.run, task=team.task(1))
        until(lambda: team.describe() == 2, "the second has joined")
        go_on.set()
        counts = [first.result(180).records, second.result(180).records]
    assert min(counts) > 0
    team.check()


@pytest.fixture
def claim(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Does something just before the claim with this number."""

    def at(number: int, act: Callable[[], None]) -> None:
        calls, original = itertools.count(1), claims.claim_all

        def claim_all(*arguments: Any) -> Any:
            if next(calls) == number:
                act()
            return original(*arguments)

        monkeypatch.setattr(claims, "claim_all", claim_all)

    return at


@pytest.mark.parametrize("at", [1, 2], ids=["of what it was assigned", "after a batch that failed"])
def test_claim_that_is_the_first_to_find_the_member_removed_joins_again(team: Team, claim: Any, at: int) -> None:
    """Its heartbeat, in another thread, may learn about it later."""
    slices = itertools.count(1)

    def remove() -> None:
        with session(team.scenario.database_url) as connection:
            seat = Leaving("", "consume__team/consume/0", "removed by an operator")
            assert Coordinator(connection, team.scenario.spec.group).leave([seat]) == [None]

    def fail_once(_: Slice) -> None:
        if next(slices) == 1:
            raise DatabaseUnavailable(cause="the first slice")

    claim(at, remove)
    assert team.scenario.run(task=team.task(0), before=fail_once).records == PARTITIONS * RECORDS
    assert team.describe() == 0
    team.check()


def test_static_member_that_takes_the_seat_of_one_killed_before_it_left_reads_on(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitions are released, and the group is still Stable in the same generation: no rebalance will follow."""
    with monkeypatch.context() as killed:
        killed.setattr(Member, "_leave", lambda member, reason: None)
        team.scenario.run(task=team.task(0))
    assert team.describe() == 1
    team.next_run()
    assert team.scenario.run(task=team.task(0)).records == PARTITIONS * RECORDS
    assert team.describe() == 0
    team.check()


def taken(team: Team, generation: str) -> None:
    """Simulates that another owner claims the partitions in this generation."""
    team.scenario.sql(
        f"UPDATE tidemark.partition_offset SET owner = 'somebody else', owner_epoch = owner_epoch + 1, generation = ({generation})"
    )


def test_run_whose_partitions_somebody_outside_the_group_has_taken_does_not_end_well(team: Team) -> None:
    """No rebalance will give them back, because the manual run is newer than this one."""
    team.scenario.run(task=team.task(0))
    team.next_run()
    calls = itertools.count(1)

    def take(_: Slice) -> None:
        if next(calls) == 1:
            taken(team, "SELECT nextval('tidemark.generation')")

    with pytest.raises(Fenced):
        team.scenario.run(task=team.task(0), before=take)
    assert team.scenario.attempt()["error"]["kind"] == "fenced"
    assert team.describe() == 0


def test_run_that_was_too_late_to_claim_waits_for_the_rebalance_that_follows(team: Team, claim: Any) -> None:
    """The group moved to another generation, whose claims came first. The next generation includes this member again."""
    team.scenario.run(task=team.task(0))
    team.next_run()

    def move() -> None:
        team.scenario.sql("UPDATE tidemark.consumer_group SET generation = nextval('tidemark.generation')")
        taken(team, "SELECT generation FROM tidemark.consumer_group")

    claim(1, move)
    assert team.scenario.run(task=team.task(0)).records == PARTITIONS * RECORDS
    team.check()


LISTENER = """
from pathlib import Path

from tidemark.group.listener import RebalanceListener


class Notes(RebalanceListener):
    def on_partitions_assigned(self, partitions):
        self.note("assigned", partitions)

    def on_partitions_revoked(self, partitions):
        self.note("revoked", partitions)

    def note(self, what, partitions):
        with Path(__file__).with_suffix(".notes").open("a") as notes:
            notes.write(f"{what} {','.join(str(part.partition) for part in partitions)}\\n")
"""


@pytest.mark.parametrize("members", [1, 2])
def test_listeners_of_the_user_hear_of_partitions(team: Team, monkeypatch: pytest.MonkeyPatch, members: int) -> None:
    """This holds for partitions that a single member takes, and for those that the group assigns."""
    folder, module = team.scenario.folder / "transforms", f"notes_{team.scenario.name}"
    (folder / f"{module}.py").write_text(LISTENER)
    monkeypatch.syspath_prepend(folder)
    team.scenario.set(members=members, listeners=[f"{module}:Notes"])
    team.scenario.run(task=team.task(0))
    assert (folder / f"{module}.notes").read_text().splitlines() == ["assigned 0,1,2,3", "revoked 0,1,2,3"]


def test_listener_that_is_none_is_refused_with_what_to_write(team: Team) -> None:
    team.scenario.set(listeners=["tidemark.errors:Refused"])
    with pytest.raises(BadInput, match="Write module:Class"):
        team.scenario.run(task=team.task(0))
