"""Adopting: a consumer without positions starts where a group of Kafka's consumers has committed.

It is planned and applied as a rewind that moves nothing: the plan takes the group's offsets for the consumer's positions, and applying
it first stores these. The group's consumers must be stopped. A partition for which they have committed nothing starts as
``offset_reset`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemark.kafka import groups
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.offsets.reset import first_position
from tidemark.records.ranges import Log, TopicPartition
from tidemark.rewind.plan_model import Adopt, Plan
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Cursor


@dataclass(frozen=True, slots=True)
class Start:
    """Where a partition is to start, in its log ``[start, end)``. ``kafka_uuid`` is its topic's."""

    partition: TopicPartition
    kafka_uuid: str
    position: int
    log: Log


def starts(cluster: Cluster, spec: ConsumerSpec, group: str) -> tuple[list[Start], list[str]]:
    """Where the consumer's partitions start, or why it cannot adopt ``group``.

    Raises `NoPosition`, `TopicsMissing`, `GroupNotAllowed` or `BrokerUnavailable`.
    """
    topics = cluster.topics(cluster.subscribed(spec))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    partitions = [partition for topic in topics for partition in topic.all() if spec.fixed.covers(partition)]
    problems = in_use(cluster, group)
    committed = cluster.group_offsets(group, partitions)
    if not committed:
        problems.append(f"Group {group} does not exist in Kafka, or has committed no offset for the topics of {spec.name}.")
    elif none := sorted(uuids.keys() - {partition.topic for partition in committed}):
        problems.append(
            f"Group {group} has committed no offset for {', '.join(none)}. Adopt it with only the topics that it has read in "
            f"{spec.name}.yaml, and add the others afterwards."
        )
    if problems:
        return [], problems
    found = []
    for partition, log in cluster.logs(partitions).items():
        position = committed[partition] if partition in committed else first_position(log, spec.offset_reset, topic_known=False)
        found.append(Start(partition, uuids[partition.topic], position, log))
    return found, []


def outdated(clusters: Iterable[Cluster], plan: Plan) -> list[str]:
    """What has changed in Kafka since the plan of an adoption was made; empty for any other plan."""
    if not isinstance(plan.scenario, Adopt):
        return []
    group, planned, said = plan.scenario.group, {part.partition: part.old for _, part in plan}, []
    for cluster in clusters:
        now = cluster.group_offsets(group, planned)
        said += in_use(cluster, group)
        said += [
            f"{partition}: group {group} has committed {now[partition]} since; the plan has {offset}."
            for partition, offset in planned.items()
            if now.get(partition, offset) != offset
        ]
    return said


def in_use(cluster: Cluster, group: str) -> list[str]:
    """The problem that consumers of the group are alive, if so: what they read from now on would be loaded twice."""
    live = groups.members(cluster, group)
    return [f"Group {group} has live members in Kafka{groups.named(live)}. Stop these consumers first."] if live else []


def store_positions(cur: Cursor, plan: Plan, planned: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stores the positions of an adoption; returns those that the consumer had already. Does nothing for any other plan."""
    known: list[str] = []
    if not isinstance(plan.scenario, Adopt):
        return known
    for part in planned:
        made = store.start_partition(cur, part["group_id"], part["topic_id"], part["partition"], part["planned_offset"])
        if not made:
            known.append(f"{part['topic']}/{part['partition']}: the consumer has a position, because it has run since.")
    return known
