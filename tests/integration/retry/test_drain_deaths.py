"""A drain that dies anywhere has stored its slice completely or not at all, and the next drain does the rest (I1, I2)."""

from __future__ import annotations

from itertools import count
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.lab import Lab, dying_at, minutes
from tests.support.ledger import backend_of, in_thread
from tests.support.waiting import until

from tidemark.db import Connection, connect
from tidemark.errors import DatabaseUnavailable, Fenced
from tidemark.offsets.store import TaskIdentity
from tidemark.sink import commit as commit_module
from tidemark.sink.steps import Step


@pytest.fixture
def due(lab: Lab) -> Lab:
    """Five records are due in one topic. Two will be loaded, one skipped, one will fail again and one permanently."""
    lab.say({"a": "retry", "b": "retry", "c": "retry", "d": "retry", "e": "retry"})
    lab.produce("a", "b", "c", "d", "e")
    lab.run()
    lab.publish()
    lab.age(minutes(5))
    lab.say({"a": "three", "b": "skip", "c": "retry", "d": "fail"})
    return lab


DONE = [("LOADED", 1), ("SKIPPED", 1), ("WAITING", 2), ("FAILED", 1), ("LOADED", 1)]


def image(lab: Lab) -> list[Any]:
    """Returns everything that a drain changes, except epochs."""
    tables = ("failed_record", "batch", "lost_range")
    stored = [sorted(str(row[0]) for row in lab.sql(f"SELECT to_jsonb(t) FROM tidemark.{table} t")) for table in tables]
    return [*stored, lab.rows(), lab.sql("SELECT topic_id, partition, next_offset FROM tidemark.partition_offset ORDER BY 1, 2")]


def check_done(lab: Lab) -> None:
    assert lab.failed("state, retry_number") == DONE
    assert lab.rows() == [(0, 0), (0, 1), (0, 2), (4, 0)]
    assert lab.drains() == [("retry.5m", 0, 5, 2, 1, 1, 1, 0)]
    lab.check()


class Watched(PostgresCursor):
    """Makes the server terminate the session after the n-th statement."""

    done = 0
    last = 0
    killer: Any

    def execute(self, *args: Any, **kwargs: Any) -> None:
        super().execute(*args, **kwargs)
        self._count()

    def copy_expert(self, *args: Any, **kwargs: Any) -> None:
        super().copy_expert(*args, **kwargs)
        self._count()

    def _count(self) -> None:
        Watched.done += 1
        if Watched.done == Watched.last:
            with Watched.killer.cursor() as cur:
                cur.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(self.connection),))


def test_drain_that_dies_after_any_statement_of_its_commit_changes_nothing(due: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, rows, ledger and position stay unchanged, and the next drain tries the same records."""

    def watched(*args: Any, **named: Any) -> Connection:
        connection = connect(*args, **named)
        connection.cursor_factory = Watched
        return connection

    Watched.killer = due.watch
    before = None
    for last in count(1):
        Watched.done, Watched.last = 0, last
        with monkeypatch.context() as patched:
            patched.setattr(commit_module, "connect", watched)
            try:
                due.drain()
            except DatabaseUnavailable:
                now = image(due)
                assert now == (before or now), f"after statement {last}"
                before = now
            else:
                break
    assert last - 1 >= 8
    check_done(due)


@pytest.mark.parametrize("step", Step)
def test_process_that_dies_at_a_step_of_a_drains_commit_leaves_all_of_it_or_nothing(
    due: Lab, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    """Scenarios 18, 21: up to ⑥ nothing is stored. After it everything is, and the next drain finds nothing to do."""
    with dying_at(step, monkeypatch), pytest.raises(KeyboardInterrupt):
        due.drain()
    assert bool(due.rows()) is (step is Step.RECEIPT)
    due.drain()
    check_done(due)


def test_drain_whose_answer_to_commit_is_lost_finds_out_that_it_happened(due: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 22: the ledger shows that the slice was committed, so nothing is tried a second time."""

    class Losing:
        def __init__(self, connection: Connection) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        def commit(self) -> None:
            self._connection.commit()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(commit_module, "connect", lambda *args, **named: Losing(connect(*args, **named)))
    due.drain()
    assert sorted(due.calls()) == sorted([(0, offset) for offset in range(5)] * 2)  # once in the run, once in the drain
    check_done(due)


def test_of_two_drains_at_once_one_wins_and_the_other_stores_nothing(due: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 42: overlapping drains. The newer one has claimed the retry topic; the other is fenced when it commits (I2)."""
    second: list[Any] = []

    def overtake(_part: Any) -> None:
        if not second:
            second.append(None)
            due.drain()

    with pytest.raises(Fenced):
        due.consumer.run(drain=True, before=overtake)
    check_done(due)


def test_run_of_the_consumer_and_a_drain_of_its_retries_go_on_side_by_side(due: Lab) -> None:
    """They claim different partitions, so neither fences the other."""
    due.produce("x", "y")
    ran: list[Any] = []
    due.consumer.run(drain=True, before=lambda part: ran or ran.append(due.run()))
    assert due.loaded() == ["a", "a", "a", "e", "x", "y"]
    due.produce("z")
    due.run()
    due.check()


def test_drain_that_airflow_tries_again_does_what_the_first_try_has_left(due: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 42: the task's second try has a new attempt and a new claim."""
    task = TaskIdentity("drain_retries", "scheduled__1", "drain", 0, 1)
    with dying_at(Step.LEDGER, monkeypatch), pytest.raises(KeyboardInterrupt):
        due.drain(task=task)
    due.drain(task=TaskIdentity("drain_retries", "scheduled__1", "drain", 0, 2))
    check_done(due)


def test_outage_of_the_database_in_a_drain_loses_nothing(due: Lab) -> None:
    """The drain's sessions are terminated before it reads its slice. The drain fails, and the next one tries the records again."""
    with in_thread(lambda: due.consumer.run(drain=True, before=lambda part: kill(due))) as drain:
        until(drain.done)
        with pytest.raises(DatabaseUnavailable):
            drain.result()
    due.drain()
    check_done(due)


def kill(lab: Lab) -> None:
    found = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'tidemark driver%'"
    lab.sql(f"SELECT pg_terminate_backend(pid, 5000) {found}")
