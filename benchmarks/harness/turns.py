"""Turns: each contestant runs once per round, in a rotating order. Before each run the table is emptied; after it, the rows are checked.

    ① empty the table, checkpoint   ② prepare (not timed)   ③ read the CPU clocks   ④ run   ⑤ read them again   ⑥ check rows and sum

Every run is reported. A run with wrong rows is an error and gets no figure. A run during which the machine was busy with other work is
marked as disturbed, and excluded from the median if there are others. Both are in the tables and in the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import FAMILIES
from benchmarks.harness.seat import SITE
from benchmarks.harness.site import ROOT, Job, Site
from benchmarks.harness.stage import Stage
from benchmarks.throughput.contestants import Contestant

LIMIT_S = 900
WARM_RUNS = 2
DISTURBED = 0.15
"""A run is disturbed if more than this share of the machine's CPU time went elsewhere. That includes the kernel's own work (writing back,
loopback), which stays far below."""


class SeatFailed(Exception):
    """A contestant failed, or its seat ended."""


class Seat:
    """A contestant's process."""

    def __init__(self, module: str, site: Site, *, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        command = [sys.executable, "-m", "benchmarks.harness.seat", f"benchmarks.{module}"]
        env = {**os.environ, SITE: site.to_json(), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.pid = self._process.pid

    def tell(self, word: str, job: Job) -> None:
        """Raises `SeatFailed`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{word} {job.to_json()}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SeatFailed(f"its process has ended, see {self._log.name}") from error
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            self.close(wait_s=0)
            raise SeatFailed(f"no answer within {LIMIT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise SeatFailed(f"its process has ended, see {self._log.name}")
        if error_text := json.loads(line).get("error"):
            raise SeatFailed(str(error_text))

    def close(self, wait_s: float = 30) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one contestant. ``elsewhere``: the share of the machine's CPU time that other processes used. ``error``: why it has no
    figure."""

    rows: int
    seconds: float
    cpu_s: dict[str, float]
    elsewhere: float
    wal_bytes: int = 0
    error: str | None = None

    @property
    def rows_a_second(self) -> float:
        return self.rows / self.seconds

    @property
    def disturbed(self) -> bool:
        return self.elsewhere > DISTURBED

    def __str__(self) -> str:
        if self.error:
            return f"no figure: {self.error}"
        mark = f", {self.elsewhere:.0%} of the CPU went elsewhere" if self.disturbed else ""
        return f"{self.rows_a_second:>9,.0f} rows/s  {self.seconds:6.2f} s{mark}"


def counted(runs: Sequence[Run]) -> list[Run]:
    """The runs that count for the median: without disturbed ones, if there are others. Empty if any run lost rows."""
    if any(run.error for run in runs):
        return []
    return [run for run in runs if not run.disturbed] or list(runs)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """``rows_per_s`` and ``cpu_us_per_row`` are medians of the runs that count, and missing if there are none."""
    of = counted(runs)
    rates = [run.rows_a_second for run in of]
    return {
        "rows_per_s": statistics.median(rates) if rates else None,
        "lowest": min(rates, default=None),
        "highest": max(rates, default=None),
        "cpu_us_per_row": {name: statistics.median(run.cpu_s[name] / run.rows * 1e6 for run in of) for name in FAMILIES} if of else {},
        "errors": [run.error for run in runs if run.error],
        "disturbed_runs": sum(run.disturbed for run in runs),
        "runs": [{**asdict(run), "rows_per_s": run.rows_a_second if not run.error else None} for run in runs],
    }


class Harness:
    """Seats that stay warm and share a stage."""

    def __init__(self, stage: Stage, site: Site, *, logs: Path, report: Callable[[str], None]) -> None:
        self._stage, self.site, self._logs, self._report = stage, site, logs, report
        self._seats: dict[str, Seat] = {}

    def close(self) -> None:
        self.close_all_but([])

    def close_all_but(self, keep: Iterable[Contestant]) -> None:
        """Ends the seats that are not needed any more, to free their memory."""
        for place in self._seats.keys() - {one.seat for one in keep}:
            self._seats.pop(place).close()

    def once(self, contestant: Contestant, job: Job) -> Run:
        """One run, checked."""
        self._stage.empty()  # ①
        began = time.monotonic()
        try:
            seat = self._seat(contestant)
            seat.tell("prepare", job)  # ②
            wal, before = self._stage.wal_position(), self._stage.clocks(seat.pid)  # ③
            began = time.monotonic()
            seat.tell("run", job)  # ④
            seconds = time.monotonic() - began
            used, wal = self._stage.clocks(seat.pid).since(before), self._stage.wal_position() - wal  # ⑤
        except SeatFailed as failed:
            if (failed_seat := self._seats.pop(contestant.seat, None)) is not None:
                failed_seat.close()
            return Run(job.topic.records, time.monotonic() - began, dict.fromkeys(FAMILIES, 0.0), 0.0, error=str(failed))
        error = self._stage.wrong(job, contestant.table)  # ⑥
        return Run(job.topic.records, seconds, used.by_family, used.share_elsewhere(self.site.cores), wal, error)

    def rounds(self, jobs: Sequence[tuple[Contestant, Job]], count: int) -> dict[str, list[Run]]:
        """Runs ``count`` rounds in a rotating order and returns the runs of each contestant. One that fails does not run again.

        A turn is two runs, and the second counts: while the others run for minutes, threads, workers and caches go cold.
        """
        runs: dict[str, list[Run]] = {contestant.name: [] for contestant, _ in jobs}
        for number in range(count):
            for contestant, job in rotated(jobs, number):
                done = runs[contestant.name]
                if done and done[-1].error:
                    continue
                first = self.once(contestant, job)
                done.append(first if first.error else self.once(contestant, job))
                self._report(f"round {number + 1}/{count}  {contestant.title:<46} {done[-1]}")
        return runs

    def warm(self, jobs: Sequence[tuple[Contestant, Job]]) -> dict[str, str]:
        """Runs each contestant `WARM_RUNS` times without a figure, until the JVMs have compiled their code. Returns those that fail."""
        failed: dict[str, str] = {}
        for contestant, job in jobs:
            for _ in range(WARM_RUNS):
                run = self.once(contestant, job)
                self._report(f"warm-up    {contestant.title:<46} {run}")
                if run.error:
                    failed[contestant.name] = run.error
                    break
        return failed

    def _seat(self, contestant: Contestant) -> Seat:
        seat = contestant.seat
        if seat not in self._seats:
            self._seats[seat] = Seat(seat, self.site, log=self._logs / f"{seat.replace(':', '-')}.log")
        return self._seats[seat]


def rotated(jobs: Sequence[tuple[Contestant, Job]], number: int) -> Iterator[tuple[Contestant, Job]]:
    """The order of a round. Each round starts with another contestant, and every second one is reversed, so that the predecessors vary."""
    start = number * max(1, len(jobs) // 3) % max(1, len(jobs))
    order = [*jobs[start:], *jobs[:start]]
    yield from order if number % 2 == 0 else reversed(order)
