"""Whole retry cycles: records are handed off, published, drained, given up, edited and redriven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.retry.lab import DELAYS, Lab, lab_on, minutes
from tests.support.by_hand import WHY
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.db import session
from tidemark.retry import admin
from tidemark.retry.admin import Payload
from tidemark.retry.redrive import Destination


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, partitions=2, retry={"delays": list(DELAYS), "topics": {"partitions": 2}}) as lab:
        yield lab
        lab.check()


def test_record_climbs_the_whole_ladder_is_given_up_redriven_and_loaded(lab: Lab) -> None:
    """Scenarios 1, 2, 39, 40: six retries in 2 h 40 min through three topics, each after its delay; then the failed topic. When the service
    is back, a redrive loads the records after the first delay. The story lists all tries in order, and a second redrive finds nothing to
    do."""
    lab.say({"a": "retry", "b": "retry"})
    lab.produce("x", "a")
    lab.produce("b", partition=1)
    lab.run()
    tiers = []
    for number, delay in enumerate((5, 5, 30, 30, 30, 60), 1):
        ((topic, waits, retry_number), _) = lab.failed("retry_topic, due_at - changed_at, retry_number")
        tiers.append(topic.removeprefix(f"{lab.group}.retry."))
        assert retry_number == number
        assert abs(waits - minutes(delay)) < minutes(1)
        assert lab.climb(minutes(delay)).records == 2
        lab.check()
    assert tiers == list(DELAYS)
    assert lab.failed("state, due_at, retry_topic") == [("FAILED", None, f"{lab.group}.failed")] * 2
    assert lab.relay() == 2
    early = lab.plan_redrive().redrive.redrive_id
    assert lab.redrive().redrive.redriven == 2
    lab.say({})
    lab.climb(minutes(4))
    assert lab.states() == {"WAITING": 2}
    lab.climb(minutes(1))
    assert lab.states() == {"LOADED": 2}
    assert [[tried["type"] for tried in story] for (story,) in lab.failed("story")] == [["Retry"] * 7] * 2
    assert [tried["number"] for tried in lab.failed("story")[0][0]] == [0, 1, 2, 3, 4, 5, 6]
    assert lab.failed("error_type, redrives") == [("Redriven", 1)] * 2
    assert lab.apply_redrive(early).passed_over == {"was loaded meanwhile": 2}
    assert sorted(lab.loaded()) == ["a", "b", "x"]


def test_a_broken_record_is_edited_and_retried_at_once(lab: Lab) -> None:
    """The transform gets the edited payload without delay, while another record waits in its retry topic."""
    lab.read("bad", "a", "worse", answers={"bad": "fail", "a": "retry", "worse": "fail"})
    lab.relay()
    ((bad,), *_) = lab.failed("failed_record_id")
    with session(lab.url) as connection:
        admin.edit(connection, lab.group, [(bad, lambda was: Payload(was.key, b"good", was.headers))], **WHY)
    lab.redrive(to=Destination.NOW)
    lab.climb(minutes(0))
    assert lab.failed() == [(0, "LOADED", 6), (1, "WAITING", 1), (2, "FAILED", 6)]
    assert lab.loaded() == ["good"]
    (story,) = lab.failed("story")[2]
    told = [("Fail", "worse is broken"), ("Redriven", f"by bob: {WHY['reason']}")]
    assert [(tried["type"], tried["text"]) for tried in story] == told


def test_a_record_of_a_consumer_without_a_ladder_is_tried_once_more(lab: Lab) -> None:
    """It goes through the topic for immediate tries. One that fails again has failed permanently and is not published."""
    lab.consumer.set(retry=None)
    lab.read("bad", "worse", answers={"bad": "fail", "worse": "fail"})
    lab.say({"worse": "retry"})
    lab.redrive(to=Destination.NOW)
    lab.climb(minutes(0))
    assert lab.failed("record_offset, state, retry_topic") == [(0, "LOADED", None), (1, "FAILED", None)]
