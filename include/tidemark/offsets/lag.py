"""How far a group is behind: its positions beside the ends of its topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tidemark.offsets.reset import LogTruncated
from tidemark.offsets.store import Position
from tidemark.records.ranges import Log, TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """``position`` is `None` for a partition that was never claimed; ``end`` is the last stable offset.

    ``truncated``: what was read up to the position is not in the log any more. How much there is to read instead is unknown.
    """

    topic: str
    partition: int
    position: int | None
    end: int
    lag_records: int | None
    validated: int | None
    owner: str | None
    epoch: int | None
    committed_at: datetime | None
    truncated: bool


Truncated = Callable[[Mapping[TopicPartition, tuple[int, int]]], dict[TopicPartition, int | None]]
"""As `tidemark.kafka.history.truncated`."""


def truncations(
    positions: Iterable[Position], uuids: Mapping[str, str], logs: Mapping[TopicPartition, Log], ask: Truncated
) -> dict[TopicPartition, LogTruncated]:
    """Positions that are not in their log any more, with the error that a run has for each. ``logs`` were looked at after the positions.

    ``ask`` is called for those whose log has elected a leader since they were stored.
    """
    held = _held(positions, uuids, logs)
    doubtful = {
        partition: (position.position, position.leader_epoch)
        for partition, position in held.items()
        if position.leader_epoch is not None and position.leader_epoch != logs[partition].leader_epoch
    }
    cut = ask(doubtful)
    found = {}
    for partition, position in held.items():
        at = position.position
        if partition in cut:
            found[partition] = LogTruncated(partition=partition, position=at, leader_epoch=position.leader_epoch, end=cut[partition])
        elif at > logs[partition].end:
            found[partition] = LogTruncated(partition=partition, position=at, leader_epoch=None, end=logs[partition].end)
    return found


def lags(
    positions: Iterable[Position],
    uuids: Mapping[str, str],
    logs: Mapping[TopicPartition, Log],
    truncated: Iterable[TopicPartition],
) -> list[PartitionLag]:
    """Each partition that the topics have now, ordered. ``uuids`` by topic: positions on an earlier incarnation do not count.

    Offsets that retention took are no lag: it counts from the log start where the position lies before it.
    """
    held = _held(positions, uuids, logs)
    cut = set(truncated)
    result = []
    for partition, log in sorted(logs.items()):
        position = held.get(partition)
        at = None if position is None else position.position
        behind = log.end - max(at if at is not None else 0, log.start)
        result.append(
            PartitionLag(
                partition.topic,
                partition.partition,
                at,
                log.end,
                None if partition in cut else max(behind, 0),
                None if position is None else position.validated,
                None if position is None else position.owner,
                None if position is None else position.epoch,
                None if position is None else position.committed_at,
                partition in cut,
            )
        )
    return result


def _held(positions: Iterable[Position], uuids: Mapping[str, str], logs: Mapping[TopicPartition, Log]) -> dict[TopicPartition, Position]:
    return {
        position.partition: position
        for position in positions
        if uuids.get(position.partition.topic) == position.kafka_uuid and position.partition in logs
    }
