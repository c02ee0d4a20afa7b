"""Postgres' ``numeric``: any number of digits, NaN and Infinity. Arrow's decimals end at 38 or 76 digits.

The binary form is that of ``numeric_send``: number of base-10,000 digits, weight of the first one, sign, number of decimal digits after the
point, then the digits.
"""

from __future__ import annotations

import functools
import re
import struct
from decimal import Decimal, localcontext

from tidemark.formats.connect import Misfit

MOST_BEFORE, MOST_AFTER = 131_072, 16_383
"""Maximum decimal digits before and after the point."""
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
_SPECIAL = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
_GROUP = 4


def number_of(text: str) -> Decimal:
    """Parses a number in Postgres' notation. Raises `Misfit`."""
    if NUMBER.fullmatch(text):
        return Decimal(text)
    sign, word = ("-", text[1:]) if text[:1] == "-" else ("", text.removeprefix("+"))
    if (special := _WORDS.get(word.lower())) is None:
        raise Misfit("is text that is not a number")
    return Decimal(special if special == "NaN" else sign + special)


def require_fits(number: Decimal, postgres: str) -> None:
    """Raises `Misfit` unless a column of the type, ``numeric`` or ``numeric(10,2)``, holds exactly this number.

    The cost does not depend on the exponent.
    """
    _, digits, exponent = number.as_tuple()
    precision, scale = limits(postgres)
    if not isinstance(exponent, int):
        if exponent == "F" and precision is not None:
            raise Misfit("is infinite")
        if exponent == "N":
            raise Misfit("is a signaling NaN")
        return
    zeros = next((at for at, digit in enumerate(reversed(digits)) if digit), None)
    if zeros is None:  # zero
        if -exponent > MOST_AFTER:
            raise Misfit(f"has more than {MOST_AFTER:,} digits after the point")
        return
    lowest = exponent + zeros if precision is not None else min(exponent, 0)
    most_after = MOST_AFTER if precision is None else scale
    if -lowest > most_after:
        problem = f"has more than {most_after:,} digits after the point" if most_after >= 0 else f"is not a multiple of 10^{-most_after}"
        raise Misfit(problem)
    most_before = MOST_BEFORE if precision is None else precision - scale
    if number.adjusted() >= most_before:
        raise Misfit(f"has more than {most_before:,} digits before the point" if most_before > 0 else f"is not below 10^{most_before}")


def shown(number: Decimal, postgres: str) -> str:
    """Formats a number that fits, with as many digits after the point as the column has."""
    precision, scale = limits(postgres)
    if precision is None or not number.is_finite():
        return str(number)
    with localcontext() as context:
        context.prec = MOST_BEFORE + MOST_AFTER
        return f"{number.quantize(Decimal(1).scaleb(-max(scale, 0))):f}"


@functools.lru_cache(maxsize=1024)
def limits(postgres: str) -> tuple[int | None, int]:
    """Returns precision and scale: ``numeric(10,2)`` -> ``(10, 2)``; ``(None, 0)`` for a column without limits."""
    modifier = re.search(r"\((\d+),(-?\d+)\)", postgres)
    return (int(modifier[1]), int(modifier[2])) if modifier else (None, 0)


def encoded(value: bytes | Decimal, postgres: str) -> bytes:
    """Returns a number, or the text of one, in Postgres' binary form. Raises `Misfit` for a text that the column cannot hold."""
    number = value if isinstance(value, Decimal) else number_of(value.decode(errors="replace"))
    if not isinstance(value, Decimal):
        require_fits(number, postgres)
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        return struct.pack(">HhHH", 0, 0, _SPECIAL[str(number)], 0)
    shown = max(0, -exponent)
    if not any(digits):
        return struct.pack(">HhHH", 0, 0, 0, min(shown, MOST_AFTER))
    low = exponent % _GROUP
    whole = "".join(map(str, digits)) + "0" * low
    whole = whole.zfill(-(-len(whole) // _GROUP) * _GROUP)
    groups = [int(whole[at : at + _GROUP]) for at in range(0, len(whole), _GROUP)]
    weight = len(groups) - 1 + (exponent - low) // _GROUP
    first = next(at for at, group in enumerate(groups) if group)
    last = next(at for at in range(len(groups) - 1, -1, -1) if groups[at])
    significant = groups[first : last + 1]
    return struct.pack(
        f">HhHH{len(significant)}H", len(significant), weight - first, 0x4000 if sign else 0, min(shown, MOST_AFTER), *significant
    )
