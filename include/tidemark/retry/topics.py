"""A consumer's retry topics and failed topic: created if missing, refused if misconfigured.

Postgres holds every record, so no topic setting can lose one. But a message deleted too early is published and waited for again, and
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
from tidemark.kafka.cluster import Cluster, Setting, Topic, TopicNotCreated
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
class Wanted:
    """A topic that the consumer needs. ``delay``: how long records wait in it; `None`: the failed topic."""

    name: str
    delay: timedelta | None


@dataclass(frozen=True, slots=True)
class ExistingTopic:
    """A topic in the cluster. ``made``: created by this call."""

    wanted: Wanted
    topic: Topic
    settings: Mapping[str, Setting]
    made: bool = False


@dataclass(frozen=True, slots=True)
class TopicsState:
    """The state of the topics. ``there``: all that exist; ``found``: those whose settings the ACLs let us read. ``denied``: the
    ACL operation that a topic lacks. ``problems``: by topic, why it cannot be used, each with what to do."""

    there: Mapping[str, Topic]
    found: Sequence[ExistingTopic]
    missing: Sequence[Wanted]
    denied: Mapping[str, str]
    problems: Mapping[str, Sequence[str]]


@dataclass(kw_only=True, eq=False)
class TopicsUnfit(Refused):
    """Retry topics are missing or misconfigured. Lists every problem, each with what to do."""

    consumer: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, f"{counted(len(self.problems), 'problem')} with the retry topics of {self.consumer}"])


def wanted(spec: ConsumerSpec, *, now: bool = False) -> tuple[Wanted, ...]:
    """The topics of a consumer: one per distinct delay, one for immediate tries, and the failed topic.

    A consumer without a ladder needs none of them, or, with ``now``, only the one for immediate tries.
    """
    ladder = Ladder.of(spec)
    if not ladder:
        return (Wanted(now_topic(spec.group), timedelta()),) if now else ()
    tiers = [Wanted(retry_topic(spec.group, delay), delay) for delay in dict.fromkeys(ladder.delays)]
    return (*tiers, Wanted(now_topic(spec.group), timedelta()), Wanted(failed_topic(spec.group), None))


def needed(group: str, names: Iterable[str]) -> list[Wanted]:
    """Those of the names that are topics of the group, including those of delays that its ladder no longer has."""
    named = []
    for name in names:
        own, _, delay = name.rpartition(".retry.")
        if name == failed_topic(group):
            named.append(Wanted(name, None))
        elif own == group:
            with contextlib.suppress(BadInput):
                named.append(Wanted(name, timedelta() if delay == "now" else parse_duration(delay)))
    return named


def ensure_topics(
    cluster: Cluster,
    spec: ConsumerSpec,
    *,
    create: bool = False,
    now: bool = False,
    only: Iterable[str] | None = None,
    missing_ok: bool = False,
) -> list[ExistingTopic]:
    """Checks the consumer's retry topics and its failed topic (`wanted`), or the named ones (``only``), and returns them.

    ``create`` creates missing topics; existing ones are never changed. Raises `TopicsUnfit` with every topic that is misconfigured, not
    authorized, or (unless ``missing_ok``) missing; `TopicsMissing` for the topics that the consumer reads; or `BrokerUnavailable`.
    """
    asked = [one for one in wanted(spec, now=now) if only is None or one.name in set(only)]
    largest = largest_of(cluster, spec)
    look = look_at(cluster, spec, asked, largest, create=create)
    problems = [] if missing_ok else [_missing(spec, one, largest) for one in look.missing]
    problems += [f"{name}: {operation} is not allowed. Ask for an ACL that allows it." for name, operation in look.denied.items()]
    problems += [f"{name}: {problem}" for name, found in look.problems.items() for problem in found]
    if problems:
        raise TopicsUnfit(consumer=spec.name, problems=tuple(problems))
    return list(look.found)


def look_at(cluster: Cluster, spec: ConsumerSpec, asked: Sequence[Wanted], largest: int, *, create: bool) -> TopicsState:
    """The state of the topics, after creating missing ones if ``create`` is set. Raises `BrokerUnavailable`."""
    there, hidden = visible(cluster, [one.name for one in asked])
    denied = dict.fromkeys(hidden, "DESCRIBE")
    problems: dict[str, list[str]] = {}
    made = set()
    for one in asked if create else ():
        if one.name in there or one.name in denied:
            continue
        try:
            if _make(cluster, spec, one, largest):
                made.add(one.name)
        except NotAllowed as error:
            denied[one.name] = error.operation
        except TopicNotCreated as error:
            problems[one.name] = [str(error)]
    there |= visible(cluster, [one.name for one in asked if one.name not in {*there, *denied, *problems}])[0] if create else {}
    settings_now, hidden = _settings(cluster, list(there))
    denied |= dict.fromkeys(hidden, "DESCRIBE_CONFIGS")
    found = [ExistingTopic(one, there[one.name], settings_now[one.name], one.name in made) for one in asked if one.name in settings_now]
    problems |= {one.wanted.name: wrong for one in found if (wrong := unfit(one, spec, largest))}
    told = {*there, *denied, *problems}
    return TopicsState(there, found, [one for one in asked if one.name not in told], denied, problems)


def _make(cluster: Cluster, spec: ConsumerSpec, one: Wanted, largest: int) -> bool:
    """Creates a topic. `False`: another process has just created it."""
    settings = settings_of(one, largest)
    made = cluster.create(one.name, spec.retry.topics.partitions, spec.retry.topics.replication, settings)
    if made:
        log.info("made topic=%s partitions=%s settings=%s", one.name, spec.retry.topics.partitions, settings)
    return made


def visible(cluster: Cluster, names: Sequence[str]) -> tuple[dict[str, Topic], list[str]]:
    """The existing topics by name, and the names of those that the cluster's ACLs hide."""
    found, hidden = cluster.visible(names)
    return {topic.name: topic for topic in found}, sorted(hidden)


def largest_of(cluster: Cluster, spec: ConsumerSpec, *, missing_ok: bool = False) -> int:
    """The largest max.message.bytes of the consumer's topics; Kafka's default if the ACLs hide their settings. Raises `TopicsMissing`
    unless ``missing_ok``."""
    names = cluster.subscribed(spec)
    topics = visible(cluster, names)[0] if missing_ok else [topic.name for topic in cluster.topics(names)]
    found, _ = _settings(cluster, list(topics))
    return max((int(settings["max.message.bytes"].value) for settings in found.values()), default=1_048_588)


def settings_of(one: Wanted, largest: int) -> dict[str, str]:
    """The settings of a topic that Tidemark creates. ``largest``: the largest max.message.bytes of the consumer's topics."""
    return {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1" if one.delay is None else str((one.delay + KEEP) // _MILLISECOND),
        "retention.bytes": "-1",
        "max.message.bytes": str(_with_headers(largest)),
    }


def _with_headers(largest: int) -> int:
    """Kafka's limits are numbers of 32 bits, and no record is larger."""
    return min(largest + HEADER_BYTES, 2**31 - 1)


def unfit(found: ExistingTopic, spec: ConsumerSpec, largest: int) -> list[str]:
    """Problems of a topic's configuration, each with what to set."""
    return [*_policy(found), *_retention(found), *_size(found, largest), *_copies(found, spec)]


def _policy(found: ExistingTopic) -> list[str]:
    problems = []
    if (policy := found.settings["cleanup.policy"].value) != "delete":
        problems.append(f"cleanup.policy is {policy}, but compaction deletes all but the last record of a key. Set it to delete.")
    if (kind := found.settings["message.timestamp.type"].value) != "LogAppendTime":
        problems.append(
            f"message.timestamp.type is {kind}. Set it to LogAppendTime, so that retention and time lag count from when a record arrived."
        )
    return problems


def _retention(found: ExistingTopic) -> list[str]:
    time, size, delay = found.settings["retention.ms"], found.settings["retention.bytes"], found.wanted.delay
    kept = None if int(time.value) < 0 else timedelta(milliseconds=int(time.value))
    problems = []
    if delay is None and kept is not None and not time.stated:
        problems.append(
            f"retention.ms is {time.value}, the broker's default. Set it for this topic: -1 to keep failed records, or how long "
            "they should be visible there. Postgres keeps them in any case."
        )
    if delay is not None and kept is not None and kept < delay + SLACK:
        least = (delay + SLACK) // _MILLISECOND
        waits = f"a record waits {format_duration(delay)} in it, and drains may be down for {format_duration(SLACK)}"
        problems.append(f"retention.ms is {time.value}, but {waits}. Set it to {least} or more, or to -1.")
    if int(size.value) >= 0 and (delay is not None or not size.stated):
        problems.append(f"retention.bytes is {size.value}, which deletes records too early. Set it to -1.")
    return problems


def _size(found: ExistingTopic, largest: int) -> list[str]:
    least, limit = _with_headers(largest), int(found.settings["max.message.bytes"].value)
    if limit >= least:
        return []
    return [
        f"max.message.bytes is {limit}, but the consumer's topics allow {largest}, and Tidemark adds headers. Set it to {least} or more."
    ]


def _copies(found: ExistingTopic, spec: ConsumerSpec) -> list[str]:
    problems = []
    asked, topic = spec.retry.topics, found.topic
    if topic.partitions < asked.partitions:
        problems.append(
            f"it has {counted(topic.partitions, 'partition')}, but retry.topics.partitions is {asked.partitions}. "
            "Add partitions, or change the spec."
        )
    copies = min((len(racks) for racks in topic.racks or ()), default=0)
    if asked.replication is not None and copies < asked.replication:
        problems.append(
            f"it has {counted(copies, 'replica')}, but retry.topics.replication is {asked.replication}. Add replicas, or change the spec."
        )
    in_sync = int(found.settings["min.insync.replicas"].value)
    if copies and in_sync > copies:
        problems.append(
            f"min.insync.replicas is {in_sync}, but it has {copies} replicas, so nothing can be published. Set it to {copies} or less."
        )
    return problems


def _settings(cluster: Cluster, names: Sequence[str]) -> tuple[dict[str, dict[str, Setting]], list[str]]:
    """Like `visible`, for settings."""
    try:
        return cluster.settings(names), []
    except NotAllowed as error:
        return cluster.settings(name for name in names if name not in error.topics), error.topics


def _missing(spec: ConsumerSpec, one: Wanted, largest: int) -> str:
    settings = " ".join(f"--config {name}={value}" for name, value in settings_of(one, largest).items())
    how = f"kafka-topics.sh --create --topic {one.name} --partitions {spec.retry.topics.partitions} {settings}"
    return f"{one.name}: it does not exist. Let Tidemark create it (tidemark retries topics {spec.name} --create), or run: {how}"
