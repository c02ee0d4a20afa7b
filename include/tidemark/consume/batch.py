"""The `Engine` protocol, and how a run executes a batch with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tidemark.connections import Connections
from tidemark.consume.claims import ClaimedPartitions
from tidemark.errors import Broken, TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.records.ranges import Slice
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.load import SinkRejected
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.worker.batches import payloads

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Reads, transforms and commits slices. Created once a run has something to read; used by one thread."""

    def warm_up(self, sample: Sequence[Slice]) -> None:
        """Pays the start-up cost before the first batch. May read ``sample``; commits nothing."""

    def layouts(self, connection: Connection) -> tuple[Layout, ...]:
        """How the transform's output maps to the sinks. Raises `SinkMismatch` before anything is read."""

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        """Commits the slices and returns the outcome of each. A slice whose transform returned no rows may be missing.

        ``isolate`` is passed to `commit_slice`: slices whose rows were refused run a second time with it.
        """

    def cancel(self) -> None:
        """Makes the `run` in progress in another thread raise soon. Its tasks may still commit."""

    def stop(self) -> None:
        """Stops everything that was started."""


Start = Callable[[int | None, str | None], Engine]
"""Creates the engine of a run that has this many offsets to read (`None`: unknown), with this transform (`None`: the consumer's)."""


class SplitPartition(Broken):
    """Two tasks returned a receipt for the same slice."""

    part: Slice

    def __str__(self) -> str:
        return f"Two tasks committed {self.part}. Keep the rows of a Kafka partition in one Spark task."


def run_batch(engine: Engine, target: Target, connections: Connections, slices: Sequence[Slice]) -> list[Receipt]:
    """Runs one batch. Commits and returns a receipt also for each empty slice (everything filtered out, or only transaction markers)."""
    receipts: dict[Slice, Receipt] = {}
    for receipt in _run_engine(engine, target, slices):
        if receipt.part in receipts:
            raise SplitPartition(part=receipt.part)
        receipts[receipt.part] = receipt
    for part in slices:
        if part not in receipts:
            receipts[part] = commit_slice(target, part, iter(()), partial(payloads, connections.kafka))
    return [receipts[part] for part in slices]


def _run_engine(engine: Engine, target: Target, slices: Sequence[Slice]) -> list[Receipt]:
    """The engine's receipts. Slices with refused rows run again with ``isolate``. Raises the most important error."""
    outcomes = engine.run(target, slices, isolate=False)
    refused = [outcome for outcome in outcomes if isinstance(outcome, SinkRejected) and outcome.of_rows]
    errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if refused and not errors:
        for error in refused:
            log.warning("rows were refused, isolating their records slice=%s error=%s text=%s", error.part, error.error_type, error)
        outcomes += engine.run(target, [error.part for error in refused], isolate=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if errors:
        raise min(errors, key=lambda error: error.retriable)  # errors that a retry cannot fix come first
    return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]


def require_same_topics(cluster: Cluster, claimed: ClaimedPartitions, slices: Sequence[Slice]) -> None:
    """Raises `TopicRecreated` or `TopicsMissing` if a topic was replaced since the look-up: its offsets would mean other records."""
    uuids = {topic.name: topic.kafka_uuid for topic in claimed.lookup.topics}
    for topic in cluster.topics(sorted({part.partition.topic for part in slices})):
        if uuids[topic.name] != topic.kafka_uuid:
            raise claimed.recreated_error(topic.name)
