"""Everything that is wrong with what an operator asked for, collected and reported at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tidemark.errors import BadInput, Refused
from tidemark.text.wording import quoted

T = TypeVar("T")

REASON_CHARACTERS = 10
"""The least that a reason has."""


@dataclass(kw_only=True, eq=False)
class SeveralProblems(Refused):
    """Everything that is wrong with what was asked for, a text each."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, f"{len(self.problems)} problems; nothing was planned"])


@dataclass
class Problems:
    """Collects what is refused, so that all of it can be told at once."""

    found: list[Refused] = field(default_factory=list)

    def attempt(self, ask: Callable[[], T]) -> T | None:
        """What ``ask`` returns, or `None` if it is refused, which is then kept."""
        try:
            return ask()
        except Refused as error:
            self.found.append(error)
        return None

    def add(self, what: str, found: str, fix: str) -> None:
        self.found.append(BadInput(what=what, found=found, fix=fix))

    def end(self) -> None:
        """Raises what was collected, if anything was."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            texts = [error.problems if isinstance(error, SeveralProblems) else (str(error),) for error in self.found]
            raise SeveralProblems(problems=tuple(text for several in texts for text in several))


def check_reason(text: str | None) -> str:
    """The reason, without blanks around it. Raises `BadInput` if it says too little to be of use later."""
    reason = " ".join((text or "").split())
    if len(reason) < REASON_CHARACTERS:
        found = f"{quoted(reason)} has {len(reason)} characters" if reason else "there is none"
        raise BadInput(what="reason", found=found, fix=f"Say why in at least {REASON_CHARACTERS} characters: it is kept for ever.")
    return reason
