"""The conversion table in `docs/formats.md` is the one in the code."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tidemark.sink.types import fits
from tidemark.values.conversion import CELLS, Kind, Rule, converts, kind_of

PAGE = Path(__file__).parents[3] / "docs" / "formats.md"
COLUMNS = {
    "boolean": "boolean",
    "smallint, integer, bigint": "bigint",
    "real": "real",
    "double precision": "double precision",
    "numeric": "numeric",
    "text, varchar, char": "text",
    "bytea": "bytea",
    "uuid": "uuid",
    "date": "date",
    "time": "time without time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "interval": "interval",
    "json, jsonb": "jsonb",
    "an enum": "enum",
}
"""As the page groups them, each with one column of the group."""


def written(kind: Kind) -> str:
    """The row of a kind."""
    of = {rule: [name for name, column in COLUMNS.items() if column in CELLS[kind] and CELLS[kind][column].rule is rule] for rule in Rule}
    return f"| {kind.value} | {', '.join(of[Rule.ALWAYS])} | {', '.join(of[Rule.CHECKED])} |"


@pytest.mark.parametrize("kind", Kind)
def test_page_has_each_row_of_the_table(kind: Kind) -> None:
    assert written(kind) in PAGE.read_text(), f"write into {PAGE.name}: {written(kind)}"


@pytest.mark.parametrize("kind", Kind)
def test_columns_of_a_group_have_the_same_rule(kind: Kind) -> None:
    groups = [("smallint", "integer", "bigint"), ("text", "character varying", "character"), ("json", "jsonb")]
    for group in groups:
        assert len({CELLS[kind][column].rule if column in CELLS[kind] else None for column in group}) == 1


@pytest.mark.parametrize(
    "arrow", [pa.int8(), pa.float32(), pa.decimal256(60, 2), pa.string(), pa.binary(16), pa.timestamp("ns"), pa.bool_()], ids=str
)
def test_what_a_transform_may_return_a_decoded_value_may_be(arrow: pa.DataType) -> None:
    """The guard of transforms is the narrower one."""
    assert kind_of(arrow) is not None
    for column in COLUMNS.values():
        assert converts(arrow, column) or not fits(arrow, column)
