"""The check of retry topics on a real broker: missing ones are created correctly, and wrong ones are refused with all their problems."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.integration.retry.outbox import Outbox
from tests.support.shell import tidemark

from tidemark.kafka.cluster import Cluster, TopicsMissing
from tidemark.retry.messages import HEADER_BYTES
from tidemark.retry.relay import Relayed
from tidemark.retry.topics import TopicsUnfit, ensure_topics

DAY_MS = 24 * 3_600_000
DEFAULT_LARGEST = 1_048_588
"""``max.message.bytes`` of a broker with default settings."""


def ensure(outbox: Outbox, *, create: bool = False) -> dict[str, bool]:
    """Returns the topics' names, without the group's, and whether each was created."""
    found = ensure_topics(outbox.cluster, outbox.spec, create=create)
    outbox.topics.adopt(one.topic.name for one in found if one.created)
    return {one.topic.name.removeprefix(f"{outbox.group}."): one.created for one in found}


def problems(outbox: Outbox) -> tuple[str, ...]:
    with pytest.raises(TopicsUnfit) as refused:
        ensure(outbox)
    return refused.value.problems


def test_missing_topics_are_refused_all_at_once_or_made_as_they_must_be(outbox: Outbox) -> None:
    """Scenario 41: topics are created only on request. Created topics pass the check, and accept the source's records plus our headers."""
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
    """Scenario 41: settings are changed later. Every problem of every topic is reported with the setting to use, and nothing is corrected
    silently."""
    ensure(outbox, create=True)
    first, second, _, last = outbox.tiers
    outbox.topics.alter(first, retention_ms=str(DAY_MS), cleanup_policy="compact")
    outbox.topics.alter(second, message_timestamp_type="CreateTime")
    outbox.topics.alter(last, retention_ms=str(DAY_MS))  # an operator's choice, so not a problem
    outbox.topics.alter(outbox.topic, max_message_bytes="2000000")
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
    done = tidemark(outbox.consumer, "retries", "topics", outbox.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "7 problems with the retry topics" in done.stderr
    checked = tidemark(outbox.consumer, "consumers", "check", outbox.name)
    assert checked.returncode == 1
    assert [each for each in told if each not in checked.stdout] == []


def test_a_check_of_the_consumer_is_content_with_topics_that_will_be_made(outbox: Outbox) -> None:
    """A missing topic is a problem only if Tidemark must not create it."""
    outbox.consumer.make_sink()
    checked = tidemark(outbox.consumer, "consumers", "check", outbox.name)
    assert (checked.returncode, f"retry topics to be created on demand: {', '.join(outbox.tiers)}" in checked.stdout) == (0, True)
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"create": False}})
    checked = tidemark(outbox.consumer, "consumers", "check", outbox.name)
    assert checked.returncode == 1
    assert f"{outbox.tiers[0]}: it does not exist. Let Tidemark create it" in checked.stdout


def test_relays_make_the_topics_that_they_need_when_they_need_them_first(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several relays at once create correct topics and no others, including one for a delay that is no longer in the ladder. After that,
    relays neither check nor create topics."""
    outbox.add(number=3)
    outbox.consumer.set(retry={"delays": ["5m"]})
    outbox.add_many(100)
    asked: list[str] = []
    for name in ("settings", "create"):
        original = getattr(Cluster, name)

        def counted(self: Cluster, *args: Any, _name: str = name, _original: Any = original) -> Any:
            asked.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(Cluster, name, counted)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: outbox.relay(portion=10, publishers=None), range(3)))
    first, former = outbox.tiers[0], f"{outbox.group}.retry.1h"
    outbox.topics.adopt([first, former])
    assert [each.blocked for each in done] == [{}] * 3
    assert sum(each.records for each in done) == 101
    assert "create" in asked
    settings = outbox.cluster.settings([first, former])
    assert {name: settings[name]["retention.ms"].value for name in settings} == {
        first: str(7 * DAY_MS + 300_000),
        former: str(7 * DAY_MS + 3_600_000),
    }
    assert [topic.name for topic in outbox.cluster.topics(outbox.tiers, missing_ok=True)] == [first]
    asked.clear()
    outbox.add()
    assert outbox.relay() == Relayed({first: 1})
    assert asked == []
    outbox.check_published()


def test_a_topic_with_wrong_settings_is_not_used_until_it_is_fixed(outbox: Outbox) -> None:
    """All problems are reported at once, nothing is changed, and other topics get their records. A topic that was created again is checked
    again."""
    outbox.make_topics(without=[outbox.tiers[0]])
    wrong = outbox.topics.create(name=outbox.tiers[0], cleanup_policy="compact", max_message_bytes="2000000", retention_ms="1000")
    held, gone = outbox.add(), outbox.add(number=3)
    for _ in range(2):
        (why,) = outbox.relay().blocked.items()
        assert why[0] == wrong
        for words in ("cleanup.policy is compact", "message.timestamp.type is CreateTime", "retention.ms is 1000"):
            assert words in why[1]
    assert sorted(outbox.hops()) == [gone]
    outbox.topics.alter(wrong, cleanup_policy="delete", message_timestamp_type="LogAppendTime", retention_ms="-1")
    assert outbox.relay() == Relayed({wrong: 1})
    assert sorted(outbox.hops()) == [held, gone]
    outbox.topics.recreate(wrong)
    again = outbox.relay()
    assert (again.again, list(again.blocked)) == (1, [wrong])


def test_partitions_are_those_of_the_spec(outbox: Outbox) -> None:
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"partitions": 4, "replication": 1}})
    ensure(outbox, create=True)
    assert [topic.partitions for topic in outbox.cluster.topics(outbox.tiers)] == [4, 4, 4]
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"partitions": 5}})
    assert all("it has 4 partitions" in problem for problem in problems(outbox))


def test_topics_with_the_largest_limit_that_kafka_has_get_a_ladder(outbox: Outbox) -> None:
    """Nothing is left for headers, and Kafka's limits have 32 bits."""
    outbox.topics.alter(outbox.topic, max_message_bytes=str(2**31 - 1))
    assert set(ensure(outbox, create=True).values()) == {True}
    assert {settings["max.message.bytes"].value for settings in outbox.cluster.settings(outbox.tiers).values()} == {str(2**31 - 1)}
    assert set(ensure(outbox).values()) == {False}


def test_a_pattern_that_matches_the_retry_topics_too_does_not_mean_them(outbox: Outbox) -> None:
    """The consumer does not read them, so their ``max.message.bytes`` does not raise the required limit."""
    own, source = outbox.group.replace(".", r"\."), outbox.topic
    outbox.consumer.set(topics=None, topic_pattern=rf"{source}|{own}\..*")
    ensure(outbox, create=True)
    assert set(ensure(outbox).values()) == {False}


def test_what_the_cluster_does_not_make_is_told_in_its_words(outbox: Outbox) -> None:
    """The spec asks for more replicas than there are brokers."""
    outbox.consumer.set(retry={"delays": ["5m"], "topics": {"replication": 7}})
    with pytest.raises(TopicsUnfit, match=r"(?i)replication factor"):
        ensure(outbox, create=True)
    outbox.add()
    ((topic, why),) = outbox.relay().blocked.items()
    assert (topic, "replication factor" in why.lower()) == (outbox.tiers[0], True)
    assert outbox.waiting() == 1


def test_the_consumers_own_topics_must_be_there(outbox: Outbox) -> None:
    outbox.consumer.set(topics=[missing := f"{outbox.topic}.missing"])
    with pytest.raises(TopicsMissing, match=missing):
        ensure(outbox)


def test_a_consumer_without_a_ladder_needs_no_topic_until_a_redrive_does(outbox: Outbox) -> None:
    """The command creates the topic for immediate tries, and prints how long it keeps its messages."""
    outbox.consumer.set(retry=None)
    assert ensure(outbox) == {}
    done = tidemark(outbox.consumer, "retries", "topics", outbox.name, "--create", "--output", "json")
    (made,) = json.loads(done.stdout)
    outbox.topics.adopt([made["topic"]])
    assert made == {"topic": f"{outbox.group}.retry.now", "partitions": 1, "delay": 0.0, "retention_s": 604_800.0, "created": True}
    (shown,) = [line for line in outbox.in_terminal("retries", "topics", outbox.name) if made["topic"] in line]
    assert shown.split() == [made["topic"], "1", "-", "7.0", "days"]


def bytes_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)
