"""Faults at the numbered steps of a commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidemark.records.ranges import Slice
from tidemark.sink import commit
from tidemark.sink.steps import Step

AtStep = Callable[[Step, Callable[[], None]], None]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Runs an action just before a numbered step, the first time that a commit of this process reaches the step."""

    def arrange(step: Step, act: Callable[[], None]) -> None:
        waiting = [act]

        def reached(here: Step, part: Slice) -> None:
            if here is step and waiting:
                waiting.pop()()

        monkeypatch.setattr(commit, "reached", reached)

    return arrange
