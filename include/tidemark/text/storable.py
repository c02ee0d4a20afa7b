"""Checks that a Postgres column can hold a value, where it enters: in a file, a form, an option or a request."""

from __future__ import annotations

from tidemark.errors import BadInput

INTEGER, BIGINT = 2**31 - 1, 2**63 - 1
"""The largest numbers."""


def require_storable(what: str, value: str | int | None, most: int = BIGINT) -> None:
    """Raises `BadInput` for a negative number or one above ``most``, and for text with NUL or a lone surrogate."""
    if isinstance(value, int):
        if not 0 <= value <= most:
            raise BadInput(what=what, found=f"{value} is out of range", fix=f"Write a number from 0 to {most}.")
    elif value is not None and not is_storable(value):
        raise BadInput(what=what, found="the text has a character that Postgres cannot store", fix="Remove NUL and surrogate characters.")


def is_storable(text: str) -> bool:
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)
