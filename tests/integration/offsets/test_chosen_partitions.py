"""What a run reads, and in which order: partitions that the consumer's file fixes or the run names (Kafka's ``assign``), pauses,
priorities, and the limit on how far topics run ahead of each other."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.db import Cursor, session, transaction
from tidemark.errors import BadInput
from tidemark.kafka import cluster
from tidemark.offsets import flow, store
from tidemark.offsets.flow import FlowTarget
from tidemark.offsets.store import ClaimRefused, OffsetFenced
from tidemark.records.ranges import Slice
from tidemark.spec import SpecInvalid

PARTITIONS, RECORDS = 4, 10


@pytest.fixture
def topic(scenario: Scenario) -> str:
    """The topic of a consumer, with four partitions of ten records."""
    return scenario.feed(numbers(0, RECORDS), partitions=PARTITIONS)


def read(scenario: Scenario) -> dict[int, int]:
    return {partition: position for (_, partition), position in scenario.positions().items()}


def test_file_that_fixes_partitions_has_only_those_read_shown_and_rewound(scenario: Scenario, topic: str) -> None:
    """The other partitions have no position and no lag, and a rewind of the consumer does not include them."""
    scenario.set(partitions={topic: "0,2-3"})
    assert scenario.run().records == 3 * RECORDS
    assert read(scenario) == {0: 10, 2: 10, 3: 10}
    shown = json.loads(tidemark(scenario, "offsets", scenario.name, "--output", "json").stdout)
    assert [(row["partition"], row["lag_records"]) for row in shown["partitions"]] == [(0, 0), (2, 0), (3, 0)]
    assert tidemark(scenario, "audit", scenario.name).returncode == 0
    scenario.set(partitions={topic: 2})
    shown = json.loads(tidemark(scenario, "offsets", scenario.name, "--output", "json").stdout)
    assert [row["partition"] for row in shown["partitions"]] == [2]
    planned = tidemark(scenario, "rewind", "plan", scenario.name, "--to-earliest", "--reason", "read them again", "--output", "json")
    assert [move["partition"] for group in json.loads(planned.stdout)["groups"] for move in group["partitions"]] == [2]
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
    checked = tidemark(scenario, "consumers", "check", scenario.name)
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
        older_attempt = scenario.attempt_id
        newer = scenario.run(partitions=[f"{topic}:1-2" if overlap else f"{topic}:2-3"])
        assert newer.records == 2 * RECORDS
        gate.set()
        if overlap:
            with pytest.raises((OffsetFenced, ClaimRefused)) as fenced:  # whether the commit or the claim after an interrupt notices first
                older.result(180)
            before = fenced.value.held if isinstance(fenced.value, OffsetFenced) else fenced.value.generation
            assert fenced.value.current > before
            assert scenario.attempt(older_attempt)["error"]["kind"] == "fenced"
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


@pytest.mark.thorough
def test_command_hands_the_option_on_to_the_driver(scenario: Scenario, topic: str) -> None:
    """The result lists the partitions that it read."""
    done = scenario.command("consume", scenario.name, "--partition", f"{topic}:0,2", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert [part["partition"] for part in json.loads(done.stdout)["partitions"]] == [0, 2]


HOUR_MS = 3_600_000


@pytest.fixture
def two(scenario: Scenario) -> Scenario:
    """A consumer of two topics: orders with two partitions, clicks with one. Each partition has ten records, and a batch reads five."""
    orders, clicks = scenario.topics.create(2), scenario.topics.create(1)
    scenario.write(topics=[orders, clicks], batch={"max_records": 5}).make_sink()
    for topic, partition in ((orders, 0), (orders, 1), (clicks, 0)):
        scenario.topics.produce(topic, [str(number) for number in range(10)], partition=partition)
    return scenario


@contextlib.contextmanager
def flow_of(scenario: Scenario) -> Iterator[tuple[Cursor, int]]:
    """A transaction that changes the flow of the group with the yielded number."""
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        yield cur, store.ensure_group(cur, scenario.spec.group)


def left(scenario: Scenario) -> dict[tuple[str, int], int]:
    return {part: 10 - position for part, position in scenario.positions().items() if position < 10}


def test_what_is_paused_is_left_until_it_is_resumed(two: Scenario) -> None:
    """A run ends when it has read everything else. Pauses remain in force after the run."""
    orders, clicks = two.spec.topics
    with flow_of(two) as (cur, group_id):
        flow.pause(cur, group_id, [FlowTarget(orders, 1), FlowTarget(clicks)], "the sink is being moved")
    assert two.run().records == 10
    assert left(two) == {(orders, 1): 10, (clicks, 0): 10}
    assert two.run().records == 0
    for resumed, target in ((FlowTarget(orders, 1), FlowTarget(orders)), (FlowTarget(clicks), FlowTarget())):
        with flow_of(two) as (cur, group_id):
            assert flow.resume(cur, group_id, [target]) == [resumed]
        assert two.run().records == 10
    two.check()


def test_pause_is_in_force_with_the_next_batch_of_a_run(two: Scenario) -> None:
    def pause(part: Slice) -> None:
        with flow_of(two) as (cur, group_id):
            flow.pause(cur, group_id, [FlowTarget()], "stop")

    assert two.run(before=pause).records == 5
    assert two.engine is not None
    assert len(two.engine.batches) == 1


def test_topics_of_a_higher_priority_are_drained_first(two: Scenario) -> None:
    _, clicks = two.spec.topics
    with flow_of(two) as (cur, group_id):
        flow.prioritize(cur, group_id, clicks, 10)
    two.run()
    assert two.engine is not None
    order = [part.partition.topic for batch in two.engine.batches for part in batch]
    assert order == sorted(order, key=lambda topic: topic != clicks)
    assert left(two) == {}


def test_no_topic_runs_ahead_of_another_by_more_than_is_allowed(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic has one record per hour. It may run ahead by two hours."""
    monkeypatch.setattr(cluster, "FIRST_RECORDS_S", 20.0)
    fast, slow = scenario.topics.create(1), scenario.topics.create(1)
    scenario.write(topics=[fast, slow], batch={"max_records": 4}).make_sink()
    for hour in range(12):
        scenario.topics.produce(fast, ["x"], timestamp=1_700_000_000_000 + hour * HOUR_MS)
        scenario.topics.produce(slow, ["x"], timestamp=1_700_000_000_000 + hour * HOUR_MS)
    with flow_of(scenario) as (cur, group_id):
        flow.limit_ahead(cur, group_id, timedelta(hours=2))
    assert scenario.run().records == 24
    assert scenario.engine is not None
    at = {fast: 0, slow: 0}
    for batch in scenario.engine.batches:
        before = min(at.values())
        for part in batch:
            at[part.partition.topic] = part.end
            assert part.end <= before + 2
    scenario.check()
