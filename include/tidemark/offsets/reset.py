"""Where a partition starts, and what to do when its position is not in the log any more. Values in, values out (I5)."""

from __future__ import annotations

from dataclasses import dataclass

from tidemark.errors import Refused
from tidemark.offsets.store import LostReason
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec.model import OffsetReset


@dataclass(frozen=True, slots=True)
class Jump:
    """A move over records that nobody will read: ``lost`` is the range ``[start, end)`` to be stored, if it holds any."""

    to: int
    lost: tuple[int, int] | None
    reason: LostReason


@dataclass(kw_only=True, eq=False)
class NoPosition(Refused):
    """A partition has no position, and the spec says not to choose one."""

    partition: TopicPartition

    def __str__(self) -> str:
        return (
            f"{self.partition} has no position yet, and offset_reset is none. Write offset_reset: earliest (or latest) for the first run."
        )


@dataclass(kw_only=True, eq=False)
class OffsetOutOfRange(Refused):
    """The position is not in the log; going on would lose or double records."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    partition: TopicPartition
    position: int
    start: int
    end: int

    def __str__(self) -> str:
        return (
            f"{self.partition}: records {self.position} to {self.start - 1} are gone, retention took them before they were read. Nothing "
            "was read; to go on, write offset_reset: earliest (or latest): what is skipped is then stored as a lost_range row."
        )


@dataclass(kw_only=True, eq=False)
class LogTruncated(Refused):
    """The log was truncated below the position: what it holds there now, or will hold, is not what was loaded.

    ``leader_epoch``: in which the position was read; ``end``: where the log of that epoch, or at all, ends now. `None`: unknown.
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
            left = "The log has no such epoch any more, so it is another one"
        elif self.leader_epoch is None:
            left = f"The log ends at {self.end}; what was read is left up to there, or less of it"
        else:
            left = f"What was read is left up to {self.end}"
        said = f"{self.partition}: the log was truncated below the position {self.position}{epoch}. {left}. Nothing was read."
        if self.drained:
            return (
                f"{said} Delete the retry topic {self.partition.topic}: the records that wait in it are kept in Postgres and are published "
                "again to a new one."
            )
        to = "OFFSET" if self.end is None else str(self.end)
        return (
            f"{said} To take the rows of the lost records out and read on from there: `tidemark rewind plan NAME --to-offset {to} --topic "
            f"{self.partition.topic}:{self.partition.partition} --reason ...`."
        )


@dataclass(kw_only=True, eq=False)
class TopicRecreated(Refused):
    """The topic was deleted and created again; what the old one still held cannot be read."""

    topic: str
    positions: dict[int, int]

    def __str__(self) -> str:
        read = ", ".join(f"{number}: {position}" for number, position in sorted(self.positions.items()))
        return (
            f"Topic {self.topic} was deleted and created again since it was read (positions in the old one: {read}). Nothing was read; to "
            "go on with the new one, write offset_reset: earliest (or latest): the old one's rest is then stored as lost_range rows."
        )


def first_position(log: Log, reset: OffsetReset | None, *, topic_known: bool) -> int:
    """Where a partition without a position starts.

    A partition that was added to a topic the group already reads starts at its first record also under ``latest``: what was produced
    to it before anyone noticed is not skipped. Raises `NoPosition`.
    """
    if reset is OffsetReset.NONE:
        raise NoPosition(partition=log.partition)
    return log.end if reset is OffsetReset.LATEST and not topic_known else log.start


def check_position(log: Log, position: int, reset: OffsetReset | None) -> Jump | None:
    """`None` if reading can go on at ``position``, else where the spec allows to jump. Raises `OffsetOutOfRange` or `LogTruncated`."""
    if log.start <= position <= log.end:
        return None
    if position > log.end:
        raise LogTruncated(partition=log.partition, position=position, leader_epoch=None, end=log.end)
    if reset in (None, OffsetReset.NONE):
        raise OffsetOutOfRange(partition=log.partition, position=position, start=log.start, end=log.end)
    if reset is OffsetReset.LATEST:
        return Jump(log.end, (position, log.end), "reset to latest")
    return Jump(log.start, (position, log.start), "retention")
