"""The page of compatibility is what the results of the matrix give, and each result is of a column that exists."""

from __future__ import annotations

import runpy

from tests.matrix.columns import COLUMNS

from tidemark import project
from tidemark.doctor.tried import results

DOCS = project.root() / "docs"


def test_page_is_written_from_the_results() -> None:
    """Otherwise run ``python docs/compatibility.py``."""
    page = runpy.run_path(str(DOCS / "compatibility.py"))["page"]()
    assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == page


def test_results_are_of_columns_that_exist() -> None:
    assert list(results()) == [column for column in COLUMNS if column in results()]


def test_column_runs_tests_that_exist() -> None:
    for column in COLUMNS.values():
        for test in column.tests:
            assert (project.root() / test.partition("::")[0]).exists(), test
