"""The schema id of each message, as Confluent's serializers write it.

Before the datum: a zero byte, then four bytes, big endian. Or in the header ``__value_schema_id`` (``__key_schema_id``): the same five
bytes, or a one and the sixteen bytes of the schema's GUID. For Protobuf, the indexes of the message in its schema follow: their count and
each of them, as zigzag varints, or a single zero for the first message.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

SchemaId = int | uuid.UUID
"""How a registry identifies a schema: by its number, or by its GUID."""

PREFIX_BYTES = 5
GUID_BYTES = 17
MOST_INDEXES = 100
"""Of a Protobuf message: how deep it may be nested."""
HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}


def ids_before(data: pa.Array) -> tuple[list[int], np.ndarray]:
    """The ids that stand before the data, and the place among them of each datum's id: -1 for null, and where there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    framed = pc.and_(pc.greater_equal(pc.binary_length(data), PREFIX_BYTES), pc.equal(pc.binary_slice(data, 0, 1), pa.scalar(b"\0")))
    heads = pc.if_else(pc.fill_null(framed, False), pc.binary_slice(data, 1, PREFIX_BYTES), None).dictionary_encode()
    ids = [int.from_bytes(each, "big") for each in heads.dictionary.to_pylist()]
    return ids, pc.fill_null(heads.indices, -1).to_numpy(zero_copy_only=False).copy()


def id_in(headers: Any, name: str) -> tuple[SchemaId, bytes] | None:
    """The schema's id in the last header of this name, and what follows it there. None if there is no such header. Raises `ValueError` if
    it holds no id."""
    found = next((value for key, value in reversed(headers or ()) if key == name), None)
    if found is None:
        return None
    if len(found) >= PREFIX_BYTES and found[0] == 0:
        return int.from_bytes(found[1:PREFIX_BYTES], "big"), bytes(found[PREFIX_BYTES:])
    if len(found) >= GUID_BYTES and found[0] == 1:
        return uuid.UUID(bytes=bytes(found[1:GUID_BYTES])), bytes(found[GUID_BYTES:])
    raise ValueError(f"its header {name} holds neither a schema id nor a GUID")


def indexes_before(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """The place of a Protobuf message in its schema, and what follows. Raises `ValueError`."""
    count, rest = _zigzag(data)
    if count == 0:
        return (0,), rest
    indexes = []
    for _ in range(count if 0 < count <= MOST_INDEXES else -1):
        index, rest = _zigzag(rest)
        indexes.append(index)
    if len(indexes) != count:
        raise ValueError("no message indexes")
    return tuple(indexes), rest


def _zigzag(data: bytes) -> tuple[int, bytes]:
    number = 0
    for at, byte in enumerate(data[:10]):
        number |= (byte & 127) << (7 * at)
        if byte < 128:
            return (number >> 1) ^ -(number & 1), data[at + 1 :]
    raise ValueError("no message indexes")
