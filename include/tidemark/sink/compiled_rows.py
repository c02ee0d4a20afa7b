"""Encodes rows in C, without a Python object for each value: calls ``encoder.c`` of `tidemark.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidemark.sink.numeric import limits
from tidemark.sink.types import ELEMENT_OIDS, base_of

if TYPE_CHECKING:
    import pyarrow as pa

BUFFER_BYTES = 1 << 20
"""Chunks of this size stay in the CPU cache until Postgres' client has sent them. A longer row gets a buffer of its own."""

_KINDS = ("boolean", "2 bytes", "4 bytes", "8 bytes", "16 bytes", "binary", "jsonb", "date", "timestamp", "interval", "decimal", "number")
"""The kinds of ``encoder.c``, in its order."""
_KIND_OF = {
    "boolean": "boolean",
    "smallint": "2 bytes",
    "integer": "4 bytes",
    "bigint": "8 bytes",
    "real": "4 bytes",
    "double precision": "8 bytes",
    "uuid": "16 bytes",
    "jsonb": "jsonb",
    "date": "date",
    "time without time zone": "8 bytes",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamp",
    "interval": "interval",
}
"""Of the types that are neither numbers of any size nor text or bytes."""
_FULL, _UNFIT = 1, 2


class _Type(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("element", ctypes.c_uint32),
    )


class _Progress(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("bytes", ctypes.c_int64), ("column", ctypes.c_int64))


class Unfit(Exception):
    """Postgres cannot store a value of the batch."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(row, column)
        self.row, self.column = row, column


def chunks(library: ctypes.CDLL, types: Sequence[str], batch: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
    """Yields the rows, in the form that `types.conform` gives to columns of these types, as numbers of rows and their bytes.

    Raises `Unfit`.
    """
    import pyarrow as pa

    encode = library.tidemark_encode
    encode.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    columns = (_Type * len(types))(*map(_type, batch.schema.types, types))
    _schema, exported = batch.__arrow_c_array__()  # ends when the capsules are collected
    address = _pointer(exported, b"arrow_array")
    progress, at = _Progress(), 0
    small = buffer = pa.allocate_buffer(BUFFER_BYTES)
    while at < batch.num_rows:
        status = encode(address, columns, at, batch.num_rows, buffer.address, buffer.size, ctypes.byref(progress))
        at += progress.rows
        if progress.rows:
            yield progress.rows, ctypes.string_at(buffer.address, progress.bytes)
            buffer = small
        elif status == _FULL:
            buffer = pa.allocate_buffer(2 * buffer.size)
        elif status == _UNFIT:
            raise Unfit(at, progress.column)


def _type(arrow: pa.DataType, postgres: str) -> _Type:
    import pyarrow as pa

    base = base_of(postgres)
    inner = arrow
    element = 0
    if base.endswith("[]"):
        base, inner = base.removesuffix("[]"), arrow.value_type
        element = ELEMENT_OIDS[base]
    if pa.types.is_decimal(inner):
        return _Type(_KINDS.index("decimal"), inner.bit_width // 8, 0, inner.scale, element)
    if base == "numeric":
        precision, scale = limits(postgres)
        return _Type(_KINDS.index("number"), 0, -1 if precision is None else precision, scale, element)
    return _Type(_KINDS.index(_KIND_OF.get(base, "binary")), 0, 0, 0, element)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
