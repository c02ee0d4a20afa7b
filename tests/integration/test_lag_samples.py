"""Lag samples in Postgres: writing, thinning and reading them. Kafka's side is made up here; `test_lag.py` asks a real Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from tidemark.db import Connection, session, transaction
from tidemark.offsets import lag, samples, store
from tidemark.offsets.lag import GroupLag
from tidemark.offsets.store import TaskIdentity
from tidemark.offsets.verdict import Schedule, Verdict
from tidemark.offsets.window import Observation

DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)


class Sampled:
    """A group with made-up samples, taken ``minutes`` ago."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        with transaction(connection) as cur:
            self.group_id = store.ensure_group(cur, "g")
            self.topic_id = store.ensure_topic(cur, "orders", "uuid-1")
            self.now: datetime = samples.state(cur, self.group_id)[0]

    def sample(self, minutes: float, positions: Mapping[int, int | None], end: int, **more: object) -> None:
        at = self.now - minutes * MINUTE
        seen = {
            (self.topic_id, number): Observation(at, position, 0, end, **{"high_watermark": end, **more})  # type: ignore[arg-type]
            for number, position in positions.items()
        }
        with transaction(self.connection) as cur:
            assert samples.store(cur, self.group_id, seen)

    def attempt(self, error: Mapping[str, str] | None = None) -> None:
        with transaction(self.connection) as cur:
            attempt_id = store.new_attempt(cur, self.group_id, TaskIdentity())
            store.end_attempt(cur, attempt_id, error)

    def lag(self, schedule: Schedule | None = None) -> GroupLag:
        """Returns the group with its partitions. Checks that its sums match those that the samples stored."""
        with transaction(self.connection) as cur:
            found = lag.group(cur, "g", schedule)
            (stored,) = lag.groups(cur, {} if schedule is None else {"g": schedule})
        assert found is not None
        whole, sums = (replace(one.lag, age_s=None, why="") for one in (found, stored))
        assert sums == whole
        return found


@pytest.fixture
def group(database_url: str) -> Iterator[Sampled]:
    with session(database_url) as connection:
        yield Sampled(connection)


def test_group_without_a_sample_is_unknown(group: Sampled) -> None:
    found = group.lag().lag
    assert (found.verdict, found.records, found.seconds, found.age_s) == (Verdict.UNKNOWN, None, None, None)


def test_group_adds_up_its_partitions_and_the_overview_says_the_same(group: Sampled) -> None:
    group.attempt()
    group.sample(2, {0: 10, 1: 60}, 100)
    group.sample(1, {0: 40, 1: 90}, 110, next_at=group.now - 10 * MINUTE, retention=DAY)
    found = group.lag()
    assert [(one.partition, one.records, one.position) for one in found.partitions] == [(0, 70, 40), (1, 20, 90)]
    whole = found.lag
    assert (whole.records, whole.unknown, whole.open, whole.seconds) == (90, 0, 0, 540.0)
    assert (whole.produced_per_s, whole.consumed_per_s) == (20 / 60, 60 / 60)
    assert whole.catch_up_s == pytest.approx(90 / (40 / 60))
    assert whole.retention_used == pytest.approx(540 / 86_400)
    assert [one.verdict for one in found.partitions] == [Verdict.CATCHING_UP, Verdict.OK]
    assert whole.verdict is Verdict.CATCHING_UP
    with transaction(group.connection) as cur:
        (over,) = lag.groups(cur)
    assert (over.lag.verdict, over.lag.why, over.lag.records, over.lag.seconds) == (whole.verdict, whole.why, 90, 540.0)
    assert over.partitions == ()


def test_partition_that_was_never_claimed_is_unknown_and_makes_its_group_unknown(group: Sampled) -> None:
    group.sample(1, {0: 100, 1: None}, 100)
    found = group.lag()
    assert [(one.records, one.verdict) for one in found.partitions] == [(0, Verdict.IDLE), (None, Verdict.UNKNOWN)]
    assert (found.lag.records, found.lag.known_records, found.lag.unknown) == (None, 0, 1)
    assert found.lag.seconds is None


def test_losing_says_when_retention_will_pass_the_position(group: Sampled) -> None:
    group.attempt()
    waits = {"next_at": group.now - 20 * MINUTE, "retention": 30 * MINUTE}
    group.sample(1, {0: 10}, 50, **waits)
    found = group.lag()
    assert found.lag.verdict is Verdict.LOSING
    assert found.lag.why == "Retention will pass the position in 10 min."
    assert found.lag.retention_used == pytest.approx(19 / 30)


def test_failed_run_stops_the_group_until_the_next_one_commits(group: Sampled) -> None:
    group.attempt({"kind": "refused", "type": "TopicsMissing", "text": "Topics not found."})
    group.sample(0, {0: 10}, 50, next_at=group.now)
    assert (group.lag().lag.verdict, group.lag().lag.why) == (Verdict.STOP, "Attempt 1 failed: TopicsMissing: Topics not found.")
    group.attempt()
    assert group.lag().lag.verdict is Verdict.OK
    assert group.lag(Schedule("consume__g", paused=True)).lag.why == "The DAG consume__g is paused."


def test_pause_of_one_partition_shows_on_it_and_on_its_group(group: Sampled) -> None:
    group.attempt()
    group.sample(1, {0: 10, 1: 100}, 100)
    with transaction(group.connection) as cur:
        cur.execute("INSERT INTO tidemark.flow (group_id, topic, partition, paused) VALUES (%s, 'orders', 0, true)", (group.group_id,))
    found = group.lag()
    assert [one.verdict for one in found.partitions] == [Verdict.PAUSED, Verdict.IDLE]
    assert (found.lag.verdict, found.lag.why) == (Verdict.PAUSED, "1 partition is paused with `tidemark pause`.")
    group.sample(0, {0: 10, 1: 100}, 100)  # a sample during the pause
    assert group.lag().lag.verdict is Verdict.PAUSED
    with transaction(group.connection) as cur:
        cur.execute("DELETE FROM tidemark.flow")
    assert group.lag().lag.verdict is not Verdict.PAUSED


def test_earlier_incarnation_of_a_topic_leaves_with_the_next_sample(group: Sampled) -> None:
    group.sample(2, {0: 10}, 50)
    with transaction(group.connection) as cur:
        group.topic_id = store.ensure_topic(cur, "orders", "uuid-2")
    group.sample(1, {0: None}, 5)
    found = group.lag()
    assert [(one.topic, one.records) for one in found.partitions] == [("orders", None)]


def test_history_has_one_moment_a_step_and_forgets_what_is_older_than_its_step_is_kept(group: Sampled) -> None:
    """Each step keeps its last sample: steps of one minute for 2 hours, of five minutes for a day, and of one hour for 30 days."""
    for minute in range(40 * 24 * 60, 0, -7 * 60 - 1):
        group.sample(minute, {0: 10}, 50)
    for minute in range(200, 0, -1):
        group.sample(minute / 2, {0: 10}, 50)
    with transaction(group.connection) as cur:
        for period, kept in ((timedelta(hours=2), 60), (DAY, 288), (30 * DAY, 720)):
            found = samples.history(cur, "g", period)
            step = samples.step_for(period)
            assert 3 < len(found) <= period / step + 1
            assert len(found) <= max(kept, period / step) + 1
            assert len({one.at for one in found}) == len(found)
            assert [one.at for one in found] == sorted(one.at for one in found)
            assert all(one.at <= one.sampled_at < one.at + step for one in found)
        cur.execute("SELECT step_s, min(at) FROM tidemark.lag_history GROUP BY step_s")
        for step_s, first in cur.fetchall():
            assert first > group.now - samples.STEPS[timedelta(seconds=step_s)] - MINUTE


def test_older_sample_does_not_replace_a_later_one(group: Sampled) -> None:
    group.sample(1, {0: 40}, 50)
    group.sample(2, {0: 10}, 50)
    assert group.lag().lag.records == 10


def test_two_processes_do_not_count_the_same_records_twice(group: Sampled, database_url: str) -> None:
    group.sample(2, {0: 10}, 50)
    seen = {(group.topic_id, 0): Observation(group.now, 40, 0, 50)}
    with session(database_url) as other, transaction(group.connection) as cur, transaction(other) as theirs:
        assert samples.store(cur, group.group_id, seen)
        assert not samples.store(theirs, group.group_id, seen)
    with transaction(group.connection) as cur:
        assert samples.last(cur, group.group_id)[group.topic_id, 0].consumed == 30


def test_steps_in_the_statements_are_those_of_the_module(group: Sampled) -> None:
    group.sample(0, {0: 10}, 50)
    with transaction(group.connection) as cur:
        cur.execute("SELECT array_agg(step_s ORDER BY step_s) FROM tidemark.lag_history")
        row = cur.fetchone()
    assert row is not None
    assert [timedelta(seconds=step_s) for step_s in row[0]] == list(samples.STEPS)
