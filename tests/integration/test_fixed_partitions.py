"""Partitions that a consumer's file fixes, or that a single run names (Kafka's ``assign``). Real Kafka and Postgres."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario

from tidemark.db import session
from tidemark.errors import BadInput
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Slice
from tidemark.rewind.model import ToEarliest
from tidemark.rewind.plan import plan
from tidemark.spec import SpecInvalid
from tidemark.spec.scope import Scope

PARTITIONS, RECORDS = 4, 10


@pytest.fixture
def topic(scenario: Scenario) -> str:
    """The topic of a consumer, with four partitions of ten records."""
    topic = scenario.topics.create(PARTITIONS)
    for partition in range(PARTITIONS):
        scenario.topics.produce(topic, numbers(0, RECORDS), partition=partition)
    scenario.write(topics=topic).make_sink()
    return topic


def read(scenario: Scenario) -> dict[int, int]:
    return {partition: position for (_, partition), position in scenario.positions().items()}


def test_file_that_fixes_partitions_has_only_those_read_shown_and_rewound(scenario: Scenario, topic: str) -> None:
    """The other partitions have no position and no lag, and a rewind of the consumer does not include them."""
    scenario.set(partitions={topic: "0,2-3"})
    assert scenario.run().records == 3 * RECORDS
    assert read(scenario) == {0: 10, 2: 10, 3: 10}
    shown = json.loads(scenario.command("offsets", scenario.name, "--output", "json").stdout)
    assert [(row["partition"], row["lag_records"]) for row in shown["partitions"]] == [(0, 0), (2, 0), (3, 0)]
    assert scenario.command("audit", scenario.name).returncode == 0
    scenario.set(partitions={topic: 2})
    shown = json.loads(scenario.command("offsets", scenario.name, "--output", "json").stdout)
    assert [row["partition"] for row in shown["partitions"]] == [2]
    with session(scenario.database_url) as connection:
        kafka = Cluster(scenario.connections.kafka)
        planned = plan(connection, lambda spec: kafka, [scenario.spec], Scope(), ToEarliest(), reason="they are to be read again", by="me")
    assert [move.partition.partition for group in planned.groups for move in group.partitions] == [2]
    scenario.check()


def test_partitions_that_the_topic_does_not_have_are_refused_where_they_are_written(scenario: Scenario, topic: str) -> None:
    """The check and a run refuse them. Nothing is claimed."""
    scenario.set(partitions={topic: "0,3-5"})
    with pytest.raises(SpecInvalid) as refused:
        scenario.run()
    (problem,) = refused.value.problems
    assert (problem.message, problem.fix) == (f"topic {topic} does not have 4-5", "it has 0-3")
    assert problem.text[problem.column - 1 :][: problem.length] == "0,3-5"
    assert scenario.positions() == {}
    assert scenario.attempt()["error"]["kind"] == "refused"
    checked = scenario.command("consumers", "check", scenario.name)
    assert checked.returncode == 1
    assert f"topic {topic} does not have 4-5" in checked.stdout + checked.stderr


def test_run_reads_the_partitions_that_it_was_given_and_ends(scenario: Scenario, topic: str) -> None:
    """The next run without the option reads the rest."""
    assert scenario.run(partitions=[f"{topic}:1", f"{topic}:3"]).records == 2 * RECORDS
    assert read(scenario) == {1: 10, 3: 10}
    assert scenario.run(partitions=[f"{topic}:1"]).records == 0
    assert scenario.run().records == 2 * RECORDS
    scenario.check()


@pytest.mark.parametrize(
    ("keys", "words", "told"),
    [
        ({}, ["{}:3-4"], "{}:4 is not among the group's partitions. The group reads {}:0-3."),
        ({"partitions": "0-1"}, ["{}:1-2"], "{}:2 is not among the group's partitions. The group reads {}:0-1."),
        ({}, ["{}s:0"], "does not read topic {}s. Did you mean {}?"),
        ({}, ["{}:2-1"], "Write 1-2 for 2-1."),
        ({"members": 2}, ["{}:0"], "has 2 members. Run it without --partition"),
        ({"topics": None, "topic_pattern": "x.*"}, ["{}:0"], "reads topics by a pattern. Run it without --partition"),
    ],
)
def test_option_that_names_what_the_consumer_does_not_read_is_refused(
    scenario: Scenario, topic: str, keys: dict[str, object], words: Sequence[str], told: str
) -> None:
    if "partitions" in keys:
        keys = {"partitions": {topic: keys["partitions"]}}
    scenario.set(**keys)
    with pytest.raises(BadInput) as refused:
        scenario.run(partitions=[word.format(topic) for word in words])
    assert str(refused.value).startswith("--partition: ")
    assert told.format(topic, topic) in str(refused.value)
    assert scenario.positions() == {}


@pytest.mark.parametrize("overlap", [False, True], ids=["of other partitions", "of one of its partitions"])
def test_run_is_fenced_by_a_newer_one_of_its_partitions_and_by_no_other(scenario: Scenario, topic: str, overlap: bool) -> None:
    """Each run claims what it reads, in a separate generation. Both may run at the same time."""
    entered, gate = threading.Event(), threading.Event()

    def wait(_: Slice) -> None:
        entered.set()
        assert gate.wait(60)

    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(scenario.run, before=wait, partitions=[f"{topic}:0-1"])
        assert entered.wait(60)
        newer = scenario.run(partitions=[f"{topic}:1-2" if overlap else f"{topic}:2-3"])
        assert newer.records == 2 * RECORDS
        gate.set()
        if overlap:
            with pytest.raises(OffsetFenced):
                older.result(180)
        else:
            assert older.result(180).records == 2 * RECORDS
    assert {partition for partition, position in read(scenario).items() if position == RECORDS} >= {1, 2}
    scenario.check()


def test_partition_that_is_named_later_starts_where_the_offset_reset_says(scenario: Scenario, topic: str) -> None:
    """Unlike a partition that was added to the topic, it is not new; it just was not read so far."""
    scenario.set(offset_reset="latest")
    assert [scenario.run(partitions=[f"{topic}:{partition}"]).records for partition in (0, 1)] == [0, 0]
    assert read(scenario) == {0: 10, 1: 10}
    assert scenario.run().records == 2 * RECORDS


def test_command_hands_the_option_on_to_the_driver(scenario: Scenario, topic: str) -> None:
    """The result lists the partitions that it read."""
    done = scenario.command("consume", scenario.name, "--partition", f"{topic}:0,2", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert [part["partition"] for part in json.loads(done.stdout)["partitions"]] == [0, 2]
    refused = scenario.command("consume", scenario.name, "--partition", f"{topic}:7")
    assert refused.returncode == 1
    assert f"--partition: {topic}:7 is not among the group's partitions" in refused.stderr
