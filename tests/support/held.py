"""A consumer whose batch blocks in its transform until the test releases it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import psutil

from tests.support.scenario import Scenario
from tests.support.spark_here import Lasting, run_here
from tests.support.waiting import until
from tidemark.driver import launch
from tidemark.offsets.store import TaskIdentity

HELD = """
    import os
    import threading
    from pathlib import Path

    FOLDER = Path({folder!r})
    PAUSE = threading.Event()


    def held(value):
        if value == b"wait" and (FOLDER / "hold").exists():
            (FOLDER / f"{{os.getpid()}}.worker").touch()
            while (FOLDER / "hold").exists():
                PAUSE.wait(0.02)
        return value
"""
"""Blocks at a record while a file exists, and writes down in which process it blocks."""
FUNCTION = (
    HELD
    + """

    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        return {{"payload": held(record.value or b"")}}
"""
)


class Held:
    """A consumer of two partitions. The transform blocks at a record of the second one."""

    def __init__(self, scenario: Scenario, source: str) -> None:
        self.scenario, self.folder = scenario, scenario.folder / f"hold-{scenario.name}"
        self.folder.mkdir()
        (self.folder / "hold").touch()
        self.topic = scenario.topics.create(2)
        scenario.topics.produce(self.topic, [b"a", b"b", b"c"], partition=0)
        scenario.topics.produce(self.topic, [b"x", b"wait", b"z"], partition=1)
        scenario.write(source.format(folder=str(self.folder)), topics=self.topic).make_sink("payload bytea")
        self.cancelled = threading.Event()

    def go_on(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def worker(self, of: Future[launch.Progress]) -> psutil.Process:
        """Waits until a Python worker of the run blocks at the record, and returns the worker."""
        until(lambda: list(self.folder.glob("*.worker")) or of.done(), "a worker stands at the record")
        assert not of.done(), of.result()
        (found,) = self.folder.glob("*.worker")
        return psutil.Process(int(found.stem))

    def run(self, engines: list[Lasting], task: TaskIdentity) -> launch.Progress:
        """Makes one run, and adds its engine to the list."""
        cancelled = self.cancelled

        class Cancels(Lasting):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                engines.append(self)

            def cancel(self) -> None:
                cancelled.set()
                super().cancel()

        return run_here(self.scenario, task=task, kind=Cancels)

    def stored(self) -> dict[int, list[bytes]]:
        return {partition: self.scenario.rows(where=f"kafka_partition = {partition}") for partition in (0, 1)}

    def first_is_committed(self) -> bool:
        return self.scenario.positions().get((self.topic, 0)) == 3
