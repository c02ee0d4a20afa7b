"""Versions of Airflow that Tidemark refuses."""

from __future__ import annotations

import pytest

from tidemark.airflow import AirflowTooOld, _require_supported


def test_airflow_whose_tasks_cannot_ask_a_person_is_refused() -> None:
    with pytest.raises(AirflowTooOld, match=r"This is Airflow 3\.0\.6, whose tasks cannot ask a person .* needs Airflow 3\.1 or newer"):
        _require_supported("3.0.6")
    _require_supported("3.1.0")
