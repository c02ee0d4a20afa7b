"""Durations as users write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.text.duration import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("90s", 90), ("5m", 300), ("1h", 3600), ("25h", 90_000), ("2d", 172_800), ("0s", 0)]
)
def test_a_duration_is_a_number_and_a_unit_and_written_in_its_longest_whole_unit(text, seconds):
    """The unit is one letter, for seconds, minutes, hours or days. The text is short and has no fraction."""
    assert parse_duration(text) == parse_duration(f"0{text}") == timedelta(seconds=seconds)
    assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    "text", ["", "5", "m", "30 m", " 30m", "30m\n", "-5m", "1.5h", "1h30m", "5M", "5min", "٣m", "3651d", "999999999d", "1234567890s"]
)
def test_anything_else_is_refused(text):
    """No sign, fraction, space, second unit or digits other than 0 to 9, and nothing longer than ten years."""
    with pytest.raises(BadInput) as caught:
        parse_duration(text)
    assert caught.value.found == f'"{text}"'


@given(st.integers(0, 3_650 * 86_400))
def test_a_written_duration_reads_as_the_same_length(seconds):
    """format_duration is the inverse of parse_duration for whole seconds."""
    assert parse_duration(format_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


def test_fraction_of_a_second_is_not_rounded():
    """`consumers check` shows a topic's retention, which Kafka counts in milliseconds."""
    assert format_duration(timedelta(days=7, milliseconds=500)) == "604800.5s"
