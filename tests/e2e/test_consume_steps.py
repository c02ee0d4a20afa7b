"""The task of a consumer's DAG or its supervisor, killed while a commit stands at each step: Airflow tries again, every record once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import psutil
import pytest
from tests.attempts import all_gone
from tests.chaos.feed import Log
from tests.chaos.reader import Reader
from tests.e2e.lab import BATCH, Consumer, Lab, Run
from tests.points import Mark, Point, until

from tidemark import project
from tidemark.sink.steps import Step

RECORDS = 1000
CHAINS = {
    "steps-1-2": (Step.BEGIN, Step.MOVE_OFFSET),
    "steps-3-4": (Step.COPY_ROWS, Step.COPY_FAILED),
    "steps-5-7": (Step.LEDGER, Step.COMMIT, Step.RECEIPT),
}
"""Consumers, and the steps at which their tries are struck. ``make test`` samples one of them, in which a task and a supervisor are killed;
`tests.chaos.test_driver` has a slice at every step in every run."""


def task_of(driver: psutil.Process) -> psutil.Process:
    task = driver.parent()
    assert task is not None
    return task


def supervisor_of(driver: psutil.Process) -> psutil.Process:
    return task_of(task_of(driver))


class Chain:
    """One run of a consumer, each of whose tries is struck at the next point; the last one is not."""

    def __init__(self, lab: Lab, consumer: Consumer, steps: tuple[Step, ...]) -> None:
        self.consumer = consumer
        self.strikes: list[tuple[Point, Callable[[psutil.Process], psutil.Process]]] = [
            (lab.points.at(step, topic=consumer.name, start=BATCH), task_of if step % 2 else supervisor_of) for step in steps
        ]
        log = Log([dict.fromkeys(range(RECORDS), b"l")])
        consumer.produce(*range(RECORDS))
        self.run: Run = consumer.trigger()
        self.reader = Reader(lab.url, consumer.table, consumer.name, log, pause_s=0.1)

    def strike(self) -> None:
        for point, victim in self.strikes:
            mark = point.reached(120)
            driver = driver_of(mark)
            tree = [driver, *driver.children(recursive=True)]
            self.reader.look()
            victim(driver).kill()
            until(lambda tree=tree: all_gone(tree), f"driver, JVM and workers of {self.consumer.name} gone", 10)  # type: ignore[misc]
            stored = mark.end if mark.step is Step.RECEIPT else mark.start
            assert self.reader.look().positions == {0: stored}, mark


def driver_of(mark: Mark) -> psutil.Process:
    job = str(project.consume_job())
    return next(process for process in mark.process.parents() if job in process.cmdline())


@pytest.fixture(params=CHAINS)
def chain(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Chain]:
    chain = Chain(lab, lab.consumer(request.param), CHAINS[request.param])
    with closing(chain.reader):
        yield chain
        for point, _ in chain.strikes:
            point.release()


@pytest.mark.sampled
def test_task_or_supervisor_killed_at_a_step_is_tried_again_and_every_record_comes_once(lab, chain):
    """The task at odd steps, its supervisor at even ones: the driver dies with either, and the next try goes on behind what was
    committed. Whoever reads meanwhile sees nothing half done."""
    chain.strike()
    assert chain.run.wait(120) == "success"
    count = len(chain.strikes)
    assert chain.run.tries() == ["failed"] * count + ["success"]
    assert [state for state, _, _ in chain.consumer.attempts()] == ["FAILED"] * count + ["COMMITTED"]
    assert chain.consumer.rows() == list(range(RECORDS))
    assert chain.consumer.position() == RECORDS
    chain.reader.look()
