"""The DDL of the view of validated rows."""

from __future__ import annotations

import pytest

from tidemark.errors import BadInput
from tidemark.quality import validated_view, validated_view_ddl


def test_the_view_stands_beside_its_sink() -> None:
    """The view of ``schema.table`` is ``schema.table_validated``."""
    assert validated_view("analytics.departures") == "analytics.departures_validated"
    assert validated_view_ddl("analytics.departures", ["departures"]).startswith(
        'CREATE OR REPLACE VIEW "analytics"."departures_validated" AS\nSELECT sink.* FROM "analytics"."departures" sink'
    )


@pytest.mark.parametrize("name", ["x" * 63, "x" * 54, "é" * 31, "ü" * 27 + "x"])
def test_a_long_name_is_cut_to_what_postgres_keeps(name: str) -> None:
    """The limit is 63 bytes, not characters. Two sinks with the same beginning still have two views."""
    view = validated_view(f"analytics.{name}").removeprefix("analytics.")
    assert len(view.encode()) <= 63
    assert view.endswith("_validated")
    assert validated_view("a." + "x" * 60 + "one") != validated_view("a." + "x" * 60 + "two")


@pytest.mark.parametrize("table", ["departures", "a.b.c", "a.", ".b", "a." + "x" * 64])
def test_what_is_not_a_table_is_refused(table: str) -> None:
    """Postgres would silently truncate a longer name, and the view would show another table. Without a group it would be empty."""
    with pytest.raises(BadInput, match=r"schema\.table"):
        validated_view(table)
    with pytest.raises(BadInput, match="no group writes into it"):
        validated_view_ddl("a.b", [])
