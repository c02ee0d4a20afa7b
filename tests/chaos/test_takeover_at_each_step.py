"""Two attempts of one range: the older one is stopped, or slow, at each step in turn. One of them loads the range."""

from __future__ import annotations

import pytest
from tests.chaos.postgres_server import COMMIT_SESSIONS, DRIVER_SESSIONS, PostgresServer
from tests.chaos.trial import HOLDING_THE_ROW, STRUCK, committed_before
from tests.support.waiting import until

from tidemark.consume import claims
from tidemark.errors import Fenced
from tidemark.offsets.store import OffsetFenced
from tidemark.sink.steps import Step


def test_driver_that_is_stopped_at_any_step_stores_nothing_after_a_takeover(trial, monkeypatch):
    """Driver, JVM and workers are stopped (SIGSTOP) with a slice at each step. The next try takes over the partitions and loads the slices.
    Then the processes are continued (SIGCONT). Slices that had not reached ② are fenced there; those that held their rows find their
    sessions ended."""
    monkeypatch.setattr(claims, "GRACE_MS", 200)  # how long the newer attempt waits for a row that a stopped process holds
    chaos = trial(len(Step) + 1)
    chaos.feed.add()
    points = chaos.hold(list(Step))
    old = chaos.begin()
    marks = [point.reached() for point in points]
    chaos.wait_for_others(than=marks)
    suspended = old.suspend()
    for point, mark in zip(points, marks, strict=True):
        chaos.check_stored(mark, committed=committed_before(mark.step))
        point.release()
    left = chaos.left()
    assert left > 0
    assert chaos.run_here().records == left
    for process in suspended:
        process.resume()
    assert isinstance(old.wait(), Fenced)
    assert "is fenced: this attempt holds epoch 1" in old.log


def test_older_of_two_attempts_that_planned_one_range_is_fenced_whatever_the_newer_does(trial, server: PostgresServer):
    """The older attempt reaches ② while the newer one is at each step of the same slice. If the newer one holds the row, the older one
    waits. It is fenced in any case."""
    chaos = trial(2)
    for step in Step:
        with chaos.held_here(Step.MOVE_OFFSET) as older:
            newer_point = chaos.points.at(step, partition=STRUCK, epoch=older.mark.epoch + 1)
            with chaos.running_here() as newer:
                mark = newer_point.reached()
                assert (mark.start, mark.end) == (older.mark.start, older.mark.end)
                chaos.reader.look()
                waiting = server.backends(COMMIT_SESSIONS)
                older.point.release()
                if step in HOLDING_THE_ROW:
                    until(lambda pids=waiting: any(server.waits(pid, "Lock") for pid in pids), f"{step.name}: the older waits")
                    chaos.check_stored(mark, committed=False)
                else:
                    assert isinstance(older.run.exception(180), OffsetFenced), step
                    chaos.check_stored(mark, committed=committed_before(step))
                newer_point.release()
                assert newer.result(180).records == mark.end - mark.start
            assert isinstance(older.run.exception(180), OffsetFenced), step
        chaos.check_stored(mark, committed=True)


@pytest.mark.sampled
@pytest.mark.parametrize("step", HOLDING_THE_ROW, ids=lambda step: step.name.lower())
def test_newer_attempt_waits_for_a_commit_in_flight_and_starts_behind_it(trial, server: PostgresServer, step: Step, monkeypatch):
    """The older attempt holds the row and commits in time. The newer one finds nothing left to read."""
    monkeypatch.setattr(claims, "GRACE_MS", 120_000)
    chaos = trial(2)
    with chaos.held_here(step) as older, chaos.running_here() as newer:
        until(lambda: any(server.waits(pid, "Lock") for pid in server.backends(DRIVER_SESSIONS)), "the newer waits to claim")
        chaos.check_stored(older.mark, committed=False)
        older.point.release()
        assert newer.result(180).records == 0
        assert older.run.result(180).records == sum(chaos.feed.ends)
    chaos.check_stored(older.mark, committed=True)
