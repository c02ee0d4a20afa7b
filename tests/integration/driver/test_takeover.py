"""A driver hangs, is given up, and wakes up after a newer one has taken over: it stores nothing more (I2).

Here both are real drivers, and claims wait as long as in production. `tests.chaos` suspends the older driver at every step.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from tests.support.attempts import FAST_JVM, Attempt, all_gone
from tests.support.points import points_among
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.driver.launch import Progress, progress
from tidemark.errors import Fenced
from tidemark.offsets.store import TaskIdentity
from tidemark.sink.steps import Step

BATCH, RECORDS = 100, 250
EVERYTHING = [b"%d" % number for number in range(RECORDS)]


def try_number(number: int) -> TaskIdentity:
    return TaskIdentity("consume__takeover", "run", "consume", -1, number)


@pytest.fixture
def consumer(scenario: Scenario) -> Scenario:
    """A consumer of 250 records, read in batches of 100."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, EVERYTHING)
    return scenario.write(topics=topic, batch={"max_records": BATCH}).make_sink("payload bytea")


@pytest.mark.thorough  # tests/chaos/test_takeover_at_each_step.py stops drivers at each step
def test_driver_that_wakes_up_after_a_takeover_stores_nothing(consumer: Scenario) -> None:
    """The old driver holds the partition's row: the newer one waits for it, then ends that session. Every record is in the sink once."""
    connections = replace(consumer.connections, spark_master="local[1]", spark_conf=FAST_JVM)
    with points_among(consumer.folders[0]) as points, contextlib.ExitStack() as ends:

        def begin(number: int) -> Attempt:
            attempt = Attempt(consumer.spec, connections, consumer.folder, try_number(number))
            ends.callback(attempt.end)
            return attempt

        point = points.at(Step.COMMIT, start=1)
        old = begin(1)
        point.reached()
        suspended = old.suspend()
        point.release()
        new = begin(2).wait()
        assert isinstance(new, Progress)
        assert (new.state, [(part.start, part.end) for part in new.partitions]) == ("COMMITTED", [(BATCH, RECORDS)])
        assert consumer.rows() == EVERYTHING

        for process in suspended:
            process.resume()
        assert isinstance(old.wait(), Fenced)
        assert "Postgres is not available" in old.log or "holds epoch 1, the row is at epoch 2" in old.log  # whichever is noticed first
        assert progress(consumer.database_url, old.attempt_id).state == "FAILED"
        assert consumer.rows() == EVERYTHING
        consumer.check()
        until(lambda: all_gone(suspended), "the old driver, its JVM and its workers gone")


def test_retried_try_of_a_finished_run_says_so_and_reads_nothing(consumer: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    """The first try committed everything that its run had planned, and was then lost. The second needs no engine, and succeeds."""
    caplog.set_level("INFO", "tidemark")
    assert consumer.run(task=try_number(1)).records == RECORDS
    done = consumer.run(task=try_number(2))
    assert (done.state, done.records, consumer.engine) == ("COMMITTED", 0, None)
    assert f"an earlier attempt has committed the whole run group={consumer.spec.group}" in caplog.text
    assert consumer.rows() == EVERYTHING
