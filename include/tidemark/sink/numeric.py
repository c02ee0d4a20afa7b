"""Postgres' ``numeric`` from text: any number of digits, NaN and Infinity. Arrow's decimals end at 38 or 76 digits.

The binary form is that of ``numeric_send``: the number of digits to the base 10,000, the weight of the first one, the sign, the number of
decimal digits after the point, then the digits.
"""

from __future__ import annotations

import functools
import re
import struct
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MOST_BEFORE, MOST_AFTER = 131_072, 16_383
"""Decimal digits before and after the point."""
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
_SPECIAL = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
_BASE, _GROUP = 10_000, 4
_SHORT = r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$"
_SHORT_LENGTH = 16
"""Numbers of at most so many characters are encoded together: with up to three zeros more, they fit 64 bits."""


class NotNumeric(ValueError):
    """The column cannot hold the number. The text says why and does not quote it."""


def number_of(text: str) -> Decimal:
    """Raises `NotNumeric` for text that is not a number as Postgres writes it."""
    if NUMBER.fullmatch(text):
        return Decimal(text)
    sign, word = ("-", text[1:]) if text[:1] == "-" else ("", text.removeprefix("+"))
    if (known := _WORDS.get(word.lower())) is None:
        raise NotNumeric("is not a number")
    return Decimal(known if known == "NaN" else sign + known)


def require_fits(number: Decimal, postgres: str) -> None:
    """Raises `NotNumeric` unless a column of the type, ``numeric`` or ``numeric(10,2)``, holds exactly this number.

    The work does not depend on the exponent.
    """
    _, digits, exponent = number.as_tuple()
    precision, scale = limits(postgres)
    if not isinstance(exponent, int):
        if exponent == "F" and precision is not None:
            raise NotNumeric("is infinite")
        if exponent == "N":
            raise NotNumeric("is a signaling NaN")
        return
    zeros = next((at for at, digit in enumerate(reversed(digits)) if digit), None)
    if zeros is None:  # zero
        if -exponent > MOST_AFTER:
            raise NotNumeric(f"has more than {MOST_AFTER:,} digits after the point")
        return
    lowest = exponent + zeros if precision is not None else min(exponent, 0)
    most_after = MOST_AFTER if precision is None else scale
    if -lowest > most_after:
        wanted = f"has more than {most_after:,} digits after the point" if most_after >= 0 else f"is not a multiple of 10^{-most_after}"
        raise NotNumeric(wanted)
    most_before = MOST_BEFORE if precision is None else precision - scale
    if number.adjusted() >= most_before:
        raise NotNumeric(f"has more than {most_before:,} digits before the point" if most_before > 0 else f"is not below 10^{most_before}")


def shown(number: Decimal, postgres: str) -> str:
    """A number that fits, with the digits after the point that the column shows."""
    precision, scale = limits(postgres)
    if precision is None or not number.is_finite():
        return str(number)
    with localcontext() as context:
        context.prec = MOST_BEFORE + MOST_AFTER
        return f"{number.quantize(Decimal(1).scaleb(-max(scale, 0))):f}"


@functools.lru_cache(maxsize=1024)
def limits(postgres: str) -> tuple[int | None, int]:
    """Precision and scale: ``numeric(10,2)`` -> ``(10, 2)``; ``(None, 0)`` for a column without limits."""
    found = re.search(r"\((\d+),(-?\d+)\)", postgres)
    return (int(found[1]), int(found[2])) if found else (None, 0)


def encoded(texts: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """The numbers in Postgres' binary form, and the places of texts that the column cannot hold, which are null, with the reason."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    short = pc.and_(pc.less_equal(pc.binary_length(texts), _SHORT_LENGTH), pc.match_substring_regex(texts, _SHORT)).fill_null(False)
    places = short.to_numpy(zero_copy_only=False).nonzero()[0]
    wrong: dict[int, str] = {}
    if not len(places):
        found, place_of = pa.array([], pa.binary()), np.full(len(texts), -1)
    else:
        chosen = texts.filter(short)
        point = pc.find_substring(chosen, ".").to_numpy().astype(np.int64)
        scale = np.where(point < 0, 0, pc.binary_length(chosen).to_numpy() - point - 1)
        unscaled = pc.replace_substring(chosen, ".", "").cast(pa.int64()).to_numpy()
        fits = _fit(unscaled, scale, *limits(postgres))
        found = _short(unscaled[fits], scale[fits])
        place_of = np.full(len(texts), -1)
        place_of[places[fits]] = np.arange(len(found))
    others: list[bytes] = []
    for at in np.flatnonzero((place_of < 0) & texts.is_valid().to_numpy(zero_copy_only=False)).tolist():
        try:
            others.append(_encoded(texts[at].as_py(), postgres))
            place_of[at] = len(found) + len(others) - 1
        except NotNumeric as error:
            wrong[at] = str(error)
    if others:
        found = pa.concat_arrays([found, pa.array(others, pa.binary())])
    return found.take(pa.array(place_of, mask=place_of < 0)), wrong


def _fit(unscaled: np.ndarray, scale: np.ndarray, precision: int | None, most: int) -> np.ndarray:
    """Whether short numbers surely fit. The others are looked at one by one."""
    import numpy as np

    if precision is None:
        return np.ones(len(unscaled), bool)
    fits: np.ndarray = (scale <= most) & (np.abs(unscaled) < 10 ** np.clip(precision - most + scale, 0, 18))
    return fits


def _short(unscaled: np.ndarray, scale: np.ndarray) -> pa.Array:
    """Many numbers at once, as a table of 18 bytes a row of which the header and the digits between the first and the last are taken."""
    import numpy as np
    import pyarrow as pa

    after = -(-scale // _GROUP)
    left = np.abs(unscaled) * 10 ** (after * _GROUP - scale)
    groups = np.empty((len(left), 5), ">u2")
    for at in range(4, -1, -1):
        left, groups[:, at] = np.divmod(left, _BASE)
    used = groups != 0
    some = used.any(axis=1)
    first, last = used.argmax(axis=1), 4 - used[:, ::-1].argmax(axis=1)
    count = np.where(some, last - first + 1, 0)
    table = np.zeros((len(left), 9), ">u2")
    table[:, 0], table[:, 1] = count, np.where(some, 4 - first - after, 0).astype(">i2").view(">u2")
    table[:, 2], table[:, 3], table[:, 4:] = np.where(unscaled < 0, 0x4000, 0), scale, groups
    taken = np.ones((len(left), 9), bool)
    position = np.arange(5)
    taken[:, 4:] = some[:, None] & (position >= first[:, None]) & (position <= last[:, None])
    ends = np.zeros(len(left) + 1, np.int32)
    np.cumsum(8 + 2 * count, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(left), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(table[taken].tobytes())])


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
    kept = groups[first : last + 1]
    return struct.pack(f">HhHH{len(kept)}H", len(kept), weight - first, 0x4000 if sign else 0, min(shown, MOST_AFTER), *kept)


NUMERIC_OID = 1700


def encoded_lists(lists: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """Like `encoded`, for lists of texts and a column of the type ``numeric[]``, in the form of ``array_send``."""
    import pyarrow as pa

    items, wrong_items = encoded(lists.flatten(), postgres.removesuffix("[]"))
    values: list[bytes | None] = items.to_pylist()
    made: list[bytes | None] = []
    wrong: dict[int, str] = {}
    start = 0
    for at, length in enumerate(_lengths(lists)):
        if length is None:
            made.append(None)
            continue
        bad = next((wrong_items[place] for place in range(start, start + length) if place in wrong_items), None)
        if bad is not None:
            wrong[at] = bad
        made.append(None if bad is not None else _array(values[start : start + length]))
        start += length
    return pa.array(made, pa.binary()), wrong


def _lengths(lists: pa.Array) -> list[int | None]:
    import pyarrow.compute as pc

    found: list[int | None] = pc.list_value_length(lists).to_pylist()
    return found


def _array(values: list[bytes | None]) -> bytes:
    if not values:
        return struct.pack(">iiI", 0, 0, NUMERIC_OID)
    head = struct.pack(">iiIii", 1, int(None in values), NUMERIC_OID, len(values), 1)
    return head + b"".join(struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value for value in values)
