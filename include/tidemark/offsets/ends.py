"""Positions compared with the ends of their topics, as Kafka says them now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tidemark.offsets.reset import LogTruncated
from tidemark.offsets.store import Position
from tidemark.records.ranges import Log, TopicPartition


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """``position`` and ``lag_records`` are `None` for a partition that was never claimed; ``end`` is the last stable offset.

    ``truncated``: the records that were read up to the position are no longer in the log. How much there is to read instead is unknown.
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


def truncations(
    positions: Iterable[Position], uuids: Mapping[str, str], logs: Mapping[TopicPartition, Log], ask: Truncated
) -> dict[TopicPartition, LogTruncated]:
    """Positions that are no longer in their log, each with the error that a run would raise. Look up ``logs`` after the positions.

    ``ask`` is called for positions whose log has elected a new leader since they were stored.
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
) -> list[PartitionEnd]:
    """Every current partition of the topics, ordered. ``uuids`` are by topic: positions in an earlier incarnation do not count.

    Offsets that retention removed do not count as lag: if the position is before the log start, lag counts from the log start.
    """
    held = _held(positions, uuids, logs)
    cut = set(truncated)
    result = []
    for partition, log in sorted(logs.items()):
        position = held.get(partition)
        at = None if position is None else position.position
        behind = None if at is None or partition in cut else max(0, log.end - max(at, log.start))
        result.append(
            PartitionEnd(
                partition.topic,
                partition.partition,
                at,
                log.end,
                behind,
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
