"""The DAGs of one consumer read nothing from their forms that could name another consumer."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.forms import REDRIVEN, REWOUND

from tidemark.airflow import discard, redrive, rewind_form
from tidemark.airflow.dags import REDRIVE, REWIND
from tidemark.airflow.form import own_consumer

SPEC = "topics: [{name}]\ntransform: t:t\nsink: {{table: public.{name}}}\n"


@pytest.fixture(autouse=True)
def _consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("orders", "rides"):
        (tmp_path / f"{name}.yaml").write_text(SPEC.format(name=name))
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(tmp_path))


@pytest.mark.parametrize(
    ("dag_id", "prefix", "consumer"),
    [("rewind__orders", REWIND, "orders"), ("redrive__a__b", REDRIVE, "a__b"), ("rewind", REWIND, None)],
)
def test_consumer_is_the_one_of_the_dags_id(dag_id: str, prefix: str, consumer: str | None) -> None:
    context: Any = {"dag_run": SimpleNamespace(dag_id=dag_id)}
    assert own_consumer(context, prefix) == consumer


def test_dag_of_one_consumer_acts_on_it() -> None:
    """Airflow merges a conf into the params, so a param of that name is ignored, too."""
    assert [spec.name for spec in rewind_form.read_form({**REWOUND, "consumers": ["rides"]}, {}, "orders").specs] == ["orders"]
    assert [spec.name for spec in rewind_form.read_form({**REWOUND, "consumers": ["rides"]}, {}).specs] == ["rides"]
    for form in (redrive, discard):
        assert form.read_form({**REDRIVEN, "consumer": "rides"}, {}, "orders").spec.name == "orders"
        assert form.read_form({**REDRIVEN, "consumer": "rides"}, {}).spec.name == "rides"


def test_conf_that_names_a_consumer_is_refused() -> None:
    for conf in ({"consumers": ["rides"]}, {"consumers": ["orders"]}):
        with pytest.raises(Exception, match="consumers cannot be set: this DAG is for orders only"):
            rewind_form.read_form({**REWOUND, **conf}, conf, "orders")
    for form in (redrive, discard):
        with pytest.raises(Exception, match="consumer cannot be set: this DAG is for orders only"):
            form.read_form({**REDRIVEN, "consumer": "rides"}, {"consumer": "rides"}, "orders")


def test_approval_of_a_redrive_is_for_its_digest() -> None:
    """Airflow records this text with the question. A plan from before digests existed is identified by its time."""
    at = datetime(2026, 3, 24, tzinfo=UTC)
    told = [redrive._words(SimpleNamespace(redrive_id=7, planned_at=at, digest=digest)) for digest in ("ab12", "cd34", None)]  # type: ignore[arg-type]
    assert told == ["redrive 7, digest ab12", "redrive 7, digest cd34", "redrive 7, planned at 2026-03-24T00:00:00+00:00"]
