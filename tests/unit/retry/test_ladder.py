"""The topics through which records that were not loaded are retried."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.retry import Ladder
from tidemark.spec.retry_topics import failed_topic, is_own
from tidemark.text.duration import parse_duration

DESIGN = Ladder("departures", tuple(map(parse_duration, ("5m", "5m", "30m", "30m", "30m", "1h"))))
DELAYS = st.lists(st.integers(1, 20_000), max_size=8).map(lambda seconds: tuple(timedelta(seconds=each) for each in seconds))


def test_each_delay_of_the_ladder_has_its_topic_and_equal_delays_share_one() -> None:
    """Try k goes exactly to the topic of delay k. A record may enter the same topic twice."""
    topics = [f"departures.retry.{delay}" for delay in ("5m", "5m", "30m", "30m", "30m", "1h")]
    assert [(rung.number, rung.topic) for rung in DESIGN.rungs] == [*enumerate(topics, start=1)]
    assert DESIGN.topics == ("departures.retry.5m", "departures.retry.30m", "departures.retry.1h")
    assert DESIGN.failed_topic == "departures.failed"
    assert Ladder("g", (timedelta(seconds=60), timedelta(minutes=1), timedelta(hours=24))).topics == ("g.retry.1m", "g.retry.1d")


def test_without_delays_everything_has_failed_and_goes_nowhere() -> None:
    """There is no terminal topic, and none is needed, because the record stays in its table."""
    assert not Ladder("g")
    assert (Ladder("g").first, Ladder("g").topics, Ladder("g").failed_topic) == (None, (), None)


@given(DELAYS)
def test_every_rung_has_a_topic_of_the_ladder_and_is_the_groups_own(delays: tuple[timedelta, ...]) -> None:
    ladder = Ladder("g", delays)
    assert {rung.topic for rung in ladder.rungs} == set(ladder.topics)
    assert ladder.first == (ladder.rungs[0] if delays else None)
    assert len(set(ladder.topics)) == len(set(delays))
    assert all(is_own("g", topic) for topic in (*ladder.topics, failed_topic("g")))


@pytest.mark.parametrize("topic", ["g", "g.retry", "gg.retry.5m", "g.failed.2", "retry.5m", "flights"])
def test_other_topics_are_not_the_groups_own(topic: str) -> None:
    assert not is_own("g", topic)
