"""When a slice is given up because too many of its records fail: at the limit, just beyond it, and with no judged records."""

from __future__ import annotations

import pytest

from tidemark.records.outcome import Disposition, RecordCounts, quoting, reject
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry.breaker import Breaker, BreakerTripped

PART = Slice(TopicPartition("flights", 3), 1, 0, 1000, Epoch(1))
REJECTS = [*(reject(offset, Disposition.RETRY, "Timeout: no answer") for offset in (1, 2)), reject(3, Disposition.FAIL, "x")]


def counts(loaded: int, retried: int, *, skipped: int = 0, failed: int = 0) -> RecordCounts:
    return RecordCounts(loaded, skipped, retried, failed, 1000 - loaded - skipped - retried - failed, loaded)


@pytest.mark.parametrize(
    ("breaker", "found", "trips"),
    [
        (Breaker(0.5, 100), counts(50, 50), False),
        (Breaker(0.5, 100), counts(49, 51), True),
        (Breaker(0.5, 100), counts(20, 40, skipped=29, failed=11), True),
        (Breaker(0.5, 100), counts(0, 99), False),
        (Breaker(0.5, 100), counts(0, 100), True),
        (Breaker(0, 1), counts(999, 1), True),
        (Breaker(0, 1), counts(0, 0), False),
    ],
)
def test_breaker_trips_beyond_its_limits_and_not_at_them(breaker: Breaker, found: RecordCounts, trips: bool) -> None:
    """The ratio at and just over its limit, the minimum sample, and no judged record at all."""
    if not trips:
        breaker.check(PART, found, REJECTS)
        return
    with pytest.raises(BreakerTripped, match="Most common error: Timeout: no answer") as raised:
        breaker.check(PART, found, REJECTS)
    assert not raised.value.retriable


def test_breaker_quotes_no_values_of_rows() -> None:
    """The breaker's error is logged, so its quote ends before the DETAIL, which a failed record may keep."""
    refused = reject(1, Disposition.FAIL, quoting("duplicate key.", "Key (city)=(secret) already exists."), "UniqueViolation")
    with pytest.raises(BreakerTripped) as raised:
        Breaker(0.5, 1).check(PART, counts(0, 1), [refused])
    assert raised.value.commonest == "UniqueViolation: duplicate key."
