"""The copy of a group's positions that Kafka has (``mirror: true``)."""

from __future__ import annotations

from tests.support.scenario import Scenario
from tidemark.kafka.cluster import Cluster
from tidemark.records.ranges import TopicPartition


def in_kafka(consumer: Scenario) -> dict[tuple[str, int], int]:
    """The offsets that Kafka has stored for the group."""
    asked = [TopicPartition(*key) for key in consumer.positions()]
    found = Cluster(consumer.connections.kafka).group_offsets(consumer.spec.group, asked)
    return {(part.topic, part.partition): offset for part, offset in found.items()}
