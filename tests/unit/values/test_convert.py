"""Whatever a transform returns or a record holds: a value fails alone, and the others are stored as if it were not there."""

from __future__ import annotations

import datetime as dt
import enum
import json
import math
import types
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemark.formats.connect import Misfit
from tidemark.sink.encode import is_encodable
from tidemark.sink.types import cut
from tidemark.values import connect_json, json_fields
from tidemark.values.conversion import as_column, from_python
from tidemark.values.fields import _key_texts
from tidemark.values.json_text import json_text
from tidemark.values.plain import plain

COLUMNS = [
    "boolean", "bigint", "real", "double precision", "numeric", "numeric(12,2)", "numeric(3,5)", "text", "character varying(3)", "bytea",
    "uuid", "jsonb", "date", "time without time zone", "timestamp(3) without time zone", "timestamp with time zone", "interval",
    "bigint[]", "numeric[]", "text[]", "double precision[]",
]  # fmt: skip


class Level(enum.IntEnum):
    HIGH = 3


class Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another"


class Count(int):
    def __int__(self) -> int:
        return 99


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


UTC = dt.UTC
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)
LMT = dt.timezone(dt.timedelta(minutes=19, seconds=32))
ODD: list[Any] = [
    Decimal("sNaN"), Decimal("NaN123"), Decimal("-NaN"), Decimal("-Infinity"), Decimal("1e400000"), Decimal("1e999999"),
    10**5000, -(10**5000), 2**64, Fraction(1, 3), 1j, {1, 2}, frozenset(), object(), Level.HIGH, Word("own"), Count(5), ...,
    np.int64(5), np.float32(0.1), np.float64(0.1), np.longdouble(0.1), np.bool_(True), np.str_("a"), np.bytes_(b"a"),
    np.datetime64("2026-01-01T00:00:00.000000001"), np.datetime64("2026-01-01"), np.timedelta64(5, "ns"), np.timedelta64(1, "D"),
    np.array([1, 2]), np.array(5), np.array([5]), np.array([[1.5]]), np.complex64(1),
    pd.Timestamp("2026-01-01"), pd.Timestamp("2026-01-01 00:00:00.000000001"), pd.Timestamp("2026-01-01", tz="UTC"), pd.NaT, pd.NA,
    pd.Timedelta(5, "ns"), pd.Timedelta(1, "s"), dt.datetime.min.replace(tzinfo=LMT), dt.datetime.max.replace(tzinfo=LMT),
    dt.datetime(1900, 1, 1, tzinfo=LMT), dt.time(1, tzinfo=LMT), dt.time(1), dt.timedelta.max, dt.date.max,
    nested(600), nested(5_000), {"a": nested(600)}, {1: "a"}, {1: "a", "1": "b"}, {Decimal(1): 1}, {None: 1}, {True: 1},
    types.MappingProxyType({"a": 1}), {"a": {1, 2}}, {"a": float("nan")}, [Decimal("sNaN")], [np.float32(0.1), Level.HIGH, Word("own")],
    [10**5000], bytearray(b"ab"), memoryview(b"ab"), "\ud800", ["\ud800"], "a\0", "1e999999999", "abc ", "abc  d", b"\xff",
    "0x123e4567e89b12d3a456426614174000"[:32], "{123e4567-e89b-12d3-a456-426614174000}", "2026-01-01T00:00:00+05:99",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-02:00", "٣",
]  # fmt: skip
GOOD: list[Any] = [
    None, True, 1, Decimal("0.12"), Decimal("0.00123"), 0.5, "1", "a", b"a", uuid.UUID(int=7), "123e4567-e89b-12d3-a456-426614174000",
    dt.date(2026, 1, 1), dt.time(1, 2), dt.datetime.fromisoformat("2026-01-01"), dt.datetime(2026, 1, 1, tzinfo=UTC),
    dt.timedelta(1), [1], [None, 2],
    ["a"], {"a": 1}, "2026-01-01", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00",
]  # fmt: skip
VALUES = [*GOOD, *ODD]


@given(st.lists(st.sampled_from(range(len(VALUES))), min_size=1, max_size=6), st.sampled_from(COLUMNS))
@example([*range(len(VALUES))], "text")
def test_value_is_the_same_alone_and_beside_others(numbers: list[int], column: str) -> None:
    found, wrong = from_python([VALUES[number] for number in numbers], column)
    for at, number in enumerate(numbers):
        alone, why = from_python([VALUES[number]], column)
        assert why == ({0: wrong[at]} if at in wrong else {}), (at, number)
        assert alone.cast(found.type).equals(found.slice(at, 1)) or is_nan(alone), (at, number)
    assert len(found) == len(numbers)


def is_nan(array: pa.Array) -> bool:
    value = array[0].as_py()
    return value != value or (isinstance(value, list) and any(each != each for each in value))


@pytest.mark.parametrize("column", COLUMNS)
def test_each_odd_value_alone(column: str) -> None:
    """The numbers that are stored are encoded, too."""
    for value in (*ODD, *GOOD):
        found, wrong = from_python([value], column)
        assert len(found) == 1
        if column.startswith("numeric") and not wrong:
            assert is_encodable(found, column), value


@pytest.mark.parametrize(
    ("value", "column", "stored"),
    [
        (Decimal("NaN123"), "text", "NaN"),
        (Decimal("-NaN"), "numeric", "NaN"),
        (Decimal("0E+21"), "bigint", 0),
        (Decimal("0E+100000000"), "bigint", 0),
        (np.float32(0.1), "double precision", 0.1),
        ({"a": [np.int64(5), np.float32(0.1), np.bool_(True), Level.HIGH, Word("own"), Count(5)]}, "jsonb", '{"a":[5,0.1,true,3,"own",5]}'),
        (np.array([[1, 2], [3, 4]]), "jsonb", "[[1,2],[3,4]]"),
        (np.array([1, 2]), "bigint[]", [1, 2]),
        (types.MappingProxyType({"a": 1}), "jsonb", '{"a":1}'),
        ({2: "a", True: "b"}, "jsonb", '{"2":"a","true":"b"}'),
        (pd.Timestamp("2026-01-01"), "text", "2026-01-01T00:00:00"),
        (pd.Timedelta(1, "s"), "interval", dt.timedelta(seconds=1)),
        (Count(5), "bigint", 5),
        (Word("own"), "text", "own"),
        ("{123E4567-e89b-12d3-a456-426614174000}", "uuid", uuid.UUID("123e4567-e89b-12d3-a456-426614174000").bytes),
        (Decimal("0.00123"), "numeric(3,5)", "0.00123"),
        ({"at": dt.datetime(1900, 1, 1, tzinfo=LMT)}, "jsonb", '{"at":"1899-12-31T23:40:28Z"}'),
    ],
)
def test_value_is_stored_as_it_is(value: Any, column: str, stored: Any) -> None:
    found, wrong = from_python([value], column)
    assert (found.to_pylist(), wrong) == ([stored], {})


def test_number_with_more_digits_than_python_writes() -> None:
    huge, digits = 10**5000, "1" + "0" * 5000
    stored = {"numeric": digits, "text": digits, "jsonb": digits}
    assert {column: from_python([huge], column)[0][0].as_py() for column in stored} == stored
    assert from_python([[huge]], "numeric[]")[0].to_pylist() == [[digits]]
    assert from_python([{"a": [huge]}], "jsonb")[0].to_pylist() == [f'{{"a":[{digits}]}}']


@pytest.mark.parametrize(
    ("value", "column", "why"),
    [
        (Decimal("sNaN"), "double precision", "is a signaling NaN"),
        (Decimal("sNaN"), "text", "is a signaling NaN"),
        (Decimal("sNaN"), "numeric", "is a signaling NaN"),
        (Fraction(1, 3), "double precision", "is of type Fraction"),
        (np.longdouble(0.1), "double precision", "is of numpy's type"),
        (np.datetime64("2026-01-01T00:00:00.000000001"), "timestamp without time zone", "is of numpy's type datetime64"),
        (np.timedelta64(5, "ns"), "bigint", "is of numpy's type timedelta64"),
        (np.array([5]), "bigint", "is a list"),
        (pd.Timedelta(5, "ns"), "interval", "has more than 6 digits after the second"),
        (pd.NaT, "timestamp without time zone", "is NaT"),
        ({1: "a", "1": "b"}, "jsonb", "has a key twice"),
        ({None: 1}, "jsonb", "has a key of type NoneType"),
        ({"a": {1, 2}}, "jsonb", "is of type set"),
        (nested(100), "numeric[]", "is a list"),
        (nested(5_000), "jsonb", "is nested too deeply"),
        ("0x123e4567e89b12d3a456426614174000"[:32], "uuid", "is not a uuid"),
        ("123e4567_e89b_12d3_a456_426614174000", "uuid", "is not a uuid"),
        ("2026-01-01T00:00:00+05:99", "timestamp with time zone", "is not a timestamp with zone in ISO 8601"),
        ("abc ", "character varying(3)", "has spaces after its 3 characters, which Postgres would cut"),
        (40_000, "smallint", "is out of range"),
        (2.5, "integer", "is not a whole number"),
        (float("nan"), "integer", "is not a finite number"),
        ("3_0", "integer", "is text that is not a number"),
        (Decimal("1e100000000"), "integer", "is out of range"),
        (True, "integer", "is a boolean"),
        ([1, 2.5], "integer[]", "is not a whole number"),
        (2**53 + 1, "double precision", "has more digits than double precision keeps"),
        (Decimal("1.555"), "numeric(5,2)", "has more than 2 digits after the point"),
        (Decimal("1000"), "numeric(5,2)", "has more than 3 digits before the point"),
        (1.5, "numeric(5,2)", "is a floating-point number"),
        (Decimal("Infinity"), "numeric(5,2)", "is infinite"),
        (b"\xff", "text", "is not UTF-8 text"),
        ("\ud800", "text", "is not Unicode text"),
        (3, "bytea", "is an integer"),
        ("abc", "bytea", "is text"),
        (2, "boolean", "is an integer"),
        (float("nan"), "jsonb", "has NaN or an infinite number"),
        ({"a": [float("inf")]}, "jsonb", "has NaN or an infinite number"),
        (NOON.replace(tzinfo=None), "timestamp with time zone", "is a timestamp without zone"),
        (NOON, "timestamp without time zone", "is a timestamp with zone"),
        (dt.date(2024, 5, 1), "timestamp with time zone", "is a date"),
        ("2024-05-01", "timestamp with time zone", "is not a timestamp with zone in ISO 8601"),
        ("2024-05-01T00:00:00.0000001Z", "timestamp with time zone", "has more than 6 digits after the second"),
        (NOON.replace(tzinfo=None), "date", "is a timestamp without zone"),
        (5, "time without time zone", "is an integer"),
        (dt.time(1, tzinfo=dt.UTC), "time without time zone", "is a time of day with a zone"),
    ],
)
def test_value_is_refused(value: Any, column: str, why: str) -> None:
    """Nothing is rounded, truncated, wrapped or reinterpreted."""
    found, wrong = from_python(["2026-01-01T00:00:00Z" if isinstance(value, str) and "+05" in value else None, value], column)
    assert found[1].as_py() is None
    assert why in wrong[1]


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-02:00"])
def test_edges_of_the_calendar_do_not_depend_on_other_values(text: str) -> None:
    column = "timestamp with time zone"
    alone, beside = from_python([text], column), from_python([text, "odd"], column)
    assert alone[0].equals(beside[0].slice(0, 1))
    assert alone[1] == {0: beside[1][0]}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    )
)
def test_json_of_a_plain_value_is_that_of_python(value: Any) -> None:
    assert json.loads(json_text(plain(value), strict=True)) == value


def test_what_json_has_not_is_refused() -> None:
    for value in (float("nan"), [math.inf], {"a": Decimal("sNaN")}, object()):
        with pytest.raises(Misfit):
            json_text(value, strict=True)


# ---- Arrow


def test_floats_of_32_bits_have_their_own_digits_in_json() -> None:
    lists = pa.array([[0.1, None]], pa.list_(pa.float32()))
    structs = pa.array([{"a": 0.1}], pa.struct([("a", pa.float32())]))
    maps = pa.array([[("k", 0.1)]], pa.map_(pa.string(), pa.float32()))
    texts = [as_column(array, "jsonb")[0][0].as_py() for array in (lists, structs, maps)]
    assert texts == ["[0.1,null]", '{"a":0.1}', '{"k":0.1}']


def test_text_that_is_not_utf8_is_the_columns_error() -> None:
    """Postgres refuses it in a text column."""
    array = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff\xff\xff\xff", b"a"], pa.binary()).buffers())
    assert cut(array, "character varying(3)") == {}
    assert as_column(array, "bigint")[1] == {0: "is not UTF-8 text", 1: "is text that is not a number"}
    assert as_column(array, "uuid")[1] == dict.fromkeys((0, 1), "is not a uuid")


def test_place_of_a_value_that_is_cut_in_a_list() -> None:
    """Beside null and empty lists, and lists that are null but have values."""
    values = pa.array([1, 1, 1_000, 1], pa.timestamp("us"))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2, 4], pa.int32()), values, mask=pa.array([True, False, False, False]))
    assert set(cut(lists, "timestamp(3) without time zone[]")) == {1, 3}


# ---- JSON

DEEP = "[" * 3000 + "]" * 3000
TEXTS = [
    None, "{}", '{"id": 1}', '{"id": "x"}', '{"id": "x"', '{"id": "x", "doc": ', '{"id": [1', f'{{"id": {DEEP}}}', f'{{"doc": {DEEP}}}',
    f'{{"id": "x", "doc": {DEEP}}}', DEEP, "5", "[]", "null", '{"id": 1e999999999999999999999}', '{"doc": 1e999999999999999999999}',
    '{"raw": "%%%"}', '{"raw": "YQ=="}', f'{{"raw": {"[" * 600}{"]" * 600}}}', '{"id": "x", "raw": 5}', '{"doc": {"a": 1}, "name": 5}',
    f'{{"numbers": [{", ".join(["1e999999"] * 27)}]}}', f'{{"numbers": {"[" * 700}{"]" * 700}}}', f'{{"id": 1{"0" * 5000}}}',
]  # fmt: skip
LEAVES = [(("id",), "bigint"), (("doc",), "jsonb"), (("name",), "text"), (("raw",), "bytea"), (("numbers",), "numeric[]")]


@given(st.lists(st.sampled_from(range(len(TEXTS))), min_size=1, max_size=5))
@example([*range(len(TEXTS))])
def test_fields_of_a_text_are_the_same_alone_and_beside_others(numbers: list[int]) -> None:
    texts = [TEXTS[number] for number in numbers]
    columns, errors = json_fields.read(texts, LEAVES)
    connect_json.not_sent(texts, columns, LEAVES, connect_json.Placeholder())
    for at, number in enumerate(numbers):
        alone, why = json_fields.read([TEXTS[number]], LEAVES)
        assert why == ({0: errors[at]} if at in errors else {}), (at, number)
        assert all(one == column[at] for (one,), column in zip(alone, columns, strict=True)), (at, number)


@pytest.mark.parametrize("value", [[1e308] * 27, [math.inf] * 27, [math.nan] * 27, [Decimal("1e999999")] * 27, [Decimal("sNaN")] * 27])
def test_numbers_that_are_not_a_placeholder(value: list[Any]) -> None:
    assert not connect_json.Placeholder().is_in(value)


@pytest.mark.parametrize(
    ("text", "path", "postgres", "said"),
    [
        ("[1]", ("id",), "bigint", "the value is a list, not an object"),
        ("null", ("id",), "bigint", "the value is null, not an object"),
        ('{"place": 5}', ("place", "geo"), "bigint", "place is an integer, not an object"),
        ('{"place": {"geo": "x"}}', ("place", "geo", "lat"), "real", "place.geo is text, not an object"),
        ('{"x": 1e99999999999999999999}', ("x",), "numeric", "x does not fit numeric: a number is out of range"),
    ],
)
def test_json_of_another_form_is_described_in_the_readers_words(text: str, path: tuple[str, ...], postgres: str, said: str) -> None:
    """Not in those of the decoder, such as "Expected `object | null`, got `int` - at `$.place`"."""
    assert json_fields.read([text], [(path, postgres)])[1] == {0: f"Fail: {said}"}


def test_byte_order_mark_is_named() -> None:
    assert json_fields.read(['\ufeff{"id": 1}'], LEAVES)[1] == {0: "Undecodable: it is not JSON: it begins with a byte order mark"}


@pytest.mark.parametrize("text", ['5, "id": 7', "5}", "5 5", '"a', "5, 5", ""])
def test_key_that_is_not_json_adds_no_fields(text: str) -> None:
    columns, errors = json_fields.read(_key_texts([text], ("number",), [False]), [(("number",), "bigint"), (("id",), "bigint")])
    assert columns == [[None], [None]]
    assert errors.keys() == {0}


# ---- what a second attack found


def test_times_of_a_day_that_python_has_not() -> None:
    """Postgres has 24:00, and Arrow would wrap it to 00:00 in text."""
    times = pa.array([86_400_000_000, 94_359_738_368, -1, 0], pa.time64("us"))
    wrong = dict.fromkeys((0, 1, 2), "is not a time of a day")
    assert as_column(times, "text")[1] == wrong
    assert as_column(pa.array([[each] for each in times.cast(pa.int64()).to_pylist()], pa.list_(pa.time64("us"))), "jsonb")[1] == wrong
    structs = pa.StructArray.from_arrays([times], ["at"])
    assert as_column(structs, "jsonb") == (pa.array([None, None, None, '{"at":"00:00:00"}']), wrong)
    assert as_column(times, "time without time zone") == (times, {})


@pytest.mark.parametrize("name", ["io.debezium.time.Date", "io.debezium.time.MicroTimestamp", "org.apache.kafka.connect.data.Timestamp"])
def test_boolean_is_no_time_in_change_data(name: str) -> None:
    kind = {"field": "x", "type": "int64", "name": name}
    columns, errors = connect_json.read(['{"x": true}'], [(("x",), "timestamp without time zone")], [{"fields": [kind]}])
    assert (columns, "is a boolean" in errors[0]) == ([[None]], True)


def test_datetime_with_an_odd_zone() -> None:
    class Broken(dt.tzinfo):
        def utcoffset(self, _: dt.datetime | None) -> dt.timedelta:
            raise RuntimeError

    half = dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=500_000)))
    found, wrong = from_python([half, dt.datetime(2020, 1, 1, tzinfo=Broken())], "timestamp with time zone")
    assert found.to_pylist() == [dt.datetime(2019, 12, 31, 23, 59, 59, 500_000, UTC), None]
    assert wrong == {1: "cannot be converted: RuntimeError"}


def test_missing_field_at_any_depth_is_absent() -> None:
    leaf = (("a", "b", "c"), "bigint")
    texts = ["{}", '{"a": null}', '{"a": {}}', '{"a": {"b": {}}}', '{"a": {"b": {"c": null}}}', '{"a": {"b": {"c": 1}}}']
    for read in (json_fields.read(texts, [leaf], {leaf}), connect_json.read(texts, [leaf], [None] * 6, with_default={leaf})):
        assert read == ([[json_fields.ABSENT] * 4 + [None, 1]], {})
