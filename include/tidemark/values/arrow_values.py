"""Values of Arrow arrays: searches nested ones at any depth, and converts them to Python without loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tidemark.sink.types import parents

if TYPE_CHECKING:
    import pyarrow as pa

TOO_FINE = "is out of range, or has more digits after the second than the column"


def places(array: pa.Array, test: Callable[[pa.Array], set[int]]) -> set[int]:
    """The indexes of values for which ``test`` matches, or matches anything nested in them. ``test`` gets arrays of any type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        return places(array.dictionary_decode(), test)
    if pa.types.is_map(kind):
        return places(array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))), test)
    own = test(array)
    if pa.types.is_struct(kind):
        return own.union(*(places(pc.struct_field(array, [number]), test) for number in range(kind.num_fields)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return own | set(parents(array)[[*places(array.flatten(), test)]].tolist())
    return own


def _beyond_a_day(array: pa.Array) -> set[int]:
    """Indexes of times outside a day. Python does not have 24:00 either."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_time(array.type):
        return set()
    micros = array.cast(pa.time64("us"), safe=False).cast(pa.int64())
    odd = pc.or_(pc.less(micros, 0), pc.greater_equal(micros, 86_400_000_000))
    return set(pc.indices_nonzero(odd.fill_null(False)).to_pylist())


def python_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Python values, and the reason for each that Python cannot represent, by index."""
    import pyarrow as pa

    values: list[Any] = []
    unreadable: dict[int, str] = {}
    if "time32" in str(array.type) or "time64" in str(array.type):
        unreadable = dict.fromkeys(places(array, _beyond_a_day), "is not a time of a day")  # Arrow would wrap it
        array = array.take(pa.array([None if at in unreadable else at for at in range(len(array))], pa.int64()))
    try:
        values = array.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError, OverflowError, pa.ArrowException):
        for at in range(len(array)):
            try:
                values += array.slice(at, 1).to_pylist(maps_as_pydicts="strict")
            except (KeyError, ValueError, OverflowError, pa.ArrowException) as error:
                unreadable[at] = _UNREADABLE.get(type(error), TOO_FINE)
                values.append(None)
    if _SHORT_FLOAT.search(str(array.type)):
        values = [_with_own_digits(value, array.type) for value in values]
    return values, unreadable


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
        return {child.name: _with_own_digits(value[child.name], child.type) for child in kind}
    if pa.types.is_map(kind):
        return {key: _with_own_digits(item, kind.item_type) for key, item in value.items()}
    return [_with_own_digits(item, kind.value_type) for item in value] if isinstance(value, list) else value
