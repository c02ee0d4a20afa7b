"""The tasks of the DAG ``drain_retries`` with several consumers and databases: a problem with one does not block the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.support.scenario import Scenario

from tidemark.local.airflow_settings import connections_env
from tidemark.retry.topics import ensure_topics

NOWHERE = "postgresql://nobody@127.0.0.1:9/nowhere"

TASKS = """
import json

from airflow.sdk.exceptions import AirflowFailException
from tidemark.airflow.retries import DueOperator, RelayOperator

{before}
try:
    relayed = RelayOperator(task_id="relay").execute({{}})
except AirflowFailException as error:
    relayed = str(error).splitlines()
print("FACTS" + json.dumps([relayed, DueOperator(task_id="due").execute({{}})]))
"""


@pytest.fixture
def other(lab: Lab) -> Iterator[Lab]:
    """A second consumer in the same database as that of ``lab``."""
    with lab_on(Scenario(lab.consumer.folder, lab.url, lab.topics), lab.topics) as other:
        yield other


def relay_and_due(lab: Lab, home: Path, *, before: str = "") -> Any:
    """Returns the results of the two tasks; for a relay that fails, the lines of its error. ``before``: Python code that runs first."""
    connections = connections_env(lab.url, lab.consumer.connections.kafka, "local[1]")
    away = connections_env(NOWHERE, {}, "local[1]")["AIRFLOW_CONN_TIDEMARK_POSTGRES"]
    done = subprocess.run(
        [sys.executable, "-c", TASKS.format(before=before)],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "TIDEMARK"))},
            **connections,
            "AIRFLOW_CONN_AWAY": away,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "TIDEMARK_CONSUMERS": str(lab.consumer.folder / "consumers"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FACTS")).removeprefix("FACTS"))


def test_consumer_that_cannot_be_published_and_database_that_is_away_hold_up_nobody(lab: Lab, other: Lab, tmp_path: Path) -> None:
    """Scenario 28: one consumer's topics are missing and must not be created, and another consumer's database does not answer. The third
    consumer's records are published, and found when they are due. The relay fails at the end and reports all problems. It does not look
    at databases in which no consumer has a ladder."""
    lab.topics.adopt(one.topic.name for one in ensure_topics(lab.cluster, lab.spec, create=True))
    lab.say({"a": "retry"})
    other.consumer.set(retry={"delays": ["5m"], "topics": {"create": False}})
    for each in (lab, other):
        each.produce("a")
        each.run()
    folder = lab.consumer.folder / "consumers"
    common = "topics: [t]\ntransform: m:f\nsink: {table: lake.t}\n"
    (folder / "faraway.yaml").write_text(f"{common}retry: {{delays: [5m]}}\nconnections: {{postgres: away}}\n")
    (folder / "unladdered.yaml").write_text(f"{common}connections: {{postgres: missing}}\n")
    relayed, due = relay_and_due(lab, tmp_path)
    assert f"Cannot publish to {other.group}.retry.5m: it does not exist. See: tidemark retries topics {other.spec.name}" in relayed
    assert [line.split(":")[:2] for line in relayed if line.startswith("away")] == [["away", " Postgres is not available"]]
    assert not [line for line in relayed if "missing" in line]
    assert lab.failed("hop_offset") == [(0,)]
    assert other.failed("hop_offset") == [(None,)]
    assert due == []
    for each in (lab, other):
        each.age(minutes(5))
    (folder / "faraway.yaml").unlink()
    other.relay()
    assert relay_and_due(lab, tmp_path) == [{}, sorted([lab.spec.name, other.spec.name])]


BROKEN = """
from tidemark.retry import pending, relay

def broken(function):
    def raise_or_call(connection, *rest):
        if any("{name}" in getattr(each, "name", str(each)) for each in rest):
            raise ValueError("year 10000 is out of range")
        return function(connection, *rest)
    return raise_or_call

relay.relay, pending.due = broken(relay.relay), broken(pending.due)
"""
"""Makes the relay of one consumer, and the lookup of its due records, raise an unexpected error."""


def test_error_that_nobody_expected_holds_up_no_other_consumer(lab: Lab, other: Lab, tmp_path: Path) -> None:
    """The other consumer's records are published, and found when they are due. The relay fails at the end and names the error. The broken
    consumer gets a drain too, which will show the problem."""
    for each in (lab, other):
        each.topics.adopt(one.topic.name for one in ensure_topics(each.cluster, each.spec, create=True))
        each.say({"*": "retry"})
        each.produce("a")
        each.run()
    for broken, sound in ((lab, other), (other, lab)):
        before = BROKEN.format(name=broken.spec.name)
        relayed, _ = relay_and_due(lab, tmp_path, before=before)
        assert relayed == [f"{broken.spec.name}: ValueError: year 10000 is out of range"]
        assert sound.failed("hop_offset") == [(0,)]
        sound.age(minutes(5))
        _, due = relay_and_due(lab, tmp_path, before=before)
        assert due == sorted([broken.spec.name, sound.spec.name])
        sound.sql("UPDATE tidemark.failed_record SET hop_topic_id = NULL, hop_partition = NULL, hop_offset = NULL")


def test_consumer_with_a_broken_file_fails_the_drains_while_its_records_wait_and_holds_up_nobody(
    lab: Lab, other: Lab, tmp_path: Path
) -> None:
    """Its records cannot be tried without its transform, and would otherwise wait unnoticed. A broken consumer without waiting records is
    not reported."""
    for each in (lab, other):
        each.topics.adopt(one.topic.name for one in ensure_topics(each.cluster, each.spec, create=True))
        each.say({"a": "retry"})
        each.produce("a")
        each.run()
        each.relay()
        each.age(minutes(5))
    name, folder = other.spec.name, lab.consumer.folder / "consumers"
    broken = folder / f"{name}.yaml"
    broken.write_text(f"{broken.read_text()}\nnonsense: 1\n")
    (folder / "idle.yaml").write_text("topics: [\n")
    relayed, due = relay_and_due(lab, tmp_path)
    assert relayed[0] == f"{name}: its records are neither published nor retried, because its file is invalid."
    assert f"{name}.yaml:" in relayed[1]
    assert 'unknown key "nonsense"' in relayed[1]
    assert "idle" not in "".join(relayed)
    assert due == [lab.spec.name]
