"""A group of two real Spark members is rewound while both read: one is inside a COPY, or is stopped in the middle of a rebalance.

No member ends or is restarted. There is no rebalance unless one is already in progress: the members claim their partitions again in the
same generation, and continue from the new positions. A reader takes snapshots all the time. In each of them, rows, failed records, ledger
and positions agree, even immediately before and after a rewind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.chaos.trial import Trial, instance
from tests.support.attempts import Attempt
from tests.support.by_hand import ByHand
from tests.support.ledger import in_thread
from tests.support.points import Mark
from tests.support.waiting import until

from tidemark.records.ranges import TopicPartition
from tidemark.rewind import apply as applying
from tidemark.rewind.apply import Applied
from tidemark.rewind.plan_model import FromFile
from tidemark.sink.steps import Step

PARTITIONS, BACKLOG, SLICE = 4, 20, 40
"""The number of partitions, the rounds of the feed that exist before any member reads, and the offsets per batch."""
SESSION_MS = 20_000
START_S, GO_ON_S = 180, 180
"""Limits for two drivers to start on two cores, and for a member to commit again after a rewind."""
SHORT_MS = 300


@dataclass(frozen=True, slots=True)
class Membership:
    """The state that a rewind must not change."""

    generation: int
    members: dict[str, str]
    owners: dict[int, str]
    drivers: tuple[int, ...]


class Members:
    """Two continuous members of one group, each a driver with a JVM and a worker, while records arrive."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.attempts: list[Attempt] = []

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.trial.scenario.sql(statement, *parameters)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Starts both members. The block runs once both own partitions and more than two batches of each partition are committed."""
        self.attempts = [self.trial.begin(seat) for seat in range(2)]
        with self.trial.arriving(0.3):
            until(lambda: len(set(self.owners().values())) == 2 and min(self.positions().values()) > 2 * SLICE, "both read", START_S)
            yield

    def positions(self) -> dict[int, int]:
        found = dict(self.sql("SELECT partition, next_offset FROM tidemark.partition_offset"))
        return {partition: found.get(partition, 0) for partition in range(PARTITIONS)}

    def owners(self) -> dict[int, str]:
        return dict(self.sql("SELECT partition, owner FROM tidemark.partition_offset WHERE owner IS NOT NULL"))

    def state(self) -> str:
        return str(self.sql("SELECT state FROM tidemark.consumer_group")[0][0])

    def membership(self) -> Membership:
        generation = self.sql("SELECT generation FROM tidemark.consumer_group")[0][0]
        members = dict(self.sql("SELECT instance_id, member_id FROM tidemark.group_member WHERE NOT pending"))
        return Membership(generation, members, self.owners(), tuple(one.driver.pid for one in self.attempts if one.driver and one.running))

    def starts(self, batch: int) -> dict[int, int]:
        """Returns the offset at which the first ``batch`` batches of each partition end."""
        query = "SELECT partition, array_agg(start_offset ORDER BY start_offset) FROM tidemark.batch GROUP BY partition"
        return {partition: starts[batch] for partition, starts in self.sql(query)}

    def rewind(self, to: dict[int, int]) -> Applied:
        by_hand = ByHand(self.trial.scenario)
        offsets = {TopicPartition(self.trial.feed.topic, partition): offset for partition, offset in to.items()}
        return by_hand.apply(by_hand.plan(FromFile(offsets)).rewind_id)

    def go_on(self, done: Applied) -> None:
        """Waits until each partition has reached its position before the rewind."""
        old = {part.partition.partition: part.old for _, part in done.plan}
        until(lambda: all(at >= old[partition] for partition, at in self.positions().items()), "all back where they were", GO_ON_S)

    def check_audit(self, rewinds: int) -> None:
        """Checks that the history of each rewind matches its archive."""
        found = self.sql(
            "SELECT relation, rows, (SELECT sum(sink_rows) FROM tidemark.rewind_partition part WHERE part.rewind_id = kept.rewind_id)"
            " FROM tidemark.rewind_archive kept JOIN tidemark.rewind USING (rewind_id) WHERE state = 'APPLIED'"
        )
        assert len(found) == rewinds
        for relation, rows, taken in found:
            assert self.sql(f"SELECT count(*) FROM {relation}") == [(rows,)]
            assert rows == taken


@pytest.fixture
def members(trial: Callable[..., Trial]) -> Members:
    made = trial(PARTITIONS)
    made.share(SESSION_MS, slice_offsets=SLICE)
    made.scenario.set(run="continuous")
    made.watch(pause_s=0.1, rewinds=True)
    return Members(made)


def held(members: Members) -> Mark:
    """Holds a member that has copied the rows of a slice beyond everything read so far, and has locked the partition's row."""
    return members.trial.points.at(Step.COPY_FAILED, start=max(members.positions().values())).reached()


@pytest.mark.thorough
def test_members_that_are_rewound_while_they_read_go_on_without_a_rebalance_and_store_every_record_once(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewind waits for a commit that is inside its COPY, and takes it back with the rest. After the grace period, it ends the session
    of the commit, which then stores nothing. The same applies in the middle of a rebalance: at its end, the members claim the new
    positions. `tests/integration/rewind/test_at_once.py` tries each of these with less work."""
    members.trial.feed.add(BACKLOG)
    with members.reading():
        before = members.membership()
        assert len(before.members) == len(before.drivers) == 2

        monkeypatch.setattr(applying, "GRACE_MS", SHORT_MS)
        mark = held(members)
        done = members.rewind(members.starts(1))
        old = {part.partition.partition: part.old for _, part in done.plan}
        assert old[mark.partition] == mark.start
        members.trial.points.release_all()
        members.go_on(done)
        assert members.membership() == before

        monkeypatch.setattr(applying, "GRACE_MS", 10_000)
        mark = held(members)
        with in_thread(lambda: members.rewind(members.starts(2))) as applied:
            waits = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'tidemark rewind' AND wait_event_type = 'Lock'"
            until(lambda: members.sql(waits), "the rewind waits for the commit")
            members.trial.points.release_all()
            done = applied.result(GO_ON_S)
        taken = members.sql(
            "SELECT start_offset, end_offset FROM tidemark.rewound_batch WHERE rewound_by = %s AND partition = %s",
            done.plan.rewind_id,
            mark.partition,
        )
        assert (mark.start, mark.end) in taken
        members.go_on(done)
        assert members.membership() == before

        monkeypatch.setattr(applying, "GRACE_MS", SHORT_MS)
        first, second = instance(0), instance(1)
        asleep = members.attempts[0].suspend()
        try:
            members.trial.remove(1)
            until(lambda: members.membership().members.get(second, before.members[second]) != before.members[second], "it has joined again")
            done = members.rewind(members.starts(1))
            assert done.plan.groups[0].group_state == members.state() == "PreparingRebalance"
        finally:
            for process in asleep:
                process.resume()
        members.go_on(done)
        after = members.membership()
        assert after.generation > before.generation
        assert after.members[first] == before.members[first]
        assert set(after.owners.values()) == {first, second}
        assert after.drivers == before.drivers
    until(lambda: [*members.positions().values()] == members.trial.feed.ends, "all is read", GO_ON_S)
    members.check_audit(3)
