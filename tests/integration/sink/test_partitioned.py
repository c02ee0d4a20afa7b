"""Sinks that their owner has partitioned by time or by hash: loaded, rewound, and old partitions dropped."""

from __future__ import annotations

import json
from typing import Any

import psycopg2
import pytest
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.sink.fit import SinkMismatch

LINEAGE = "kafka_topic_id smallint NOT NULL, kafka_partition int NOT NULL, kafka_offset bigint NOT NULL, kafka_seq int NOT NULL"
COLUMNS = f"device bigint NOT NULL, at timestamptz NOT NULL, value bigint, {LINEAGE}"
UPSERT = {"mode": "upsert", "key": ["device", "at"]}
BY_TIME = (
    "PARTITION BY RANGE (at)",
    "FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
    "FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
)
BY_HASH = ("PARTITION BY HASH (device)", "FOR VALUES WITH (MODULUS 2, REMAINDER 0)", "FOR VALUES WITH (MODULUS 2, REMAINDER 1)")


def readings(scenario: Scenario, parts: tuple[str, str, str], **sink: Any) -> Scenario:
    """Three records, and a table whose owner has not made indexes yet."""
    topic = scenario.topics.create()
    scenario.write(None, topics=topic, format={"value": "json"}, sink={"table": scenario.table, **sink})
    by, first, second = parts
    table = scenario.table
    scenario.sql(f"CREATE SCHEMA IF NOT EXISTS lake; CREATE TABLE {table} ({COLUMNS}) {by}")
    scenario.sql(f"CREATE TABLE {table}_1 PARTITION OF {table} {first}; CREATE TABLE {table}_2 PARTITION OF {table} {second}")
    times = ("2025-03-01T00:00:00Z", "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z")
    scenario.topics.produce(topic, [json.dumps({"device": at, "at": time, "value": at}) for at, time in enumerate(times)])
    return scenario


@pytest.mark.parametrize("sink", [{}, UPSERT], ids=["append", "upsert"])
@pytest.mark.parametrize("parts", [BY_TIME, BY_HASH], ids=["time", "hash"])
def test_the_statements_that_a_run_asks_for_are_enough(scenario: Scenario, parts: tuple[str, str, str], sink: dict[str, Any]) -> None:
    """Postgres requires the partition key in each unique index. A rewind then takes the rows out of all partitions."""
    readings(scenario, parts, **sink)
    with pytest.raises(SinkMismatch) as refused:
        scenario.run()
    scenario.sql(refused.value.ddl)
    scenario.run()
    assert scenario.rows("value") == [0, 1, 2]
    assert tidemark(scenario, "rewind", "plan", scenario.name, "--to-earliest", "--reason", "read it again for a test").returncode == 0
    ((number,),) = scenario.sql("SELECT max(rewind_id) FROM tidemark.rewind")
    assert tidemark(scenario, "rewind", "apply", str(number)).returncode == 0
    assert scenario.rows("value") == []
    scenario.run()
    assert scenario.rows("value") == [0, 1, 2]


def test_record_without_a_partition_for_its_time_fails_alone(scenario: Scenario) -> None:
    """And old partitions may be dropped."""
    readings(scenario, BY_TIME)
    scenario.sql(f"ALTER TABLE {scenario.table} ADD UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, at)")
    scenario.topics.produce(scenario.spec.topics[0], [json.dumps({"device": 9, "at": "2030-01-01T00:00:00Z"})])
    scenario.run()
    assert scenario.rows("value") == [0, 1, 2]
    assert [each[:3] for each in scenario.failed()] == [(3, "fail", "CheckViolation")]
    scenario.sql(f"DROP TABLE {scenario.table}_1")
    scenario.topics.produce(scenario.spec.topics[0], [json.dumps({"device": 3, "at": "2026-05-01T00:00:00Z", "value": 3})])
    scenario.run()
    assert scenario.rows("value") == [1, 2, 3]


def test_key_without_the_partition_key_is_refused_before_postgres_refuses_its_index(scenario: Scenario) -> None:
    readings(scenario, BY_TIME, mode="upsert", key=["device"])
    with pytest.raises(
        SinkMismatch, match=r"the table is partitioned by at, so Postgres cannot keep a key without at unique: add it to sink.key"
    ):
        scenario.run()
    with pytest.raises(psycopg2.errors.FeatureNotSupported):
        scenario.sql(f"ALTER TABLE {scenario.table} ADD UNIQUE (device)")
