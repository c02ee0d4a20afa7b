"""Resolves a scenario to a target for each partition: look-ups first, then pure computation (I5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tidemark.db import rows, scalar, statements
from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import (
    Adopt,
    ByDuration,
    FromFile,
    FromGroup,
    PartitionPlan,
    Scenario,
    ShiftBy,
    ToBatch,
    ToCurrent,
    ToDatetime,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToValidated,
)
from tidemark.text.wording import first_of

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "plan.sql")

SHOWN = 20
"""Maximum number of partitions that an error names; the others are only counted."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Place:
    """A group's partition at planning: its position, and its log ``[start, end)`` up to the last stable offset."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    position: int
    validated: int
    start: int
    end: int

    def moved(self, target: int, superseded_from: int | None = None) -> PartitionPlan:
        """Returns the move to a target; to the start of the log if the target is before it."""
        taken_from = min(target, self.position) if superseded_from is None else superseded_from
        return PartitionPlan(self.partition, self.topic_id, self.kafka_uuid, self.position, target, max(target, self.start), taken_from)

    def held(self) -> PartitionPlan:
        """Returns the plan to stay wherever the group is when it is applied."""
        offset = self.position
        return PartitionPlan(self.partition, self.topic_id, self.kafka_uuid, offset, offset, offset, offset, hold=True)

    def outside(self, target: int, *, allow_loss: bool) -> Outside | None:
        """Returns the error for a target outside the log; `None` if the partition can go there. ``allow_loss``: also to before the
        start."""
        if 0 <= target <= self.end and (target >= self.start or allow_loss):
            return None
        return Outside(self.partition, target, self.start, self.end)


@dataclass(frozen=True, slots=True)
class Outside:
    """A partition whose target is outside its log ``[start, end)``."""

    partition: TopicPartition
    target: int
    start: int
    end: int

    @property
    def before(self) -> bool:
        return self.target < self.start

    def __str__(self) -> str:
        where = "before the start" if self.before else "after the end"
        return f"{self.partition}: target {self.target} is {where} of the log [{self.start}, {self.end})"


class TargetsOutOfRange(Refused):
    """Targets outside their logs. Kafka's own tool would silently move them to the nearest end."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    outside: tuple[Outside, ...]

    def __str__(self) -> str:
        lines = [str(target) for target in self.outside[:SHOWN]]
        if len(self.outside) > SHOWN:
            lines.append(f"and {len(self.outside) - SHOWN} more")
        fixes = ["Name offsets within the log (to-earliest and to-latest are its ends)."]
        if any(target.before for target in self.outside):
            fixes.append(
                "With --allow-loss, targets before the start become the start. Rows of the records that are gone are taken "
                "out, and these records are stored as lost."
            )
        return "\n".join([*lines, "Nothing was planned. " + " ".join(fixes)])


def targets(
    cur: Cursor, cluster: Cluster, scenario: Scenario, group: str, group_id: int, places: Sequence[Place]
) -> dict[TopicPartition, int]:
    """Returns the target of each partition for which the scenario has one; the others stay and are not part of the plan.

    Only reads Postgres and Kafka; a time takes one request for all partitions. Raises `BadInput` if the scenario names a missing group,
    batch or run.
    """
    by_partition = {place.partition: place for place in places}
    match scenario:
        case ToDatetime(moment):
            return _at(cluster, by_partition, moment)
        case ByDuration(duration):
            cur.execute("SELECT clock_timestamp()")
            return _at(cluster, by_partition, scalar(cur) - duration)
        case FromFile(offsets):
            return {partition: offset for partition, offset in offsets.items() if partition in by_partition}
        case FromGroup(name, kafka):
            offsets = cluster.group_offsets(name, by_partition) if kafka else _group_positions(cur, name, by_partition)
            if not offsets:
                where = "has committed no offset to Kafka for" if kafka else "has no position on"
                raise BadInput(what="from-group", found=f"group {name} {where} any partition of {group}", fix="Name a group that has some.")
            return offsets
        case ToBatch():
            return _batch_starts(cur, scenario, group, group_id, by_partition)
    return {place.partition: _target(scenario, place) for place in places}


def _target(scenario: Scenario, place: Place) -> int:
    """Returns the target of a scenario that needs no look-up."""
    match scenario:
        case ToEarliest():
            return place.start
        case ToLatest():
            return place.end
        case ToCurrent() | Adopt():
            return place.position
        case ToOffset(offset):
            return offset
        case ShiftBy(offsets):
            return place.position + offsets
        case ToValidated():
            return place.validated
    raise AssertionError(f"{scenario} is resolved elsewhere")


def unread_partitions(scenario: Scenario, read: Iterable[TopicPartition]) -> list[str]:
    """Reports partitions in a file that none of the groups reads; empty for other scenarios. ``read``: partitions with a position."""
    if not isinstance(scenario, FromFile):
        return []
    unread = sorted(scenario.offsets.keys() - set(read))
    if not unread:
        return []
    shown = first_of(map(str, unread), SHOWN)
    return [f"The file has partitions that the group does not read: {shown}. Remove them, or plan for the consumer that reads them."]


def limited_to(scenario: Scenario, chosen: Collection[TopicPartition]) -> Scenario:
    """Returns the scenario, limited to the chosen partitions."""
    if isinstance(scenario, FromFile):
        return FromFile({partition: offset for partition, offset in scenario.offsets.items() if partition in chosen})
    return scenario


def unvalidated(cur: Cursor, scenario: Scenario, group_id: int, places: Iterable[Place]) -> list[str]:
    """Returns why the group cannot go to its validated offsets (nothing is validated on some partitions); empty if it can."""
    if not isinstance(scenario, ToValidated):
        return []
    cur.execute(SQL["unvalidated"], {"group_id": group_id})
    ids = set(cur.fetchall())
    partitions = sorted(place.partition for place in places if (place.topic_id, place.partition.partition) in ids)
    if not partitions:
        return []
    shown = first_of(map(str, partitions), SHOWN)
    fix = "Validate a run first, choose other partitions, or use to-earliest to read everything again."
    return [f"Nothing of {shown} is validated, so to-validated would take out every row. {fix}"]


def moves(
    scenario: Scenario, places: Iterable[Place], offsets: Mapping[TopicPartition, int], *, allow_loss: bool
) -> tuple[list[PartitionPlan], list[Outside]]:
    """Returns the moves of the partitions that have a target in ``offsets``, and the partitions whose target is outside the log.

    With ``allow_loss``, a target before the start of the log becomes the start. A target after the end is never moved to the end.
    """
    chosen = sorted((place for place in places if place.partition in offsets), key=lambda place: place.partition)
    result: list[PartitionPlan] = []
    outside: list[Outside] = []
    for place in chosen:
        target = offsets[place.partition]
        stays = isinstance(scenario, ToCurrent) or (isinstance(scenario, ToLatest) and target == place.position)
        if stays:
            result.append(place.held())
        elif (beyond := place.outside(target, allow_loss=allow_loss)) is not None:
            outside.append(beyond)
        else:
            result.append(place.moved(target))
    return result, outside


def _at(cluster: Cluster, places: Mapping[TopicPartition, Place], moment: datetime) -> dict[TopicPartition, int]:
    """Finds the first record at or after the moment; the last stable offset if there is none, or only in an open transaction."""
    offsets = cluster.offsets_for_time(places, max(0, -((_EPOCH - moment) // timedelta(milliseconds=1))))
    return {partition: min(offsets.get(partition, place.end), place.end) for partition, place in places.items()}


def _group_positions(cur: Cursor, name: str, places: Mapping[TopicPartition, Place]) -> dict[TopicPartition, int]:
    ids = {(place.partition, place.topic_id) for place in places.values()}
    positions = store.positions(cur, name)
    return {position.partition: position.position for position in positions if (position.partition, position.topic_id) in ids}


def _batch_starts(
    cur: Cursor, scenario: ToBatch, group: str, group_id: int, places: Mapping[TopicPartition, Place]
) -> dict[TopicPartition, int]:
    """Returns the starts of a batch (with the batches that share its rows), or of all batches of a run."""
    cur.execute(
        SQL["batch_starts"], {"group_id": group_id, "batch_id": scenario.batch_id, "dag_id": scenario.dag_id, "run_id": scenario.run_id}
    )
    ids = {(place.partition.partition, place.topic_id): place.partition for place in places.values()}
    starts = rows(cur)
    if not starts:
        target = f"batch {scenario.batch_id}" if scenario.batch_id is not None else f"run {scenario.run_id} of {scenario.dag_id}"
        raise BadInput(
            what="to-batch", found=f"the ledger of {group} has nothing from {target}", fix="Name a batch in tidemark.batch, or a run."
        )
    return {ids[key]: row["start_offset"] for row in starts if (key := (row["partition"], row["topic_id"])) in ids}
