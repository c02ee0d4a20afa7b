"""Attempts in a process without an engine, such as Airflow's task. An attempt ends if there is nothing to read; otherwise it changes
nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.consume import run
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.kafka.cluster import TopicsMissing
from tidemark.offsets.sampling import sample_or_log
from tidemark.offsets.store import TaskIdentity, dag_run_planned

TASK = TaskIdentity("consume__x", "scheduled__1", "consume", -1, 1)
EPOCHS = "SELECT topic_id, partition, next_offset, owner, owner_epoch, generation FROM tidemark.partition_offset ORDER BY 1, 2"


@pytest.fixture
def caught_up(scenario: Scenario) -> Scenario:
    """A consumer that has read everything."""
    scenario.feed(numbers(0, 5), partitions=2)
    scenario.run()
    return scenario


def without_engine(scenario: Scenario, task: TaskIdentity = TASK, **options: Any) -> bool:
    scenario.attempt_id = open_attempt(scenario.database_url, scenario.spec.group, task)
    return consume(scenario.spec, scenario.connections, scenario.attempt_id, None, **options)


def planned(scenario: Scenario) -> bool:
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        return dag_run_planned(cur, scenario.attempt_id)


def test_run_with_nothing_to_read_is_committed_and_sampled(caught_up: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does the same as any run: it claims (which fences older runs), plans nothing, releases, and samples the lag twice."""
    before = caught_up.sql(EPOCHS)
    caught_up.sql("TRUNCATE tidemark.lag_partition")
    new_windows: list[bool] = []

    def sampled(*place: Any, new_window: bool, **options: bool) -> None:
        new_windows.append(new_window)
        sample_or_log(*place, new_window=new_window, **options)

    monkeypatch.setattr(run, "sample_or_log", sampled)
    assert without_engine(caught_up)
    assert caught_up.attempt() == {"state": "COMMITTED", "error": None}
    assert caught_up.sql("SELECT planned FROM tidemark.attempt WHERE attempt_id = %s", caught_up.attempt_id) == [([],)]
    after = caught_up.sql(EPOCHS)
    assert [(row[:3], row[3], row[4] + 1) for row in before] == [(row[:3], row[3], row[4]) for row in after]
    assert [new[5] > old[5] for old, new in zip(before, after, strict=True)] == [True, True]
    assert new_windows == [True, False]
    assert caught_up.sql("SELECT count(*) FROM tidemark.lag_partition") == [(2,)]
    assert not planned(caught_up)
    caught_up.check()


def test_pattern_that_matches_nothing_yet_needs_no_engine(scenario: Scenario) -> None:
    """There is no topic, so there is nothing to read."""
    scenario.write(topic_pattern="no-such-.*").make_sink()
    assert without_engine(scenario)
    assert scenario.attempt()["state"] == "COMMITTED"


DOUBTS: dict[str, Callable[[Scenario, str], Any]] = {
    "a record": lambda scenario, topic: scenario.topics.produce(topic, [b"new"]),
    "a record of an aborted transaction": lambda scenario, topic: scenario.topics.transaction(topic, [b"gone"], commit=False),
    "a partition without a position": lambda scenario, topic: scenario.topics.grow(topic, 3),
    "a topic that was created again": lambda scenario, topic: scenario.topics.recreate(topic, 2),
    "a topic that was never read": lambda scenario, topic: scenario.set(topics=[topic, scenario.topics.create()]),
    "a position that was moved back": lambda scenario, topic: scenario.sql("UPDATE tidemark.partition_offset SET next_offset = 4"),
    "a position beyond the end": lambda scenario, topic: scenario.sql("UPDATE tidemark.partition_offset SET next_offset = 6"),
    "a continuous run": lambda scenario, topic: scenario.set(run="continuous"),
    "several members": lambda scenario, topic: scenario.set(members=2),
    "a listener": lambda scenario, topic: scenario.set(listeners=["theirs:Listener"]),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_run_that_may_have_something_to_do_is_left_to_a_driver(caught_up: Scenario, doubt: str) -> None:
    """Nothing is claimed, planned or recorded, so the driver starts from an unchanged state."""
    DOUBTS[doubt](caught_up, caught_up.spec.topics[0])
    before = caught_up.sql(EPOCHS)
    assert not without_engine(caught_up)
    assert caught_up.attempt() == {"state": "RUNNING", "error": None}
    assert caught_up.sql("SELECT planned FROM tidemark.attempt WHERE attempt_id = %s", caught_up.attempt_id) == [(None,)]
    assert caught_up.sql(EPOCHS) == before
    assert caught_up.lost() == []


def test_drain_is_left_to_a_driver(caught_up: Scenario) -> None:
    """Airflow starts a drain only if records are due."""
    assert not without_engine(caught_up, drain=True)
    assert caught_up.attempt()["state"] == "RUNNING"


def test_rewind_between_the_look_and_the_claims_is_left_to_a_driver(caught_up: Scenario) -> None:
    """The positions were at the ends when the run looked, but not when it claims them. The attempt continues in a driver."""
    move = "UPDATE tidemark.partition_offset SET next_offset = 3 WHERE partition = 1"
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with contextlib.closing(psycopg2.connect(caught_up.database_url)) as rewind, ThreadPoolExecutor(1) as pool:
        with rewind, rewind.cursor() as cur:
            cur.execute(move)
            looked = pool.submit(without_engine, caught_up)
            until(lambda: caught_up.sql(waits))
        assert not looked.result(60)
    assert caught_up.attempt() == {"state": "RUNNING", "error": None}
    assert caught_up.sql("SELECT count(*) FROM tidemark.partition_offset WHERE owner IS NOT NULL") == [(0,)]
    assert {row[2] for row in caught_up.sql(EPOCHS)} == {5, 3}


def test_try_after_one_that_has_committed_is_not_taken_for_a_run_that_read_nothing(caught_up: Scenario) -> None:
    """It has nothing to read, but what the first try, or another task of the DAG run, committed must still be validated and published."""
    caught_up.topics.produce(caught_up.spec.topics[0], numbers(5, 8))
    caught_up.run(task=TASK)
    for run_id, task_id, expected in (("1", "consume", True), ("1", "consume_again", True), ("2", "consume", False)):
        assert without_engine(caught_up, TaskIdentity("consume__x", f"scheduled__{run_id}", task_id, -1, 1))
        assert caught_up.attempt()["state"] == "COMMITTED"
        assert planned(caught_up) is expected
    caught_up.check()


def test_look_that_fails_fails_the_attempt(caught_up: Scenario) -> None:
    """The error is the one that the driver would get. It names all missing topics, and nothing is claimed."""
    caught_up.set(topics=[*caught_up.spec.topics, "no-such-a", "no-such-b"])
    before = caught_up.sql(EPOCHS)
    with pytest.raises(TopicsMissing) as missing:
        without_engine(caught_up)
    assert missing.value.topics == ["no-such-a", "no-such-b"]
    assert caught_up.sql(EPOCHS) == before
    error = caught_up.attempt()["error"]
    assert (error["kind"], error["type"]) == ("refused", "TopicsMissing")
