"""When drains are started early: once for the records that are due, and again after a drain has processed those."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tidemark.airflow.triggers.due import Bell, DueTimes, pause_s

NOON = datetime(2026, 3, 24, 12, tzinfo=UTC)
A, B = ("postgres", "a"), ("postgres", "b")


def at(minute: int) -> datetime:
    return NOON + timedelta(minutes=minute)


def test_bell_rings_once_for_what_is_due_and_again_when_it_was_taken_up() -> None:
    """It does not ring again while the drains are at work, nor for records that become due meanwhile: the drains may process those, too. It
    forgets what it rang for when nothing is due: a long transaction may commit records that have been due for a while."""
    bell = Bell()
    assert bell.rings({}) == []
    assert bell.rings({A: DueTimes(None, None, 30.0)}) == []
    assert bell.rings({A: DueTimes(at(0), at(2), None)}) == ["a"]
    assert bell.rings({A: DueTimes(at(0), at(5), None)}) == []
    assert bell.rings({A: DueTimes(at(2), at(5), None)}) == [], "the last one that it rang for still waits"
    assert bell.rings({A: DueTimes(at(3), at(5), None)}) == ["a"]
    assert bell.rings({}) == []
    assert bell.rings({A: DueTimes(at(2), at(4), None)}) == ["a"]


def test_consumer_whose_drains_fail_is_left_to_the_schedule_and_holds_up_no_other() -> None:
    """The bell does not ring for it again, whatever becomes due. It still rings for another group of the same database."""
    bell = Bell()
    assert bell.rings({A: DueTimes(at(0), at(0), None)}) == ["a"]
    for minute in range(1, 60):
        assert bell.rings({A: DueTimes(at(0), at(minute), None)}) == []
    assert bell.rings({A: DueTimes(at(0), at(60), None), B: DueTimes(at(60), at(60), None)}) == ["b"]


@pytest.mark.parametrize(
    ("next_s", "pause"), [((), 15.0), ((None,), 15.0), ((300.0,), 15.0), ((300.0, 7.5, None), 7.5), ((0.01,), 1.0), ((-3.0,), 1.0)]
)
def test_trigger_asks_again_when_the_next_record_is_due_and_seldom_else(next_s: tuple[float | None, ...], pause: float) -> None:
    """Every 15 s if nothing is due soon; never more than once a second."""
    assert pause_s(DueTimes(None, None, one) for one in next_s) == pause
