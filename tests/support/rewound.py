"""Rewinds of a consumer, and their undos, as a user makes them."""

from __future__ import annotations

from tests.support.scenario import Scenario, as_json
from tests.support.shell import tidemark

REASON = ("--reason", "the records were read wrongly")


def rewound(scenario: Scenario, *target: str) -> int:
    """Plans a rewind and applies it. Returns its number."""
    return _applied(scenario, "plan", scenario.name, *target)


def undone(scenario: Scenario, rewind_id: int) -> int:
    """Undoes a rewind. Returns the number of the undo."""
    return _applied(scenario, "undo", str(rewind_id))


def _applied(scenario: Scenario, *words: str) -> int:
    planned = tidemark(scenario, "rewind", *words, *REASON, "--output", "json")
    assert planned.returncode == 0, planned.stderr
    rewind_id: int = as_json(planned.stdout)["rewind_id"]
    applied = tidemark(scenario, "rewind", "apply", str(rewind_id))
    assert applied.returncode == 0, applied.stderr
    return rewind_id
