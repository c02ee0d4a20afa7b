"""Versions of Airflow that Tidemark refuses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import airflow
import pytest

import tidemark.airflow


@pytest.fixture
def airflow_3_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(airflow, "__version__", "3.0.6")
    yield
    monkeypatch.undo()
    importlib.reload(tidemark.airflow)


def test_airflow_without_questions_to_people_is_refused(airflow_3_0: None) -> None:
    with pytest.raises(Exception, match=r"This is Airflow 3\.0\.6, whose tasks cannot ask a person .* needs Airflow 3\.1 or newer"):
        importlib.reload(tidemark.airflow)
