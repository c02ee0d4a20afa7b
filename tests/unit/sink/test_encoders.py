"""Both encoders return the same bytes, in the form that Postgres itself sends: the compiled one, and the one in Python."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.encoders import ENCODERS, any_columns, encoding_with
from tests.support.sampling import examples

from tidemark.sink import compiled_rows
from tidemark.sink.encode import HEADER, TRAILER, CopyStream, NotEncodable, is_encodable


def encoded(columns: list[tuple[str, str]], batch: pa.RecordBatch) -> bytes | tuple[str, str | None]:
    """The whole stream; the error and its detail if a value is refused."""
    try:
        return b"".join(iter(CopyStream(columns, iter([batch])).read, b""))
    except NotEncodable as error:
        return str(error), error.detail


@settings(max_examples=examples(1000), suppress_health_check=[HealthCheck.too_slow])
@given(any_columns(), st.sampled_from([1, 3, 50, compiled_rows.BUFFER_BYTES]))
def test_both_encode_any_rows_to_the_same_bytes_or_refuse_them_with_the_same_error(
    content: tuple[list[tuple[str, str]], pa.RecordBatch], buffer_bytes: int
) -> None:
    """At any size of the buffer, which each row has to fit. Of several errors, that of the first column counts in a row, and any in a
    batch."""
    columns, batch = content
    results: dict[str, list[Any]] = {}
    for encoder in ENCODERS:
        with encoding_with(encoder), pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_rows, "BUFFER_BYTES", buffer_bytes)
            together = encoded(columns, batch)
            each = [encoded(columns, batch.slice(row, 1)) for row in range(batch.num_rows)]
            results[encoder] = [together if isinstance(together, bytes) else tuple, *each]
    assert results["compiled"] == results["python"]


SENT: list[tuple[str, pa.Array, str]] = [
    ("boolean", pa.array([True]), "01"),
    ("smallint", pa.array([-2], pa.int16()), "fffe"),
    ("integer", pa.array([2**31 - 1], pa.int32()), "7fffffff"),
    ("bigint", pa.array([-(2**63)]), "8000000000000000"),
    ("real", pa.array([1.5], pa.float32()), "3fc00000"),
    ("double precision", pa.array([-0.0]), "8000000000000000"),
    ("text", pa.array(["ü"]), "c3bc"),
    ("text", pa.array([""]), ""),
    ("jsonb", pa.array(["{}"]), "017b7d"),
    ("bytea", pa.array([b"\0\xff"]), "00ff"),
    ("uuid", pa.array([bytes(range(16))], pa.binary(16)), "000102030405060708090a0b0c0d0e0f"),
    ("date", pa.array([0], pa.int32()).cast(pa.date32()), "ffffd533"),
    ("time without time zone", pa.array([1]).cast(pa.time64("us")), "0000000000000001"),
    ("timestamp without time zone", pa.array([946684800000001]).cast(pa.timestamp("us")), "0000000000000001"),
    ("timestamp with time zone", pa.array([946684799999999]).cast(pa.timestamp("us", "UTC")), "ffffffffffffffff"),
    ("interval", pa.array([-1]).cast(pa.duration("us")), "ffffffffffffffff0000000000000000"),
    ("numeric(10,2)", pa.array([Decimal("-10000.50")], pa.decimal128(10, 2)), "0003000140000002000100001388"),
    ("numeric(10,2)", pa.array([Decimal("0.00")], pa.decimal32(5, 2)), "0000000000000002"),
    ("numeric", pa.array([Decimal("12345678.000001")], pa.decimal256(50, 6)), "0004000100000006" + "04d2162e00000064"),
    ("numeric", pa.array(["1e8"]), "0001000200000000" + "0001"),
    ("numeric", pa.array(["-.00010"]), "0001ffff40000005" + "0001"),
    ("numeric(4,2)", pa.array(["NaN"]), "00000000c0000000"),
    ("numeric", pa.array(["-inf"]), "00000000f0000000"),
    ("integer[]", pa.array([[]], pa.list_(pa.int32())), "000000000000000000000017"),
    ("integer[]", pa.array([[None, 7]], pa.list_(pa.int32())), "0000000100000001000000170000000200000001ffffffff0000000400000007"),
    ("text[]", pa.array([[""]]), "000000010000000000000019" + "0000000100000001" + "00000000"),
]  # fmt: skip
"""What Postgres' send functions return."""


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("postgres", "values", "sent"), SENT, ids=[f"{kind} {values[0]}" for kind, values, _ in SENT])
def test_value_has_the_bytes_that_postgres_sends(encoder: str, postgres: str, values: pa.Array, sent: str) -> None:
    """And a null has no bytes."""
    rows = pa.record_batch({"x": pa.concat_arrays([values, pa.nulls(1, values.type)])})
    data = bytes.fromhex(sent)
    with encoding_with(encoder):
        stream = encoded([("x", postgres)], rows)
    assert stream == HEADER + b"\0\1" + len(data).to_bytes(4, "big") + data + b"\0\1" + b"\xff" * 4 + TRAILER


REFUSED: list[tuple[str, pa.Array, str]] = [
    ("date", pa.array([-(2**31) + 10957], pa.int32()).cast(pa.date32()), "is out of range"),
    ("timestamp without time zone", pa.array([-(2**63)]).cast(pa.timestamp("us")), "is out of range"),
    ("timestamp with time zone", pa.array([-(2**63) + 946684800000000]).cast(pa.timestamp("us", "UTC")), "is out of range"),
    ("numeric(3,1)", pa.array(["1.25"]), "has more than 1 digits after the point"),
    ("numeric(3,1)", pa.array(["100"]), "has more than 2 digits before the point"),
    ("numeric(3,1)", pa.array(["inf"]), "is infinite"),
    ("numeric", pa.array(["1e-16384"]), "has more than 16,383 digits after the point"),
    ("numeric", pa.array(["1,5"]), "is text that is not a number"),
    ("numeric", pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()), "is text that is not a number"),
    ("numeric[]", pa.array([["1", "x"]]), "is text that is not a number"),
]  # fmt: skip


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("postgres", "values", "reason"), REFUSED, ids=[f"{kind} {reason}" for kind, _, reason in REFUSED])
def test_value_that_postgres_would_change_is_refused(encoder: str, postgres: str, values: pa.Array, reason: str) -> None:
    """Nothing is rounded. The earliest number of a date or timestamp means -infinity in Postgres."""
    with encoding_with(encoder):
        stream = encoded([("n", "integer"), ("x", postgres)], pa.record_batch({"n": pa.array([1], pa.int32()), "x": values}))
        assert stream == (f"a value in column x does not fit {postgres}: it {reason}", None)
        assert not is_encodable(values, postgres)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_row_longer_than_the_buffer_is_one_chunk(encoder: str) -> None:
    """Rows before and after it keep theirs."""
    texts = ["a", "b" * 3 * compiled_rows.BUFFER_BYTES, "c"]
    stream = CopyStream([("x", "text")], iter([pa.record_batch({"x": texts})]))
    with encoding_with(encoder):
        chunks = list(iter(stream.read, b""))
    assert stream.rows == len(texts)
    rows = b"".join(b"\0\1" + len(text).to_bytes(4, "big") + text.encode() for text in texts)
    assert b"".join(chunks) == HEADER + rows + TRAILER


def test_chunk_ends_with_the_buffer() -> None:
    """The memory of a batch in Postgres' form is bounded, however long the batch is."""
    count = 3 * compiled_rows.BUFFER_BYTES // 14
    batch = pa.record_batch({"n": pa.array(range(count), pa.int64())})
    with encoding_with("compiled"):
        sizes = [len(chunk) for chunk in iter(CopyStream([("n", "bigint")], iter([batch])).read, b"")]
    assert max(sizes) <= compiled_rows.BUFFER_BYTES
    assert min(sizes[1:-2]) > compiled_rows.BUFFER_BYTES - 100
