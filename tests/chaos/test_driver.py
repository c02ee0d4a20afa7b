"""The driver or its JVM is killed while slices stand at every step: nothing of a slice is stored before COMMIT, all of it after."""

from __future__ import annotations

import pytest
from tests.chaos.trial import committed_before, failure
from tests.support.attempts import Attempt, all_gone
from tests.support.points import Mark
from tests.support.waiting import until

from tidemark.driver.launch import AttemptUnavailable, DriverDied
from tidemark.sink.steps import Step


def kill_driver(attempt: Attempt, mark: Mark) -> None:
    attempt.driver.kill()


def kill_jvm(attempt: Attempt, mark: Mark) -> None:
    mark.ancestor(program="java").kill()


@pytest.mark.sampled
@pytest.mark.parametrize(("kill", "error"), [(kill_driver, DriverDied), (kill_jvm, AttemptUnavailable)], ids=["driver", "jvm"])
def test_attempt_that_is_killed_with_a_slice_at_each_step_loses_and_doubles_nothing(trial, kill, error):
    """The attempt fails as unavailable, its processes end, and the next try continues after what is committed. One more slice was committed
    before the kill."""
    chaos = trial(len(Step) + 1)
    chaos.feed.add()
    points = chaos.hold(list(Step))
    attempt = chaos.begin()
    marks = [point.reached() for point in points]
    chaos.wait_for_others(than=marks)
    tree = attempt.tree()
    chaos.reader.look()
    kill(attempt, marks[0])
    assert isinstance(failure(attempt.wait()), error)
    until(lambda: all_gone(tree), "driver, JVM and workers gone")
    for mark in marks:
        chaos.check_stored(mark, committed=committed_before(mark.step))
    left = chaos.left()
    assert left == sum(mark.end - mark.start for mark in marks if not committed_before(mark.step))
    assert chaos.run_here().records == left
