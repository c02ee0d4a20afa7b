"""`tidemark doctor` finds what will make runs fail or lose records, and reports no problem in a healthy deployment."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from tests.support.orders import Orders, order
from tests.support.ports import closed_port
from tests.support.scenario import SPARK, Scenario
from tests.support.shell import tidemark

from tidemark.doctor.database import examine_database
from tidemark.doctor.examine import examine
from tidemark.doctor.finding import Finding, Level
from tidemark.doctor.topic_checks import unreachable
from tidemark.kafka import cluster
from tidemark.local import LocalStack
from tidemark.sink.fit import SinkMismatch

DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the times of the next records leaves out those that do not arrive within a second."""
    monkeypatch.setattr(cluster, "FIRST_RECORDS_S", 20.0)


@pytest.fixture
def consumer(scenario: Scenario) -> Scenario:
    """A consumer with retry delays that has read all ten records of its topic."""
    topic = scenario.topics.create()
    scenario.write(topics=topic, retry={"delays": ["1h"]}).make_sink()
    scenario.topics.produce(topic, [b"%d" % number for number in range(10)])
    scenario.run()
    return scenario


def findings(scenario: Scenario) -> list[Finding]:
    """All findings, except that the tests' server runs without fsync."""
    return [one for one in examine(scenario.connections, [scenario.spec], scenario.folders) if one.found != "fsync is off"]


def problems(scenario: Scenario) -> list[tuple[Level, str, str]]:
    """The findings that are not OK: level, subject without the consumer's name, and text."""
    return [
        (one.level, one.subject.removeprefix(f"{scenario.name}: "), one.found) for one in findings(scenario) if one.level is not Level.OK
    ]


def test_healthy_deployment_has_no_problem(consumer: Scenario):
    """Each table of a consumer is examined."""
    found = findings(consumer)
    assert {one.level for one in found} == {Level.OK}
    topic = f"topic {consumer.spec.topics[0]}"
    general = {"versions", "java", "network", "postgres", "clocks", "schema", "retention", "kafka"}
    assert {one.subject.removeprefix(f"{consumer.name}: ") for one in found} >= general | {"sink", topic, "check"}
    consumer.set(sink=None, sinks={"a": {"table": consumer.table}, "b": {"table": f"{consumer.table}_b"}})
    assert any(f"{consumer.table}_b does not exist" in found for _, subject, found in problems(consumer) if subject == "check")


def test_each_problem_has_a_fix(consumer: Scenario):
    """These problems concern one consumer; the other findings stay OK."""
    topic = consumer.spec.topics[0]
    consumer.topics.alter(topic, min_insync_replicas="2", unclean_leader_election_enable="true")
    consumer.sql(f"DROP TABLE {consumer.table} CASCADE")
    found = [one for one in findings(consumer) if one.level is not Level.OK]
    assert [(one.level, one.found.partition(": ")[0]) for one in found] == [
        (Level.FAILURE, "min.insync.replicas is 2, but it has 1 replica"),
        (Level.WARNING, "unclean.leader.election.enable is true"),
        (Level.WARNING, f"{consumer.spec_file}:3:10"),
    ]
    assert found[-1].found.endswith(f"Table {consumer.table} does not exist. `tidemark sink ddl NAME` prints the DDL that creates it.")
    assert all(one.fix for one in found[:-1])


def test_records_that_retention_takes_before_they_are_read(consumer: Scenario):
    topic = consumer.spec.topics[0]
    consumer.topics.alter(topic, retention_ms=str(10 * DAY_MS))
    consumer.topics.produce(topic, [b"old"], timestamp=int(time.time() * 1000) - 8 * DAY_MS)
    ((level, subject, found),) = problems(consumer)
    assert (level, subject) == (Level.WARNING, f"topic {topic}")
    assert "the oldest unread record is 8.0 days old, and retention deletes after 10.0 days" in found
    consumer.topics.produce(topic, [b"new"])
    consumer.topics.trim(topic, {0: 11})
    ((level, _, found),) = problems(consumer)
    assert level is Level.FAILURE
    assert found == f"retention has deleted records that were not read, in {topic}/0"


def test_retry_topic_that_deletes_too_early(consumer: Scenario):
    name = f"{consumer.spec.group}.retry.1h"
    consumer.topics.create(name=name, message_timestamp_type="LogAppendTime", retention_ms="60000", max_message_bytes="2000000")
    ((level, subject, found),) = problems(consumer)
    assert (level, subject) == (Level.FAILURE, "check")
    assert found.startswith(f"{name}: retention.ms is 60000")


def test_table_that_lacks_a_field_of_the_schema(orders: Orders) -> None:
    """`try`, `check` and the run refuse it with the same text. A form that needs Spark is not called; its table must exist."""
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}).make_sink("id bigint, city text")
    ((level, subject, found),) = problems(scenario)
    assert (level, subject) == (Level.FAILURE, "check")
    with pytest.raises(SinkMismatch) as refused:
        scenario.run()
    assert found.endswith(f": {refused.value}")
    assert 'ADD COLUMN "total" numeric(12,2);' in found
    scenario.write(SPARK, topics=orders.topic)
    assert ["columns not compared" in finding.found for finding in findings(scenario) if finding.subject.endswith("check")] == [True]
    scenario.set(sink={"table": f"{scenario.table}_missing"})
    ((level, found),) = [(level, found) for level, subject, found in problems(scenario) if subject == "check"]
    assert level is Level.WARNING
    assert f"Table {scenario.table}_missing does not exist" in found


@pytest.mark.parametrize(
    ("setting", "level", "found"),
    [
        ("default_transaction_read_only = on", Level.FAILURE, "this server is read-only"),
        ("statement_timeout = '30s'", Level.FAILURE, "statement_timeout is 30 s for this role"),
        ("statement_timeout = '1h'", Level.WARNING, "statement_timeout is 3600 s for this role"),
        ("synchronous_commit = off", Level.WARNING, "synchronous_commit is off"),
    ],
)
def test_settings_of_the_database(scenario: Scenario, setting: str, level: Level, found: str):
    name = scenario.database_url.rpartition("/")[2]
    scenario.sql(f"ALTER DATABASE {name} SET {setting}")
    bad = [(one.level, one.found) for one in examine_database(scenario.database_url, []) if one.level is not Level.OK]
    assert [(one, text.replace("fsync is off and ", "")) for one, text in bad if text != "fsync is off"] == [(level, found)]


def test_database_that_is_not_migrated(stack: LocalStack, scenario: Scenario):
    """Checks that need the schema do not run; the others do."""
    topic = scenario.topics.create()
    scenario.write(topics=topic)
    scenario.connections = replace(scenario.connections, database_url=stack.create_database(f"bare_{scenario.name}"))
    found = {one.subject: one for one in findings(scenario)}
    assert found["schema"].level is Level.FAILURE
    assert "tidemark migrate" in found["schema"].found
    assert found[f"{scenario.name}: topic {topic}"].level is Level.OK


def test_servers_that_do_not_answer(scenario: Scenario):
    """Both servers are reported, and no check asks them again. Neither finding hides the other."""
    scenario.write(topics="flights")
    url = scenario.folder / "url"
    with closed_port() as closed:
        kafka = {"bootstrap.servers": f"127.0.0.1:{closed}", "socket.connection.setup.timeout.ms": "1000"}
        url.write_text(f"postgresql://x@127.0.0.1:{closed}/x")
        scenario.connections = replace(scenario.connections, database_url=url, kafka=kafka)
        assert [finding.subject for finding in findings(scenario) if finding.level is not Level.OK] == ["postgres", "kafka"]
        assert unreachable([f"127.0.0.1:{closed}"]) != []


def test_command_exits_with_1_if_something_will_fail(consumer: Scenario):
    done = tidemark(consumer, "doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 failures, ")
    consumer.topics.alter(consumer.spec.topics[0], min_insync_replicas="2")
    done = tidemark(consumer, "doctor", consumer.name, "--output", "json")
    assert done.returncode == 1
    (bad,) = [one for one in json.loads(done.stdout) if one["level"] == "FAILURE"]
    assert bad["fix"] == "Set min.insync.replicas to 1 or less, or add replicas."
