"""What Airflow's OpenLineage provider reports about a consumer's tasks, in the events of its file transport."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tests.e2e.lab import MARKS, Lab

from tidemark.local import airflow_settings

TOO_LARGE = 2_000_000
"""A number that fails the suite."""


@pytest.fixture(scope="module")
def events(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The last event of each task of one run with two members and a critical validation.

    ``airflow dags test`` executes the run: Airflow's task runner in one process, so that only this run loads the provider.
    """
    consumer = lab.consumer("traced", partitions=2)
    consumer.produce(*range(10))
    consumer.produce(*range(4), TOO_LARGE, partition=1)
    file = tmp_path_factory.mktemp("lineage") / "events"
    transport = {"AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(file), "append": True})}
    done = subprocess.run(
        airflow_settings.command("dags", "test", consumer.dag),
        env=psutil.Process(lab.airflow.status().processes[0].pid).environ() | transport,
        cwd=lab.airflow.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert file.exists(), done.stdout + done.stderr
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return [event for event in read if event["eventType"] in ("COMPLETE", "FAIL") and "." in event["job"]["name"]]


def of_task(events: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    return [event for event in events if event["job"]["name"] == f"consume__traced.{task}"]


def test_run_has_its_topics_with_the_ranges_as_inputs(lab: Lab, events: list[dict[str, Any]]) -> None:
    """Each member has its own inputs; together they are what the topic holds."""
    consumed = of_task(events, "consume")
    assert [event["eventType"] for event in consumed] == ["COMPLETE"] * 2
    inputs = [dataset for event in consumed for dataset in event["inputs"]]
    assert {(one["namespace"], one["name"]) for one in inputs} == {(f"kafka://{lab.topics.servers}", "traced")}
    assert sum(one["inputFacets"]["inputStatistics"]["rowCount"] for one in inputs) == 15
    facets = [one["inputFacets"]["tidemark_offsets"] for one in inputs]
    assert sorted((span["partition"], span["start"], span["end"]) for one in facets for span in one["ranges"]) == [(0, 0, 10), (1, 0, 5)]
    attempts = lab.sql("SELECT attempt_id FROM tidemark.attempt JOIN tidemark.consumer_group USING (group_id) WHERE name = 'traced'")
    assert {(one["attempt"], one["group"], one["omitted"]) for one in facets} == {(attempt_id, "traced", 0) for (attempt_id,) in attempts}


def test_run_has_its_table_with_columns_and_rows_as_output(lab: Lab, events: list[dict[str, Any]]) -> None:
    """The table is named as OpenLineage names Postgres tables, without the login."""
    address = urlsplit(lab.url)
    outputs = [dataset for event in of_task(events, "consume") for dataset in event["outputs"]]
    names = (f"postgres://{address.hostname}:{address.port}", f"{address.path[1:]}.e2e.traced")
    assert {(one["namespace"], one["name"]) for one in outputs} == {names}
    assert sum(one["outputFacets"]["outputStatistics"]["rowCount"] for one in outputs) == 15
    columns = {column["name"]: column["type"] for column in outputs[0]["facets"]["schema"]["fields"]}
    lineage = {"kafka_topic_id": "smallint", "kafka_partition": "integer", "kafka_offset": "bigint", "kafka_seq": "integer"}
    assert columns == {"number": "bigint"} | lineage


def test_validation_has_its_results_as_assertions_on_the_table(events: list[dict[str, Any]]) -> None:
    """This includes a task that failed with a critical verdict."""
    (validated,) = of_task(events, "validate")
    assert validated["eventType"] == "FAIL"
    (table,) = validated["inputs"]
    assert table["name"].endswith(".e2e.traced")
    said = table["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert [(one["assertion"], one.get("column"), one["severity"], one["success"]) for one in said] == [
        ("conservation", None, "error", True),
        ("expect_column_values_to_be_between", "number", "error", False),
        ("expect_column_values_to_be_between", "number", "warn", True),
    ]


def test_events_hold_no_password_and_no_value_of_a_row(events: list[dict[str, Any]]) -> None:
    """Nor do they hold the error of the failed task, which Airflow's provider adds."""
    assert [mark for mark in (*MARKS, str(TOO_LARGE)) if mark in json.dumps(events)] == []
