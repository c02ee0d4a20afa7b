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
"""How often a continuous run looks for new topics and partitions. It looks for new records before each batch."""
HANDOVER_S = 60.0
"""How long a continuous run reads on after its time is up, while Airflow starts the next run and that starts Spark."""

PATIENCE_S = 30.0


class Extent(Protocol):
    wait_s: float
    """How long a run with nothing to read waits between two polls."""

    def begin(self) -> LookUp:
        """What there is to read when the run starts."""

    def refresh(self, membership: Membership) -> None:
        """Updates the membership with what there is to read now."""

    def over(self, membership: Membership, *, drained: bool) -> bool:
        """Whether the run is over. ``drained``: nothing is left of what it may read."""


class Bounded:
    """Reads up to the end offsets seen when the run started."""

    wait_s = 1.0

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec
        self._found: LookUp | None = None

    def begin(self) -> LookUp:
        """Looks once, however often it is called."""
        if self._found is None:
            self._found = look(self._cluster, self._spec)
        return self._found

    def refresh(self, membership: Membership) -> None:
        """Does nothing: the ends stay the same."""

    def over(self, membership: Membership, *, drained: bool) -> bool:
        return drained and membership.settled


class Continuous:
    """Reads whatever arrives until its time is up, then until the next run takes over or `HANDOVER_S` has passed."""

    wait_s = 0.05

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec
        now = time.monotonic()
        self._ends_at = now + spec.run_for.total_seconds() + HANDOVER_S
        self._looked_at = self._seen_at = now

    def begin(self) -> LookUp:
        return look(self._cluster, self._spec)

    def refresh(self, membership: Membership) -> None:
        """Raises `BrokerUnavailable` after `PATIENCE_S` without an answer: a topic being created or deleted is not an outage."""
        now = time.monotonic()
        try:
            found = self._look(membership.held.found, now)
        except BrokerUnavailable:
            if now - self._seen_at > PATIENCE_S:
                raise
            self._looked_at = now - LOOK_EVERY_S  # look for topics next time: they may have changed
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
    """Reads what a rewind skipped, up to the point that later rewinds have moved the group back to."""

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, backfill: Backfill) -> None:
        super().__init__(cluster, spec)
        self._connection, self._backfill = connection, backfill

    def begin(self) -> LookUp:
        return look_skipped(self._cluster, self._backfill)

    def refresh(self, membership: Membership) -> None:
        """Runs between the claims and the check of their epochs, which notices an end that is lowered in between."""
        with transaction(self._connection) as cur:
            now = ends(cur, self._backfill)
        found = membership.held.found
        membership.see(replace(found, ends={partition: min(now.get(partition, 0), log.end) for partition, log in found.logs.items()}))


class Drain(Bounded):
    """Reads what was due in the group's retry topics when the run started. The next run reads what comes due meanwhile.

    `retry.per_second` limits the rate of its batches: records that failed because a service was down must not bring it down again.
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
