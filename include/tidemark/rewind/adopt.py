"""Starts a consumer without positions at the offsets that a consumer group has committed in Kafka (adopts the group).

An adoption is planned and applied as a rewind that moves nothing: the plan takes the group's offsets as the consumer's positions, and
applying it first stores these. The group's consumers must be stopped. ``offset_reset`` applies to partitions for which they have committed
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemark.db import transaction
from tidemark.kafka import groups
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.offsets.reset import first_position
from tidemark.rewind.plan_model import Adopt, Plan
from tidemark.rewind.scenarios.targets import Place
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor


def places(connection: Connection, cluster: Cluster, spec: ConsumerSpec, group: str) -> tuple[list[Place], list[str]]:
    """Returns where the consumer's partitions start, or why it cannot adopt ``group``. Stores topics that are new.

    Raises `NoPosition`, `TopicsMissing`, `NotAllowed` or `BrokerUnavailable`.
    """
    topics = cluster.topics(cluster.subscribed(spec))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    partitions = [partition for topic in topics for partition in topic.all() if spec.fixed.covers(partition)]
    problems = in_use(cluster, group)
    committed = cluster.group_offsets(group, partitions)
    if not committed:
        problems.append(f"Group {group} does not exist in Kafka, or has committed no offset for the topics of {spec.name}.")
    elif uncommitted := sorted(uuids.keys() - {partition.topic for partition in committed}):
        problems.append(
            f"Group {group} has committed no offset for {', '.join(uncommitted)}. Adopt it with only the topics that it has read in "
            f"{spec.name}.yaml, and add the others afterwards."
        )
    if problems:
        return [], problems
    logs = cluster.logs(partitions)
    starts = {
        partition: committed[partition] if partition in committed else first_position(log, spec.offset_reset, topic_is_read=False)
        for partition, log in logs.items()
    }
    with transaction(connection) as cur:
        ids = {name: store.ensure_topic(cur, name, uuid) for name, uuid in uuids.items()}
    return [
        Place(partition, ids[partition.topic], uuids[partition.topic], start, start, logs[partition].start, logs[partition].end)
        for partition, start in starts.items()
    ], []


def outdated(clusters: Iterable[Cluster], plan: Plan) -> list[str]:
    """Reports changes in Kafka since an adoption was planned; empty for any other plan."""
    if not isinstance(plan.scenario, Adopt):
        return []
    group, planned, changes = plan.scenario.group, {part.partition: part.old for _, part in plan}, []
    for cluster in clusters:
        now = cluster.group_offsets(group, planned)
        changes += in_use(cluster, group)
        changes += [
            f"{partition}: group {group} has committed {now[partition]} since; the plan has {offset}."
            for partition, offset in planned.items()
            if now.get(partition, offset) != offset
        ]
    return changes


def in_use(cluster: Cluster, group: str) -> list[str]:
    """Reports live consumers of the group: records that they read from now on would be loaded twice."""
    live = groups.members(cluster, group)
    return [f"Group {group} has live members in Kafka{groups.named(live)}. Stop these consumers first."] if live else []


def store_positions(cur: Cursor, plan: Plan) -> list[str]:
    """Stores the positions of an adoption; reports positions that the consumer had already. Does nothing for any other plan."""
    if not isinstance(plan.scenario, Adopt):
        return []
    return [
        f"{part.partition}: the consumer has a position, because it has run since."
        for group, part in plan
        if not store.start_partition(cur, group.group_id, part.topic_id, part.partition.partition, part.old)
    ]
