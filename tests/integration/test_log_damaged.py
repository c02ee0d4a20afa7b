"""A record batch in the log whose bytes changed on the broker's disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.own_broker import OwnBroker, own_broker, produce_batches
from tests.support.records import numbers
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario
from tests.support.spark_here import run_here

from tidemark.kafka.reader import BatchDamaged

pytestmark = pytest.mark.usefixtures("session_here")


@pytest.fixture(scope="module")
def broker() -> Iterator[OwnBroker]:
    with own_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def kafka_servers(broker: OwnBroker) -> str:
    return broker.servers


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("transform", "reader"),
    [(PLAIN, "compiled"), (ARROW, "python"), (SPARK, "compiled")],
    ids=["function", "arrow", "spark"],
    indirect=["reader"],
)
def test_damaged_record_batch_is_refused_under_its_own_name(scenario: Scenario, broker: OwnBroker, transform: str) -> None:
    """Records before it can be loaded, in smaller batches. A rewind past it skips it, and stores the skipped offsets as a lost range."""
    topic = scenario.topics.create()
    produce_batches(scenario.topics, topic, numbers(0, 10), numbers(10, 20), numbers(20, 30))
    broker.damage(topic, 10)
    scenario.write(transform, topics=topic, batch={"max_records": 10}).make_sink("payload bytea")
    run = scenario.run if transform != SPARK else lambda: run_here(scenario)
    with pytest.raises(BatchDamaged, match=rf"^{topic}/0: the record batch that begins at offset 10 is damaged"):
        run()
    assert scenario.attempt()["error"]["kind"] == "refused"
    assert scenario.rows() == numbers(0, 10)
    plan = scenario.command("rewind", "plan", scenario.name, "--to-offset", "20", "--topic", f"{topic}:0", "--reason", "damaged on disk")
    assert plan.returncode == 0, plan.stderr
    applied = scenario.command("rewind", "apply", "1")
    assert applied.returncode == 0, applied.stderr
    run()
    assert scenario.rows() == numbers(0, 10) + numbers(20, 30)
    assert scenario.lost() == [(0, 10, 20, "rewind")]
