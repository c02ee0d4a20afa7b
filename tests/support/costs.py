"""What a run of the tests costs, and what it may cost.

Every run ends with its slowest tests. With ``WHERE=1`` it also prints the CPU and wall seconds of each file and of each fixture that
several tests share, and writes those of the files to ``build/costs.tsv``. ``tests/costs.tsv`` is a copy, which balances the shards.

CPU seconds are those of all processes that a worker has started, directly or not: servers, JVMs, Airflows, browsers. A process is a
worker's if it inherited the worker's value of ``TIDEMARK_TEST_WORKER``, or if its parent is the worker's. Linux only: reads ``/proc``.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.sampling import ALL

VARIABLE = "TIDEMARK_TEST_WORKER"
BUDGET_CPU_S = 1700
"""What ``make test`` may cost on the machine on which `REFERENCE_S` was measured."""
TOLERANCE = 4 / 3
"""A run fails if it costs more than the budget by this factor."""
USUAL_WALL_S = 900
IDLE_CORES = 0.4
"""What the servers need although they only wait: a run beside other work takes longer, and costs this much more for each second."""
REFERENCE_S = 0.0046
"""CPU seconds of `_fixed_work` on an AMD EPYC with two cores, while the tests ran."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
FRESH_S = 0.2
"""A reading may be this old. Tests that are shorter share one; the sums of their files are right."""
SLOWEST = 20


@dataclass(frozen=True)
class Spent:
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)

    def __str__(self) -> str:
        return f"{self.cpu_s:8.1f} {self.wall_s:8.1f}"


class Meter:
    """The CPU seconds of a worker's processes, those that have ended included."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{VARIABLE}={mark}".encode()
        self._lock = threading.Lock()
        self._owned: dict[tuple[int, int], bool] = {}
        """By process id and start: is the process the worker's?"""
        self._last: dict[tuple[int, int], tuple[int, int]] = {}
        """The parent and the ticks of each of the worker's processes. The ticks include those of its children that ended."""
        self._orphaned_ticks = 0
        """The ticks of ended processes whose parent was not the worker's, for example of daemons."""
        self._read_at = 0.0
        self._ticks = 0

    def now(self, within_s: float = 0.0) -> Spent:
        """The CPU seconds and the time of a new reading, or of the last one if it is at most ``within_s`` old."""
        with self._lock:
            at = time.monotonic()
            if at - self._read_at > within_s:
                self._ticks = self._read()
                self._read_at = time.monotonic()
            return Spent(self._ticks * TICK_S, at)

    def _read(self) -> int:
        running = dict(_processes())
        owned = {process for process in running if self._owned.get(process)}
        for process in sorted(running.keys() - self._owned.keys(), key=lambda one: one[1]):
            mine = True if any(running[process][0] == pid for pid, _ in owned) else self._is_marked(process[0])
            if mine is not None:
                self._owned[process] = mine
            if mine:
                owned.add(process)
        parents = {pid for pid, _ in self._last}
        self._orphaned_ticks += sum(
            ticks for process, (parent, ticks) in self._last.items() if process not in owned and parent not in parents
        )
        self._last = {process: running[process] for process in owned}
        self._owned = {process: self._owned[process] for process in running if process in self._owned}
        return self._orphaned_ticks + sum(ticks for _, ticks in self._last.values())

    def _is_marked(self, pid: int) -> bool | None:
        """None if that is unknown yet: while a process starts its program, it has no environment."""
        if pid == os.getpid():
            return True
        with suppress(OSError):
            if environment := Path(f"/proc/{pid}/environ").read_bytes():
                return self._mark in environment.split(b"\0")
        return None


def _processes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The machine's processes: (id, start) and (parent, ticks), with the ticks of children that were waited for."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                yield (int(folder.name), int(fields[19])), (int(fields[1]), sum(map(int, fields[11:15])))


def _fixed_work() -> float:
    """The CPU seconds of a fixed amount of work, half of it Python's, half of it C's."""
    before = time.thread_time()
    words: dict[str, int] = {}
    for number in range(12_000):
        words[str(number % 997)] = words.get(str(number % 991), 0) + number
    hashlib.sha256(b"tidemark" * 400_000).digest()
    return time.thread_time() - before


class Costs:
    """Measures the tests of one process. Where the run is reported, prints the sums of all workers and holds them against the budget."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        os.environ["TIDEMARK_KEEPER_ENV"] = VARIABLE
        mark = os.environ[VARIABLE] = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"
        self._meter = Meter(mark)
        self._tests: dict[str, Spent] = {}
        self._fixtures: dict[str, list[Spent]] = defaultdict(list)
        self._shared = Spent()
        """Of the session's fixtures that the current test has started."""
        self._workers: list[dict[str, Any]] = []
        self._work_s = [_fixed_work()]
        self._began = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Reads often enough to see short-lived daemons. The process that only reports measures the machine instead."""
        reports = not hasattr(self._config, "workerinput")
        distributed = bool(self._config.getoption("numprocesses", 0))
        while not self._ended.wait(5 if distributed and reports else 0.5):
            if reports:
                self._work_s.append(_fixed_work())
            if not distributed or not reports:
                self._meter.now(FRESH_S)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, self._shared = self._meter.now(FRESH_S), Spent()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] = self._meter.now(FRESH_S) - before - self._shared

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before = self._meter.now(FRESH_S)
        try:
            return (yield)
        finally:
            spent = self._meter.now(FRESH_S) - before
            if fixturedef.scope != "function":
                self._fixtures[f"{fixturedef.baseid or 'pytest'}::{fixturedef.argname}"].append(spent)
            if fixturedef.scope == "session":
                self._shared += spent

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._ended.set()
        if self._tests:
            result = {
                "cpu_s": self._meter.now().cpu_s,
                "tests": {name: (spent.cpu_s, spent.wall_s) for name, spent in self._tests.items()},
                "fixtures": {name: [(one.cpu_s, one.wall_s) for one in spent] for name, spent in self._fixtures.items()},
            }
            if hasattr(self._config, "workeroutput"):
                self._config.workeroutput["costs"] = json.dumps(result)
            else:
                self._workers.append(result)
        if not hasattr(self._config, "workeroutput") and self._is_too_expensive() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if result := getattr(node, "workeroutput", {}).get("costs"):
            self._workers.append(json.loads(result))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._workers:
            return
        write = terminalreporter.write_line
        tests = {name: Spent(*spent) for worker in self._workers for name, spent in worker["tests"].items()}
        if os.environ.get("WHERE"):
            self._write_tables(write, tests)
        if len(tests) > SLOWEST:
            write(f"\nThe slowest {SLOWEST} tests\n   CPU s   wall s")
            for name, spent in _largest(tests)[:SLOWEST]:
                write(f"{spent}  {name}")
        slower = self._slower()
        write(f"\n{self._cpu_s():.0f} CPU s, on a machine that needs {slower:.2f} times the reference machine's time for the same work")
        if self._is_whole_short_run():
            write(f"the budget here is {BUDGET_CPU_S * slower:.0f} CPU s; a run of more than {self._limit_s():.0f} fails")

    def _write_tables(self, write: Any, tests: Mapping[str, Spent]) -> None:
        files: dict[str, Spent] = defaultdict(Spent)
        for name, spent in tests.items():
            files[name.partition("::")[0]] += spent
        write("\nBy file, without the session's fixtures\n   CPU s   wall s  tests")
        for name, spent in _largest(files):
            write(f"{spent} {sum(test.startswith(name + '::') for test in tests):6}  {name}")
        fixtures: dict[str, list[Spent]] = defaultdict(list)
        for worker in self._workers:
            for name, all_spent in worker["fixtures"].items():
                fixtures[name] += [Spent(*spent) for spent in all_spent]
        write("\nBy shared fixture\n   CPU s   wall s  times")
        for name, spent in _largest({name: sum(all_spent, Spent()) for name, all_spent in fixtures.items()}):
            if spent.cpu_s + spent.wall_s >= 0.2:
                write(f"{spent} {len(fixtures[name]):6}  {name}")
        target = self._config.rootpath / "build" / "costs.tsv"
        target.parent.mkdir(exist_ok=True)
        target.write_text("".join(f"{spent.cpu_s:.1f}\t{name}\n" for name, spent in sorted(files.items()) if spent.cpu_s >= 1))

    def _cpu_s(self) -> float:
        """Of the workers and of the process that reports."""
        here = resource.getrusage(resource.RUSAGE_SELF)
        distributed = bool(self._config.getoption("numprocesses", 0))
        return sum(worker["cpu_s"] for worker in self._workers) + (here.ru_utime + here.ru_stime if distributed else 0)

    def _slower(self) -> float:
        return median(self._work_s) / REFERENCE_S

    def _limit_s(self) -> float:
        idle = IDLE_CORES * max(0.0, time.monotonic() - self._began - USUAL_WALL_S)
        return (BUDGET_CPU_S * TOLERANCE + idle) * self._slower()

    def _is_whole_short_run(self) -> bool:
        options = self._config.option
        chosen = options.keyword or options.markexpr or getattr(options, "lf", False)
        return not ALL and not chosen and self._config.args == self._config.getini("testpaths")

    def _is_too_expensive(self) -> bool:
        return self._is_whole_short_run() and self._cpu_s() > self._limit_s()


def _largest(spent: Mapping[str, Spent]) -> list[tuple[str, Spent]]:
    return sorted(spent.items(), key=lambda one: one[1].cpu_s, reverse=True)
