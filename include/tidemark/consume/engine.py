"""What turns a batch of slices into committed slices, and what a run makes of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemark.connections import Connections
from tidemark.consume.claims import Holding
from tidemark.consume.messages import payloads
from tidemark.errors import Broken, TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.records.ranges import Slice
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.load import SinkRejected
from tidemark.sink.table import Layout
from tidemark.sink.target import Target

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Turns slices into committed slices. Made once a run has something to read; used by one thread."""

    def warm_up(self, sample: Sequence[Slice]) -> None:
        """Spends beforehand what the first batch would have to. May read ``sample``; commits nothing."""

    def layout(self, connection: Connection) -> Layout:
        """How the transform's output goes into the sink. Raises `SinkMismatch` before anything is read."""

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        """Commits the slices, and says for each what became of it; one whose transform gave no row at all may be missing.

        ``isolate`` is `commit_slice`'s: slices that were refused for their rows come a second time with it.
        """

    def cancel(self) -> None:
        """Has the `run` that is under way in another thread raise soon; what its tasks still commit, they may."""

    def stop(self) -> None:
        """Ends what was started."""


Start = Callable[[int | None], Engine]
"""Makes the engine of a run that has this many offsets to read; `None`: unknown."""


@dataclass(kw_only=True, eq=False)
class SplitPartition(Broken):
    """Two tasks answered for the same slice."""

    part: Slice

    def __str__(self) -> str:
        return f"{self.part} came from two tasks: rows of one Kafka partition must stay in one Spark task."


def run_batch(engine: Engine, target: Target, connections: Connections, slices: Sequence[Slice]) -> list[Receipt]:
    """One batch: the engine's receipts, and one for each slice that came out empty (all filtered away, or transaction markers only)."""
    receipts: dict[Slice, Receipt] = {}
    for receipt in _committed(engine, target, slices):
        if receipt.part in receipts:
            raise SplitPartition(part=receipt.part)
        receipts[receipt.part] = receipt
    for part in slices:
        if part not in receipts:
            receipts[part] = commit_slice(target, part, iter(()), lambda part, offsets: payloads(connections.kafka, part, offsets))
    return [receipts[part] for part in slices]


def _committed(engine: Engine, target: Target, slices: Sequence[Slice]) -> list[Receipt]:
    """The engine's receipts. Slices in which rows were refused are tried again with care. Raises the error that matters most."""
    outcomes = engine.run(target, slices, isolate=False)
    refused = [outcome for outcome in outcomes if isinstance(outcome, SinkRejected) and outcome.of_rows]
    errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if refused and not errors:
        for error in refused:
            log.warning("rows were refused, looking for the records slice=%s error=%s text=%s", error.part, error.error_type, error)
        outcomes += engine.run(target, [error.part for error in refused], isolate=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if errors:
        raise min(errors, key=lambda error: error.retriable)  # what another try cannot fix comes first
    return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]


def require_same_topics(cluster: Cluster, held: Holding, slices: Sequence[Slice]) -> None:
    """Raises `TopicRecreated` or `TopicsMissing` if a topic is not the one any more that was looked at: offsets would mean others."""
    begun = {topic.name: topic.kafka_uuid for topic in held.found.topics}
    for topic in cluster.topics(sorted({part.partition.topic for part in slices})):
        if begun[topic.name] != topic.kafka_uuid:
            raise held.recreated(topic.name)
