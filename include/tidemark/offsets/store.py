"""Statements on positions, attempts and the ledger, one typed function each. They never commit: the caller's transaction does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import psycopg2.errors

from tidemark.db import data_error, rows, scalar, single_row, statements
from tidemark.errors import BadInput, Broken, DatabaseUnavailable, Fenced, Refused, Unavailable
from tidemark.kafka.cluster import NO_ID
from tidemark.offsets import locks
from tidemark.records.outcome import RecordCounts, storable
from tidemark.records.ranges import Claim, Epoch, Generation, Slice, TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.offsets", "store.sql")

LostReason = Literal["retention", "topic re-created", "topic deleted", "reset to latest"]


class OffsetFenced(Fenced):
    """Another owner has taken over the partition; nothing from this writer's batch was stored."""

    kafka_name = "ILLEGAL_GENERATION"
    partition: TopicPartition
    held: Epoch
    current: Epoch
    position: int
    owner: str | None

    def __str__(self) -> str:
        return (
            f"{self.partition} is fenced: this attempt holds epoch {self.held}, the row is at epoch {self.current}, offset "
            f"{self.position}, owner {self.owner or 'nobody'}. Nothing from this slice was stored; claim the partition again."
        )


class PositionDeleted(Refused):
    """The position of a partition was deleted while a run held it."""

    partition: TopicPartition

    def __str__(self) -> str:
        return (
            f"The position of {self.partition} was deleted while this run held it (by tidemark groups delete, or manually). Nothing from "
            "this slice was stored. The next run starts as offset_reset says; check first which of its rows are already in the sink."
        )


class PositionLocked(DatabaseUnavailable):
    """Another session holds the row of a partition; ``group_id`` is the group of the row."""

    partition: TopicPartition
    topic_id: int
    group_id: int


class ClaimRefused(Fenced):
    """A newer generation holds the partition."""

    kafka_name = "ILLEGAL_GENERATION"
    partition: TopicPartition
    generation: Generation
    current: Generation
    owner: str | None

    def __str__(self) -> str:
        return (
            f"{self.partition} was taken by {self.owner or 'another run'} (generation {self.current}) after this run began (generation "
            f"{self.generation}). Nothing was changed. If several runs read the same partitions, leave one of them."
        )


class SessionNotEnded(Unavailable):
    """A commit has held a partition for too long, and this role may not end its session. ``message`` is from Postgres."""

    partition: TopicPartition
    message: str

    def __str__(self) -> str:
        return (
            f"A commit holds {self.partition}, and its session could not be ended: {self.message} Use that session's role, or grant "
            "pg_signal_backend to the current one. Nothing was stored; try again when the commit has ended."
        )


class StopRequested(Fenced):
    """The caller of a driver on a cluster has ended the attempt."""

    attempt_id: int

    def __str__(self) -> str:
        return f"Attempt {self.attempt_id} was ended while its driver ran on the cluster. The driver stops; its commits stay."


class NotTheDriver(Fenced):
    """An application on a cluster has started a driver for an attempt that does not need it."""

    attempt_id: int
    application: str

    def __str__(self) -> str:
        return (
            f"Attempt {self.attempt_id} does not wait for a driver of the application {self.application}: the attempt has ended, or it has "
            "a driver, or this is another database than the one in which the attempt was written. This driver read and stored nothing."
        )


class NotSkipped(Broken):
    """A backfill has read a range that is not stored as skipped by a rewind."""

    partition: TopicPartition
    start: int
    end: int

    def __str__(self) -> str:
        return (
            f"{self.partition} [{self.start}, {self.end}) was to be backfilled, but no lost_range row of a rewind covers it: "
            "tidemark.lost_range or tidemark.backfill was changed manually. Nothing was stored."
        )


@dataclass(frozen=True, slots=True)
class Position:
    """A row of ``partition_offset``, in the order of the statement: ``position`` is the next offset to read."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    position: int
    validated: int
    generation: Generation
    owner: str | None
    epoch: Epoch
    instance_id: str | None
    committed_at: datetime
    leader_epoch: int | None
    """See `tidemark.records.ranges.Log`."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """A range ``[start, end)`` that will never be read (I5); ``end`` is `None` if it cannot be determined."""

    partition: TopicPartition
    topic_id: int
    start: int
    end: int | None
    reason: LostReason


@dataclass(frozen=True, slots=True)
class Owner:
    """Who claims a partition. ``name`` is written to its row, ``instance_id`` only for a static member that has records to read."""

    generation: Generation
    name: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """An attempt's Airflow task. From the command line all fields are `None`, except for a drain: its ``task_id`` is "drain"."""

    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    map_index: int | None = None
    try_number: int | None = None


def ensure_group(cur: Cursor, name: str) -> int:
    """Returns the group's id; creates the group if it does not exist."""
    return _ensure(cur, SQL["ensure_group"], {"name": name})


def find_group(cur: Cursor, name: str) -> int | None:
    """Returns the group's id; `None` if it does not exist."""
    cur.execute(SQL["find_group"], {"name": name})
    row = cur.fetchone()
    return None if row is None else int(row[0])


def require_group(cur: Cursor, name: str) -> int:
    """Returns the group's id. Raises `BadInput` if no consumer has ever started it."""
    group_id = find_group(cur, name)
    if group_id is None:
        raise BadInput(what="group", found=f"no group {name!r} has ever run here", fix="Name a group from: tidemark groups list.")
    return group_id


def ensure_topic(cur: Cursor, name: str, kafka_uuid: str) -> int:
    """Returns the id of this incarnation of a topic; a re-created topic gets its own id."""
    return _ensure(cur, SQL["ensure_topic"], {"name": name, "kafka_uuid": kafka_uuid, "no_id": NO_ID + name})


def start_partition(cur: Cursor, group_id: int, topic_id: int, partition: int, offset: int, *, drained: bool = False) -> bool:
    """Stores a partition's first position; false if it already has one. ``drained``: the topic is a retry topic."""
    cur.execute(SQL["start_partition"], _row(group_id, topic_id, partition, offset=offset, drained=drained))
    return cur.rowcount == 1


def positions(cur: Cursor, group: str) -> list[Position]:
    """Reads a group's positions, except in retry topics, ordered by topic, incarnation and partition."""
    cur.execute(SQL["positions"], {"group": group})
    return [Position(TopicPartition(topic, partition), *values) for topic, partition, *values in cur.fetchall()]


def next_generation(cur: Cursor) -> Generation:
    """Returns a generation greater than any before."""
    cur.execute(SQL["next_generation"])
    return Generation(scalar(cur))


def claim(cur: Cursor, group_id: int, topic_id: int, partition: TopicPartition, owner: Owner, *, end: int = 0) -> Claim:
    """Claims a partition: raises its epoch and returns its position. Waits for a commit in flight on the row.

    If there are records to read below ``end``, the owner's instance id is stored as the partition's reader.

    Raises `ClaimRefused` if a newer generation holds the partition, `PositionDeleted` if it has no row.
    """
    values = {"generation": owner.generation, "owner": owner.name, "instance_id": owner.instance_id, "end": end}
    key = _row(group_id, topic_id, partition.partition, **values)
    cur.execute(SQL["claim"], key)
    row = cur.fetchone()
    if row is None:
        _, _, holder, current = _locked_row(cur, key, partition)
        raise ClaimRefused(partition=partition, generation=owner.generation, current=Generation(current), owner=holder)
    return Claim(partition, topic_id, row[0], Epoch(row[1]), row[2], row[3])


def group_generation(cur: Cursor, group_id: int) -> Generation:
    """Reads the group protocol's current generation; 0 for a group that never had members."""
    cur.execute(SQL["group_generation"], {"group_id": group_id})
    return Generation(scalar(cur))


def require_held(cur: Cursor, group_id: int, claims: Sequence[Claim | Slice]) -> None:
    """Raises `OffsetFenced` for the first of these partitions whose epoch has changed, `PositionDeleted` for one without a row."""
    held = {(claim.topic_id, claim.partition.partition): claim for claim in claims}
    cur.execute(SQL["epochs"], {"group_id": group_id, "topic_ids": sorted({claim.topic_id for claim in claims})})
    for topic_id, partition, epoch, position, owner in cur.fetchall():
        claim = held.pop((topic_id, partition), None)
        if claim is not None and claim.epoch != epoch:
            raise OffsetFenced(partition=claim.partition, held=claim.epoch, current=Epoch(epoch), position=position, owner=owner)
    for claim in held.values():
        raise PositionDeleted(partition=claim.partition)


def end_writers(cur: Cursor, group_id: int, topic_id: int, partition: TopicPartition) -> int:
    """Ends the session whose open transaction has moved a partition; returns how many were ended.

    Raises `SessionNotEnded` if the role is not allowed to.
    """
    try:
        cur.execute(locks.SQL["writers"], _row(group_id, topic_id, partition.partition, end=True))
    except psycopg2.errors.InsufficientPrivilege as error:
        raise SessionNotEnded(partition=partition, message=data_error(error).message) from None
    return len(cur.fetchall())


def instance_id_of(cur: Cursor, attempt_id: int) -> str | None:
    """Reads the instance id of an attempt's Airflow task: dag, task and map index."""
    cur.execute(SQL["instance_id_of"], {"attempt_id": attempt_id})
    row = cur.fetchone()
    return None if row is None else str(row[0])


def partitions_of_instance(cur: Cursor, group_id: int, instance_id: str) -> tuple[tuple[TopicPartition, ...], Generation]:
    """Reads the partitions that a static member claimed last, and these claims' newest generation; (), -1 for a new member."""
    cur.execute(SQL["partitions_of_instance"], {"group_id": group_id, "instance_id": instance_id})
    claims = cur.fetchall()
    return tuple(TopicPartition(topic, number) for topic, number, _ in claims), Generation(max((row[2] for row in claims), default=-1))


def release(cur: Cursor, group_id: int, held: Claim) -> None:
    """Releases a partition; does nothing if another owner has claimed it since."""
    cur.execute(SQL["release"], _row(group_id, held.topic_id, held.partition.partition, epoch=held.epoch))


def note_leader_epoch(cur: Cursor, group_id: int, held: Claim) -> None:
    """Stores the leader epoch of a held position; does nothing if the row is locked or has moved on."""
    values = {"epoch": held.epoch, "position": held.position, "leader_epoch": held.leader_epoch}
    cur.execute(SQL["note_leader_epoch"], _row(group_id, held.topic_id, held.partition.partition, **values))


def jump(cur: Cursor, group_id: int, held: Claim, to: int) -> Claim:
    """Moves a held position without reading the records in between. Raises `OffsetFenced`."""
    key = _row(group_id, held.topic_id, held.partition.partition, start=held.position, to=to, epoch=held.epoch)
    cur.execute(SQL["jump"], key)
    if cur.fetchone() is None:
        raise _fenced(cur, key, held.partition, held.epoch)
    return replace(held, position=to, leader_epoch=None)


def record_lost(cur: Cursor, group_id: int, attempt_id: int, lost: LostRange) -> None:
    """Stores a range as lost, unless it is stored already."""
    values = {"attempt_id": attempt_id, "start": lost.start, "end": lost.end, "reason": lost.reason}
    cur.execute(SQL["lost_range"], _row(group_id, lost.topic_id, lost.partition.partition, **values))


def unseen(cur: Cursor, group_id: int) -> list[dict[str, Any]]:
    """Reads topics with unread records that are missing from the group's newest sample: ``topic_id``, ``name``, ``kafka_uuid``, and
    ``others``, the UUIDs of the topics in that sample."""
    cur.execute(SQL["unseen"], {"group_id": group_id})
    return rows(cur)


def left_behind(cur: Cursor, group_id: int, topic_ids: Collection[int]) -> set[tuple[int, int]]:
    """Reads topic ids and partitions whose unread rest is stored as lost because the topic is gone."""
    cur.execute(SQL["left_behind"], {"group_id": group_id, "topic_ids": list(topic_ids)})
    return {(topic_id, partition) for topic_id, partition in cur.fetchall()}


def leave_gone(cur: Cursor, group_id: int, attempt_id: int, topic_ids: Collection[int], reason: LostReason) -> list[LostRange]:
    """Stores the unread rest of topics that are gone from Kafka as lost, up to the end in the last sample, and moves the positions there.
    Fences their owners."""
    key = {"group_id": group_id, "attempt_id": attempt_id, "topic_ids": list(topic_ids), "reason": reason}
    cur.execute(SQL["leave_gone"], key)
    return [LostRange(TopicPartition(topic, part), topic_id, start, end, reason) for topic, part, topic_id, start, end in cur.fetchall()]


def move_offset(cur: Cursor, group_id: int, part: Slice, *, ledger: int | None = None) -> RecordCounts | None:
    """Moves the partition's offset from ``part.start`` to ``part.end`` (I2). ``ledger``: the group of the ledger (default: ``group_id``).

    Call it before the COPY in the same transaction: a zombie waits here and fails before it has sent a byte. Returns `None` if the
    offset was moved, or the ledger's counts if a twin of this task (retried, speculative) has already committed the same slice.
    Raises `OffsetFenced` if the row's epoch or offset differs from the slice's, `PositionDeleted` if there is no row, and
    `PositionLocked` if another session holds the row for longer than ``lock_timeout``.
    """
    key = _key(group_id, part)
    with locked_position(group_id, part):
        cur.execute(SQL["move_offset"], key)
    if cur.fetchone() is not None:
        return None
    row = _locked_row(cur, key, part.partition)
    ledger_key = _key(group_id if ledger is None else ledger, part)
    twin = _ledger(cur, ledger_key) if row[:2] == (part.end, part.epoch) else None
    if twin is None:
        raise _fenced(cur, key, part.partition, part.epoch)
    return twin


@contextlib.contextmanager
def locked_position(group_id: int, part: Slice) -> Iterator[None]:
    """Raises `PositionLocked` if a lock is not granted within ``lock_timeout``, or deadlocks with a rewind that waits for this session."""
    try:
        yield
    except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected) as error:
        raise PositionLocked(partition=part.partition, topic_id=part.topic_id, group_id=group_id, cause=str(error).strip()) from error


def committed(cur: Cursor, group_id: int, part: Slice, *, ledger: int | None = None) -> RecordCounts | None:
    """Reads the ledger's counts for exactly this slice and epoch, or `None`. Waits for a commit in flight on the row.

    Only the ledger (of the group ``ledger``) is conclusive, because a newer owner may have moved the row since.
    """
    cur.execute(SQL["read_offset"], _key(group_id, part))
    return _ledger(cur, _key(group_id if ledger is None else ledger, part))


def insert_batch(cur: Cursor, group_id: int, attempt_id: int, part: Slice, counts: RecordCounts) -> int:
    """Writes the ledger row of a slice and returns its id."""
    cur.execute(SQL["insert_batch"], {**_key(group_id, part), "attempt_id": attempt_id, "drained": part.drained, **asdict(counts)})
    return int(scalar(cur))


def shorten_skipped(cur: Cursor, group_id: int, topic_id: int, partition: TopicPartition, start: int, end: int) -> None:
    """Removes ``[start, end)`` from the head of a range that a rewind skipped: it is now accounted for. Raises `NotSkipped`."""
    cur.execute(SQL["shorten_skipped"], _row(group_id, topic_id, partition.partition, start=start, end=end))
    if cur.fetchone() is None:
        raise NotSkipped(partition=partition, start=start, end=end)


def mark_whole_batch(cur: Cursor, batch_ids: Sequence[int]) -> None:
    """Marks these batches as one whole batch: their rows have the start of the first one as lineage."""
    whole_batch_id = batch_ids[0]
    cur.execute(SQL["set_whole_batch"], {"whole_batch_id": whole_batch_id, "batch_ids": list(batch_ids)})


def new_attempt(cur: Cursor, group_id: int, task: TaskIdentity, *, of_rewind: int | None = None) -> int:
    """Writes the row of a new attempt and returns its id. ``of_rewind``: a rewind, whose skipped ranges or
    replay beside it reads."""
    cur.execute(SQL["new_attempt"], {"group_id": group_id, "of_rewind": of_rewind, **asdict(task)})
    return int(scalar(cur))


def earlier_attempts(cur: Cursor, attempt_id: int) -> list[dict[str, Any]]:
    """Reads earlier attempts of the same Airflow task (``attempt_id, state, planned``), newest first."""
    cur.execute(SQL["earlier_attempts"], {"attempt_id": attempt_id})
    return rows(cur)


def dag_run_planned(cur: Cursor, attempt_id: int) -> bool:
    """Whether this attempt, or another one of its group in the same DAG run, has planned to read records. An attempt without a plan has
    committed nothing."""
    cur.execute(SQL["dag_run_planned"], {"attempt_id": attempt_id})
    return bool(scalar(cur))


def has_newer_attempt(cur: Cursor, attempt_id: int) -> bool:
    """Whether another run of the same group or backfill started after this attempt."""
    cur.execute(SQL["newer_attempt"], {"attempt_id": attempt_id})
    return cur.fetchone() is not None


def read_attempt(cur: Cursor, attempt_id: int) -> dict[str, Any] | None:
    """Reads ``attempt_id, state, planned, error, application, age_s, driver_alive`` of an attempt, or `None`."""
    cur.execute(SQL["read_attempt"], {"attempt_id": attempt_id})
    attempts = rows(cur)
    return attempts[0] if attempts else None


def running_application(cur: Cursor, group: str, task: TaskIdentity, *, of_rewind: int | None = None) -> int | None:
    """Finds the group's running attempt of an earlier try of this task whose driver was submitted to a cluster."""
    cur.execute(SQL["running_application"], {"group": group, "of_rewind": of_rewind, **asdict(task)})
    row = cur.fetchone()
    return None if row is None else int(row[0])


def note_application(cur: Cursor, attempt_id: int, facts: Mapping[str, str | None]) -> None:
    """Stores facts about the attempt's application on a cluster. No effect on an attempt that has ended."""
    cur.execute(SQL["note_application"], {"attempt_id": attempt_id, "facts": json.dumps(facts)})


def require_wanted(cur: Cursor, attempt_id: int) -> None:
    """Raises `StopRequested` in a driver on a cluster whose attempt has ended."""
    cur.execute(SQL["stop_requested"], {"attempt_id": attempt_id})
    if (row := cur.fetchone()) is not None and row[0]:
        raise StopRequested(attempt_id=attempt_id)


def start_driver(cur: Cursor, attempt_id: int, application: str) -> None:
    """Makes the caller the one driver of this application's attempt. Raises `NotTheDriver`."""
    cur.execute(SQL["start_driver"], {"attempt_id": attempt_id, "name": application})
    if cur.fetchone() is None:
        raise NotTheDriver(attempt_id=attempt_id, application=application)


def plan_attempt(cur: Cursor, attempt_id: int, planned: Sequence[Mapping[str, Any]]) -> None:
    """Stores the ranges that the run will read: only records that existed when it started."""
    cur.execute(SQL["plan_attempt"], {"attempt_id": attempt_id, "planned": json.dumps(list(planned))})


def end_abandoned(cur: Cursor) -> list[int]:
    """Ends attempts that started more than a day ago and whose driver is gone; returns their ids."""
    cur.execute(SQL["end_abandoned"])
    return [attempt_id for (attempt_id,) in cur.fetchall()]


def end_attempt(cur: Cursor, attempt_id: int, error: Mapping[str, str] | None = None) -> None:
    """Ends an attempt as COMMITTED or, with an error, as FAILED. Only the first call has an effect."""
    text = json.dumps({name: storable(value) for name, value in error.items()}) if error else None
    cur.execute(SQL["end_attempt"], {"attempt_id": attempt_id, "state": "FAILED" if error else "COMMITTED", "error": text})


def attempt_ledger(cur: Cursor, attempt_id: int) -> list[dict[str, Any]]:
    """Reads an attempt's commits: one row per partition with its range and counts."""
    cur.execute(SQL["attempt_ledger"], {"attempt_id": attempt_id})
    return rows(cur)


def attempt_lost(cur: Cursor, attempt_id: int) -> list[dict[str, Any]]:
    """Reads the ranges that an attempt stored as lost, except those of retry topics."""
    cur.execute(SQL["attempt_lost"], {"attempt_id": attempt_id})
    return rows(cur)


def _row(group_id: int, topic_id: int, partition: int, **values: Any) -> dict[str, Any]:
    """The parameters of a statement on the row of a partition."""
    return {"group_id": group_id, "topic_id": topic_id, "partition": partition, **values}


def _key(group_id: int, part: Slice) -> dict[str, Any]:
    values = {"start": part.start, "end": part.end, "epoch": part.epoch, "leader_epoch": part.leader_epoch}
    return _row(group_id, part.topic_id, part.partition.partition, **values)


def _ledger(cur: Cursor, key: dict[str, Any]) -> RecordCounts | None:
    cur.execute(SQL["read_batch"], key)
    counts = cur.fetchone()
    return None if counts is None else RecordCounts(*counts)


def _fenced(cur: Cursor, key: dict[str, Any], partition: TopicPartition, held: Epoch) -> OffsetFenced:
    position, epoch, owner, _ = _locked_row(cur, key, partition)
    return OffsetFenced(partition=partition, held=held, current=Epoch(epoch), position=position, owner=owner)


def _locked_row(cur: Cursor, key: Mapping[str, Any], partition: TopicPartition) -> tuple[Any, ...]:
    """Reads ``next_offset, owner_epoch, owner, generation`` of an existing position. Raises `PositionDeleted`."""
    cur.execute(SQL["read_offset"], key)
    row = cur.fetchone()
    if row is None:
        raise PositionDeleted(partition=partition)
    return row


def _ensure(cur: Cursor, statement: str, parameters: Mapping[str, str]) -> int:
    """Returns the id of a row, and creates the row if necessary. If another session creates it concurrently, a second query finds it."""
    cur.execute(statement, parameters)
    row = cur.fetchone()
    if row is None:
        cur.execute(statement, parameters)
        row = single_row(cur)
    return int(row[0])
