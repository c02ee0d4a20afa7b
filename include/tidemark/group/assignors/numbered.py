"""The group as integers: members, topics and partitions are numbered once, so that assignors work on flat lists.

Partitions are numbered by topic name, then by partition; members in the assignor's order. Members with equal subscriptions are of one
*kind*, topics with the same subscribers have one *audience*. Groups of thousands of members usually have one of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tidemark.group.assignors.base import Metadata, Subscription
from tidemark.records.ranges import TopicPartition


class NumberedGroup:
    """An integer view of one assignment's input. It contains only topics that exist and have subscribers."""

    def __init__(self, metadata: Metadata, subscriptions: Mapping[str, Subscription], members: Sequence[str]) -> None:
        self.members = list(members)
        self.subscriptions = [subscriptions[member] for member in self.members]
        topic_sets = [frozenset(subscription.topics) for subscription in self.subscriptions]
        kinds: dict[frozenset[str], int] = {}
        self.kind_of = [kinds.setdefault(topics, len(kinds)) for topics in topic_sets]
        """The kind of each member."""
        self.equal = len(kinds) <= 1
        """Whether all members name the same topics, including nonexistent ones."""

        self.topics = sorted(topic for topic in set().union(*kinds) if topic in metadata.topics)
        self.counts = [metadata.topics[topic].partitions for topic in self.topics]
        self.starts = [0]
        for count in self.counts:
            self.starts.append(self.starts[-1] + count)
        self.total = self.starts[-1]
        self.number_of = {topic: number for number, topic in enumerate(self.topics)}
        self.topic_of = np.repeat(np.arange(len(self.topics)), np.array(self.counts, dtype=np.int64))
        """The topic of each partition."""

        self.kind_topics = [frozenset(self.number_of[topic] for topic in topics if topic in self.number_of) for topics in kinds]
        kinds_of_topic: list[list[int]] = [[] for _ in self.topics]
        for kind, numbers in enumerate(self.kind_topics):
            for number in numbers:
                kinds_of_topic[number].append(kind)
        audiences: dict[tuple[int, ...], int] = {}
        self.audience_of = [audiences.setdefault(tuple(subscribed), len(audiences)) for subscribed in kinds_of_topic]
        """The audience of each topic."""
        self.kind_audiences = [sorted({self.audience_of[topic] for topic in numbers}) for numbers in self.kind_topics]
        of_kind: list[list[int]] = [[] for _ in kinds]
        for member, kind in enumerate(self.kind_of):
            of_kind[kind].append(member)
        self.audiences = [sorted(member for kind in subscribed for member in of_kind[kind]) for subscribed in audiences]
        """The members of each audience."""

    def subscribes(self, member: int, topic: int) -> bool:
        return topic in self.kind_topics[self.kind_of[member]]

    def number(self, part: TopicPartition) -> int | None:
        """The partition's number; None if it was deleted or its topic has no subscribers."""
        topic = self.number_of.get(part.topic)
        if topic is None or not 0 <= part.partition < self.counts[topic]:
            return None
        return self.starts[topic] + part.partition

    def assignment(self, parts: Iterable[Iterable[int]]) -> dict[str, list[TopicPartition]]:
        """Translates the numbers of each member's partitions back to names, in the given order."""
        every = [TopicPartition(topic, number) for topic, count in zip(self.topics, self.counts, strict=True) for number in range(count)]
        return {member: [every[part] for part in mine] for member, mine in zip(self.members, parts, strict=True)}
