"""Formats names, numbers and durations for display: on a terminal, in an error, in Airflow's Markdown."""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections.abc import Iterable

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_DROPPED = {"Cc", "Cf", "Cn", "Cs", "Zl", "Zp", "Zs"}
_MARKS = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` most likely means, or None. Compares at most a thousand of them."""
    by_lower = {candidate.lower(): candidate for candidate in itertools.islice(candidates, 1000)}
    match = difflib.get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.6)
    return by_lower[match[0]] if match else None


def quoted(text: str) -> str:
    """Puts ``text`` in double quotes, on one line, truncated if long."""
    printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:80])
    return f'"{printable}{"…" if len(text) > 80 else ""}"'


def visible(text: str) -> str:
    """``text`` with escapes for characters that a terminal would execute or hide: control characters except line breaks, marks that change
    the direction of writing, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(repr(char)[1:-1] if unicodedata.category(char) in _OBEYED and char not in "\n\t" else char for char in text)


def indented(text: str) -> str:
    """`visible`, with all lines but the first indented, so that none of them looks like a first one."""
    return "\n  ".join(visible(text).splitlines())


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def spreadsheet_cell(value: object) -> str:
    """The value as a CSV cell. Text that a spreadsheet would read as a formula gets an apostrophe: text that begins with a sign, even a
    full-width one, after characters that a spreadsheet or its import may drop, such as spaces and quotes."""
    text = "" if value is None else str(value)
    begins = next((char for char in text if unicodedata.category(char) not in _DROPPED and char not in "\"'"), "")
    return f"'{text}" if text[:1] in {"\t", "\r"} or unicodedata.normalize("NFKC", begins)[:1] in {"=", "+", "-", "@"} else text


def escaped(text: str) -> str:
    """The text on one line, with Markdown and HTML escaped."""
    return _MARKS.sub(r"\\\1", one_line(text))


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 record``, ``2 records``; ``many`` is a plural that is not formed with an s: ``1 row refers``, ``2 rows refer``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def first_of(texts: Iterable[str], limit: int) -> str:
    """The first ``limit`` texts, separated by commas, and the number of the others: ``a, b and 3 more``."""
    shown = list(texts)
    more = f" and {len(shown) - limit:,} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


def about(seconds: float) -> str:
    """A rounded duration, in everyday words."""
    if seconds < _MINUTE:
        return "a minute" if seconds > _MINUTE / 2 else f"{max(1, round(seconds))} s"
    if seconds < 2 * _HOUR:
        return f"{round(seconds / _MINUTE)} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.1f} days"
