"""The values of Arrow arrays as Python's, none of them changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemark.values.nested import places

if TYPE_CHECKING:
    import pyarrow as pa

TOO_FINE = "is out of range, or has more digits after the second than the column"


def _beyond_a_day(array: pa.Array) -> set[int]:
    """24:00 is none of Python's times either."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_time(array.type):
        return set()
    micros = array.cast(pa.time64("us"), safe=False).cast(pa.int64())
    odd = pc.or_(pc.less(micros, 0), pc.greater_equal(micros, 86_400_000_000))
    return set(pc.indices_nonzero(odd.fill_null(False)).to_pylist())


def python_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """The values as Python's, and the places of those that Python has not, with the reason."""
    import pyarrow as pa

    values: list[Any] = []
    wrong: dict[int, str] = {}
    if "time32" in str(array.type) or "time64" in str(array.type):
        wrong = dict.fromkeys(places(array, _beyond_a_day), "is not a time of a day")  # Arrow would wrap it
        array = array.take(pa.array([None if at in wrong else at for at in range(len(array))], pa.int64()))
    try:
        values = array.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError, OverflowError, pa.ArrowException):
        for at in range(len(array)):
            try:
                values += array.slice(at, 1).to_pylist(maps_as_pydicts="strict")
            except (KeyError, ValueError, OverflowError, pa.ArrowException) as error:
                wrong[at] = _UNREADABLE.get(type(error), TOO_FINE)
                values.append(None)
    if _SHORT_FLOAT.search(str(array.type)):
        values = [_with_own_digits(value, array.type) for value in values]
    return values, wrong


_UNREADABLE: Mapping[type, str] = {KeyError: "has a key twice", UnicodeDecodeError: "is not UTF-8 text"}
_SHORT_FLOAT = re.compile(r"\b(?:half)?float\b")


def _with_own_digits(value: Any, kind: pa.DataType) -> Any:
    """Each float of 32 or 16 bits as the shortest number that identifies it. As a double, 0.1 would be 0.10000000149011612."""
    import numpy as np
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return float(str(np.float32(value) if pa.types.is_float32(kind) else np.float16(value)))
    if pa.types.is_struct(kind):
        return {each.name: _with_own_digits(value[each.name], each.type) for each in kind}
    if pa.types.is_map(kind):
        return {key: _with_own_digits(each, kind.item_type) for key, each in value.items()}
    return [_with_own_digits(each, kind.value_type) for each in value] if isinstance(value, list) else value
