"""Runs started as in production: the driver is a separate process and starts Spark itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario

from tidemark import project


def mixed(scenario: Scenario, transform: str) -> Scenario:
    """A consumer of two topics with nulls, empty values, committed and aborted transactions, and an empty partition."""
    topic, second = scenario.topics.create(3), scenario.topics.create()
    scenario.topics.produce(topic, [None, b"", b"\xff\0"] * 7)
    scenario.topics.transaction(topic, [b"gone"], partition=1, commit=False)
    scenario.topics.transaction(topic, [b"kept"], partition=1)
    scenario.topics.produce(second, [b"other"])
    return scenario.write(transform, topics=[topic, second], batch={"max_records": 15}).make_sink("payload bytea")


MIXED = {"loaded": 23, "unaccounted": 3, "sink_rows": 23}
"""The counts that every form stores for it."""


@pytest.mark.thorough
def test_spark_form_loads_what_is_in_the_topics(scenario: Scenario) -> None:
    """Spark's connector reads the ranges, and the same commit stores them; ``--output json`` prints one document on stdout."""
    done = result(mixed(scenario, SPARK).command("consume", scenario.name, "--output", "json"))
    assert {name: done[name] for name in ("state", "records", "loaded", "skipped", "retried", "failed", "unaccounted", "sink_rows")} == {
        "state": "COMMITTED", "records": 26, "skipped": 0, "retried": 0, "failed": 0, **MIXED,
    }  # fmt: skip
    assert len(scenario.rows(where="payload = 'kept'")) == 1
    scenario.check()


def test_arrow_form_by_spark_submit_loads_the_same(scenario: Scenario) -> None:
    """In client mode, the driver writes its attempt's row itself, and uses the master given to spark-submit."""
    env = {"PYSPARK_PYTHON": sys.executable, "TIDEMARK_SPARK_MASTER": "spark://127.0.0.1:9", "SPARK_LOCAL_IP": "127.0.0.1"}
    starter = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[2]"]
    command = [*starter, str(project.consume_job()), mixed(scenario, ARROW).name]
    done = subprocess.run(command, env=scenario.env() | env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert scenario.counts() == MIXED
    assert scenario.attempt(1) == {"state": "COMMITTED", "error": None}
    scenario.check()


def test_run_that_is_refused_says_so_to_people_and_programs(scenario: Scenario) -> None:
    """The exit status is 1, and the reason is once on stderr, in the JSON on stdout, and in the attempt's row. No position is stored."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(PLAIN, topics=[topic, "no-such-topic"]).make_sink()
    done = scenario.command("consume", scenario.name, "--output", "json")
    assert done.returncode == 1
    error = scenario.attempt(1)["error"]
    assert (error["kind"], error["type"]) == ("refused", "TopicsMissing")
    assert done.stderr.count(error["text"]) == 1
    assert json.loads(done.stdout) == {"error": {"type": "TopicsMissing", "text": error["text"]}}
    assert scenario.positions() == {}


# ---- helpers


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


HIDES_PANDAS = """
import sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Hidden)
"""


def test_driver_without_one_of_its_packages_is_refused_with_the_extra_to_install(scenario: Scenario, tmp_path: Path) -> None:
    """The attempt has the error, so that Airflow does not try again."""
    (tmp_path / "sitecustomize.py").write_text(HIDES_PANDAS)
    scenario.feed([b"a"])
    done = scenario.command("consume", scenario.name, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "pip install 'tidemark-kafka[driver]'" in done.stderr
    assert scenario.sql("SELECT state, error ->> 'kind', error ->> 'type' FROM tidemark.attempt") == [("FAILED", "refused", "ExtraMissing")]
