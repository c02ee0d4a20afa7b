"""Two tasks of one attempt on one slice: Spark starts a copy of a task that stands at each step in turn. One of them loads the slice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.postgres_server import COMMIT_SESSIONS, PostgresServer
from tests.chaos.trial import BEFORE_THE_ROW, HOLDING_THE_ROW, Trial
from tests.support.attempts import FAST_JVM
from tests.support.points import Point
from tests.support.spark_cluster import SparkCluster, running
from tests.support.waiting import until

from tidemark.driver.launch import Progress
from tidemark.sink.steps import Step

HOSTS = ("127.0.0.1", "127.0.0.2")
"""The hosts of the two workers. Spark starts no copy of a task on the host where it already runs, and the name of a host is its address."""

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.task.duration.threshold": "300ms",  # applies to a stage with a single task
    "spark.speculation.minTaskRuntime": "100ms",
}
TWO_EXECUTORS = {
    "spark.authenticate": "false",
    "spark.cores.max": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": FAST_JVM["spark.driver.extraJavaOptions"],
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


@pytest.fixture
def cluster() -> Iterator[SparkCluster]:
    """A master and two workers on two addresses of this machine."""
    with tempfile.TemporaryDirectory(prefix="tidemark-spark-") as folder, running(Path(folder), workers=HOSTS) as cluster:
        yield cluster


@pytest.mark.thorough  # tests/integration/offsets/test_fence_machine.py has copies without Spark
def test_slice_that_two_tasks_of_an_attempt_commit_at_once_is_stored_once(trial, server: PostgresServer, cluster: SparkCluster):
    """Before ②, the copy overtakes the first task. Once the first task holds the row, the copy waits for it. What the first task commits is
    also the copy's receipt."""
    chaos = trial(len(Step))
    chaos.feed.add()
    chaos.scenario.set(batch={"max_records": chaos.feed.ends[0]})  # one slice per batch, one partition after the other
    conf = FAST_JVM | SPECULATION | TWO_EXECUTORS | {f"spark.executorEnv.{name}": value for name, value in chaos.points.env.items()}
    chaos.scenario.connections = replace(chaos.scenario.connections, spark_master=cluster.master, spark_conf=conf)
    points = chaos.hold(list(Step))
    copies = [the_copy(chaos, step) for step in Step]
    attempt = chaos.begin()
    for step, point, copied in zip(Step, points, copies, strict=True):
        first, copy = point.reached(), copied.reached()
        copied.release()  # not earlier: a copy that Spark starts early would be the first to reach the row, or the receipt
        assert (copy.epoch, copy.start, copy.end) == (first.epoch, first.start, first.end)
        assert copy.pid != first.pid
        if step in HOLDING_THE_ROW:
            until(lambda: any(server.waits(pid, "Lock") for pid in server.backends(COMMIT_SESSIONS)), f"{step.name}: the copy waits")
            chaos.check_stored(first, committed=False)
        elif step in BEFORE_THE_ROW:
            chaos.wait_for(first)
        chaos.check_stored(first, committed=step not in HOLDING_THE_ROW)
        if step is not Step.RECEIPT:
            point.release()
    done = attempt.wait()  # the copy delivers the last receipt: the first task stands before ⑦ until the end
    assert isinstance(done, Progress), attempt.log
    assert (done.state, done.records) == ("COMMITTED", sum(chaos.feed.ends))
    said = f"slice committed group={chaos.scenario.name} attempt={attempt.attempt_id} slice={chaos.feed.topic}/{first.partition} "
    assert [line.endswith("twin=True") for line in attempt.lines if said in line] == [True]


def the_copy(chaos: Trial, step: Step) -> Point:
    """The point where the copy of the task leaves its mark. It is the second to reach ②, or the first if the other one stands before it."""
    partition = step - 1
    if step not in BEFORE_THE_ROW:
        chaos.points.at(Step.MOVE_OFFSET, partition=partition, hold=False)
    return chaos.points.at(Step.MOVE_OFFSET, partition=partition)
