"""A consumer's retry topics and failed topic: created if missing, refused if misconfigured.

Postgres holds every record, so no topic setting can lose one. But a message that is deleted too early is published and delayed again, and
records that a topic rejects are never tried.

The relay checks a topic, or creates it, before it first publishes to it (`tidemark.retry.relay`). `ensure_topics` is for operators.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster, Topic, TopicNotCreated, TopicSettings, in_sync_replicas
from tidemark.kafka.failures import NotAllowed
from tidemark.retry.ladder import Ladder
from tidemark.retry.messages import HEADER_BYTES
from tidemark.spec.retry_topics import failed_topic, now_topic, retry_topic
from tidemark.text.duration import format_duration, parse_duration
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

SLACK = timedelta(days=1)
"""Minimum retention of a retry topic beyond its delay: how long drains may be down."""
KEEP = timedelta(days=7)
"""Retention beyond the delay of a retry topic that Tidemark creates."""
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class RetryTopic:
    """A topic that the consumer needs. ``delay``: how long records wait in it; `None` for the failed topic."""

    name: str
    delay: timedelta | None


@dataclass(frozen=True, slots=True)
class ExistingTopic:
    """A topic in the cluster. ``created``: by this call."""

    retry_topic: RetryTopic
    topic: Topic
    settings: TopicSettings
    created: bool = False


@dataclass(frozen=True, slots=True)
class TopicsState:
    """The state of the topics. ``readable``: existing topics whose settings the ACLs allow to read. ``denied``: the missing ACL operation,
    by topic. ``problems``: by topic, why it cannot be used, with the fix."""

    existing: Mapping[str, Topic]
    readable: Sequence[ExistingTopic]
    missing: Sequence[RetryTopic]
    denied: Mapping[str, str]
    problems: Mapping[str, Sequence[str]]


class TopicsUnfit(Refused):
    """Retry topics are missing or misconfigured. Lists every problem with its fix."""

    consumer: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, f"{counted(len(self.problems), 'problem')} with the retry topics of {self.consumer}"])


def required_topics(spec: ConsumerSpec, *, now: bool = False) -> tuple[RetryTopic, ...]:
    """Returns a consumer's topics: one per distinct delay, one for immediate tries, and the failed topic.

    Without a ladder, a consumer needs no topics, or with ``now`` only the one for immediate tries.
    """
    ladder = Ladder.of(spec)
    if not ladder:
        return (RetryTopic(now_topic(spec.group), timedelta()),) if now else ()
    tiers = [RetryTopic(retry_topic(spec.group, delay), delay) for delay in dict.fromkeys(ladder.delays)]
    return (*tiers, RetryTopic(now_topic(spec.group), timedelta()), RetryTopic(failed_topic(spec.group), None))


def own_topics(group: str, names: Iterable[str]) -> list[RetryTopic]:
    """Returns the group's own topics among these names, even if their delay is no longer on its ladder."""
    topics = []
    for name in names:
        prefix, _, delay = name.rpartition(".retry.")
        if name == failed_topic(group):
            topics.append(RetryTopic(name, None))
        elif prefix == group:
            with contextlib.suppress(BadInput):
                topics.append(RetryTopic(name, timedelta() if delay == "now" else parse_duration(delay)))
    return topics


def ensure_topics(
    cluster: Cluster,
    spec: ConsumerSpec,
    *,
    create: bool = False,
    now: bool = False,
    only: Iterable[str] | None = None,
    missing_ok: bool = False,
) -> list[ExistingTopic]:
    """Checks the consumer's retry topics and its failed topic (`required_topics`), or the named ones (``only``), and returns them.

    ``create`` creates missing topics; existing ones are never changed. Raises `TopicsUnfit` with every topic that is misconfigured, not
    authorized, or (unless ``missing_ok``) missing; `TopicsMissing` for the topics that the consumer reads; or `BrokerUnavailable`.
    """
    topics = [each for each in required_topics(spec, now=now) if only is None or each.name in set(only)]
    largest = largest_of(cluster, spec)
    state = inspect_topics(cluster, spec, topics, largest, create=create)
    problems = [] if missing_ok else [_missing(spec, each, largest) for each in state.missing]
    problems += [f"{name}: {operation} is not allowed. Ask for an ACL that allows it." for name, operation in state.denied.items()]
    problems += [f"{name}: {problem}" for name, texts in state.problems.items() for problem in texts]
    if problems:
        raise TopicsUnfit(consumer=spec.name, problems=tuple(problems))
    return list(state.readable)


def inspect_topics(cluster: Cluster, spec: ConsumerSpec, topics: Sequence[RetryTopic], largest: int, *, create: bool) -> TopicsState:
    """Returns the state of the topics; with ``create``, creates missing ones first. Raises `BrokerUnavailable`."""
    existing, hidden = visible(cluster, [each.name for each in topics])
    denied = dict.fromkeys(hidden, "DESCRIBE")
    problems: dict[str, list[str]] = {}
    created = set()
    for topic in topics if create else ():
        if topic.name in existing or topic.name in denied:
            continue
        try:
            if _create(cluster, spec, topic, largest):
                created.add(topic.name)
        except NotAllowed as error:
            denied[topic.name] = error.operation
        except TopicNotCreated as error:
            problems[topic.name] = [str(error)]
    existing |= visible(cluster, [each.name for each in topics if each.name not in {*existing, *denied, *problems}])[0] if create else {}
    settings, hidden = _settings(cluster, list(existing))
    denied |= dict.fromkeys(hidden, "DESCRIBE_CONFIGS")
    readable = [
        ExistingTopic(each, existing[each.name], settings[each.name], each.name in created) for each in topics if each.name in settings
    ]
    problems |= {each.retry_topic.name: texts for each in readable if (texts := unfit(each, spec, largest))}
    reported = {*existing, *denied, *problems}
    return TopicsState(existing, readable, [each for each in topics if each.name not in reported], denied, problems)


def _create(cluster: Cluster, spec: ConsumerSpec, topic: RetryTopic, largest: int) -> bool:
    """Creates a topic. `False`: another process has just created it."""
    settings = settings_of(topic, largest)
    created = cluster.create(topic.name, spec.retry.topics.partitions, spec.retry.topics.replication, settings)
    if created:
        log.info("made topic=%s partitions=%s settings=%s", topic.name, spec.retry.topics.partitions, settings)
    return created


def visible(cluster: Cluster, names: Sequence[str]) -> tuple[dict[str, Topic], list[str]]:
    """Returns existing topics by name, and the names of topics that ACLs hide."""
    topics, hidden = cluster.visible(names)
    return {topic.name: topic for topic in topics}, sorted(hidden)


def largest_of(cluster: Cluster, spec: ConsumerSpec, *, missing_ok: bool = False) -> int:
    """Returns the largest max.message.bytes of the consumer's topics; Kafka's default if ACLs hide their settings. Raises `TopicsMissing`
    unless ``missing_ok``."""
    names = cluster.subscribed(spec)
    topics = visible(cluster, names)[0] if missing_ok else [topic.name for topic in cluster.topics(names)]
    settings, _ = _settings(cluster, list(topics))
    return max((int(topic_settings["max.message.bytes"].value) for topic_settings in settings.values()), default=1_048_588)


def settings_of(topic: RetryTopic, largest: int) -> dict[str, str]:
    """Returns the settings for a topic that Tidemark creates. ``largest``: the largest max.message.bytes of the consumer's topics."""
    return {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1" if topic.delay is None else str((topic.delay + KEEP) // _MILLISECOND),
        "retention.bytes": "-1",
        "max.message.bytes": str(_with_headers(largest)),
    }


def _with_headers(largest: int) -> int:
    """Adds the size of the headers, up to Kafka's 32-bit limit, which no record exceeds."""
    return min(largest + HEADER_BYTES, 2**31 - 1)


def unfit(existing: ExistingTopic, spec: ConsumerSpec, largest: int) -> list[str]:
    """Returns the problems of a topic's configuration, with their fixes."""
    return [*_policy(existing), *_retention(existing), *_size(existing, largest), *_copies(existing, spec)]


def _policy(existing: ExistingTopic) -> list[str]:
    problems = []
    if (policy := existing.settings["cleanup.policy"].value) != "delete":
        problems.append(f"cleanup.policy is {policy}, but compaction deletes all but the last record of a key. Set it to delete.")
    if (kind := existing.settings["message.timestamp.type"].value) != "LogAppendTime":
        problems.append(
            f"message.timestamp.type is {kind}. Set it to LogAppendTime, so that retention and time lag count from when a record arrived."
        )
    return problems


def _retention(existing: ExistingTopic) -> list[str]:
    time, size, delay = existing.settings["retention.ms"], existing.settings["retention.bytes"], existing.retry_topic.delay
    retention = None if int(time.value) < 0 else timedelta(milliseconds=int(time.value))
    problems = []
    if delay is None and retention is not None and not time.stated:
        problems.append(
            f"retention.ms is {time.value}, the broker's default. Set it for this topic: -1 to keep failed records, or how long "
            "they should be visible there. Postgres keeps them in any case."
        )
    if delay is not None and retention is not None and retention < delay + SLACK:
        least = (delay + SLACK) // _MILLISECOND
        waits = f"a record waits {format_duration(delay)} in it, and drains may be down for {format_duration(SLACK)}"
        problems.append(f"retention.ms is {time.value}, but {waits}. Set it to {least} or more, or to -1.")
    if int(size.value) >= 0 and (delay is not None or not size.stated):
        problems.append(f"retention.bytes is {size.value}, which deletes records too early. Set it to -1.")
    return problems


def _size(existing: ExistingTopic, largest: int) -> list[str]:
    least, limit = _with_headers(largest), int(existing.settings["max.message.bytes"].value)
    if limit >= least:
        return []
    return [
        f"max.message.bytes is {limit}, but the consumer's topics allow {largest}, and Tidemark adds headers. Set it to {least} or more."
    ]


def _copies(existing: ExistingTopic, spec: ConsumerSpec) -> list[str]:
    problems = []
    config, topic = spec.retry.topics, existing.topic
    if topic.partitions < config.partitions:
        problems.append(
            f"it has {counted(topic.partitions, 'partition')}, but retry.topics.partitions is {config.partitions}. "
            "Add partitions, or change the spec."
        )
    copies = min((len(racks) for racks in topic.racks or ()), default=0)
    if config.replication is not None and copies < config.replication:
        problems.append(
            f"it has {counted(copies, 'replica')}, but retry.topics.replication is {config.replication}. Add replicas, or change the spec."
        )
    in_sync = in_sync_replicas(existing.settings)
    if copies and in_sync > copies:
        problems.append(
            f"min.insync.replicas is {in_sync}, but it has {copies} replicas, so nothing can be published. Set it to {copies} or less."
        )
    return problems


def _settings(cluster: Cluster, names: Sequence[str]) -> tuple[dict[str, TopicSettings], list[str]]:
    """Like `visible`, for settings."""
    try:
        return cluster.settings(names), []
    except NotAllowed as error:
        return cluster.settings(name for name in names if name not in error.topics), error.topics


def _missing(spec: ConsumerSpec, topic: RetryTopic, largest: int) -> str:
    settings = " ".join(f"--config {name}={value}" for name, value in settings_of(topic, largest).items())
    command = f"kafka-topics.sh --create --topic {topic.name} --partitions {spec.retry.topics.partitions} {settings}"
    return f"{topic.name}: it does not exist. Let Tidemark create it (tidemark retries topics {spec.name} --create), or run: {command}"
