"""Converts values to the types of a table's columns, where nothing is lost: Python's for the function form, decoded ones for consumers
without code. A value that does not fit concerns its record only."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Callable
from datetime import datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from tidemark.sink.types import arrow_type, base_of, conform, fits

if TYPE_CHECKING:
    import pyarrow as pa


class Misfit(ValueError):
    """Arrow would change a value silently. The text says why, and does not quote the value."""


FLOAT32_MAX = (2 - 2**-24) * 2.0**127
"""Greater values would become infinite in a ``real`` column."""
_DIGITS = 40  # of a number; writing one with millions of them out takes minutes
_RESCALED = 38
"""How many digits after the point Arrow removes from a decimal if they are 0. Of more, it may make 0 of the whole value."""
_TEXT = ("text", "character varying", "character")
_JSON = ("json", "jsonb")
_ENCODER = msgspec.json.Encoder(decimal_format="number", enc_hook=lambda value: base64.b64encode(value).decode())


def converts(source: pa.DataType, postgres: str) -> bool:
    """Whether values of this type can be converted to a column of this type, as ``format_type`` spells it."""
    import pyarrow as pa

    target = arrow_type(postgres)
    if target is None:
        return False
    if fits(source, postgres) or base_of(postgres) in _JSON or (base_of(postgres) in _TEXT and pa.types.is_nested(source)):
        return True
    if pa.types.is_floating(source) and not pa.types.is_floating(target) and base_of(postgres) not in _TEXT:
        return False  # would be rounded
    if pa.types.is_timestamp(source) and pa.types.is_timestamp(target):
        return False  # one has a time zone, the other has not
    if pa.types.is_temporal(target) and pa.types.is_integer(source):
        return _is_moment(target) and source.bit_width == 64
    if pa.types.is_boolean(target) or pa.types.is_binary(target) or (pa.types.is_boolean(source) and base_of(postgres) not in _TEXT):
        return False
    try:
        pa.array([], source).cast(target)
    except pa.ArrowException:
        return False
    return True


def as_column(array: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """The values for a column of this type, and the places of those that do not fit it, which are null, with the reason. Requires
    `converts`."""
    import pyarrow as pa

    try:
        return _converted(array, postgres), {}
    except pa.ArrowException:
        pass
    parts, wrong = [], {}
    for at in range(len(array)):
        try:
            parts.append(_converted(array.slice(at, 1), postgres))
        except pa.ArrowException:
            wrong[at] = f"is a {array.type}"
            parts.append(pa.nulls(1, arrow_type(postgres)))
    return pa.concat_arrays([part.cast(arrow_type(postgres)) for part in parts]), wrong


def _converted(array: pa.Array, postgres: str) -> pa.Array:
    import pyarrow as pa

    target = arrow_type(postgres)
    assert target is not None
    source, base = array.type, base_of(postgres)
    if fits(source, postgres):
        return conform(array, postgres)
    if base in _JSON or (pa.types.is_nested(source) and base in _TEXT):
        return pa.array([None if value is None else json_text(value) for value in array.to_pylist(maps_as_pydicts="lossy")], pa.string())
    if pa.types.is_integer(source) and pa.types.is_timestamp(target):
        return array.cast(pa.timestamp("ms", target.tz)).cast(target)
    return array.cast(target)


def json_text(value: Any) -> str:
    """A decoded value as JSON: bytes in base64, times in ISO 8601, decimals as numbers."""
    return _ENCODER.encode(value).decode()


def _is_moment(target: pa.DataType) -> bool:
    """Whether this is a timestamp with time zone, which a number of milliseconds since 1970 can be."""
    import pyarrow as pa

    return bool(pa.types.is_timestamp(target) and target.tz)


def from_python(values: list[Any], postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """`column_of` the values, and the places of those that do not fit, which are null, with the reason."""
    import pyarrow as pa

    misfits = (pa.ArrowException, TypeError, ValueError, OverflowError)
    with contextlib.suppress(*misfits):
        return column_of(values, postgres), {}
    wrong: dict[int, str] = {}
    for at, value in enumerate(values):
        try:
            column_of([value], postgres)
        except misfits as error:
            wrong[at] = str(error) if isinstance(error, Misfit) else f"is of type {type(value).__name__}"
    return column_of([None if at in wrong else value for at, value in enumerate(values)], postgres), wrong


def column_of(values: list[Any], postgres: str) -> pa.Array:
    """Python values as the column's Arrow type. JSON columns take any value, numeric columns what ``Decimal`` holds exactly."""
    import pyarrow as pa

    target = arrow_type(postgres)
    assert target is not None
    if postgres in ("json", "jsonb"):
        values = [value if value is None or isinstance(value, str) else json.dumps(value, allow_nan=False) for value in values]
    elif postgres == "uuid":
        return conform(pa.array([None if value is None else str(value) for value in values], pa.string()), postgres)
    else:
        _check_exact(values, target)
    return pa.array(values, target)


def _check_exact(values: list[Any], target: pa.DataType) -> None:
    """Refuses values that Arrow would change silently: it truncates fractions, reads naive times as UTC and numbers as times, and turns
    some decimals with many more digits after the point than the type has into 0."""
    import pyarrow as pa

    if pa.types.is_list(target):
        _refuse(values, lambda value: isinstance(value, str | bytes), "is text, not a list")
        _check_exact([each for value in values if isinstance(value, list | tuple) for each in value], target.value_type)
    elif pa.types.is_temporal(target):
        _refuse(values, lambda value: isinstance(value, int | float), "is a number")
    if pa.types.is_timestamp(target):
        aware = target.tz is not None
        _refuse(
            values,
            lambda value: isinstance(value, datetime) and (value.tzinfo is not None) is not aware,
            "has no time zone" if aware else "has a time zone",
        )
    elif pa.types.is_date(target):
        _refuse(values, lambda value: isinstance(value, datetime), "has a time of day")
    elif pa.types.is_time(target):
        _refuse(values, lambda value: isinstance(value, time) and value.tzinfo is not None, "has a time zone")
    elif pa.types.is_integer(target):
        _refuse(values, lambda value: isinstance(value, Decimal) and value.is_finite() and value.adjusted() > _DIGITS, "is out of range")
        _refuse(values, lambda value: isinstance(value, float | Decimal) and value != int(value), "is not a whole number")
    elif pa.types.is_decimal(target):
        most = target.scale + _RESCALED
        _refuse(values, lambda value: isinstance(value, Decimal) and _scale(value) > most, "has too many digits after the point")
    elif pa.types.is_float32(target):
        _refuse(values, lambda value: isinstance(value, int | float) and FLOAT32_MAX < abs(value) < math.inf, "is out of range")


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _refuse(values: list[Any], wrong: Callable[[Any], bool], why: str) -> None:
    for value in values:
        if wrong(value):
            raise Misfit(why)
