"""Applies a planned rewind to a running group, in one transaction (I4). For a rewind beside, this is the swap.

    ① read the plan, look up the topics' logs in Kafka   ② lock the groups and the rewind, read the plan that is applied
    ③ lock the positions, in order; an adoption stores them first; a swap first moves most rows, and waits until its replay is level
    ④ refuse if the plan is stale   ⑤ store the before-image   ⑥ take out superseded rows, failed records and batches
    ⑦ undo: put back what the undone rewind took out; swap: put in what the replay beside has read
    ⑧ store the ranges that stay unread, or that a backfill reads
    ⑨ raise epochs, move positions
    ⑩ mark the rewind as applied, notify the members   ⑪ commit

The group keeps running. The rewind waits `GRACE_MS` for a commit in flight on one of its partitions, then ends that commit's session. From
③ on, commits on these partitions wait; after ⑪ they are fenced. Other partitions continue meanwhile. Readers of the sink are not locked
out, unless a table partition is moved whole (`tidemark.rewind.rows.archive`).

A swap needs the replay to be exactly where its group is; `NotCaughtUp` otherwise. The positions stay. So that commits wait only for the
last rows, it does ⑥ and ⑦ before ③ for the rows that the replay has read by then. Then the group is *held*: it begins no batch while
the replay reads on and the others move. Tables with keys, triggers, foreign keys or unique columns are exchanged as a whole after ③: their
new rows might meet old rows that go only then, or a commit and the swap might wait for each other's rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg2.errors

from tidemark.db import (
    RELEASE_IF_LOST,
    REWIND_LOCK,
    UNLIMITED,
    Session,
    data_error,
    rows,
    scalar,
    session,
    single_row,
    statements,
    transaction,
)
from tidemark.errors import DatabaseUnavailable, Refused, Unavailable
from tidemark.group.wake import notify
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.offsets.locks import LockWait
from tidemark.offsets.mirror import republish_or_log
from tidemark.records.ranges import TopicPartition
from tidemark.rewind import adopt, backfill, beside, guards, side, undo
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan import ClusterOf, basis_of, digest_of, partial_batches
from tidemark.rewind.plan_model import GroupPlan, Plan, RewindState
from tidemark.rewind.rows import deletions, overwritten
from tidemark.rewind.rows.archive import RowsRefused, Span, put_back, take_out
from tidemark.rewind.store import AlreadyDecided, read, read_plan
from tidemark.sink.table import on_tables
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "apply.sql")

GRACE_MS = 10_000
"""How long to wait for a commit in flight on a partition before ending its database session."""
LOCK_MS = 20_000
"""After this wait the log names the blocker: another rewind of the group, or the commit of a drain. Then the rewind keeps waiting."""
ROUNDS = 5
"""How often a replay beside reads on, with its group held, before its swap is given up."""
READ_ON_MS = 15 * 60_000
"""How long one run of the replay may take while its swap waits."""
IDLE_MS = 60_000
"""A process that stalls in the middle of a rewind loses its session and its locks after this time."""

Place = tuple[int, int, TopicPartition]
"""The ids of a group and a topic, and the partition: a position."""
SpecOf = Callable[[str], ConsumerSpec]
"""Returns the current spec of the consumer with this name."""
Exchange = Callable[["Cursor", Plan, Mapping[int, ConsumerSpec], Mapping[int, "KafkaLogs"]], dict[int, list[Span]]]


@dataclass(frozen=True, slots=True)
class Applied:
    """An applied rewind with its actual numbers. ``already``: an earlier call applied it."""

    plan: Plan
    already: bool


class StalePlan(Refused):
    """The state from which the plan was made has changed."""

    rewind_id: int
    changes: tuple[str, ...]
    begun: bool = False
    """Whether it is read beside."""

    def __str__(self) -> str:
        discard = f"Discard its replay with tidemark rewind discard {self.rewind_id}, and plan" if self.begun else "Plan"
        did = "swapped" if self.begun else "applied"
        return "\n".join([*self.changes, f"Rewind {self.rewind_id} was not {did}. Nothing was changed. {discard} again."])


class RewindNotAllowed(Refused):
    """The role lacks a privilege that the rewind needs; ``message`` is Postgres' own."""

    rewind_id: int
    message: str

    def __str__(self) -> str:
        return (
            f"Rewind {self.rewind_id} was not applied: {self.message}. The role needs DELETE on the sink, and in the schema tidemark the "
            "profile rewinder: tidemark migrate --grant-to ROLE --as rewinder (docs/security.md)."
        )


@dataclass(frozen=True, slots=True)
class KafkaLogs:
    """The topics' UUIDs and the ranges of the logs, from Kafka."""

    uuids: Mapping[str, str]
    logs: Mapping[TopicPartition, tuple[int, int]]


class NotCaughtUp(Unavailable):
    """The replay beside is not where its group is."""

    rewind_id: int
    left: int
    paused: tuple[str, ...] = ()
    """The consumers that an operator has paused, and their replays with them."""

    def __str__(self) -> str:
        behind = f"The replay of rewind {self.rewind_id} is {counted(self.left, 'offset')} behind its group"
        if self.paused:
            fix = "; ".join(f"tidemark resume {name}" for name in self.paused)
            names = f"{' and '.join(self.paused)} {'is' if len(self.paused) == 1 else 'are'}"
            return f"{behind}, and cannot read on, because {names} paused. Nothing was changed. First: {fix}"
        return f"{behind}. Nothing was changed. Read them first: tidemark rewind replay {self.rewind_id}"


class RehearsalNotSwapped(Refused):
    """The replay beside has read with another transform than the consumer's."""

    rewind_id: int
    transform: str

    def __str__(self) -> str:
        return (
            f"Rewind {self.rewind_id} only rehearses {self.transform}: the group reads on with its own transform, whose rows would replace "
            "these at the next rewind. Nothing was changed. Deploy the transform, discard this replay (tidemark rewind discard "
            f"{self.rewind_id}), and plan again."
        )


def apply(
    connection: Connection, cluster_of: ClusterOf, spec_of: SpecOf, rewind_id: int, *, by: str, approved_by: str | None = None
) -> Applied:
    """Applies a stored plan, all of it or nothing, and returns it with the actual numbers.

    A rewind beside only begins: its side groups and shadows are made, and the group and its sinks stay as they are (a swap ends it).
    Repeating the call is safe: an applied rewind is returned unchanged. ``by`` applies it, ``approved_by`` approved it.
    The group may have read on since the plan was made; rows written since then are superseded too.

    Raises `StalePlan` with every change, `AlreadyDecided` for a plan that was rejected or undone, `BadInput`,
    `RowsStay` if the sink does not let the rows go, `RowsRefused` if it rejects the restored rows (undo), `RewindNotAllowed`, and for a
    rewind beside `ReplayExists` or `ShadowRefused`. After
    `SessionNotEnded`, `DatabaseUnavailable` or `BrokerUnavailable` the same call may succeed. Nothing is changed if it raises.
    Waits for other rewinds, drains and sessions that hold a position, for as long as their sessions live.
    """
    return _apply(connection, cluster_of, spec_of, rewind_id, by=by, approved_by=approved_by)


def catch_up_and_swap(
    connection: Connection, cluster_of: ClusterOf, spec_of: SpecOf, rewind_id: int, *, read_on: Callable[[], object], by: str
) -> Applied:
    """Lets a replay beside reach its group, and swaps its rows into the sinks: applies the rewind, with what its side groups have read
    since. ``read_on`` runs the replay once.

    The group reads on during the first run and while most rows move, and is held during the others. Raises as `apply` does, and
    `NotCaughtUp` after `ROUNDS` runs, or at once if the consumer is paused; `RehearsalNotSwapped`, and `AlreadyDecided` if the replay has
    not begun.
    """
    assert isinstance(connection, Session)
    url = connection.url

    def hold(duration: timedelta | None) -> None:
        with session(url, application="tidemark rewind") as other:  # the swap's transaction is open, or its session lost
            beside.hold(other, rewind_id, duration)

    with transaction(connection) as cur:
        behind = _behind(cur, rewind_id)
    if behind is not None:
        if behind.paused:
            raise behind
        read_on()
    try:
        exchange = functools.partial(_exchange_early, hold=lambda: hold(beside.HOLD), read_on=read_on)
        return _apply(connection, cluster_of, spec_of, rewind_id, by=by, exchange=exchange)
    finally:
        with contextlib.suppress(DatabaseUnavailable):  # then it ends by itself
            hold(None)


def _apply(
    connection: Connection,
    cluster_of: ClusterOf,
    spec_of: SpecOf,
    rewind_id: int,
    *,
    by: str,
    approved_by: str | None = None,
    exchange: Exchange | None = None,
) -> Applied:
    """``exchange``: what a swap does before ③. It returns with the locks of ② and ③, and the replay is where its group is."""
    state = RewindState.PLANNED if exchange is None else RewindState.BESIDE
    plan = read(connection, rewind_id)  # ①
    if plan.state is not state:
        return _already_applied(plan, state)
    if state is RewindState.BESIDE and plan.transform is not None:
        raise RehearsalNotSwapped(rewind_id=rewind_id, transform=plan.transform)
    specs = {group.group_id: spec_of(group.consumer) for group in plan.groups}
    kafka_logs = {
        group.group_id: _look_up(cluster_of(specs[group.group_id]), [part.partition for part in group.partitions]) for group in plan.groups
    }
    outdated = adopt.outdated(map(cluster_of, specs.values()), plan)
    try:
        with transaction(connection) as cur:
            _lock_groups(cur, plan)  # ②
            tails = exchange(cur, plan, specs, kafka_logs) if exchange is not None else {}
            expired = _lock_rewind(cur, plan)
            plan = read_plan(cur, rewind_id)
            if plan.state is not state:
                assert not tails  # the lock of the group keeps other swaps away
                return _already_applied(plan, state)
            outdated += adopt.store_positions(cur, plan)
            if expired and state is RewindState.PLANNED:
                outdated.append(f"The plan expired at {plan.expires_at}.")
            if plan.beside and state is RewindState.PLANNED:
                _require_current(cur, plan, specs, kafka_logs, _positions(cur, plan), outdated)
                beside.start(cur, plan, by=by, approved_by=approved_by)
                return Applied(read_plan(cur, rewind_id), already=False)
            positions = _lock_positions(cur, plan)  # ③
            _require_current(cur, plan, specs, kafka_logs, positions, outdated)  # ④
            cur.execute(SQL["keep_before_image"], {"rewind_id": rewind_id, "undo_of": plan.undo_of})  # ⑤
            images = rows(cur)
            _require_whole_batches(cur, plan)
            _change(cur, plan, images, specs, tails)
            cur.execute(SQL["mark_undone"], {"undo_of": plan.undo_of})  # ⑩
            cur.execute(SQL["mark_applied"], {"rewind_id": rewind_id, "by": by, "approved_by": approved_by})
            for group in plan.groups:
                notify(cur, group.group, f"rewind {rewind_id}")
            done = read_plan(cur, rewind_id)
            with guards.rows_stay(", ".join(group.table for group in plan.groups)):
                cur.execute("SET CONSTRAINTS ALL IMMEDIATE")  # so that deferred constraints fail here, not at ⑪
    except psycopg2.errors.InsufficientPrivilege as error:
        raise RewindNotAllowed(rewind_id=rewind_id, message=data_error(error).message) from None
    for spec in specs.values():
        republish_or_log(connection, cluster_of(spec), spec)
    for group, part in done:
        log.info(
            "rewound group=%s partition=%s rewind=%s old=%s new=%s superseded_from=%s rows=%s failed_records=%s",
            group.group, part.partition, rewind_id, part.old, part.new, part.superseded_from, part.sink_rows, part.failed_records,
        )  # fmt: skip
    return Applied(done, already=False)


def _exchange_early(
    cur: Cursor,
    plan: Plan,
    specs: Mapping[int, ConsumerSpec],
    kafka_logs: Mapping[int, KafkaLogs],
    *,
    hold: Callable[[], object],
    read_on: Callable[[], object],
) -> dict[int, list[Span]]:
    """Exchanges the rows that a replay has read already, then locks all that its swap locks (② and ③). ``hold`` holds the groups before,
    and ``read_on`` runs the replay again while it is not where its group is.

    Returns what is left to exchange, by group id, for the groups whose rows were exchanged. Raises `StalePlan` and `NotCaughtUp`.
    """
    if read_plan(cur, plan.rewind_id).state is not RewindState.BESIDE:
        return {}
    _require_current(cur, plan, specs, kafka_logs, _positions(cur, plan), ())
    tails = _move_early(cur, plan, specs)
    _lock_level(cur, plan, hold, read_on)
    return tails


def _move_early(cur: Cursor, plan: Plan, specs: Mapping[int, ConsumerSpec]) -> dict[int, list[Span]]:
    """Exchanges the rows of groups whose commits do not touch them: in tables without keys, triggers, foreign keys and unique columns.
    The lock of a group keeps its retries away. A group with an unfinished backfill in these partitions waits, too, and so does one whose
    table refuses a row: it may accept the row together with the others."""
    tails = {}
    for group in _in_lock_order(plan):
        ids = {"rewind_id": plan.rewind_id, "undo_of": plan.undo_of, "group_id": group.group_id}
        if any(specs[group.group_id].keys.values()) or not guards.stand_alone(cur, group.tables):
            continue
        if backfill.to_lock(cur, ids) or guards.problems(cur, ids, group.tables):
            continue
        spans = beside.read_again(cur, group, plan.rewind_id)
        cur.execute("SAVEPOINT early")
        try:
            for sink in group.tables:
                take_out(cur, ids, sink, group.tables, spans, whole=False)
            beside.put_in_early(cur, plan.rewind_id, group, spans)
        except RowsRefused:
            cur.execute("ROLLBACK TO SAVEPOINT early")
            continue
        tails[group.group_id] = [Span(span.topic_id, span.partition, span.end) for span in spans]
    return tails


def _lock_level(cur: Cursor, plan: Plan, hold: Callable[[], object], read_on: Callable[[], object]) -> None:
    """Locks all that a swap locks (② and ③) once the replay is where its group is. Until then it releases these locks again, and lets the
    replay read on. Raises `NotCaughtUp`."""
    for number in range(ROUNDS + 1):
        hold()
        cur.execute("SAVEPOINT level")
        if (behind := _behind(cur, plan.rewind_id)) is None:  # otherwise it would end commits in flight for nothing
            _lock_rewind(cur, plan)
            _lock_positions(cur, plan)
            behind = _behind(cur, plan.rewind_id)
        if behind is None:
            return
        if behind.paused or number == ROUNDS:
            raise behind
        log.info("replay beside reads on rewind=%s left=%s", plan.rewind_id, behind.left)
        cur.execute(f"ROLLBACK TO SAVEPOINT level; {RELEASE_IF_LOST}; {UNLIMITED}")
        cur.execute(SQL["limits"], {"lock_ms": str(GRACE_MS), "idle_ms": str(READ_ON_MS)})
        read_on()


def _behind(cur: Cursor, rewind_id: int) -> NotCaughtUp | None:
    """Returns the error for a replay that is not where its group is. `None` if it is there, or if the rewind has no replay."""
    left = beside.distance(cur, rewind_id)
    return NotCaughtUp(rewind_id=rewind_id, left=left, paused=beside.paused(cur, rewind_id)) if left else None


def _lock_positions(cur: Cursor, plan: Plan) -> dict[Place, int | None]:
    """Step ③: locks the positions of the groups, and of their backfills and replays."""
    positions = {place: _lock_position(cur, *place) for place in _places(plan)}
    sides = [*beside.to_lock(cur, plan.rewind_id), *backfill.to_lock(cur, {"rewind_id": plan.rewind_id, "undo_of": plan.undo_of})]
    for position in sorted(sides, key=lambda place: (*place[:2], place[2].partition)):
        _lock_position(cur, *position)
    return positions


def _positions(cur: Cursor, plan: Plan) -> dict[Place, int | None]:
    """Returns the positions of the groups. Locks nothing."""
    return {place: _position(cur, *place) for place in _places(plan)}


def _position(cur: Cursor, group_id: int, topic_id: int, partition: TopicPartition) -> int | None:
    """Like `_lock_position`, without the lock."""
    cur.execute(SQL["position"], {"group_id": group_id, "topic_id": topic_id, "partition": partition.partition})
    row = cur.fetchone()
    return None if row is None else int(row[0])


def _require_current(
    cur: Cursor,
    plan: Plan,
    specs: Mapping[int, ConsumerSpec],
    kafka_logs: Mapping[int, KafkaLogs],
    positions: Mapping[Place, int | None],
    outdated: Sequence[str],
) -> None:
    """Step ④: raises `StalePlan` with ``outdated`` and all other changes since planning."""
    changes = [*outdated, *_altered(plan), *_spec_mismatches(plan, specs), *_group_changes(cur, plan, specs)]
    changes += _partition_changes(plan, positions, kafka_logs)
    if changes:
        raise StalePlan(rewind_id=plan.rewind_id, changes=tuple(changes), begun=plan.state is RewindState.BESIDE)


def _require_whole_batches(cur: Cursor, plan: Plan) -> None:
    if problems := partial_batches(cur, {"rewind_id": plan.rewind_id}):
        raise StalePlan(rewind_id=plan.rewind_id, changes=tuple(problems), begun=plan.beside)


def _change(
    cur: Cursor,
    plan: Plan,
    images: Sequence[Mapping[str, Any]],
    specs: Mapping[int, ConsumerSpec],
    tails: Mapping[int, Sequence[Span]],
) -> None:
    """Steps ⑥ to ⑨. ``tails``: what a swap still exchanges in the groups of `_move_early`."""
    key = {"rewind_id": plan.rewind_id, "undo_of": plan.undo_of}
    _take_out(cur, plan, key, images, specs, tails)  # ⑥
    if plan.beside:
        beside.put_in(cur, plan, {group_id: spec.keys for group_id, spec in specs.items()}, tails)  # ⑦
    else:
        if plan.undo_of is not None:  # ⑦
            _put_back(cur, plan, key, specs)
        cur.execute(SQL["record_lost"], key)  # ⑧
    backfill.follow(cur, key, make=plan.backfill)
    cur.execute(SQL["move"], key)  # ⑨
    overwritten.set_floors(cur, key)


def _already_applied(plan: Plan, wanted: RewindState) -> Applied:
    done = {RewindState.APPLIED, *([RewindState.BESIDE] if wanted is RewindState.PLANNED else [])}
    if plan.state not in done:
        raise AlreadyDecided.of(plan)
    log.info("rewind was already applied rewind=%s by=%s at=%s", plan.rewind_id, plan.applied_by, plan.applied_at)
    return Applied(plan, already=True)


def _look_up(cluster: Cluster, partitions: Sequence[TopicPartition]) -> KafkaLogs:
    topics = cluster.topics(sorted({partition.topic for partition in partitions}))
    in_kafka = {partition for topic in topics for partition in topic.all()}
    existing = [partition for partition in partitions if partition in in_kafka]
    starts, ends = cluster.log_starts(existing), cluster.stable_ends(existing)
    return KafkaLogs(
        {topic.name: topic.kafka_uuid for topic in topics},
        {partition: (starts[partition], max(starts[partition], ends[partition])) for partition in existing},
    )


def _lock_groups(cur: Cursor, plan: Plan) -> None:
    """Locks the plan's groups: no other rewind, no drain and no change of failed records."""
    for group in _in_lock_order(plan):
        _lock_group(cur, group.group_id, f"rewinds of group {group.group}")


def _lock_group(cur: Cursor, group_id: int, what: str) -> None:
    cur.execute(SQL["limits"], {"lock_ms": str(LOCK_MS), "idle_ms": str(IDLE_MS)})
    wait, key = LockWait(what), {"class": REWIND_LOCK, "group_id": group_id}
    while _locked(cur, side.SQL["lock_group"], key) is None:
        wait.report_holders(cur, {**key, "topic_id": None, "partition": None})


def _lock_rewind(cur: Cursor, plan: Plan) -> bool:
    """Locks the plan's side groups and its row. Returns whether it has expired."""
    for side_id in beside.sides(cur, plan.rewind_id):
        _lock_group(cur, side_id, f"validation of the replay of rewind {plan.rewind_id}")
    cur.execute(SQL["limits"], {"lock_ms": "0", "idle_ms": str(IDLE_MS)})  # the rewind's row is never locked for long
    cur.execute(SQL["lock_rewind"], {"rewind_id": plan.rewind_id})
    expired = bool(scalar(cur))
    cur.execute(SQL["limits"], {"lock_ms": str(GRACE_MS), "idle_ms": str(IDLE_MS)})
    return expired


def _in_lock_order(plan: Plan) -> list[GroupPlan]:
    return sorted(plan.groups, key=lambda group: group.group_id)


def _places(plan: Plan) -> list[Place]:
    """Returns the positions of the plan, in lock order."""
    places = [(group.group_id, part.topic_id, part.partition) for group, part in plan]
    return sorted(places, key=lambda place: (*place[:2], place[2].partition))


def _lock_position(cur: Cursor, group_id: int, topic_id: int, partition: TopicPartition) -> int | None:
    """Locks and returns the position; `None` if it was deleted. Earlier locks stay."""
    wait, key = LockWait(f"position of {partition}"), {"group_id": group_id, "topic_id": topic_id, "partition": partition.partition}
    while (locked := _locked(cur, SQL["lock_partition"], key)) is None:
        ended = store.end_writers(cur, group_id, topic_id, partition)
        if ended:
            log.warning("ended a session that held a partition partition=%s sessions=%s", partition, ended)
        else:
            wait.report_holders(cur, {**key, "class": REWIND_LOCK})
    return int(locked[0][0]) if locked else None


def _locked(cur: Cursor, statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]] | None:
    """Returns the rows of a statement that waits for a lock; `None` on a timeout, or if the holder waits for this session (a drain does).
    Earlier locks stay."""
    cur.execute("SAVEPOINT lock")
    try:
        cur.execute(statement, parameters)
    except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected):
        cur.execute("ROLLBACK TO SAVEPOINT lock")
        return None
    locked = cur.fetchall()
    cur.execute("RELEASE SAVEPOINT lock")
    return locked


def _altered(plan: Plan) -> list[str]:
    """Reports a change of the plan's rows since planning. The digest covers everything that was approved."""
    if digest_of(plan, plan.groups) == plan.digest:
        return []
    return ["The plan was altered: its moves, or the state that it was made from, do not match its digest."]


def _spec_mismatches(plan: Plan, specs: Mapping[int, ConsumerSpec]) -> list[str]:
    """Reports groups and tables of the stored plan that differ from the consumer's file. A role that may rewind can store any table, and
    this session would run the triggers of that table."""
    mismatches = []
    for group in plan.groups:
        spec = specs[group.group_id]
        if (group.group, group.tables) != (spec.group, spec.table_names):
            mismatches.append(
                f"The plan has the group {group.group} and {group.table} for {group.consumer}; "
                f"its file has the group {spec.group} and {spec.shown_tables}."
            )
    return mismatches


def _group_changes(cur: Cursor, plan: Plan, specs: Mapping[int, ConsumerSpec]) -> list[str]:
    """Reports changes of groups, specs and sinks since planning and, for an undo, of the rows to restore."""
    changes = []
    for group in plan.groups:
        cur.execute(SQL["group_now"], {"group_id": group.group_id})
        name, last_rewind = single_row(cur)
        was, now = group.basis, basis_of(cur, specs[group.group_id], last_rewind)
        if name != group.group:
            changes.append(f"Group {group.group} was deleted.")
        changes += [
            f"The spec of {group.consumer} was changed: {name} was {was['spec'].get(name)} and is now {value}."
            for name, value in now["spec"].items()
            if was["spec"].get(name) != value
        ]
        gained = plan.state is RewindState.BESIDE and all(column in now["columns"] for column in was["columns"])
        if now["columns"] != was["columns"] and not gained and now["spec"]["sink"] == was["spec"]["sink"]:
            before, after = (", ".join(f"{name} {kind}" for name, kind in basis["columns"]) for basis in (was, now))
            changes.append(f"The columns of {group.table} were changed: {before} before, {after} now.")
        if now["last_rewind"] != was["last_rewind"]:
            changes.append(f"Group {group.group} has been rewound since.")
    if plan.undo_of is not None:
        undo.lock_archives(cur, plan.undo_of)
        changes += undo.problems(cur, read_plan(cur, plan.undo_of), {group_id: spec.table_names for group_id, spec in specs.items()})
    return changes


def _partition_changes(plan: Plan, positions: Mapping[Place, int | None], kafka_logs: Mapping[int, KafkaLogs]) -> list[str]:
    """Reports changes on the partitions since planning. Progress of the group is not a change."""
    changes = []
    for group, part in plan:
        partition, position, kafka = part.partition, positions[group.group_id, part.topic_id, part.partition], kafka_logs[group.group_id]
        if kafka.uuids.get(partition.topic) != part.kafka_uuid or partition not in kafka.logs:
            changes.append(f"{partition}: the topic was deleted and created again.")
            continue
        if position is None:
            changes.append(f"{partition}: the group's position was deleted.")
            continue
        if part.hold or plan.state is RewindState.BESIDE:  # its records have been read again
            continue
        start, end = kafka.logs[partition]
        if not start <= part.new <= end:
            why = "retention has passed it" if part.new < start else "the log was truncated"
            changes.append(f"{partition}: {part.new} is no longer in the log [{start}, {end}); {why}.")
        forward, is_forward = part.target > part.old, part.target > position
        if plan.undo_of is None and forward != is_forward:
            how = f"the group has passed the target {part.target}" if forward else f"the target {part.target} is now ahead of the group"
            changes.append(f"{partition}: {how}; its position was {part.old} and is now {position}.")
    return changes


def _take_out(
    cur: Cursor,
    plan: Plan,
    key: Mapping[str, Any],
    images: Sequence[Mapping[str, Any]],
    specs: Mapping[int, ConsumerSpec],
    tails: Mapping[int, Sequence[Span]],
) -> None:
    groups = _in_lock_order(plan)
    for group in groups:
        if problems := guards.problems(cur, {**key, "group_id": group.group_id}, group.tables):
            raise RowsStay(table=group.table, message=" ".join(problems))
    for group in groups:
        superseded = [image for image in images if image["group_id"] == group.group_id and not image["hold"]]
        superseded.sort(key=lambda image: image["partition"])
        spans = tails.get(group.group_id) or [Span(image["topic_id"], image["partition"], image["superseded_from"]) for image in superseded]
        ids = {**key, "group_id": group.group_id}
        for sink in reversed(group.tables):  # rows that refer to others were loaded after them
            take_out(cur, ids, sink, group.tables, spans, whole=not plan.beside)
        for sink, columns in specs[group.group_id].keys.items():
            deletions.park(cur, ids, sink)
            if plan.undo_of is None:  # an undo first restores overwritten rows
                deletions.put_back(cur, ids, sink, columns)
    cur.execute(SQL["take_from_ledger"], key)
    cur.execute(SQL["keep_lost_heads"], key)
    for group in groups:
        cur.execute(on_tables(SQL["keep_heads"], group.tables), {**key, "group_id": group.group_id, "sinks": list(group.tables)})


def _put_back(cur: Cursor, plan: Plan, key: Mapping[str, Any], specs: Mapping[int, ConsumerSpec]) -> None:
    assert plan.undo_of is not None
    cur.execute(SQL["put_back_in_ledger"], key)
    for group in _in_lock_order(plan):
        ids, keys = {**key, "group_id": group.group_id}, specs[group.group_id].keys
        overwritten.put_back(cur, ids, keys)
        for sink, columns in keys.items():
            deletions.put_back(cur, ids, sink, columns)
        for sink, columns in reversed([*keys.items()]):
            deletions.bring_back(cur, ids, sink, columns)  # before their rows give way to those of the archives
        for sink, columns in keys.items():
            give_way = functools.partial(overwritten.give_way, cur, ids, sink, columns)
            put_back(cur, plan.undo_of, group.group_id, sink, give_way)
        overwritten.unpark(cur, ids)
