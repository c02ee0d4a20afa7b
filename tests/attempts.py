"""Attempts as a task follows them: a driver of their own each, which a test may stop, kill and look at."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

from tidemark.connections import Connections
from tidemark.consume.launch import Driver, Progress, kill_group, run_attempt
from tidemark.consume.run import open_attempt
from tidemark.errors import TidemarkError
from tidemark.local.processes import gone
from tidemark.offsets.store import TaskIdentity
from tidemark.spec import ConsumerSpec

FAST_JVM = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""A driver that lives for some seconds is ready sooner with the cheapest compiler."""


class Attempt:
    """An attempt that is followed in a thread of its own, as a task does. The driver dies with that thread."""

    def __init__(self, spec: ConsumerSpec, connections: Connections, folder: Path, task: TaskIdentity, *, kept: bool = False) -> None:
        self.attempt_id = open_attempt(connections.database_url, spec.group, task)
        self.lines: list[str] = []
        self.driver: Driver | None = None
        self.result: Progress | TidemarkError | None = None
        self._spec, self._connections, self._folder, self._kept = spec, connections, folder, kept
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self.result = run_attempt(
                self._spec.name,
                self._connections,
                self.attempt_id,
                folders={kind: [self._folder / kind] for kind in ("consumers", "transforms")},
                on_log=self.lines.append,
                on_progress=lambda _: None,
                on_start=self._started,
                kept=self._kept,
            )
        except TidemarkError as error:
            self.result = error

    def _started(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def tree(self) -> list[psutil.Process]:
        """Driver, JVM and Python workers."""
        assert self.driver is not None
        driver = psutil.Process(self.driver.pid)
        return [driver, *driver.children(recursive=True)]

    def jvm(self) -> psutil.Process:
        return next(process for process in self.tree() if process.name() == "java")

    def suspend(self) -> list[psutil.Process]:
        """Stops all its processes (SIGSTOP)."""
        tree = self.tree()
        for process in tree:
            process.suspend()
        return tree

    def wait(self, timeout_s: float = 60) -> Progress | TidemarkError | None:
        """How it ended."""
        self._thread.join(timeout_s)
        assert not self.running, self.log
        return self.result

    def end(self) -> None:
        """Kills what is left of it."""
        if self.running and self.driver is not None:
            with contextlib.suppress(psutil.Error):
                for process in self.tree():
                    process.resume()
            kill_group(self.driver)
        self._thread.join(120)


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(gone(process) for process in processes)
