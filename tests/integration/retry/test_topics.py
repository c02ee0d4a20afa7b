"""The preflight of retry topics on a real broker: made as they must be, and refused with everything that is wrong."""

from __future__ import annotations

import json
import random

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from tests.integration.retry.outbox import Outbox

from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster, TopicNotMade, TopicsMissing
from tidemark.retry.hop import HEADER_BYTES
from tidemark.retry.relay import Relayed
from tidemark.retry.topics import TopicsUnfit, ensure_topics

DAY_MS = 24 * 3_600_000
DEFAULT_LARGEST = 1_048_588
"""Of a broker that was told nothing."""


def ensure(outbox: Outbox, *, create: bool = False) -> dict[str, bool]:
    """The topics' names, without the group's, and which of them were made."""
    found = ensure_topics(outbox.cluster, outbox.spec, create=create)
    outbox.topics.adopt(one.topic.name for one in found if one.made)
    return {one.topic.name.removeprefix(f"{outbox.group}."): one.made for one in found}


def alter(outbox: Outbox, topic: str, **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": outbox.topics.servers, "log_level": 0})
    entries = [ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()]
    (done,) = admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)]).values()
    done.result()


def problems(outbox: Outbox) -> tuple[str, ...]:
    with pytest.raises(TopicsUnfit) as refused:
        ensure(outbox)
    return refused.value.problems


def test_missing_topics_are_refused_all_at_once_or_made_as_they_must_be(outbox: Outbox) -> None:
    """Scenario 41: nothing is made without leave; what is made is fit, and takes the source's records with our headers on top."""
    told = problems(outbox)
    assert [each.split(":")[0] for each in told] == list(outbox.tiers)
    assert f"tidemark retries topics {outbox.name} --create" in told[0]
    assert "--config message.timestamp.type=LogAppendTime" in told[0]
    assert ensure(outbox, create=True) == {"retry.5m": True, "retry.1h": True, "retry.now": True, "failed": True}
    assert ensure(outbox, create=True) == {"retry.5m": False, "retry.1h": False, "retry.now": False, "failed": False}
    settings = outbox.cluster.settings(outbox.tiers)
    names = ("cleanup.policy", "message.timestamp.type", "retention.ms", "max.message.bytes")
    assert [[settings[topic][name].value for name in names] for topic in outbox.tiers] == [
        ["delete", "LogAppendTime", str(7 * DAY_MS + 300_000), str(DEFAULT_LARGEST + HEADER_BYTES)],
        ["delete", "LogAppendTime", str(7 * DAY_MS + 3_600_000), str(DEFAULT_LARGEST + HEADER_BYTES)],
        ["delete", "LogAppendTime", str(7 * DAY_MS), str(DEFAULT_LARGEST + HEADER_BYTES)],
        ["delete", "LogAppendTime", "-1", str(DEFAULT_LARGEST + HEADER_BYTES)],
    ]
    large = outbox.add(bytes_of(DEFAULT_LARGEST - 1_000))
    assert outbox.relay() == Relayed({outbox.tiers[0]: 1})
    assert outbox.hops()[large]


def test_what_somebody_has_set_wrong_is_refused_together_and_never_changed(outbox: Outbox) -> None:
    """Scenario 41: disabled mid-run. Every problem of every topic, each with what to set; nothing is mended behind anybody's back."""
    ensure(outbox, create=True)
    first, second, _, last = outbox.tiers
    alter(outbox, first, retention_ms=str(DAY_MS), cleanup_policy="compact")
    alter(outbox, second, message_timestamp_type="CreateTime")
    alter(outbox, last, retention_ms=str(DAY_MS))  # somebody's word
    alter(outbox, outbox.topic, max_message_bytes="2000000")
    told = problems(outbox)
    assert [each.split(" is ")[0] for each in told] == [
        f"{first}: cleanup.policy",
        f"{first}: retention.ms",
        f"{first}: max.message.bytes",
        f"{second}: message.timestamp.type",
        f"{second}: max.message.bytes",
        f"{outbox.tiers[2]}: max.message.bytes",
        f"{last}: max.message.bytes",
    ]
    assert f"Set it to {2_000_000 + HEADER_BYTES} or more" in told[2]
    assert problems(outbox) == told
    done = outbox.consumer.command("retries", "topics", outbox.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "7 problems with the retry topics" in done.stderr


def test_partitions_are_those_of_the_spec(outbox: Outbox) -> None:
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"partitions": 4, "replication": 1}})
    ensure(outbox, create=True)
    assert [topic.partitions for topic in outbox.cluster.topics(outbox.tiers)] == [4, 4, 4]
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"partitions": 5}})
    assert all("it has 4 partitions" in problem for problem in problems(outbox))


def test_a_pattern_that_matches_the_retry_topics_too_does_not_mean_them(outbox: Outbox) -> None:
    """They are not what the consumer reads: what they take says nothing about what they must take."""
    own, source = outbox.group.replace(".", r"\."), outbox.topic
    outbox.consumer.set(topics=None, topic_pattern=rf"{source}|{own}\..*")
    ensure(outbox, create=True)
    assert set(ensure(outbox).values()) == {False}


def test_what_the_cluster_does_not_make_is_told_in_its_words(outbox: Outbox) -> None:
    """More replicas than brokers."""
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"replication": 7}})
    with pytest.raises(TopicNotMade, match="replication factor"):
        ensure(outbox, create=True)


def test_the_consumers_own_topics_must_be_there(outbox: Outbox) -> None:
    outbox.consumer.set(topics=["nowhere"])
    with pytest.raises(TopicsMissing, match="nowhere"):
        ensure(outbox)


def test_a_broker_that_does_not_answer_is_no_missing_topic(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemark.kafka.cluster.REQUEST_TIMEOUT_S", 1)
    with pytest.raises(BrokerUnavailable):
        ensure_topics(Cluster({"bootstrap.servers": "127.0.0.1:1"}), outbox.spec, create=True)


def test_a_consumer_without_a_ladder_needs_no_topic_until_a_redrive_does(outbox: Outbox) -> None:
    """In words: what is made, and how long each keeps its messages."""
    outbox.consumer.set(retry=None)
    assert ensure(outbox) == {}
    done = outbox.consumer.command("retries", "topics", outbox.name, "--create", "--output", "json")
    (made,) = json.loads(done.stdout)
    outbox.topics.adopt([made["topic"]])
    assert made == {"topic": f"{outbox.group}.retry.now", "partitions": 1, "delay": 0.0, "retention_s": 604_800.0, "made": True}
    (shown,) = [line for line in outbox.in_terminal("retries", "topics", outbox.name) if made["topic"] in line]
    assert shown.split() == [made["topic"], "1", "-", "7.0", "days"]


def bytes_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)
