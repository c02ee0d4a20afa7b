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
"""A registry's identifier of a schema: a number or a GUID."""

PREFIX_BYTES = 5
GUID_BYTES = 17
MAX_INDEXES = 100
"""Maximum nesting of a Protobuf message."""
HEADERS = {"key": "__key_schema_id", "value": "__value_schema_id"}


def ids_before(data: pa.Array) -> tuple[list[int], np.ndarray]:
    """Distinct schema ids before the data, and each datum's index into them: -1 for null, and for data without an id."""
    import pyarrow as pa
    import pyarrow.compute as pc

    framed = pc.and_(pc.greater_equal(pc.binary_length(data), PREFIX_BYTES), pc.equal(pc.binary_slice(data, 0, 1), pa.scalar(b"\0")))
    heads = pc.if_else(pc.fill_null(framed, False), pc.binary_slice(data, 1, PREFIX_BYTES), None).dictionary_encode()
    ids = [int.from_bytes(prefix, "big") for prefix in heads.dictionary.to_pylist()]
    return ids, pc.fill_null(heads.indices, -1).to_numpy(zero_copy_only=False).copy()


def id_in(headers: Any, name: str) -> tuple[SchemaId, bytes] | None:
    """The schema id in the last header of this name, and the bytes after it. None if there is no such header. Raises `ValueError` if it
    does not hold an id."""
    header = next((value for key, value in reversed(headers or ()) if key == name), None)
    if header is None:
        return None
    if len(header) >= PREFIX_BYTES and header[0] == 0:
        return int.from_bytes(header[1:PREFIX_BYTES], "big"), bytes(header[PREFIX_BYTES:])
    if len(header) >= GUID_BYTES and header[0] == 1:
        return uuid.UUID(bytes=bytes(header[1:GUID_BYTES])), bytes(header[GUID_BYTES:])
    raise ValueError(f"its header {name} holds neither a schema id nor a GUID")


def indexes_before(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """The message indexes of a Protobuf message, and the bytes after them. Raises `ValueError`."""
    count, rest = _zigzag(data)
    if count == 0:
        return (0,), rest
    if not 0 < count <= MAX_INDEXES:
        raise ValueError("no message indexes")
    indexes = []
    for _ in range(count):
        index, rest = _zigzag(rest)
        indexes.append(index)
    return tuple(indexes), rest


def _zigzag(data: bytes) -> tuple[int, bytes]:
    number = 0
    for at, byte in enumerate(data[:10]):
        number |= (byte & 127) << (7 * at)
        if byte < 128:
            return (number >> 1) ^ -(number & 1), data[at + 1 :]
    raise ValueError("no message indexes")
