"""Consumers without code: what becomes a column, which records are skipped, and where keys come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemark.sink.table import Column
from tidemark.spec import SpecInvalid, load_consumer
from tidemark.values.connect_json import UNAVAILABLE
from tidemark.values.fields import FieldReserved, Fields, FieldsRefused, steps_of, transform_of

LINEAGE = [("kafka_topic", pa.string()), ("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]
FILE = "topics: [t]\nformat: {value: json}\nsink: {table: lake.t}\n"
LONG = "payment_instruction_" * 4


def given(value: pa.DataType, key: pa.DataType | None = None) -> pa.Schema:
    return pa.schema([*LINEAGE, ("key", key or pa.string()), ("value", value)])


def results(fields: Fields, values: Sequence[Any], keys: Sequence[str | None] | None = None) -> list[dict[str, Any]]:
    """The rows of records in JSON, with disposition and error."""
    count = len(values)
    texts = [None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
    columns = [["t"] * count, [0] * count, list(range(count)), list(keys or [None] * count), texts]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, given(pa.string()), strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=given(pa.string()))
    found: list[dict[str, Any]] = fields(batch).to_pylist()
    return [{"disposition": None, "error": None} | row for row in found]


def of_json(columns: dict[str, str], **more: Any) -> Fields:
    return Fields(json=frozenset({"key", "value"}), table=tuple(Column(*each) for each in columns.items()), **more)


# ---- columns


@pytest.mark.parametrize(("first", "second"), [("user_id", "user"), ("user", "user_id")])
def test_two_fields_with_the_name_of_one_column_are_refused(first: str, second: str) -> None:
    """Either of them would be lost without a word."""
    types = {"user_id": pa.int64(), "user": pa.struct([("id", pa.string())])}
    with pytest.raises(FieldsRefused) as caught:
        Fields(flatten="_").output(given(pa.struct([(name, types[name]) for name in (first, second)])), None)
    assert "both load column user_id" in str(caught.value)
    assert "user.id" in str(caught.value)


@pytest.mark.parametrize("more", [{"drop": frozenset({"user.id"})}, {"columns": (("owner", steps_of("user.id")),)}])
def test_the_ways_out_that_the_text_names_are_ways_out(more: Any) -> None:
    schema = given(pa.struct([("user_id", pa.int64()), ("user", pa.struct([("id", pa.string())]))]))
    assert "user_id" in Fields(flatten="_", **more).output(schema, None).names


@pytest.mark.parametrize("flatten", [None, "_"])
def test_name_that_postgres_would_cut_is_refused_with_its_path(flatten: str | None) -> None:
    kind = pa.struct([(LONG, pa.int64())]) if flatten is None else pa.struct([("p", pa.struct([(LONG, pa.int64())]))])
    path = LONG if flatten is None else f"p.{LONG}"
    with pytest.raises(FieldsRefused, match=f"columns: {{shorter: {path}}}"):
        Fields(flatten=flatten).output(given(kind), None)
    assert Fields(flatten=flatten, columns=(("short", steps_of(path)),)).output(given(kind), None).names[0] == "short"


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.list_(pa.string()), pa.map_(pa.string(), pa.int64())], ids=str)
def test_values_without_fields_are_loaded_as_a_whole_or_refused(kind: pa.DataType) -> None:
    with pytest.raises(FieldsRefused, match=r"columns: \{value: \$value\}"):
        Fields().output(given(kind), None)
    assert Fields(columns=(("doc", steps_of("$value")),)).output(given(kind), None).names[0] == "doc"


ORDER = pa.struct([("id", pa.int64()), ("place", pa.struct([("country", pa.string())])), ("error", pa.string())])


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\x1f"])
def test_json_field_whose_name_cannot_be_read_is_refused(name: str) -> None:
    with pytest.raises(FieldsRefused, match="has a quote, a backslash or a control character"):
        of_json({}).output(given(pa.string()), [Column("id", "integer"), Column(name, "integer")])


def test_field_that_the_schema_lacks_is_named() -> None:
    with pytest.raises(FieldsRefused, match=r'The schema has no field "place\.land"\. It has country\.'):
        Fields(columns=(("country", steps_of("place.land")),), drop=frozenset({"error"})).output(given(ORDER), None)


def test_field_with_the_name_of_a_column_with_a_meaning_is_refused() -> None:
    """The field would be mistaken for the reason of a failure."""
    with pytest.raises(FieldReserved, match=r"columns: \{error_: error\}, or drop it"):
        Fields().output(given(ORDER), None)
    assert "message" in Fields(columns=(("message", steps_of("error")),)).output(given(ORDER), None).names


# ---- records that are skipped


def test_time_that_python_has_not_is_not_null_in_skip_if() -> None:
    """A time after the year 9999."""
    values = pa.array([{"gone": 253_402_300_800_000_000}, {"gone": None}], pa.struct([("gone", pa.int64())]))
    values = values.cast(pa.struct([("gone", pa.timestamp("us", "UTC"))]))
    columns = [pa.array(column) for column in (["t"] * 2, [0, 0], [0, 1], pa.nulls(2, pa.string()))]
    batch = pa.RecordBatch.from_arrays([*columns, values], names=given(values.type).names)
    found = Fields(skip_if=(("gone", steps_of("gone"), (None,)),), table=(Column("gone", "timestamp with time zone"),))(batch)
    assert found["disposition"].to_pylist() == [None, "skip"]
    assert found["gone"].cast(pa.int64()).to_pylist() == [253_402_300_800_000_000, None]


@pytest.mark.parametrize(
    ("wanted", "skipped"),
    [(1, [1, 1.0]), (0, [0]), (True, [True]), (0.1, [0.1]), ("1", ["1"]), (None, [None])],
)
def test_skip_if_compares_types_as_well(wanted: Any, skipped: list[Any]) -> None:
    """In Python, 1 is True."""
    values = [1, 1.0, 0, True, False, 0.1, "1", None]
    rows = results(of_json({}, skip_if=(("x", steps_of("x"), (wanted,)),)), [{"x": value} for value in values])
    found = [value for value, row in zip(values, rows, strict=True) if row["disposition"] == "skip"]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in skipped]


@pytest.mark.parametrize(
    ("written", "is_refused"),
    [
        *((text, True) for text in ("NO", "on", "yes", "12:30", "010", "1_000", "0x1F", "1e3", "0b11", "190:20:30")),
        *((text, False) for text in ("true", "false", "10", "-1", "1.5", "null", "~", "SE", '"NO"', "'010'", "1.0e+3")),
    ],
)
def test_plain_text_that_yaml_takes_for_something_else_is_refused(tmp_path: Path, written: str, is_refused: bool) -> None:
    """YAML 1.1 takes NO for false and 12:30 for 750."""
    path = tmp_path / "c.yaml"
    path.write_text(f"{FILE}skip_if: {{country: [{written}, DE]}}\n")
    if is_refused:
        with pytest.raises(SpecInvalid, match=r"in YAML 1\.1"):
            load_consumer(path)
    else:
        load_consumer(path)


# ---- keys


@pytest.mark.parametrize(("kind", "key", "expected"), [("text", '"a1"', "a1"), ("bigint", "17", 17), ("bigint", '{"id": 17}', 17)])
def test_key_of_a_tombstone_may_be_one_value_or_an_object(kind: str, key: str, expected: Any) -> None:
    (row,) = results(of_json({"id": kind}, upsert=True, key=("id",)), [None], [key])
    assert (row["disposition"], row["id"], row["error"]) == ("delete", expected, None)


def test_tombstone_changes_nothing_for_its_neighbours() -> None:
    """The keys of records that do not delete are not read, so they need not be JSON."""
    fields = of_json({"id": "bigint"}, upsert=True, key=("id",))
    rows = results(fields, [{"id": 1}, None, {"id": 3}], ["no JSON", '{"id": 2}', None])
    assert [(row["disposition"], row["id"]) for row in rows] == [(None, 1), ("delete", 2), (None, 3)]


# ---- values


@pytest.mark.parametrize("value", [UNAVAILABLE, [UNAVAILABLE], {"a": UNAVAILABLE}])
def test_placeholder_of_debezium_is_not_stored_from_a_topic_without_envelopes(value: Any) -> None:
    """ExtractNewRecordState leaves it in."""
    rows = results(of_json({"id": "bigint", "x": "jsonb"}), [{"id": 1, "x": value}, {"id": 2, "x": "a"}])
    assert rows[0]["error"].startswith("Fail: x is not in the record, because the value is large (TOAST)")
    assert rows[1]["disposition"] is None


def test_placeholder_that_the_connector_was_given_is_not_stored_either(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace("json}", "json, placeholder: __gone__}"))
    fields = transform_of(load_consumer(path), ()).function
    assert isinstance(fields, Fields)
    rows = results(fields.bound([Column("x", "text")]), [{"x": "__gone__"}, {"x": UNAVAILABLE}])
    assert [(row["disposition"], row["x"]) for row in rows] == [("fail", "__gone__"), (None, UNAVAILABLE)]


@pytest.mark.parametrize("mark", ["true", True])
def test_row_that_unwrapped_change_data_marks_as_deleted_is_deleted(mark: Any) -> None:
    """Only its key is needed: other columns may be null, or may not have been sent."""
    fields = of_json({"id": "bigint", "n": "integer"}, upsert=True, key=("id",))
    deleted = {"id": 1, "n": "not sent", "__deleted": mark}
    rows = results(fields, [deleted, {"id": 2, "n": 5, "__deleted": "false"}, deleted | {"id": "x"}])
    assert [(row["disposition"], row["id"], row["n"]) for row in rows] == [("delete", 1, None), (None, 2, 5), ("fail", None, None)]
    (row,) = results(of_json({"id": "bigint"}, upsert=True), [deleted])
    assert (row["disposition"], "set sink.deletes" in row["error"]) == ("fail", True)
    (row,) = results(of_json({"id": "bigint"}), [deleted])
    assert row["disposition"] is None


def test_mark_of_deleted_rows_is_no_column_of_an_upsert_sink() -> None:
    schema = given(pa.struct([("id", pa.int64()), ("__deleted", pa.string())]))
    assert "__deleted" not in Fields(upsert=True, key=("id",)).output(schema, None).names
    assert "__deleted" in Fields().output(schema, None).names


@pytest.mark.parametrize("text", ["9" * 5_000, "1e9999999999999999999", "1e100000000"])
def test_number_of_any_size_costs_what_its_digits_cost(text: str) -> None:
    rows = results(of_json({"id": "bigint", "x": "numeric"}), [f'{{"id": 1, "x": {text}}}', {"id": 2, "x": 1}])
    assert (rows[0]["disposition"], rows[1]["x"]) in ((None, "1"), ("fail", "1"))
    assert rows[0]["x"] is None or Decimal(rows[0]["x"]) == Decimal(text)


def test_value_that_does_not_fit_names_column_and_field() -> None:
    """And what came. Text in JSON is stored as the table of conversions says."""
    fields = replace(of_json({"id": "bigint", "lat": "double precision"}), columns=(("lat", steps_of("place.lat")),))
    good, bad, worse = results(fields, [{"id": "7", "place": {"lat": "1.5"}}, {"place": {"lat": "north"}}, {"id": [7]}])
    assert (good["id"], good["lat"], good["disposition"]) == (7, 1.5, None)
    assert bad["error"] == "Fail: lat (from place.lat) does not fit double precision: the value is text that is not a number"
    assert worse["error"] == "Fail: id does not fit bigint: the value is a list"
