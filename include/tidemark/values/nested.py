"""Searches arrays of lists, structs and maps at any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemark.sink.types import parents

if TYPE_CHECKING:
    import pyarrow as pa


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
