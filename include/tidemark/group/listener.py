"""Rebalance listeners, which a member calls when its partitions change, like Kafka's ``ConsumerRebalanceListener``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tidemark.records.ranges import TopicPartition

log = logging.getLogger(__name__)

Partitions = Sequence[TopicPartition]
"""Ordered by topic and number."""


class RebalanceListener:
    """Called in the polling thread, never while a batch is being read.

    - ``on_partitions_revoked``: the member still owns the partitions and gives them up when this returns. With an eager assignor these are
      all its partitions, before every rebalance; with a cooperative one, those that move to another member. The callback must return
      within the rebalance timeout, which starts when the group starts to rebalance.
    - ``on_partitions_assigned``: the member owns the partitions from now on. With a cooperative assignor only the new ones, possibly none.
    - ``on_partitions_lost``: another member owns the partitions already, or soon will; nothing can be committed for them any more.

    If one listener raises, the others are still called. Then ``poll`` raises the error, which ends the run.
    """

    def on_partitions_assigned(self, partitions: Partitions) -> None: ...

    def on_partitions_revoked(self, partitions: Partitions) -> None: ...

    def on_partitions_lost(self, partitions: Partitions) -> None:
        """Calls `on_partitions_revoked` unless overridden."""
        self.on_partitions_revoked(partitions)


class Listeners:
    """Several listeners as one. Tidemark's own comes first in the list: it claims a partition before the others learn that it was assigned,
    and releases it after they have learned that it was revoked."""

    def __init__(self, listeners: Sequence[RebalanceListener]) -> None:
        self._listeners = list(listeners)

    def assigned(self, partitions: Partitions) -> None:
        _call_all([listener.on_partitions_assigned for listener in self._listeners], partitions)

    def revoked(self, partitions: Partitions) -> None:
        _call_all([listener.on_partitions_revoked for listener in reversed(self._listeners)], partitions)

    def lost(self, partitions: Partitions) -> None:
        _call_all([listener.on_partitions_lost for listener in reversed(self._listeners)], partitions)


def _call_all(callbacks: Sequence[Callable[[Partitions], None]], partitions: Partitions) -> None:
    """Makes all calls, then raises the first error."""
    first: Exception | None = None
    for callback in callbacks:
        try:
            callback(partitions)
        except Exception as error:
            if first is None:
                first = error
            else:
                log.exception("another rebalance listener failed too")
    if first is not None:
        raise first
