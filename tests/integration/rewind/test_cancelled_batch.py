"""A run is notified of a rewind while its batch is in flight: the batch is cancelled, and the run continues from the new positions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.by_hand import ByHand
from tests.support.held import FUNCTION, HELD, Held
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.offsets.store import TaskIdentity
from tidemark.rewind import apply as applying
from tidemark.rewind.plan_model import ToCurrent

STAGED = (
    HELD
    + """

    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        moved = records.repartition(2)
        return moved.select("kafka_topic", "kafka_partition", "kafka_offset", F.udf(held, "binary")("value").alias("payload"))
"""
)


pytestmark = pytest.mark.usefixtures("session_here")


@pytest.mark.sampled
@pytest.mark.parametrize("source", [FUNCTION, pytest.param(STAGED, marks=pytest.mark.thorough)], ids=["direct", "staged"])
def test_batch_in_flight_is_ended_when_a_rewind_has_moved_its_partitions(
    scenario: Scenario, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transform blocks throughout. The run claims again within seconds instead of waiting for the transform to finish."""
    monkeypatch.setattr(applying, "GRACE_MS", 300)
    consumer, engines = Held(scenario, source), []
    with ThreadPoolExecutor(1) as pool:
        try:
            done = pool.submit(consumer.run, engines, TaskIdentity())
            consumer.worker(done)
            ByHand(scenario).rewind(ToCurrent())
            until(consumer.cancelled.is_set, "the batch is interrupted")
            query = "SELECT min(owner_epoch) FROM tidemark.partition_offset"
            until(lambda: scenario.sql(query)[0][0] == 3, "claimed again")
        finally:
            consumer.go_on()
        assert done.result(180).state == "COMMITTED"
    assert consumer.stored() == {0: [b"a", b"b", b"c"], 1: [b"x", b"wait", b"z"]}
    scenario.check()
