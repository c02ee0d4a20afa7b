"""Estimates the memory that decoding takes: a few bytes of data can encode items whose columns take thousands each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemark.formats.schema import Node

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

CHUNK_BYTES = 64 << 20
"""Limit for data decoded at once."""
RECORD_BYTES = 1 << 30
"""Limit for one record."""
_PER_FIELD = 16
"""Bytes of a value, or of its offsets, with its null bit."""

Cost = Callable[["pa.Array"], "np.ndarray"]
"""Returns the maximum bytes in memory of each datum."""


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
    return _PER_FIELD + sum(map(_width, (*(field.type for field in node.fields), *(node.inner if node.kind == "union" else ()))))


def _min_bytes(node: Node) -> int:
    """Minimum bytes of a datum."""
    if node.kind == "union":
        return 1 + min((0 if branch.kind == "null" else _min_bytes(branch) for branch in node.inner), default=0)
    if node.kind == "record":
        return sum(_min_bytes(field.type) for field in node.fields)
    return {"float": 4, "double": 8, "fixed": int(node.details.get("size", 0))}.get(node.kind, 1)


def _growth(node: Node) -> float:
    """Maximum bytes in memory per byte of data."""
    if node.kind in ("array", "map"):
        return max(_width(node.inner[0]) / _min_bytes(node.inner[0]), _growth(node.inner[0]))
    return max(map(_growth, (*(field.type for field in node.fields), *node.inner)), default=1.0)


def _arrow_width(kind: pa.DataType) -> int:
    import pyarrow as pa

    return _PER_FIELD + (sum(_arrow_width(child.type) for child in kind) if pa.types.is_struct(kind) else 0)


def _arrow_growth(kind: pa.DataType) -> float:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return max((_arrow_growth(child.type) for child in kind), default=1.0)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        item = kind.value_type if pa.types.is_list(kind) else kind.item_type
        return max(_arrow_width(item) / 2, _arrow_growth(item))
    return 1.0
