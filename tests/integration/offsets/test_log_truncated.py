"""Logs that lost or changed records on the broker: truncated below a group's position, perhaps grown again with other records at the same
offsets (KIP-320), or damaged on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.support.own_broker import OwnBroker, own_broker, produce_batches
from tests.support.records import numbers
from tests.support.rewound import rewound
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario
from tests.support.shell import tidemark
from tests.support.spark_here import run_here

from tidemark.kafka.reader import BatchDamaged, RangeGone
from tidemark.offsets.reset import LogTruncated

OTHERS = numbers(100, 125)
"""The records that are written to the log after the truncation."""


@pytest.fixture(scope="module")
def broker() -> Iterator[OwnBroker]:
    with own_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def kafka_servers(broker: OwnBroker) -> str:
    return broker.servers


def twenty(scenario: Scenario) -> str:
    """Creates a topic of two batches with ten records each."""
    topic = scenario.topics.create()
    produce_batches(scenario.topics, topic, numbers(0, 10), numbers(10, 20))
    return topic


def read_twenty(scenario: Scenario, transform: str = PLAIN) -> str:
    topic = twenty(scenario)
    scenario.write(transform, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows() == numbers(0, 20)
    return topic


def lag(scenario: Scenario) -> tuple[str, int | None, str]:
    """Health, records to read and the reason, as ``tidemark lag`` shows them."""
    shown = tidemark(scenario, "lag", scenario.name, "--output", "json")
    assert (shown.returncode, shown.stderr) == (0, "")
    (one,) = json.loads(shown.stdout)
    return one["lag"]["health"], one["lag"]["records"], one["lag"]["why"]


@pytest.mark.sampled
@pytest.mark.parametrize("transform", [PLAIN, ARROW], ids=["function", "arrow"])
def test_log_that_was_truncated_and_grew_again_is_refused_until_a_rewind(scenario: Scenario, broker: OwnBroker, transform: str) -> None:
    """Rows of two histories never mix. The error names the offset at which they diverge, and a rewind to it resolves the error."""
    topic = read_twenty(scenario, transform)
    broker.truncate(topic, 10)
    scenario.topics.produce(topic, OTHERS)
    for _ in range(2):  # waiting does not resolve the refusal
        with pytest.raises(LogTruncated, match=f"--to-offset 10 --topic {topic}:0") as refused:
            scenario.run()
        scenario.topics.produce(topic, [b"more"])
    assert (refused.value.position, refused.value.leader_epoch, refused.value.end) == (20, 0, 10)
    assert scenario.attempt()["error"]["kind"] == "refused"
    assert scenario.positions() == {(topic, 0): 20}
    assert scenario.rows() == numbers(0, 20)
    shown = json.loads(tidemark(scenario, "offsets", scenario.name, "--output", "json").stdout)
    assert (shown["lag_records"], shown["partitions"][0]["lag_records"], shown["partitions"][0]["truncated"]) == (None, None, True)
    health, records, why = lag(scenario)
    assert (health, records) == ("run failed", None)
    assert "LogTruncated: " in why
    rewound(scenario, "--to-offset", "10", "--topic", f"{topic}:0")
    scenario.run()
    assert lag(scenario)[:2] == ("ok", 0)
    assert scenario.rows() == numbers(0, 10) + OTHERS + [b"more"] * 2
    scenario.check()


@pytest.mark.thorough
def test_log_that_was_truncated_and_is_shorter_is_refused_and_shown_as_truncated(scenario: Scenario, broker: OwnBroker) -> None:
    """A position beyond the end must not show as a lag of 0. The refusal names the offset at which the histories diverge, also when the log
    grew again, but not up to the position."""
    topic = read_twenty(scenario)
    broker.truncate(topic, 10)
    with pytest.raises(LogTruncated, match="remain up to 10"):
        scenario.run()
    scenario.topics.produce(topic, OTHERS[:5])
    with pytest.raises(LogTruncated) as refused:
        scenario.run()
    assert (refused.value.position, refused.value.end) == (20, 10)
    shown = tidemark(scenario, "offsets", scenario.name)
    (row,) = (line.split() for line in shown.stdout.splitlines() if line.split()[:1] == [f"{topic}/0"])
    assert row[:4] == [f"{topic}/0", "20", "15", "truncated"]
    assert f"tidemark rewind plan {scenario.name} --to-offset 10" in " ".join(shown.stdout.split())
    health, records, why = lag(scenario)
    assert (health, records) == ("run failed", None)
    assert "LogTruncated: " in why
    rewound(scenario, "--to-offset", "10", "--topic", f"{topic}:0")
    scenario.run()
    assert scenario.rows() == numbers(0, 10) + OTHERS[:5]
    scenario.check()


@pytest.mark.sampled
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("cut", [0, 10], ids=["below the slice", "within the slice"])
def test_log_that_is_truncated_while_it_is_read_refuses_the_slice(scenario: Scenario, broker: OwnBroker, cut: int) -> None:
    """A record belongs to another history if its leader epoch is later than the one in which the range was planned."""
    topic = twenty(scenario)
    scenario.write(topics=topic, batch={"max_records": 10}).make_sink()

    def truncated(part: object) -> None:
        if str(part).endswith("[10, 20)"):
            broker.truncate(topic, cut)
            scenario.topics.produce(topic, OTHERS)

    with pytest.raises(RangeGone, match="truncat"):
        scenario.run(before=truncated)
    assert scenario.rows() == numbers(0, 10)
    assert scenario.positions() == {(topic, 0): 10}
    if cut == 0:
        with pytest.raises(LogTruncated):
            scenario.run()
        rewound(scenario, "--to-offset", "0", "--topic", f"{topic}:0")
    scenario.run()
    assert scenario.rows() == numbers(0, cut) + OTHERS
    scenario.check()


@pytest.mark.thorough  # tests/chaos/test_broker.py restarts it during a run
def test_restarts_of_the_broker_are_no_truncation(scenario: Scenario, broker: OwnBroker) -> None:
    """The leader epoch rises, and with it that of the position, even if there is nothing to read."""
    topic = read_twenty(scenario)
    epoch = "SELECT leader_epoch FROM tidemark.partition_offset"
    ((before,),) = scenario.sql(epoch)
    broker.restart()
    broker.led(topic)
    scenario.run()
    ((idle,),) = scenario.sql(epoch)
    assert before < idle
    scenario.topics.produce(topic, OTHERS)
    scenario.run()
    assert scenario.rows() == numbers(0, 20) + OTHERS
    scenario.check()


@pytest.mark.thorough
def test_position_of_an_earlier_version_gets_an_epoch_with_its_next_claim(scenario: Scenario, broker: OwnBroker) -> None:
    """A position without an epoch, as after a rewind, is accepted unchanged, and validated from then on."""
    topic = read_twenty(scenario)
    scenario.sql("UPDATE tidemark.partition_offset SET leader_epoch = NULL")
    scenario.run()
    broker.truncate(topic, 10)
    scenario.topics.produce(topic, OTHERS)
    with pytest.raises(LogTruncated):
        scenario.run()


@pytest.fixture
def transform(request: pytest.FixtureRequest) -> str:
    source: str = request.param
    if source == SPARK:
        request.getfixturevalue("session_here")
    return source


@pytest.mark.sampled
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("transform", "reader"),
    [(PLAIN, "compiled"), (ARROW, "python"), pytest.param(SPARK, "compiled", marks=pytest.mark.thorough)],
    ids=["function", "arrow", "spark"],
    indirect=True,
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
    rewound(scenario, "--to-offset", "20", "--topic", f"{topic}:0")
    run()
    assert scenario.rows() == numbers(0, 10) + numbers(20, 30)
    assert scenario.lost() == [(0, 10, 20, "rewind")]
