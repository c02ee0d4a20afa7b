"""Times and durations as users write them for a rewind."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.text.moment import UNIX_EPOCH, iso, iso_duration, parse_iso_duration, parse_moment

ZONES = ["Europe/Berlin", "America/New_York", "Pacific/Apia", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Casablanca", "UTC"]
TIMES = st.datetimes(min_value=datetime.fromisoformat("1971-01-01"), max_value=datetime.fromisoformat("2090-01-01"))


def refusal(read: Callable[..., object], *arguments: str) -> str | None:
    """The error message, or None if the text is accepted."""
    try:
        read(*arguments)
    except BadInput as told:
        return str(told)
    return None


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-29T12:00:00Z",
        "2026-03-29t12:00:00z",
        "2026-03-29 12:00:00.000Z",
        "2026-03-29T14:00:00+02:00",
        "2026-03-29T14:00+0200",
        "2026-03-29T14:00 +02",
        "2026-03-29T06:30:00-05:30",
        "  2026-03-29T12:00:00-00:00 ",
    ],
)
def test_rfc_3339_names_a_moment_by_its_offset(text):
    """RFC 3339, and the offsets without a colon that Kafka's tool accepts (its testResetOffsetsToZonedDateTime)."""
    assert parse_moment(text) == datetime(2026, 3, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["2026-03-29 14:00", "2026-03-29T14:00", "2026-03-29T14:00:00", "2026-03-29 14:00:00,000"])
def test_local_time_needs_its_zone(text):
    """The separator is T or a space, and seconds are optional. A time without a zone is refused; Kafka's tool silently assumes UTC."""
    assert parse_moment(text, "Europe/Berlin") == datetime(2026, 3, 29, 12, tzinfo=UTC)
    assert parse_moment(text, "America/New_York") == datetime(2026, 3, 29, 18, tzinfo=UTC)
    with pytest.raises(BadInput, match=r"has no zone\. Name its zone"):
        parse_moment(text)


@pytest.mark.parametrize(
    ("text", "zone", "told", "fix"),
    [
        ("2026-10-25 02:30", "Europe/Berlin", "occurs twice in",
         "Write 2026-10-25T02:30:00+02:00 (00:30 UTC), or 2026-10-25T02:30:00+01:00 (01:30 UTC)."),
        ("2026-03-29 02:30", "Europe/Berlin", "does not exist in",
         "Write 2026-03-29T01:30:00+01:00 (00:30 UTC), or 2026-03-29T03:30:00+02:00 (01:30 UTC)."),
        ("2011-12-30 12:00", "Pacific/Apia", "does not exist in",
         "Write 2011-12-29T12:00:00-10:00 (22:00 UTC), or 2011-12-31T12:00:00+14:00 (2011-12-30 22:00 UTC)."),
    ],
    ids=["twice", "skipped", "a day skipped"],
)  # fmt: skip
def test_time_that_the_clock_shows_twice_or_leaves_out_is_refused_with_two_moments(text, zone, told, fix):
    """Both interpretations, or the neighbours: half an hour before the change of the clock and half an hour after it. They have their
    offsets, and are ready to copy. Samoa had no 30 December 2011."""
    with pytest.raises(BadInput) as refused:
        parse_moment(text, zone)
    assert f"{told} {zone}" in refused.value.found
    assert refused.value.fix == fix


@pytest.mark.parametrize(
    ("zone", "near"),
    [
        ("europe/berlin", "Write Europe/Berlin."),
        ("Berlin", "Europe/Berlin"),
        ("Europe/Berln", "Europe/Berlin"),
        ("New York", "America/New_York"),
    ],
)
def test_unknown_zone_is_answered_with_near_ones(zone, near):
    with pytest.raises(BadInput, match=f"is not a known time zone.*{near}"):
        parse_moment("2026-03-29 14:00", zone)


@pytest.mark.parametrize("zone", ["", "../../etc/passwd", "/etc/localtime", "localtime", "Mars/Olympus", "\0"])
def test_what_is_no_zone_of_the_tz_database_is_never_opened_as_a_file(zone):
    with pytest.raises(BadInput, match="Write a name of the tz database"):
        parse_moment("2026-03-29 14:00", zone)


def test_offset_and_zone_may_say_the_same_but_not_different_things():
    assert parse_moment("2026-03-29T14:00:00+02:00", "Europe/Berlin") == datetime(2026, 3, 29, 12, tzinfo=UTC)
    with pytest.raises(BadInput, match=r"has the offset Z, but in Europe/Berlin it is 2026-03-29T16:00:00\+02:00"):
        parse_moment("2026-03-29T14:00:00Z", "Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not a time"),
        ("tuesday", "is not a time"),
        ("2026-3-29 14:00Z", "is not a time"),
        ("٢٠٢٦-03-29T14:00Z", "is not a time"),
        ("2026-03-29", "Write 2026-03-29 00:00"),
        ("2026-02-30T10:00Z", "day is out of range"),
        ("2026-01-01T24:00Z", "is not a time"),
        ("2026-12-31T23:59:60Z", "leap second"),
        ("2026-03-29T14:00+25:00", "an invalid UTC offset"),
        ("1969-12-31T23:59:59.999Z", "before 1970"),
        ("0001-01-01T00:00:00+14:00", "beyond the supported range"),
        ("9999-12-31T23:59:59.9999Z", "is not a time"),
    ],
)
def test_what_is_no_time_is_refused_with_what_to_write(text, told):
    """Times before 1970 are refused too: in Kafka, negative timestamps have special meanings (-1 latest, -2 earliest)."""
    with pytest.raises(BadInput, match=told):
        parse_moment(text)


def test_finer_moment_becomes_the_next_millisecond():
    """A record with the previous millisecond is before the moment, not at or after it."""
    assert parse_moment("2026-03-29T12:00:00.0000001Z") == datetime(2026, 3, 29, 12, 0, 0, 1000, tzinfo=UTC)
    assert parse_moment("2026-03-29T12:00:00.001Z") == datetime(2026, 3, 29, 12, 0, 0, 1000, tzinfo=UTC)


@given(TIMES, st.sampled_from(ZONES))
def test_local_time_is_taken_if_the_zones_clock_shows_it_exactly_once(local, zone):
    """The test counts the moments at which the clock shows the time, over all offsets that the zone may have: none, one or two."""
    local = local.replace(second=0, microsecond=0)
    there = zoneinfo.ZoneInfo(zone)
    offsets = {(local + timedelta(days=day)).replace(tzinfo=UTC).astimezone(there).utcoffset() for day in (-2, -1, 0, 1, 2)}
    moments = [moment for offset in offsets if (moment := local.replace(tzinfo=timezone(offset))).astimezone(there).utcoffset() == offset]
    text = f"{local:%Y-%m-%d %H:%M}"
    told = refusal(parse_moment, text, zone)
    if len(moments) == 1:
        assert parse_moment(text, zone) == moments[0]
    else:
        assert f"{'occurs twice' if moments else 'does not exist'} in {zone}" in (told or "")


@given(TIMES, st.integers(-14 * 60, 14 * 60))
def test_moment_is_told_as_it_is_read(local, minutes):
    """`parse_moment` reads what `iso` writes, for any offset, to the millisecond."""
    moment = local.replace(microsecond=local.microsecond // 1000 * 1000, tzinfo=timezone(timedelta(minutes=minutes)))
    assert parse_moment(iso(moment)) == parse_moment(moment.isoformat()) == moment
    assert iso(moment).endswith("Z")
    assert moment > UNIX_EPOCH


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("PT1M", timedelta(minutes=1)),
        ("PT0.1S", timedelta(milliseconds=100)),
        ("P2D", timedelta(days=2)),
        ("P1DT2H3M4S", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("pt36h", timedelta(hours=36)),
        ("P2W", timedelta(days=14)),
        ("PT0S", timedelta()),
    ],
)
def test_duration_is_iso_8601_as_kafka_reads_it(text, length):
    """PT1M and PT0.1S are from Kafka's testResetOffsetsByDuration and …ByDurationToEarliest."""
    assert parse_iso_duration(text) == length


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("P1M", "Write days: P30D"),
        ("P1Y2M3DT4H", "months or years"),
        ("P0.5Y", "months or years"),
        ("-PT1H", "has a sign"),
        ("PT-1H", "has a sign"),
        ("+PT1H", "has a sign"),
        ("2h", "Write PT2H"),
        ("90 m", "Write PT1H30M"),
        ("", "is not a duration"),
        ("P", "is not a duration"),
        ("PT", "is not a duration"),
        ("P1DT", "is not a duration"),
        ("PT1.5H", "is not a duration"),
        ("12:30", "is not a duration"),
        ("P99999999D", "longer than 3650 days"),
    ],
)
def test_what_is_no_duration_is_refused_with_what_to_write(text, told):
    with pytest.raises(BadInput, match=told):
        parse_iso_duration(text)


@given(st.timedeltas(min_value=timedelta(), max_value=timedelta(days=3650)))
def test_duration_is_told_as_it_is_read(length):
    assert parse_iso_duration(iso_duration(length)) == length


@given(st.text(max_size=40) | st.from_regex(r"\A[P0-9TDHMSYW.:Z+ -]{0,24}\Z"))
def test_any_text_is_read_or_refused_and_never_anything_else(text):
    for read, arguments in (
        (parse_moment, (text,)),
        (parse_moment, (text, "Europe/Berlin")),
        (parse_moment, ("2026-01-01 00:00", text)),
        (parse_iso_duration, (text,)),
    ):
        assert "\n" not in (refusal(read, *arguments) or "")
