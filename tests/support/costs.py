"""What the tests cost: CPU and wall seconds by file, by fixture and by test.

CPU is that of all processes that a worker has started, directly or not: servers, JVMs, Airflows, browsers. A process belongs to the worker
whose variable ``TIDEMARK_TEST_WORKER`` it has inherited, or to that of its parent. Linux only: reads ``/proc``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TIDEMARK_TEST_WORKER"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
FRESH_S = 0.2
"""A reading may be this old. Tests that are shorter share one; the sums of their files are right."""


@dataclass(frozen=True)
class Spent:
    cpu_s: float
    wall_s: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)


NOTHING = Spent(0, 0)


class Meter:
    """The CPU seconds of a worker's processes, those that have ended included."""

    def __init__(self, worker: str) -> None:
        self._mark = f"{VARIABLE}={worker}".encode()
        self._lock = threading.Lock()
        self._ours: dict[tuple[int, int], bool] = {}
        """By process id and start: is it one of the worker's?"""
        self._last: dict[tuple[int, int], tuple[int, int]] = {}
        """The parent and the ticks of each of the worker's processes, the ticks of its ended and awaited children included."""
        self._ended = 0
        """The ticks of ended processes whose parent was not the worker's, such as a daemon's."""
        self._read_at = 0.0
        self._ticks = 0

    def now(self, within_s: float = 0.0) -> Spent:
        """Reads the CPU seconds until now, or takes a reading that is at most ``within_s`` old."""
        with self._lock:
            at = time.monotonic()
            if at - self._read_at > within_s:
                self._ticks = self._read()
                self._read_at = time.monotonic()
            return Spent(self._ticks * TICK_S, at)

    def _read(self) -> int:
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        parents: dict[tuple[int, int], int] = {}
        for folder in Path("/proc").iterdir():
            if (name := folder.name).isdigit():
                with suppress(OSError):
                    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                    process = (int(name), int(fields[19]))
                    seen[process] = (int(fields[1]), sum(map(int, fields[11:15])))
                    parents[process] = int(fields[1])
        ours_now = {pid for (pid, start) in seen if self._ours.get((pid, start))}
        for process in sorted(seen, key=lambda one: one[1]):
            if process not in self._ours:
                self._ours[process] = parents[process] in ours_now or self._is_marked(process[0])
                if self._ours[process]:
                    ours_now.add(process[0])
        mine = {process: state for process, state in seen.items() if self._ours[process]}
        known_before = {pid for pid, _ in self._last}
        for process, (parent, ticks) in self._last.items():
            if process not in mine and parent not in known_before:
                self._ended += ticks
        self._last = mine
        self._ours = {process: self._ours[process] for process in seen}
        return self._ended + sum(ticks for _, ticks in mine.values())

    def _is_marked(self, pid: int) -> bool:
        if pid == os.getpid():
            return True
        with suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


class Costs:
    """Measures one worker's tests, and prints the sums of all workers at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        os.environ[VARIABLE] = f"{self._worker}-{os.getpid()}"
        self._meter = Meter(os.environ[VARIABLE])
        self._tests: dict[str, Spent] = {}
        self._fixtures: dict[str, list[Spent]] = defaultdict(list)
        self._reports: list[dict[str, Any]] = []
        self._ended = threading.Event()
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def _keep_reading(self) -> None:
        while not self._ended.wait(0.5):
            self._meter.now(FRESH_S)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._meter.now(FRESH_S)
        result = yield
        self._tests[item.nodeid] = self._meter.now(FRESH_S) - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before = self._meter.now(FRESH_S)
        try:
            return (yield)
        finally:
            self._fixtures[f"{fixturedef.baseid}::{fixturedef.argname}"].append(self._meter.now(FRESH_S) - before)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        if self._tests:
            report = {
                "total": self._meter.now().cpu_s,
                "tests": {name: (spent.cpu_s, spent.wall_s) for name, spent in self._tests.items()},
                "fixtures": {name: [(spent.cpu_s, spent.wall_s) for spent in all_] for name, all_ in self._fixtures.items()},
            }
            if hasattr(self._config, "workeroutput"):
                self._config.workeroutput["costs"] = report
            else:
                self._reports.append(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if report := getattr(node, "workeroutput", {}).get("costs"):
            self._reports.append(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._reports and os.environ.get("WHERE"):
            import json

            Path("build").mkdir(exist_ok=True)
            Path("build/costs.json").write_text(json.dumps(self._reports))
