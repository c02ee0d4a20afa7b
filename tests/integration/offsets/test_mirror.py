"""Positions mirrored to Kafka: what Kafka's own tool shows, and what happens if Kafka does not accept them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer
from tests.support.rewound import rewound
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.consume.run import _for_drain
from tidemark.db import session
from tidemark.doctor.examine import examine
from tidemark.doctor.finding import Level
from tidemark.jvm.jars import broker_jars
from tidemark.jvm.java import find_java
from tidemark.kafka import groups
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.groups import GroupInUse
from tidemark.local.airflow_settings import connections_env
from tidemark.offsets import mirror
from tidemark.offsets.mirror import Drift, Mirror
from tidemark.records.ranges import TopicPartition


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that has not stored the offsets of any group yet first creates the topic for them."""
    monkeypatch.setattr(mirror, "FINISH_S", 60.0)


@pytest.fixture
def consumer(scenario: Scenario) -> Scenario:
    """A consumer that mirrors its positions in two partitions, with 10 and 5 records."""
    topic = scenario.topics.create(2)
    for partition, records in enumerate((10, 5)):
        scenario.topics.produce(topic, [b"%d" % number for number in range(records)], partition=partition)
    return scenario.write(topics=topic, mirror=True).make_sink()


def kafkas_own_tool(consumer: Scenario, *arguments: str) -> list[dict[str, str]]:
    """The rows of ``kafka-consumer-groups``, keyed by its headings."""
    command = [str(find_java()), "-cp", str(broker_jars()[0].parent / "*"), "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"]
    told = subprocess.run(
        [*command, "--bootstrap-server", consumer.topics.servers, *arguments], capture_output=True, text=True, timeout=180, check=True
    )
    lines = [line.split() for line in told.stdout.splitlines() if line.strip() and "has no active members" not in line]
    assert lines, told.stderr
    return [dict(zip(lines[0], line, strict=False)) for line in lines[1:]]


@contextlib.contextmanager
def live_member(consumer: Scenario) -> Iterator[None]:
    """A plain Kafka consumer in the group."""
    settings = {"bootstrap.servers": consumer.topics.servers, "group.id": consumer.spec.group, "client.id": "old-app"}
    with contextlib.closing(Consumer({**settings, "enable.auto.commit": False})) as member:
        member.subscribe(list(consumer.spec.topics))
        until(lambda: member.poll(0.1) is not None or member.assignment())
        yield


def test_kafkas_own_tool_shows_the_lag_that_tidemark_shows(consumer: Scenario) -> None:
    """This includes records that arrived after a run, and a rewind, which publishes the positions that it moved."""
    topic, group = consumer.spec.topics[0], consumer.spec.group
    consumer.run()
    consumer.topics.produce(topic, ["late"] * 3, partition=1)
    rewound(consumer, "--to-offset", "4", "--topic", f"{topic}:0")
    ours = json.loads(tidemark(consumer, "offsets", consumer.name, "--output", "json").stdout)["partitions"]
    theirs = kafkas_own_tool(consumer, "--describe", "--group", group)
    assert {int(row["PARTITION"]): (int(row["CURRENT-OFFSET"]), int(row["LAG"])) for row in theirs} == {
        row["partition"]: (row["position"], row["lag_records"]) for row in ours
    }
    assert {int(row["PARTITION"]): int(row["LAG"]) for row in theirs} == {0: 6, 1: 3}
    consumer.run()
    assert consumer.mirrored() == consumer.positions() == {(topic, 0): 10, (topic, 1): 8}


def test_run_is_refused_while_kafka_consumers_use_the_groups_name(consumer: Scenario) -> None:
    """Nothing is read. The error names the members and the ways out. ``doctor`` reports the same problem in advance."""
    with live_member(consumer):
        with pytest.raises(GroupInUse, match=r"has live members in Kafka \(old-app at .*remove `mirror: true`"):
            consumer.run()
        assert consumer.positions() == {}
        (found,) = [one for one in examine(consumer.connections, [consumer.spec], consumer.folders) if one.subject.endswith(": mirror")]
        assert found.level is Level.FAILURE
        consumer.set(mirror=None)
        consumer.run()
    assert sum(consumer.positions().values()) == 15
    assert consumer.mirrored() == {}


def test_member_that_comes_during_a_run_is_a_warning_and_maintain_publishes_later(
    consumer: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """The run commits and succeeds. It logs one warning, however often the mirror fails; `maintain` reports how many positions differed."""
    consumer.set(batch={"max_records": 4})
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING, "tidemark"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "EVERY_S", 0.0)
        join = functools.cache(lambda: stack.enter_context(live_member(consumer)))
        consumer.run(before=lambda _: join())
        assert caplog.text.count("not mirrored") == 1
        failed = tidemark(consumer, "maintain")
        assert "positions not mirrored" in failed.stderr
        assert failed.returncode == 0
    assert sum(consumer.positions().values()) == 15
    assert consumer.mirrored() != consumer.positions()
    until(lambda: groups.members(Cluster(consumer.connections.kafka), consumer.spec.group) == [])
    assert json.loads(tidemark(consumer, "maintain", "--output", "json").stdout)["mirrored"] == {
        consumer.name: {"partitions": 2, "differed": 2}
    }
    assert consumer.mirrored() == consumer.positions()
    with session(consumer.database_url) as connection:
        assert mirror.republish(connection, Cluster(consumer.connections.kafka), consumer.spec) == Drift(2, 0)


def test_dag_maintain_publishes_too(consumer: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer.set(mirror=None)
    consumer.run()
    consumer.set(mirror=True)
    connections = connections_env(consumer.database_url, consumer.connections.kafka, "local[2]")
    for name, value in (consumer.env() | connections | {"AIRFLOW_HOME": str(tmp_path / "airflow")}).items():
        monkeypatch.setenv(name, value)
    from tidemark.airflow.dags.maintain import MaintainOperator

    run = SimpleNamespace(dag_id="maintain", run_id="by hand", conf={}, triggering_user_name="ann")
    MaintainOperator(task_id="maintain").execute({"params": {"keep": "30d"}, "dag_run": run})
    assert consumer.mirrored() == consumer.positions() != {}


def test_broker_that_does_not_answer_delays_no_commit(consumer: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending does not block. The end of a run waits for `FINISH_S` at most, and then gives up."""
    monkeypatch.setattr(mirror, "FINISH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = Cluster(Connections("", {"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"}).kafka)
        mine = Mirror(broker, consumer.spec.group, lambda: {TopicPartition("t", 0): 1})
        mine.publish()
        began = time.monotonic()
        mine.finish()
        assert time.monotonic() - began < 10


def test_consumer_without_the_key_publishes_nothing(consumer: Scenario) -> None:
    """Nor does a drain, whose partitions belong to retry topics."""
    assert not _for_drain(consumer.spec).mirror
    consumer.set(mirror=None)
    consumer.run()
    assert json.loads(tidemark(consumer, "maintain", "--output", "json").stdout)["mirrored"] == {}
    assert consumer.mirrored() == {}


def test_group_is_deleted_in_kafka_too(consumer: Scenario) -> None:
    group = consumer.spec.group
    consumer.run()
    asked = [TopicPartition(*key) for key in consumer.positions()]
    assert len(consumer.mirrored()) == 2
    done = tidemark(consumer, "groups", "delete", group)
    assert (done.returncode, f"deleted {group} in Kafka" in done.stderr) == (0, True), done.stderr
    assert Cluster(consumer.connections.kafka).group_offsets(group, asked) == {}
