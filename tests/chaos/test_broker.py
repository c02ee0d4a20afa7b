"""The broker is stopped while slices stand at every step, and started again at once or after the run has given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

from tests.chaos.trial import Trial, committed_before
from tests.support.points import Mark, Point

from tidemark.driver.launch import Progress
from tidemark.errors import BrokerUnavailable
from tidemark.kafka import reader
from tidemark.local import LocalStack
from tidemark.sink.steps import Step

READING = (Step.BEGIN, Step.MOVE_OFFSET, Step.COPY_ROWS)
"""A slice that stands before one of these steps still has to read its records. It keeps those that fail, so later steps need no broker."""


@contextlib.contextmanager
def stopped(stack: LocalStack) -> Iterator[None]:
    stack.stop(stack.kafka)
    try:
        yield
    finally:
        stack.start(stack.kafka)


@contextlib.contextmanager
def standing(chaos: Trial) -> Iterator[tuple[Future[Progress], list[Point], list[Mark]]]:
    """A run with a slice at each step."""
    chaos.feed.add()
    points = chaos.hold(list(Step))
    with chaos.running_here() as run:
        yield run, points, [point.reached() for point in points]


def test_run_outlives_a_restart_of_the_broker(trial, stack: LocalStack, monkeypatch):
    """The same attempt loads the slices that stood at any step while the broker was down."""
    monkeypatch.setattr(reader, "SILENCE_S", 300)
    chaos = trial(len(Step))
    with standing(chaos) as (run, points, marks):
        with stopped(stack):
            for mark in marks:
                chaos.check_stored(mark, committed=committed_before(mark.step))
            for point in points:
                point.release()
        assert run.result(180).records == sum(chaos.feed.ends)


def test_broker_that_stays_away_fails_the_run_and_moves_nothing_that_was_not_read(trial, stack: LocalStack, monkeypatch):
    """Slices that still have to read fail as unavailable, and the next try loads them. Those that have read everything do not need the
    broker."""
    chaos = trial(len(Step))
    with standing(chaos) as (run, points, marks), stopped(stack), monkeypatch.context() as impatient:
        impatient.setattr(reader, "SILENCE_S", 1)
        for point in points:
            point.release()
        assert isinstance(run.exception(180), BrokerUnavailable)
        for mark in marks:
            chaos.check_stored(mark, committed=mark.step not in READING)
    assert chaos.run_here().records == sum(chaos.feed.ends[: len(READING)])
