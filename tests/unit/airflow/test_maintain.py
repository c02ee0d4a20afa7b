"""The DAG ``maintain``, and the command, when a database cannot be maintained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from airflow.sdk.exceptions import AirflowFailException

from tidemark.airflow.dags.maintain import MaintainOperator
from tidemark.airflow.tasks import maintain as tasks
from tidemark.cli import maintain as command
from tidemark.errors import BadInput, DatabaseUnavailable, TidemarkError
from tidemark.maintenance import Maintained
from tidemark.spec import load_consumer

REFUSED = BadInput(what="connection b", found="Airflow has none", fix="Add it.")
OUTAGE = DatabaseUnavailable(cause="down")


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: dict[str, Exception]) -> tuple[list[str], list[str], Exception | None]:
    """Maintains the databases a, b and c, whose sessions raise these errors. Returns those that were maintained and sampled, and the task's
    error."""
    specs, maintained, sampled = [], [], []
    for name in "abc":
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"topics: [{name}]\nsink: {{table: a.b}}\ntransform: t:t\nconnections: {{postgres: {name}}}\n")
        specs.append(load_consumer(path))

    @contextlib.contextmanager
    def session(url: str) -> Iterator[str]:
        if url in failures:
            raise failures[url]
        yield url

    def maintain(connection: str, keep: timedelta, **_: Any) -> Maintained:
        maintained.append(connection)
        return Maintained([], 0, [])

    def resolve(spec: Any) -> Any:
        sampled.append(spec.connections.postgres)
        raise psycopg2.errors.InsufficientPrivilege("permission denied for table objective")

    monkeypatch.setattr(tasks, "valid_consumers", lambda: specs)
    monkeypatch.setattr(tasks, "session", session)
    monkeypatch.setattr(tasks, "require", lambda connection, profile: None)
    monkeypatch.setattr(tasks, "maintain", maintain)
    monkeypatch.setattr(tasks.connections, "database_url", lambda spec: spec.connections.postgres)
    monkeypatch.setattr(tasks.connections, "resolve", resolve)
    dag_run = SimpleNamespace(dag_id="maintain", run_id="by hand", triggering_user_name="ann")
    try:
        MaintainOperator(task_id="maintain").execute({"params": {"keep": "30d"}, "dag_run": dag_run})  # type: ignore[typeddict-item]
    except (AirflowFailException, TidemarkError) as error:
        return maintained, sampled, error
    return maintained, sampled, None


@pytest.mark.parametrize(
    ("failures", "retried"),
    [
        ({"a": OUTAGE}, True),
        ({"a": REFUSED, "b": OUTAGE}, True),
        ({"a": psycopg2.errors.UndefinedTable("no such table")}, True),
        ({"b": REFUSED}, False),
        ({"a": REFUSED, "c": REFUSED}, False),
    ],
)
def test_database_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: dict[str, Exception], *, retried: bool
) -> None:
    """The others are maintained, and lag is sampled. The task then fails with all the reasons, and is tried again if that can help one."""
    maintained, sampled, error = run(tmp_path, monkeypatch, failures)
    assert maintained == [name for name in "abc" if name not in failures]
    assert sampled == ["a", "b", "c"]
    assert isinstance(error, tasks.NotMaintained if retried else AirflowFailException)
    assert str(error) == "\n".join(f"{name}: {failure}" for name, failure in failures.items())


def test_samples_that_fail_do_not_fail_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the error is: each is a warning."""
    assert run(tmp_path, monkeypatch, {}) == (["a", "b", "c"], ["a", "b", "c"], None)
    assert capsys.readouterr().out.count("permission denied for table objective") == 3


def test_command_samples_although_something_could_not_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the DAG does: a replay that the role may not discard stays for days, and must not stop the history of the lag."""
    sampled = []

    def refuse(*_: Any, **__: Any) -> Maintained:
        raise REFUSED

    def sample(*_: Any) -> tuple[dict[str, Any], list[str]]:
        sampled.append("sampled")
        return {}, []

    monkeypatch.setattr(command, "connected", lambda needs: contextlib.nullcontext())
    monkeypatch.setattr(command, "kafka_cluster", lambda: None)
    monkeypatch.setattr(command, "read_folder", lambda: ({}, []))
    monkeypatch.setattr(command.maintenance, "maintain", refuse)
    monkeypatch.setattr(command.maintenance, "sample_and_mirror", sample)
    with pytest.raises(BadInput):
        command.maintain()
    assert sampled == ["sampled"]
