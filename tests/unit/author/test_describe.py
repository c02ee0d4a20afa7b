"""How Tidemark finds out what a transform returns, without a record."""

from __future__ import annotations

import datetime as dt
import decimal
import typing
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Literal, NotRequired, Optional, TypedDict, Union

import pyarrow as pa
import pytest

from tidemark.author.describe import OutputUnknown, _function_schema, declared_columns, outputs_of
from tidemark.records.outcome import ONLY
from tidemark.sink.fit import ExistingTable, SinkMismatch, match
from tidemark.sink.table import LINEAGE, Column
from tidemark.spec.model import Sink
from tidemark.spec.user_transform import Form, Transform
from tidemark.transform import Record
from tidemark.worker.batches import input_schema
from tidemark.worker.call_transform import TransformFailed

LINEAGE_COLUMNS = [Column(name, kind, not_null=True) for name, kind in LINEAGE]


class Row(TypedDict):
    city: str
    population: NotRequired[int | None]


class Hidden(TypedDict):
    city: OnlyForTheTypeChecker  # type: ignore[name-defined]  # noqa: F821


def transform(function: Callable[..., Any], form: Form = Form.FUNCTION) -> Transform:
    return Transform(form, function, "departures", "transform")


def returning(annotation: Any) -> Transform:
    def function(record: Record) -> Any: ...

    function.__annotations__["return"] = annotation
    return transform(function)


def no_spark(function: Callable[..., Any], given: pa.Schema) -> pa.Schema:
    raise AssertionError("Spark was called")


COLUMNS = {"city": pa.string(), "population": pa.int64()}


@pytest.mark.parametrize(
    "annotation",
    [
        Row,
        Row | None,
        Optional[Row],  # noqa: UP045
        Union[None, Row],  # noqa: UP007
        list[Row],
        list[Row] | None,
        Row | list[Row] | None,
        Iterable[Row],
        Iterator[Row],
        Generator[Row, None, None],
        tuple[Row, ...],
        typing.List[Row],  # noqa: UP006
        "Row",
        "list[Row] | None",
    ],
    ids=str,
)
def test_a_typed_dict_names_the_columns_wherever_it_stands_in_the_result(annotation: Any) -> None:
    """The result may be one row, several, or none. Tidemark fills in the lineage."""
    assert declared_columns(returning(annotation)) == COLUMNS
    schema = outputs_of(returning(annotation), [ONLY], no_spark, input_schema())[ONLY]
    assert schema.names == ["city", "population", "kafka_topic", "kafka_partition", "kafka_offset"]


@pytest.mark.parametrize(
    "annotation",
    [None, dict, dict[str, Any], list, typing.List, list[dict[str, int]], Any, "Unheard", Hidden, list[Hidden], Iterable[int]],  # noqa: UP006
    ids=str,
)
def test_a_result_without_a_typed_dict_declares_nothing(annotation: Any) -> None:
    """This includes annotations with names that only a type checker knows."""
    assert declared_columns(returning(annotation)) is None
    with pytest.raises(OutputUnknown, match="departures:transform does not declare the columns it returns"):
        outputs_of(returning(annotation), [ONLY], no_spark, input_schema())


def matched(kind: Any, postgres: str) -> str:
    """The type of a column that a function fills with values of this Python type."""
    columns = [*LINEAGE_COLUMNS, Column("x", postgres)]
    schema = _function_schema(declared_columns(returning(TypedDict("Made", {"x": kind}))), columns)  # type: ignore[operator]
    (column,) = match(Sink(table="a.b"), ExistingTable(columns), schema).columns
    return column.type


@pytest.mark.parametrize(
    ("kind", "postgres"),
    [
        (bool, ["boolean"]),
        (int, ["smallint", "integer", "bigint", "real", "double precision", "numeric", "numeric(10,2)"]),
        (float, ["real", "double precision"]),
        (str, ["text", "character varying(3)", "json", "jsonb", "uuid", "enum", "name"]),
        (bytes, ["bytea"]),
        (dt.datetime, ["timestamp with time zone", "timestamp without time zone", "timestamp(3) with time zone"]),
        (dt.date, ["date"]),
        (dt.time, ["time without time zone"]),
        (dt.timedelta, ["interval"]),
        (decimal.Decimal, ["numeric", "numeric(10,2)", "numeric(38,0)"]),
        (uuid.UUID, ["uuid"]),
        (int | None, ["integer"]),
        (Literal[1, 2], ["integer"]),
        (Literal["a", "b"], ["text"]),
        (list[int], ["integer[]", "bigint[]", "double precision[]"]),
        (list[str], ["text[]"]),
        (list[dt.datetime], ["timestamp without time zone[]"]),
        (dict[str, int], ["jsonb", "json"]),
        *((kind, ["jsonb"]) for kind in (dict[int, int], tuple[int, ...], list[dict[str, int]], dict)),
        (Any, ["jsonb", "text"]),
    ],
    ids=str,
)
def test_a_python_type_goes_into_every_column_that_holds_its_values(kind: Any, postgres: list[str]) -> None:
    """Rows are created in the table's types, so the declared type need not be the column's type, only compatible with it."""
    assert [matched(kind, column_type) for column_type in postgres] == postgres


@pytest.mark.parametrize(
    ("kind", "postgres"),
    [
        *((str, "bytea"), (float, "numeric"), (bool, "integer"), (dt.datetime, "date")),
        *((list[int], "integer"), (int, "integer[]"), (dict, "bytea")),
    ],
    ids=str,
)
def test_a_python_type_that_disagrees_with_its_column_is_refused_before_a_record_is_read(kind: Any, postgres: str) -> None:
    """A mistake in the function is found once, not once per record."""
    with pytest.raises(SinkMismatch, match="column x"):
        matched(kind, postgres)


def test_a_function_that_declares_nothing_may_return_every_column_without_a_default() -> None:
    """Columns that the table fills in itself are not expected."""
    filled_in = [Column("made_at", "timestamp with time zone", has_default=True), Column("slug", "text", generated=True)]
    assert _function_schema(None, [*LINEAGE_COLUMNS, Column("city", "text"), *filled_in]).names == [
        "city",
        "kafka_topic",
        "kafka_partition",
        "kafka_offset",
    ]


def test_an_arrow_transform_is_asked_with_an_empty_batch() -> None:
    """Its answer has the same columns as every later one."""

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert (batch.num_rows, batch.schema) == (0, input_schema())
        return batch.select(["value", "kafka_topic", "kafka_partition", "kafka_offset"])

    assert outputs_of(transform(function, Form.ARROW), [ONLY], no_spark, input_schema())[ONLY].names[0] == "value"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda batch: batch["value"][0].as_py(), "IndexError.*It must also accept an empty batch"),
        (lambda batch: batch.to_pandas(), "it returned DataFrame; it must return a pyarrow.RecordBatch"),
    ],
)
def test_an_arrow_transform_that_cannot_answer_an_empty_batch_is_told_so(function: Callable[..., Any], problem: str) -> None:
    """This happens before anything is read."""
    with pytest.raises(TransformFailed, match=problem):
        outputs_of(transform(function, Form.ARROW), [ONLY], no_spark, input_schema())


def test_a_spark_transform_is_described_by_spark() -> None:
    """Only Spark can say what a plan returns."""
    schema = pa.schema([("city", pa.string())])
    assert outputs_of(transform(len, Form.SPARK), [ONLY], lambda function, given: {ONLY: schema}, input_schema()) == {ONLY: schema}
