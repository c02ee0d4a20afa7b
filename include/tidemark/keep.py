"""How long archives of rewinds and payloads of settled records are kept: the default, and the least that the project's settings allow.

What is removed cannot be brought back. So the floor is a setting of the deployment, and no parameter of a DAG run or command.
"""

from __future__ import annotations

import os
from datetime import timedelta

from tidemark.errors import BadInput
from tidemark.spec.duration import format_duration, parse_duration

KEEP = "30d"
"""The default."""
FLOOR, FLOOR_VARIABLE = "7d", "TIDEMARK_KEEP_AT_LEAST"


def parse_keep(text: str) -> timedelta:
    """How long things are kept. Raises `BadInput` for no duration, and for less than `FLOOR`, or what ``TIDEMARK_KEEP_AT_LEAST`` says."""
    keep, floor = parse_duration(text), parse_duration(os.environ.get(FLOOR_VARIABLE) or FLOOR)
    if keep < floor:
        least = format_duration(floor)
        raise BadInput(
            what="keep",
            found=f"{text} is less than {least}, and what is removed cannot be brought back",
            fix=f"Write {least} or more, or have an administrator lower {FLOOR_VARIABLE}. Nothing was removed.",
        )
    return keep
