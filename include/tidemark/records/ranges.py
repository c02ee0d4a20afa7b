"""The half-open ranges of offsets that a batch reads, as pure values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NewType

Generation = NewType("Generation", int)
"""A number that only one owner ever has; newer owners have greater ones."""
Epoch = NewType("Epoch", int)
"""A partition's fencing token: a commit must present the epoch in the partition's row."""

RECORDS_A_TASK = 100_000
"""The records that are worth a separate Spark task and transaction: 64 tasks of 20,000 records cost 30 % more than 8 large ones."""


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Log:
    """A partition's log in Kafka: offsets ``[start, end)``, where ``end`` is the last stable offset.

    ``leader_epoch`` is Kafka's: it rises with each leader election. All records below ``end`` were written in this epoch or an earlier
    one. If the log is truncated and grows again, its new records have later epochs (KIP-320). `None`: unknown.
    """

    partition: TopicPartition
    start: int
    end: int
    leader_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """An owner's claim to a partition: the next offset to read, and the epoch that a commit must present."""

    partition: TopicPartition
    topic_id: int
    position: int
    epoch: Epoch
    drained: bool = False
    """Whether the partition belongs to a retry topic, whose records come from other partitions and are tried again."""
    leader_epoch: int | None = None
    """Kafka's leader epoch in which the log reached the position; see `Log`. `None`: unknown."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a partition that one task reads and one transaction commits: offsets ``[start, end)``."""

    partition: TopicPartition
    topic_id: int
    start: int
    end: int
    epoch: Epoch
    drained: bool = False
    """See `Claim`."""
    leader_epoch: int | None = None
    """Kafka's leader epoch in which the log reached ``end``; see `Log`. `None`: unknown."""

    def __post_init__(self) -> None:
        if self.end <= self.start:
            raise ValueError(f"{self.partition}: [{self.start}, {self.end}) is empty")

    @property
    def span(self) -> int:
        """Offsets in the range; records may be fewer (compaction, transaction markers)."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.partition} [{self.start}, {self.end})"


def plan_batch(claims: Iterable[Claim], ends: dict[TopicPartition, int], max_records: int) -> list[Slice]:
    """Returns the slices of the next batch, ordered by partition; empty if every position has reached its end.

    At most ``max_records`` offsets in total, one slice per partition. If there is more to read, the partitions with the largest backlogs
    share the batch evenly, as many as can get `RECORDS_A_TASK` each. All partitions of retry topics get a share, so that a backlog of one
    delay does not hold up the others.
    """
    backlog = {claim: ends[claim.partition] - claim.position for claim in claims if ends.get(claim.partition, 0) > claim.position}
    chosen = sorted(backlog, key=lambda claim: (-backlog[claim], claim.partition))
    if sum(backlog.values()) > max_records:
        needs = list(accumulate(0 if claim.drained else min(backlog[claim], RECORDS_A_TASK) for claim in chosen))
        chosen = chosen[: max(1, sum(total <= max_records for total in needs))]
    slices = []
    budget = max_records
    for left, claim in zip(range(len(chosen), 0, -1), reversed(chosen), strict=True):  # smallest first: the others share the rest
        size = min(backlog[claim], budget // left)
        budget -= size
        if size:
            slices.append(Slice(claim.partition, claim.topic_id, claim.position, claim.position + size, claim.epoch, claim.drained))
    return sorted(slices, key=lambda part: part.partition)
