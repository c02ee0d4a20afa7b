"""Where a partition starts, and what happens if its position is not in the log: every situation with every setting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.offsets.reset import (
    Jump,
    LogTruncated,
    NoPosition,
    OffsetOutOfRange,
    TopicRecreated,
    check_position,
    first_position,
)
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec.model import OffsetReset

PARTITION = TopicPartition("flights", 3)
LOG = Log(PARTITION, 100, 200)
EMPTY = Log(PARTITION, 100, 100)
EARLIEST, LATEST, NONE = OffsetReset.EARLIEST, OffsetReset.LATEST, OffsetReset.NONE


@pytest.mark.parametrize(
    ("reset", "topic_is_read", "expected"),
    [
        (None, False, 100),
        (None, True, 100),
        (EARLIEST, False, 100),
        (EARLIEST, True, 100),
        (LATEST, False, 200),
        (LATEST, True, 100),  # added to a topic that is already read: records that arrived before it was noticed are not skipped
        (NONE, False, NoPosition),
        (NONE, True, NoPosition),
    ],
)
def test_a_partition_without_a_position_starts_where_the_spec_says(reset: OffsetReset | None, topic_is_read: bool, expected: Any) -> None:
    """``earliest`` is the default; ``none`` refuses to choose."""
    if expected is NoPosition:
        with pytest.raises(NoPosition, match=r"flights/3 has no position yet, and offset_reset is none"):
            first_position(LOG, reset, topic_is_read=topic_is_read)
    else:
        assert first_position(LOG, reset, topic_is_read=topic_is_read) == expected
        assert first_position(EMPTY, reset, topic_is_read=topic_is_read) == 100
    assert check_position(EMPTY, 100, reset) is None, "a position at the end of an emptied log is valid"


REFUSED = "refused"
TRUNCATED = "truncated"
SITUATIONS = [
    # position, reset, outcome
    (100, None, None),
    (150, None, None),
    (200, None, None),  # at the end: nothing to read, and no error
    (99, None, REFUSED),
    (99, NONE, REFUSED),
    (99, EARLIEST, Jump(100, "retention")),
    (0, EARLIEST, Jump(100, "retention")),
    (99, LATEST, Jump(200, "reset to latest")),  # skipped records are lost, whether retained or not
    (201, None, TRUNCATED),
    (201, NONE, TRUNCATED),
    (201, EARLIEST, TRUNCATED),  # a truncated log has other records than those that were loaded: no setting allows that
    (201, LATEST, TRUNCATED),
]


@pytest.mark.parametrize(("position", "reset", "outcome"), SITUATIONS)
def test_a_position_is_good_or_jumps_or_is_refused(position: int, reset: OffsetReset | None, outcome: Any) -> None:
    """Nothing is clamped: a jump ends where reading continues, and without the user's permission there is no jump (I5)."""
    if outcome == REFUSED:
        with pytest.raises(OffsetOutOfRange) as raised:
            check_position(LOG, position, reset)
        assert (raised.value.position, raised.value.start, raised.value.end) == (position, 100, 200)
        assert str(position) in str(raised.value)
    elif outcome == TRUNCATED:
        with pytest.raises(LogTruncated) as truncated:
            check_position(LOG, position, reset)
        assert (truncated.value.position, truncated.value.end) == (position, 200)
    else:
        assert check_position(LOG, position, reset) == outcome


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 120), st.sampled_from([EARLIEST, LATEST]))
def test_a_jump_is_forward_from_before_the_log_into_it(start: int, length: int, position: int, reset: OffsetReset) -> None:
    log = Log(PARTITION, start, start + length)
    try:
        jump = check_position(log, position, reset)
    except LogTruncated:
        assert position > log.end
        return
    if jump is None:
        assert log.start <= position <= log.end
    else:
        assert position < log.start <= jump.to <= log.end


def test_the_texts_say_what_was_lost_and_what_to_write() -> None:
    """Each refusal names the partition, the numbers and what to do."""
    gone = OffsetOutOfRange(partition=PARTITION, position=10, start=100, end=200)
    assert "records 10 to 99 are gone" in str(gone)
    assert "offset_reset: earliest" in str(gone)
    truncated = LogTruncated(partition=PARTITION, position=300, leader_epoch=4, end=200)
    assert "below the position 300, which was read in leader epoch 4" in str(truncated)
    assert "tidemark rewind plan NAME --to-offset 200 --topic flights:3" in str(truncated)
    beyond = LogTruncated(partition=PARTITION, position=300, leader_epoch=None, end=200)
    assert "The log ends at 200" in str(beyond)
    strange = LogTruncated(partition=PARTITION, position=300, leader_epoch=4, end=None)
    assert "--to-offset OFFSET" in str(strange)
    drained = LogTruncated(partition=PARTITION, position=300, leader_epoch=4, end=200, drained=True)
    assert "Delete the retry topic flights" in str(drained)
    assert "rewind" not in str(drained)
    assert "0: 5, 1: 7" in str(TopicRecreated(topic="flights", positions={1: 7, 0: 5}))
