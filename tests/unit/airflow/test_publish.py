"""Which task `PublishOperator` announces for, and which tasks an idle run skips."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, TaskGroup
from airflow.sdk.bases.operator import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from tidemark.airflow import ConsumeOperator, PublishOperator, ValidateOperator


def dag() -> DAG:
    return DAG("own", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))


def test_validation_is_found_by_its_kind_whatever_its_id_and_group() -> None:
    with dag():
        with TaskGroup("load"):
            consume = ConsumeOperator(task_id="read", consumer="cities")
            judge = ValidateOperator(task_id="judge", consumer="cities")
        notify = BaseOperator(task_id="notify")
        publish = PublishOperator(task_id="tell", assets=[Asset("public.cities")])
        consume >> judge >> notify >> publish
        alone = PublishOperator(task_id="alone", assets=[Asset("public.cities")])
    assert publish._validation() == "load.judge"
    with pytest.raises(AirflowFailException, match="set a ValidateOperator upstream"):
        alone._validation()


def test_nearest_validation_is_the_one() -> None:
    with dag():
        first, second = (ValidateOperator(task_id=name, consumer=name) for name in ("first", "second"))
        publish = PublishOperator(task_id="tell", assets=[Asset("public.cities")])
        first >> second >> publish
    assert publish._validation() == "second"


def test_callbacks_of_a_user_are_kept() -> None:
    def mine(_: Any) -> None: ...

    with dag():
        publish = PublishOperator(task_id="tell", assets=[Asset("public.cities")], on_success_callback=mine)
    assert mine in list(publish.on_success_callback)  # type: ignore[arg-type]
    assert len(list(publish.on_success_callback)) == 2  # type: ignore[arg-type]
