"""The group protocol: seconds of a rebalance, and what membership costs a run.

- *Rebalances* with 2, 20 and 200 members, each with the threads and the database sessions of a driver's member. They share up to
  `PROCESSES` processes: 200 threads of one process would measure Python's lock, 200 processes the machine's memory. Members leave and join
  in turn. A rebalance lasts from its cause until every member has received its last assignment.
- *Overhead*: the Arrow form with fixed partitions, and as the only member of a group.

The members have a Postgres of their own: a member has two sessions, so 200 need more than the 100 that Postgres allows by default.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.group.members import Members, State
from benchmarks.harness.consumer import FORMS, Consumer
from benchmarks.harness.remote import Remote
from benchmarks.harness.site import PARTITIONS, Job, Site, Topic
from benchmarks.harness.stage import autocommit
from benchmarks.harness.turns import counted, figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME

from tidemark import migrations
from tidemark.consume import run
from tidemark.consume.membership import Attempt, GroupMembership, Interrupt
from tidemark.local import LocalStack

if TYPE_CHECKING:
    from tidemark.consume.claims import LookUp
    from tidemark.db import Connection
    from tidemark.kafka.cluster import Cluster

CONNECTIONS = 600
PROCESSES = 10
PARTITIONS_A_MEMBER = 4
LIMIT_S = 60
"""The measurement fails if a rebalance takes longer."""
LOOK_S = 0.02
"""Seconds between two looks at all members. It does not limit precision: each member notes when it received its assignment."""
ASSIGNORS = ("cooperative-sticky", "range")


def measure(bench: Bench, groups: Sequence[tuple[int, int]], records: Sequence[int], rounds: int) -> Figures:
    """``groups``: numbers of members, each with the number of rebalances. ``rebalances``: a row per size and assignor; ``overhead``: a row
    per number of records."""
    with _postgres(bench.report) as url:
        rebalances = [_rebalances(bench, url, members, count, assignor) for assignor in ASSIGNORS for members, count in groups]
    return {"rebalances": rebalances, "overhead": _overhead(bench, records, rounds)}


class _Group:
    def __init__(self, url: str, assignor: str, size: int) -> None:
        self._size = size
        processes = min(PROCESSES, size)
        self._processes = [Remote(Members, url, assignor, size * PARTITIONS_A_MEMBER) for _ in range(processes)]
        self._members: list[tuple[str, Remote]] = []
        """By name, oldest first, with the process that each is in."""
        self._started = 0
        for _ in range(size):
            self._join(expected=size)
        self._wait(-1)

    def _join(self, expected: int | None = None) -> float:
        """Starts a member in the process that has the fewest; returns when it began."""
        shares = Counter(id(process) for _, process in self._members)
        process = min(self._processes, key=lambda process: shares[id(process)])
        self._started += 1
        self._members.append((f"member-{self._started:04}", process))
        return float(process.ask("join", self._members[-1][0], expected))

    def _state(self) -> State:
        return sum((process.ask("state") for process in self._processes), State())

    def _wait(self, after: int) -> State:
        """Waits until all members are in one generation, newer than ``after``, with everything assigned and taken over."""
        until = time.perf_counter() + LIMIT_S
        while not ((state := self._state()).settled and len(state.generations) == 1 and min(state.generations) > after):
            if time.perf_counter() > until:
                raise RuntimeError(f"{len(self._members)} members were not stable within {LIMIT_S} s")
            time.sleep(LOOK_S)
        if state.assigned != self._size * PARTITIONS_A_MEMBER:
            raise RuntimeError(f"{state.assigned} of {self._size * PARTITIONS_A_MEMBER} partitions are assigned")
        return state

    def joins(self) -> float:
        """Seconds until the last member received its assignment."""
        (before,) = self._state().generations
        began = self._join()
        return self._wait(before).assigned_at - began

    def leaves(self) -> float:
        """Closes the second oldest member: the leader stays, and every other member has its turn."""
        (before,) = self._state().generations
        name, process = self._members.pop(1)
        began = float(process.ask("leave", name))
        return self._wait(before).assigned_at - began

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError, EOFError):
                process.ask("leave_all")
            process.close()


def _rebalances(bench: Bench, url: str, size: int, count: int, assignor: str) -> dict[str, Any]:
    """``count`` rebalances of a group of ``size`` members: half when a member leaves, half when one joins."""
    with contextlib.closing(_Group(url, assignor, size)) as group:
        left, joined = zip(*((group.leaves(), group.joins()) for _ in range(count // 2)), strict=True)
    both = sorted([*left, *joined])
    times = {"median_s": statistics.median(both), "p99_s": both[math.ceil(0.99 * len(both)) - 1]}
    times |= {"leaves_s": statistics.median(left), "joins_s": statistics.median(joined)}
    bench.report(f"rebalance   {size:>4} members, {assignor:<20} " + ", ".join(f"{name} {value:.3f}" for name, value in times.items()))
    return {"members": size, "assignor": assignor, "count": len(both), **times}


class Grouped(Consumer):
    """The Arrow form as the only member of a group. The group expects one member, so it does not wait for others."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, FORMS["Arrow"])

    def run(self, job: Job, *, drain: bool = False) -> None:
        with mock.patch.object(run, "ManualAssignment", _as_member):
            super().run(job, drain=drain)


def _as_member(connection: Connection, attempt: Attempt, cluster: Cluster, look_up: LookUp) -> GroupMembership:
    return GroupMembership(connection, attempt, cluster, look_up, Interrupt(lambda: None))


BY_HAND = BY_NAME["arrow_transform"]
IN_A_GROUP = replace(BY_HAND, name="in_a_group", title=f"{BY_HAND.title}, in a group of one", seat="group.rebalances:Grouped")


def _overhead(bench: Bench, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    topic = bench.stage.topic(Topic(f"events-group-{max(sizes)}", PARTITIONS, max(sizes), bench.width))
    rows = []
    for records in sizes:
        jobs = [(one, Job(topic, records // topic.partitions)) for one in (BY_HAND, IN_A_GROUP)]
        if failed := bench.harness.warm(jobs):
            raise RuntimeError(f"{failed}")
        runs = bench.harness.rounds(jobs, rounds)
        by_hand, in_a_group = (statistics.median(run.seconds for run in counted(runs[one.name])) for one, _ in jobs)
        row = {"by_hand_s": by_hand, "in_a_group_s": in_a_group, "more_s": in_a_group - by_hand, "ratio": in_a_group / by_hand}
        rows.append({"records": records, **row, "runs": {name: figures(done)["runs"] for name, done in runs.items()}})
    return rows


def _p99_of_200(row: Figures) -> float | None:
    return row["p99_s"] if row["members"] == 200 else None


@contextlib.contextmanager
def _postgres(report: Callable[[str], None]) -> Iterator[str]:
    """A migrated database on a server that allows `CONNECTIONS` sessions and otherwise has Postgres' defaults."""
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-group-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # if root runs this, Postgres runs as another user
        stack = LocalStack(Path(folder).resolve())
        try:
            stack.start(stack.postgres)
            with autocommit(stack.postgres.url("postgres")) as cur:
                cur.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
            stack.stop(stack.postgres)
            stack.start(stack.postgres)
            url = stack.create_database("members")
            migrations.migrate(url)
            report("a Postgres for the members of groups")
            yield url
        finally:
            stack.down()


MEASUREMENT = Measurement(
    "group",
    measure,
    Table(
        "Rebalances of a group: seconds until all have their partitions",
        "members | assignor | rebalances | median | p99 | one leaves | one joins",
        "{members} | {assignor} | {count} | {median_s:.3f} | {p99_s:.3f} | {leaves_s:.3f} | {joins_s:.3f}",
        "rebalances",
    ),
    Table(
        "A run in a group of one, in seconds",
        "records | by hand | in a group | difference | ratio",
        "{records:,} | {by_hand_s:.3f} | {in_a_group_s:.3f} | {more_s:+.3f} | {ratio:.2f}",
        "overhead",
    ),
    bars=[Bar("rebalance of {members} members, {assignor}, p99, s", _p99_of_200, "rebalances", at_most=2.0)],
    needs=[BY_HAND.name],
    full={"groups": ((2, 40), (20, 24), (200, 10)), "records": (1_000, 1_000_000), "rounds": 7},
    quick={"groups": ((2, 4), (5, 4)), "records": (1_000, 40_000), "rounds": 1},
)
