"""Whole retry cycles with the real relay: records are handed off, published, drained, given up, edited and redriven."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.lab import DELAYS, Lab, lab_on, minutes
from tests.support.kafka_topics import Topics
from tests.support.ledger import backend_of, in_thread
from tests.support.scenario import Scenario

from tidemark.db import Connection, connect, session
from tidemark.errors import DatabaseUnavailable
from tidemark.kafka.producer import ANSWER_S, Publishers
from tidemark.retry import admin, redrive
from tidemark.retry import relay as relay_module
from tidemark.retry.admin import Payload
from tidemark.retry.filter import Filter
from tidemark.retry.redrive import Destination, Preview
from tidemark.retry.relay import Relayed, relay
from tidemark.retry.topics import ensure_topics
from tidemark.rewind.apply import GRACE_MS
from tidemark.rewind.model import ToEarliest

WHY = {"reason": "the service is back again", "by": "ann@host"}


class Round:
    """A consumer whose retry topics the topic check has created."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.publishers = Publishers(lab.consumer.connections.kafka)
        found = ensure_topics(lab.cluster, lab.spec, create=True)
        lab.topics.adopt(one.topic.name for one in found)

    def relay(self, connection: Connection | None = None) -> Relayed:
        with contextlib.ExitStack() as stack:
            used = connection or stack.enter_context(session(self.lab.url))
            return relay(used, self.lab.consumer.connections.kafka, self.lab.spec, publishers=self.publishers)

    def climb(self, by: float) -> None:
        """Publishes, lets this many minutes pass, drains, and checks that every record is accounted for."""
        self.relay()
        self.lab.age(minutes(by))
        self.lab.drain()
        self.lab.check()

    def redrive(self, destination: Destination = Destination.LADDER, wanted: Filter = Filter()) -> Preview:  # noqa: B008 - frozen
        with session(self.lab.url) as connection:
            made = redrive.plan(connection, self.lab.spec, wanted, destination=destination, **WHY)
            return redrive.apply(connection, self.lab.cluster, lambda _: self.lab.spec, made.redrive.redrive_id, by="bob@host")

    def numbers(self) -> list[int]:
        return [number for (number,) in self.lab.failed("failed_record_id")]


@pytest.fixture
def round_(scenario: Scenario, topics: Topics) -> Iterator[Round]:
    with lab_on(scenario, topics, partitions=2, retry={"delays": list(DELAYS), "topics": {"partitions": 2}}) as lab:
        yield Round(lab)


def test_what_the_ladder_gave_up_is_sent_round_and_loaded(round_: Round) -> None:
    """Scenarios 1, 39, 40: six retries through three topics, then the failed topic. When the service is back, a redrive loads the records
    after the first delay. The story lists all tries in order, and a second redrive finds nothing to do."""
    lab = round_.lab
    lab.say({"a": "retry", "b": "retry"})
    lab.produce("x", "a")
    lab.produce("b", partition=1)
    lab.run()
    for delay in (5, 5, 30, 30, 30, 60):
        round_.climb(delay)
    assert lab.states() == {"FAILED": 2}
    assert round_.relay().published == {f"{lab.group}.failed": 2}
    early = redrive_plan(round_)
    assert round_.redrive().redrive.redriven == 2
    lab.say({})
    round_.climb(4.9)
    assert lab.states() == {"WAITING": 2}
    round_.climb(0.2)
    assert lab.states() == {"LOADED": 2}
    assert sorted(lab.loaded()) == ["a", "b", "x"]
    types = [[tried["type"] for tried in story] for (story,) in lab.failed("story")]
    assert types == [["Retry"] * 7] * 2
    assert lab.failed("error_type, redrives") == [("Redriven", 1)] * 2
    with session(lab.url) as connection:
        late = redrive.apply(connection, lab.cluster, lambda _: lab.spec, early, by="bob@host")
    assert late.passed_over == {"was loaded meanwhile": 2}
    assert sorted(lab.loaded()) == ["a", "b", "x"]


def redrive_plan(round_: Round) -> int:
    with session(round_.lab.url) as connection:
        return redrive.plan(connection, round_.lab.spec, Filter(), **WHY).redrive.redrive_id


def test_a_broken_record_is_edited_and_retried_at_once(round_: Round) -> None:
    """The transform gets the edited payload without delay, while another record waits in its retry topic."""
    lab = round_.lab
    lab.say({"bad": "fail", "a": "retry", "worse": "fail"})
    lab.produce("bad", "a", "worse")
    lab.run()
    round_.relay()
    bad = round_.numbers()[0]
    with session(lab.url) as connection:
        admin.edit(connection, lab.group, bad, lambda was: Payload(was.key, b"good", was.headers), **WHY)
    round_.redrive(Destination.NOW)
    round_.climb(0)
    assert lab.failed() == [(0, "LOADED", 6), (1, "WAITING", 1), (2, "FAILED", 6)]
    assert lab.loaded() == ["good"]
    ((story,),) = [row for row in lab.failed("story") if len(row[0]) == 2]
    assert [(tried["type"], tried["text"]) for tried in story] == [
        ("Fail", "worse is broken"),
        ("Redriven", "by bob@host: the service is back again"),
    ]


def test_a_record_of_a_consumer_without_a_ladder_is_edited_too(scenario: Scenario, topics: Topics) -> None:
    """Each record gets one try through the topic for immediate tries. One that fails again has failed permanently and is not published."""
    with lab_on(scenario, topics, retry=None) as lab:
        lab.say({"bad": "fail", "worse": "fail"})
        lab.produce("bad", "worse")
        lab.run()
        topics.adopt(one.topic.name for one in ensure_topics(lab.cluster, lab.spec, create=True, now=True))
        round_ = Round(lab)
        lab.say({"worse": "retry"})
        round_.redrive(Destination.NOW)
        round_.climb(0)
        assert lab.failed("record_offset, state, hop_topic") == [(0, "LOADED", None), (1, "FAILED", None)]


def test_what_was_discarded_in_a_topic_is_read_past(round_: Round) -> None:
    """Scenario 33: the first record and one in the middle are discarded. The others are tried in order, and everything adds up."""
    lab = round_.lab
    lab.say({"*": "retry"})
    lab.produce("a", "b", "c", "d")
    lab.run()
    round_.relay()
    first, _, third, _ = round_.numbers()
    with session(lab.url) as connection:
        assert admin.discard(connection, lab.group, Filter(numbers=(first, third)), **WHY) == 2
    lab.say({})
    round_.climb(5)
    assert lab.loaded() == ["b", "d"]
    assert lab.states() == {"DISCARDED": 2, "LOADED": 2}


def test_what_dying_relays_published_twice_is_tried_once(round_: Round) -> None:
    """Scenario 21: three relays die after the broker has all messages, and before they can register them."""
    lab = round_.lab
    lab.say({"*": "retry"})
    lab.produce("a", "b")
    lab.produce("c", partition=1)
    lab.run()

    class Dying(PostgresCursor):
        def execute(self, query: Any, *args: Any) -> None:
            if "SET hop_topic_id = stored" in str(query):
                lab.sql("SELECT pg_terminate_backend(%(pid)s, 5000)", pid=backend_of(self.connection))
            super().execute(query, *args)

    for _ in range(3):
        with contextlib.closing(connect(lab.url)) as connection:
            connection.cursor_factory = Dying
            with pytest.raises(DatabaseUnavailable):
                round_.relay(connection)
    lab.say({"a": "three"})
    round_.climb(5)
    assert sorted(lab.loaded()) == ["a", "a", "a", "b", "c"]
    assert lab.states() == {"LOADED": 3}


def test_a_relay_that_stands_still_holds_up_no_rewind(round_: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has published and holds its records' locks. Its session is terminated before the rewind gives up waiting, so it can register
    nothing. Its messages belong to no record; the records are read again and loaded once."""
    assert ANSWER_S * 1000 < relay_module.IDLE_MS < GRACE_MS
    monkeypatch.setattr(relay_module, "IDLE_MS", 1_500)
    lab = round_.lab
    lab.say({"*": "retry"})
    lab.produce("a", "b")
    lab.run()
    stands, go_on = threading.Event(), threading.Event()

    class Hanging(PostgresCursor):
        def execute(self, query: Any, *args: Any) -> None:
            if "SET hop_topic_id = stored" in str(query):
                stands.set()
                go_on.wait(60)
            super().execute(query, *args)

    def hang() -> None:
        with contextlib.closing(connect(lab.url)) as connection:
            connection.cursor_factory = Hanging
            with pytest.raises(DatabaseUnavailable):
                round_.relay(connection)

    with in_thread(hang) as hanging:
        assert stands.wait(30)
        lab.rewind(ToEarliest())
        assert lab.failed() == []
        go_on.set()
        hanging.result(180)
    lab.run()
    lab.say({})
    round_.climb(5)
    assert sorted(lab.loaded()) == ["a", "b"]
    assert [row[1:4] for row in lab.drains()] == [(2, 4, 2)]
