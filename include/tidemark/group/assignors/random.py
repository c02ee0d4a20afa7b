"""`random`: a minimal assignor, as an example for custom ones."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription
from tidemark.records.ranges import TopicPartition


class RandomAssignor(Assignor):
    """Assigns each partition to a random subscriber. The topic's name is the seed, so that equal input gives the same assignment."""

    name = "random"

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        assignment: dict[str, list[TopicPartition]] = {member: [] for member in sorted(subscriptions)}
        for topic in sorted(metadata.topics):
            subscribers = [member for member in assignment if topic in subscriptions[member].topics]
            dice = Random(topic)  # noqa: S311 - not used for cryptography
            for number in range(metadata.topics[topic].partitions if subscribers else 0):
                assignment[dice.choice(subscribers)].append(TopicPartition(topic, number))
        return assignment
