"""One consumer under fault injection: its topic, its successive attempts, the points at which they are struck, and the reader that
watches."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from tests.chaos.feed import TRANSFORM, Feed
from tests.chaos.reader import Reader, Snapshot
from tests.support.attempts import FAST_JVM, Attempt
from tests.support.ledger import in_thread
from tests.support.points import Mark, Point, Points
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.db import session
from tidemark.driver.launch import Progress
from tidemark.errors import TidemarkError
from tidemark.group.coordinator import Coordinator
from tidemark.group.requests import Leaving
from tidemark.offsets.store import TaskIdentity
from tidemark.sink.steps import Step

SLOTS = len(Step) + 1
"""Concurrent tasks: a slice may stand at each step while others continue."""
STRUCK = 0
"""The partition whose slice is struck, if only one is."""
BEFORE_THE_ROW = (Step.BEGIN, Step.MOVE_OFFSET)
"""Nothing is locked yet, so a later attempt overtakes."""
HOLDING_THE_ROW = (Step.COPY_ROWS, Step.COPY_FAILED, Step.LEDGER, Step.COMMIT)
"""From ② until the commit, the slice's session holds the partition's row."""


@dataclass(frozen=True, slots=True)
class Held:
    """A slice that stands at a point, and the run that it belongs to."""

    point: Point
    mark: Mark
    run: Future[Progress]


class Trial:
    """A scenario with a topic of ``partitions`` partitions. Each run reads everything new in one batch, with one slice per partition.
    Attempts are tries of one Airflow task until `next_run`."""

    def __init__(self, scenario: Scenario, points: Points, partitions: int, transform: str = TRANSFORM, *, value_bytes: int = 0) -> None:
        self.scenario = scenario
        self.points = points
        self.feed = Feed(scenario.topics.servers, scenario.topics.create(partitions), partitions, value_bytes)
        scenario.write(transform, topics=self.feed.topic).make_sink("payload bytea")
        scenario.connections = Connections(scenario.database_url, scenario.connections.kafka, f"local[{SLOTS}]", FAST_JVM)
        self.reader = Reader(scenario.database_url, scenario.table, self.feed.topic, self.feed)
        self.run: Callable[[TaskIdentity], Progress] = lambda task: scenario.run(task=task)
        """A run in this process, without Spark unless the test provides another function."""
        self.together = False
        """Whether a batch is committed as a whole rather than slice by slice."""
        self._attempts: list[Attempt] = []
        self._runs = 1
        self._tries: Counter[int] = Counter()

    def share(self, session_ms: int, *, slice_offsets: int, members: int = 2) -> None:
        """Makes the consumer a group of ``members`` Spark members, whose batches are slices of ``slice_offsets`` offsets."""
        self.scenario.set(members=members, batch={"max_records": slice_offsets})
        kafka = {**self.scenario.connections.kafka, "session.timeout.ms": str(session_ms), "heartbeat.interval.ms": "500"}
        conf = {**FAST_JVM, "spark.driver.memory": "512m", "spark.ui.enabled": "false"}
        self.scenario.connections = replace(self.scenario.connections, kafka=kafka, spark_master="local[1]", spark_conf=conf)

    def watch(self, *, pause_s: float, rewinds: bool = False) -> None:
        """Replaces the reader by another, which looks less often."""
        self.reader.close()
        self.reader = Reader(self.scenario.database_url, self.scenario.table, self.feed.topic, self.feed, pause_s=pause_s, rewinds=rewinds)

    # ---- attempts

    def next_run(self) -> None:
        """Starts a new run: the attempts that follow are its tries."""
        self._runs += 1
        self._tries.clear()

    def begin(self, member: int = -1) -> Attempt:
        """Starts the next try, with a separate driver and Spark. If there are several members, it is the try of ``member``."""
        self._attempts.append(Attempt(self.scenario.spec, self.scenario.connections, self.scenario.folder, self._task(member)))
        return self._attempts[-1]

    def remove(self, member: int) -> None:
        """Sends LeaveGroup as an operator does."""
        with session(self.scenario.database_url) as connection:
            leaving = Leaving("", instance(member), "removed by an operator")
            assert Coordinator(connection, self.scenario.spec.group).leave([leaving]) == [None]

    @contextlib.contextmanager
    def running_here(self) -> Iterator[Future[Progress]]:
        """The next try in a thread of this process: the same run and the same commits, but no driver that has to start."""
        task = self._task()
        with ThreadPoolExecutor(1) as pool:
            try:
                yield pool.submit(self.run, task)
            finally:
                self.points.release_all()

    def run_here(self) -> Progress:
        with self.running_here() as run:
            return run.result(180)

    @contextlib.contextmanager
    def held_here(self, step: Step, *, rounds: int = 1) -> Iterator[Held]:
        """Starts another run in this process, over new records. Its slice of partition 0 stands at ``step``; those of the other partitions
        are committed."""
        self.next_run()
        self.feed.add(rounds)
        point = self.points.at(step, partition=STRUCK)
        with self.running_here() as run:
            mark = point.reached()
            self.wait_for_others(than=[mark])
            self.reader.look()
            yield Held(point, mark, run)

    def hold(self, steps: Sequence[Step]) -> list[Point]:
        """Points for the slices of the first partitions, one point per step. All slices stand there at the same time."""
        return [self.points.at(step, partition=partition) for partition, step in enumerate(steps)]

    def wait_for_others(self, *, than: Sequence[Mark]) -> None:
        """Waits until all partitions except those of these marks have reached their ends, if each slice is committed separately."""
        if self.together:
            return
        held = {mark.partition for mark in than}
        others = {(self.feed.topic, partition): end for partition, end in enumerate(self.feed.ends) if partition not in held}
        until(lambda: others.items() <= self.scenario.positions().items(), "the other slices are committed")

    def _task(self, member: int = -1) -> TaskIdentity:
        self._tries[member] += 1
        return TaskIdentity("consume__chaos", f"run {self._runs}", "consume", member, self._tries[member])

    @contextlib.contextmanager
    def arriving(self, every_s: float) -> Iterator[None]:
        """Appends a round of records every ``every_s`` seconds during the block."""
        enough = threading.Event()

        def arrive() -> None:
            while not enough.wait(every_s):
                self.feed.add()

        with in_thread(arrive) as arrived:
            try:
                yield
            finally:
                enough.set()
        arrived.result()

    # ---- what is stored

    def wait_for(self, mark: Mark) -> None:
        """Waits until the slice of this mark is committed, by any task."""
        until(lambda: self.scenario.positions()[(self.feed.topic, mark.partition)] == mark.end, f"{mark} committed")

    def check_stored(self, mark: Mark, *, committed: bool) -> Snapshot:
        """Checks that the slice of this mark is stored as a whole or not at all, and that everything else is right."""
        seen = self.reader.look()
        position = seen.positions[mark.partition]
        assert position == (mark.end if committed else mark.start), f"the position is {position}, {committed=}, {mark}"
        return seen

    def left(self) -> int:
        """The number of offsets that are not read yet."""
        return sum(self.feed.ends) - sum(self.reader.look().positions.values())

    def check_done(self) -> None:
        """Checks that everything in the feed is stored exactly once, byte for byte."""
        self.reader.look()
        ends = {(self.feed.topic, partition): end for partition, end in enumerate(self.feed.ends)}
        assert self.scenario.positions() == ends, f"{self.scenario.positions()}, not {ends}"
        for partition, log in enumerate(self.feed.log):
            wanted = [(offset, log[offset]) for offset in self.feed.offsets(partition, "l", self.feed.ends[partition])]
            found = self.scenario.rows("kafka_offset, payload", where=f"kafka_partition = {partition}")
            assert found == wanted, f"partition {partition} holds {found}, not {wanted}"
        self.scenario.check()

    # ---- the end

    def close(self) -> None:
        self.points.release_all()
        for attempt in self._attempts:
            attempt.end()
        self.reader.close()


def instance(member: int) -> str:
    """The instance id of a member of a trial."""
    return f"consume__chaos/consume/{member}"


def committed_before(step: Step) -> bool:
    """Whether a slice is stored if its commit was interrupted right before this step."""
    return step is Step.RECEIPT


def failure(outcome: Progress | TidemarkError | None) -> TidemarkError:
    assert isinstance(outcome, TidemarkError), outcome
    return outcome
