"""What a member is told when its partitions change: Kafka's ``ConsumerRebalanceListener``, and how several are called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tidemark.records.ranges import TopicPartition

log = logging.getLogger(__name__)

Partitions = Sequence[TopicPartition]
"""In order of topic and number."""


class RebalanceListener:
    """Called in the thread that polls, never while a batch is being read.

    - ``on_partitions_revoked``: they are still the member's, and go when this returns. Under an eager assignor all of them, before every
      rebalance; under a cooperative one those that go to another member. It has until the rebalance timeout, counted from when the
      group began.
    - ``on_partitions_assigned``: they are the member's from now on; under a cooperative assignor the new ones only, perhaps none.
    - ``on_partitions_lost``: they are somebody else's already, or will be; nothing can be committed for them any more.

    What one raises does not keep the others from being called. It is raised by ``poll`` when all have been, and ends the run.
    """

    def on_partitions_assigned(self, partitions: Partitions) -> None: ...

    def on_partitions_revoked(self, partitions: Partitions) -> None: ...

    def on_partitions_lost(self, partitions: Partitions) -> None:
        """As revoked, unless said otherwise."""
        self.on_partitions_revoked(partitions)


class Listeners:
    """Several as one. Tidemark's own comes first in the list: a partition is claimed before others hear that it was assigned, and released
    after they have heard that it goes."""

    def __init__(self, listeners: Sequence[RebalanceListener]) -> None:
        self._listeners = list(listeners)

    def assigned(self, partitions: Partitions) -> None:
        _all([lambda one=one: one.on_partitions_assigned(partitions) for one in self._listeners])  # type: ignore[misc]

    def revoked(self, partitions: Partitions) -> None:
        _all([lambda one=one: one.on_partitions_revoked(partitions) for one in reversed(self._listeners)])  # type: ignore[misc]

    def lost(self, partitions: Partitions) -> None:
        _all([lambda one=one: one.on_partitions_lost(partitions) for one in reversed(self._listeners)])  # type: ignore[misc]


def _all(calls: Sequence[Callable[[], None]]) -> None:
    """Calls each; raises the first error when all have been called."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            if first is None:
                first = error
            else:
                log.exception("a rebalance listener failed after another one had")
    if first is not None:
        raise first
