"""The two encoders of rows: the compiled one, and the one in Python. And any columns that they encode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from tidemark import native
from tidemark.sink.types import ELEMENT_OIDS, base_of

ENCODERS = ("compiled", "python")


@contextlib.contextmanager
def encoding_with(encoder: str) -> Iterator[None]:
    """Selects the encoder of this process within the block."""
    with pytest.MonkeyPatch.context() as patch:
        if encoder == "python":
            patch.setattr(native, "library", lambda: None)
        else:
            assert native.library() is not None, "the compiled encoder needs a C compiler"
        yield


def _integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    whole = (
        st.integers(1 - 10**digits, 10**digits - 1) | st.integers(-20_000, 20_000) | st.integers(0, digits - 1).map(lambda zeros: 10**zeros)
    )
    return whole.map(lambda number: Decimal(f"{number}E-{scale}"))


NUMBERS = st.one_of(
    st.decimals().map(str),
    st.from_regex(r"[+-]?[0-9]{0,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,6})?", fullmatch=True),
    st.from_regex(r"[+-]?(nan|NaN|inf|-inf|Infinity|x|e|\.)", fullmatch=True),
    st.text("0123456789.eE+-", max_size=8),
    st.text(max_size=3),
    st.sampled_from(["1e131071", "1e131072", "1e-16383", "1e-16384", "0e-16384", "0.10e-16382", "1e999999999", "1e1000000000"]),
)
"""Texts that are numbers, and others."""
_NUMERIC = [pa.decimal32(9, 0), pa.decimal32(9, 9), pa.decimal64(18, 3), pa.decimal128(38, 2), pa.decimal128(38, 20), pa.decimal256(76, 37)]
_KINDS: list[tuple[str, pa.DataType, pa.DataType, st.SearchStrategy[Any]]] = [
    ("boolean", pa.bool_(), pa.bool_(), st.booleans()),
    ("smallint", pa.int16(), pa.int16(), _integers(16)),
    ("integer", pa.int32(), pa.int32(), _integers(32)),
    ("bigint", pa.int64(), pa.int64(), _integers(64)),
    ("real", pa.float32(), pa.float32(), st.floats(width=32)),
    ("double precision", pa.float64(), pa.float64(), st.floats()),
    ("text", pa.string(), pa.string(), st.text(max_size=9)),
    ("jsonb", pa.string(), pa.string(), st.text(max_size=9)),
    ("bytea", pa.binary(), pa.binary(), st.binary(max_size=9)),
    ("uuid", pa.binary(16), pa.binary(16), st.binary(min_size=16, max_size=16)),
    ("date", pa.int32(), pa.date32(), _integers(32)),
    ("time without time zone", pa.int64(), pa.time64("us"), _integers(64)),
    ("timestamp without time zone", pa.int64(), pa.timestamp("us"), _integers(64)),
    ("timestamp with time zone", pa.int64(), pa.timestamp("us", "UTC"), _integers(64)),
    ("interval", pa.int64(), pa.duration("us"), _integers(64)),
    *(("numeric", kind, kind, _decimals(kind.precision, kind.scale)) for kind in _NUMERIC),
    *((f"numeric{limits}", pa.string(), pa.string(), NUMBERS) for limits in ("", "(10,2)", "(5,-2)", "(3,5)")),
]
"""Postgres type, Arrow type of the values below, Arrow type of the column, values."""


@st.composite
def any_column(draw: st.DrawFn, rows: int) -> tuple[str, pa.Array]:
    """A Postgres type and values for it, some of which it cannot store. Often a slice of a longer array, or lists."""
    postgres, plain, arrow, values = draw(st.sampled_from(_KINDS))
    skipped = draw(st.integers(0, 3))
    if base_of(postgres) in ELEMENT_OIDS and draw(st.booleans()):
        postgres, plain, arrow, values = f"{postgres}[]", pa.list_(plain), pa.list_(arrow), st.lists(st.none() | values, max_size=3)
    drawn = draw(st.lists(st.none() | values, min_size=rows + skipped, max_size=rows + skipped))
    return postgres, pa.array(drawn, plain).cast(arrow).slice(skipped)


@st.composite
def any_columns(draw: st.DrawFn) -> tuple[list[tuple[str, str]], pa.RecordBatch]:
    """Columns (name, Postgres type) and a batch for them."""
    rows = draw(st.integers(0, 6))
    drawn = [draw(any_column(rows)) for _ in range(draw(st.integers(1, 4)))]
    names = [f"c{number}" for number in range(len(drawn))]
    columns = [(name, postgres) for name, (postgres, _) in zip(names, drawn, strict=True)]
    return columns, pa.RecordBatch.from_arrays([values for _, values in drawn], names=names)
