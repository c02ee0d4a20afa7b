"""What `tidemark explain` says: each key that changes what a consumer does changes the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from tests.support.scenario import tidy_imports
from typer.testing import CliRunner

from tidemark import project
from tidemark.author.explanation import Explanation, explanation_of
from tidemark.cli.main import app
from tidemark.spec import ConsumerSpec, OffsetReset, OnFailure, load_consumer, model
from tidemark.spec.model import Approval, Deletes, Encoding
from tidemark.spec.user_transform import Form

PLAIN: dict[str, Any] = {"topics": ["orders"], "format": {"value": "avro"}, "sink": {"table": "shop.orders"}}
CODE: dict[str, Any] = {"topics": ["orders"], "transform": "orders:transform", "sink": {"table": "shop.orders"}}
UPSERT: dict[str, Any] = {**CODE, "sink": {"table": "shop.orders", "mode": "upsert", "key": ["id"]}}
RETRIED: dict[str, Any] = {**CODE, "retry": {"delays": ["5m"]}}
CHANGES = {**UPSERT, "sink": {**UPSERT["sink"], "deletes": "hard"}, "format": {"value": "avro", "key": "avro", "envelope": "debezium"}}
del CHANGES["transform"]

EACH_KEY: dict[str, tuple[Mapping[str, Any], Any]] = {
    "group": (PLAIN, "orders-v2"),
    "topics": (PLAIN, ["orders", "orders-eu"]),
    "topic_pattern": ({key: value for key, value in PLAIN.items() if key != "topics"} | {"topic_pattern": "orders-.*"}, "o.*"),
    "partitions": (PLAIN, {"orders": "0-2"}),
    "format.value": (CODE, "json"),
    "format.key": (CODE, "json"),
    "format.value_schema": (PLAIN, "order.avsc"),
    "format.key_schema": ({**PLAIN, "format": {"value": "avro", "key": "avro"}}, "key.avsc"),
    "format.value_message": ({**PLAIN, "format": {"value": "protobuf"}}, "shop.Order"),
    "format.key_message": ({**PLAIN, "format": {"value": "avro", "key": "protobuf"}}, "shop.Key"),
    "format.envelope": ({**CHANGES, "format": {"value": "avro", "key": "avro"}}, "debezium"),
    "format.placeholder": (CHANGES, "__unknown"),
    "transform": (CODE, "orders:another"),
    "columns": (PLAIN, {"country": "place.country"}),
    "drop": (PLAIN, ["comment"]),
    "skip_if": (PLAIN, {"kind": ["test", None]}),
    "flatten": (PLAIN, "_"),
    "sink.table": (PLAIN, "shop.others"),
    "sink.mode": (UPSERT, None),
    "sink.key": (UPSERT, ["number"]),
    "sink.deletes": (UPSERT, "soft"),
    "sink.evolve": (PLAIN, "add"),
    "sink.error_detail": (PLAIN, True),
    "sinks": ({**CODE, "sink": None, "sinks": {"orders": {"table": "shop.orders"}}}, {"lines": {"table": "shop.lines"}}),
    "mirror": (PLAIN, True),
    "connections.postgres": (PLAIN, "warehouse"),
    "connections.kafka": (PLAIN, "events"),
    "connections.spark": (PLAIN, "cluster"),
    "connections.registry": (PLAIN, "schemas"),
    "retry.delays": (RETRIED, ["5m", "1h"]),
    "retry.budget": (RETRIED, "2h"),
    "retry.per_second": (RETRIED, 200),
    "retry.breaker.ratio": ({**CODE, "retry": {"breaker": {"ratio": 0.5}}}, 0.25),
    "retry.breaker.minimum": ({**CODE, "retry": {"breaker": {"ratio": 0.5}}}, 7),
    "retry.order": (RETRIED, "key"),
    "retry.max_held": ({**CODE, "retry": {"delays": ["5m"], "order": "key"}}, 5),
    "retry.topics.partitions": (RETRIED, 3),
    "retry.topics.replication": (RETRIED, 3),
    "retry.topics.create": (RETRIED, False),
    "retry.permanent": (CODE, ["KeyError"]),
    "offset_reset": (PLAIN, "latest"),
    "assignment": ({**PLAIN, "members": 2}, ["range", "sticky"]),
    "members": (PLAIN, 3),
    "listeners": (PLAIN, ["orders:Listener"]),
    "run": (PLAIN, "continuous"),
    "run_for": ({**PLAIN, "run": "continuous"}, "1h"),
    "batch.max_records": (PLAIN, 1000),
    "batch.max_failed_records": (PLAIN, 0),
    "schedule": (PLAIN, "@hourly"),
    "timezone": ({**PLAIN, "schedule": "@hourly"}, "Europe/Berlin"),
    "validation.suite": (PLAIN, "orders"),
    "validation.suites": (
        {**CODE, "sink": None, "sinks": {"orders": {"table": "shop.orders"}}, "validation": {"suites": {"orders": "orders"}}},
        {"orders": "others"},
    ),
    "validation.on_failure": ({**PLAIN, "validation": {"suite": "orders"}}, "report"),
    "slo.lag": ({**PLAIN, "slo": {"failed": 5}}, "10m"),
    "slo.failed": ({**PLAIN, "slo": {"lag": "10m"}}, 0),
    "slo.freshness": ({**PLAIN, "slo": {"lag": "10m"}}, "1h"),
    "rewind.approval": (PLAIN, "none"),
    "rewind.own": (PLAIN, False),
    "rewind.max_beside_rows": (PLAIN, 5),
    "access.edit": ({**PLAIN, "access": {}}, ["team-orders"]),
    "access.view": ({**PLAIN, "access": {}}, ["analysts"]),
    "airflow.retries": (PLAIN, 0),
    "airflow.retry_delay": (PLAIN, "10s"),
    "airflow.execution_timeout": (PLAIN, "2h"),
    "airflow.pool": (PLAIN, "loads"),
    "spark.conf": (PLAIN, {"spark.executor.memory": "4g"}),
    "spark.shared": (PLAIN, False),
}
"""A file without the key (or with another value), and a value of the key that the text must show. None removes a key."""
NOT_EXPLAINED = {"description", "airflow.owner", "airflow.tags"}
"""Texts that only people read. The command prints the description above the explanation."""


def keys(part: type[BaseModel] = ConsumerSpec, above: str = "") -> Iterator[str]:
    for name, annotation in model.keys_of(part).items():
        models = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if models and get_origin(annotation) is not Mapping:
            yield from keys(models[0], f"{above}{name}.")
        else:
            yield f"{above}{name}"


def changed(data: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    first, *below = path
    if below:
        value = changed(data.get(first, {}), below, value)
    if isinstance(value, dict) and isinstance(data.get(first), Mapping) and not below:
        value = {**data[first], **value}
    return {**data, first: value}


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    def explained(data: Mapping[str, Any], form: Form | None = None) -> Explanation:
        path = tmp_path / "orders.yaml"
        path.write_text(yaml.safe_dump(without_none(data)), encoding="utf-8")
        return explanation_of(load_consumer(path), form)

    return explained


def without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    pairs = ((key, without_none(value) if isinstance(value, Mapping) else value) for key, value in data.items())
    return {key: value for key, value in pairs if value is not None}


def test_every_key_is_tried_here() -> None:
    assert set(EACH_KEY) | NOT_EXPLAINED == set(keys())


@pytest.mark.parametrize("key", EACH_KEY)
def test_each_key_changes_the_text(key: str, explain: Any) -> None:
    before, value = EACH_KEY[key]
    after = changed(before, key.split("."), value)
    if key == "sink.mode":
        after = changed(after, ["sink", "key"], None)
    assert explain(before) != explain(after)


@pytest.mark.parametrize(
    ("data", "key", "values"),
    [
        (CODE, "format.value", Encoding),
        (PLAIN, "offset_reset", [None, *OffsetReset]),
        (UPSERT, "sink.deletes", Deletes),
        ({**PLAIN, "validation": {"suite": "orders"}}, "validation.on_failure", OnFailure),
        (PLAIN, "rewind.approval", Approval),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_value_has_a_text_of_its_own(data: Mapping[str, Any], key: str, values: Any, explain: Any) -> None:
    texts = {explain(changed(data, key.split("."), value and str(value))) for value in values}
    assert len(texts) == len(list(values))


def test_forms_differ(explain: Any) -> None:
    assert len({explain(CODE, form) for form in (None, *Form)}) == 1 + len(Form)


def test_upsert_consumer_with_retries_in_words(explain: Any) -> None:
    data = {
        **UPSERT,
        "sink": {**UPSERT["sink"], "deletes": "hard"},
        "retry": {"delays": ["5m", "1h"], "topics": {"create": False}},
        "validation": {"suite": "orders", "on_failure": "rewind"},
        "schedule": "*/5 * * * *",
    }
    explanation = explain(data, Form.FUNCTION)
    assert "Its rows go into shop.orders, where the last record of a key (id) wins. A record that deletes removes the row of its key." in (
        explanation.does
    )
    assert "A record to be retried is tried again after 5m, 1h, each counted from the try before. After the last one it fails." in (
        explanation.guarantees
    )
    topics = "orders.retry.5m, orders.retry.1h, orders.retry.now and orders.failed"
    create = "`tidemark retries topics orders --create` creates them, with 1 partition and the broker's default number of replicas"
    assert {
        "A role in Postgres with the profiles runner and rewinder (because a failed validation rewinds).",
        "For this role, SELECT, INSERT, UPDATE and DELETE on shop.orders.",
        f"For retries, the topics {topics}. {create}.",
    } <= set(explanation.needs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(project, "consumers", lambda: tmp_path)
    transforms = tmp_path / "transforms"
    transforms.mkdir()
    monkeypatch.setattr(project, "transforms", lambda: transforms)
    data = {**CODE, "transform": "explained_orders:transform", "description": "Orders of the web shop."}
    (tmp_path / "orders.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    with tidy_imports():
        yield transforms


def test_command_explains_a_consumer_whose_transform_cannot_be_imported(folder: Path) -> None:
    done = CliRunner().invoke(app, ["explain", "orders", "-o", "json"])
    assert done.exit_code == 0
    assert 'module "explained_orders" not found' in done.stderr
    assert json.loads(done.stdout)["form"] is None


def test_command_recognizes_the_form(folder: Path) -> None:
    (folder / "explained_orders.py").write_text("def transform(record):\n    return None\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["explain", "orders"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("orders: Orders of the web shop.\n\nWhat it does\n- It reads the topic orders, ")
    assert "the transform explained_orders:transform, which gets one record at a time" in done.stdout
