"""How far a run reads, and when it is over: an `Extent` for each kind of run."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tidemark.consume.claims import LookUp
from tidemark.consume.lookup import look, look_due, look_skipped
from tidemark.db import transaction
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.rewind.backfill import Backfill, ends
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.consume.membership import Membership
    from tidemark.db import Connection

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How often a continuous run looks for new topics and partitions. For new records it looks before each batch."""
HANDOVER_S = 60.0
"""How long a continuous run whose time is up reads on for the next one to take over: Airflow starts it and it starts Spark meanwhile."""

PATIENCE_S = 30.0


class Extent(Protocol):
    wait_s: float
    """How long a run that has nothing to read waits for news at a time."""

    def begin(self) -> LookUp:
        """What there is to read when the run starts."""

    def refresh(self, membership: Membership) -> None:
        """Shows the membership what there is to read now."""

    def over(self, membership: Membership, *, drained: bool) -> bool:
        """Does the run end here? ``drained``: nothing of what it may read is left."""


class Bounded:
    """Up to the ends that were there when the run started."""

    wait_s = 1.0

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec

    def begin(self) -> LookUp:
        return look(self._cluster, self._spec)

    def refresh(self, membership: Membership) -> None:
        """The ends stay."""

    def over(self, membership: Membership, *, drained: bool) -> bool:
        return drained and membership.settled


class Continuous:
    """Up to what is there now, for a time; then on until the next run has taken over, or nobody does."""

    wait_s = 0.05

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec
        now = time.monotonic()
        self._ends_at = now + spec.run_for.total_seconds() + HANDOVER_S
        self._looked_at = self._seen_at = now

    def begin(self) -> LookUp:
        return look(self._cluster, self._spec)

    def refresh(self, membership: Membership) -> None:
        """Raises `BrokerUnavailable` once nobody has answered for `PATIENCE_S`: a topic that is made or deleted right now is no outage."""
        now = time.monotonic()
        try:
            found = self._look(membership.held.found, now)
        except BrokerUnavailable:
            if now - self._seen_at > PATIENCE_S:
                raise
            self._looked_at = now - LOOK_EVERY_S  # what is there may be other topics
            return
        self._seen_at = now
        membership.see(found)

    def _look(self, found: LookUp, now: float) -> LookUp:
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            return look(self._cluster, self._spec)
        logs = self._cluster.logs(found.logs, known=found.logs)
        return LookUp(found.topics, logs, {partition: log.end for partition, log in logs.items()})

    def over(self, membership: Membership, *, drained: bool) -> bool:
        return time.monotonic() >= self._ends_at


class Skipped(Bounded):
    """What a rewind has skipped, up to where the group has not been moved back to since."""

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, backfill: Backfill) -> None:
        super().__init__(cluster, spec)
        self._connection, self._backfill = connection, backfill

    def begin(self) -> LookUp:
        return look_skipped(self._cluster, self._backfill)

    def refresh(self, membership: Membership) -> None:
        """Comes after the claims and before the look at their epochs: an end that comes nearer in between is noticed there."""
        with transaction(self._connection) as cur:
            now = ends(cur, self._backfill)
        found = membership.held.found
        membership.see(replace(found, ends={partition: min(now.get(partition, 0), log.end) for partition, log in found.logs.items()}))


class Drain(Bounded):
    """Of the group's retry topics what was due when the run started. What comes due meanwhile is for the next one.

    Its batches follow each other no faster than the spec allows (`retry.per_second`): what failed because a service was down is not to
    bring it down again.
    """

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, group_id: int) -> None:
        super().__init__(cluster, spec)
        self._connection, self._group_id = connection, group_id
        self._began: tuple[float, int] | None = None

    def begin(self) -> LookUp:
        return look_due(self._connection, self._cluster, self._group_id)

    def refresh(self, membership: Membership) -> None:
        if self._spec.retry.per_second is None:
            return
        now, left = time.monotonic(), membership.held.left
        began, first = self._began = self._began or (now, left)
        if left:
            membership.poll(max(0.0, began + (first - left) / self._spec.retry.per_second - now))
