"""Converts a transform's values to plain Python types: numpy scalars, pandas times, members of an enum, nested lists."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from tidemark.formats.connect import Misfit

_PLAIN = frozenset((bool, float, Decimal, str, bytes, uuid.UUID, dt.date, dt.timedelta, type(None)))
"""Without `datetime` and `time`, which may have a zone, whose offset may have seconds."""

_MAX_BITS = 14_000
"""Python writes integers of 4,300 digits at most."""


def plain(value: Any) -> Any:
    """The same value as a `bool`, `int`, `float`, `Decimal`, `str`, `bytes`, `UUID`, `date`, `time`, `datetime`, `timedelta`, as a list of
    them, or as a `dict` of them with texts as keys.

    Raises `Misfit` for a value of another type, or with digits that these types cannot hold, and RecursionError.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, Mapping):
        return _record(value)
    if kind is tuple or isinstance(value, list):
        return [plain(item) for item in value]
    if kind.__module__ == "numpy":
        return _from_numpy(value)
    for base, convert in _SUBCLASSES.items():
        if isinstance(value, base):
            return convert(value)
    raise Misfit(f"is of type {kind.__name__}")


def _record(value: Mapping[Any, Any]) -> dict[str, Any]:
    record = {_key(key): plain(item) for key, item in value.items()}
    if len(record) != len(value):
        raise Misfit("has a key twice")
    return record


def _key(key: Any) -> str:
    """The key as JSON writes it."""
    key = plain(key)
    if isinstance(key, bool):
        return "true" if key else "false"
    if not isinstance(key, str | int):
        raise Misfit(f"has a key of type {type(key).__name__}")
    return str(key)


def _integer(value: int) -> int | Decimal:
    """The number; a Decimal if it may exceed Python's limit of digits in text."""
    number = int.__int__(value)
    return number if number.bit_length() < _MAX_BITS else Decimal(number)


def _from_numpy(value: Any) -> Any:
    import numpy as np

    if type(value) is np.ndarray and value.ndim:
        return [plain(item) for item in value]
    if isinstance(value, np.float16 | np.float32):  # 0.1, not 0.10000000149011612
        return float(str(value))
    if isinstance(value, np.bool_ | np.integer | np.float64 | np.str_ | np.bytes_) and not isinstance(value, np.timedelta64):
        return value.item()
    raise Misfit(f"is of numpy's type {value.dtype}")


def _datetime(value: dt.datetime) -> dt.datetime:
    if value != value:  # NaT of pandas
        raise Misfit("is NaT, which is not a time; null is None")
    if getattr(value, "nanosecond", 0):
        raise Misfit("has more than 6 digits after the second")
    offset = value.utcoffset()
    if offset is not None and offset.total_seconds() % 60:  # zones before 1972 have seconds, and JSON only minutes
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
