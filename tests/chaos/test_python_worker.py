"""A Python worker of Spark is killed at each step in turn: Spark runs the task again, and the slice is stored once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.chaos.feed import SPARK_TRANSFORM, TRANSFORM
from tests.chaos.trial import SLOTS, STRUCK, Trial, committed_before, failure
from tests.support.points import Mark, Point
from tests.support.waiting import until

from tidemark.driver.launch import AttemptUnavailable, Progress
from tidemark.local.processes import gone
from tidemark.sink.steps import Step

TRIES = 4
"""Tries per task, as on a cluster. The default in local mode is one."""


def with_retries(chaos: Trial) -> None:
    chaos.scenario.connections = replace(chaos.scenario.connections, spark_master=f"local[{SLOTS},{TRIES}]")


def kill_at(point: Point) -> Mark:
    """Kills the worker that stands at the point."""
    mark = point.reached()
    worker = mark.process
    assert "pyspark" in " ".join(worker.parent().cmdline())
    worker.kill()
    until(lambda: gone(worker), "the worker gone")
    return mark


@pytest.mark.sampled
@pytest.mark.parametrize("transform", [pytest.param(TRANSFORM, id="function-form"), pytest.param(SPARK_TRANSFORM, id="spark-form")])
def test_task_whose_worker_was_killed_at_any_step_runs_again_in_the_same_attempt(trial, transform):
    """Before COMMIT, the next worker does all the work again. After COMMIT, it finds the ledger row of its twin and returns that."""
    chaos = trial(len(Step), transform)
    with_retries(chaos)
    chaos.feed.add()
    points = chaos.hold(list(Step))
    next_tries = [chaos.points.at(Step.BEGIN, partition=partition, after=point) for partition, point in enumerate(points)]
    attempt = chaos.begin()
    for step, point, again in zip(Step, points, next_tries, strict=True):
        point.reached()
        chaos.reader.look()
        killed = kill_at(point)
        assert again.reached().pid != killed.pid
        chaos.check_stored(killed, committed=committed_before(step))
        again.release()
    done = attempt.wait()
    assert isinstance(done, Progress)
    assert done.state == "COMMITTED"
    assert attempt.log.count("twin=True") == 1


def test_slice_whose_worker_dies_at_every_try_is_left_to_the_next_attempt(trial):
    """Spark gives up, and the attempt fails as unavailable. What the other tasks have committed stays."""
    chaos = trial(2)
    with_retries(chaos)
    chaos.feed.add()
    points = [chaos.points.at(Step.COMMIT, partition=STRUCK) for _ in range(TRIES)]
    attempt = chaos.begin()
    chaos.reader.look()
    marks = [kill_at(point) for point in points]
    assert len({mark.pid for mark in marks}) == TRIES
    assert isinstance(failure(attempt.wait()), AttemptUnavailable)
    chaos.wait_for_others(than=marks)
    chaos.check_stored(marks[0], committed=False)
    assert chaos.run_here().records == marks[0].end - marks[0].start
