"""The values of a rewind. A scenario says where to go; a plan says what that means, partition by partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tidemark.records.ranges import TopicPartition


@dataclass(frozen=True, slots=True)
class ToEarliest:
    """To the first record that Kafka still has."""


@dataclass(frozen=True, slots=True)
class ToLatest:
    """To the last stable offset."""


@dataclass(frozen=True, slots=True)
class ToCurrent:
    """Stay at the current position: nothing moves, but running attempts are fenced and claim again."""


@dataclass(frozen=True, slots=True)
class ToOffset:
    offset: int


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """By this many offsets forward, or back if negative."""

    offsets: int


@dataclass(frozen=True, slots=True)
class ToDatetime:
    """To the first record at or after this time; ``moment`` has a time zone."""

    moment: datetime


@dataclass(frozen=True, slots=True)
class ByDuration:
    """To the first record of this long before the plan is made, by the database's clock."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class FromFile:
    """To the offsets in a file; partitions that it does not name stay where they are."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class FromGroup:
    """To the positions of another group of this database or, with ``kafka``, to what a group has committed to Kafka."""

    group: str
    kafka: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """A consumer without positions starts at what a group has committed to Kafka; see `tidemark.rewind.adopt`."""

    group: str


@dataclass(frozen=True, slots=True)
class ToValidated:
    """After the last record up to which everything is validated."""


@dataclass(frozen=True, slots=True)
class ToBatch:
    """To the start of a batch (``batch_id``), or of everything that an Airflow run committed (``dag_id`` and ``run_id``)."""

    batch_id: int | None = None
    dag_id: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Undo:
    """Restore offsets and rows as they were before another rewind."""

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
    APPLIED = "APPLIED"
    UNDONE = "UNDONE"


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What happens to one partition. Until the rewind is applied, offsets and counts are those at planning, which grow as the group reads
    on; afterwards they are the actual ones."""

    partition: TopicPartition
    topic_id: int
    old: int
    new: int
    sink_rows: int = 0
    failed_records: int = 0
    lost: tuple[int, int] | None = None
    """The range between the target and the start of the log, which can no longer be read."""
    superseded_from: int | None = None
    """What was made from this offset on is taken out."""
    backfill_left: int | None = None
    """Skipped offsets that a backfill still has to read; `None` if there is no backfill (yet)."""
    rows_back: int = 0
    """Undo only: rows that it puts back, which the undone rewind took out."""
    failed_back: int = 0
    """Undo only: failed records that it puts back."""

    @property
    def replay(self) -> int:
        """Offsets that will be read again."""
        return max(0, self.old - self.new)

    @property
    def skip(self) -> int:
        """Offsets that will not be read."""
        return max(0, self.new - self.old)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What happens to one consumer group."""

    consumer: str
    group: str
    group_id: int
    tables: tuple[str, ...]
    partitions: tuple[PartitionPlan, ...]
    lag: int
    """Offsets between the new positions and the stable ends."""
    records_per_s: float | None
    """Read rate of the group's last runs; `None` if it has not read yet."""
    group_state: str
    """The group's state, by Kafka's name."""
    in_flight: int
    """Number of running attempts."""
    told: tuple[str, ...]
    """Assets whose events announced rows that are superseded."""

    @property
    def table(self) -> str:
        """The tables, for people."""
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
    """Who approved it, or rejected it."""
    decided_at: datetime | None = None
    applied_by: str | None = None
    applied_at: datetime | None = None
    dag_id: str | None = None
    run_id: str | None = None
    backfill: bool = False
    """A separate run reads later what is skipped (`tidemark.rewind.backfill`)."""

    def __iter__(self) -> Iterator[tuple[GroupPlan, PartitionPlan]]:
        for group in self.groups:
            for partition in group.partitions:
                yield group, partition
