"""A failed record as a message on a retry topic."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.retry.messages import COUNT, HEADER_BYTES, NAMES, TEXT_BYTES, Row, outgoing, tidemark_headers, truncate

RECORD = Row(
    failed_record_id=7, topic="flights", partition=5, record_offset=1200, record_millis=None, key=None, value=None, headers=None,
    error_type="KeyError", error_text="no such city", retry_number=2, due_millis=None, retry_topic="departures.retry.5m",
)  # fmt: skip


def test_our_headers_say_in_text_where_the_record_comes_from_and_what_happened() -> None:
    """Headers are UTF-8, with numbers in digits and times in ISO 8601. A missing value is null."""
    moment = datetime(2026, 3, 24, 13, 0, 0, 123_000, tzinfo=UTC)
    said = dict(tidemark_headers("departures", RECORD._replace(due_millis=round(moment.timestamp() * 1000), error_text="né Zürich")))
    assert said == {
        "tidemark.group": b"departures",
        "tidemark.record": b"7",
        "tidemark.retry_number": b"2",
        "tidemark.retry_timestamp": b"2026-03-24T13:00:00.123Z",
        "tidemark.topic": b"flights",
        "tidemark.partition": b"5",
        "tidemark.offset": b"1200",
        "tidemark.timestamp": None,
        "tidemark.error_type": b"KeyError",
        "tidemark.error_text": "né Zürich".encode(),
    }


HEADERS = st.lists(st.tuples(st.text() | st.sampled_from(NAMES), st.none() | st.binary(max_size=20)), max_size=COUNT + 5)


@given(HEADERS)
def test_the_records_own_headers_come_first_and_unchanged(headers: list[tuple[str, bytes | None]]) -> None:
    """Scenarios 10 to 12: duplicates, null values, no headers at all, and headers that forge ours. Ours are removed by their number."""
    kept = [[name, None if value is None else base64.b64encode(value).decode()] for name, value in headers]
    made = outgoing("departures", RECORD._replace(headers=json.dumps(kept)), 3)
    assert made.headers[:-COUNT] == headers
    assert [name for name, _ in made.headers[len(headers) :]] == list(NAMES)


@pytest.mark.parametrize(("partitions", "expected"), [(1, 0), (3, 2), (5, 0), (6, 5), (64, 5)])
def test_a_record_keeps_its_partition_modulo_what_there_is(partitions: int, expected: int) -> None:
    """Scenarios 20 and 41: a record of partition 5, on topics with more partitions, as many, fewer, or one."""
    assert outgoing("departures", RECORD, partitions).partition == expected


@given(st.text(), st.integers(4, 60))
def test_a_text_is_cut_between_two_characters(text: str, size: int) -> None:
    made = truncate(text, size)
    assert len(made.encode()) <= size
    assert made == text or (made.endswith("…") and text.startswith(made[:-1]))


def test_our_headers_never_take_more_than_the_room_that_is_kept_for_them() -> None:
    """Scenario 11: a huge stack trace, the longest names that Kafka and a group allow, and the largest numbers."""
    longest = RECORD._replace(
        failed_record_id=2**63 - 1, topic="t" * 249, partition=2**31 - 1, record_offset=2**63 - 1, retry_number=2**31 - 1,
        record_millis=-210_866_803_200_000, due_millis=253_402_214_400_000,
        error_type="Ü" * 100_000, error_text="🛫" * 1_000_000,
    )  # fmt: skip
    made = tidemark_headers("g" * 255, longest)
    framing = 10 * len(made)
    """Two lengths of at most 5 bytes precede each header."""
    assert sum(len(name) + len(value or b"") for name, value in made) + framing <= HEADER_BYTES
    assert len(made) == COUNT
    assert len(dict(made)["tidemark.error_text"] or b"") <= TEXT_BYTES
