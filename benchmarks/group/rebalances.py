"""The group protocol: seconds of a rebalance.

Each of 2, 20 and 200 members has the threads and the database sessions of a driver's member. They share up to `PROCESSES` processes: 200
threads of one process would measure Python's lock, 200 processes the machine's memory. Members leave and join in turn. A rebalance lasts
from its cause until every member has received its last assignment.

The members have a Postgres of their own: a member has two sessions, so 200 need more than the 100 that Postgres allows by default.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.group.members import Members, State
from benchmarks.harness.processes import spread
from benchmarks.harness.remote import Remote
from benchmarks.harness.stage import autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark import migrations
from tidemark.local import LocalStack

CONNECTIONS = 600
PROCESSES = 10
PARTITIONS_A_MEMBER = 4
LIMIT_S = 60
"""The measurement fails if a rebalance takes longer."""
LOOK_S = 0.02
"""Seconds between two looks at all members. It does not limit precision: each member notes when it received its assignment."""
ASSIGNORS = ("cooperative-sticky", "range")


def measure(bench: Bench, groups: Sequence[tuple[int, int]]) -> Figures:
    """``groups``: numbers of members, each with the number of rebalances. A row per size and assignor."""
    with _postgres(bench.report) as url:
        return {"rows": [_rebalances(bench, url, members, count, assignor) for assignor in ASSIGNORS for members, count in groups]}


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
    both = spread([*left, *joined])
    times = {"median_s": both["median"], "p99_s": both["p99"], "leaves_s": statistics.median(left), "joins_s": statistics.median(joined)}
    bench.report(f"rebalance   {size:>4} members, {assignor:<20} " + ", ".join(f"{name} {value:.3f}" for name, value in times.items()))
    return {"members": size, "assignor": assignor, "count": len(left) + len(joined), **times}


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
    ),
    bars=[Bar("rebalance of {members} members, {assignor}, p99, s", _p99_of_200, "rows", at_most=2.0)],
    full={"groups": ((2, 40), (20, 24), (200, 10))},
    quick={"groups": ((2, 4), (5, 4))},
)
