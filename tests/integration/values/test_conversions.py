"""The conversion table, cell by cell, on a real Postgres: each value is stored as it was sent, or refused with a reason.

`EXPECTED` says in plain Python what must be stored, by other means than the code under test: ``decimal``, ``json``, ``datetime`` and
``struct``.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from decimal import Context, Decimal, localcontext
from typing import Any

import psycopg2
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sampling import ALL

from tidemark.local import LocalStack
from tidemark.sink.encode import CopyStream
from tidemark.sink.types import base_of
from tidemark.values import json_fields
from tidemark.values.conversion import CELLS, Kind, Rule, as_column, cell, converts, from_python

REFUSED = object()
VALUES_AT_ONCE = 25
VALUES_IN_ALL = 5_000 if ALL else 200
"""For each cell."""
COLUMNS = [
    "boolean", "smallint", "integer", "bigint", "real", "double precision",
    "numeric", "numeric(78,0)", "numeric(12,2)", "numeric(5,-2)", "numeric(10,20)",
    "text", "character varying(8)", "bytea", "uuid", "mood", "json", "jsonb",
    "date", "time without time zone", "time(3) without time zone", "interval",
    "timestamp without time zone", "timestamp(0) without time zone", "timestamp with time zone", "timestamp(3) with time zone",
]  # fmt: skip
MOODS = ["sad", "ok"]

# ---- values

EDGES = [0, 1, 7, *(sign * 2**power + more for power in (15, 31, 53, 63, 64, 256) for sign in (1, -1) for more in (-1, 0, 1)), 10**22]
INTEGERS = st.sampled_from(EDGES) | st.integers(-(2**70), 2**70)
FLOATS = (
    st.sampled_from([0.1, 0.1 + 0.2, 1e300, 5e-324, 3.0, 2.0**63, float("nan"), float("inf"), -0.0]) | st.floats() | st.floats(width=32)
)
HUGE = ["1e100000000", "-1e100000000", "1e-100000000", "0e-400000", "1e131071", "1e131072", "1e-16383", "1e-16384"]
DIGITS = st.lists(st.integers(0, 9), min_size=1, max_size=60).map(tuple)
DECIMALS = st.one_of(
    st.sampled_from(["12.50", "3.0", "1e2", "1e-30", "NaN", "Infinity", *HUGE]).map(Decimal),
    st.decimals(allow_nan=False, allow_infinity=False),
    FLOATS.filter(math.isfinite).map(repr).map(Decimal),
    st.builds(lambda digits, exponent: Decimal((0, digits, exponent)), DIGITS, st.integers(-60, 60)),
)
ZONES = st.sampled_from(["Z", "+00:00", "+05:30", "-09:00", "+14:00"])
TIMES = st.times() | st.times().map(lambda value: value.replace(microsecond=value.microsecond // 1000 * 1000))
STAMPS = st.datetimes() | st.datetimes().map(lambda value: value.replace(microsecond=0))
FIRST, LAST = map(dt.datetime.fromisoformat, ("0002-01-01", "9998-12-30"))
AWARE = st.datetimes(FIRST, LAST, timezones=st.timezones() | st.just(dt.UTC), allow_imaginary=False)
ISO = st.one_of(
    st.dates().map(str), TIMES.map(str), STAMPS.map(dt.datetime.isoformat), STAMPS.map(str), AWARE.map(dt.datetime.isoformat),
    st.builds("{}{}{}".format, STAMPS.map(dt.datetime.isoformat), st.sampled_from(["", ".5", ".123456789", ".120000000"]), ZONES),
)  # fmt: skip
ODD = [
    "0x10", "1_000", "true", "t", "1,5", "NaN", "nan", "Infinity", "-inf", "+5", ".5", "5.", "2^3", "2026-02-30", "24:00:00", "2026-01-01",
    "P1DT2H", "PT0.0000001S", "P1M", "sad", "ok", "null", "{}", "[]",
]  # fmt: skip
PRINTABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TEXTS = st.one_of(
    st.sampled_from([*ODD, "", " 1", "1 ", "٣", "abcdefgh ", "2026-W01-1", "20260101T000000Z"]),
    PRINTABLE, ISO, INTEGERS.map(str), DECIMALS.map(str), FLOATS.map(repr), st.uuids().map(str), st.uuids().map(lambda value: value.hex),
)  # fmt: skip
MODERATE = DECIMALS.filter(lambda number: str(number) not in map(str, map(Decimal, HUGE)))
NESTED: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | PRINTABLE | MODERATE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=3),
    max_leaves=5,
)
VALUES: Mapping[Kind, st.SearchStrategy[Any]] = {
    Kind.BOOLEAN: st.booleans(),
    Kind.INTEGER: INTEGERS,
    Kind.DECIMAL: DECIMALS,
    Kind.FLOAT: FLOATS,
    Kind.TEXT: TEXTS,
    Kind.BYTES: st.binary(max_size=20) | st.binary(min_size=16, max_size=16) | PRINTABLE.map(str.encode),
    Kind.UUID: st.uuids(),
    Kind.DATE: st.dates(),
    Kind.TIME: TIMES,
    Kind.TIMESTAMP: STAMPS,
    Kind.TIMESTAMPTZ: AWARE,
    Kind.INTERVAL: st.timedeltas(),
    Kind.RECORD: st.dictionaries(PRINTABLE, NESTED, max_size=3),
    Kind.LIST: st.lists(NESTED, max_size=3),
}

# ---- what must be stored


def number_in(text: str) -> Any:
    """Text that is a number in Postgres' decimal notation."""
    if re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return Decimal(text)
    plain = text.lower().removeprefix("+").removeprefix("-")
    is_word = plain in ("nan", "inf", "infinity") and not (plain == "nan" and text.lower() != "nan" and text[:1] not in "+-")
    return Decimal(text.lower().lstrip("+") if plain != "nan" else "nan") if is_word and text.isascii() else REFUSED


def whole(value: Any, column: str) -> Any:
    if value is REFUSED or not value.is_finite() or (value and value.adjusted() > 30):
        return REFUSED
    number = int(value)
    bits = {"smallint": 16, "integer": 32, "bigint": 64}[column]
    return number if number == value and -(2 ** (bits - 1)) <= number < 2 ** (bits - 1) else REFUSED


def floating(value: Any, column: str) -> Any:
    """The nearest float, if its digits, as many as were sent, are those that were sent."""
    if value is REFUSED:
        return REFUSED
    if not value.is_finite():
        return float(value)
    nearest = float(value)
    if column == "real":
        try:
            (nearest,) = struct.unpack("f", struct.pack("f", nearest))
        except OverflowError:
            return REFUSED
    if math.isinf(nearest) or (not nearest) is not (not value):
        return REFUSED
    digits = len("".join(map(str, value.as_tuple().digits)).rstrip("0")) or 1
    same = Context(prec=digits).create_decimal(Decimal(nearest)) == value
    return nearest if same else REFUSED


def numeric(value: Any, column: str) -> Any:
    if value is REFUSED or value.is_nan():
        return value
    found = re.search(r"\((\d+),(-?\d+)\)", column)
    precision, scale = (int(found[1]), int(found[2])) if found else (131_072 + 16_383, 16_383)
    if value.is_infinite():
        return REFUSED if found else value
    if value == 0:
        return value if -value.as_tuple().exponent <= 16_383 else REFUSED
    if value.adjusted() >= precision - scale or value.adjusted() < -scale:
        return REFUSED
    with localcontext(Context(prec=200_000, Emax=10**9, Emin=-(10**9))):
        fits = value.scaleb(scale) == value.scaleb(scale).to_integral_value() if found else -value.as_tuple().exponent <= scale
    return value if fits else REFUSED


def iso(text: str, column: str) -> Any:
    """Text in ISO 8601 with all parts, as the column's type."""
    date, time, zone = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d(:\d\d([.,]\d+)?)?", r"(Z|[+-]\d\d(:?\d\d(:?\d\d)?)?)"
    base = base_of(column)
    pattern, parse = {
        "date": (date, dt.date.fromisoformat),
        "time without time zone": (time, dt.time.fromisoformat),
        "timestamp without time zone": (f"{date}[T ]{time}", dt.datetime.fromisoformat),
        "timestamp with time zone": (f"{date}[T ]{time}{zone}", dt.datetime.fromisoformat),
    }[base]
    if not re.fullmatch(pattern, text, re.ASCII):
        return REFUSED
    fraction = re.search(r"[.,](\d+)", text)
    if fraction and set(fraction[1][6:]) - {"0"}:
        return REFUSED
    try:
        return finer(parse(re.sub(r"([.,]\d{6})\d+", r"\1", text)), column)
    except (ValueError, OverflowError):
        return REFUSED


def finer(value: Any, column: str) -> Any:
    found = re.search(r"\((\d)\)", column)
    lost = found is not None and getattr(value, "microsecond", 0) % 10 ** (6 - int(found[1]))
    return REFUSED if lost else value


def as_json(value: Any) -> Any:
    """The value as JSON has it, with Decimal numbers."""
    if isinstance(value, float | Decimal) and not Decimal(value).is_finite():
        raise ValueError
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal):
        return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_json(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def json_of(value: Any, column: str) -> Any:
    try:
        found = as_json(value)
    except ValueError:
        return REFUSED
    return REFUSED if column == "jsonb" and any(numeric(number, "numeric") is REFUSED for number in numbers_in(found)) else found


def numbers_in(value: Any) -> Iterator[Decimal]:
    """``jsonb`` holds them as ``numeric``."""
    if isinstance(value, Decimal):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from numbers_in(each)


def same(value: Any, _: str) -> Any:
    return value


def moment(value: Any, column: str) -> Any:
    number = whole(Decimal(value), "bigint")
    return REFUSED if number is REFUSED or not FIRST_MS <= number < END_MS else ("milliseconds", number)


FIRST_MS, END_MS = -210_866_803_200_000, 9_224_318_016_000_000
"""Postgres' timestamps begin in 4714 BC and end with the year 294276."""


def interval(value: dt.timedelta, _: str) -> Any:
    return value if -(2**63) <= value // dt.timedelta(microseconds=1) < 2**63 else REFUSED


def text_of(value: Any, column: str) -> Any:
    return value if "(8)" not in column or len(value) <= 8 else REFUSED


def json_text_of(value: Any, column: str) -> Any:
    found = json_of(value, column)
    return REFUSED if found is REFUSED else ("json", found)


Reference = Callable[[Any, str], Any]
"""What must be stored of a value in a column, or `REFUSED`."""
WHOLE: Mapping[str, Reference] = dict.fromkeys(("smallint", "integer", "bigint"), whole)
STORES: Mapping[str, Reference] = {**WHOLE, **dict.fromkeys(("real", "double precision"), floating), "numeric": numeric}
NUMBERS: Mapping[str, Reference] = {
    name: lambda value, column, stores=stores: stores(Decimal(value), column) for name, stores in STORES.items()
}
PARSED: Mapping[str, Reference] = {
    **{name: lambda text, column, stores=stores: stores(number_in(text), column) for name, stores in STORES.items()},
    **dict.fromkeys(("date", "time without time zone", "timestamp without time zone", "timestamp with time zone"), iso),
}
JSON: Mapping[str, Reference] = {"json": json_of, "jsonb": json_of}


def parsed_uuid(text: str, _: str) -> Any:
    try:
        return uuid.UUID(text)
    except ValueError:
        return REFUSED


def real_of_double(value: float, _: str) -> Any:
    if not math.isfinite(value):
        return value
    try:
        (single,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return REFUSED
    return single if single == value else floating(Decimal(repr(value)), "real")


def utf8(value: bytes, column: str) -> Any:
    try:
        found = value.decode()
    except UnicodeDecodeError:
        return REFUSED
    return REFUSED if "\0" in found else text_of(found, column)


def parsed_json(text: str, column: str) -> Any:
    """Text for a JSON column is JSON."""
    try:
        return json_of(loaded(text), column)
    except (ValueError, ZeroDivisionError):
        return REFUSED


def loaded(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=lambda _: 1 / 0)


def plain_number(value: Any, _: str) -> Any:
    return ("number", Decimal(repr(value)) if isinstance(value, float) else Decimal(value))


def of_text(reference: Reference) -> Mapping[str, Reference]:
    """For kinds that JSON has as text."""
    return dict.fromkeys(("text", *JSON), reference)


EXPECTED: Mapping[Kind, Mapping[str, Reference]] = {
    Kind.BOOLEAN: {"boolean": same, "text": lambda value, _: str(value).lower(), **JSON},
    Kind.INTEGER: {**NUMBERS, "text": plain_number, "timestamp with time zone": moment, **JSON},
    Kind.DECIMAL: {**NUMBERS, "text": plain_number, "timestamp with time zone": moment, **JSON},
    Kind.FLOAT: {
        **{name: NUMBERS[name] for name in WHOLE},
        "real": real_of_double,
        "double precision": same,
        "text": plain_number,
        **JSON,
    },
    Kind.TEXT: {
        **PARSED,
        "text": same,
        "character varying": text_of,
        "uuid": parsed_uuid,
        "json": parsed_json,
        "jsonb": parsed_json,
        "mood": lambda text, _: text if text in MOODS else REFUSED,
    },
    Kind.BYTES: {
        "bytea": same,
        "text": utf8,
        "character varying": utf8,
        **JSON,
        "uuid": lambda value, _: uuid.UUID(bytes=value) if len(value) == 16 else REFUSED,
    },
    Kind.UUID: {"uuid": same, "text": lambda value, _: str(value), **JSON},
    Kind.DATE: {"date": same, **of_text(lambda value, _: value.isoformat())},
    Kind.TIME: {"time without time zone": finer, **of_text(lambda value, _: value.isoformat())},
    Kind.TIMESTAMP: {"timestamp without time zone": finer, **of_text(lambda value, _: ("time", value))},
    Kind.TIMESTAMPTZ: {"timestamp with time zone": finer, **of_text(lambda value, _: ("time", value))},
    Kind.INTERVAL: {"interval": interval},
    Kind.RECORD: {"text": json_text_of, **JSON},
    Kind.LIST: {"text": json_text_of, **JSON},
}
"""By kind and column. Of an interval as text, only that it is stored is tested."""

# ---- what is stored

SHOWN = {
    "real": "x::float8::text",
    "bytea": "encode(x, 'hex')",
    "timestamp with time zone": "extract(epoch from x)::text",
    "timestamp without time zone": "extract(epoch from x)::text",
    "interval": "extract(epoch from x)::text",
}
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MICROSECOND = dt.timedelta(microseconds=1)


def is_stored(expected: Any, stored: str, column: str) -> bool:
    """Whether a column's value, shown as `SHOWN` or as text, is the expected one."""
    base = base_of(column)
    what, value = expected if isinstance(expected, tuple) else (base, expected)
    if what in ("json", "jsonb"):
        return bool(loaded(stored) == value)
    if what == "number" or what in ("numeric", "real", "double precision"):
        number = Decimal(stored) if what in ("number", "numeric") else float(stored)
        return bool(number == value or (number != number and value != value))
    if what == "milliseconds":
        return Decimal(stored) * 1000 == value
    if what == "time":
        found = dt.datetime.fromisoformat(stored.strip('"'))
        return found == value if value.tzinfo is None else found.astimezone(dt.UTC) == value.astimezone(dt.UTC)
    if what.startswith("timestamp"):
        aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        return Decimal(stored) * 10**6 == (aware - EPOCH) // MICROSECOND
    if what == "interval":
        return Decimal(stored) * 10**6 == value // MICROSECOND
    if what == "bytea":
        return bytes.fromhex(stored) == value
    if what == "time without time zone":
        return dt.time.fromisoformat(stored) == value
    return stored == (str(value).lower() if isinstance(value, bool) else str(value))


class Column:
    """A table with one column, in a database with the type ``mood``."""

    def __init__(self, cur: Any, kind: str) -> None:
        self.cur, self.kind = cur, kind
        self.sent = kind if kind != "mood" else "enum"
        cur.execute(f"DROP TABLE IF EXISTS it; CREATE TABLE it (n int, x {kind})")

    def stored(self, values: pa.Array, wrong: Mapping[int, str]) -> list[str | None]:
        """What is in the table after a COPY of the values, as text; `None` of those that were refused, here or by Postgres."""
        found: list[str | None] = [None] * len(values)
        places = [at for at in range(len(values)) if at not in wrong]
        try:
            self._copy(values, places)
        except psycopg2.Error:
            places = [at for at in places if self._loads(values, at)]
            self._copy(values, places)
        self.cur.execute(f"SELECT n, {SHOWN.get(base_of(self.kind), 'x::text')} FROM it")
        for at, text in self.cur.fetchall():
            found[at] = text
        return found

    def _loads(self, values: pa.Array, at: int) -> bool:
        try:
            self._copy(values, [at])
        except psycopg2.Error:
            return False
        return True

    def _copy(self, values: pa.Array, places: list[int]) -> None:
        self.cur.execute("TRUNCATE it")
        batch = pa.RecordBatch.from_arrays([pa.array(places, pa.int32()), values.take(pa.array(places, pa.int64()))], names=["n", "x"])
        stream = CopyStream([("n", "integer"), ("x", self.sent)], iter([batch]))
        self.cur.copy_expert("COPY it FROM STDIN (FORMAT binary)", stream)


@pytest.fixture(scope="module")
def cur(stack: LocalStack) -> Iterator[Any]:
    connection = psycopg2.connect(stack.create_database(f"conversions_{uuid.uuid4().hex[:8]}"))
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
        cursor.execute("SET timezone = 'UTC'")
        yield cursor
    connection.close()


IN_JSON = (Kind.BOOLEAN, Kind.INTEGER, Kind.DECIMAL, Kind.TEXT, Kind.RECORD, Kind.LIST)
CASES = [
    (kind, column)
    for kind in Kind
    for column in COLUMNS
    if cell(kind, "enum" if column == "mood" else column) is not None and ("varying" not in column or kind in (Kind.TEXT, Kind.BYTES))
]
ARROW = {
    Kind.BOOLEAN: pa.bool_(),
    Kind.INTEGER: pa.int64(),
    Kind.DECIMAL: pa.decimal128(38, 10),
    Kind.FLOAT: pa.float64(),
    Kind.TEXT: pa.string(),
    Kind.BYTES: pa.binary(),
    Kind.DATE: pa.date32(),
    Kind.TIME: pa.time64("us"),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
    Kind.INTERVAL: pa.duration("us"),
}
"""Of decoded values. Those that these types cannot hold cannot be sent so."""


@pytest.mark.parametrize(("kind", "column"), CASES, ids=[f"{kind.name.lower()}-{column}" for kind, column in CASES])
def test_value_is_stored_as_it_was_sent_or_refused_with_a_reason(cur: Any, kind: Kind, column: str) -> None:
    """From a function, from JSON, and decoded, by the same rule."""
    table = Column(cur, column)
    expect = EXPECTED[kind].get(base_of(column))
    always = CELLS[kind][base_of(table.sent)].rule is Rule.ALWAYS

    @settings(max_examples=VALUES_IN_ALL // VALUES_AT_ONCE, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(VALUES[kind], min_size=VALUES_AT_ONCE, max_size=VALUES_AT_ONCE))
    def tried(values: list[Any]) -> None:
        check("function", values, *from_python(values, table.sent))
        if kind in IN_JSON and not (kind is Kind.TEXT and "json" in column):
            sent = [value for value in values if json_of(value, "json") is not REFUSED]
            texts = [f'{{"x": {written(value)}}}' for value in sent]
            (found,), errors = json_fields.read(texts, [(("x",), table.sent)])
            assert not errors
            check("JSON", sent, *from_python(found, table.sent))
        if (arrow := ARROW.get(kind)) is not None:
            sent = [value for value in values if held(value, arrow)]
            assert converts(arrow, table.sent)
            check("decoded", sent, *as_column(pa.array(sent, arrow), table.sent))

    def check(way: str, values: list[Any], array: pa.Array, wrong: Mapping[int, str]) -> None:
        stored = table.stored(array, wrong)
        for at, (value, text) in enumerate(zip(values, stored, strict=True)):
            if expect is None:
                continue
            expected = expect(value, column)
            if expected is REFUSED:
                assert text is None, f"{way}: {value!r} is stored as {text}"
            else:
                assert text is not None, f"{way}: {value!r} is refused: {wrong.get(at)}"
                assert is_stored(expected, text, column), f"{way}: {value!r} is stored as {text}"
            assert not (always and wrong) or "(" in column, f"{way}: {wrong}"

    tried()


def held(value: Any, arrow: pa.DataType) -> bool:
    if isinstance(value, Decimal) and (
        not value.is_finite() or numeric(value, "numeric(38,10)") is REFUSED or value.as_tuple().exponent < -30
    ):
        return False  # Arrow crashes on some of them
    try:
        made = pa.array([value], arrow)
        return bool(made.to_pylist() == [value] or value != value)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        return False


def written(value: Any) -> str:
    """JSON with the digits of Decimal numbers."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)
