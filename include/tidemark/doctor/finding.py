"""A result of an examination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tidemark.errors import TidemarkError


class Level(StrEnum):
    OK = "OK"
    WARNING = "WARNING"
    """Runs work now, but records, time or a secret may be lost later."""
    FAILURE = "FAILURE"
    """Runs fail, or will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject``: the object of the check, such as ``postgres clock``. ``fix``: what to do; empty for OK."""

    level: Level
    subject: str
    found: str
    fix: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.WARNING, subject, found, fix)


def failure(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.FAILURE, subject, found, fix)


def attempted(subject: str, examine: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yields an examination's findings. An error that ends it becomes the last finding; its text includes the fix."""
    try:
        yield from examine()
    except TidemarkError as error:
        yield failure(subject, str(error), "")
