"""Runs respect pauses, priorities and the limit on how far topics run ahead of each other. Real Kafka and Postgres."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.offsets import flow, store
from tidemark.offsets.flow import Target
from tidemark.records.ranges import Slice

HOUR_MS = 3_600_000


@pytest.fixture
def two(scenario: Scenario) -> Scenario:
    """A consumer of two topics: orders with two partitions, clicks with one. Each partition has ten records, and a batch reads five."""
    scenario.orders, scenario.clicks = scenario.topics.create(2), scenario.topics.create(1)  # type: ignore[attr-defined]
    scenario.write(topics=[scenario.orders, scenario.clicks], batch={"max_records": 5}).make_sink()  # type: ignore[attr-defined]
    for topic, partition in ((scenario.orders, 0), (scenario.orders, 1), (scenario.clicks, 0)):  # type: ignore[attr-defined]
        scenario.topics.produce(topic, [str(number) for number in range(10)], partition=partition)
    return scenario


def left(scenario: Scenario) -> dict[tuple[str, int], int]:
    return {part: 10 - position for part, position in scenario.positions().items() if position < 10}


def test_what_is_paused_is_left_until_it_is_resumed(two) -> None:
    """A run ends when it has read everything else. Pauses remain in force after the run."""
    with session(two.database_url) as connection, transaction(connection) as cur:
        group_id = store.ensure_group(cur, two.spec.group)
        flow.pause(cur, group_id, [Target(two.orders, 1), Target(two.clicks)], "the sink is being moved")
    assert two.run().records == 10
    assert left(two) == {(two.orders, 1): 10, (two.clicks, 0): 10}
    assert two.run().records == 0
    with session(two.database_url) as connection, transaction(connection) as cur:
        assert flow.resume(cur, group_id, [Target(two.orders)]) == [Target(two.orders, 1)]
    assert two.run().records == 10
    with session(two.database_url) as connection, transaction(connection) as cur:
        assert flow.resume(cur, group_id, [Target()]) == [Target(two.clicks)]
    assert two.run().records == 10
    two.check()


def test_pause_is_in_force_with_the_next_batch_of_a_run(two) -> None:
    def pause(part: Slice) -> None:
        with session(two.database_url) as connection, transaction(connection) as cur:
            flow.pause(cur, store.ensure_group(cur, two.spec.group), [Target()], "stop")

    assert two.run(before=pause).records == 5
    assert len(two.engine.batches) == 1


def test_topics_of_a_higher_priority_are_drained_first(two) -> None:
    with session(two.database_url) as connection, transaction(connection) as cur:
        flow.prioritize(cur, store.ensure_group(cur, two.spec.group), two.clicks, 10)
    two.run()
    order = [part.partition.topic for batch in two.engine.batches for part in batch]
    assert order == sorted(order, key=lambda topic: topic != two.clicks)
    assert left(two) == {}


def test_no_topic_runs_ahead_of_another_by_more_than_is_allowed(scenario: Scenario) -> None:
    """Each topic has one record per hour. It may run ahead by two hours."""
    fast, slow = scenario.topics.create(1), scenario.topics.create(1)
    scenario.write(topics=[fast, slow], batch={"max_records": 4}).make_sink()
    for hour in range(12):
        scenario.topics.produce(fast, ["x"], timestamp=1_700_000_000_000 + hour * HOUR_MS)
        scenario.topics.produce(slow, ["x"], timestamp=1_700_000_000_000 + hour * HOUR_MS)
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        flow.limit_ahead(cur, store.ensure_group(cur, scenario.spec.group), timedelta(hours=2))
    assert scenario.run().records == 24
    assert scenario.engine is not None
    at = {fast: 0, slow: 0}
    for batch in scenario.engine.batches:
        before = min(at.values())
        for part in batch:
            at[part.partition.topic] = part.end
            assert part.partition.topic != max(at, key=lambda topic: at[topic]) or part.end <= before + 4
    scenario.check()
