"""Parses and formats users' times and durations. Refuses a local time that occurs twice or not at all, and names both readings."""

from __future__ import annotations

import difflib
import functools
import re
import zoneinfo
from datetime import UTC, datetime, timedelta
from typing import Any

from tidemark.errors import BadInput
from tidemark.text.duration import LONGEST, parse_duration
from tidemark.text.wording import quoted

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""Kafka's timestamps start here. Negative ones have special meanings (-1 is latest, -2 is earliest)."""
EXAMPLE = "2026-03-29T14:00:00+02:00"
NEAR, LIKENESS = 3, 0.75
"""How many zones with similar names to suggest, and how similar the names must be."""

_MOMENT = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)(?:[Tt ](?P<time>\d\d:\d\d)(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?)?"
    r"(?: ?(?P<offset>[Zz]|[+-]\d\d(?::?\d\d)?))?)?",
    re.ASCII,
)
_DURATION = re.compile(
    r"(?i)P(?=[\dT])(?:\d{1,9}W|(?:\d{1,9}D)?(?:T(?=\d)(?:\d{1,9}H)?(?:\d{1,9}M)?(?:\d{1,9}(?:[.,]\d{1,9})?S)?)?)", re.ASCII
)
_CALENDAR = re.compile(r"(?i)P[\dYMWD.,]*[\d.,]+[YM]", re.ASCII)
_DURATION_FIX = "Write days, hours, minutes and seconds in ISO 8601: PT2H, P1DT12H, PT90M"


def parse_moment(text: str, zone: str | None = None) -> datetime:
    """Parses RFC 3339, or a local time with its ``zone`` (``Europe/Berlin``). Returns UTC.

    Kafka's timestamps have milliseconds, so a finer time is rounded up: the records at or after it are the same.
    Raises `BadInput` for: not a time; no zone, an unknown one, or one that contradicts the offset; a local time that occurs twice or not
    at all because of a clock change; before 1970.
    """
    match = _MOMENT.fullmatch(text.strip())
    if match is None or match["time"] is None:
        fix = f"Write {match['date']} 00:00, or another time of that day" if match else f"Write {EXAMPLE}, or 2026-03-29 14:00 and a zone"
        raise _bad_moment(text, "is a date without a time" if match else "is not a time", f"{fix}.")
    local = _local(text, match)
    if match["offset"] is None:
        if zone is None:
            raise _bad_moment(text, "has no zone", f"Name its zone (Europe/Berlin, UTC), or write its UTC offset: {EXAMPLE}.")
        moment = _in_zone(text, local, _zone(zone))
    else:
        moment = _at_offset(text, local, match["offset"])
        if zone is not None and (named_zone := _zone(zone)).utcoffset(moment.astimezone(named_zone)) != moment.utcoffset():
            problem = f"has the offset {match['offset']}, but in {zone} it is {_reading(moment.astimezone(named_zone))} then"
            raise _bad_moment(text, problem, "Give only the offset or only the zone.")
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise _bad_moment(text, "is beyond the supported range", f"Write a time like {EXAMPLE}.") from None
    if moment < UNIX_EPOCH:
        raise _bad_moment(text, "is before 1970, where Kafka's timestamps begin", "To read all that Kafka still has, use to-earliest.")
    return moment


def parse_iso_duration(text: str) -> timedelta:
    """Parses an ISO 8601 duration (``PnDTnHnMnS``, as Kafka reads it, and ``PnW``). Raises `BadInput`.

    Refuses months and years, whose lengths vary, and negative durations, which would point to the future. The error names the fix.
    """
    stripped = text.strip()
    if stripped.startswith(("-", "+")) or re.search(r"[-+]\d", stripped):
        raise _bad_duration(text, "has a sign", f"{_DURATION_FIX}; it is always the time before the plan is made.")
    if _CALENDAR.match(stripped):
        raise _bad_duration(text, "contains months or years, whose lengths vary", "Write days: P30D, P365D.")
    if not _DURATION.fullmatch(stripped):
        raise _bad_duration(text, "is not a duration", f"{_near_duration(stripped) or _DURATION_FIX}.")
    length = to_timedelta(stripped.upper().replace(",", "."))
    if length is None or length > LONGEST:
        fix = "Write a shorter one. To read all that Kafka still has, use to-earliest."
        raise _bad_duration(text, f"is longer than {LONGEST.days} days", fix)
    return length


def iso(moment: datetime) -> str:
    """RFC 3339 in UTC, without a fraction if it is zero: ``2026-03-29T12:00:00Z``."""
    return _shown(moment.astimezone(UTC)).replace("+00:00", "Z")


def iso_duration(length: timedelta) -> str:
    """Formats ``length`` for `parse_iso_duration`: ``P1DT2H``, ``PT0S``."""
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{length.microseconds:06}".rstrip("0") if length.microseconds else ""
    parts = [f"{hours}H" if hours else "", f"{minutes}M" if minutes else "", f"{seconds}{fraction}S" if seconds or fraction else ""]
    days, time = f"{length.days}D" if length.days else "", "".join(parts)
    return f"P{days}T{time}" if time else f"P{days}" if days else "PT0S"


def _local(text: str, match: re.Match[str]) -> datetime:
    """The local time without a zone, rounded up to a millisecond."""
    second, fraction = match["second"] or "00", (match["fraction"] or "").ljust(9, "0")
    if second == "60":
        raise _bad_moment(text, "is a leap second, which Kafka's timestamps do not have", "Write :59, or the minute after it.")
    millis = -(-int(fraction) // 1_000_000)
    try:
        return datetime.fromisoformat(f"{match['date']}T{match['time']}:{second}") + timedelta(milliseconds=millis)
    except (ValueError, OverflowError) as error:
        raise _bad_moment(text, f"is not a time ({error})", f"Write {EXAMPLE}.") from None


def _at_offset(text: str, local: datetime, offset: str) -> datetime:
    digits = offset[1:].replace(":", "").ljust(4, "0")
    if offset in "Zz":
        return local.replace(tzinfo=UTC)
    if int(digits[:2]) > 23 or int(digits[2:]) > 59:
        raise _bad_moment(text, f"has an invalid UTC offset: {offset}", f"Write {EXAMPLE}.")
    return datetime.fromisoformat(f"{local.isoformat()}{offset[0]}{digits[:2]}:{digits[2:]}")


def _in_zone(text: str, local: datetime, zone: zoneinfo.ZoneInfo) -> datetime:
    """Converts a local time that occurs exactly once in the zone. Raises `BadInput` for others."""
    try:
        readings = [local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)]
        shown = [moment.astimezone(zone) for moment in readings]
    except OverflowError:
        raise _bad_moment(text, "is beyond the supported range", f"Write a time like {EXAMPLE}.") from None
    if readings[0] == readings[1]:
        return shown[0]
    twice = shown[0].replace(tzinfo=None) == local
    problem = f"{'occurs twice' if twice else 'does not exist'} in {zone.key}, where clocks go {'back' if twice else 'forward'}"
    first, second = sorted(shown, key=lambda moment: moment.timestamp())
    raise _bad_moment(text, problem, f"Write {_reading(first)}, or {_reading(second)}.")


@functools.cache
def _zones() -> dict[str, str]:
    """Every zone by its lower-case name."""
    return {name.lower(): name for name in sorted(zoneinfo.available_timezones()) if name not in ("localtime", "posixrules")}


def _zone(name: str) -> zoneinfo.ZoneInfo:
    zones = _zones()
    stripped = name.strip().replace(" ", "_")
    if stripped in zones.values():
        return zoneinfo.ZoneInfo(stripped)
    lower = stripped.lower()[:100]
    if lower in zones:
        near = [lower]
    else:
        cities = {zone.rpartition("/")[2]: zone for zone in zones}
        close = difflib.get_close_matches(lower.rpartition("/")[2], cities, n=NEAR, cutoff=LIKENESS)
        near = [*difflib.get_close_matches(lower, zones, n=NEAR, cutoff=LIKENESS), *(cities[city] for city in close)]
    names = list(dict.fromkeys(zones[zone] for zone in near))[:NEAR]
    fix = f"Write {' or '.join(names)}." if names else "Write a name of the tz database: Europe/Berlin, America/New_York, UTC."
    raise BadInput(what="zone", found=f"{quoted(name)} is not a known time zone", fix=fix)


def _reading(moment: datetime) -> str:
    """A time in its zone and in UTC."""
    utc = moment.astimezone(UTC)
    return f"{_shown(moment)} ({utc:%H:%M} UTC)" if utc.date() == moment.date() else f"{_shown(moment)} ({utc:%Y-%m-%d %H:%M} UTC)"


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds" if moment.microsecond % 1000 else "milliseconds" if moment.microsecond else "seconds")


def to_timedelta(text: str) -> timedelta | None:
    """Parses the result of `iso_duration`, of any length, with Pydantic. `None` if a timedelta cannot hold it."""
    from pydantic import TypeAdapter, ValidationError

    reader: TypeAdapter[Any] = TypeAdapter(timedelta)
    try:
        length: timedelta = reader.validate_python(text)
    except ValidationError:
        return None
    return length


def _near_duration(text: str) -> str | None:
    """The likely fix for a duration in the notation of consumers' files: ``2h``."""
    try:
        return f"Write {iso_duration(parse_duration(text.lower().replace(' ', '')))}"
    except BadInput:
        return None


def _bad_moment(text: str, problem: str, fix: str) -> BadInput:
    return BadInput(what="time", found=f"{quoted(text)} {problem}", fix=fix)


def _bad_duration(text: str, problem: str, fix: str) -> BadInput:
    return BadInput(what="duration", found=f"{quoted(text)} {problem}", fix=fix)
