"""Attempts whose driver was killed, while no process was watching it or by the one that was."""

from __future__ import annotations

from tests.support.scenario import Scenario

from tidemark.db import DatabaseUrl, keep_visible, session, transaction
from tidemark.driver import launch
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity


def test_attempts_of_long_ago_without_a_driver_are_ended(scenario: Scenario) -> None:
    """Attempts whose driver is alive, that have just begun, or that have ended stay unchanged."""
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        group_id = store.ensure_group(cur, "departures")
        gone, alive, young, done = (store.new_attempt(cur, group_id, TaskIdentity()) for _ in range(4))
        store.end_attempt(cur, done)
        cur.execute("UPDATE tidemark.attempt SET started_at = started_at - interval '25 hours' WHERE attempt_id <> %s", (young,))
    name = f"tidemark driver {alive}"
    with session(scenario.database_url, application=name) as driver, keep_visible(driver), session(scenario.database_url) as other:
        for ended in ([gone], []):
            with transaction(other) as cur:
                assert store.end_abandoned(cur) == ended
    states = dict(scenario.sql("SELECT attempt_id, state FROM tidemark.attempt"))
    assert states == {gone: "FAILED", alive: "RUNNING", young: "RUNNING", done: "COMMITTED"}
    assert scenario.sql("SELECT error ->> 'type' FROM tidemark.attempt WHERE state = 'FAILED'") == [("DriverGone",)]


def test_error_that_quotes_text_which_postgres_cannot_store_ends_its_attempt(database_url: DatabaseUrl) -> None:
    """NUL and half a surrogate pair are escaped."""
    with session(database_url) as connection, transaction(connection) as cur:
        attempt = store.new_attempt(cur, store.ensure_group(cur, "departures"), TaskIdentity())
    launch.abandon(database_url, attempt, ValueError("no date: 'a\0b\ud800'"))
    with session(database_url) as connection, transaction(connection) as cur:
        row = store.read_attempt(cur, attempt)
    assert row is not None
    assert (row["state"], row["error"]["text"]) == ("FAILED", "The driver was killed: no date: 'a\\0b\\ud800'")
