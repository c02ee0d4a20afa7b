"""The retention of rewind archives and of settled records' payloads: the default, and the minimum that the deployment allows.

Removed data cannot be restored, so the minimum is a setting of the deployment, not a parameter of a DAG run or command.
"""

from __future__ import annotations

import os
from datetime import timedelta

from tidemark.errors import BadInput
from tidemark.text.duration import format_duration, parse_duration

KEEP = "30d"
"""The default, unless the minimum is greater."""
FLOOR, FLOOR_VARIABLE = "7d", "TIDEMARK_KEEP_AT_LEAST"


def default_keep() -> str:
    """The default retention: `KEEP`, or the minimum if that is greater."""
    return KEEP if parse_duration(KEEP) >= _floor() else format_duration(_floor())


def parse_keep(text: str) -> timedelta:
    """Parses a retention. Raises `BadInput` if it is not a duration, or less than ``TIDEMARK_KEEP_AT_LEAST`` (default: `FLOOR`)."""
    keep, floor = parse_duration(text), _floor()
    if keep < floor:
        least = format_duration(floor)
        raise BadInput(
            what="keep",
            found=f"{text} is less than {least}, and removed data cannot be restored",
            fix=f"Write {least} or more, or ask an administrator to lower {FLOOR_VARIABLE}. Nothing was removed.",
        )
    return keep


def _floor() -> timedelta:
    setting = os.environ.get(FLOOR_VARIABLE) or FLOOR
    try:
        return parse_duration(setting)
    except BadInput as error:
        raise BadInput(what=FLOOR_VARIABLE, found=f'"{setting}" is not a duration', fix=error.fix) from None
