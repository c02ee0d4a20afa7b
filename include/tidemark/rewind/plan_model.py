"""Values of a rewind. A scenario names the target, by Kafka's name or ours; a plan has the resulting move of each partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar

from tidemark.records.ranges import TopicPartition


@dataclass(frozen=True, slots=True)
class ToEarliest:
    """To the first record that Kafka still has."""

    name: ClassVar = "to-earliest"


@dataclass(frozen=True, slots=True)
class ToLatest:
    """To the last stable offset."""

    name: ClassVar = "to-latest"


@dataclass(frozen=True, slots=True)
class ToCurrent:
    """Stays at the current position: nothing moves, but running attempts are fenced and claim again."""

    name: ClassVar = "to-current"


@dataclass(frozen=True, slots=True)
class ToOffset:
    name: ClassVar = "to-offset"
    offset: int


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """By this many offsets forward, or back if negative."""

    name: ClassVar = "shift-by"
    offsets: int


@dataclass(frozen=True, slots=True)
class ToDatetime:
    """To the first record at or after this time; ``moment`` has a time zone."""

    name: ClassVar = "to-datetime"
    moment: datetime


@dataclass(frozen=True, slots=True)
class ByDuration:
    """To the first record within this time before planning, by the database's clock."""

    name: ClassVar = "by-duration"
    duration: timedelta


@dataclass(frozen=True, slots=True)
class FromFile:
    """To the offsets in a file; partitions that are not in it stay where they are."""

    name: ClassVar = "from-file"
    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class FromGroup:
    """To the positions of another group of this database or, with ``kafka``, to the offsets that a group has committed to Kafka."""

    name: ClassVar = "from-group"
    group: str
    kafka: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """Starts a consumer without positions at the offsets that a group has committed to Kafka; see `tidemark.rewind.adopt`."""

    name: ClassVar = "adopt"
    group: str


@dataclass(frozen=True, slots=True)
class ToValidated:
    """To the end of the validated rows."""

    name: ClassVar = "to-validated"


@dataclass(frozen=True, slots=True)
class ToBatch:
    """To the start of a batch (``batch_id``), or of all batches of an Airflow run (``dag_id`` and ``run_id``)."""

    name: ClassVar = "to-batch"
    batch_id: int | None = None
    dag_id: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Undo:
    """Restores offsets and rows as they were before another rewind."""

    name: ClassVar = "undo"
    rewind_id: int


Scenario = (
    ToEarliest
    | ToLatest
    | ToCurrent
    | ToOffset
    | ShiftBy
    | ToDatetime
    | ByDuration
    | FromFile
    | FromGroup
    | Adopt
    | ToValidated
    | ToBatch
    | Undo
)


class RewindState(StrEnum):
    PLANNED = "PLANNED"
    REJECTED = "REJECTED"
    BESIDE = "BESIDE"
    DISCARDED = "DISCARDED"
    APPLIED = "APPLIED"
    UNDONE = "UNDONE"


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The planned move of one partition. Until the rewind is applied, offsets and counts are from planning and grow as the group reads on;
    afterwards they are the actual ones."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    """The topic's UUID at planning."""
    old: int
    target: int
    """What the scenario resolved to."""
    new: int
    """Greater than the target only if the log starts after it."""
    superseded_from: int
    """Rows, failed records and batches from this offset on are taken out."""
    hold: bool = False
    """Whether the partition stays wherever the group is when the plan is applied."""
    sink_rows: int = 0
    failed_records: int = 0
    backfill_left: int | None = None
    """Skipped offsets that a backfill still has to read; `None` if there is no backfill (yet)."""
    rows_back: int = 0
    """Undo only: rows that it restores."""
    failed_back: int = 0
    """Undo only: failed records that it restores."""

    @property
    def lost(self) -> tuple[int, int] | None:
        """The range between the target and the start of the log, which can no longer be read."""
        return (self.target, self.new) if not self.hold and self.new > self.target else None

    @property
    def replay(self) -> int:
        """Offsets that will be read again."""
        return max(0, self.old - self.new)

    @property
    def skip(self) -> int:
        """Offsets that will not be read."""
        return max(0, self.new - self.old)

    @property
    def can_be_backfilled(self) -> bool:
        """Whether the move skips records that Kafka has."""
        return self.new == self.target > self.old


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The planned moves of one consumer group."""

    consumer: str
    group: str
    group_id: int
    tables: tuple[str, ...]
    partitions: tuple[PartitionPlan, ...]
    lag: int
    """Offsets between the new positions and the stable ends."""
    records_per_s: float | None
    """How fast its runs can read: the fastest of its recent runs; `None` if none has read yet."""
    group_state: str
    """The group's state, by Kafka's name."""
    in_flight: int
    """Number of running attempts."""
    announced_assets: tuple[str, ...]
    """Assets whose events announced superseded rows."""
    basis: Mapping[str, Any] = field(hash=False)
    """The state whose change makes the plan stale; see `tidemark.rewind.plan.basis_of`."""
    shadow_bytes: int | None = None
    """About how much space the shadows of a rewind beside take."""

    @property
    def table(self) -> str:
        """Table names for display."""
        return ", ".join(self.tables)

    @property
    def catch_up_s(self) -> float | None:
        return self.lag / self.records_per_s if self.records_per_s else None


@dataclass(frozen=True, slots=True)
class Plan:
    """A stored plan. ``digest`` is a hash of the moves and the state from which they were computed; see `tidemark.rewind.plan`."""

    rewind_id: int
    state: RewindState
    scenario: Scenario
    reason: str
    planned_by: str
    planned_at: datetime
    expires_at: datetime
    allow_loss: bool
    digest: str
    groups: tuple[GroupPlan, ...]
    undo_of: int | None = None
    decided_by: str | None = None
    """Who approved or rejected the plan."""
    decided_at: datetime | None = None
    applied_by: str | None = None
    applied_at: datetime | None = None
    dag_id: str | None = None
    run_id: str | None = None
    backfill: bool = False
    """Whether a separate run reads the skipped records later (`tidemark.rewind.backfill`)."""
    beside: bool = False
    """Whether the records are first read beside the live rows (`tidemark.rewind.beside`)."""
    transform: str | None = None
    """A rehearsal's transform, which its replay reads with instead of the consumer's."""
    started_by: str | None = None
    """Who began the replay beside."""
    started_at: datetime | None = None

    def __iter__(self) -> Iterator[tuple[GroupPlan, PartitionPlan]]:
        for group in self.groups:
            for partition in group.partitions:
                yield group, partition
