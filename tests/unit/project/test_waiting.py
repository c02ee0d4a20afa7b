"""A run that waits for half a minute logs what it waits for."""

from __future__ import annotations

import logging
import time

import pytest

from tidemark.waiting import REPORT_AFTER_S, report, waiting


def test_long_wait_is_reported_after_half_a_minute_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """A line is logged each time the wait has doubled: at most eight for a batch of an hour."""
    caplog.set_level(logging.INFO)
    with waiting("a batch slices=4"):
        begun = time.monotonic()
        for second in range(3600):
            report(begun + second)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"waiting for=a batch slices=4 since_s={REPORT_AFTER_S:.0f}"
    assert 5 <= len(told) <= 8


def test_wait_that_is_over_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """This also applies to a wait that ended with an error. Simultaneous waits are reported separately, the oldest first."""
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match="x"), waiting("what raises"):
        raise ValueError("x")
    with waiting("the outer"):
        with waiting("what is over"):
            pass
        with waiting("the inner"):
            report(time.monotonic() + 100)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" since_s=")[0] for line in told] == ["waiting for=the outer", "waiting for=the inner"]
