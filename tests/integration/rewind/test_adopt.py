"""Adoption: a consumer without positions starts at the offsets that a Kafka consumer group has committed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition as Wire
from tests.support.by_hand import ByHand
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import Adopt, Plan
from tidemark.rewind.scenarios.targets import TargetsOutOfRange


@pytest.fixture
def consumer(scenario: Scenario) -> Scenario:
    """A consumer that has never run, on two partitions with 10 records each. Its predecessor's group has the same name."""
    topic = scenario.topics.create(2)
    for partition in range(2):
        scenario.topics.produce(topic, [b"%d" % number for number in range(10)], partition=partition)
    return scenario.write(topics=topic, mirror=True).make_sink()


def old_app(consumer: Scenario) -> KafkaConsumer:
    settings = {"bootstrap.servers": consumer.topics.servers, "group.id": consumer.spec.group, "client.id": "old-app"}
    return KafkaConsumer({**settings, "enable.auto.commit": False})


def commits(consumer: Scenario, offsets: Mapping[int, int]) -> None:
    """Commits these offsets as the predecessor."""
    with contextlib.closing(old_app(consumer)) as member:
        member.commit(offsets=[Wire(consumer.spec.topics[0], part, offset) for part, offset in offsets.items()], asynchronous=False)


def planned(consumer: Scenario, *, allow_loss: bool = False) -> Plan:
    return ByHand(consumer).plan(Adopt(consumer.spec.group), allow_loss=allow_loss)


def applied(consumer: Scenario, rewind_id: int) -> None:
    ByHand(consumer).apply(rewind_id)


def test_consumer_reads_exactly_the_rest_and_the_old_application_can_take_over_again(consumer: Scenario) -> None:
    """Both directions: the mirror contains the positions at which a plain consumer of the same group continues. The undo removes what was
    loaded since, and the consumer is back at its start."""
    topic, group = consumer.spec.topics[0], consumer.spec.group
    commits(consumer, {0: 7, 1: 4})
    told = tidemark(consumer, "groups", "adopt", consumer.name, "--from-kafka", group, "--output", "json")
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    assert [(part["old"], part["new"]) for part in shown["groups"][0]["partitions"]] == [(7, 7), (4, 4)]
    assert consumer.positions() == {}
    assert "nothing has changed yet; to apply it: tidemark rewind apply 1" in told.stderr
    done = tidemark(consumer, "rewind", "apply", "1")
    assert done.returncode == 0, done.stderr
    assert consumer.positions() == {(topic, 0): 7, (topic, 1): 4}
    consumer.run()
    assert consumer.rows("kafka_partition, kafka_offset") == [(0, at) for at in range(7, 10)] + [(1, at) for at in range(4, 10)]
    consumer.check()
    assert consumer.lost() == []
    consumer.topics.produce(topic, ["after"], partition=1)
    with contextlib.closing(old_app(consumer)) as member:
        member.subscribe([topic])
        record = until(lambda: member.poll(0.2))
        assert (record.partition(), record.offset()) == (1, 10)
    undone = tidemark(consumer, "rewind", "undo", "1", "--reason", "the old one was right")
    assert undone.returncode == 0, undone.stderr
    assert tidemark(consumer, "rewind", "apply", "2").returncode == 0
    assert (consumer.positions(), consumer.rows()) == ({(topic, 0): 7, (topic, 1): 4}, [])


def test_partition_without_an_offset_starts_as_offset_reset_says(consumer: Scenario) -> None:
    topic = consumer.spec.topics[0]
    commits(consumer, {0: 7})
    consumer.set(offset_reset="latest")
    applied(consumer, planned(consumer).rewind_id)
    assert consumer.positions() == {(topic, 0): 7, (topic, 1): 10}


def test_group_without_offsets_for_all_topics_is_refused(consumer: Scenario) -> None:
    with pytest.raises(PlanRefused, match="does not exist in Kafka, or has committed no offset for the topics"):
        planned(consumer)
    other = consumer.topics.create()
    commits(consumer, {0: 7, 1: 4})
    consumer.set(topics=[consumer.spec.topics[0], other])
    with pytest.raises(PlanRefused, match=f"has committed no offset for {other}. Adopt it with only the topics"):
        planned(consumer)
    assert consumer.positions() == {}


def test_offset_outside_the_log_is_refused_and_stored_as_lost_if_that_is_allowed(consumer: Scenario) -> None:
    topic = consumer.spec.topics[0]
    commits(consumer, {0: 2, 1: 4})
    consumer.topics.trim(topic, {0: 5})
    with pytest.raises(TargetsOutOfRange, match=f"{topic}/0: target 2 is before the start of the log"):
        planned(consumer)
    applied(consumer, planned(consumer, allow_loss=True).rewind_id)
    assert consumer.positions() == {(topic, 0): 5, (topic, 1): 4}
    assert consumer.lost() == [(0, 2, 5, "retention")]


def test_consumer_with_positions_is_refused_at_planning_and_at_applying(consumer: Scenario) -> None:
    """An adoption would replace its positions. A rewind can move it there instead."""
    commits(consumer, {0: 7, 1: 4})
    made = planned(consumer)
    consumer.run()
    with pytest.raises(StalePlan, match="the consumer has a position, because it has run since"):
        applied(consumer, made.rewind_id)
    with pytest.raises(PlanRefused, match=r"has positions already, so it cannot adopt others.*--from-group kafka:"):
        planned(consumer)
    assert set(consumer.positions().values()) == {10}


def test_old_consumers_must_be_stopped_before_the_plan_and_stay_stopped_until_it_is_applied(consumer: Scenario) -> None:
    """Records that they commit after the plan would be loaded twice."""
    topic = consumer.spec.topics[0]
    commits(consumer, {0: 7, 1: 4})
    made = planned(consumer)
    with contextlib.closing(old_app(consumer)) as member:
        member.subscribe([topic])
        until(lambda: member.poll(0.1) is not None or member.assignment())
        with pytest.raises(PlanRefused, match=r"has live members in Kafka \(old-app at .*Stop these consumers first"):
            planned(consumer)
        with pytest.raises(StalePlan, match="has live members in Kafka"):
            applied(consumer, made.rewind_id)
    commits(consumer, {0: 8})
    with pytest.raises(StalePlan, match=f"{topic}/0: group {consumer.spec.group} has committed 8 since; the plan has 7"):
        applied(consumer, made.rewind_id)
    assert consumer.positions() == {}
