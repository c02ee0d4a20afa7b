"""How far a run reads, and when it is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from tidemark.consume.claims import Found
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.ranges import Epoch, Slice
from tidemark.offsets.reset import Log
from tidemark.spec import ConsumerSpec, Run

if TYPE_CHECKING:
    from tidemark.consume.seat import GroupSeat, TakenByHand

LOOK_EVERY_S = 5.0
"""How often a continuous run looks for new topics and partitions. For new records it looks before each batch."""
HANDOVER_S = 60.0
"""How long a continuous run whose time is up reads on for the next one to take over: Airflow starts it and it starts Spark meanwhile."""

PATIENCE_S = 30.0
SAMPLE = 100


class Window(Protocol):
    wait_s: float
    """How long a run that has nothing to read waits for news at a time."""

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        """Has the seat see what there is to read now."""

    def over(self, seat: TakenByHand | GroupSeat, *, drained: bool) -> bool:
        """Does the run end here? ``drained``: nothing of what it may read is left."""


class Bounded:
    """Up to the ends that were there when the run started."""

    wait_s = 1.0

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
        ends = self._cluster.stable_ends(found.logs)
        logs = {partition: Log(partition, log.start, max(log.start, ends[partition])) for partition, log in found.logs.items()}
        return Found(found.topics, logs, ends)

    def over(self, seat: TakenByHand | GroupSeat, *, drained: bool) -> bool:
        return time.monotonic() >= self._ends_at


def look(cluster: Cluster, spec: ConsumerSpec) -> Found:
    """The spec's topics as they are now. Raises `TopicsMissing`."""
    topics = cluster.topics(spec.topics or cluster.matching(spec.topic_pattern or ""), missing_ok=not spec.topics)
    partitions = [partition for topic in topics for partition in topic.all()]
    ends = cluster.stable_ends(partitions)
    starts = cluster.log_starts(partitions)
    logs = {partition: Log(partition, starts[partition], max(starts[partition], ends[partition])) for partition in partitions}
    return Found(topics, logs, ends)


def last_records(found: Found) -> list[Slice]:
    """The last `SAMPLE` offsets of each partition, which nobody claims."""
    return [
        Slice(partition, 0, max(log.start, log.end - SAMPLE), log.end, Epoch(0))
        for partition, log in found.logs.items()
        if log.end > log.start
    ]


def window_of(cluster: Cluster, spec: ConsumerSpec) -> Window:
    return Continuous(cluster, spec) if spec.run is Run.CONTINUOUS else Bounded()
