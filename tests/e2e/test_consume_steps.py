"""The task of a consumer's DAG or its supervisor is killed while a commit stands at each step. Airflow retries; every record is stored
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import psutil
import pytest
from tests.chaos.feed import Log
from tests.chaos.reader import Reader
from tests.e2e.lab import BATCH, Consumer, Lab, Run
from tests.support.attempts import all_gone
from tests.support.points import Point
from tests.support.sampling import ALL
from tests.support.waiting import until

from tidemark.sink.steps import Step

RECORDS = 1000
CHAINS = {
    "steps-1-2": (Step.BEGIN, Step.MOVE_OFFSET),
    "steps-3-4": (Step.COPY_ROWS, Step.COPY_FAILED),
    "steps-5-7": (Step.LEDGER, Step.COMMIT, Step.RECEIPT) if ALL else (Step.COMMIT, Step.RECEIPT),
}
"""Consumers, and the steps at which their tries are struck. ``make test`` samples one consumer, whose task and supervisor are killed.
`tests.chaos.test_driver` has a slice at every step in every run."""


def task_of(run: Run) -> psutil.Process:
    return psutil.Process(run.lab.client.get(f"{run.path}/consume")["pid"])


def supervisor_of(run: Run) -> psutil.Process:
    supervisor = task_of(run).parent()
    assert supervisor is not None
    return supervisor


class Chain:
    """One run of a consumer. Each of its tries is struck at the next point, except the last one."""

    def __init__(self, lab: Lab, consumer: Consumer, steps: tuple[Step, ...]) -> None:
        self.lab, self.consumer = lab, consumer
        self.strikes: list[tuple[Point, Callable[[Run], psutil.Process]]] = [
            (lab.points.at(step, topic=consumer.name, start=BATCH), task_of if step % 2 else supervisor_of) for step in steps
        ]
        log = Log([dict.fromkeys(range(RECORDS), b"l")])
        consumer.produce(*range(RECORDS))
        self.run: Run = consumer.trigger()
        self.reader = Reader(lab.url, consumer.table, consumer.name, log, pause_s=0.1)

    def strike(self) -> None:
        for point, victim in self.strikes:
            mark = point.reached()
            driver = self.lab.driver(mark.attempt_id)
            assert driver is not None
            ends = [driver, *driver.children(recursive=True), mark.process]
            self.reader.look()
            following = self.lab.points.at(Step.BEGIN, topic=self.consumer.name, start=BATCH, after=point)
            victim(self.run).kill()
            until(lambda ends=ends: all_gone(ends), f"driver and worker of {self.consumer.name} gone")  # type: ignore[misc]
            stored = mark.end if mark.step is Step.RECEIPT else mark.start
            assert self.reader.look().positions == {0: stored}, mark
            following.release()  # the next try, which can start before the driver of this one is gone


@pytest.fixture(params=CHAINS)
def chain(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Chain]:
    chain = Chain(lab, lab.consumer(request.param), CHAINS[request.param])
    with closing(chain.reader):
        yield chain
        lab.points.release_all()


@pytest.mark.sampled
def test_task_or_supervisor_killed_at_a_step_is_tried_again_and_every_record_comes_once(lab, chain):
    """The task is killed at odd steps, its supervisor at even ones. The driver dies with either, and the next try continues after what was
    committed. A concurrent reader never sees anything half done."""
    chain.strike()
    assert chain.run.wait() == "success"
    count = len(chain.strikes)
    assert chain.run.tries() == ["failed"] * count + ["success"]
    assert [state for state, _, _ in chain.consumer.attempts()] == ["FAILED"] * count + ["COMMITTED"]
    assert chain.consumer.rows() == list(range(RECORDS))
    assert chain.consumer.position() == RECORDS
    chain.reader.look()
