"""`roundrobin`: all partitions, assigned one at a time to each member in turn."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription, member_order
from tidemark.group.assignors.numbered import NumberedGroup


class RoundRobinAssignor(Assignor):
    """Kafka's ``roundrobin``: partitions ordered by topic and number go to members in turn, skipping members that do not subscribe."""

    name = "roundrobin"

    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        group = NumberedGroup(metadata, subscriptions, member_order(subscriptions))
        mine: list[list[int]] = [[] for _ in group.members]
        turn = 0  # the member whose turn it is
        for topic, (start, count) in enumerate(zip(group.starts, group.counts, strict=False)):
            if not count:
                continue
            subscribers = group.audiences[group.audience_of[topic]]
            width = len(subscribers)
            first = bisect_left(subscribers, turn) % width
            for at in range(min(width, count)):
                mine[subscribers[(first + at) % width]].extend(range(start + at, start + count, width))
            turn = subscribers[(first + count - 1) % width] + 1
        return group.assignment(mine)
