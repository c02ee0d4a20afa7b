"""A relay with its own broker. Records for a topic that its user may not use stay in the outbox, and the message names the missing right.
The broker can also be suspended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.outbox import Outbox, outbox_on
from tests.support.deaths import hooked
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.connections import BOOTSTRAP_SERVERS, KAFKA_CONFIG
from tidemark.errors import BrokerUnavailable
from tidemark.kafka import producer
from tidemark.kafka.producer import Publishers
from tidemark.local import ports
from tidemark.local.kafka import Kafka
from tidemark.retry.relay import Relayed
from tidemark.rewind.apply import GRACE_MS

USER, PASSWORD = "loader", "secret"


class GuardedKafka(Kafka):
    """A broker with an authorizer. The test connects in plaintext and may do everything. `USER` has a password and a separate port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.guarded_port = ports.find_free()

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        while self.guarded_port in {port, controller_port}:  # chosen later, before the first start
            self.guarded_port = ports.find_free()
        lines = super().settings(port, controller_port)
        extra = f",SASL_PLAINTEXT://{ports.HOST}:{self.guarded_port}"
        lines["listeners"] += extra
        lines["advertised.listeners"] += extra
        lines["listener.security.protocol.map"] += ",SASL_PLAINTEXT:SASL_PLAINTEXT"
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return lines | {
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{module} required user_{USER}="{PASSWORD}";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    kafka = GuardedKafka(tmp_path_factory.mktemp("kafka"))
    kafka.start(print)
    try:
        kafka.wait(print)
        yield kafka
    finally:
        kafka.stop()


@pytest.fixture
def outbox(project_dir: Path, database_url: str, guarded: GuardedKafka) -> Iterator[Outbox]:
    """An outbox whose relays connect as `USER`."""
    topics = Topics(guarded.bootstrap_servers())
    with outbox_on(Scenario(project_dir, database_url, topics), topics) as outbox:
        outbox.kafka = {
            "bootstrap.servers": f"{ports.HOST}:{guarded.guarded_port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }
        outbox.publishers = Publishers(outbox.kafka)
        yield outbox


def allow(outbox: Outbox, topic: str, *operations: AclOperation) -> None:
    """Allows `USER` these operations on a topic. Returns when the broker lists them."""
    admin = AdminClient({"bootstrap.servers": outbox.topics.servers, "log_level": 0})
    bindings = [
        AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, f"User:{USER}", "*", each, AclPermissionType.ALLOW)
        for each in operations
    ]
    for future in admin.create_acls(bindings).values():
        future.result()
    asked = AclBindingFilter(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, None, None, AclOperation.ANY, AclPermissionType.ANY)
    until(lambda: set(operations) <= {each.operation for each in admin.describe_acls(asked).result()})


def test_what_is_not_allowed_is_named_and_holds_up_nothing_else(outbox: Outbox) -> None:
    """Scenario 26: the relay may not see, create or write a topic. Its records stay in the outbox, others are published, and the command
    fails. Once the operation is allowed, they are published too. A topic that can be written but not described is used unchecked."""
    first, second, _, last = outbox.tiers
    for name in (first, second):
        outbox.make_topic(name)
    allow(outbox, second, AclOperation.DESCRIBE)
    numbers = [outbox.add(), outbox.add(number=3), outbox.add(failed=True)]
    allow(outbox, last, AclOperation.DESCRIBE)
    unseen = {first: "DESCRIBE on it is not allowed", last: "CREATE on it is not allowed"}
    assert outbox.relay(publishers=None).blocked == {**unseen, second: "WRITE is not allowed on it or on any other topic"}
    assert outbox.hops() == {}

    allow(outbox, second, AclOperation.WRITE)
    env = {KAFKA_CONFIG: json.dumps(outbox.kafka), BOOTSTRAP_SERVERS: outbox.kafka["bootstrap.servers"]}
    done = outbox.consumer.command("retries", "relay", outbox.name, env=env)
    assert (done.returncode, done.stdout) == (1, f"{second}: 1 published\n")
    said = " ".join(done.stderr.split())
    for topic, why in unseen.items():
        assert f"Cannot publish to {topic}: {why}. See: tidemark retries topics {outbox.name}" in said
    assert sorted(outbox.hops()) == numbers[1:2]

    allow(outbox, first, AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
    allow(outbox, last, AclOperation.CREATE, AclOperation.WRITE)
    done_now = outbox.relay()
    assert (done_now.published, done_now.blocked) == ({last: 1}, {first: "WRITE on it is not allowed"})
    allow(outbox, first, AclOperation.WRITE)
    assert outbox.relay().published == {first: 1}
    assert sorted(outbox.hops()) == numbers
    outbox.check_published()


def test_a_broker_that_goes_away_while_a_relay_publishes_is_told_and_loses_nothing(
    outbox: Outbox, guarded: GuardedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 27: records without an answer stay in the outbox, and no lock is held longer than a rewind waits for it. When the broker is
    back, every record is registered once."""
    assert GRACE_MS / 1000 > producer.ANSWER_S
    outbox.kafka = outbox.consumer.connections.kafka
    outbox.publishers = Publishers(outbox.kafka)
    outbox.make_topics()
    numbers = [outbox.add(f"{number}".encode()) for number in range(8)]
    broker = guarded.process()
    assert broker is not None
    seconds: list[float] = []
    outbox.relay(limit=2)
    monkeypatch.setitem(producer.SETTINGS, "message.timeout.ms", "2000")
    monkeypatch.setattr(producer, "ANSWER_S", 3.0)  # leaves a busy machine time
    outbox.publishers = Publishers(outbox.kafka)

    def suspend(_cursor: PostgresCursor, _number: int, query: str) -> None:
        if "WITH taken" in query:
            broker.suspend()
            seconds.append(time.monotonic())

    try:
        with outbox.session(hooked(suspend)) as connection, pytest.raises(BrokerUnavailable):
            outbox.relay(connection)
        assert time.monotonic() - seconds[0] < GRACE_MS / 1000
        assert len(seconds) == 1
        assert outbox.waiting() == 6
    finally:
        broker.resume()

    def again() -> Relayed | None:
        with contextlib.suppress(BrokerUnavailable):  # after a pause, the broker is briefly not the cluster's controller
            return outbox.relay()
        return None

    until(again)
    assert outbox.waiting() == 0
    assert sorted(outbox.hops()) == numbers
    outbox.check_published()
