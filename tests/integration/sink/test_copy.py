"""Arrow values are written to real columns by binary COPY: each is read back unchanged, or nothing is written."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import psycopg2
import psycopg2.extras
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fetching import fetched
from tests.support.sampling import examples

from tidemark.local import LocalStack
from tidemark.sink.encode import CopyStream
from tidemark.sink.fit import ExistingTable, create_ddl, has_unique_index, match
from tidemark.sink.table import LINEAGE, quoted, read_columns
from tidemark.sink.types import arrow_type, fits, postgres_type
from tidemark.spec.model import Sink

GIVEN = [("kafka_topic", pa.string()), ("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]


class Table:
    """A table for one test: fill it with COPY, and read it back."""

    def __init__(self, connection: Any) -> None:
        self.cur = connection.cursor()

    def make(self, *types: str) -> None:
        self._columns = [(f"c{number}", kind) for number, kind in enumerate(types)]
        self.cur.execute("DROP TABLE IF EXISTS it")
        self.cur.execute(f"CREATE TABLE it ({', '.join(f'{name} {kind}' for name, kind in self._columns)}, n bigserial)")

    def copy(self, *batches: Sequence[pa.Array]) -> int:
        """Conforms, encodes and sends the batches as a commit does. Returns the number of rows that Postgres accepted."""
        columns = [(name, column.type) for (name, _), column in zip(self._columns, read_columns(self.cur, "it"), strict=False)]
        made = []
        for arrays in batches:
            for array, (_, kind) in zip(arrays, columns, strict=True):
                assert fits(array.type, kind), f"{array.type} -> {kind}"
            made.append(pa.RecordBatch.from_arrays(list(arrays), names=[name for name, _ in columns]))
        stream = CopyStream(columns, iter(made))
        names = ", ".join(quoted(name) for name, _ in columns)
        self.cur.copy_expert(f"COPY it ({names}) FROM STDIN (FORMAT binary)", stream)
        assert self.cur.rowcount == stream.rows
        return int(self.cur.rowcount)

    def rows(self) -> list[tuple[Any, ...]]:
        shown = [name + kind.replace("real", "::double precision") * kind.startswith("real") for name, kind in self._columns]
        self.cur.execute(f"SELECT {', '.join(shown)} FROM it ORDER BY n")
        return [tuple(plain(value) for value in row) for row in self.cur.fetchall()]

    def sql(self, statement: str) -> list[Any]:
        self.cur.execute(statement)
        return fetched(self.cur)


def plain(value: Any) -> Any:
    """Converts the memory views of psycopg2 to bytes."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.fixture(scope="module")
def connection(stack: LocalStack) -> Iterator[Any]:
    name = f"copy_{uuid.uuid4().hex[:8]}"
    with contextlib.closing(psycopg2.connect(stack.create_database(name))) as connection:
        connection.autocommit = True
        psycopg2.extras.register_uuid(conn_or_curs=connection)
        with connection.cursor() as cur:
            cur.execute("SET timezone = 'UTC'; SET synchronous_commit = off; CREATE TYPE mood AS ENUM ('glad', 'sad')")
            cur.execute("CREATE DOMAIN positive AS numeric(9,2) NOT NULL DEFAULT 1 CHECK (VALUE > 0); CREATE DOMAIN tiny AS positive")
            cur.execute("CREATE DOMAIN feeling AS mood")
        yield connection
    with contextlib.closing(psycopg2.connect(stack.env()["TIDEMARK_DATABASE_URL"])) as admin:
        admin.autocommit = True
        with admin.cursor() as cur:
            cur.execute(f"DROP DATABASE {name}")


@pytest.fixture
def table(connection: Any) -> Table:
    return Table(connection)


def utc(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=dt.UTC)  # type: ignore[misc, arg-type]


def naive(*parts: int) -> dt.datetime:
    return utc(*parts).replace(tzinfo=None)


MOMENTS = [
    utc(1970, 1, 1), utc(1969, 12, 31, 23, 59, 59, 999_999), utc(2000, 1, 1), utc(2100, 2, 28, 12),
    utc(9999, 12, 31, 23, 59, 59, 999_999), utc(1, 1, 1),
]  # fmt: skip
EXTREMES: list[tuple[str, pa.DataType, list[Any]]] = [
    ("boolean", pa.bool_(), [True, False]),
    ("smallint", pa.int16(), [-(2**15), 2**15 - 1, 0]),
    ("integer", pa.int32(), [-(2**31), 2**31 - 1, -1]),
    ("bigint", pa.int64(), [-(2**63), 2**63 - 1, 0]),
    ("real", pa.float32(), [1.5, -0.0, math.inf, -math.inf, 2.0**127, 2.0**-149]),
    ("double precision", pa.float64(), [0.1, -0.0, math.inf, 1.7976931348623157e308, 5e-324]),
    ("text", pa.string(), ["", " ", "Ünïcode 日本 🚢", "a\tb\n\\N\r", "x" * 2**20]),
    ("character varying(3)", pa.string_view(), ["", "abc"]),
    ("bytea", pa.binary(), [b"", b"\0\xff", bytes(2**20)]),
    ("date", pa.date32(), [dt.date(1970, 1, 1), dt.date(1969, 12, 31), dt.date(2100, 3, 1), dt.date(9999, 12, 31), dt.date(1, 1, 1)]),
    ("time without time zone", pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999_999)]),
    ("timestamp with time zone", pa.timestamp("us", "UTC"), MOMENTS),
    ("timestamp without time zone", pa.timestamp("us"), [each.replace(tzinfo=None) for each in MOMENTS]),
    ("interval", pa.duration("us"), [dt.timedelta(0), dt.timedelta(microseconds=-1), dt.timedelta(36500, 1), dt.timedelta(-1)]),
    ("numeric(38,0)", pa.decimal128(38, 0), [Decimal("9" * 38), Decimal("-" + "9" * 38), Decimal(0)]),
    ("numeric(38,38)", pa.decimal128(38, 38), [Decimal("0." + "9" * 38), Decimal("-1e-38")]),
    ("numeric(10,2)", pa.decimal128(10, 2), [Decimal(text) for text in ("0.00", "0.01", "-0.10", "10000.00", "99999999.99", "100.01")]),
    ("numeric(12,4)", pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-12345678.90")]),
    ("numeric", pa.decimal128(38, 18), [Decimal("1.000000000000000001")]),
    ("numeric", pa.decimal256(50, 3), [Decimal("12345678901234567890.123")]),
    ("numeric", pa.decimal64(12, 2), [Decimal("-1234567890.12")]),
    ("numeric", pa.decimal32(5, 2), [Decimal("123.45")]),
    ("mood", pa.string(), ["glad", "sad"]),
    ("feeling", pa.string(), ["glad"]),
    ("integer[]", pa.list_(pa.int32()), [[], [1], [1, None, -(2**31)]]),
    ("text[]", pa.list_(pa.string()), [["", "a,b", '"', None, "NULL"]]),
    ("boolean[]", pa.list_(pa.bool_()), [[True, None, False]]),
    ("double precision[]", pa.list_(pa.float64()), [[0.5, math.inf]]),
    ("numeric(5,2)[]", pa.list_(pa.decimal128(5, 2)), [[Decimal("123.45"), None]]),
    ("numeric[]", pa.list_(pa.decimal128(38, 2)), [[Decimal("9" * 36 + ".99")]]),
    ("date[]", pa.list_(pa.date32()), [[dt.date(2024, 2, 29)]]),
    ("timestamp without time zone[]", pa.list_(pa.timestamp("us")), [[naive(1969, 7, 20)]]),
    ("timestamp with time zone[]", pa.list_(pa.timestamp("us", "UTC")), [[utc(1969, 7, 20), None]]),
    ("time without time zone[]", pa.list_(pa.time64("us")), [[dt.time(1)]]),
    ("interval[]", pa.list_(pa.duration("us")), [[dt.timedelta(hours=1)]]),
]  # fmt: skip


@pytest.mark.parametrize(("postgres", "arrow", "values"), EXTREMES, ids=[f"{arrow} as {postgres}" for postgres, arrow, _ in EXTREMES])
def test_every_value_comes_out_as_it_went_in(table: Table, postgres: str, arrow: pa.DataType, values: list[Any]) -> None:
    """The extremes of every type that can be written, and NULL. Other Arrow types of the same values become these before the COPY: see
    ``tests/unit/sink/test_types.py``."""
    table.make(postgres)
    wanted = [values[0], None, *values]
    table.copy([pa.array(wanted, arrow)])
    found = [value for (value,) in table.rows()]
    assert found == wanted
    assert arrow not in (pa.float32(), pa.float64()) or [str(value) for value in found] == [str(value) for value in wanted]  # -0.0


@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_json_text_becomes_json(table: Table, kind: str) -> None:
    """In both JSON types, SQL NULL and JSON ``null`` stay distinct."""
    table.make(kind)
    values = ['{"a": [1, null, "ü"]}', "null", None, '"x"', "1e2"]
    table.copy([pa.array(values)])
    assert [None if text is None else json.loads(text) for (text,) in table.sql("SELECT c0::text FROM it ORDER BY n")] == [
        None if text is None else json.loads(text) for text in values
    ]


def test_a_domain_is_written_as_what_it_is_made_of_and_keeps_its_check(table: Table) -> None:
    """This includes a domain over a domain. The NOT NULL and the default of a domain apply to its column."""
    table.make("tiny")
    column = read_columns(table.cur, "it")[0]
    assert (column.type, column.not_null, column.has_default) == ("numeric(9,2)", True, True)
    table.copy([pa.array([Decimal("1.50")], pa.decimal128(9, 2))])
    assert table.rows() == [(Decimal("1.50"),)]
    with pytest.raises(psycopg2.errors.CheckViolation):
        table.copy([pa.array([Decimal("-1.00")], pa.decimal128(9, 2))])
    with pytest.raises(psycopg2.errors.NotNullViolation):
        table.copy([pa.array([None], pa.decimal128(9, 2))])


FINITE = st.builds(lambda number, exponent: Decimal(number).scaleb(exponent), st.integers(-(10**40), 10**40), st.integers(-60, 60))


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.none() | FINITE, min_size=1, max_size=20))
def test_numbers_of_any_size_are_shown_with_the_digits_that_were_sent(table: Table, numbers: list[Decimal | None]) -> None:
    """Numbers in text, in a column without limits, alone and in an array."""
    table.make("numeric", "numeric[]")
    texts = [None if number is None else str(number) for number in numbers]
    table.copy([pa.array(texts, pa.string()), pa.array([[text] for text in texts], pa.list_(pa.string()))])
    wanted = [None if number is None else f"{number:f}" for number in numbers]
    shown = table.sql("SELECT c0::text, c1[1]::text FROM it ORDER BY n")
    assert shown == [(text, text) for text in wanted]


# ---- the columns of a sink


def test_the_ddl_that_is_printed_makes_the_table_that_the_guard_wants(table: Table) -> None:
    """For every Arrow type with a column type, the DDL is printed, executed, read back and matched, with and without partitions."""
    kinds = [kind for _, kind, _ in EXTREMES]
    schema = pa.schema([*((f"c{number} %", kind) for number, kind in enumerate(kinds) if postgres_type(kind)), *GIVEN])
    for name, partitions in (("sinks.one", None), ("sinks.many", 3)):
        table.sql(create_ddl(Sink(table=name), schema, "", partitions))
        assert has_unique_index(table.cur, name, [name for name, _ in LINEAGE])
        layout = match(Sink(table=name), ExistingTable(read_columns(table.cur, name)), schema)
        assert [column.name for column in layout.columns] == schema.names[:-3]


def test_columns_are_read_as_the_table_has_them(table: Table) -> None:
    """Order, type, and whether a value is required. Dropped columns do not appear, and a missing table has no columns."""
    table.sql(
        'CREATE TABLE "Odd" (a int, gone int, b timestamp(3) with time zone NOT NULL, "c ""d" mood, e feeling, f tiny, g varchar(5)[],'
        " h int GENERATED ALWAYS AS IDENTITY, i int GENERATED BY DEFAULT AS IDENTITY, j int GENERATED ALWAYS AS (a + 1) STORED,"
        " k text NOT NULL DEFAULT '')"
    )
    table.sql('ALTER TABLE "Odd" DROP gone')
    found = [(column.name, column.type, column.must_be_given, column.generated) for column in read_columns(table.cur, "Odd")]
    assert found == [
        ("a", "integer", False, False),
        ("b", "timestamp(3) with time zone", True, False),
        ('c "d', "enum", False, False),
        ("e", "enum", False, False),
        ("f", "numeric(9,2)", False, False),
        ("g", "character varying(5)[]", False, False),
        ("h", "integer", False, True),
        ("i", "integer", False, False),
        ("j", "integer", False, True),
        ("k", "text", False, False),
    ]
    assert read_columns(table.cur, "odd") == []


@pytest.mark.parametrize(
    ("index", "good"),
    [
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)", True),
        ("UNIQUE INDEX ON it (kafka_seq, kafka_offset, kafka_partition, kafka_topic_id)", True),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq) INCLUDE (c0)", True),
        ("INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)", False),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset)", False),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, c0)", False),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq) WHERE c0 = 1", False),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset, (kafka_seq + 0))", False),
        ("UNIQUE INDEX ON it (kafka_topic_id, kafka_partition, kafka_offset) INCLUDE (kafka_seq)", False),
    ],
)
def test_only_a_unique_index_on_exactly_the_lineage_counts(table: Table, index: str, good: bool) -> None:
    """This index prevents duplicate rows of a record."""
    table.sql("DROP TABLE IF EXISTS it; CREATE TABLE it (c0 int, " + ", ".join(f"{name} {kind}" for name, kind in LINEAGE) + ")")
    table.sql(f"CREATE {index}")
    assert has_unique_index(table.cur, "it", [name for name, _ in LINEAGE]) is good


# ---- any schema, any values


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "real": st.floats(width=32, allow_nan=False),
    "double precision": st.floats(allow_nan=False),
    "text": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    "bytea": st.binary(max_size=20),
    "date": st.dates(),
    "time without time zone": st.times(),
    "timestamp without time zone": st.datetimes(),
    "timestamp with time zone": st.datetimes(timezones=st.just(dt.UTC)),
    "interval": st.timedeltas(dt.timedelta(days=-10_000_000), dt.timedelta(days=10_000_000)),
    "numeric(12,3)": st.decimals(Decimal("-999999999.999"), Decimal("999999999.999"), places=3),
    "numeric(38,20)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda digits: Decimal(f"{digits}e-20")),
    "uuid": st.uuids(),
    "mood": st.sampled_from(["glad", "sad"]),
}
ARRAYS = [name for name in SCALARS if arrow_type(f"{name}[]") is not None]
KINDS = st.one_of(st.sampled_from(sorted(SCALARS)), st.sampled_from(ARRAYS).map(lambda name: f"{name}[]"))


def values_of(kind: str) -> st.SearchStrategy[Any]:
    element = SCALARS[kind.removesuffix("[]")]
    return st.none() | (st.lists(st.none() | element, max_size=4) if kind.endswith("[]") else element)


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[str], list[tuple[Any, ...]]]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=6))
    return kinds, draw(st.lists(st.tuples(*(values_of(kind) for kind in kinds)), max_size=12))


def arrow_array(kind: str, values: list[Any]) -> pa.Array:
    if kind == "mood":
        return pa.array(values, pa.string())
    if kind == "uuid":
        return pa.array([None if value is None else value.bytes for value in values], pa.binary(16))
    return pa.array(values, arrow_type(kind))


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(contents(), st.integers(0, 12))
def test_any_rows_of_any_columns_come_out_as_they_went_in(table: Table, content: tuple[list[str], list[tuple[Any, ...]]], cut: int) -> None:
    """Random schemas and random values, in two batches."""
    kinds, rows = content
    table.make(*kinds)
    batches = [[arrow_array(kind, [row[at] for row in part]) for at, kind in enumerate(kinds)] for part in (rows[:cut], rows[cut:])]
    table.copy(*batches)
    assert table.rows() == rows
