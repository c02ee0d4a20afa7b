"""The tasks of the DAG ``drain_retries`` with several consumers and databases: a problem with one does not block the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.support.scenario import Scenario

from tidemark.retry import pending, relay


@pytest.fixture
def other(lab: Lab) -> Iterator[Lab]:
    """A second consumer in the same database as that of ``lab``."""
    with lab_on(Scenario(lab.consumer.folder, lab.url, lab.topics), lab.topics) as other:
        yield other


@pytest.fixture
def relay_and_due(airflow: None) -> Callable[[], Any]:
    """Runs the tasks ``relay`` and ``due``, and returns their results; for a relay that fails, the lines of its error."""
    from airflow.sdk.exceptions import AirflowFailException

    from tidemark.airflow.dags.retries import DueOperator, RelayOperator

    def run() -> Any:
        try:
            relayed = RelayOperator(task_id="relay").execute({})
        except AirflowFailException as error:
            relayed = str(error).splitlines()
        return relayed, DueOperator(task_id="due").execute({})

    return run


def fail_one(*labs: Lab) -> None:
    for lab in labs:
        lab.read("a", answers={"a": "retry"})


def test_consumer_that_cannot_be_published_and_database_that_is_away_hold_up_nobody(
    lab: Lab, other: Lab, relay_and_due: Callable[[], Any]
) -> None:
    """Scenario 28: one consumer's topics are missing and must not be created, and another consumer's database does not answer. The third
    consumer's records are published, and found when they are due. The relay fails at the end and reports all problems. It does not look
    at databases in which no consumer has a ladder."""
    lab.make_topics()
    other.consumer.set(retry={"delays": ["5m"], "topics": {"create": False}})
    fail_one(lab, other)
    folder = lab.consumer.folder / "consumers"
    common = "topics: [t]\ntransform: m:f\nsink: {table: lake.t}\n"
    (folder / "faraway.yaml").write_text(f"{common}retry: {{delays: [5m]}}\nconnections: {{postgres: away}}\n")
    (folder / "unladdered.yaml").write_text(f"{common}connections: {{postgres: missing}}\n")
    relayed, due = relay_and_due()
    assert f"Cannot publish to {other.group}.retry.5m: it does not exist. See: tidemark retries topics {other.spec.name}" in relayed
    assert [line.split(":")[:2] for line in relayed if line.startswith("away")] == [["away", " Postgres cannot be used"]]
    assert not [line for line in relayed if "missing" in line]
    assert (lab.failed("retry_offset"), other.failed("retry_offset"), due) == ([(0,)], [(None,)], [])
    for each in (lab, other):
        each.age(minutes(5))
    (folder / "faraway.yaml").unlink()
    other.relay()
    assert relay_and_due() == ({}, sorted([lab.spec.name, other.spec.name]))


def test_error_that_nobody_expected_holds_up_no_other_consumer(
    lab: Lab, other: Lab, relay_and_due: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other consumer's records are published, and found when they are due. The relay fails at the end and names the error. The broken
    consumer gets a drain too, which will show the problem."""
    for each in (lab, other):
        each.make_topics()
    fail_one(lab, other)

    def broken_for(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def raise_or_call(connection: Any, *rest: Any) -> Any:
            if any(name in getattr(each, "name", str(each)) for each in rest):
                raise ValueError("year 10000 is out of range")
            return function(connection, *rest)

        return raise_or_call

    for broken, sound in ((lab, other), (other, lab)):
        with monkeypatch.context() as patched:
            for module, name in ((relay, "relay"), (pending, "due")):
                patched.setattr(module, name, broken_for(broken.spec.name, getattr(module, name)))
            relayed, _ = relay_and_due()
            assert relayed == [f"{broken.spec.name}: ValueError: year 10000 is out of range"]
            assert sound.failed("retry_offset") == [(0,)]
            sound.age(minutes(5))
            _, due = relay_and_due()
        assert due == sorted([broken.spec.name, sound.spec.name])
        sound.sql("UPDATE tidemark.failed_record SET retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL")


def test_consumer_with_a_broken_file_fails_the_drains_while_its_records_wait_and_holds_up_nobody(
    lab: Lab, other: Lab, relay_and_due: Callable[[], Any]
) -> None:
    """Its records cannot be tried without its transform, and would otherwise wait unnoticed. A broken consumer without waiting records is
    not reported."""
    for each in (lab, other):
        each.make_topics()
    fail_one(lab, other)
    for each in (lab, other):
        each.make_due(minutes(5))
    name, folder = other.spec.name, lab.consumer.folder / "consumers"
    broken = folder / f"{name}.yaml"
    broken.write_text(f"{broken.read_text()}\nnonsense: 1\n")
    (folder / "idle.yaml").write_text("topics: [\n")
    relayed, due = relay_and_due()
    assert relayed[0] == f"{name}: its records are neither published nor retried, because its file is invalid."
    assert f"{name}.yaml:" in relayed[1]
    assert 'unknown key "nonsense"' in relayed[1]
    assert "idle" not in "".join(relayed)
    assert due == [lab.spec.name]
