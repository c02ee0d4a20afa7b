"""Examines Kafka from this host: its brokers, and the existing topics of a consumer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemark.db import Connection, transaction
from tidemark.doctor.database import clock
from tidemark.doctor.finding import Finding, failure, ok, warning
from tidemark.kafka import groups
from tidemark.kafka.cluster import Cluster, Topic, TopicSettings, in_sync_replicas
from tidemark.kafka.contact import unreachable
from tidemark.kafka.failures import NotAllowed
from tidemark.offsets import store
from tidemark.offsets.store import Position
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import about, counted, first_of

RETENTION_USED = 0.75
"""The share of its retention from which a partition's lag is a warning."""
NAMED = 5
"""How many partitions a finding names."""


def examine_brokers(cluster: Cluster) -> Iterator[Finding]:
    """Examines the brokers. Raises `BrokerUnavailable` if none answers."""
    brokers = cluster.brokers()
    if unreached := unreachable(brokers):
        fix = "Clients need every broker: start it, open the network, or correct its advertised.listeners."
        yield failure("kafka", f"not reachable from here: {', '.join(unreached)}", fix)
    else:
        yield ok("kafka", f"{counted(len(brokers), 'broker')}: {', '.join(brokers)}")


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group's positions, and the database's clock, to which timestamps of records are compared."""

    positions: Sequence[Position]
    now_ms: int


def group_progress(connection: Connection, group: str) -> GroupProgress:
    with transaction(connection) as cur:
        return GroupProgress(store.positions(cur, group), int(clock(cur) * 1000))


def examine_topics(cluster: Cluster, spec: ConsumerSpec, progress: GroupProgress | None) -> Iterator[Finding]:
    """Examines a consumer's topics, and its lag unless ``progress`` is None because there is no database.

    Raises `NotAllowed` and `BrokerUnavailable`.
    """
    topics = cluster.topics(cluster.subscribed(spec), missing_ok=True)
    several = len(cluster.brokers()) > 1
    settings = cluster.settings(topic.name for topic in topics)
    for topic in topics:
        subject = f"{spec.name}: topic {topic.name}"
        findings = list(_replicas(subject, topic, settings[topic.name], several=several))
        if not topic.has_id:
            fix = "Upgrade the brokers to Kafka 2.8 or newer, or never create a topic of a name that was in use."
            findings.append(warning(subject, "the cluster gives it no id, so deleting and creating it again is not noticed", fix))
        if progress is not None:
            findings += _lag(subject, cluster, topic, settings[topic.name], progress, spec.name)
        yield from findings or [ok(subject, counted(topic.partitions, "partition"))]
    yield from _mirror(cluster, spec)


def _mirror(cluster: Cluster, spec: ConsumerSpec) -> Iterator[Finding]:
    if not spec.mirror:
        return
    subject = f"{spec.name}: mirror"
    try:
        live = groups.members(cluster, spec.group)
    except NotAllowed as error:
        yield warning(subject, f"{error.operation} is not allowed on group {spec.group}", "Ask for an ACL that allows READ on it.")
        return
    if live:
        problem = f"group {spec.group} has live members in Kafka{groups.named(live)}"
        yield failure(subject, problem, "Stop them, give the consumer another group, or remove mirror: true.")
    else:
        yield ok(subject, f"group {spec.group} has no members in Kafka")


def _replicas(subject: str, topic: Topic, settings: TopicSettings, *, several: bool) -> Iterator[Finding]:
    copies = min((len(racks) for racks in topic.racks or ()), default=0)
    in_sync = in_sync_replicas(settings)
    if copies and in_sync > copies:
        problem = f"min.insync.replicas is {in_sync}, but it has {counted(copies, 'replica')}: producers cannot write"
        yield failure(subject, problem, f"Set min.insync.replicas to {copies} or less, or add replicas.")
    elif several and copies == 1:
        yield warning(subject, "it has one replica: its records are lost with that broker's disk", "Add replicas: 3 is usual.")
    elif copies > 1 and in_sync == copies:
        problem = f"min.insync.replicas is {in_sync}, as many as it has replicas: no producer can write while a broker is down"
        yield warning(subject, problem, f"Set min.insync.replicas to {copies - 1}.")
    elif copies > 1 and in_sync == 1 and "min.insync.replicas" in settings:
        problem = "min.insync.replicas is 1: a record that was acknowledged may be on one broker only, and lost with it"
        yield warning(subject, problem, "Set min.insync.replicas to 2.")
    if (unclean := settings.get("unclean.leader.election.enable")) is not None and unclean.value == "true":
        problem = "unclean.leader.election.enable is true: an election may discard records that were read"
        yield warning(subject, problem, "Set it to false. A run refuses a log that was truncated below its position.")


def _lag(
    subject: str, cluster: Cluster, topic: Topic, settings: TopicSettings, progress: GroupProgress, consumer: str
) -> Iterator[Finding]:
    """Reports records that retention deletes, or has deleted, before they are read."""
    positions = {position.partition: position.position for position in progress.positions if position.kafka_uuid == topic.kafka_uuid}
    logs = cluster.logs(part for part in topic.all() if part in positions)
    if lost := [part for part, log in logs.items() if positions[part] < log.start]:
        problem = f"retention has deleted records that were not read, in {first_of(map(str, sorted(lost)), NAMED)}"
        fix = f"Decide where to continue: tidemark rewind plan {consumer} --to-earliest, or set offset_reset."
        yield failure(subject, problem, fix)
    retention_ms = int(settings["retention.ms"].value)
    behind = {part: positions[part] for part, log in logs.items() if log.start <= positions[part] < log.end}
    if retention_ms < 0 or not behind:
        return
    ages = {part: progress.now_ms - at for part, at in cluster.times_at(behind).items() if at >= 0}
    if late := [part for part, age in ages.items() if age > RETENTION_USED * retention_ms]:
        oldest, kept = about(max(ages[part] for part in late) / 1000), about(retention_ms / 1000)
        named = first_of(map(str, sorted(late)), NAMED)
        problem = f"the oldest unread record is {oldest} old, and retention deletes after {kept}, in {named}"
        yield warning(subject, problem, "Run the consumer now, or raise retention.ms.")
