"""Attempts as an Airflow task runs them, each with a separate driver that a test can inspect, suspend and kill."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.driver.launch import Driver, DriverArguments, Progress, kill_group, run_attempt
from tidemark.errors import TidemarkError
from tidemark.local.processes import gone
from tidemark.offsets.store import TaskIdentity
from tidemark.spec import ConsumerSpec

FAST_JVM = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""A driver that lives for only a few seconds starts faster with the cheapest compiler."""


class Attempt:
    """An attempt that a thread follows, as an Airflow task does. The driver dies with that thread."""

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
                DriverArguments(self._spec.name, self.attempt_id, self._folder / "consumers", [self._folder / "transforms"]),
                self._connections,
                on_log=self.lines.append,
                on_start=self._started,
                with_keeper=self._kept,
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
        """The driver, the JVM and the Python workers."""
        assert self.driver is not None
        driver = psutil.Process(self.driver.pid)
        return [driver, *driver.children(recursive=True)]

    def jvm(self) -> psutil.Process:
        return next(process for process in self.tree() if process.name() == "java")

    def suspend(self) -> list[psutil.Process]:
        """Suspends all processes of the attempt (SIGSTOP) and returns them."""
        tree = self.tree()
        for process in tree:
            process.suspend()
        return tree

    def wait(self, timeout_s: float = 180) -> Progress | TidemarkError | None:
        """Waits until the attempt ends, and returns its result."""
        self._thread.join(timeout_s)
        assert not self.running, self.log
        return self.result

    def end(self) -> None:
        """Kills the processes that are still running."""
        if self.running and self.driver is not None:
            with contextlib.suppress(psutil.Error):
                for process in self.tree():
                    process.resume()
            kill_group(self.driver)
        self._thread.join(120)


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(gone(process) for process in processes)
