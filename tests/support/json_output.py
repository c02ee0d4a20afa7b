"""The documented JSON of the commands (``docs/json_output.py``)."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "json_output.py"))
OUTPUTS: Mapping[str, Any] = _PAGE["OUTPUTS"]
"""The shape of each command's output."""


def command_of(words: Sequence[str]) -> str:
    """The command that these words call."""
    return next(name for name in (" ".join(words[:length]) for length in (3, 2, 1)) if name in OUTPUTS)


def mismatches(command: str, printed: str) -> list[str]:
    """What a command has printed otherwise than documented."""
    value = json.loads(printed)
    shape = _PAGE["FAILED"] if isinstance(value, dict) and "error" in value else OUTPUTS[command]
    return list(_PAGE["mismatches"](_PAGE["plain"](shape), value))
