"""Arrow batches as a binary COPY stream: framing, counting, and errors that keep their type."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.encoders import ENCODERS, encoding_with
from tests.support.sampling import examples

from tidemark.sink.encode import HEADER, ROWS_A_CHUNK, CopyStream, NotEncodable

COLUMNS = [("n", "bigint"), ("city", "text")]


@pytest.fixture(scope="module", params=ENCODERS, autouse=True)
def _encoder(request: pytest.FixtureRequest) -> Iterator[None]:
    with encoding_with(request.param):
        yield


def batch(rows: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    named = [{"n": n, "city": city} for n, city in rows]
    return pa.RecordBatch.from_pylist(named, schema=pa.schema({"n": pa.int64(), "city": pa.string()}))


def read_all(stream: CopyStream) -> bytes:
    """Reads as psycopg2 does, until a read returns nothing."""
    return b"".join(iter(lambda: stream.read(8192), b""))


def decoded(data: bytes) -> list[tuple[int | None, str | None]]:
    """Reads these two columns in the format that Postgres' page on COPY describes."""
    assert data.startswith(HEADER)
    at, rows = len(HEADER), []

    def field() -> bytes | None:
        nonlocal at
        (size,) = struct.unpack_from("!i", data, at)
        at += 4
        if size < 0:
            return None
        at += size
        return data[at - size : at]

    while (count := struct.unpack_from("!h", data, at)[0]) != -1:
        assert count == 2
        at += 2
        n, city = field(), field()
        rows.append((None if n is None else struct.unpack("!q", n)[0], None if city is None else city.decode()))
    assert at + 2 == len(data)
    return rows


ROWS = st.lists(st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=5)), max_size=8)


@settings(max_examples=examples(150))
@given(st.lists(ROWS, max_size=4))
def test_any_batches_make_one_stream_with_every_row_in_order(batches: list[list[tuple[int | None, str | None]]]) -> None:
    """Postgres requires one header and one trailer, even with empty batches or none at all. ``rows`` counts the encoded rows."""
    stream = CopyStream(COLUMNS, iter([batch(rows) for rows in batches]))
    rows = [row for rows in batches for row in rows]
    assert decoded(read_all(stream)) == rows
    assert stream.rows == len(rows)
    assert stream.read() == b""


@pytest.mark.parametrize("count", [ROWS_A_CHUNK - 1, ROWS_A_CHUNK, ROWS_A_CHUNK + 1, 3 * ROWS_A_CHUNK])
def test_a_batch_longer_than_a_chunk_is_encoded_in_chunks(count: int) -> None:
    """No row is lost or duplicated at the boundaries."""
    rows = [(n, str(n)) for n in range(count)]
    stream = CopyStream(COLUMNS, iter([batch(rows)]))
    assert decoded(read_all(stream)) == rows
    assert stream.rows == count


def test_batches_are_asked_for_one_at_a_time() -> None:
    """A slice of any size needs memory for one batch only."""
    asked = []

    def batches() -> Iterator[pa.RecordBatch]:
        for n in range(3):
            asked.append(n)
            yield batch([(n, "x")] * 100)

    stream = CopyStream(COLUMNS, batches())
    assert stream.read() == HEADER
    assert asked == []
    stream.read()
    assert asked == [0]


def test_what_the_batches_raise_is_kept() -> None:
    """psycopg2 reports a cancelled statement instead, so the commit asks the stream."""
    failure = LookupError("gone")

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch([(1, "a")])
        raise failure

    stream = CopyStream(COLUMNS, batches())
    with pytest.raises(LookupError):
        read_all(stream)
    assert stream.failure is failure


def test_a_value_finer_than_a_microsecond_is_refused() -> None:
    """Nothing is rounded."""
    nanosecond = pa.record_batch({"x": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(NotEncodable, match="column x does not fit timestamp without time zone"):
        read_all(CopyStream([("x", "timestamp without time zone")], iter([nanosecond])))
