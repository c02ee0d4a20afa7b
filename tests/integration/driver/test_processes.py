"""Runs started as in production: the driver is a separate process and starts Spark itself."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario
from tests.support.waiting import until

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


HOOK = """
    import os, pathlib, time

    def block(step, part):
        if step.name == "LEDGER" and part.start > 0:
            pathlib.Path(os.environ["BLOCKED"]).touch()
            while True:
                time.sleep(0.1)
"""


@pytest.mark.thorough  # tests/chaos kills drivers at each step
def test_driver_that_is_killed_in_the_middle_is_gone_on_from_exactly(scenario: Scenario) -> None:
    """SIGKILL during the second batch: the first batch stays, nothing of the second does, no process survives, and the next run reads the
    rest. Uses the function form, first with a driver started by hand, then with the command line."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [str(number) for number in range(100)])
    scenario.write(PLAIN, topics=topic, batch={"max_records": 40}).make_sink()
    transforms, blocked = scenario.folder / "transforms", scenario.folder / "blocked"
    (transforms / f"hook_{scenario.name}.py").write_text(textwrap.dedent(HOOK))
    env = scenario.env() | {"TIDEMARK_STEP_HOOK": f"hook_{scenario.name}:block", "PYTHONPATH": str(transforms), "BLOCKED": str(blocked)}
    command = [sys.executable, str(project.consume_job()), scenario.name]
    driver = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        until(blocked.exists)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert family
    finally:
        driver.kill()
        driver.wait(30)
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family))
    assert len(scenario.rows()) == 40
    scenario.check()
    assert scenario.attempt(1)["state"] == "RUNNING"
    done = result(scenario.command("consume", scenario.name, "--output", "json"))
    assert done["records"] == 60
    assert scenario.rows() == [str(number).encode() for number in range(100)]
    scenario.check()


# ---- helpers


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
