"""`SparkEngine.cancel` on a real batch in flight, whose transform blocks until the test releases it.

The batch ends early. What it had committed stays, nothing else of it is stored, and the next reader continues from the last commits.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.support.held import FUNCTION, HELD, Held
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.local.processes import gone
from tidemark.offsets.store import TaskIdentity
from tidemark.spark.errors import SparkFailed

EARLY_S = 60
"""Generous, for a busy machine. A cancelled batch ends at once, and its Python workers are killed some 4 s later; otherwise it would never
end."""
POLL_MS = 6000
"""``max.poll.interval.ms``. A batch that keeps other members waiting may use only part of it."""

SPARK = (
    HELD
    + """

    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        return records.select("kafka_topic", "kafka_partition", "kafka_offset", F.udf(held, "binary")("value").alias("payload"))
"""
)


pytestmark = [pytest.mark.usefixtures("session_here"), pytest.mark.thorough]


@pytest.mark.parametrize("source", [FUNCTION, SPARK], ids=["function", "spark"])
def test_batch_that_is_cancelled_ends_early_and_stores_nothing_more(scenario: Scenario, source: str) -> None:
    """The call comes from another thread, like that of the group's protocol thread. The slice that was committed stays. The transform of
    the other slice blocks until its worker is killed."""
    consumer, engines = Held(scenario, source), []
    with ThreadPoolExecutor(1) as pool:
        try:
            done = pool.submit(consumer.run, engines, TaskIdentity())
            worker = consumer.worker(done)
            until(consumer.first_is_committed, "the other slice is committed")
            engines[0].cancel()
            cancelled = time.monotonic()
            with pytest.raises(SparkFailed, match="cancelled"):
                done.result(180)
            assert time.monotonic() - cancelled < EARLY_S
            until(lambda: gone(worker), "its worker has ended")
            assert consumer.stored() == {0: [b"a", b"b", b"c"], 1: []}
            assert scenario.positions() == {(consumer.topic, 0): 3, (consumer.topic, 1): 0}
        finally:
            consumer.go_on()
    assert consumer.run(engines, TaskIdentity()).records == 3
    assert consumer.stored() == {0: [b"a", b"b", b"c"], 1: [b"x", b"wait", b"z"]}
    scenario.check()


def test_member_whose_batch_keeps_the_group_waiting_goes_on_from_the_last_commits(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """Another member has joined, and the batch does not end, so the protocol thread cancels it. Nothing more of it is stored. The member
    continues its run with the partitions that it keeps, and both members together read everything once."""
    consumer, engines = Held(scenario, FUNCTION), []
    scenario.set(members=2)
    kafka = {**scenario.connections.kafka, "max.poll.interval.ms": str(POLL_MS), "session.timeout.ms": str(POLL_MS)}
    scenario.connections = replace(scenario.connections, kafka={**kafka, "heartbeat.interval.ms": "500"})
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(consumer.run, engines, TaskIdentity("dag", "run", "consume", 0, 1))
            worker = consumer.worker(first)
            until(consumer.first_is_committed, "the other slice is committed")
            second = pool.submit(scenario.run, task=TaskIdentity("dag", "run", "consume", 1, 1))
            until(consumer.cancelled.is_set, "the batch is cancelled", POLL_MS / 1000 + EARLY_S)
            until(lambda: gone(worker), "its worker has ended")
            assert consumer.stored()[1] == []  # the partition's current owner blocks at the record again
        finally:
            consumer.go_on()
        assert [each.result(180).state for each in (first, second)] == ["COMMITTED", "COMMITTED"]
    assert "batch ended early, continuing from the committed positions" in caplog.text
    assert consumer.stored() == {0: [b"a", b"b", b"c"], 1: [b"x", b"wait", b"z"]}
    scenario.check()
