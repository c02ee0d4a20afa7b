"""Samples of a consumer's lag, as runs, `tidemark lag` and `tidemark maintain` store them. Real Kafka."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.support.scenario import PLAIN, Scenario
from tests.support.waiting import until

from tidemark.db import session, transaction
from tidemark.errors import Refused
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import lag
from tidemark.offsets.lag import GroupLag
from tidemark.offsets.sampling import sample_all
from tidemark.offsets.verdict import Verdict

HOUR_MS = 3_600_000


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
    """Verdict, deleted records, records to read and the reason, as ``tidemark lag`` shows them for the consumer."""
    shown = scenario.command("lag", scenario.name, "--output", "json")
    assert (shown.returncode, shown.stderr) == (0, "")
    (one,) = json.loads(shown.stdout)
    return one["lag"]["verdict"], one["lag"]["deleted"], one["lag"]["records"], one["lag"]["why"]


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
    assert (found.lag.records, found.lag.seconds, found.lag.open, found.lag.verdict) == (0, 0.0, 0, Verdict.OK)
    assert found.lag.committed_at is not None
    scenario.topics.produce(topic, ["c"], timestamp=ago(2))
    scenario.topics.produce(topic, ["d", "e"], timestamp=ago(1))
    found = sampled(scenario)
    assert (found.lag.records, found.lag.unknown, found.lag.verdict) == (3, 0, Verdict.OK)
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
    planned = scenario.command("rewind", "plan", scenario.name, "--to-earliest", "--reason", "test of the lag")
    assert planned.returncode == 0, planned.stderr
    assert scenario.command("rewind", "apply", "1").returncode == 0
    found = sampled(scenario)
    assert (found.lag.verdict, found.lag.records, found.lag.replay_records) == (Verdict.REPLAYING, 3, 2)
    assert (found.partitions[0].replay_until, found.partitions[0].position) == (2, 0)
    assert abs(found.lag.seconds - 9 * 3600) < 60  # type: ignore[operator]
    scenario.run()
    found = stored(scenario)
    assert (found.lag.verdict, found.lag.records, found.lag.replay_records) == (Verdict.OK, 0, 0)


def test_open_transaction_is_shown_apart(scenario: Scenario) -> None:
    from confluent_kafka import Producer

    topic = read_two(scenario)
    producer = Producer({"bootstrap.servers": scenario.topics.servers, "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush()
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
    losing = ("LOSING", 2, 1, "Retention has deleted 2 records that were not read.")
    assert told(scenario) == losing
    with pytest.raises(Refused):
        scenario.run()
    assert told(scenario) == losing
    scenario.set(offset_reset="earliest")
    scenario.run()
    assert told(scenario)[:3] == ("OK", 0, 0)


def test_new_partition_and_recreated_topic_are_unknown_until_a_run_claims_them(scenario: Scenario) -> None:
    topic = read_two(scenario)
    scenario.topics.grow(topic, 2)
    found = sampled(scenario)
    assert [(one.records, one.seconds, one.verdict) for one in found.partitions] == [(0, 0.0, Verdict.OK), (None, None, Verdict.UNKNOWN)]
    assert (found.lag.records, found.lag.verdict) == (None, Verdict.UNKNOWN)
    scenario.topics.recreate(topic)
    scenario.topics.produce(topic, ["new"])
    found = sampled(scenario)
    assert [(one.records, one.verdict) for one in found.partitions] == [(None, Verdict.UNKNOWN)]
    assert found.partitions[0].why == "1 partition was never claimed."


def test_commands_show_the_lag_and_maintain_samples_it(scenario: Scenario) -> None:
    topic = read_two(scenario)
    scenario.topics.produce(topic, ["c"], timestamp=ago(2))
    shown = scenario.command("lag", scenario.name)
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if f"{topic}/0" in line)
    assert line.split()[1:5] == ["1", "0", "2.0", "h"]
    assert f"{scenario.spec.group}: OK: " in shown.stdout
    (one,) = json.loads(scenario.command("lag", "--output", "json").stdout)
    assert (one["lag"]["group"], one["lag"]["records"], one["lag"]["verdict"], one["partitions"]) == (scenario.spec.group, 1, "OK", [])
    listed: Any = json.loads(scenario.command("groups", "list", "--output", "json").stdout)
    assert (listed[0]["records"], listed[0]["verdict"]) == (1, "OK")
    assert "OK" in scenario.command("offsets", scenario.name).stdout
    assert scenario.command("lag", "--watch").returncode == 1
    scenario.topics.produce(topic, ["d"])
    assert scenario.command("maintain").returncode == 0
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
