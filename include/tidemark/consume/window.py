"""How far a run reads, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tidemark.consume.claims import Found
from tidemark.consume.fixed import partitions_of
from tidemark.db import transaction
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.records.ranges import Epoch, Slice
from tidemark.retry import store as retries
from tidemark.spec import ConsumerSpec, Run
from tidemark.spec.retry_topics import is_own

if TYPE_CHECKING:
    from tidemark.consume.seat import GroupSeat, TakenByHand
    from tidemark.db import Connection

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How often a continuous run looks for new topics and partitions. For new records it looks before each batch."""
HANDOVER_S = 60.0
"""How long a continuous run whose time is up reads on for the next one to take over: Airflow starts it and it starts Spark meanwhile."""

PATIENCE_S = 30.0
SAMPLE = 100


class Window(Protocol):
    wait_s: float
    """How long a run that has nothing to read waits for news at a time."""

    def begin(self) -> Found:
        """What there is to read when the run starts."""

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        """Has the seat see what there is to read now."""

    def over(self, seat: TakenByHand | GroupSeat, *, drained: bool) -> bool:
        """Does the run end here? ``drained``: nothing of what it may read is left."""


class Bounded:
    """Up to the ends that were there when the run started."""

    wait_s = 1.0

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec

    def begin(self) -> Found:
        return look(self._cluster, self._spec)

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        """It stands still."""

    def over(self, seat: TakenByHand | GroupSeat, *, drained: bool) -> bool:
        return drained and seat.settled


class Continuous:
    """Up to what is there now, for a time; then on until the next run has taken over, or nobody does."""

    wait_s = 0.05

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec
        now = time.monotonic()
        self._ends_at = now + spec.run_for.total_seconds() + HANDOVER_S
        self._looked_at = self._seen_at = now

    def begin(self) -> Found:
        return look(self._cluster, self._spec)

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        """Raises `BrokerUnavailable` once nobody has answered for `PATIENCE_S`: a topic that is made or deleted right now is no outage."""
        now = time.monotonic()
        try:
            found = self._look(seat.held.found, now)
        except BrokerUnavailable:
            if now - self._seen_at > PATIENCE_S:
                raise
            self._looked_at = now - LOOK_EVERY_S  # what is there may be other topics
            return
        self._seen_at = now
        seat.see(found)

    def _look(self, found: Found, now: float) -> Found:
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            return look(self._cluster, self._spec)
        logs = self._cluster.logs(found.logs, known=found.logs)
        return Found(found.topics, logs, {partition: log.end for partition, log in logs.items()})

    def over(self, seat: TakenByHand | GroupSeat, *, drained: bool) -> bool:
        return time.monotonic() >= self._ends_at


class Drain(Bounded):
    """Of the group's retry topics what was due when the run started. What comes due meanwhile is for the next one.

    Its batches follow each other no faster than the spec allows (`retry.per_second`): what failed because a service was down is not to
    bring it down again.
    """

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, group_id: int) -> None:
        super().__init__(cluster, spec)
        self._connection, self._group_id = connection, group_id
        self._began: tuple[float, int] | None = None

    def begin(self) -> Found:
        return look_due(self._connection, self._cluster, self._group_id)

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        if self._spec.retry.per_second is None:
            return
        now, left = time.monotonic(), seat.held.left
        began, first = self._began = self._began or (now, left)
        if left:
            seat.poll(max(0.0, began + (first - left) / self._spec.retry.per_second - now))


def look_due(connection: Connection, cluster: Cluster, group_id: int) -> Found:
    """The partitions of a group's retry topics in which something is due, as far as it is: all due times are the database's (I6).

    Kafka is not asked where nothing is due. Records whose message is in no log any more are published anew (I7). Gives partitions that
    were never drained their position: where the first registered message is.
    """
    with transaction(connection) as cur:
        again = retries.publish_stranded(cur, group_id)
        due = retries.due(cur, group_id)
    if not due:
        return Found((), {}, {})
    topics = cluster.topics(sorted({one.partition.topic for one in due}), missing_ok=True)
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    there = {one.partition: one for one in due if uuids.get(one.partition.topic) == one.kafka_uuid}
    logs = cluster.logs(there)
    with transaction(connection) as cur:
        for topic_id in sorted({one.topic_id for one in due if there.get(one.partition) is not one}):
            again += retries.publish_gone(cur, group_id, topic_id)
        for partition, one in sorted(there.items()):
            start = logs[partition].start
            if one.first < start:
                again += retries.publish_gone(cur, group_id, one.topic_id, partition=partition.partition, before=start)
            store.start_partition(cur, group_id, one.topic_id, partition.partition, max(start, one.first), drained=True)
    if again:
        log.warning("records lost their place in a retry topic and are published anew group_id=%s records=%s", group_id, again)
    return Found(topics, logs, {partition: min(one.end, logs[partition].end) for partition, one in there.items()})


def look(cluster: Cluster, spec: ConsumerSpec) -> Found:
    """The spec's topics as they are now, and what the run reads of them. Raises `TopicsMissing`, and what `partitions_of` does."""
    topics = cluster.topics(subscribed(cluster, spec), missing_ok=not spec.topics)
    logs = cluster.logs(partitions_of(spec, topics))
    return Found(topics, logs, {partition: log.end for partition, log in logs.items()})


def subscribed(cluster: Cluster, spec: ConsumerSpec) -> Sequence[str]:
    """The topics that the spec names, or matches; its own retry topics never are among them."""
    return spec.topics or [name for name in cluster.matching(spec.topic_pattern or "") if not is_own(spec.group, name)]


def last_records(found: Found) -> list[Slice]:
    """The last `SAMPLE` offsets of each partition, which nobody claims."""
    return [
        Slice(partition, 0, max(log.start, log.end - SAMPLE), log.end, Epoch(0))
        for partition, log in found.logs.items()
        if log.end > log.start
    ]


def window_of(cluster: Cluster, spec: ConsumerSpec) -> Window:
    return Continuous(cluster, spec) if spec.run is Run.CONTINUOUS else Bounded(cluster, spec)
