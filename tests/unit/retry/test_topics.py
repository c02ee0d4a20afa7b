"""Which topics a consumer needs, and the problems of a topic."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tidemark.kafka.cluster import Setting, Topic, TopicSettings
from tidemark.retry.messages import HEADER_BYTES
from tidemark.retry.topics import ExistingTopic, RetryTopic, required_topics, settings_of, unfit
from tidemark.spec import ConsumerSpec, load_consumer

LARGEST = 1_048_588
TIER = RetryTopic("departures.retry.1h", timedelta(hours=1))
FAILED = RetryTopic("departures.failed", None)


def spec_of(folder: Path, retry: str = "retry: {delays: [5m, 5m, 30m, 30m, 30m, 1h]}") -> ConsumerSpec:
    file = folder / "departures.yaml"
    file.write_text(f"topics: [flights]\ntransform: departures:transform\nsink: {{table: lake.departures}}\n{retry}\n")
    return load_consumer(file)


def found(one: RetryTopic, *, partitions: int = 1, copies: int = 1, stated: bool = True, **changed: str) -> ExistingTopic:
    """A topic as Tidemark creates it, except for what was changed."""
    values = settings_of(one, LARGEST) | {"min.insync.replicas": "1"} | {name.replace("_", "."): text for name, text in changed.items()}
    racks = ((None,) * copies,) * partitions
    settings = TopicSettings({name: Setting(value, stated) for name, value in values.items()})
    return ExistingTopic(one, Topic(one.name, "uuid", partitions, racks), settings)


def test_one_topic_for_each_distinct_delay_one_for_tries_at_once_and_the_failed_topic(tmp_path: Path) -> None:
    """Scenario 1. Without a ladder there is only the topic for redrives, and only on request."""
    tail = [one.name.removeprefix("departures.") for one in required_topics(spec_of(tmp_path))]
    assert tail == ["retry.5m", "retry.30m", "retry.1h", "retry.now", "failed"]
    without = spec_of(tmp_path, "")
    assert required_topics(without) == ()
    assert [one.name for one in required_topics(without, now=True)] == ["departures.retry.now"]


@pytest.mark.parametrize("one", [TIER, FAILED, RetryTopic("departures.retry.now", timedelta())])
def test_what_tidemark_makes_is_fit(tmp_path: Path, one: RetryTopic) -> None:
    assert unfit(found(one), spec_of(tmp_path), LARGEST) == []


DAY_MS = 24 * 3_600_000
WRONG = [
    (TIER, {"cleanup_policy": "compact,delete"}, "cleanup.policy is compact,delete"),
    (TIER, {"message_timestamp_type": "CreateTime"}, "message.timestamp.type is CreateTime"),
    (TIER, {"retention_ms": str(DAY_MS + 3_599_999)}, f"Set it to {DAY_MS + 3_600_000} or more"),
    (TIER, {"retention_bytes": "1000000000"}, "retention.bytes is 1000000000"),
    (TIER, {"max_message_bytes": str(LARGEST)}, f"Set it to {LARGEST + HEADER_BYTES} or more"),
    (TIER, {"min_insync_replicas": "2"}, "min.insync.replicas is 2, but it has 1 replicas"),
    (FAILED, {"cleanup_policy": "compact"}, "cleanup.policy is compact"),
    (FAILED, {"max_message_bytes": "1000"}, "max.message.bytes is 1000"),
]


@pytest.mark.parametrize(("one", "changed", "words"), WRONG)
def test_a_setting_that_loses_or_delays_records_is_told_with_what_to_set(
    tmp_path: Path, one: RetryTopic, changed: dict[str, str], words: str
) -> None:
    (problem,) = unfit(found(one, **changed), spec_of(tmp_path), LARGEST)
    assert words in problem


def test_retention_of_the_failed_topic_must_be_chosen_or_unlimited(tmp_path: Path) -> None:
    """The broker's default of a week is refused, because it was not chosen. The same value is accepted if it was set for the topic."""
    spec = spec_of(tmp_path)
    (problem,) = unfit(found(FAILED, stated=False, retention_ms="604800000"), spec, LARGEST)
    assert "the broker's default" in problem
    assert unfit(found(FAILED, retention_ms="604800000"), spec, LARGEST) == []
    assert unfit(found(FAILED, stated=False), spec, LARGEST) == []


def test_partitions_and_replicas_are_those_of_the_spec_or_more(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "retry: {delays: [1h], topics: {partitions: 3, replication: 2}}")
    assert unfit(found(TIER, partitions=4, copies=3), spec, LARGEST) == []
    few = unfit(found(TIER, partitions=2, copies=1), spec, LARGEST)
    assert [problem.split(",")[0] for problem in few] == ["it has 2 partitions", "it has 1 replica"]
