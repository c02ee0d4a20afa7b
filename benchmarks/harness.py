"""Rounds: each contestant runs once per round, in a rotating order. Before each run the table is emptied; after it, the rows are checked.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.cpu import FAMILIES
from benchmarks.seat import SITE
from benchmarks.site import Job, Site
from benchmarks.stage import Stage

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
WARM_RUNS = 2
DISTURBED = 0.15
"""A run is disturbed if more than this share of the machine's CPU time went elsewhere. That includes the kernel's own work (writing back,
loopback), which stays far below."""


class SeatFailed(Exception):
    """A contestant failed, or its seat ended."""


class Seat:
    """A contestant's process."""

    def __init__(self, module: str, site: Site, *, python: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.seat", f"benchmarks.{module}"],
            cwd=ROOT,
            env={**os.environ, SITE: site.to_json(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

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
    """One round of one contestant. ``error``: why it has no figure."""

    rows: int
    seconds: float
    cpu_s: dict[str, float]
    elsewhere: float
    """The share of the machine's CPU time that other processes used."""
    wal_bytes: int = 0
    error: str | None = None

    @property
    def rows_a_second(self) -> float:
        return self.rows / self.seconds

    @property
    def disturbed(self) -> bool:
        return self.elsewhere > DISTURBED


@dataclass(frozen=True, slots=True)
class Figure:
    """The runs of one contestant on one kind of job."""

    runs: tuple[Run, ...] = field(default=())

    @property
    def sound(self) -> list[Run]:
        return [run for run in self.runs if run.error is None]

    @property
    def counted(self) -> list[Run]:
        """The runs that count for the median: without disturbed ones, if there are others. Empty if any run lost rows."""
        if len(self.sound) < len(self.runs):
            return []
        return [run for run in self.sound if not run.disturbed] or self.sound

    @property
    def median(self) -> float | None:
        rates = [run.rows_a_second for run in self.counted]
        return statistics.median(rates) if rates else None

    @property
    def lowest(self) -> float | None:
        return min((run.rows_a_second for run in self.counted), default=None)

    @property
    def highest(self) -> float | None:
        return max((run.rows_a_second for run in self.counted), default=None)

    @property
    def cpu_us_a_row(self) -> dict[str, float]:
        """Medians, by family of processes."""
        counted = self.counted
        return {family: statistics.median(run.cpu_s[family] / run.rows * 1e6 for run in counted) for family in FAMILIES} if counted else {}

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows_per_s": {"median": self.median, "min": self.lowest, "max": self.highest},
            "cpu_us_per_row": self.cpu_us_a_row,
            "errors": [run.error for run in self.runs if run.error],
            "disturbed_runs": sum(run.disturbed for run in self.runs),
            "runs": [{**asdict(run), "rows_per_s": run.rows_a_second if not run.error else None} for run in self.runs],
        }


class Harness:
    """Seats that stay warm and share a stage."""

    def __init__(
        self,
        stage: Stage,
        site: Site,
        *,
        quix_python: Path | None,
        logs: Path,
        report: Callable[[str], None],
        beside: Sequence[int] = (),
    ) -> None:
        """``beside``: processes that work for the seats but are not their descendants, such as the workers of a Spark cluster."""
        self._stage = stage
        self._site = site
        self._quix_python = quix_python
        self._logs = logs
        self._report = report
        self._beside = beside
        self._seats: dict[tuple[str, bool], Seat] = {}

    def close(self) -> None:
        for seat in self._seats.values():
            seat.close()
        self._seats.clear()

    def close_all_but(self, keep: Iterable[Contestant]) -> None:
        """Ends the seats that are not needed any more, to free their memory."""
        places = {one.place for one in keep}
        for place in [place for place in self._seats if place not in places]:
            self._seats.pop(place).close()

    def once(self, contestant: Contestant, job: Job, *, list_partitions: int = 0, key: str = "") -> Run:
        """One run, checked."""
        self._stage.empty(list_partitions=list_partitions, key=key)  # ①
        began = time.monotonic()
        try:
            seat = self._seat(contestant)
            seat.tell("prepare", job)  # ②
            meter = self._stage.meter(seat.pid, *self._beside)
            wal, before = self._stage.wal_position(), meter.read()  # ③
            began = time.monotonic()
            seat.tell("run", job)  # ④
            seconds = time.monotonic() - began
            used, wal = meter.read().since(before), self._stage.wal_position() - wal  # ⑤
        except SeatFailed as failed:
            if (seat := self._seats.pop(contestant.place, None)) is not None:
                seat.close()
            return Run(job.rows, time.monotonic() - began, dict.fromkeys(FAMILIES, 0.0), 0.0, error=str(failed))
        error = self._stage.wrong(job, contestant.table)  # ⑥
        return Run(job.rows, seconds, used.by_family, used.share_elsewhere(self._site.cores), wal, error)

    def rounds(self, jobs: Sequence[tuple[Contestant, Job]], count: int) -> dict[str, Figure]:
        """Runs ``count`` rounds in a rotating order and returns a figure for each contestant. One that fails does not run again.

        A turn is two runs, and the second counts: while the others run for minutes, threads, workers and caches go cold.
        """
        runs: dict[str, list[Run]] = {contestant.name: [] for contestant, _ in jobs}
        for number in range(count):
            for contestant, job in rotated(jobs, number):
                done = runs[contestant.name]
                if done and done[-1].error:
                    continue
                first = self.once(contestant, job)
                run = first if first.error else self.once(contestant, job)
                done.append(run)
                self._report(f"round {number + 1}/{count}  {contestant.title:<46} {said(run)}")
        return {name: Figure(tuple(done)) for name, done in runs.items()}

    def warm(self, jobs: Sequence[tuple[Contestant, Job]]) -> dict[str, str]:
        """Runs each contestant `WARM_RUNS` times without a figure, until the JVMs have compiled their code. Returns those that fail."""
        failed: dict[str, str] = {}
        for contestant, job in jobs:
            for _ in range(WARM_RUNS):
                run = self.once(contestant, job)
                self._report(f"warm-up    {contestant.title:<46} {said(run)}")
                if run.error:
                    failed[contestant.name] = run.error
                    break
        return failed

    def _seat(self, contestant: Contestant) -> Seat:
        if contestant.place not in self._seats:
            module, alien = contestant.place
            python = self._quix_python if alien else Path(sys.executable)
            assert python is not None
            log = self._logs / f"{module.replace(':', '-')}.log"
            self._seats[contestant.place] = Seat(module, self._site, python=python, log=log)
        return self._seats[contestant.place]


def rotated(jobs: Sequence[tuple[Contestant, Job]], number: int) -> Iterator[tuple[Contestant, Job]]:
    """The order of a round. Each round starts with another contestant, and every second one is reversed, so that the predecessors vary."""
    start = number * max(1, len(jobs) // 3) % max(1, len(jobs))
    order = [*jobs[start:], *jobs[:start]]
    yield from order if number % 2 == 0 else reversed(order)


def said(run: Run) -> str:
    if run.error:
        return f"no figure: {run.error}"
    mark = f", {run.elsewhere:.0%} of the CPU went elsewhere" if run.disturbed else ""
    return f"{run.rows_a_second:>9,.0f} rows/s  {run.seconds:6.2f} s{mark}"
