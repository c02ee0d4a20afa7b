"""Encodes values one by one in Python, to the same bytes as ``encoder.c``: without compiled code, and for the reason of a refusal."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from tidemark.formats.connect import Misfit
from tidemark.sink import numeric
from tidemark.sink.types import ELEMENT_OIDS, base_of

if TYPE_CHECKING:
    import pyarrow as pa

EPOCH_DAYS, EPOCH_MICROS = 10_957, 946_684_800_000_000
"""From 1970, where Arrow begins to count, to 2000, where Postgres does."""
_NULL = struct.pack(">i", -1)
_MOST_BYTES = 2**31 - 1
_FIXED = {
    "boolean": ">?",
    "smallint": ">h",
    "integer": ">i",
    "bigint": ">q",
    "real": ">f",
    "double precision": ">d",
    "date": ">i",
    "time without time zone": ">q",
    "timestamp without time zone": ">q",
    "timestamp with time zone": ">q",
    "interval": ">q8x",
}


def fields(values: pa.Array, postgres: str) -> list[bytes]:
    """Returns each value with its length, as in a row of binary COPY. Raises `Misfit` if Postgres cannot store one."""
    return [_NULL if value is None else struct.pack(">i", len(value)) + value for value in _encoded(values, postgres)]


def _encoded(values: pa.Array, postgres: str) -> list[bytes | None]:
    import pyarrow as pa

    if postgres.endswith("[]"):
        return _lists(values, postgres[:-2])
    base = base_of(postgres)
    if base == "numeric":
        python = values if pa.types.is_decimal(values.type) else values.cast(pa.binary())
        return [None if value is None else numeric.encoded(value, postgres) for value in python.to_pylist()]
    if base in _FIXED:
        python = values
        if pa.types.is_temporal(values.type):
            python = values.cast(pa.int32() if base == "date" else pa.int64())
        epoch = EPOCH_DAYS if base == "date" else EPOCH_MICROS if base.startswith("timestamp") else 0
        return [None if value is None else _packed(_FIXED[base], value, epoch) for value in python.to_pylist()]
    python, version = values if base == "uuid" else values.cast(pa.binary()), b"\1" if base == "jsonb" else b""
    return [None if value is None else _short_enough(version + value) for value in python.to_pylist()]


def _packed(form: str, value: Any, epoch: int) -> bytes:
    if epoch and value - epoch <= -(2 ** (8 * struct.calcsize(form) - 1)):  # the lowest number means -infinity
        raise Misfit("is out of range")
    return struct.pack(form, value - epoch if epoch else value)


def _lists(lists: pa.Array, postgres: str) -> list[bytes | None]:
    """In the form of Postgres' ``array_send``."""
    import pyarrow.compute as pc

    items = iter(_encoded(lists.flatten(), postgres))
    oid = ELEMENT_OIDS[base_of(postgres)]
    encoded: list[bytes | None] = []
    for length in pc.list_value_length(lists).to_pylist():
        if not length:
            encoded.append(None if length is None else struct.pack(">iiI", 0, 0, oid))
            continue
        own = [next(items) for _ in range(length)]
        head = struct.pack(">iiIii", 1, None in own, oid, length, 1)
        encoded.append(_short_enough(head + b"".join(_NULL if item is None else struct.pack(">i", len(item)) + item for item in own)))
    return encoded


def _short_enough(value: bytes) -> bytes:
    if len(value) > _MOST_BYTES:
        raise Misfit("is larger than 2 GB")
    return value
