"""The audit log as CSV, which people open in a spreadsheet."""

from __future__ import annotations

import csv

import pytest

from tidemark.airflow.web.history import COLUMNS, as_csv


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_text_that_a_spreadsheet_would_evaluate_gets_an_apostrophe(first: str) -> None:
    event = dict.fromkeys(COLUMNS) | {"claimed_by": "ann", "reason": f"{first}1+1"}
    names, values = csv.reader(as_csv({"events": [event]}))
    assert dict(zip(names, values, strict=True)) == dict.fromkeys(COLUMNS, "") | {"claimed_by": "ann", "reason": f"'{first}1+1"}
