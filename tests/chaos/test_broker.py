"""The broker is stopped while slices stand at every step, and started again at once or after the run has given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.chaos.trial import Trial, committed_before
from tests.support.points import Mark

from tidemark.errors import BrokerUnavailable
from tidemark.kafka import reader
from tidemark.local import LocalStack
from tidemark.sink.steps import Step

READING = (Step.BEGIN, Step.MOVE_OFFSET, Step.COPY_ROWS)
"""A slice that stands before one of these steps still has to read its records. It keeps those that fail, so later steps need no broker."""
READ = (Step.COPY_FAILED, Step.LEDGER, Step.COMMIT, Step.RECEIPT)

at_once = pytest.mark.parametrize("steps", [READING, READ], ids=["still-to-read", "all-read"])


@contextlib.contextmanager
def stopped(stack: LocalStack) -> Iterator[None]:
    stack.stop_kafka()
    try:
        yield
    finally:
        stack.start_kafka()


def check_as_they_stood(chaos: Trial, marks: list[Mark]) -> None:
    for mark in marks:
        chaos.check_stored(mark, committed=committed_before(mark.step))


@at_once
def test_run_outlives_a_restart_of_the_broker(trial, stack: LocalStack, steps):
    """While the broker is down, slices stand at each of these steps. The same attempt loads them."""
    chaos = trial(len(steps))
    chaos.feed.add()
    points = chaos.hold(steps)
    with chaos.running_here() as run:
        marks = [point.reached() for point in points]
        with stopped(stack):
            check_as_they_stood(chaos, marks)
            for point in points:
                point.release()
        assert run.result(180).records == sum(chaos.feed.ends)


@at_once
def test_broker_that_stays_away_fails_the_run_and_moves_nothing_that_was_not_read(trial, stack: LocalStack, monkeypatch, steps):
    """Slices that still have to read fail as unavailable, and the next try loads them. Those that have read everything do not need the
    broker."""
    monkeypatch.setattr(reader, "SILENCE_S", 1)
    chaos = trial(len(steps))
    chaos.feed.add()
    points = chaos.hold(steps)
    with chaos.running_here() as run:
        marks = [point.reached() for point in points]
        with stopped(stack):
            for point in points:
                point.release()
            error = run.exception(60)
            assert isinstance(error, BrokerUnavailable) if steps is READING else error is None
            for mark in marks:
                chaos.check_stored(mark, committed=steps is READ)
    assert chaos.run_here().records == (sum(chaos.feed.ends) if steps is READING else 0)
