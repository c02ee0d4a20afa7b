"""A drain that dies anywhere has stored its slice completely or not at all, and the next drain does the rest (I1, I2)."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.lab import Lab, minutes
from tests.support.deaths import LosingAnswers, commits_on, deaths
from tests.support.ledger import in_thread
from tests.support.waiting import until

from tidemark.db import connect
from tidemark.errors import DatabaseUnavailable, Fenced
from tidemark.sink import commit as commit_module


@pytest.fixture
def due(lab: Lab) -> Lab:
    """Five records are due in one topic. Two will be loaded, one skipped, one will fail again and one permanently."""
    lab.read("a", "b", "c", "d", "e", answers={"a": "retry", "b": "retry", "c": "retry", "d": "retry", "e": "retry"})
    lab.make_due(minutes(5))
    lab.say({"a": "three", "b": "skip", "c": "retry", "d": "fail"})
    return lab


DONE = [("LOADED", 1, None), ("SKIPPED", 1, None), ("WAITING", 2, "retry"), ("FAILED", 1, "failed"), ("LOADED", 1, None)]


def image(lab: Lab) -> list[Any]:
    """Returns everything that a drain changes, except epochs."""
    tables = ("failed_record", "batch", "lost_range")
    stored = [sorted(str(row[0]) for row in lab.sql(f"SELECT to_jsonb(t) FROM tidemark.{table} t")) for table in tables]
    return [*stored, lab.rows(), lab.sql("SELECT topic_id, partition, next_offset FROM tidemark.partition_offset ORDER BY 1, 2")]


def check_done(lab: Lab) -> None:
    assert lab.failed("state, retry_number, split_part(retry_topic, '.', 2)") == DONE
    assert lab.rows() == [(0, 0), (0, 1), (0, 2), (4, 0)]
    assert lab.drains() == [("retry.5m", 0, 5, 2, 1, 1, 1, 0)]
    lab.check()


def test_drain_that_dies_after_any_statement_of_its_commit_changes_nothing(due: Lab) -> None:
    """Records, rows, ledger and position stay unchanged, and the next drain tries the same records."""
    last, before = 0, None

    def drain(cursor: type[PostgresCursor]) -> None:
        with commits_on(cursor):
            due.drain()

    for last in deaths(drain, due.watch):
        now = image(due)
        assert now == (before or now), f"after statement {last}"
        before = now
    assert last >= 5
    check_done(due)


def test_drain_whose_answer_to_commit_is_lost_finds_out_that_it_happened(due: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 22: the ledger shows that the slice was committed, so nothing is tried a second time."""
    monkeypatch.setattr(commit_module, "connect", lambda *args, **named: LosingAnswers(connect(*args, **named)))
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


def test_outage_of_the_database_in_a_drain_loses_nothing(due: Lab) -> None:
    """The drain's sessions are terminated before it reads its slice. The drain fails, and the next one tries the records again."""
    drivers = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'tidemark driver%'"
    kill = f"SELECT pg_terminate_backend(pid, 5000) {drivers}"
    with in_thread(lambda: due.consumer.run(drain=True, before=lambda part: due.sql(kill) and None)) as drain:
        until(drain.done)
        with pytest.raises(DatabaseUnavailable):
            drain.result()
    due.drain()
    check_done(due)
