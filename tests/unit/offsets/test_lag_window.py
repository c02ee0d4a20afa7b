"""What a sample shows compared with earlier ones: counters, trend, rates, and the risk of loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.offsets.samples import STEPS, step_for
from tidemark.offsets.window import WINDOW, Observation, Sample, Trend, advance, catch_up, grows

START = datetime(2026, 1, 2, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def seen(minute: float, position: int | None, end: int, **more: object) -> Observation:
    return Observation(at=START + minute * MINUTE, position=position, log_start=0, log_end=end, **more)  # type: ignore[arg-type]


def after(*observed: Observation) -> Sample:
    sample = None
    for one in observed:
        sample = advance(sample, one)
    assert sample is not None
    return sample


def test_lag_is_unknown_and_not_zero_without_a_valid_position() -> None:
    """It counts from the start of the log where retention has passed the position."""
    assert seen(0, None, 50).lag is None
    assert seen(0, 40, 50, truncated=True).lag is None
    assert seen(0, 60, 50).lag is None
    assert seen(0, 50, 50).lag == 0
    assert Observation(START, position=10, log_start=30, log_end=50).lag == 20


@pytest.mark.parametrize(
    ("positions_and_ends", "trend"),
    [
        ([(10, 50)], None),
        ([(50, 50)], Trend.IDLE),
        ([(50, 50), (50, 50)], Trend.IDLE),
        ([(50, 50), (60, 60)], Trend.KEEPING_UP),
        ([(40, 50), (55, 60)], Trend.KEEPING_UP),
        ([(0, 500), (100, 510)], Trend.CATCHING_UP),
        ([(0, 500), (100, 610)], Trend.FALLING_BEHIND),
        ([(0, 500), (0, 500)], Trend.WAITING),
        ([(0, 10), (10, 10), (10, 500)], Trend.WAITING),
        ([(0, 500), (100, 610), (100, 700)], Trend.FALLING_BEHIND),
        ([(0, 500), (100, 610), (700, 700)], Trend.KEEPING_UP),
    ],
)
def test_trend_compares_what_waits_with_what_was_consumed_since_the_base(positions_and_ends: Any, trend: Trend | None) -> None:
    """What is produced between two runs is no slow reading: the last trend of the reading stays until something is read again."""
    assert after(*(seen(minute, position, end) for minute, (position, end) in enumerate(positions_and_ends))).trend is trend


def test_a_rewind_is_no_consumption_and_begins_a_new_window() -> None:
    before = after(seen(0, 0, 100), seen(1, 90, 100))
    rewound = advance(before, seen(2, 20, 110, applied_no=1), moved=-80)
    assert (rewound.consumed, rewound.produced) == (100, 10)  # 90 to 100 was read before the rewind to 20
    assert rewound.base == rewound.mid == rewound.mark
    assert rewound.trend is None


def test_a_run_that_begins_opens_a_new_window() -> None:
    """The hour before the run does not count as slow reading."""
    idle = after(seen(0, 100, 100), seen(60, 100, 1000))
    assert idle.trend is Trend.WAITING
    begun = advance(idle, seen(60.5, 100, 1000), new_window=True)
    assert advance(begun, seen(61, 400, 1001)).trend is Trend.CATCHING_UP


def test_first_unread_record_is_lost_if_it_waits_longer_than_retention_leaves_it() -> None:
    """It is not lost if the reading advances in event time at least as fast as the clock, as after a rewind."""
    day = timedelta(days=1)
    first = seen(0, 0, 500, next_at=START - day, retention=4 * day)
    assert after(first).losing_from == START + day
    assert after(first, seen(1, 0, 500, next_at=START - day, retention=4 * day)).losing_from == START + day
    assert after(first, seen(1, 90, 500, next_at=START - day + MINUTE, retention=4 * day)).losing_from is None
    assert after(replace(first, retention=None)).losing_from is None


def test_time_to_catch_up_needs_more_out_than_in() -> None:
    assert catch_up(100, 5.0, 15.0) == timedelta(seconds=10)
    assert catch_up(100, 15.0, 15.0) is None
    assert grows(100, 15.0, 15.0)
    assert not grows(100, 15.0, 0.0)  # nothing is read: that is not slow reading
    assert not grows(100, None, None)
    assert catch_up(0, None, None) == timedelta()


steps = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 50), st.integers(0, 80), st.integers(-60, 0)), min_size=1, max_size=40)


def story(moves: Iterable[tuple[int, int, int, int]]) -> tuple[list[Sample], int, int]:
    """Samples of a partition with records produced, read and rewound, and the numbers of records really produced and consumed."""
    sample = advance(None, seen(0, 0, 0))
    samples, at_s, position, end, total_read, rewinds = [sample], 0, 0, 0, 0, 0
    for seconds, produced, wanted, back in moves:
        at_s, end = at_s + seconds, end + produced
        read = min(wanted, end - position)
        moved = max(-position - read, back) if back else 0
        rewinds += moved < 0
        position, total_read = position + read + moved, total_read + read
        sample = advance(sample, seen(at_s / 60, position, end, applied_no=rewinds), moved)
        samples.append(sample)
    return samples, end, total_read


@given(steps)
def test_counters_are_what_was_produced_and_read_whatever_was_rewound(moves: list[tuple[int, int, int, int]]) -> None:
    """The base of a sample is never older than two windows and the pauses between samples. A trend is stated exactly where the lag and an
    earlier sample are known."""
    samples, produced, consumed = story(moves)
    assert (samples[-1].produced, samples[-1].consumed) == (produced, consumed)
    for earlier, later in itertools.pairwise(samples):
        assert later.produced >= earlier.produced
        assert later.consumed >= earlier.consumed
    longest = timedelta(seconds=max(seconds for seconds, *_ in moves))
    for sample in samples:
        assert sample.base.at <= sample.mid.at <= sample.observation.at
        assert sample.observation.at - sample.base.at < 2 * WINDOW + 2 * longest
        assert (sample.trend is None) == (bool(sample.observation.lag) and sample.base.at == sample.observation.at)
        assert (sample.trend in (Trend.IDLE, Trend.KEEPING_UP)) or sample.observation.lag


@given(st.timedeltas(timedelta(), timedelta(days=90)))
def test_chart_uses_the_finest_step_that_covers_its_period(period: timedelta) -> None:
    step = step_for(period)
    assert period <= STEPS[step] or step == max(STEPS)
    assert all(period > STEPS[finer] for finer in STEPS if finer < step)
