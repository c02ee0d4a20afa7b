"""Compares positions with Kafka's current end offsets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tidemark.offsets.reset import LogTruncated
from tidemark.offsets.store import Position
from tidemark.records.ranges import Log, TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """``position`` and ``lag_records`` are `None` for a partition that was never claimed; ``end`` is the last stable offset.

    ``truncated``: the log was truncated below the position, so the lag is unknown.
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
"""The signature of `tidemark.kafka.truncation.truncated`."""


def current(positions: Iterable[Position], uuids: Mapping[str, str], logs: Mapping[TopicPartition, Log]) -> dict[TopicPartition, Position]:
    """Returns the positions in these logs. ``uuids`` are by topic: positions in an earlier incarnation do not count."""
    return {
        position.partition: position
        for position in positions
        if uuids.get(position.partition.topic) == position.kafka_uuid and position.partition in logs
    }


def truncations(
    held: Mapping[TopicPartition, Position], logs: Mapping[TopicPartition, Log], look_up: Truncated
) -> dict[TopicPartition, LogTruncated]:
    """Returns the `current` positions that are no longer in their log, with the error that a run would raise. Read ``logs`` after them.

    ``look_up`` is called for positions whose log has elected a new leader since.
    """
    in_doubt = {
        partition: (position.position, position.leader_epoch)
        for partition, position in held.items()
        if position.leader_epoch is not None and position.leader_epoch != logs[partition].leader_epoch
    }
    truncated_at = look_up(in_doubt)
    errors = {}
    for partition, position in held.items():
        offset = position.position
        if partition in truncated_at:
            errors[partition] = LogTruncated(
                partition=partition, position=offset, leader_epoch=position.leader_epoch, end=truncated_at[partition]
            )
        elif offset > logs[partition].end:
            errors[partition] = LogTruncated(partition=partition, position=offset, leader_epoch=None, end=logs[partition].end)
    return errors


def lags(
    held: Mapping[TopicPartition, Position], logs: Mapping[TopicPartition, Log], truncated: Collection[TopicPartition]
) -> list[PartitionEnd]:
    """Returns the lag of each partition, in order, with its `current` position.

    Offsets that retention removed do not count as lag: if the position is before the log start, lag counts from the log start.
    """
    result = []
    for partition, log in sorted(logs.items()):
        position = held.get(partition)
        offset = None if position is None else position.position
        lag_records = None if offset is None or partition in truncated else max(0, log.end - max(offset, log.start))
        result.append(
            PartitionEnd(
                partition.topic,
                partition.partition,
                offset,
                log.end,
                lag_records,
                None if position is None else position.validated,
                None if position is None else position.owner,
                None if position is None else position.epoch,
                None if position is None else position.committed_at,
                partition in truncated,
            )
        )
    return result
