"""How far a run reads and when it ends, for each kind of run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemark.consume.claims import LookUp
from tidemark.consume.lookup import look, look_due, look_side
from tidemark.db import transaction
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.rewind import backfill, beside
from tidemark.rewind.backfill import Backfill
from tidemark.rewind.beside import SideReplay
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.consume.membership import Membership
    from tidemark.db import Connection

LOOK_EVERY_S = 5.0
"""How often a continuous run looks for new topics and partitions. It looks for new records before each batch."""
HANDOVER_S = 60.0
"""How long a continuous run reads on after its time is up, while Airflow starts the next run and its Spark."""

PATIENCE_S = 30.0


class Extent:
    """Reads up to the end offsets seen when the run started. The other kinds of runs replace what differs."""

    wait_s = 1.0
    """How long a run with nothing to read waits between two polls."""

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        self._cluster, self._spec = cluster, spec
        self._lookup: LookUp | None = None

    def begin(self) -> LookUp:
        """The look-up at the start of the run. Looks only on the first call."""
        if self._lookup is None:
            self._lookup = look(self._cluster, self._spec)
        return self._lookup

    def refresh(self, membership: Membership) -> None:
        """Updates the membership with the current look-up, if the ends may change."""

    def over(self, membership: Membership, *, drained: bool) -> bool:
        """Whether the run is over. ``drained``: it has read everything that it may read."""
        return drained and membership.settled


class Continuous(Extent):
    """Reads whatever arrives until its time is up, then until the next run takes over or `HANDOVER_S` has passed."""

    wait_s = 0.05

    def __init__(self, cluster: Cluster, spec: ConsumerSpec) -> None:
        super().__init__(cluster, spec)
        now = time.monotonic()
        self._ends_at = now + spec.run_for.total_seconds() + HANDOVER_S
        self._looked_at = self._answered_at = now

    def begin(self) -> LookUp:
        return look(self._cluster, self._spec)

    def refresh(self, membership: Membership) -> None:
        """Raises `BrokerUnavailable` after `PATIENCE_S` without an answer: a topic being created or deleted is not an outage."""
        now = time.monotonic()
        try:
            lookup = self._look(membership.claimed.lookup, now)
        except BrokerUnavailable:
            if now - self._answered_at > PATIENCE_S:
                raise
            self._looked_at = now - LOOK_EVERY_S  # look for topics next time: they may have changed
            return
        self._answered_at = now
        membership.update(lookup)

    def _look(self, previous: LookUp, now: float) -> LookUp:
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            return look(self._cluster, self._spec)
        logs = self._cluster.logs(previous.logs, previous=previous.logs)
        return LookUp(previous.topics, logs, {partition: log.end for partition, log in logs.items()})

    def over(self, membership: Membership, *, drained: bool) -> bool:
        return time.monotonic() >= self._ends_at


class Side(Extent):
    """Reads for a side group. A backfill reads the records that a rewind skipped, up to the positions to which later rewinds have moved
    the group back. A replay beside reads up to its group's positions, and follows them while the group reads on."""

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, side: Backfill | SideReplay) -> None:
        super().__init__(cluster, spec)
        self._connection, self._side = connection, side

    def begin(self) -> LookUp:
        return look_side(self._cluster, self._side)

    def refresh(self, membership: Membership) -> None:
        """Runs between the claims and the check of their epochs, which detects an end lowered in between."""
        side = self._side
        with transaction(self._connection) as cur:
            current_ends = backfill.ends(cur, side) if isinstance(side, Backfill) else beside.ends(cur, side)
        lookup = membership.claimed.lookup
        ends = {partition: min(current_ends.get(partition, 0), log.end) for partition, log in lookup.logs.items()}
        membership.update(replace(lookup, ends=ends))


class Drain(Extent):
    """Reads the records due in the group's retry topics when the run started. The next run reads those that come due meanwhile.

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
        now, remaining = time.monotonic(), membership.claimed.remaining
        began, first = self._began = self._began or (now, remaining)
        if remaining:
            membership.poll(max(0.0, began + (first - remaining) / self._spec.retry.per_second - now))
