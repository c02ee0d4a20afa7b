"""Two to five Spark members of one topic are killed, stopped and continued, removed by an operator and added at random, while records
arrive.

Every member is a driver with a separate JVM and Python workers. The order of the faults, their targets, and the step of a commit at which
they strike follow from a seed, which is printed. ``TIDEMARK_CHURN_SEED`` sets it. At the end, each record is stored once. Other members
take over the partitions of every dead member within its session timeout plus `BOUND_S`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.trial import Trial, failure, instance
from tests.support.attempts import Attempt, all_gone
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.driver.launch import DriverDied, Progress
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice

SEED = "TIDEMARK_CHURN_SEED"
PARTITIONS, BACKLOG, SLICE = 6, 60, 36
"""The number of partitions, the rounds of the feed that exist before any member reads, and the offsets per batch, which is one slice."""
FEWEST, MOST, FIRST = 2, 5, 4
ENOUGH = 5 * SLICE
"""Each surviving member must have more than this many offsets left to read in each partition. Otherwise it might end its run before it
takes over."""
SESSION_MS = 6000
"""The shortest session timeout that a group allows by default."""
BOUND_S = 120
"""How long a takeover may take beyond the session timeout. It takes about 4 s: a heartbeat interval of half a second, a rebalance, the
batch in flight of the new owner, and then a batch of the partition. If a stopped process holds the row, the claim waits for it for another
10 s (`GRACE_MS`). The rest is a margin for a busy machine with five JVMs."""
BUSY_S = 120
"""The limit for everything but a takeover: a driver that starts while four others run, a run that ends."""
STEPS = ("stop", "remove", "add", "kill")
"""The faults after the first kill, in an order that the seed determines."""

PAUSES = '''
"""Pauses a commit before one of its steps, so that a fault strikes there."""

import os
import random
import threading
from pathlib import Path

PAUSE_S = 0.8


def hook(step, part):
    chance = random.Random(f"{os.environ['TIDEMARK_CHURN_SEED']} {part.partition} {part.epoch}")
    if step.value == chance.randrange(1, 7) and Path(os.environ["TIDEMARK_CHURN_SLOW"]).exists():
        threading.Event().wait(PAUSE_S)
'''


class Churn:
    """The running members, by seat, and the faults that they suffer."""

    def __init__(self, trial: Trial, seed: int) -> None:
        self.trial, self.chance = trial, random.Random(seed)
        self.running: dict[int, Attempt] = {}
        self.ends: dict[int, list[int]] = {}
        """The ends of the partitions when each member started. It reads at least up to them."""
        self.takeovers: list[float] = []
        self.said: list[str] = []
        self._began = time.monotonic()

    # ---- what is stored

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.trial.scenario.sql(statement, *parameters)

    def members(self) -> dict[str, str]:
        """Member ids by instance id."""
        return dict(self.sql("SELECT instance_id, member_id FROM tidemark.group_member WHERE NOT pending"))

    def owned(self, seat: int) -> dict[int, int]:
        """The positions of the partitions that a seat owns."""
        return dict(self.sql("SELECT partition, next_offset FROM tidemark.partition_offset WHERE owner = %s", instance(seat)))

    def reads(self, attempt: Attempt) -> bool:
        """Whether the attempt has committed anything."""
        return self.sql("SELECT 1 FROM tidemark.batch WHERE attempt_id = %s LIMIT 1", attempt.attempt_id) != []

    def now(self) -> Any:
        return self.sql("SELECT clock_timestamp()")[0][0]

    # ---- members

    def add(self, count: int = 1) -> None:
        """Starts members in free seats, each in a new run. They join before they start Spark."""
        free = [seat for seat in range(MOST) if seat not in self.running]
        added = self.chance.sample(free, count)
        for seat in added:
            self.trial.next_run()
            self.ends[seat] = list(self.trial.feed.ends)
            self.running[seat] = self.trial.begin(seat)
            self.say(f"added {seat}")
        for seat in added:
            self.wait_for(seat, lambda seat=seat: instance(seat) in self.members(), "it has joined", BUSY_S)

    def wait_for(self, seat: int, condition: Callable[[], Any], what: str, within_s: float) -> None:
        """Waits until the condition holds or the member has ended; `replace_ended` checks how it ended."""
        until(lambda: condition() or not self.running[seat].running, what, within_s)

    def replace_ended(self) -> None:
        """Checks that the members that have ended were successful, and starts new ones if too few are left. A member ends when it has read
        everything that existed when it started."""
        for seat, attempt in list(self.running.items()):
            if not attempt.running:
                self.ended(attempt)
                del self.running[seat]
                self.say(f"ended {seat}")
        while len(self.running) < FEWEST:
            self.add()

    @staticmethod
    def ended(attempt: Attempt) -> None:
        done = attempt.wait(BUSY_S)
        assert isinstance(done, Progress), f"{done}\n{attempt.log}"
        assert done.state == "COMMITTED"

    def victim(self, *, all_read: bool = False) -> int:
        """Chooses a member at random. Enough members for a group remain; with ``all_read``, all of them have begun to read."""
        while True:
            self.replace_ended()
            while len(self.running) <= FEWEST:
                self.add()
            if all_read:
                until(lambda: all(self.reads(one) or not one.running for one in self.running.values()), "all members read", BUSY_S)
            alive = [seat for seat, attempt in self.running.items() if attempt.running]
            if len(alive) > FEWEST:
                return self.chance.choice(sorted(alive))

    # ---- faults

    def kill(self) -> None:
        """Kills the driver with SIGKILL; its JVM and workers die with it. The members that take over are already reading, so that the
        measured time does not include a start of Spark."""
        seat = self.victim(all_read=True)
        dead = self.running.pop(seat)
        tree = dead.tree()
        left = sorted(self.owned(seat)) if self.much_is_left() else []
        began = self.now()
        dead.driver.kill()
        self.say(f"killed {seat}, which had {left}")
        assert isinstance(failure(dead.wait()), DriverDied)
        until(lambda: all_gone(tree), "driver, JVM and workers gone")
        for part in left:
            found = until(lambda part=part: self.by_another(part, dead, began), f"{part} taken over", SESSION_MS / 1000 + BOUND_S)
            self.takeovers.append((found - began).total_seconds())

    def much_is_left(self) -> bool:
        at = dict(self.sql("SELECT partition, next_offset FROM tidemark.partition_offset"))
        return all(at.get(part, 0) + ENOUGH < self.ends[seat][part] for seat in self.running for part in range(PARTITIONS))

    def by_another(self, part: int, dead: Attempt, began: Any) -> Any:
        """The time of the first commit in the partition by another member."""
        query = "SELECT min(committed_at) FROM tidemark.batch WHERE partition = %s AND attempt_id <> %s AND committed_at > %s"
        return self.sql(query, part, dead.attempt_id, began)[0][0]

    def stop(self) -> None:
        """Stops the driver, JVM and workers (SIGSTOP) until other members own all its partitions, and then continues them (SIGCONT). The
        member joins again and continues to read."""
        seat = self.victim()
        asleep = self.running[seat]
        had, suspended = self.owned(seat), asleep.suspend()
        self.say(f"stopped {seat}, which had {sorted(had)}")
        try:
            until(lambda: self.others(seat) and instance(seat) not in self.members(), "it was removed", SESSION_MS / 1000 + BOUND_S)
            until(lambda: self.others(seat) and not self.owned(seat), "others have claimed its partitions", 2 * BOUND_S)
        finally:
            for process in suspended:
                process.resume()
        self.say(f"continued {seat}")
        self.wait_for(seat, lambda: instance(seat) in self.members(), "it has joined again", BUSY_S)

    def others(self, seat: int) -> bool:
        """Makes sure that there are other members, and returns True. Those that had read everything have ended, and then no member would
        notice that this one is gone."""
        if not any(attempt.running for other, attempt in self.running.items() if other != seat):
            self.add()
        return True

    def remove(self) -> None:
        """The removed member has lost its partitions, and joins again as a new member."""
        seat = self.victim()
        before = self.members()[instance(seat)]
        self.trial.remove(seat)
        self.say(f"removed {seat}")
        self.wait_for(seat, lambda: self.members().get(instance(seat), before) != before, "it has joined again", BUSY_S)

    def say(self, what: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:5.1f} s: {what}")


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> int:
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1_000_000))
    sys.stdout.write(f"{SEED}={seed}\n")
    monkeypatch.setenv(SEED, str(seed))
    return seed


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commits pause as long as this file exists."""
    slow = tmp_path / "slow"
    slow.touch()
    monkeypatch.setenv("TIDEMARK_CHURN_SLOW", str(slow))
    return slow


@pytest.fixture
def churn(trial: Callable[..., Trial], seed: int, slow: Path, monkeypatch: pytest.MonkeyPatch) -> Churn:
    made = trial(PARTITIONS)
    made.share(SESSION_MS, slice_offsets=SLICE, members=FIRST)
    made.watch(pause_s=0.5)
    (made.scenario.folder / "transforms" / "churn_pauses.py").write_text(PAUSES)
    monkeypatch.setenv("TIDEMARK_STEP_HOOK", "churn_pauses:hook")
    return Churn(made, seed)


@pytest.mark.thorough
def test_records_are_stored_once_whatever_becomes_of_the_members(churn: Churn, slow: Path) -> None:
    """At the end, the trial checks that rows, ledger, failed records and positions match the topic, with each record stored once.
    `test_group_members` kills and stops one member each."""
    trial = churn.trial
    trial.feed.add(BACKLOG)
    try:
        with trial.arriving(1):
            churn.add(FIRST)
            for step in ("kill", *churn.chance.sample(STEPS, len(STEPS))):
                churn.replace_ended()
                getattr(churn, step)()
        slow.unlink()
        for attempt in churn.running.values():
            churn.ended(attempt)
        churn.say("all have ended")
        trial.scenario.set(members=None, batch=None)
        trial.next_run()
        trial.run_here()  # records that arrived after the last member started
        churn.say("what was left is read")
    finally:
        sys.stdout.write("\n".join([*churn.said, ""]))
    assert churn.members() == {}
    sys.stdout.write(f"takeovers {[round(one, 1) for one in churn.takeovers]} s, session timeout {SESSION_MS / 1000:g} s\n")
    assert 0 < max(churn.takeovers) < SESSION_MS / 1000 + BOUND_S


def test_member_that_began_earlier_takes_over_what_another_has_read_further(scenario: Scenario) -> None:
    """Records arrive between the starts of two members. The later one reads further and ends first. The earlier one then gets partitions
    whose positions are beyond the ends that it saw. It has nothing to read there in this run, and that does not mean that the log is
    damaged."""
    partitions, count = 4, 50
    topic = scenario.topics.create(partitions)

    def produce(name: str) -> None:
        for partition in range(partitions):
            scenario.topics.produce(topic, [f"{name}-{partition}-{number}" for number in range(count)], partition=partition)

    def run(member: int, before: Callable[[Slice], None] = lambda part: None) -> Progress:
        return scenario.run(before=before, task=TaskIdentity("consume__chaos", "run", "consume", member, 1))

    stands, joined, ended = threading.Event(), threading.Event(), threading.Event()

    def wait(_: Slice) -> None:
        """In the first slice, waits until the other member has joined. In the next one, after this member has given back partitions, waits
        until the other has ended."""
        if stands.is_set():
            assert ended.wait(2 * BUSY_S)
        stands.set()
        assert joined.wait(2 * BUSY_S)

    produce("a")
    scenario.write(topics=topic, members=2, batch={"max_records": count}).make_sink("payload bytea")
    kafka = {**scenario.connections.kafka, "session.timeout.ms": "60000", "heartbeat.interval.ms": "100"}
    scenario.connections = replace(scenario.connections, kafka=kafka)
    with ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(run, 0, wait)
        try:
            assert stands.wait(BUSY_S)
            produce("b")
            later = pool.submit(run, 1)
            beating = (
                "SELECT 1 FROM tidemark.group_member JOIN tidemark.consumer_group USING (group_id)"
                " WHERE state = 'Stable' AND seen_at > state_since + interval '0.2 s'"
            )
            until(lambda: len(scenario.sql(beating)) == 2, "both have their assignment")
            joined.set()
            assert later.result(180).records == 2 * 2 * count
            ended.set()
            assert earlier.result(180).records == 2 * count
        finally:
            joined.set()
            ended.set()
    scenario.set(members=None)
    scenario.run()
    wanted = [f"{name}-{partition}-{number}".encode() for partition in range(partitions) for name in "ab" for number in range(count)]
    assert scenario.rows() == wanted
    scenario.check()
