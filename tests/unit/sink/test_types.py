"""The guard before binary COPY: which Arrow types fit which Postgres types, pair by pair."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples

from tidemark.sink.types import arrow_type, conform, fits, postgres_type
from tidemark.values.conversion import from_python

TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(5), pa.binary(16)]
ARROW = [
    pa.bool_(), pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(),
    pa.float16(), pa.float32(), pa.float64(), *TEXTS, *BYTES, pa.date32(), pa.date64(),
    pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    *[pa.duration(unit) for unit in ("s", "ms", "us", "ns")],
    *[pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Berlin")],
    pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal128(10, 2), pa.decimal128(38, 0), pa.decimal128(38, 18), pa.decimal256(50, 2),
    pa.decimal128(5, -2),
    pa.struct([("a", pa.int32())]), pa.map_(pa.string(), pa.int32()),
]  # fmt: skip
LISTS = [pa.list_(kind) for kind in ARROW] + [pa.large_list(pa.int32()), pa.list_(pa.list_(pa.int32())), pa.list_(pa.int32(), 3)]
DICTIONARIES = [pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.int64())]

SCALARS: dict[str, list[pa.DataType]] = {
    "boolean": [pa.bool_()],
    "smallint": [pa.int8(), pa.uint8(), pa.int16()],
    "integer": [pa.uint16(), pa.int32()],
    "bigint": [pa.uint32(), pa.int64()],
    "real": [pa.float16(), pa.float32()],
    "double precision": [pa.float64()],
    "text": TEXTS,
    "character varying": TEXTS,
    "character varying(10)": TEXTS,
    "character(3)": TEXTS,
    "name": TEXTS,
    "json": TEXTS,
    "jsonb": TEXTS,
    "enum": TEXTS,
    "bytea": BYTES,
    "uuid": [*TEXTS, pa.binary(16)],
    "date": [pa.date32(), pa.date64()],
    "time without time zone": [kind for kind in ARROW if pa.types.is_time(kind)],
    "time(3) without time zone": [kind for kind in ARROW if pa.types.is_time(kind)],
    "interval": [kind for kind in ARROW if pa.types.is_duration(kind)],
    "timestamp without time zone": [kind for kind in ARROW if pa.types.is_timestamp(kind) and not kind.tz],
    "timestamp(3) without time zone": [kind for kind in ARROW if pa.types.is_timestamp(kind) and not kind.tz],
    "timestamp with time zone": [kind for kind in ARROW if pa.types.is_timestamp(kind) and kind.tz],
    "timestamp(0) with time zone": [kind for kind in ARROW if pa.types.is_timestamp(kind) and kind.tz],
    "numeric": [*TEXTS, *[kind for kind in ARROW if pa.types.is_decimal(kind) and kind.scale >= 0]],
    "numeric(10,2)": [*TEXTS, pa.decimal32(5, 2), pa.decimal128(10, 2)],
    "numeric(12,2)": [*TEXTS, pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal128(10, 2)],
    "numeric(38,0)": [*TEXTS, pa.decimal128(38, 0)],
    "numeric(5,-2)": TEXTS,
}
"""The complete table: pairs that are not listed do not fit."""
OTHERS = ["money", "inet", "point", "int4range", "time with time zone", "xml", "interval year to month", "bit(3)", '"char"', "mood"]
ELEMENTS = [
    "boolean", "smallint", "integer", "bigint", "real", "double precision", "text", "bytea", "date", "time without time zone",
    "timestamp without time zone", "timestamp with time zone", "timestamp(0) with time zone", "interval", "numeric",
    "time(3) without time zone", "timestamp(3) without time zone",
    "numeric(10,2)", "numeric(12,2)", "numeric(38,0)", "numeric(5,-2)",
]  # fmt: skip
"""Arrays of other types cannot be sent: binary COPY names the element's type by its OID, and the encoder knows these only."""


def table(postgres: str) -> list[pa.DataType]:
    """The Arrow types that fit, from the tables above."""
    if postgres.endswith("[]"):
        element = postgres[:-2]
        lists = [pa.list_(kind) for kind in SCALARS[element]] if element in ELEMENTS else []
        return [*lists, pa.large_list(pa.int32())] if element == "integer" else lists
    dictionaries = {"text": DICTIONARIES[:1], "bigint": DICTIONARIES[1:]}
    return SCALARS.get(postgres, []) + (
        dictionaries["text"] if pa.string() in SCALARS.get(postgres, []) else dictionaries.get(postgres, [])
    )


POSTGRES = [*SCALARS, *OTHERS, *(f"{name}[]" for name in [*SCALARS, *OTHERS])]


@pytest.mark.parametrize("postgres", POSTGRES)
def test_fits_says_what_the_table_says(postgres: str) -> None:
    """Every pair is tested: binary COPY is not type checked, so one wrong answer would store garbage. A column of nothing but nulls fits
    every column that can be written."""
    wanted = table(postgres)
    for arrow in ARROW + LISTS + DICTIONARIES:
        assert fits(arrow, postgres) is (arrow in wanted), f"{arrow} -> {postgres}"
    target = arrow_type(postgres)
    assert fits(pa.null(), postgres) is (target is not None)
    if target is not None:
        made = conform(pa.nulls(2), postgres)
        number = pa.list_(pa.string()) if postgres.endswith("[]") else pa.string()
        assert (made.type, made.null_count) == (number if "numeric" in postgres else target, 2)


@pytest.mark.parametrize("arrow", ARROW + LISTS + DICTIONARIES, ids=str)
def test_the_column_that_is_made_for_a_type_takes_it(arrow: pa.DataType) -> None:
    """``sink ddl`` never prints a column that the guard would then refuse."""
    postgres = postgres_type(arrow)
    if postgres is not None:
        assert fits(arrow, postgres)
        assert arrow_type(postgres) is not None
        assert conform(pa.array([], arrow) if not pa.types.is_dictionary(arrow) else pa.array([]).cast(arrow), postgres) is not None


@pytest.mark.parametrize("postgres", [name for name in POSTGRES if table(name)])
def test_what_fits_is_brought_into_exactly_the_encoders_type(postgres: str) -> None:
    """Each Postgres type has one Arrow type. Decimals keep their scale, which the encoder writes with the value."""
    target = arrow_type(postgres)
    for arrow in table(postgres):
        empty = (
            pa.array([], pa.null()).cast(arrow) if not pa.types.is_dictionary(arrow) else pa.array([], arrow.value_type).dictionary_encode()
        )
        made = conform(empty, postgres).type
        if "numeric" in postgres:
            inner = arrow.value_type if pa.types.is_list(arrow) else arrow
            number = inner if pa.types.is_decimal(inner) else pa.string()
            assert made == (number if inner is arrow else pa.list_(number))
        else:
            assert made == target, f"{arrow} -> {postgres}"


VALUES: list[tuple[pa.Array, str, list[Any]]] = [
    (pa.array([1, None], pa.uint8()), "smallint", [1, None]),
    (pa.array([65535], pa.uint16()), "integer", [65535]),
    (pa.array([2**32 - 1], pa.uint32()), "bigint", [2**32 - 1]),
    (pa.array(["a", None, "a"]).dictionary_encode(), "text", ["a", None, "a"]),
    (pa.array(["a"], pa.string_view()), "text", ["a"]),
    (pa.array([b"a"], pa.binary_view()), "bytea", [b"a"]),
    (pa.array([b"ab"], pa.binary(2)), "bytea", [b"ab"]),
    (pa.array([dt.date(2020, 1, 1)], pa.date64()), "date", [dt.date(2020, 1, 1)]),
    (pa.array([dt.time(1, 2)], pa.time32("s")), "time without time zone", [dt.time(1, 2)]),
    (pa.array([1500], pa.duration("ms")), "interval", [dt.timedelta(seconds=1.5)]),
    (pa.array([1], pa.timestamp("s", "Europe/Berlin")), "timestamp with time zone", [dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)]),
    (pa.array([2000], pa.timestamp("ns")), "timestamp without time zone", [dt.datetime.fromisoformat("1970-01-01T00:00:00.000002")]),
    (pa.array([decimal.Decimal("1.50")], pa.decimal256(50, 2)), "numeric", [decimal.Decimal("1.50")]),
    (pa.array([[decimal.Decimal("9" * 36 + ".99")]], pa.list_(pa.decimal128(38, 2))), "numeric[]", [[decimal.Decimal("9" * 36 + ".99")]]),
    (pa.array([["a"], None, []], pa.list_(pa.string_view())), "text[]", [["a"], None, []]),
    (pa.array([["a"]], pa.large_list(pa.large_string())), "text[]", [["a"]]),
    (pa.array([[], None]), "integer[]", [[], None]),
    (pa.array(["12345678-1234-5678-1234-567812345678", None]), "uuid", [uuid.UUID("12345678-1234-5678-1234-567812345678").bytes, None]),
]


@pytest.mark.parametrize(("column", "postgres", "expected"), VALUES, ids=lambda value: str(getattr(value, "type", "")))
def test_values_stay_the_same_in_the_encoders_type(column: pa.Array, postgres: str, expected: list[Any]) -> None:
    """Only the representation changes."""
    assert fits(column.type, postgres)
    assert conform(column, postgres).to_pylist() == expected


@pytest.mark.parametrize(
    ("column", "postgres"),
    [
        (pa.array([1], pa.timestamp("ns")), "timestamp without time zone"),
        (pa.array([1], pa.time64("ns")), "time without time zone"),
        (pa.array([1], pa.duration("ns")), "interval"),
        (pa.array([86_400_001]).cast(pa.date64()), "date"),
        (pa.array([2**62], pa.timestamp("s")), "timestamp without time zone"),
        (pa.array(["no uuid"]), "uuid"),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_a_value_that_would_have_to_be_rounded_or_cut_is_refused(column: pa.Array, postgres: str) -> None:
    """Nothing is rounded, widened or parsed."""
    assert fits(column.type, postgres)
    with pytest.raises(pa.ArrowInvalid):
        conform(column, postgres)


@settings(max_examples=examples(300))
@given(st.integers(1, 38), st.integers(0, 38), st.integers(1, 38), st.integers(-5, 38))
def test_a_decimal_fits_a_numeric_that_holds_all_its_digits(precision: int, scale: int, wide: int, fraction: int) -> None:
    """The numeric needs at least as many digits before and after the decimal point."""
    scale = min(scale, precision)
    expected = scale <= fraction and precision - scale <= wide - fraction
    assert fits(pa.decimal128(precision, scale), f"numeric({wide},{fraction})") is expected


@pytest.mark.parametrize("postgres", ["numeric", "numeric(12,2)", "numeric(38,0)"])
@pytest.mark.parametrize("digits", [38, 39, 57, 77, 2_046])
def test_decimal_with_many_digits_after_the_point_does_not_become_zero(postgres: str, digits: int) -> None:
    """Arrow turns some of these numbers into 0."""
    for number in (decimal.Decimal("12300." + digits * "0"), decimal.Decimal("1." + (digits - 1) * "0" + "1")):
        found, wrong = from_python([number], postgres)
        assert wrong or list(map(decimal.Decimal, found.to_pylist())) == [number]
