"""Decides where a partition starts, and how it continues if its position is no longer in the log (I5). Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from tidemark.errors import Refused
from tidemark.offsets.store import LostReason
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec.model import OffsetReset


@dataclass(frozen=True, slots=True)
class Jump:
    """A move past records that will not be read: those from the position to ``to`` are lost."""

    to: int
    reason: LostReason


class NoPosition(Refused):
    """A partition has no position, and the spec does not allow choosing one."""

    partition: TopicPartition

    def __str__(self) -> str:
        return f"{self.partition} has no position yet, and offset_reset is none. Set offset_reset: earliest (or latest) for the first run."


class OffsetOutOfRange(Refused):
    """The position is not in the log; continuing would lose or duplicate records."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    partition: TopicPartition
    position: int
    start: int
    end: int

    def __str__(self) -> str:
        return (
            f"{self.partition}: records {self.position} to {self.start - 1} are gone: retention deleted them before they were read. "
            "Nothing was read. To continue, set offset_reset: earliest (or latest); the skipped range is then stored as a lost_range row."
        )


class LogTruncated(Refused):
    """The log was truncated below the position: its records there, now or later, differ from the loaded ones.

    ``leader_epoch``: the epoch in which the position was read, or `None`. ``end``: the log's end now, in that epoch if it is known;
    `None`: the log no longer has this epoch.
    """

    kafka_name = "OFFSET_OUT_OF_RANGE"
    partition: TopicPartition
    position: int
    leader_epoch: int | None
    end: int | None
    drained: bool = False

    def __str__(self) -> str:
        epoch = "" if self.leader_epoch is None else f", which was read in leader epoch {self.leader_epoch}"
        if self.end is None:
            remainder = "The log no longer has this epoch, so it is a different log"
        elif self.leader_epoch is None:
            remainder = f"The log ends at {self.end}; the records that were read remain up to there at most"
        else:
            remainder = f"The records that were read remain up to {self.end}"
        summary = f"{self.partition}: the log was truncated below the position {self.position}{epoch}. {remainder}. Nothing was read."
        if self.drained:
            return (
                f"{summary} Delete the retry topic {self.partition.topic}: its waiting records are kept in Postgres and will be published "
                "again to a new topic."
            )
        to = "OFFSET" if self.end is None else str(self.end)
        return (
            f"{summary} To remove the rows of the lost records and continue from there: `tidemark rewind plan NAME --to-offset {to} "
            f"--topic {self.partition.topic}:{self.partition.partition} --reason ...`."
        )


class TopicRecreated(Refused):
    """The topic was deleted and created again; unread records of the old topic are lost."""

    topic: str
    positions: dict[int, int]

    def __str__(self) -> str:
        offsets = ", ".join(f"{number}: {position}" for number, position in sorted(self.positions.items()))
        return (
            f"Topic {self.topic} was deleted and created again since it was read (positions in the old topic: {offsets}). Nothing was "
            "read. To continue with the new one, set offset_reset: earliest (or latest); the old one's rest is then stored as lost_range "
            "rows."
        )


def first_position(log: Log, reset: OffsetReset | None, *, topic_is_read: bool) -> int:
    """Returns where a partition without a position starts. Raises `NoPosition`.

    A partition that is added to a topic that the group already reads starts at its first record even under ``latest``, so that records
    produced before the group noticed it are not skipped.
    """
    if reset is OffsetReset.NONE:
        raise NoPosition(partition=log.partition)
    return log.end if reset is OffsetReset.LATEST and not topic_is_read else log.start


def check_position(log: Log, position: int, reset: OffsetReset | None) -> Jump | None:
    """Returns the jump that the spec allows if ``position`` is not in the log. Raises `OffsetOutOfRange` or `LogTruncated`."""
    if log.start <= position <= log.end:
        return None
    if position > log.end:
        raise LogTruncated(partition=log.partition, position=position, leader_epoch=None, end=log.end)
    if reset in (None, OffsetReset.NONE):
        raise OffsetOutOfRange(partition=log.partition, position=position, start=log.start, end=log.end)
    if reset is OffsetReset.LATEST:
        return Jump(log.end, "reset to latest")
    return Jump(log.start, "retention")
