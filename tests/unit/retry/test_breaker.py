"""When a slice is given up because too many of its records fail: at the limit, just beyond it, and with no judged records."""

from __future__ import annotations

import pytest

from tidemark.records.outcome import Disposition, RecordCounts, TransformOutput, quoting, reject
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry.breaker import Breaker, BreakerTripped
from tidemark.sink.table import Column, Layout
from tidemark.sink.tally import Tally

PART = Slice(TopicPartition("flights", 3), 1, 0, 1000, Epoch(1))
REJECTS = [*(reject(offset, Disposition.RETRY, "Timeout: no answer") for offset in (1, 2)), reject(3, Disposition.FAIL, "x")]


def counts(loaded: int, retried: int, *, skipped: int = 0, failed: int = 0) -> RecordCounts:
    return RecordCounts(loaded, skipped, retried, failed, 1000 - loaded - skipped - retried - failed, loaded)


@pytest.mark.parametrize(
    ("breaker", "found", "in_a_row", "trips"),
    [
        (Breaker(0.5, None, 100), counts(50, 50), 50, False),
        (Breaker(0.5, None, 100), counts(49, 51), 51, True),
        (Breaker(0.5, None, 100), counts(20, 40, skipped=29, failed=11), 51, True),
        (Breaker(0.5, None, 100), counts(0, 99), 99, False),
        (Breaker(0.5, None, 100), counts(0, 100), 100, True),
        (Breaker(0, None, 1), counts(999, 1), 1, True),
        (Breaker(0, None, 1), counts(0, 0), 0, False),
        (Breaker(None, 10, 100), counts(10, 10), 10, False),
        (Breaker(None, 10, 100), counts(0, 11), 11, True),
        (Breaker(0.9, 3, 100), counts(996, 4), 4, True),
    ],
)
def test_breaker_trips_beyond_its_limits_and_not_at_them(breaker: Breaker, found: RecordCounts, in_a_row: int, trips: bool) -> None:
    """The ratio at and just over its limit, the consecutive count, the minimum sample, and no judged record at all."""
    if not trips:
        breaker.check(PART, found, in_a_row, REJECTS)
        return
    with pytest.raises(BreakerTripped) as raised:
        breaker.check(PART, found, in_a_row, REJECTS)
    assert not raised.value.retriable
    assert "Most common error: Timeout: no answer." in str(raised.value)
    if breaker.consecutive == 3:
        assert "flights/3 [0, 1000): 4 records in a row failed, retry.breaker.consecutive is 3." in str(raised.value)


def test_breaker_quotes_no_values_of_rows() -> None:
    """The breaker's error is logged, so its quote ends before the DETAIL, which a failed record may keep."""
    refused = reject(1, Disposition.FAIL, quoting("duplicate key.", "Key (city)=(secret) already exists."), "UniqueViolation")
    with pytest.raises(BreakerTripped) as raised:
        Breaker(0.5, None, 1).check(PART, counts(0, 1), 1, [refused])
    assert raised.value.commonest == "UniqueViolation: duplicate key."


@pytest.mark.parametrize(
    ("said", "longest"),
    [({}, 0), ({0: "f"}, 1), ({0: "r", 1: "f", 2: "r"}, 3), ({0: "r", 1: "s", 2: "r", 3: "r"}, 2), ({0: "r", 5: "f", 900: "r"}, 3)],
)
def test_records_in_a_row_are_counted_over_gaps_of_the_log(said: dict[int, str], longest: int) -> None:
    """A record that was loaded or skipped ends a series of failures; an offset without a record does not."""
    tally = Tally(PART)
    words = {"r": Disposition.RETRY, "f": Disposition.FAIL}
    rejects = [reject(offset, words[word], "x") for offset, word in said.items() if word in words]
    tally.take(TransformOutput({}, [offset for offset, word in said.items() if word == "s"], rejects), Layout("t", (Column("a", "text"),)))
    assert tally.longest_failure() == longest
