"""What a rewind is made of: a scenario says where to, a plan what that means, to the record. Both can be stored and shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tidemark.records.ranges import TopicPartition


@dataclass(frozen=True, slots=True)
class ToEarliest:
    """The first record that Kafka still has."""


@dataclass(frozen=True, slots=True)
class ToLatest:
    """Behind the last stable record."""


@dataclass(frozen=True, slots=True)
class ToCurrent:
    """Where the group is: nothing moves, but whoever reads is fenced and claims again."""


@dataclass(frozen=True, slots=True)
class ToOffset:
    offset: int


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """``offsets`` forward, or back if negative."""

    offsets: int


@dataclass(frozen=True, slots=True)
class ToDatetime:
    """The first record of this time or a later one; ``moment`` has a zone."""

    moment: datetime


@dataclass(frozen=True, slots=True)
class ByDuration:
    """As `ToDatetime`, this long before the plan is made, by the database's clock."""

    duration: timedelta


@dataclass(frozen=True, slots=True)
class FromFile:
    """What a file says of each partition; those that it does not name stay where they are."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class FromGroup:
    """Where another group of this database is, or, with ``kafka``, what a group has committed to Kafka."""

    group: str
    kafka: bool = False


@dataclass(frozen=True, slots=True)
class ToValidated:
    """Behind the last record that validation has passed without a gap."""


@dataclass(frozen=True, slots=True)
class ToBatch:
    """Just before a batch of the ledger (``batch_id``), or before all that an Airflow run has committed (``dag_id`` and ``run_id``)."""

    batch_id: int | None = None
    dag_id: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Undo:
    """As it was before another rewind, offsets and rows."""

    rewind_id: int


Scenario = (
    ToEarliest | ToLatest | ToCurrent | ToOffset | ShiftBy | ToDatetime | ByDuration | FromFile | FromGroup | ToValidated | ToBatch | Undo
)


class RewindState(StrEnum):
    PLANNED = "PLANNED"
    REJECTED = "REJECTED"
    APPLIED = "APPLIED"
    UNDONE = "UNDONE"


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What happens to one partition. Offsets and counts are those of the moment of planning until the rewind is applied, because a group
    that goes on reading makes them larger; from then on what it really was."""

    partition: TopicPartition
    topic_id: int
    old: int
    new: int
    sink_rows: int = 0
    failed_records: int = 0
    lost: tuple[int, int] | None = None
    """A range between the target and the start of the log that nobody can read any more."""
    superseded_from: int | None = None
    """What was made from this offset and those behind it is taken out."""
    backfill_left: int | None = None
    """Offsets of what is skipped that a backfill still has to read; `None`: there is none, or not yet."""
    rows_back: int = 0
    """Of an undo: rows that it puts back, which the undone rewind had taken out."""
    failed_back: int = 0
    """Likewise failed records."""

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
    table: str
    partitions: tuple[PartitionPlan, ...]
    lag: int
    """Offsets between the new positions and the stable ends."""
    records_per_s: float | None
    """What the group read in its last runs; `None`: it has not yet."""
    group_state: str
    """Kafka's name of the group's state."""
    in_flight: int
    """Attempts that are running."""
    told: tuple[str, ...]
    """Assets whose events named a part of what is superseded."""

    @property
    def catch_up_s(self) -> float | None:
        return self.lag / self.records_per_s if self.records_per_s else None


@dataclass(frozen=True, slots=True)
class Plan:
    """A stored plan. ``digest`` is made of the state that it was computed from; see `tidemark.rewind.plan`."""

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
    """What is skipped is to be read later, by a run of its own (`tidemark.rewind.backfill`)."""

    def __iter__(self) -> Iterator[tuple[GroupPlan, PartitionPlan]]:
        for group in self.groups:
            for partition in group.partitions:
                yield group, partition
