"""How much memory decoding takes: data of a few bytes can stand for items whose columns take thousands each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemark.formats.schema import Node

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

CHUNK_BYTES = 64 << 20
"""Of the data that is decoded at once."""
RECORD_BYTES = 1 << 30
"""Of one record."""
_PER_FIELD = 16
"""Bytes of a value, or of where it begins and ends, and whether it is null."""

Cost = Callable[["pa.Array"], "np.ndarray"]
"""The bytes that each datum takes at most."""


def cost_of_avro(node: Node) -> Cost:
    return _cost(_width(node), _growth(node))


def cost_of_arrow(kind: pa.DataType) -> Cost:
    """For Protobuf, whose empty messages in a list take two bytes."""
    return _cost(_arrow_width(kind), _arrow_growth(kind))


def _cost(width: int, growth: float) -> Cost:
    import pyarrow.compute as pc

    return lambda data: width + pc.binary_length(data).to_numpy(zero_copy_only=False) * growth


def _width(node: Node) -> int:
    """Bytes of a row, without the items of arrays and maps."""
    if node.kind == "fixed":
        return int(node.details.get("size", 0))
    return _PER_FIELD + sum(map(_width, (*(each.type for each in node.fields), *(node.inner if node.kind == "union" else ()))))


def _least(node: Node) -> int:
    """The fewest bytes that a datum has."""
    if node.kind == "union":
        return 1 + min((0 if each.kind == "null" else _least(each) for each in node.inner), default=0)
    if node.kind == "record":
        return sum(_least(each.type) for each in node.fields)
    return {"float": 4, "double": 8, "fixed": int(node.details.get("size", 0))}.get(node.kind, 1)


def _growth(node: Node) -> float:
    """Bytes in memory for a byte of data, at most."""
    if node.kind in ("array", "map"):
        return max(_width(node.inner[0]) / _least(node.inner[0]), _growth(node.inner[0]))
    return max(map(_growth, (*(each.type for each in node.fields), *node.inner)), default=1.0)


def _arrow_width(kind: pa.DataType) -> int:
    import pyarrow as pa

    return _PER_FIELD + (sum(_arrow_width(each.type) for each in kind) if pa.types.is_struct(kind) else 0)


def _arrow_growth(kind: pa.DataType) -> float:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return max((_arrow_growth(each.type) for each in kind), default=1.0)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        item = kind.value_type if pa.types.is_list(kind) else kind.item_type
        return max(_arrow_width(item) / 2, _arrow_growth(item))
    return 1.0
