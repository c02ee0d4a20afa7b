"""Resolve a scenario to a target for each partition: look-ups first, then pure computation (I5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements
from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import (
    Adopt,
    ByDuration,
    FromFile,
    FromGroup,
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

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "plan.sql")

SHOWN = 20
"""Maximum number of partitions that an error names; the others are only counted."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Place:
    """A partition of a group at planning: its position, and its log ``[start, end)`` up to the last stable offset."""

    partition: TopicPartition
    topic_id: int
    position: int
    validated: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Move:
    """The planned move of one partition.

    ``target`` is what the scenario resolves to; ``to`` is the new position, greater than ``target`` only if the log starts after it.
    ``hold``: the partition stays wherever the group is when the plan is applied. Everything from ``superseded_from`` on is superseded.
    """

    place: Place
    target: int
    to: int
    superseded_from: int
    hold: bool = False

    @property
    def skips(self) -> bool:
        """Whether it skips records that Kafka has."""
        return self.to == self.target > self.place.position


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


@dataclass(kw_only=True, eq=False)
class TargetsOutOfRange(Refused):
    """Targets outside their logs. Kafka's own tool would silently move them to the nearest end."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    outside: tuple[Outside, ...]

    def __str__(self) -> str:
        lines = [str(one) for one in self.outside[:SHOWN]]
        if len(self.outside) > SHOWN:
            lines.append(f"and {len(self.outside) - SHOWN} more")
        fixes = ["Name offsets within the log (to-earliest and to-latest are its ends)."]
        if any(one.before for one in self.outside):
            fixes.append(
                "With --allow-loss, targets before the start become the start. What was made of the records that are gone is taken "
                "out, and they are stored as lost."
            )
        return "\n".join([*lines, "Nothing was planned. " + " ".join(fixes)])


def targets(
    cur: Cursor, cluster: Cluster, scenario: Scenario, group: str, group_id: int, places: Sequence[Place]
) -> dict[TopicPartition, int]:
    """The target of each partition for which the scenario has one; the others stay and are not part of the plan.

    Only reads Postgres and Kafka; a time takes one request for all partitions. Raises `BadInput` if the scenario names something that does
    not exist.
    """
    by_partition = {place.partition: place for place in places}
    match scenario:
        case ToDatetime(moment):
            return _at(cluster, by_partition, moment)
        case ByDuration(duration):
            cur.execute("SELECT clock_timestamp()")
            return _at(cluster, by_partition, _one(cur)[0] - duration)
        case FromFile(offsets):
            return {partition: offset for partition, offset in offsets.items() if partition in by_partition}
        case FromGroup(name, kafka):
            found = cluster.group_offsets(name, by_partition) if kafka else _of_group(cur, name, by_partition)
            if not found:
                where = "has committed no offset to Kafka for" if kafka else "has no position on"
                raise BadInput(what="from-group", found=f"group {name} {where} any partition of {group}", fix="Name a group that has some.")
            return found
        case ToBatch():
            return _of_batches(cur, scenario, group, group_id, by_partition)
    return {place.partition: _of_place(scenario, place) for place in places}


def _of_place(scenario: Scenario, place: Place) -> int:
    """The target of a scenario that needs no look-up."""
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


def strangers(scenario: Scenario, known: Iterable[TopicPartition]) -> list[str]:
    """Problems with partitions in a file on which none of the groups has a position; empty for other scenarios."""
    if not isinstance(scenario, FromFile):
        return []
    strange = sorted(scenario.offsets.keys() - set(known))
    if not strange:
        return []
    shown = ", ".join(map(str, strange[:SHOWN])) + (f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else "")
    return [f"The file has partitions that the group does not read: {shown}. Remove them, or plan for the consumer that reads them."]


def within(scenario: Scenario, chosen: Collection[TopicPartition]) -> Scenario:
    """The scenario, limited to the chosen partitions."""
    if isinstance(scenario, FromFile):
        return FromFile({partition: offset for partition, offset in scenario.offsets.items() if partition in chosen})
    return scenario


def unvalidated(cur: Cursor, scenario: Scenario, group_id: int, places: Iterable[Place]) -> list[str]:
    """Why the group cannot go to its validated offsets (nothing is validated on some partitions); empty if it can."""
    if not isinstance(scenario, ToValidated):
        return []
    cur.execute(SQL["unvalidated"], {"group_id": group_id})
    found = set(cur.fetchall())
    none = sorted(place.partition for place in places if (place.topic_id, place.partition.partition) in found)
    if not none:
        return []
    shown = ", ".join(map(str, none[:SHOWN])) + (f" and {len(none) - SHOWN} more" if len(none) > SHOWN else "")
    fix = "Validate a run first, choose other partitions, or use to-earliest to read everything again."
    return [f"Nothing of {shown} is validated, so to-validated would take out every row. {fix}"]


def moves(
    scenario: Scenario, places: Iterable[Place], found: Mapping[TopicPartition, int], *, allow_loss: bool
) -> tuple[list[Move], list[Outside]]:
    """The moves of the partitions that have a target, and the partitions whose target is outside the log.

    With ``allow_loss``, a target before the start of the log becomes the start. A target after the end is never moved to the end.
    """
    chosen = sorted((place for place in places if place.partition in found), key=lambda place: place.partition)
    result: list[Move] = []
    outside: list[Outside] = []
    for place in chosen:
        target = found[place.partition]
        stays = isinstance(scenario, ToCurrent) or (isinstance(scenario, ToLatest) and target == place.position)
        if stays:
            result.append(Move(place, place.position, place.position, place.position, hold=True))
        elif 0 <= target <= place.end and (target >= place.start or allow_loss):
            result.append(Move(place, target, max(target, place.start), min(target, place.position)))
        else:
            outside.append(Outside(place.partition, target, place.start, place.end))
    return result, outside


def _at(cluster: Cluster, places: Mapping[TopicPartition, Place], moment: datetime) -> dict[TopicPartition, int]:
    """The first record at or after the moment; the last stable offset if there is none, or only in an open transaction."""
    found = cluster.offsets_for_time(places, max(0, -((_EPOCH - moment) // timedelta(milliseconds=1))))
    return {partition: min(found.get(partition, place.end), place.end) for partition, place in places.items()}


def _of_group(cur: Cursor, name: str, places: Mapping[TopicPartition, Place]) -> dict[TopicPartition, int]:
    ids = {(place.partition, place.topic_id) for place in places.values()}
    return {held.partition: held.position for held in store.positions(cur, name) if (held.partition, held.topic_id) in ids}


def _of_batches(
    cur: Cursor, scenario: ToBatch, group: str, group_id: int, places: Mapping[TopicPartition, Place]
) -> dict[TopicPartition, int]:
    """The starts of a batch (with those that share its rows), or of all batches of a run."""
    cur.execute(
        SQL["batch_starts"], {"group_id": group_id, "batch_id": scenario.batch_id, "dag_id": scenario.dag_id, "run_id": scenario.run_id}
    )
    ids = {(place.partition.partition, place.topic_id): place.partition for place in places.values()}
    found = rows(cur)
    if not found:
        what = f"batch {scenario.batch_id}" if scenario.batch_id is not None else f"run {scenario.run_id} of {scenario.dag_id}"
        raise BadInput(
            what="to-batch", found=f"the ledger of {group} has nothing from {what}", fix="Name a batch in tidemark.batch, or a run."
        )
    return {ids[key]: row["start_offset"] for row in found if (key := (row["partition"], row["topic_id"])) in ids}


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
