"""What a transform returned, in Python's own types: the scalars of numpy, the times of pandas, members of an enum, lists in lists."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_OWN = frozenset((bool, float, Decimal, str, bytes, uuid.UUID, dt.date, dt.timedelta, type(None)))
"""`datetime` and `time` are looked at: they may have a zone, and that may have seconds."""

_MOST_BITS = 14_000
"""Python writes integers of 4,300 digits at most."""


class Misfit(ValueError):
    """A value does not fit its column. The text continues "the value ..." and does not quote it."""


def plain(value: Any) -> Any:
    """The same value as a `bool`, `int`, `float`, `Decimal`, `str`, `bytes`, `UUID`, `date`, `time`, `datetime`, `timedelta`, as a list of
    them, or as a `dict` of them with texts as keys.

    Raises `Misfit` for a value of another type, or with digits that these types have not, and RecursionError.
    """
    kind = type(value)
    if kind in _OWN:
        return value
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, Mapping):
        return _record(value)
    if kind is tuple or isinstance(value, list):
        return [plain(each) for each in value]
    if kind.__module__ == "numpy":
        return _of_numpy(value)
    for base, convert in _SUBCLASSES.items():
        if isinstance(value, base):
            return convert(value)
    raise Misfit(f"is of type {kind.__name__}")


def _record(value: Mapping[Any, Any]) -> dict[str, Any]:
    found = {_key(key): plain(each) for key, each in value.items()}
    if len(found) != len(value):
        raise Misfit("has a key twice")
    return found


def _key(key: Any) -> str:
    """As JSON writes it."""
    key = plain(key)
    if isinstance(key, bool):
        return "true" if key else "false"
    if not isinstance(key, str | int):
        raise Misfit(f"has a key of type {type(key).__name__}")
    return str(key)


def _integer(value: int) -> int | Decimal:
    """As a Decimal, if Python might refuse to write it out."""
    number = int.__int__(value)
    return number if number.bit_length() < _MOST_BITS else Decimal(number)


def _of_numpy(value: Any) -> Any:
    import numpy as np

    if type(value) is np.ndarray and value.ndim:
        return [plain(each) for each in value]
    if isinstance(value, np.float16 | np.float32):  # 0.1, not 0.10000000149011612
        return float(str(value))
    if isinstance(value, np.bool_ | np.integer | np.float64 | np.str_ | np.bytes_) and not isinstance(value, np.timedelta64):
        return value.item()
    raise Misfit(f"is of numpy's type {value.dtype}")


def _datetime(value: dt.datetime) -> dt.datetime:
    if value != value:  # of pandas
        raise Misfit("is NaT, which is not a time; null is None")
    if getattr(value, "nanosecond", 0):
        raise Misfit("has more than 6 digits after the second")
    offset = value.utcoffset()
    if offset is not None and offset.total_seconds() % 60:  # as zones had them before 1972; JSON writes minutes only
        try:
            value = value.astimezone(dt.UTC)
        except OverflowError:
            raise Misfit("is out of range") from None
    if type(value) is dt.datetime:
        return value
    time = dt.time(value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold)
    return dt.datetime.combine(_date(value), time)


def _date(value: dt.date) -> dt.date:
    return dt.date(value.year, value.month, value.day)


def _time(value: dt.time) -> dt.time:
    if value.tzinfo is not None:
        raise Misfit("is a time of day with a zone")
    return dt.time(value.hour, value.minute, value.second, value.microsecond, fold=value.fold)


def _timedelta(value: dt.timedelta) -> dt.timedelta:
    if getattr(value, "nanoseconds", 0):
        raise Misfit("has more than 6 digits after the second")
    return dt.timedelta(value.days, value.seconds, value.microseconds)


_SUBCLASSES: Mapping[type, Callable[[Any], Any]] = {
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    bytearray: bytes,
    memoryview: bytes,
    Decimal: Decimal,
    uuid.UUID: lambda value: uuid.UUID(int=value.int),
    dt.datetime: _datetime,
    dt.date: _date,
    dt.time: _time,
    dt.timedelta: _timedelta,
}
