"""The row of an attempt whose driver is on a cluster: which process is its driver, who finds it again, and when its task is woken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.scenario import Scenario

from tidemark import migrations
from tidemark.airflow.triggers import attempt as trigger_module
from tidemark.airflow.triggers.attempt import AttemptTrigger, Fired, WakeReason
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.driver.applications import Application
from tidemark.offsets import store
from tidemark.offsets.store import NotTheDriver, StopRequested, TaskIdentity

TASK = TaskIdentity("d", "r", "consume", -1, 1)
APPLICATION = Application("yarn", "tidemark-flights-1-ab12", "application_1_0001", ".sparkStaging", "http://rm/1")


def submitted(scenario: Scenario, name: str = APPLICATION.name) -> int:
    """An attempt whose application was submitted."""
    attempt_id = open_attempt(scenario.database_url, "flights", TASK)
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        store.note_application(cur, attempt_id, {"master": "yarn", "name": name})
        store.note_application(cur, attempt_id, {"id": APPLICATION.id, "staging": APPLICATION.staging, "url": APPLICATION.url})
    return attempt_id


def call(scenario: Scenario, function: Any, *arguments: Any, **more: Any) -> Any:
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        return function(cur, *arguments, **more)


def test_only_the_first_driver_of_the_attempts_application_may_run_it(scenario: Scenario) -> None:
    """Not that of another application, not a second one, not one whose attempt has ended, and none in another database."""
    attempt = submitted(scenario)
    with pytest.raises(NotTheDriver):
        call(scenario, store.start_driver, attempt, "tidemark-flights-1-cd34")
    call(scenario, store.start_driver, attempt, APPLICATION.name)
    late = submitted(scenario, "tidemark-flights-2-ef56")  # supersedes the first
    call(scenario, store.end_attempt, late)
    for each, name in ((attempt, APPLICATION.name), (late, "tidemark-flights-2-ef56"), (late + 1, APPLICATION.name)):
        with pytest.raises(NotTheDriver, match="This driver read and stored nothing"):
            call(scenario, store.start_driver, each, name)


def test_row_keeps_what_submitter_and_driver_note_in_any_order(scenario: Scenario) -> None:
    """The driver may start before the submission has reported the application's address."""
    attempt = submitted(scenario)
    call(scenario, store.start_driver, attempt, APPLICATION.name)
    call(scenario, store.note_application, attempt, {"url": "http://rm/2"})
    driver = launch.progress(scenario.database_url, attempt).driver
    assert driver is not None
    assert (driver.application.name, driver.application.id, driver.application.url) == (APPLICATION.name, APPLICATION.id, "http://rm/2")
    assert (driver.started, driver.alive) == (True, False)
    with session(scenario.database_url, application=f"{migrations.DRIVER}{attempt}"):
        driver = launch.progress(scenario.database_url, attempt).driver
        assert driver is not None
        assert driver.alive


def test_next_try_finds_the_attempt_of_its_own_task_and_group_while_it_runs(scenario: Scenario) -> None:
    attempt = submitted(scenario)
    call(scenario, store.ensure_group, "news")
    assert call(scenario, store.running_application, "flights", TASK) == attempt
    assert call(scenario, store.running_application, "news", TASK) is None
    assert call(scenario, store.running_application, "flights", TASK, of_rewind=3) is None
    assert call(scenario, store.running_application, "flights", TaskIdentity("d", "other", "consume", -1, 2)) is None
    call(scenario, store.end_attempt, attempt)
    assert call(scenario, store.running_application, "flights", TASK) is None


def test_driver_whose_attempt_was_ended_stops_before_its_next_batch(scenario: Scenario) -> None:
    """So a driver that nobody can kill ends, too. What it has committed stays."""
    scenario.feed([b"a", b"b", b"c"], batch={"max_records": 1})
    attempt = open_attempt(scenario.database_url, scenario.spec.group, TaskIdentity())
    call(scenario, store.note_application, attempt, {"master": "yarn", "name": "x"})
    scenario.run()  # gives the scenario an engine
    engine = scenario.engine
    assert engine is not None
    scenario.topics.produce(scenario.spec.topics[0], [b"d", b"e"])
    engine.before = lambda part: call(scenario, store.end_attempt, attempt, {"kind": "unavailable", "type": "X", "text": "stopped"})
    with pytest.raises(StopRequested):
        consume(scenario.spec, scenario.connections, attempt, lambda *_: engine)
    assert len(scenario.rows()) == 4
    assert scenario.attempt(attempt)["error"]["type"] == "X"


@pytest.fixture
def fired(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that waits for the event of a trigger on an attempt."""
    from airflow.sdk import BaseHook, Connection

    async def connection(conn_id: str) -> Connection:
        return Connection.from_uri(scenario.database_url, conn_id=conn_id)

    monkeypatch.setattr(BaseHook, "aget_connection", staticmethod(connection))
    monkeypatch.setattr(trigger_module, "ASK_EVERY_S", 0.05)

    def fire(attempt: int, look_after_s: float = 60.0, deadline: str | None = None) -> Fired:
        return asyncio.run(AttemptTrigger("tidemark_postgres", attempt, look_after_s, 0.0, deadline).fired())

    return fire


def test_trigger_wakes_the_task_at_the_attempts_end_and_at_the_deadline_and_when_the_driver_is_not_seen(
    scenario: Scenario, fired: Any
) -> None:
    """A driver with a session is left alone."""
    attempt = submitted(scenario)
    unseen = fired(attempt, look_after_s=0.2)
    assert unseen.why is WakeReason.UNSEEN
    assert unseen.unseen_s >= 0.2
    with session(scenario.database_url, application=f"{migrations.DRIVER}{attempt}"):
        assert fired(attempt, look_after_s=0.0, deadline="2024-01-01T00:00:00+00:00").why is WakeReason.TIMEOUT
    call(scenario, store.end_attempt, attempt)
    assert fired(attempt) == Fired(WakeReason.ENDED)
    assert fired(attempt + 1) == Fired(WakeReason.ENDED)


def test_trigger_of_a_task_that_a_user_ends_stops_the_attempt(scenario: Scenario, fired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is killed, too."""
    from tidemark.driver import applications

    killed: list[Application] = []
    monkeypatch.setattr(applications, "kill", killed.append)
    attempt = submitted(scenario)
    asyncio.run(AttemptTrigger("tidemark_postgres", attempt, 60.0, 0.0, None).on_kill())
    assert killed == [APPLICATION]
    error = scenario.attempt(attempt)["error"]
    assert (error["kind"], error["type"]) == ("unavailable", "DriverStopped")
