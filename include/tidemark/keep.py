"""How long archives of rewinds and payloads of settled records are kept: the default, and the least that the project's settings allow.

What is removed cannot be brought back. So the floor is a setting of the deployment, and no parameter of a DAG run or command.
"""

from __future__ import annotations

import os
from datetime import timedelta

from tidemark.errors import BadInput
from tidemark.text.duration import format_duration, parse_duration

KEEP = "30d"
"""The default, where the floor is not greater."""
FLOOR, FLOOR_VARIABLE = "7d", "TIDEMARK_KEEP_AT_LEAST"


def default_keep() -> str:
    """What is kept where nobody says how long."""
    return KEEP if parse_duration(KEEP) >= _floor() else format_duration(_floor())


def parse_keep(text: str) -> timedelta:
    """How long things are kept. Raises `BadInput` for no duration, and for less than `FLOOR`, or what ``TIDEMARK_KEEP_AT_LEAST`` says."""
    keep, floor = parse_duration(text), _floor()
    if keep < floor:
        least = format_duration(floor)
        raise BadInput(
            what="keep",
            found=f"{text} is less than {least}, and what is removed cannot be brought back",
            fix=f"Write {least} or more, or have an administrator lower {FLOOR_VARIABLE}. Nothing was removed.",
        )
    return keep


def _floor() -> timedelta:
    setting = os.environ.get(FLOOR_VARIABLE) or FLOOR
    try:
        return parse_duration(setting)
    except BadInput as error:
        raise BadInput(what=FLOOR_VARIABLE, found=f'"{setting}" is not a duration', fix=error.fix) from None
