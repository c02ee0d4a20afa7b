"""Problems of a consumer's file: one `Problem` per place, and one `SpecInvalid` for all problems of a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemark import project
from tidemark.errors import BadInput, Refused
from tidemark.text.wording import counted, nearest, quoted

KeyPath = tuple[str | int, ...]
"""The path to a value in the file: ``("retry", "delays", 2)`` is ``retry.delays[2]``."""

SECRET = re.compile(r"(?i)password|secret|token")
"""Keys whose values do not belong in a file and are never printed."""

_SECRET_VALUE = re.compile(r"(?i)((?:password|secret|token)[^\s:=]{0,100}\s{0,100}[:=]\s*)(.*)")
MAX_PROBLEMS = 100
"""The maximum number of problems of each kind that are explained for a file."""
_LINE_LIMIT = 150  # characters shown of the user's line; longer lines are cut around the problem
_BEFORE_PLACE = 60  # characters shown before the problem


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and its place.

    ``line`` and ``column`` count from 1, in characters. ``length`` is the number of wrong characters, or 0 if no text is wrong. ``fix``
    says what to write instead; it is empty if the message already does ("did you mean ...").
    """

    file: Path
    line: int
    column: int
    length: int
    key: str
    message: str
    fix: str
    text: str
    """The line, with the values of secret keys masked."""

    def __str__(self) -> str:
        head = f"{shown(self.file)}:{self.line}:{self.column}: {self.message}"
        if not self.fix:
            return head
        if not self.length:
            return f"{head}\n      | {self.fix}"
        text, column = _around(self.text, self.column)
        length = max(1, min(self.length, len(text) - column + 1))
        return f"{head}\n{self.line:>5} | {text}\n      | {' ' * (column - 1)}{'^' * length} {self.fix}"


class SpecInvalid(Refused):
    """Consumers were not loaded because their files have problems."""

    consumers: tuple[str, ...]
    """The consumers that were not loaded. A file whose only problem is an ``access`` without effect is still loaded."""
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """The first consumer's name: the only one if one file was read."""
        return self.consumers[0]

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        if not self.consumers:
            return "\n".join([*map(str, self.problems), count])
        verb = "was" if len(self.consumers) == 1 else "were"
        return "\n".join([*map(str, self.problems), f"{count}; {', '.join(self.consumers)} {verb} not loaded"])


class UnknownConsumer(Refused):
    """No file declares this consumer."""

    consumer: str
    folder: Path
    existing: tuple[str, ...]

    def __str__(self) -> str:
        near = nearest(self.consumer, self.existing)
        hint = f'; did you mean "{near}"?' if near else "."
        names = f"It has: {', '.join(self.existing)}." if self.existing else "It has no consumer yet."
        return f'there is no consumer "{self.consumer}" in {shown(self.folder)}{hint} {names}'


def key_text(path: KeyPath) -> str:
    """A path as text: ``retry.delays[2]``, ``spark.conf["spark.executor.memory"]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"\w+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{quoted(part)}]"
    return text


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at a path in the file's data; None if there is none."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def masked(line: str) -> str:
    """Makes ``line`` safe to show: secrets become asterisks, and each character, including a tab, takes one column."""
    clean = "".join(char if char.isprintable() else " " for char in line)
    return _SECRET_VALUE.sub(lambda match: match[1] + "*" * len(match[2]), clean)


def shown(path: Path) -> str:
    """``path``, relative to the project's folder if it lies there."""
    try:
        return str(path.resolve().relative_to(project.root()))
    except (ValueError, OSError):
        return str(path)


def read_utf8(path: Path, *, what: str, fix: str) -> str:
    """Reads a file that a user named on the command line. Raises `BadInput` if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(what=what, found=f"{shown(path)} is not UTF-8 text", fix="Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        problem = f"{shown(path)} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise BadInput(what=what, found=problem, fix=fix) from None


def _around(text: str, column: int) -> tuple[str, int]:
    """Cuts a line to `_LINE_LIMIT` characters around a column. Returns the part, and the column within it."""
    if len(text) <= _LINE_LIMIT:
        return text, column
    start = max(0, column - 1 - _BEFORE_PLACE)
    cut = text[start : start + _LINE_LIMIT]
    return ("…" + cut[1:] if start else cut), column - start
