"""Encodes text as Postgres' ``numeric``: any number of digits, NaN and Infinity. Arrow's decimals end at 38 or 76 digits.

The binary form is that of ``numeric_send``: number of base-10,000 digits, weight of the first one, sign, number of decimal digits after the
point, then the digits.
"""

from __future__ import annotations

import functools
import re
import struct
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING

from tidemark.formats.connect import Misfit

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MOST_BEFORE, MOST_AFTER = 131_072, 16_383
"""Maximum decimal digits before and after the point."""
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
_SPECIAL = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
_BASE, _GROUP = 10_000, 4
_SHORT = r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$"
_SHORT_LENGTH = 16
"""Numbers up to this length are encoded together: even with three more zeros, they fit 64 bits."""


def number_of(text: str) -> Decimal:
    """Parses a number in Postgres' notation. Raises `Misfit`."""
    if NUMBER.fullmatch(text):
        return Decimal(text)
    sign, word = ("-", text[1:]) if text[:1] == "-" else ("", text.removeprefix("+"))
    if (special := _WORDS.get(word.lower())) is None:
        raise Misfit("is not a number")
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


def encoded(texts: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """Returns the numbers in Postgres' binary form, null where the column cannot hold them, and the reasons by index."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    short = pc.and_(pc.less_equal(pc.binary_length(texts), _SHORT_LENGTH), pc.match_substring_regex(texts, _SHORT)).fill_null(False)
    indexes = short.to_numpy(zero_copy_only=False).nonzero()[0]
    reasons: dict[int, str] = {}
    if not len(indexes):
        values, value_at = pa.array([], pa.binary()), np.full(len(texts), -1)
    else:
        short_texts = texts.filter(short)
        point = pc.find_substring(short_texts, ".").to_numpy().astype(np.int64)
        scale = np.where(point < 0, 0, pc.binary_length(short_texts).to_numpy() - point - 1)
        unscaled = pc.replace_substring(short_texts, ".", "").cast(pa.int64()).to_numpy()
        fits = _fit(unscaled, scale, *limits(postgres))
        values = _short(unscaled[fits], scale[fits])
        value_at = np.full(len(texts), -1)
        value_at[indexes[fits]] = np.arange(len(values))
    others: list[bytes] = []
    for at in np.flatnonzero((value_at < 0) & texts.is_valid().to_numpy(zero_copy_only=False)).tolist():
        try:
            others.append(_encoded(texts[at].as_py(), postgres))
            value_at[at] = len(values) + len(others) - 1
        except Misfit as error:
            reasons[at] = str(error)
    if others:
        values = pa.concat_arrays([values, pa.array(others, pa.binary())])
    return values.take(pa.array(value_at, mask=value_at < 0)), reasons


def _fit(unscaled: np.ndarray, scale: np.ndarray, precision: int | None, most: int) -> np.ndarray:
    """Returns a mask of short numbers that certainly fit. The others are checked one by one."""
    import numpy as np

    if precision is None:
        return np.ones(len(unscaled), bool)
    fits: np.ndarray = (scale <= most) & (np.abs(unscaled) < 10 ** np.clip(precision - most + scale, 0, 18))
    return fits


def _short(unscaled: np.ndarray, scale: np.ndarray) -> pa.Array:
    """Encodes many numbers at once, in a table of 18 bytes a row, of which the header and the significant digits are used."""
    import numpy as np
    import pyarrow as pa

    after = -(-scale // _GROUP)
    remaining = np.abs(unscaled) * 10 ** (after * _GROUP - scale)
    groups = np.empty((len(remaining), 5), ">u2")
    for at in range(4, -1, -1):
        remaining, groups[:, at] = np.divmod(remaining, _BASE)
    used = groups != 0
    nonzero = used.any(axis=1)
    first, last = used.argmax(axis=1), 4 - used[:, ::-1].argmax(axis=1)
    count = np.where(nonzero, last - first + 1, 0)
    table = np.zeros((len(remaining), 9), ">u2")
    table[:, 0], table[:, 1] = count, np.where(nonzero, 4 - first - after, 0).astype(">i2").view(">u2")
    table[:, 2], table[:, 3], table[:, 4:] = np.where(unscaled < 0, 0x4000, 0), scale, groups
    taken = np.ones((len(remaining), 9), bool)
    position = np.arange(5)
    taken[:, 4:] = nonzero[:, None] & (position >= first[:, None]) & (position <= last[:, None])
    ends = np.zeros(len(remaining) + 1, np.int32)
    np.cumsum(8 + 2 * count, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(remaining), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(table[taken].tobytes())])


def _encoded(text: str, postgres: str) -> bytes:
    number = number_of(text)
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


NUMERIC_OID = 1700


def encoded_lists(lists: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """Like `encoded`, for lists of texts and a column of the type ``numeric[]``, in the form of ``array_send``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    items, item_reasons = encoded(lists.flatten(), postgres.removesuffix("[]"))
    values: list[bytes | None] = items.to_pylist()
    encoded_values: list[bytes | None] = []
    reasons: dict[int, str] = {}
    start = 0
    for at, length in enumerate(pc.list_value_length(lists).to_pylist()):
        if length is None:
            encoded_values.append(None)
            continue
        reason = next((item_reasons[index] for index in range(start, start + length) if index in item_reasons), None)
        if reason is not None:
            reasons[at] = reason
        encoded_values.append(None if reason is not None else _array(values[start : start + length]))
        start += length
    return pa.array(encoded_values, pa.binary()), reasons


def _array(values: list[bytes | None]) -> bytes:
    if not values:
        return struct.pack(">iiI", 0, 0, NUMERIC_OID)
    head = struct.pack(">iiIii", 1, int(None in values), NUMERIC_OID, len(values), 1)
    return head + b"".join(struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value for value in values)
