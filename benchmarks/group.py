"""The group protocol: seconds of a rebalance, statements sent to Postgres, and what membership costs a run.

- *Rebalances* with 2, 20 and 200 members, each with the threads and the database sessions of a driver's member. They share up to
  `PROCESSES` processes (`benchmarks.crew`): 200 threads of one process would measure Python's lock, 200 processes the machine's memory.
  Members leave and join in turn. A rebalance lasts from its cause until every member has received its last assignment.
- *Statements*, without BEGIN and COMMIT, are counted by the cursors of the sessions.
- *Overhead*: `benchmarks.product` in the Arrow form with fixed partitions, and as the only member of a group.

The members have a Postgres of their own: a member has two sessions, so 200 need more than the 100 that Postgres allows by default.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psycopg2

from benchmarks.contestants import BY_NAME, Contestant
from benchmarks.crew import NOBODY, TOPIC, Crew, Sight, counted
from benchmarks.harness import Harness
from benchmarks.product import Arrow
from benchmarks.site import Job, Topic
from benchmarks.stage import Stage
from tidemark import migrations
from tidemark.consume import run
from tidemark.consume.membership import Attempt, GroupMembership, Interrupt
from tidemark.db import Connection, connect, session, transaction
from tidemark.group.coordinator import Coordinator, GroupConfig, JoinRequest
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
PROCESSES = 10
PARTITIONS_A_MEMBER = 4
LIMIT_S = 60
"""The measurement fails if a rebalance takes longer."""
LOOK_S = 0.02
"""Seconds between two looks at all members. It does not limit precision: each member notes when it received its assignment."""
ASSIGNORS = ("cooperative-sticky", "range")


@dataclass(frozen=True, slots=True)
class Extent:
    """Numbers of members, each with the number of rebalances; records of the end-to-end runs."""

    groups: tuple[tuple[int, int], ...]
    records: tuple[int, ...]
    rounds: int


FULL = Extent(groups=((2, 40), (20, 24), (200, 10)), records=(1_000, 1_000_000), rounds=7)
QUICK = Extent(groups=((2, 4), (5, 4)), records=(1_000, 40_000), rounds=1)


def measure(stage: Stage, harness: Harness, extent: Extent, width: int, report: Callable[[str], None]) -> dict[str, Any]:
    """``rebalances``: a row per size and assignor; ``statements`` by call; ``overhead``: a row per number of records."""
    with _postgres(report) as url:
        rebalances = [_rebalances(url, members, count, assignor, report) for assignor in ASSIGNORS for members, count in extent.groups]
        statements = {**_statements_of_calls(url), **_statements_of_commits(url)}
    for name, count in statements.items():
        report(f"statements  {name:<44} {count}")
    return {"rebalances": rebalances, "statements": statements, "overhead": _overhead(stage, harness, extent, width, report)}


# ---- rebalances


@dataclass
class _Group:
    url: str
    assignor: str
    size: int
    crews: list[Crew] = field(default_factory=list)
    members: list[tuple[str, Crew]] = field(default_factory=list)
    """By name, oldest first, with the process that each is in."""
    made: int = 0

    def __post_init__(self) -> None:
        for _ in range(min(PROCESSES, self.size)):
            self.crews.append(Crew(self.url, self.assignor, self.size * PARTITIONS_A_MEMBER))

    def start(self) -> None:
        for _ in range(self.size):
            self.join(expected=self.size)
        self.wait(-1)

    def join(self, expected: int | None = None) -> float:
        """Starts a member in the process that has the fewest; returns when it began."""
        shares = Counter(id(crew) for _, crew in self.members)
        crew = min(self.crews, key=lambda crew: shares[id(crew)])
        self.made += 1
        self.members.append((f"member-{self.made:04}", crew))
        return crew.join(self.members[-1][0], expected)

    def look(self) -> Sight:
        return sum((crew.look() for crew in self.crews), NOBODY)

    def wait(self, after: int) -> Sight:
        """Waits until all members are in one generation, newer than ``after``, with everything assigned and taken over."""
        until = time.perf_counter() + LIMIT_S
        while True:
            seen = self.look()
            if seen.settled and len(seen.generations) == 1 and min(seen.generations) > after:
                break
            if time.perf_counter() > until:
                raise RuntimeError(f"{len(self.members)} members were not stable within {LIMIT_S} s")
            time.sleep(LOOK_S)
        if seen.assigned != self.size * PARTITIONS_A_MEMBER:
            raise RuntimeError(f"{seen.assigned} of {self.size * PARTITIONS_A_MEMBER} partitions are assigned")
        return seen

    def joins(self) -> tuple[float, int]:
        """Seconds until the last member received its assignment, and how many generations it took."""
        (before,) = self.look().generations
        began = self.join()
        seen = self.wait(before)
        return seen.told_at - began, min(seen.generations) - before

    def leaves(self) -> tuple[float, int]:
        """Closes the second oldest member: the leader stays, and every other member has its turn."""
        (before,) = self.look().generations
        name, crew = self.members.pop(1)
        began = crew.leave(name)
        seen = self.wait(before)
        return seen.told_at - began, min(seen.generations) - before

    def statements(self) -> Counter[str]:
        return sum((crew.statements() for crew in self.crews), Counter())

    def close(self) -> None:
        for crew in self.crews:
            crew.close()


def _rebalances(url: str, size: int, count: int, assignor: str, report: Callable[[str], None]) -> dict[str, Any]:
    """``count`` rebalances of a group of ``size`` members: half when a member leaves, half when one joins."""
    of_joiners = of_others = 0
    left, joined = [], []
    with contextlib.closing(_Group(url, assignor, size)) as group:
        group.start()
        for _ in range(count // 2):
            left.append(group.leaves())
            group.statements()
            joined.append(group.joins())
            counts = group.statements()
            of_joiner = counts.pop(group.members[-1][0])
            of_joiners, of_others = of_joiners + of_joiner, of_others + sum(counts.values())
    both = sorted(seconds for seconds, _ in [*left, *joined])
    row = {
        "members": size,
        "processes": len(group.crews),
        "assignor": assignor,
        "count": len(both),
        "median_s": statistics.median(both),
        "p99_s": both[math.ceil(0.99 * len(both)) - 1],
        "joins_median_s": statistics.median(seconds for seconds, _ in joined),
        "leaves_median_s": statistics.median(seconds for seconds, _ in left),
        "generations_of_joins": statistics.mean(generations for _, generations in joined),
        "generations_of_leaves": statistics.mean(generations for _, generations in left),
        "statements_of_joiner": of_joiners / len(joined),
        "statements_of_each_other": of_others / len(joined) / (size - 1),
    }
    report(
        f"rebalance   {size:>4} members, {assignor:<20} median {row['median_s']:.3f} s, p99 {row['p99_s']:.3f} s ({len(both)} of them); "
        f"one joins {row['joins_median_s']:.3f} s, {row['generations_of_joins']:.1f} generations; "
        f"one leaves {row['leaves_median_s']:.3f} s, {row['generations_of_leaves']:.1f}; "
        f"statements when one joins: its own {row['statements_of_joiner']:.1f}, of each other {row['statements_of_each_other']:.1f}"
    )
    return row


# ---- statements


def _statements_of_calls(url: str) -> dict[str, int]:
    """Statements by call in a group of two, in which no request is repeated. ``join``: all of them until a new member is Stable."""
    config = GroupConfig(initial_rebalance_delay_ms=0)
    sent: list[int] = []
    found = {}
    with session(url) as plain, session(url) as connection:
        leader, follower = Coordinator(plain, "calls", config), Coordinator(counted(connection, sent), "calls", config)

        def request(name: str) -> JoinRequest:
            return JoinRequest("", f"seat/{name}", name, (("range", {"topics": []}),))

        first = leader.join(request("first"))
        assert first is not None
        leader.sync(first.member_id, None, first.generation, first.protocol, {})
        follower.join(request("second"))
        known = JoinRequest(first.member_id, "seat/first", "first", (("range", {"topics": []}),))
        joined = leader.join(known)
        assert joined is not None
        second = follower.joined("", "seat/second")
        assert second is not None
        leader.sync(joined.member_id, None, joined.generation, joined.protocol, {second.member_id: {"partitions": {}}})
        follower.sync(second.member_id, None, second.generation, second.protocol)
        found["join, from JoinGroup to Stable"] = len(sent)
        sent.clear()
        follower.heartbeat(second.member_id, None, second.generation)
        found["heartbeat"] = len(sent)
    return found


def _statements_of_commits(url: str) -> dict[str, int]:
    """Statements of a slice whose records are all loaded, and of one with a failed record."""
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
        with mock.patch.object(commit_module, "connect", lambda *args, **named: counted(connect(*args, **named), sent)):
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
    """The contestant (d) as the only member of a group. The group expects one member, so it does not wait for others."""

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
    """A migrated database on a server that allows `CONNECTIONS` sessions and otherwise has Postgres' defaults."""
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-group-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # if root runs this, Postgres runs as another user
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
            migrations.migrate(url)
            report("a Postgres for the members of groups")
            yield url
        finally:
            stack.down()
