"""How far a group is behind: its positions beside the ends of its topics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tidemark.offsets.ranges import TopicPartition
from tidemark.offsets.store import Position


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """``position`` is `None` for a partition that was never claimed; ``end`` is the last stable offset."""

    topic: str
    partition: int
    position: int | None
    end: int
    lag_records: int
    validated: int | None
    owner: str | None
    epoch: int | None
    committed_at: datetime | None


def lags(
    positions: Iterable[Position],
    uuids: Mapping[str, str],
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> list[PartitionLag]:
    """Each partition that the topics have now, ordered. ``uuids`` by topic: positions on an earlier incarnation do not count.

    Offsets that retention took are no lag: it counts from the log start where the position lies before it.
    """
    held = {position.partition: position for position in positions if uuids.get(position.partition.topic) == position.kafka_uuid}
    result = []
    for partition, end in sorted(ends.items()):
        position = held.get(partition)
        at = None if position is None else position.position
        behind = end - max(at if at is not None else 0, starts[partition])
        result.append(
            PartitionLag(
                partition.topic,
                partition.partition,
                at,
                end,
                max(behind, 0),
                None if position is None else position.validated,
                None if position is None else position.owner,
                None if position is None else position.epoch,
                None if position is None else position.committed_at,
            )
        )
    return result
