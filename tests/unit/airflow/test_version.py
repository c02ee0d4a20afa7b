"""Versions of Airflow that Tidemark refuses."""

from __future__ import annotations

import pytest

from tidemark.airflow import AirflowTooOld, _require_questions


def test_airflow_without_questions_to_people_is_refused() -> None:
    with pytest.raises(AirflowTooOld, match=r"This is Airflow 3\.0\.6, whose tasks cannot ask a person .* needs Airflow 3\.1 or newer"):
        _require_questions("3.0.6")
    _require_questions("3.1.0")
