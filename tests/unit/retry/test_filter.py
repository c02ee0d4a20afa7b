"""The filter of an operator's action is stored with the action and reads back unchanged."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.retry.filter import CONDITION, Filter, RecordState, parse_key

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
MOMENTS = st.integers(0, 4 * 10**12).map(lambda millis: datetime(1971, 1, 1, tzinfo=UTC) + timedelta(milliseconds=millis))


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    low, since = draw(st.none() | st.integers(0, 10**12)), draw(st.none() | MOMENTS)
    return Filter(
        numbers=tuple(draw(st.lists(st.integers(1, 2**62), max_size=3))),
        states=tuple(draw(st.lists(st.sampled_from(RecordState), max_size=3))),
        error_type=draw(st.none() | TEXTS.filter(bool)),
        error_text=draw(st.none() | TEXTS),
        topic=draw(st.none() | st.just("flights")),
        partition=draw(st.none() | st.integers(0, 10)),
        from_offset=low,
        to_offset=None if low is None else low + draw(st.integers(1, 5)),
        key=draw(st.none() | st.binary()),
        since=since,
        until=None if since is None else since + timedelta(minutes=1),
        tier=draw(st.none() | st.just("5m")),
        refused=draw(st.booleans()),
    )


@given(filters())
def test_a_filter_reads_back_as_the_same(wanted: Filter) -> None:
    """This includes a zero, an empty key and an empty text, which differ from None."""
    assert Filter.from_json(json.loads(json.dumps(wanted.as_json()))) == wanted
    assert bool(wanted) == (wanted != Filter())
    assert str(wanted)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from([field.name for field in fields(Filter)]), inner),
)


@given(ANYTHING)
def test_anything_that_a_role_may_have_stored_is_a_filter_or_refused(stored: Any) -> None:
    try:
        wanted = Filter.from_json(stored)
    except BadInput as refused:
        assert "stored filter" in str(refused)  # noqa: PT017 - most of what is generated is refused
    else:
        assert str(wanted)
        assert wanted.parameters("group")


def test_every_field_is_a_part_of_the_condition() -> None:
    """Every field of the filter is a parameter of the SQL condition."""
    parameters = Filter(tier="failed").parameters("departures")
    assert set(re.findall(r"%\((\w+)\)s", CONDITION)) == set(parameters)
    assert len(parameters) == len(fields(Filter))
    assert parameters["retry_topic"] == "departures.failed"
    assert Filter(tier="5m").parameters("departures")["retry_topic"] == "departures.retry.5m"


LATE, EARLY = datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("wrong", [{"from_offset": 5, "to_offset": 5}, {"since": LATE, "until": EARLY}])
def test_a_range_in_which_nothing_lies_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="nothing lies between"):
        Filter(**wrong)  # type: ignore[arg-type]


def test_a_filter_tells_itself() -> None:
    assert str(Filter()) == "all records"
    assert (
        str(Filter(states=(RecordState.FAILED,), error_type="KeyError", partition=0)) == "states FAILED, error type KeyError, partition 0"
    )
    assert str(Filter(key=b"k1", refused=True)) == 'key "k1", refused'
    assert str(Filter(key=b"\x00\xff")) == "key 0x00ff"
    assert str(Filter(numbers=tuple(range(1, 9)))) == "numbers 1 or 2 or 3 or 4 or 5 or 3 more"


@pytest.mark.parametrize(
    "wanted",
    [
        *({name: value} for name in ("error_type", "error_text", "topic", "tier") for value in ("a\0", "\ud800")),
        *({"partition": value} for value in (-1, 2**31)),
        *({name: value} for name in ("from_offset", "to_offset") for value in (-1, 2**63)),
        {"numbers": (1, 2**63)},
    ],
    ids=repr,
)
def test_what_no_column_can_hold_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Filter(**wanted)


@pytest.mark.parametrize(
    ("text", "in_hex", "key"),
    [(None, None, None), ("", None, b""), ("ü\0", None, b"\xc3\xbc\0"), (None, "00 fF", b"\0\xff"), (None, "", b"")],
)
def test_key_is_given_as_text_or_in_hex(text: str | None, in_hex: str | None, key: bytes | None) -> None:
    assert parse_key(text, in_hex) == key


@pytest.mark.parametrize(
    ("text", "in_hex", "why"), [("a", "61", "as text and in hex"), (None, "0", "is not hex"), ("\udcff", None, "store")]
)
def test_key_that_cannot_be_one_is_refused(text: str | None, in_hex: str | None, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse_key(text, in_hex)
