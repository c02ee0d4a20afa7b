"""Rounds: everybody once a round, in an order that rotates; the table emptied before, the rows checked after.

    ① empty the table, checkpoint   ② prepare (not timed)   ③ read the CPU clocks   ④ run   ⑤ read them again   ⑥ check rows and sum

Nothing is thrown away: a run whose rows are wrong is an error and has no figure; a run beside which the machine did much else is marked,
and stays out of the median only if others are left. Both are in the tables and in the file.
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
"""A run is marked when more than this share of the machine's CPU time went elsewhere. The kernel's own work (writing back, loopback)
counts there too and stays well below."""


class SeatFailed(Exception):
    """What a contestant met, or its seat's end."""


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
    """The share of the machine's CPU time that went elsewhere."""
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
        """What the median is made of: the sound runs, without the disturbed ones if there are others. None at all, if any run lost rows."""
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
        """Medians, by family."""
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
    """Seats that stay warm, over one stage."""

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
        """``beside``: processes that work for the seats without being below them, such as the workers of a Spark cluster."""
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
        """End the seats that are needed no more; their memory is."""
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
        """``count`` rounds of all, in a rotating order; a figure for each. Who fails once does not run again.

        A turn is two runs, and the second counts: while the others had theirs for minutes, threads, workers and caches went cold.
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
        """Everybody `WARM_RUNS` times, without a figure, until the JVMs have compiled what they run. What cannot run at all, and why."""
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
    """A round's order: it begins elsewhere in each, and every second one runs backwards, so that nobody always follows the same one."""
    start = number * max(1, len(jobs) // 3) % max(1, len(jobs))
    order = [*jobs[start:], *jobs[:start]]
    yield from order if number % 2 == 0 else reversed(order)


def said(run: Run) -> str:
    if run.error:
        return f"no figure: {run.error}"
    mark = f", {run.elsewhere:.0%} of the CPU went elsewhere" if run.disturbed else ""
    return f"{run.rows_a_second:>9,.0f} rows/s  {run.seconds:6.2f} s{mark}"
