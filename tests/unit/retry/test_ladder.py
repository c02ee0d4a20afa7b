"""Where a record that was not loaded goes next, decided from numbers alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.retry import Ladder
from tidemark.spec.retry_topics import failed_topic, is_own, retry_topic
from tidemark.text.duration import parse_duration

DESIGN = Ladder("departures", tuple(map(parse_duration, ("5m", "5m", "30m", "30m", "30m", "1h"))))
DELAYS = st.lists(st.integers(1, 20_000), max_size=8).map(lambda seconds: tuple(timedelta(seconds=each) for each in seconds))
NOW = timedelta()


def test_each_delay_of_the_ladder_has_its_topic_and_equal_delays_share_one() -> None:
    """Try k goes exactly to the topic of delay k. A record may enter the same topic twice."""
    rungs = [DESIGN.after(tries, NOW) for tries in range(6)]
    topics = [f"departures.retry.{delay}" for delay in ("5m", "5m", "30m", "30m", "30m", "1h")]
    assert [(rung.number, rung.topic) for rung in rungs if rung] == [*enumerate(topics, start=1)]
    assert DESIGN.after(6, NOW) is None
    assert DESIGN.topics == ("departures.retry.5m", "departures.retry.30m", "departures.retry.1h")
    assert DESIGN.failed_topic == "departures.failed"
    assert Ladder("g", (timedelta(seconds=60), timedelta(minutes=1), timedelta(hours=24))).topics == ("g.retry.1m", "g.retry.1d")


def test_without_delays_everything_has_failed_and_goes_nowhere() -> None:
    """There is no terminal topic, and none is needed, because the record stays in its table."""
    assert not Ladder("g")
    assert (Ladder("g").rung(1), Ladder("g").topics, Ladder("g").failed_topic) == (None, (), None)


@pytest.mark.parametrize(("age", "goes"), [(54, True), (55, True), (56, False), (600, False)])
def test_no_try_is_begun_behind_the_budget(age: int, goes: bool) -> None:
    """If the next try would be due after the budget ends, the failure is final."""
    ladder = Ladder("g", (timedelta(minutes=5),) * 3, timedelta(minutes=60))
    assert (ladder.after(1, timedelta(minutes=age)) is not None) is goes


@given(DELAYS, st.integers(0, 10))
def test_a_ladder_that_was_changed_goes_on_behind_as_many_delays_as_the_record_has_had(delays: tuple[timedelta, ...], tries: int) -> None:
    """A shorter ladder has ended; a longer or different one continues with its own next delay."""
    rung = Ladder("g", delays).after(tries, timedelta(days=400))
    if tries >= len(delays):
        assert rung is None
    else:
        assert rung is not None
        assert (rung.number, rung.delay, rung.topic) == (tries + 1, delays[tries], retry_topic("g", delays[tries]))


@given(DELAYS)
def test_every_rung_has_a_topic_of_the_ladder_and_is_the_groups_own(delays: tuple[timedelta, ...]) -> None:
    ladder = Ladder("g", delays)
    rungs = [ladder.rung(number) for number in range(1, len(delays) + 1)]
    assert {rung.topic for rung in rungs if rung} == set(ladder.topics)
    assert len(set(ladder.topics)) == len(set(delays))
    assert all(is_own("g", topic) for topic in (*ladder.topics, failed_topic("g")))
    assert (ladder.rung(0), ladder.rung(len(delays) + 1)) == (None, None)


@pytest.mark.parametrize("topic", ["g", "g.retry", "gg.retry.5m", "g.failed.2", "retry.5m", "flights"])
def test_other_topics_are_not_the_groups_own(topic: str) -> None:
    assert not is_own("g", topic)
