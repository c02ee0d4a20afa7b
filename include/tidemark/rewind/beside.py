"""Replays beside the live rows: a rewind whose records are first read into shadows, and swapped into the sink when they are complete.

A rewind beside has a *side group* for each of its groups, as a backfill has (`tidemark.rewind.backfill`). It is a group of its own in all
but its name and its members: it has positions, a ledger, failed records and validated offsets, and its tables are *shadows*, tables with
the columns, constraints and indexes of the sinks. So its runs are ordinary bounded runs. They read from the rewind's target to wherever
the group is, and readers of the sink notice nothing.

    PLANNED ──apply──▶ BESIDE ──swap──▶ APPLIED        apply makes side groups and shadows; runs of the replay fill them
                          │
                          └──discard──▶ DISCARDED      the shadows go, and nothing else was changed

The swap (`tidemark.rewind.apply`) is the rewind itself, in one transaction with the opposite of its taking out: the rows of the
shadows go into the sinks, and the side group's ledger becomes the group's. It needs the side group to be exactly where the group is. For
the last records, the rewind *holds* its groups: they begin no batch until ``hold_until``.

A *rehearsal* is a replay beside with another transform than the consumer's, for its runs only. It is compared and discarded, never swapped.

Locks are taken in this order: the groups' advisory locks; the side groups' advisory locks, which validations of the replay share; the
rewind's row; the groups' positions; the side groups' positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg2.errors

from tidemark.db import REWIND_LOCK, data_error, kept_open, limit_lock_waits, rows, session, set_audit_actor, statements, transaction
from tidemark.errors import BadInput, Broken, Refused
from tidemark.offsets import flow
from tidemark.quality import Reaction, ValidationReport, Verdict, reaction, suite_files, unjudged, validate
from tidemark.records.ranges import TopicPartition
from tidemark.retry.store import lock_out_rewinds
from tidemark.rewind.plan_model import GroupPlan, Plan, RewindState
from tidemark.rewind.rows import deletions, overwritten
from tidemark.rewind.rows.archive import ArchiveForged, RowsRefused, Span, copy_in, drop_restored, open_archive, put_back, relation_of
from tidemark.rewind.side import SQL as SIDE
from tidemark.rewind.side import SideGroup, SidePart, by_group, group_fields, part_fields, places
from tidemark.rewind.store import AlreadyDecided, read_plan
from tidemark.sink import kept_rows
from tidemark.sink.table import Layout, quoted, quoted_table
from tidemark.sink.target import Target
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor, DatabaseUrl

SQL = statements("tidemark.rewind", "beside.sql")

KEEP = timedelta(days=7)
"""How long a replay beside may wait for its swap. Then `tidemark maintain` discards it."""
HOLD = timedelta(minutes=2)
"""How long a hold lasts, if nobody ends it."""
LOCK_MS = 10_000
"""How long a new column waits for a shadow that a swap is moving."""


@dataclass(frozen=True, slots=True)
class SideReplay(SideGroup):
    """The replay beside of one group of a rewind. Its parts end where the group is now. ``shadows``: the relations by table of the sink,
    ready for SQL.

    They belong to a role that may rewind: use them only after `open_shadows`, in the same transaction.
    """

    consumer: str
    shadows: Mapping[str, str]
    transform: str | None = None
    """A rehearsal's transform: runs of the replay load it instead of the consumer's."""

    def shadow(self, table: str) -> str:
        """Returns the shadow of a table. Raises `ShadowMissing`."""
        if table not in self.shadows:
            raise ShadowMissing(rewind_id=self.rewind_id, table=table)
        return self.shadows[table]

    def onto_shadows(self, target: Target) -> Target:
        """Returns the target for runs of the replay, which writes the shadows instead of the tables."""
        layouts = (replace(layout, table=self.shadow(layout.table), shadow_of=layout.table) for layout in target.layouts)
        return replace(target, group_id=self.side_id, layouts=tuple(layouts), before_rows=functools.partial(open_shadows, self))


class ReplayExists(Refused):
    """A consumer has a replay beside already."""

    rewind_id: int
    group: str

    def __str__(self) -> str:
        return (
            f"{self.group} has a replay beside, of rewind {self.rewind_id}, that is neither swapped nor discarded. End it first: "
            f"tidemark rewind swap {self.rewind_id} (a rehearsal is never swapped), or tidemark rewind discard {self.rewind_id}."
        )


class ReplayTopicRecreated(Refused):
    """A topic of a replay beside was deleted, and the records with it."""

    topic: str
    rewind_id: int

    def __str__(self) -> str:
        return (
            f"Topic {self.topic} was deleted and created again since the replay of rewind {self.rewind_id} began, so it cannot be swapped. "
            f"Nothing was read. Discard it: tidemark rewind discard {self.rewind_id}."
        )


class ShadowRefused(Refused):
    """A sink cannot have a shadow."""

    table: str
    message: str

    def __str__(self) -> str:
        return f"{self.table} cannot be read beside: {self.message} Nothing was changed. Plan the rewind without --beside."


class ShadowMissing(Broken):
    """A replay beside has no shadow of one of its tables."""

    rewind_id: int
    table: str

    def __str__(self) -> str:
        return (
            f"tidemark.rewind_archive has no shadow of {self.table} for the replay of rewind {self.rewind_id}. "
            "Nothing was read or changed. Find out who changed it."
        )


class ShadowBehind(Refused):
    """The sink has a new column, which this role cannot add to the shadow."""

    table: str
    column: str
    rewind_id: int
    message: str

    def __str__(self) -> str:
        return (
            f"{self.table} has the new column {self.column}, which the replay of rewind {self.rewind_id} lacks: {self.message}. "
            f"Nothing was read. Run tidemark rewind replay {self.rewind_id} as the role that began it, or discard it and plan again."
        )


class DiscardNotAllowed(Refused):
    """The role lacks a privilege for a discard; ``message`` is Postgres' own."""

    rewind_id: int
    message: str

    def __str__(self) -> str:
        return (
            f"The replay of rewind {self.rewind_id} was not discarded: {self.message}. Nothing was changed. Discard it as the role that "
            "began it, which owns its tables."
        )


def replays(cur: Cursor, group: str | None = None, rewind_id: int | None = None) -> list[SideReplay]:
    """Returns the replays beside of a group, of a rewind, or of both, that are neither swapped nor discarded."""
    cur.execute(SQL["parts"], {"group": group, "rewind_id": rewind_id})
    result = []
    for part_rows in by_group(cur):
        first, parts = part_rows[0], tuple(SidePart(**part_fields(row)) for row in part_rows)
        shadows = {row["sink"]: row["relation"] for row in _shadows(cur, first["rewind_id"], first["group_id"])}
        own = {"consumer": first["consumer"], "transform": first["transform"]}
        result.append(SideReplay(**group_fields(first), **own, parts=parts, shadows=shadows))
    return result


def require(cur: Cursor, rewind_id: int, group: str | None = None) -> list[SideReplay]:
    """Returns the replays beside of a rewind. Raises `BadInput` if there are none, or none of this group."""
    matches = replays(cur, group, rewind_id)
    if not matches:
        fix = "Name a rewind that was planned with --beside and applied, and is neither swapped nor discarded: tidemark rewind list."
        raise BadInput(what="rewind", found=f"rewind {rewind_id} has no replay beside{f' group {group}' if group else ''}", fix=fix)
    return matches


def find(cur: Cursor, group: str, rewind_id: int) -> SideReplay:
    """Like `require`, for one group."""
    return require(cur, rewind_id, group)[0]


def ends(cur: Cursor, replay: SideReplay) -> dict[TopicPartition, int]:
    """Returns where the group of a replay is now. Empty if the replay was swapped or discarded meanwhile."""
    now = [each for each in replays(cur, rewind_id=replay.rewind_id) if each.group_id == replay.group_id]
    return {part.partition: part.end for each in now for part in each.parts}


def require_none(cur: Cursor, groups: Mapping[int, str]) -> None:
    """Raises `ReplayExists` if one of these groups (names by id) has a replay beside."""
    cur.execute(SQL["running"], {"group_ids": list(groups)})
    if row := cur.fetchone():
        raise ReplayExists(rewind_id=row[0], group=", ".join(groups.values()))


def open_shadows(replay: SideReplay, cur: Cursor) -> None:
    """Checks that the shadows run no code of their owner, and locks them, so that they stay so until the transaction ends.

    Raises `ArchiveForged`, and `BadInput` if the replay was swapped or discarded.
    """
    entries = _shadows(cur, replay.rewind_id, replay.group_id)
    if not entries:
        require(cur, replay.rewind_id, replay.group)
    for entry in entries:
        _open(cur, entry)


def follow_columns(cur: Cursor, replay: SideReplay, layouts: Sequence[Layout]) -> None:
    """Adds to the shadows the columns of these layouts that the sinks have got since. Raises `ShadowBehind` and `ArchiveForged`."""
    limit_lock_waits(cur, LOCK_MS)
    open_shadows(replay, cur)
    for layout in layouts:
        table, shadow = layout.table, replay.shadow(layout.table)
        names = [column.name for column in layout.columns]
        cur.execute(SQL["missing_columns"], {"table": quoted_table(table), "shadow": shadow, "names": names})
        for name, definition in cur.fetchall():
            try:
                cur.execute(f"ALTER TABLE {shadow} ADD COLUMN {quoted(name)} {definition}")
            except psycopg2.errors.InsufficientPrivilege as error:
                raise ShadowBehind(table=table, column=name, rewind_id=replay.rewind_id, message=data_error(error).message) from None


def start(cur: Cursor, plan: Plan, *, by: str, approved_by: str | None) -> None:
    """Makes the side groups and the shadows of a plan; does not commit. Needs the locks of its groups."""
    require_none(cur, {group.group_id: group.group for group in plan.groups})
    cur.execute(SQL["make_sides"], {"rewind_id": plan.rewind_id})
    number = 0
    for group in plan.groups:
        for table in group.tables:
            number += 1
            entry = {"rewind_id": plan.rewind_id, "number": number, "group_id": group.group_id, "sink": table}
            _make_shadow(cur, {**entry, "relation": relation_of(plan.rewind_id, number)})
    cur.execute(SQL["mark_started"], {"rewind_id": plan.rewind_id, "by": by, "approved_by": approved_by})


def _make_shadow(cur: Cursor, entry: Mapping[str, Any]) -> None:
    table, shadow = entry["sink"], entry["relation"]
    try:
        cur.execute(SQL["make_shadow"].format(shadow=shadow, table=quoted_table(table)))
    except psycopg2.errors.DuplicateTable:
        raise ArchiveForged(rewind_id=entry["rewind_id"], number=entry["number"], problem=f"the table {shadow} already exists") from None
    except psycopg2.errors.InvalidTableDefinition as error:
        raise ShadowRefused(table=table, message=data_error(error).message) from None
    cur.execute(SQL["writers"], {"table": quoted_table(table)})
    for role, rights in cur.fetchall():
        cur.execute(SQL["grant"].format(rights=rights, shadow=shadow, role=role))
    cur.execute(SQL["add_shadow"], entry)
    try:
        _open(cur, entry)
    except ArchiveForged as error:
        raise ShadowRefused(table=table, message=f"a copy of it {error.problem.removeprefix(shadow).strip()}.") from None


def _open(cur: Cursor, entry: Mapping[str, Any]) -> str:
    """Like `open_archive`, for a shadow that must exist."""
    shadow = open_archive(cur, entry)
    if shadow is None:
        raise ArchiveForged(rewind_id=entry["rewind_id"], number=entry["number"], problem=f"the table {entry['relation']} does not exist")
    return shadow


def _shadows(cur: Cursor, rewind_id: int, group_id: int | None = None) -> list[dict[str, Any]]:
    """Returns the shadows of a rewind, or of one of its groups, with the relations that they must have."""
    cur.execute(SQL["shadows"], {"rewind_id": rewind_id, "group_id": group_id})
    return [{**row, "relation": relation_of(rewind_id, row["number"])} for row in rows(cur)]


def validate_replay(url: DatabaseUrl, spec: ConsumerSpec, replay: SideReplay) -> list[ValidationReport]:
    """Judges what a replay has read since its last validation, with the suites of the consumer's tables. Judges critical rows again, unless
    the consumer only reports them. Raises as `validate` does."""
    critical = reaction(Verdict.CRITICAL, spec.validation) is not Reaction.PUBLISH
    suites = {replay.shadow(table): suite for table, suite in suite_files(spec).items()}
    with session(url, application="tidemark validate") as connection:
        runs = [each.run for each in unjudged(connection, replay.side, critical=critical) if each.running is None]
        with kept_open(connection) as cur:
            lock_out_rewinds(cur, replay.side_id)  # the verdict is stored by another session, which needs the positions
            open_shadows(replay, cur)
            return [validate(url, run, group=replay.side, suites=suites, upsert=spec.upserts) for run in runs]


# ---- The swap


def hold(connection: Connection, rewind_id: int, duration: timedelta | None) -> None:
    """Lets the groups of a replay begin no batch for this long, so that the replay reaches them; `None` ends the hold."""
    with transaction(connection) as cur:
        cur.execute(SQL["hold"], {"rewind_id": rewind_id, "hold": duration})


def sides(cur: Cursor, rewind_id: int) -> list[int]:
    """Returns the ids of the side groups of a rewind, in lock order."""
    cur.execute(SQL["sides"], {"rewind_id": rewind_id})
    return [side_id for (side_id,) in cur.fetchall()]


def to_lock(cur: Cursor, rewind_id: int) -> list[tuple[int, int, TopicPartition]]:
    """Returns group id, topic id and partition of each position of the side groups, in lock order."""
    cur.execute(SQL["to_lock"], {"rewind_id": rewind_id})
    return places(cur)


def distance(cur: Cursor, rewind_id: int) -> int:
    """Returns how many offsets the replays of a rewind are away from their groups."""
    return sum(abs(part.end - part.position) for replay in replays(cur, rewind_id=rewind_id) for part in replay.parts)


def paused(cur: Cursor, rewind_id: int) -> tuple[str, ...]:
    """Returns the consumers of a rewind whose replay has records to read in a partition that an operator has paused."""
    consumers = []
    for replay in replays(cur, rewind_id=rewind_id):
        control = flow.read(cur, replay.side_id)
        if any(part.left and control.is_paused(part.partition) for part in replay.parts):
            consumers.append(replay.consumer)
    return tuple(consumers)


def read_again(cur: Cursor, group: GroupPlan, rewind_id: int) -> list[Span]:
    """Returns what the replay of a group has read and the group has passed, by partition, from the rewind's target on. The replay is ahead
    of the group where retention has passed both."""
    targets = {(part.topic_id, part.partition): part.target for part in group.partitions}
    (replay,) = require(cur, rewind_id, group.group)
    return [
        Span(part.topic_id, part.partition.partition, targets[part.topic_id, part.partition], min(part.position, part.end))
        for part in replay.parts
    ]


def put_in_early(cur: Cursor, rewind_id: int, group: GroupPlan, spans: Sequence[Span]) -> None:
    """Copies the rows of these spans from the shadows into the sinks of a group, which have no keys; does not commit.

    What the rewind supersedes there must be out of the sinks. Needs no lock of a position. Raises `RowsRefused`.
    """
    shadows = _shadows_of(cur, rewind_id, group.group_id, group.tables)
    for table in group.tables:
        copy_in(cur, table, _open(cur, shadows[table]), spans)


def put_in(cur: Cursor, plan: Plan, keys: Mapping[int, Mapping[str, Sequence[str]]], tails: Mapping[int, Sequence[Span]]) -> None:
    """Moves the rows of the shadows into the sinks, and the side groups' ledger to the groups; fences the replay. Does not commit.

    ``keys``: the key columns of each table, by group id. ``tails``: what `put_in_early` has left, for its groups. What the rewind
    supersedes must be out of the sinks. Needs the locks of all positions. Raises `RowsRefused`, and `RowsStay` for rows that must give way.
    """
    for group in sorted(plan.groups, key=lambda group: group.group_id):
        key = {"rewind_id": plan.rewind_id, "undo_of": -plan.rewind_id, "group_id": group.group_id}
        tables = keys[group.group_id]
        shadows = _shadows_of(cur, plan.rewind_id, group.group_id, tables)
        if group.group_id in tails:
            for table in tables:
                copy_in(cur, table, _open(cur, shadows[table]), tails[group.group_id])
                drop_restored(cur, shadows[table])
            continue
        for table in tables:
            _prepare(cur, key, shadows[table], tables[table])
        for table, columns in reversed([*tables.items()]):
            deletions.bring_back(cur, key, table, columns)
        for table, columns in tables.items():
            give_way = functools.partial(overwritten.give_way, cur, key, table, columns)
            put_back(cur, plan.rewind_id, group.group_id, table, give_way, shadow=True)
    for name in ("take_ledger", "fence"):
        cur.execute(SQL[name], {"rewind_id": plan.rewind_id})


def _shadows_of(cur: Cursor, rewind_id: int, group_id: int, tables: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the shadows of a group's tables. Raises `ShadowMissing`."""
    shadows = {row["sink"]: row for row in _shadows(cur, rewind_id, group_id)}
    for table in tables:
        if table not in shadows:
            raise ShadowMissing(rewind_id=rewind_id, table=table)
    return shadows


def _prepare(cur: Cursor, key: Mapping[str, int], entry: Mapping[str, Any], columns: Sequence[str]) -> None:
    table, shadow = str(entry["sink"]), _open(cur, entry)
    cur.execute(SQL["count_rows"].format(shadow=shadow), entry)
    if not columns:
        return
    cur.execute(SQL["take_deletions"], {"sink": table, "shadow": shadow, "parked_by": key["undo_of"]})
    cur.execute(
        SQL["other_partition"].format(
            rewind_id=key["rewind_id"],
            group_id=key["group_id"],
            shadow=shadow,
            table=quoted_table(table),
            values=", ".join(f"newer.{quoted(name)}::text" for name in columns),
            same_key=kept_rows.same_key(columns),
            same_partition=kept_rows.same_partition("newer"),
        )
    )
    if conflict := cur.fetchone():
        topic, partition = conflict[-2:]
        named = (
            f"a key of the replay ({', '.join(columns)}) was loaded from {topic}/{partition}, which is not the partition that it is in now."
        )
        raise RowsRefused(table=table, archive=shadow, message=named)


def discard(connection: Connection, rewind_id: int, *, by: str, reason: str = "") -> Plan:
    """Drops the shadows of a replay beside, and all that its side groups have read. Repeating the call changes nothing.

    Raises `AlreadyDecided` if the rewind has no replay beside, `BadInput` if it does not exist, `DiscardNotAllowed` and `ArchiveForged`.
    """
    try:
        with transaction(connection) as cur:
            set_audit_actor(cur, by, reason)
            groups = sorted(group.group_id for group in read_plan(cur, rewind_id).groups)
            for group_id in [*groups, *sides(cur, rewind_id)]:
                cur.execute(SIDE["lock_group"], {"class": REWIND_LOCK, "group_id": group_id})
            cur.execute("SELECT FROM tidemark.rewind WHERE rewind_id = %s FOR UPDATE", (rewind_id,))
            plan = read_plan(cur, rewind_id)
            if plan.state is RewindState.BESIDE:
                _discard(cur, rewind_id)
                plan = read_plan(cur, rewind_id)
    except psycopg2.errors.InsufficientPrivilege as error:
        raise DiscardNotAllowed(rewind_id=rewind_id, message=data_error(error).message) from None
    if plan.state is not RewindState.DISCARDED:
        raise AlreadyDecided.of(plan)
    return plan


def _discard(cur: Cursor, rewind_id: int) -> None:
    cur.execute(SQL["fence"], {"rewind_id": rewind_id})  # waits for commits of the replay
    for entry in _shadows(cur, rewind_id):
        if (shadow := open_archive(cur, entry)) is not None:
            cur.execute(SQL["discard_deletions"], {"shadow": shadow})
            cur.execute(f"DROP TABLE {shadow}")
    for name in ("discard_ledger", "mark_removed", "mark_discarded"):
        cur.execute(SQL[name], {"rewind_id": rewind_id})


def overdue(connection: Connection) -> list[int]:
    """Returns the rewinds whose replay beside has waited for its swap longer than `KEEP`."""
    with transaction(connection) as cur:
        cur.execute(SQL["overdue"], {"keep": KEEP})
        return [rewind_id for (rewind_id,) in cur.fetchall()]
