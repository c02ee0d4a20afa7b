"""Collects all problems of an operator's input and reports them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidemark.errors import BadInput, Refused
from tidemark.text.storable import require_storable
from tidemark.text.wording import counted, quoted

T = TypeVar("T")

REASON_CHARACTERS = 10
"""Minimum length of a reason."""


class SeveralProblems(Refused):
    """The input has several problems, with one text for each."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, f"{len(self.problems)} problems; nothing was planned"])


@dataclass
class Problems:
    """Collects refusals, so that all of them can be raised at once."""

    found: list[Refused] = field(default_factory=list)

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Returns the result of ``call``. If that raises `Refused`, stores the error and returns `None`."""
        try:
            return call()
        except Refused as error:
            self.found.append(error)
        return None

    def add(self, what: str, found: str, fix: str) -> None:
        self.found.append(BadInput(what=what, found=found, fix=fix))

    def end(self) -> None:
        """Raises the collected problems, if any."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            texts = [error.problems if isinstance(error, SeveralProblems) else (str(error),) for error in self.found]
            raise SeveralProblems(problems=tuple(text for several in texts for text in several))


def only(found: Sequence[T], what: str, number: int, command: str) -> T:
    """Returns what was read by its number. Raises `BadInput` if nothing was; ``command`` lists all that there are."""
    if not found:
        raise BadInput(what=what, found=f"there is no {what} {number} in this database", fix=f"List them with: {command}")
    return found[0]


def check_reason(text: str | None) -> str:
    """The reason with normalized whitespace. Raises `BadInput` if it is too short or cannot be stored."""
    reason = " ".join((text or "").split())
    require_storable("reason", reason)
    if len(reason) < REASON_CHARACTERS:
        problem = f"{quoted(reason)} has {counted(len(reason), 'character')}" if reason else "it is missing"
        raise BadInput(what="reason", found=problem, fix=f"Say why in at least {REASON_CHARACTERS} characters; it is kept permanently.")
    return reason
