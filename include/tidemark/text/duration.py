"""Parses and formats users' durations, a whole number and a unit: ``30s``, ``5m``, ``1h``, ``2d``."""

from __future__ import annotations

import re
from datetime import timedelta

from tidemark.errors import BadInput

_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}  # seconds in a unit, the longest first
LONGEST = timedelta(days=3_650)
"""Ten years. A longer duration is likely a mistake, and could overflow when added to a date."""
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
FIX = "write a number and a unit without a space: 30s, 5m, 1h"


def parse_duration(text: str) -> timedelta:
    """Parses one number and one unit (s, m, h, d), with nothing between or around them.

    Raises `BadInput` for anything else, and for durations longer than `LONGEST`.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise BadInput(what="not a duration", found=f'"{text}"', fix=FIX)
    length = timedelta(seconds=int(match[1]) * _UNITS_S[match[2]])
    if length > LONGEST:
        raise BadInput(what="not a duration", found=f'"{text}"', fix=f"write a shorter one, at most {LONGEST.days}d")
    return length


def format_duration(length: timedelta) -> str:
    """Formats ``length`` for `parse_duration`, in the longest unit that needs no fraction: 90 s is ``90s``, 120 s is ``2m``.

    A fraction of a second, which `parse_duration` refuses, is shown: a topic's retention may have one.
    """
    seconds = length // timedelta(seconds=1)
    if length != timedelta(seconds=seconds):
        return f"{length.total_seconds()}s"
    if seconds == 0:
        return "0s"
    unit = next(unit for unit, size in _UNITS_S.items() if seconds % size == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"
