"""Samples of a consumer's lag, as runs, `tidemark lag` and `tidemark maintain` store them. Real Kafka."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.support.records import open_transaction
from tests.support.rewound import rewound
from tests.support.scenario import PLAIN, Scenario
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.db import Connection, session, transaction
from tidemark.errors import Refused
from tidemark.kafka import cluster
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import lag, samples, store
from tidemark.offsets.health import Dag, Health
from tidemark.offsets.lag import GroupLag
from tidemark.offsets.sampling import sample_all
from tidemark.offsets.store import TaskIdentity
from tidemark.offsets.window import Observation

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the times of the next records leaves out those that do not arrive within a second."""
    monkeypatch.setattr(cluster, "FIRST_RECORDS_S", 20.0)


def ago(hours: float) -> int:
    return int(time.time() * 1000 - hours * HOUR_MS)


def sampled(scenario: Scenario) -> GroupLag:
    """Takes a new sample and returns the consumer's lag."""
    with session(scenario.database_url) as connection:
        assert sample_all(connection, Cluster(scenario.connections.kafka), [scenario.spec]) == {}
    return stored(scenario)


def stored(scenario: Scenario) -> GroupLag:
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        found = lag.group(cur, scenario.spec.group)
    assert found is not None
    return found


def told(scenario: Scenario) -> tuple[str, int, int | None, str]:
    """Health, deleted records, records to read and the reason, as ``tidemark lag`` shows them for the consumer."""
    shown = tidemark(scenario, "lag", scenario.name, "--output", "json")
    assert (shown.returncode, shown.stderr) == (0, "")
    (one,) = json.loads(shown.stdout)
    return one["lag"]["health"], one["lag"]["deleted"], one["lag"]["records"], one["lag"]["why"]


def read_two(scenario: Scenario, **config: str) -> str:
    """Creates a topic of one partition and two records, which a run reads."""
    topic = scenario.topics.create(**config)
    scenario.topics.produce(topic, ["a", "b"], timestamp=ago(9))
    scenario.write(PLAIN, topics=topic).make_sink("payload bytea")
    scenario.run()
    return topic


def test_seconds_are_the_age_of_the_first_record_that_is_not_committed(scenario: Scenario) -> None:
    """The record's timestamp and the database's clock give the age. A run stores a sample when it ends."""
    topic = read_two(scenario, retention_ms="604800000")
    found = stored(scenario)
    assert (found.lag.records, found.lag.seconds, found.lag.open, found.lag.health) == (0, 0.0, 0, Health.OK)
    assert found.lag.committed_at is not None
    scenario.topics.produce(topic, ["c"], timestamp=ago(2))
    scenario.topics.produce(topic, ["d", "e"], timestamp=ago(1))
    found = sampled(scenario)
    assert (found.lag.records, found.lag.unknown, found.lag.health) == (3, 0, Health.OK)
    assert abs(found.lag.seconds - 7200) < 60  # type: ignore[operator]
    assert abs(found.lag.retention_used - 2 / 168) < 0.001  # type: ignore[operator]
    scenario.run()
    assert (stored(scenario).lag.records, stored(scenario).lag.seconds) == (0, 0.0)
    scenario.topics.produce(topic, ["f"], timestamp=ago(-0.5))
    found = sampled(scenario)
    assert (found.lag.seconds, found.lag.clock_ahead) == (0.0, True)


def test_replay_after_a_rewind_is_shown_as_such_with_what_is_left(scenario: Scenario) -> None:
    topic = read_two(scenario)
    scenario.topics.produce(topic, ["c"], timestamp=ago(1))
    rewound(scenario, "--to-earliest")
    found = sampled(scenario)
    assert (found.lag.health, found.lag.records, found.lag.replay_records) == (Health.REPLAYING, 3, 2)
    assert (found.partitions[0].replay_until, found.partitions[0].position) == (2, 0)
    assert abs(found.lag.seconds - 9 * 3600) < 60  # type: ignore[operator]
    scenario.run()
    found = stored(scenario)
    assert (found.lag.health, found.lag.records, found.lag.replay_records) == (Health.OK, 0, 0)


def test_open_transaction_is_shown_apart(scenario: Scenario) -> None:
    topic = read_two(scenario)
    with open_transaction(scenario.topics, topic, b"open") as producer:
        scenario.topics.produce(topic, ["behind it"])
        found = sampled(scenario)
        assert (found.lag.records, found.lag.open, found.lag.seconds) == (0, 2, 0.0)
        producer.commit_transaction()  # the broker writes the marker a moment later
    until(lambda: sampled(scenario).lag.open == 0)
    assert sampled(scenario).lag.records == 3  # includes the marker of the transaction


def test_position_before_the_log_start_is_losing(scenario: Scenario) -> None:
    """The command says so, even after a run was refused for it, until a run may skip the deleted records."""
    topic = read_two(scenario)
    scenario.topics.produce(topic, ["c", "d", "e"])
    scenario.topics.trim(topic, {0: 4})
    losing = ("losing", 2, 1, "Retention has deleted 2 records that were not read.")
    assert told(scenario) == losing
    with pytest.raises(Refused):
        scenario.run()
    assert told(scenario) == losing
    scenario.set(offset_reset="earliest")
    scenario.run()
    assert told(scenario)[:3] == ("ok", 0, 0)


def test_new_partition_and_recreated_topic_are_unknown_until_a_run_claims_them(scenario: Scenario) -> None:
    topic = read_two(scenario)
    scenario.topics.grow(topic, 2)
    found = sampled(scenario)
    assert [(one.records, one.seconds, one.health) for one in found.partitions] == [(0, 0.0, Health.OK), (None, None, Health.UNKNOWN)]
    assert (found.lag.records, found.lag.health) == (None, Health.UNKNOWN)
    scenario.topics.recreate(topic)
    scenario.topics.produce(topic, ["new"])
    found = sampled(scenario)
    assert [(one.records, one.health) for one in found.partitions] == [(None, Health.UNKNOWN)]
    assert found.partitions[0].why == "1 partition was never claimed."


def test_commands_show_the_lag_and_maintain_samples_it(scenario: Scenario) -> None:
    topic = read_two(scenario)
    assert tidemark(scenario, "validate", scenario.name).returncode == 0
    scenario.topics.produce(topic, ["c"], timestamp=ago(2))
    shown = tidemark(scenario, "lag", scenario.name)
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if f"{topic}/0" in line)
    assert line.split()[1:5] == ["1", "0", "2.0", "h"]
    assert f"{scenario.spec.group}: ok: " in shown.stdout
    (one,) = json.loads(tidemark(scenario, "lag", "--output", "json").stdout)
    assert (one["lag"]["group"], one["lag"]["records"], one["lag"]["health"], one["partitions"]) == (scenario.spec.group, 1, "ok", [])
    listed: Any = json.loads(tidemark(scenario, "groups", "list", "--output", "json").stdout)
    assert (listed[0]["records"], listed[0]["health"]) == (1, "ok")
    assert "ok" in tidemark(scenario, "offsets", scenario.name).stdout
    assert tidemark(scenario, "lag", "--watch").returncode == 1
    scenario.topics.produce(topic, ["d"])
    assert tidemark(scenario, "maintain").returncode == 0
    assert stored(scenario).lag.records == 2


def test_run_of_some_partitions_samples_all_of_the_group(scenario: Scenario) -> None:
    """Otherwise a lag in the others would be hidden until the next whole run."""
    topic = scenario.topics.create(2)
    scenario.write(PLAIN, topics=topic).make_sink("payload bytea")
    scenario.run()
    for partition in (0, 1):
        scenario.topics.produce(topic, ["a"], partition=partition)
    scenario.run(partitions=[f"{topic}:0"])
    found = stored(scenario)
    assert [(one.partition, one.records, one.sampled_at) for one in found.partitions] == [
        (0, 0, found.lag.sampled_at),
        (1, 1, found.lag.sampled_at),
    ]


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

    def attempt(self, error: Mapping[str, str] | None = None, task: TaskIdentity | None = None) -> None:
        with transaction(self.connection) as cur:
            attempt_id = store.new_attempt(cur, self.group_id, task or TaskIdentity())
            store.end_attempt(cur, attempt_id, error)

    def lag(self) -> GroupLag:
        """Returns the group with its partitions. Checks that its sums match those that the samples stored."""
        with transaction(self.connection) as cur:
            found = lag.group(cur, "g")
            (stored,) = lag.groups(cur)
        assert found is not None
        whole, sums = (replace(one.lag, age_s=None, why="") for one in (found, stored))
        assert sums == whole
        return found


@pytest.fixture
def group(database_url: str) -> Iterator[Sampled]:
    with session(database_url) as connection:
        yield Sampled(connection)


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
    assert [one.health for one in found.partitions] == [Health.CATCHING_UP, Health.OK]
    assert whole.health is Health.CATCHING_UP
    with transaction(group.connection) as cur:
        (over,) = lag.groups(cur)
    assert (over.lag.health, over.lag.why, over.lag.records, over.lag.seconds) == (whole.health, whole.why, 90, 540.0)
    assert over.partitions == ()


def test_failed_run_stops_the_group_until_the_next_one_commits(group: Sampled) -> None:
    group.attempt({"kind": "refused", "type": "TopicsMissing", "text": "Topics not found."})
    group.sample(0, {0: 10}, 50, next_at=group.now)
    assert (group.lag().lag.health, group.lag().lag.why) == (Health.RUN_FAILED, "Attempt 1 failed: TopicsMissing: Topics not found.")
    for drain in (TaskIdentity(task_id="drain"), TaskIdentity("drain_retries", "manual", "drain", 0, 1)):
        group.attempt(task=drain)
    assert group.lag().lag.health is Health.RUN_FAILED, "drains read other records"
    group.attempt()
    assert group.lag().lag.health is Health.OK
    with transaction(group.connection) as cur:
        (found,) = lag.each_group(cur, lambda: {"g": Dag("consume__g", paused=True)}, None)
    assert found.lag.why == "Records wait, and the DAG consume__g is paused."


def test_last_stable_offset_that_does_not_move_stops_the_group(group: Sampled) -> None:
    """Until it moves. Records behind an open transaction are no lag, but nobody can read them."""
    group.attempt()
    group.sample(20, {0: 100}, 100, high_watermark=150)
    group.sample(1, {0: 100}, 100, high_watermark=160)
    found = group.lag().lag
    assert (found.records, found.open, found.open_s) == (0, 60, 19 * 60)
    assert (found.health, found.why) == (
        Health.STOPPED,
        "60 records cannot be read: a producer's transaction has been open for at least 19 min.",
    )
    group.sample(0, {0: 100}, 110, high_watermark=160)
    found = group.lag().lag
    assert (found.records, found.open_s, found.health) == (10, 0, Health.OK)


def test_missed_objective_and_failed_records_are_the_groups_health(group: Sampled) -> None:
    group.attempt()
    group.sample(0, {0: 100}, 100)
    assert group.lag().lag.health is Health.IDLE
    with transaction(group.connection) as cur:
        cur.execute("INSERT INTO tidemark.objective (group_id, objective, missed) VALUES (%s, 'lag', 'lag is 1 h')", (group.group_id,))
    assert (group.lag().lag.health, group.lag().lag.why) == (Health.OBJECTIVE_MISSED, "Lag is 1 h.")


def test_run_has_failed_if_one_of_its_members_has_or_if_its_driver_is_gone(group: Sampled, database_url: str) -> None:
    """Whatever the newest attempt says, and until a newer try of the member is good. Who ended a driver may not have lived to say so."""
    group.sample(0, {0: 100}, 100)
    failed = {"kind": "refused", "type": "TopicsMissing", "text": "Topics not found."}

    def member(index: int, number: int, error: Mapping[str, str] | None) -> None:
        with transaction(group.connection) as cur:
            attempt_id = store.new_attempt(cur, group.group_id, TaskIdentity("consume__g", "run1", "consume", index, number))
            store.end_attempt(cur, attempt_id, error)

    member(0, 1, failed)
    member(1, 1, None)
    assert group.lag().lag.health is Health.RUN_FAILED
    member(0, 2, None)
    assert group.lag().lag.health is Health.IDLE
    with transaction(group.connection) as cur:
        attempt_id = store.new_attempt(cur, group.group_id, TaskIdentity())
    assert group.lag().lag.health is Health.RUNNING, "it may be about to start"
    with transaction(group.connection) as cur:
        cur.execute("UPDATE tidemark.attempt SET started_at = started_at - interval '1 hour' WHERE attempt_id = %s", (attempt_id,))
    assert group.lag().lag.why == f"Attempt {attempt_id} failed: DriverGone: The driver ended without reporting a result."
    with session(database_url, application=f"tidemark driver {attempt_id}"):
        assert group.lag().lag.health is Health.RUNNING


def test_pause_of_one_partition_shows_on_it_and_on_its_group(group: Sampled) -> None:
    group.attempt()
    group.sample(1, {0: 10, 1: 100}, 100)
    with transaction(group.connection) as cur:
        cur.execute("INSERT INTO tidemark.flow (group_id, topic, partition, paused) VALUES (%s, 'orders', 0, true)", (group.group_id,))
    found = group.lag()
    assert [one.health for one in found.partitions] == [Health.PAUSED, Health.IDLE]
    assert (found.lag.health, found.lag.why) == (Health.PAUSED, "1 partition is paused with `tidemark pause`.")
    group.sample(0, {0: 10, 1: 100}, 100)  # a sample during the pause
    assert group.lag().lag.health is Health.PAUSED
    with transaction(group.connection) as cur:
        cur.execute("DELETE FROM tidemark.flow")
    assert group.lag().lag.health is not Health.PAUSED


def test_history_has_one_moment_a_step_and_forgets_what_is_older_than_its_step_is_kept(group: Sampled) -> None:
    """Each step keeps one sample: steps of one minute for 2 hours, of five minutes for a day, and of one hour for 30 days."""
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


def test_step_of_the_history_keeps_its_peak(group: Sampled) -> None:
    """A backlog that has been read again by the next sample stays in the step, and the step does not move."""
    half_past = (group.now - group.now.replace(minute=30, second=0, microsecond=0) + 3 * DAY) / MINUTE
    for minutes, position in enumerate((0, 48, 50)):
        group.sample(half_past - minutes, {0: position}, 50)
        with transaction(group.connection) as cur:
            (hour,) = samples.history(cur, "g", 4 * DAY)
        assert (hour.records, hour.consumed, hour.at.minute) == (50, 0, 0)


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
