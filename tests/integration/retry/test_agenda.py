"""Which groups have work between runs, and what a command-line run publishes at its end."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any

from tests.integration.retry.lab import Lab, minutes
from tests.support.shell import tidemark

from tidemark.db import session
from tidemark.retry.pending import busy, due, relay_at_end, tried
from tidemark.rewind.plan_model import ToEarliest


def state(lab: Lab) -> tuple[bool, bool]:
    """Whether the group has anything to do, and whether any of it is due."""
    with session(lab.url) as connection:
        return lab.group in busy(connection), due(connection, lab.group) is not None


def test_group_is_due_when_what_is_published_is_due_and_until_it_was_tried(lab: Lab) -> None:
    """Scenario 1: a waiting record is work, and is due once its time has come and its message is registered. A record that failed
    permanently is work until it is published."""
    assert state(lab) == (False, False)
    with session(lab.url) as connection:
        assert due(connection, "never-ran") is None
    lab.read("a", "b", "c", answers={"a": "retry", "b": "fail"})
    assert state(lab) == (True, False)
    lab.age(minutes(5))
    assert state(lab) == (True, False), "it stands in no topic yet"
    lab.age(minutes(-5))
    lab.relay()
    assert state(lab) == (True, False), "its time has not come"
    lab.age(minutes(5))
    assert state(lab) == (True, True)
    lab.say({})
    lab.drain()
    assert state(lab) == (False, False)
    assert lab.states() == {"LOADED": 1, "FAILED": 1}
    lab.check()


def test_lateness_of_what_is_due_and_of_what_was_tried_is_told(lab: Lab) -> None:
    """Lateness is the time since a record came due, by the database's clock, or until the commit of its last try, whatever the outcome.
    Records that are not due yet do not count. An undo restores it."""

    def late_by_an_hour(found: Any, longest: timedelta) -> None:
        assert found.records == 200
        assert minutes(1) <= found.median <= found.p99 < minutes(2) < minutes(61) <= longest < minutes(62)

    lab.consumer.set(retry={"delays": ["5m", "5m"]})
    lab.read(*map(str, range(201)), answers={"*": "retry"})
    assert lab.failed("tried_at, tried_late") == [(None, None)] * 201
    lab.make_due(minutes(6))
    lab.sql("UPDATE tidemark.failed_record SET due_at = due_at - interval '1 hour' WHERE record_offset = 0")
    lab.sql("UPDATE tidemark.failed_record SET due_at = clock_timestamp() + interval '5 minutes' WHERE record_offset = 200")
    with session(lab.url) as connection:
        assert tried(connection, lab.group) is None
        found = due(connection, lab.group)
    assert found is not None
    late_by_an_hour(found, found.oldest)
    lab.say({"1": "skip", "2": "fail", "3": "retry"})
    lab.drain()
    assert lab.states() == {"LOADED": 197, "SKIPPED": 1, "FAILED": 1, "WAITING": 2}
    rewound = lab.rewind(ToEarliest())
    assert lab.failed() == []
    lab.undo(rewound.rewind_id)
    with session(lab.url) as connection:
        of_tries = tried(connection, lab.group)
    assert of_tries is not None
    late_by_an_hour(of_tries, of_tries.longest)
    told = json.loads(tidemark(lab.consumer, "retries", "count", lab.spec.name, "--output", "json").stdout)
    seconds = {name: getattr(of_tries, name).total_seconds() for name in ("median", "p99", "longest")}
    assert (told["tried_24h"], told["due"]) == ({"records": 200, **seconds}, None)
    lab.make_due(minutes(7))
    lab.sql("UPDATE tidemark.failed_record SET tried_at = tried_at - interval '25 hours' WHERE record_offset > 0")
    said = tidemark(lab.consumer, "retries", "count", lab.spec.name).stdout
    assert f"tried in the last 24 h: 1; late by: median {of_tries.longest.total_seconds():,.1f} s" in said
    assert "due now: 2; the oldest for 1" in said
    lab.check()


def test_run_whose_records_cannot_be_published_says_why_and_is_done_all_the_same(lab: Lab) -> None:
    """Scenario 28: if topics are missing and must not be created, or Postgres does not answer, the message says so. The records stay in the
    outbox, and the next relay publishes them."""
    lab.consumer.set(retry={"delays": ["5m"], "topics": {"create": False}})
    connections = lab.consumer.connections
    assert relay_at_end(connections, lab.spec) == [], "there is nothing to publish"
    lab.read("a", answers={"a": "retry"})
    (missing,) = relay_at_end(connections, lab.spec)
    assert missing == f"Cannot publish to {lab.group}.retry.5m: it does not exist. See: tidemark retries topics {lab.spec.name}"
    away = dataclasses.replace(connections, database_url="postgresql://nobody@127.0.0.1:9/nowhere")
    (silent,) = relay_at_end(away, lab.spec)
    assert silent.startswith("Failed records are not published yet: Postgres cannot be used")
    assert lab.failed("retry_offset") == [(None,)]
    lab.make_topics()
    assert relay_at_end(connections, lab.spec) == []
    assert lab.failed("retry_offset") == [(0,)]


def test_tidemark_consume_publishes_what_it_has_handed_off(lab: Lab) -> None:
    """The result is printed as usual, and missing topics are created. Stderr reports what cannot be published because a topic is
    misconfigured, and the command still succeeds."""
    lab.say({"a": "retry", "b": "fail"})
    lab.produce("a", "b")
    failed = lab.topics.create(name=f"{lab.group}.failed", cleanup_policy="compact", max_message_bytes="2000000")
    done = lab.consumer.command("consume", lab.spec.name, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["partitions"]
    lab.topics.adopt([f"{lab.group}.retry.5m"])
    assert f"Cannot publish to {failed}: cleanup.policy is compact" in done.stderr
    assert "message.timestamp.type is CreateTime" in done.stderr
    assert lab.failed("retry_topic, retry_offset") == [(f"{lab.group}.retry.5m", 0), (f"{lab.group}.failed", None)]
