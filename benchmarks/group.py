"""The group protocol: seconds of a rebalance, statements of Postgres, and what it costs a run to be a member.

- *Rebalances* of 2, 20 and 200 members, in one process, each with the threads and the database sessions of a driver's member. By turns
  one leaves and one joins. A rebalance lasts from its cause until the last member was told what it reads and nothing is still to come.
- *Statements*, beside BEGIN and COMMIT, are counted by the cursors of the sessions.
- *Overhead*: `benchmarks.product` in the Arrow form, its partitions taken by hand, and assigned by a group whose only member it is.

The members' Postgres is one of its own: a member has two sessions, and 200 need more than the 100 that Postgres allows by default.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg2

from benchmarks.contestants import BY_NAME, Contestant
from benchmarks.harness import Harness
from benchmarks.product import Arrow
from benchmarks.site import Job, Topic
from benchmarks.stage import Stage
from tidemark import schema
from tidemark.consume import run
from tidemark.consume.membership import Attempt, GroupMembership, Interrupt
from tidemark.db import Connection, Cursor, connect, session, transaction
from tidemark.group import member as member_module
from tidemark.group.assignors import Metadata, find_assignor
from tidemark.group.coordinator import Coordinator, GroupConfig, JoinRequest
from tidemark.group.listener import RebalanceListener
from tidemark.group.member import Member, MemberSettings, WokenUp
from tidemark.local import LocalStack
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.records.outcome import Disposition, TransformOutput, only, reject
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.sink import commit as commit_module
from tidemark.sink.commit import commit_slice
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.consume.claims import LookUp
    from tidemark.kafka.cluster import Cluster

CONNECTIONS = 600
TOPIC = "events"
PARTITIONS_A_MEMBER = 4
LIMIT_S = 60
"""A rebalance that has not ended by then fails the measurement."""
LOOK_S = 0.002
ASSIGNORS = ("cooperative-sticky", "range")


@dataclass(frozen=True, slots=True)
class Extent:
    """Members, and rebalances of so many; records of the end-to-end runs."""

    groups: tuple[tuple[int, int], ...]
    records: tuple[int, ...]
    rounds: int


FULL = Extent(groups=((2, 40), (20, 24), (200, 6)), records=(1_000, 1_000_000), rounds=7)
QUICK = Extent(groups=((2, 4), (5, 4)), records=(1_000, 40_000), rounds=1)


def measure(stage: Stage, harness: Harness, extent: Extent, width: int, report: Callable[[str], None]) -> dict[str, Any]:
    """``rebalances``: a row a group and assignor; ``statements`` by call; ``overhead``: a row a number of records."""
    with _postgres(report) as url:
        rebalances = [_rebalances(url, members, count, assignor, report) for assignor in ASSIGNORS for members, count in extent.groups]
        statements = {**_statements_of_calls(url), **_statements_of_commits(url)}
    for name, count in statements.items():
        report(f"statements  {name:<44} {count}")
    return {"rebalances": rebalances, "statements": statements, "overhead": _overhead(stage, harness, extent, width, report)}


# ---- rebalances


class _Crew(RebalanceListener):
    """A member with its polling thread, as a driver has them; notes when it was last told of an assignment."""

    def __init__(self, url: str, name: str, assignor: str, metadata: Metadata, expected: int | None) -> None:
        self.told_at = 0.0
        seat = MemberSettings(group="bench", client_id=name, expected_members=expected)
        self.member = Member(url, seat, [find_assignor(assignor)], lambda: (TOPIC,), lambda _: metadata, [self])
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.told_at = time.perf_counter()

    def _poll(self) -> None:
        with contextlib.suppress(WokenUp):
            while True:
                self.member.poll(1.0)

    @property
    def thread_id(self) -> int:
        """Of the thread that talks to the coordinator."""
        return self.member._thread.ident or 0  # noqa: SLF001 - the session is this thread's alone

    def stop_polling(self) -> None:
        self.member.wakeup()
        self._poller.join()


@dataclass
class _Group:
    url: str
    assignor: str
    size: int
    crews: list[_Crew] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self._metadata = Metadata.of(**{TOPIC: self.size * PARTITIONS_A_MEMBER})

    def join(self, expected: int | None = None) -> None:
        self.made += 1
        self.crews.append(_Crew(self.url, f"member-{self.made:04}", self.assignor, self._metadata, expected))

    def settled(self, after: int) -> bool:
        """Are all in one generation, newer than ``after``, with everything assigned and taken over?"""
        generations = {crew.member.generation for crew in self.crews}
        return len(generations) == 1 and min(generations) > after and all(crew.member.settled for crew in self.crews)

    def wait(self, after: int, began: float) -> float:
        """The seconds from ``began`` until the last was told of its assignment."""
        until = time.perf_counter() + LIMIT_S
        while not self.settled(after):
            if time.perf_counter() > until:
                raise RuntimeError(f"{len(self.crews)} members were not stable within {LIMIT_S} s")
            time.sleep(LOOK_S)
        given = sum(len(crew.member.assignment) for crew in self.crews)
        if given != self.size * PARTITIONS_A_MEMBER:
            raise RuntimeError(f"{given} of {self.size * PARTITIONS_A_MEMBER} partitions are assigned")
        return max(crew.told_at for crew in self.crews) - began

    def joins(self) -> float:
        after, began = self.crews[0].member.generation, time.perf_counter()
        self.join()
        return self.wait(after, began)

    def leaves(self) -> float:
        """The second oldest does, so that the leader stays and everybody else has had his turn some day."""
        crew = self.crews.pop(1)
        after = crew.member.generation
        crew.stop_polling()
        began = time.perf_counter()
        crew.member.close()
        return self.wait(after, began)

    def close(self) -> None:
        for crew in self.crews:
            crew.stop_polling()
        for crew in self.crews:
            crew.member.close()


def _rebalances(url: str, size: int, count: int, assignor: str, report: Callable[[str], None]) -> dict[str, Any]:
    """``count`` rebalances of a group of ``size`` members, half of them caused by one that leaves and half by one that joins."""
    by_thread: list[int] = []
    of_joiners = of_others = 0
    left, joined = [], []
    counted = mock.patch.object(member_module, "connect", lambda *args, **named: _counted(connect(*args, **named), by_thread))
    with counted, contextlib.closing(_Group(url, assignor, size)) as group:
        for _ in range(size):
            group.join(expected=size)
        group.wait(-1, time.perf_counter())
        for _ in range(count // 2):
            left.append(group.leaves())
            by_thread.clear()
            joined.append(group.joins())
            counts = Counter(by_thread)
            of_joiner = counts.pop(group.crews[-1].thread_id, 0)
            of_joiners, of_others = of_joiners + of_joiner, of_others + sum(counts.values())
    both = sorted([*left, *joined])
    row = {
        "members": size,
        "assignor": assignor,
        "count": len(both),
        "median_s": statistics.median(both),
        "p99_s": both[math.ceil(0.99 * len(both)) - 1],
        "joins_median_s": statistics.median(joined),
        "leaves_median_s": statistics.median(left),
        "statements_of_joiner": of_joiners / len(joined),
        "statements_of_each_other": of_others / len(joined) / (size - 1),
    }
    report(
        f"rebalance   {size:>4} members, {assignor:<20} median {row['median_s']:.3f} s, p99 {row['p99_s']:.3f} s ({len(both)} of them); "
        f"statements when one joins: its own {row['statements_of_joiner']:.1f}, of each other {row['statements_of_each_other']:.1f}"
    )
    return row


# ---- statements


def _counted(connection: Connection, by_thread: list[int]) -> Connection:
    """The connection, whose cursors note the thread of each statement that they send."""

    class Counting(Cursor):
        def execute(self, *args: Any, **named: Any) -> None:
            by_thread.append(threading.get_ident())
            super().execute(*args, **named)

        def copy_expert(self, *args: Any, **named: Any) -> None:
            by_thread.append(threading.get_ident())
            super().copy_expert(*args, **named)

    connection.cursor_factory = Counting
    return connection


def _statements_of_calls(url: str) -> dict[str, int]:
    """Of a group of two, in which nobody has to ask twice; ``join`` is a new member's whole way to Stable."""
    config = GroupConfig(initial_rebalance_delay_ms=0)
    sent: list[int] = []
    found = {}
    with session(url) as plain, session(url) as connection:
        leader, counted = Coordinator(plain, "calls", config), Coordinator(_counted(connection, sent), "calls", config)

        def request(name: str) -> JoinRequest:
            return JoinRequest("", f"seat/{name}", name, (("range", {"topics": []}),))

        first = leader.join(request("first"))
        assert first is not None
        leader.sync(first.member_id, None, first.generation, first.protocol, {})
        counted.join(request("second"))
        known = JoinRequest(first.member_id, "seat/first", "first", (("range", {"topics": []}),))
        joined = leader.join(known)
        assert joined is not None
        second = counted.joined("", "seat/second")
        assert second is not None
        leader.sync(joined.member_id, None, joined.generation, joined.protocol, {second.member_id: {"partitions": {}}})
        counted.sync(second.member_id, None, second.generation, second.protocol)
        found["join, from JoinGroup to Stable"] = len(sent)
        sent.clear()
        counted.heartbeat(second.member_id, None, second.generation)
        found["heartbeat"] = len(sent)
    return found


def _statements_of_commits(url: str) -> dict[str, int]:
    """Of a slice whose records are all loaded, and of one with a failed record too."""
    sent: list[int] = []
    found = {}
    with session(url) as connection:
        with transaction(connection) as cur:
            cur.execute("CREATE SCHEMA bench")
            cur.execute(
                "CREATE TABLE bench.numbers (number bigint, kafka_topic_id smallint, kafka_partition integer, kafka_offset bigint,"
                " kafka_seq integer)"
            )
            group_id, topic_id = store.ensure_group(cur, "commits"), store.ensure_topic(cur, TOPIC, "none")
            store.start_partition(cur, group_id, topic_id, 0, 0)
            claim = store.claim(cur, group_id, topic_id, TopicPartition(TOPIC, 0), store.next_generation(cur), "bench")
            attempt_id = store.new_attempt(cur, group_id, TaskIdentity())
        target = Target(url, group_id, attempt_id, (Layout("bench.numbers", (Column("number", "bigint"),)),))
        with mock.patch.object(commit_module, "connect", lambda *args, **named: _counted(connect(*args, **named), sent)):
            for start, what in ((0, "commit of a slice"), (10, "commit of a slice with failed records")):
                part = Slice(claim.partition, topic_id, start, start + 10, claim.epoch)
                rejects = [reject(start, Disposition.FAIL, "ValueError: bench")] if start else []
                commit_slice(
                    target, part, iter([TransformOutput(only(_numbers(part, first=start + len(rejects))), [], rejects)]), _payloads
                )
                found[what] = len(sent)
                sent.clear()
    return found


def _numbers(part: Slice, first: int) -> pa.RecordBatch:
    import pyarrow as pa

    offsets = list(range(first, part.end))
    return pa.RecordBatch.from_pydict(
        {
            "number": pa.array(offsets, pa.int64()),
            "kafka_topic": pa.array([part.partition.topic] * len(offsets), pa.string()),
            "kafka_partition": pa.array([part.partition.partition] * len(offsets), pa.int32()),
            "kafka_offset": pa.array(offsets, pa.int64()),
        }
    )


def _payloads(_part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    names = ["record_offset", "record_timestamp", "key", "value", "headers"]
    for offset in offsets:
        missing = [pa.array([None], kind) for kind in (pa.timestamp("us", "UTC"), pa.binary(), pa.binary())]
        yield pa.RecordBatch.from_arrays([pa.array([offset], pa.int64()), *missing, pa.array(["[]"])], names=names)


# ---- overhead


class Grouped(Arrow):
    """The contestant of (d), as a group's only member. It is a group that expects one, and so waits for nobody."""

    def run(self, job: Job) -> None:
        with mock.patch.object(run, "ManualAssignment", _as_member):
            super().run(job)


def _as_member(connection: Connection, attempt: Attempt, cluster: Cluster, found: LookUp) -> GroupMembership:
    return GroupMembership(connection, attempt, cluster, found, Interrupt(lambda: None))


BY_HAND = BY_NAME["arrow_transform"]
GROUPED = Contestant("arrow_in_a_group", "d", "Tidemark, Arrow transform, in a group of one", "group:Grouped", "yes")


def _overhead(stage: Stage, harness: Harness, extent: Extent, width: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    topic = stage.topic(Topic(f"events-group-{max(extent.records)}", 4, max(extent.records), width))
    rows = []
    for records in extent.records:
        jobs = [(one, Job(topic, records // topic.partitions)) for one in (BY_HAND, GROUPED)]
        if failed := harness.warm(jobs):
            raise RuntimeError(f"{failed}")
        figures = harness.rounds(jobs, extent.rounds)
        seconds = {}
        for one, _ in jobs:
            if not figures[one.name].counted:
                raise RuntimeError(f"{one.title}: {[run.error for run in figures[one.name].runs]}")
            seconds[one.name] = statistics.median(run.seconds for run in figures[one.name].counted)
        by_hand, grouped = seconds[BY_HAND.name], seconds[GROUPED.name]
        report(f"overhead    {records:,} records: by hand {by_hand:.3f} s, in a group of one {grouped:.3f} s")
        rows.append(
            {
                "records": records,
                "by_hand_s": by_hand,
                "in_a_group_s": grouped,
                "runs": {name: figure.to_dict()["runs"] for name, figure in figures.items()},
            }
        )
    return rows


# ---- the members' Postgres


@contextlib.contextmanager
def _postgres(report: Callable[[str], None]) -> Iterator[str]:
    """A migrated database on a server that has room for `CONNECTIONS`; all else is at Postgres' defaults."""
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-group-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # where root runs this, Postgres is another user
        stack = LocalStack(Path(folder).resolve())
        try:
            stack.start_postgres()
            with contextlib.closing(psycopg2.connect(stack.postgres.url("postgres"))) as connection:
                connection.autocommit = True
                with connection.cursor() as cur:
                    cur.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
            stack.stop_postgres()
            stack.start_postgres()
            url = stack.create_database("members")
            schema.migrate(url)
            report("a Postgres for the members of groups")
            yield url
        finally:
            stack.down()
