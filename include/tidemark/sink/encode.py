"""Encodes Arrow batches as a binary COPY stream for Postgres, one chunk at a time."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidemark import native
from tidemark.formats.connect import Misfit
from tidemark.sink import compiled_rows, python_rows
from tidemark.sink.types import conform

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_A_CHUNK = 8192
"""Without compiled code. Otherwise `compiled_rows.BUFFER_BYTES` ends a chunk."""
COPY_BUFFER_BYTES = 4 << 20
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Signature, no flags, no header extension."""
TRAILER = b"\xff\xff"


class NotEncodable(ValueError):
    """A value has the right type but cannot be stored in its column. ``detail`` quotes it."""

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail


class CopyStream:
    """The rows of ``batches`` as a binary COPY stream, encoded on demand; a file object for ``copy_expert``.

    Each batch has exactly the columns of ``columns`` (name, Postgres type), of Arrow types that `types.fits` allows
    (`tally.data_columns` checks them). ``rows`` counts the encoded rows, to compare with Postgres' count. ``failure`` is an error raised
    while reading (by ``batches``, or `NotEncodable`): psycopg2 turns it into a cancelled statement, which looks like an outage.
    """

    def __init__(self, columns: Sequence[tuple[str, str]], batches: Iterator[pa.RecordBatch]) -> None:
        self.rows = 0
        self.failure: BaseException | None = None
        self._chunks = self._encode(columns, batches)

    def read(self, _size: int = -1) -> bytes:
        """Returns the next chunk, of any size. Empty only at the end: psycopg2 treats an empty read as the end of the data."""
        try:
            return next(self._chunks, b"")
        except BaseException as error:
            self.failure = error
            raise

    def readline(self, _size: int = -1) -> bytes:  # required by psycopg2's type stub, but never called
        return self.read()

    def _encode(self, columns: Sequence[tuple[str, str]], batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        yield HEADER
        for rows in batches:
            for count, data in _encoded(columns, _conformed(columns, rows)):
                self.rows += count
                yield data
        yield TRAILER


def is_encodable(values: pa.Array, postgres: str) -> bool:
    """Whether a column of the type can store all values. Requires `types.fits`."""
    import pyarrow as pa

    columns = [("x", postgres)]
    try:
        return all(True for _ in _encoded(columns, _conformed(columns, pa.record_batch({"x": values}))))
    except NotEncodable:
        return False


def _encoded(columns: Sequence[tuple[str, str]], batch: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
    """Yields numbers of rows and their bytes."""
    if (library := native.library()) is None:
        for start in range(0, batch.num_rows, ROWS_A_CHUNK):
            chunk = batch.slice(start, ROWS_A_CHUNK)
            fields = [_fields(column, values) for column, values in zip(columns, chunk.columns, strict=True)]
            count = struct.pack(">h", len(columns))
            yield chunk.num_rows, b"".join(itertools.chain.from_iterable((count, *row) for row in zip(*fields, strict=True)))
        return
    try:
        yield from compiled_rows.chunks(library, [postgres for _, postgres in columns], batch)
    except compiled_rows.Unfit as unfit:
        _fields(columns[unfit.column], batch.column(unfit.column).slice(unfit.row, 1))
        raise


def _fields(column: tuple[str, str], values: pa.Array) -> list[bytes]:
    name, postgres = column
    try:
        return python_rows.fields(values, postgres)
    except Misfit as error:
        raise NotEncodable(f"a value in column {name} does not fit {postgres}: it {error}") from None


def _conformed(columns: Sequence[tuple[str, str]], batch: pa.RecordBatch) -> pa.RecordBatch:
    """Converts the values to the encoder's types."""
    import pyarrow as pa

    arrays = []
    for (name, postgres), values in zip(columns, batch.columns, strict=True):
        try:
            arrays.append(conform(values, postgres))
        except pa.ArrowException as error:
            raise NotEncodable(f"a value in column {name} does not fit {postgres}", str(error)) from None
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in columns])
