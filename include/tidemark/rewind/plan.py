"""Plans a rewind: resolves it to offsets once and stores them, to be reviewed, approved and applied.

    ① check the request   ② read groups, positions and tables   ③ look up topics and the ranges of their logs in Kafka
    ④ resolve the scenario to one target per partition   ⑤ count the rows to take out, check that they can go, store the plan

A running group reads on: nothing is locked, and nothing is written before ⑤. `preview` stores nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, scalar, single_row, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster, SettingUnknown
from tidemark.kafka.failures import NotAllowed
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.rewind import adopt, guards, undo
from tidemark.rewind.beside import require_none
from tidemark.rewind.plan_model import Adopt, GroupPlan, PartitionPlan, Plan, Scenario, Undo
from tidemark.rewind.scenarios.scenario import EXPIRES_IN, to_json
from tidemark.rewind.scenarios.targets import (
    Outside,
    Place,
    TargetsOutOfRange,
    limited_to,
    moves,
    targets,
    unread_partitions,
    unvalidated,
)
from tidemark.rewind.store import read_plan
from tidemark.sink.table import SinkMissing, on_tables, quoted_table, read_columns
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import Deletes, OnFailure, RetryOrder, SinkMode
from tidemark.spec.scope import Scope
from tidemark.text.problems import check_reason
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "plan.sql")

ClusterOf = Callable[[ConsumerSpec], Cluster]
"""Returns the Kafka cluster that a consumer reads."""


class PlanRefused(Refused):
    """The rewind is not possible as requested; ``problems`` has every reason."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, "Nothing was planned."])


class CompactedTopics(Refused):
    """The rewind would read compacted topics again, of which Kafka keeps only the newest record of each key."""

    topics: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{', '.join(self.topics)}: compacted, so Kafka may no longer have all records that would be read again. Rows of older records "
            "would go and not come back, and rows that a tombstone deleted could come back. Nothing was planned. --allow-loss accepts that."
        )


@dataclass(slots=True)
class Consumer:
    """A consumer's state at planning."""

    spec: ConsumerSpec
    cluster: Cluster
    group_id: int
    basis: Mapping[str, Any]
    """The state whose change makes the plan stale; see `basis_of`."""
    now: Mapping[str, Any]
    """The group's state, its running attempts and its read rate."""
    positions: Sequence[store.Position]
    places: list[Place] = field(default_factory=list)
    moves: list[PartitionPlan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """What a rewind would move. All ``consumers`` move, or none; they share the database of their sinks. ``allow_loss``: a target before
    the start of the log becomes the start. ``backfill``: a separate run reads the skipped records later (`tidemark.rewind.backfill`).
    ``beside``: the records are first read beside the live rows (`tidemark.rewind.beside`). ``transform``: another function than the
    consumer's (``module:function``), for a rehearsal."""

    consumers: Sequence[ConsumerSpec]
    scope: Scope
    scenario: Scenario
    allow_loss: bool = field(default=False, kw_only=True)
    backfill: bool = field(default=False, kw_only=True)
    beside: bool = field(default=False, kw_only=True)
    transform: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class PlanRequest(MoveRequest):
    """A request for a rewind. ``by``: the requester. ``dag_id``, ``run_id``: the Airflow run."""

    reason: str
    by: str
    expires_in: timedelta = EXPIRES_IN
    dag_id: str | None = None
    run_id: str | None = None


def plan(connection: Connection, cluster_of: ClusterOf, request: PlanRequest) -> Plan:
    """Stores and returns the plan of a rewind. Changes nothing else; the consumers keep running.

    The plan leaves out partitions on which the group has no position or for which the scenario has no target.

    Stores nothing if it raises: `TargetsOutOfRange` with every target outside its log, `PlanRefused` with all other obstacles (a topic that
    was created again, rows that can only be taken back together or that the sink does not let go, a later rewind that must be undone
    first), `ReplayExists` for a second replay beside, `CompactedTopics` without ``allow_loss``, `BadInput` for a bad request,
    `SinkMissing`, `TopicsMissing`, `DatabaseUnavailable` or `BrokerUnavailable`.
    """
    reason = check_reason(request.reason)  # ①
    moved, scenario = _resolve_all(connection, cluster_of, request)
    request = replace(request, scenario=scenario, reason=reason)
    with transaction(connection) as cur:  # ⑤
        stored = _store(cur, request, _preview(cur, moved, request, trial=True))
    names = ",".join(spec.name for spec in request.consumers)
    log.info("rewind planned rewind=%s consumers=%s by=%s", stored.rewind_id, names, request.by)
    return stored


def _require_options(moved: Sequence[Consumer], request: MoveRequest) -> None:
    """Raises `PlanRefused` if a rewind cannot be backfilled, or read beside the live rows, as requested."""
    if request.backfill and (_undone(request.scenario) or not any(move.can_be_backfilled for consumer in moved for move in consumer.moves)):
        raise PlanRefused(problems=("This rewind skips nothing, so a backfill has nothing to read. Omit --backfill.",))
    if not request.beside:
        if request.transform is not None:
            raise PlanRefused(problems=("--transform is for a replay beside the live rows. Add --beside.",))
        return
    problems = []
    if request.backfill:
        problems.append("--beside reads records again, and --backfill reads skipped ones. Give one of them.")
    if isinstance(request.scenario, Undo | Adopt):
        problems.append("An undo puts rows back at once, and an adoption reads nothing again. Omit --beside.")
    if request.transform is not None and len(request.consumers) > 1:
        problems.append("--transform replaces the transform of one consumer. Name one.")
    for consumer in moved:
        if forward := [str(move.partition) for move in consumer.moves if not move.hold and move.target > move.old]:
            problems.append(f"{', '.join(forward)}: the target is ahead of the group. --beside reads records again, and skips none.")
        if consumer.spec.retry.order is RetryOrder.KEY:
            why = "with retry.order: key, records of the replay would have to wait for records of the group."
            problems.append(f"{consumer.spec.name} cannot be read beside: {why} Omit --beside.")
    if not any(not move.hold for consumer in moved for move in consumer.moves):
        problems.append("No partition moves back, so nothing would be read beside. Omit --beside.")
    if problems:
        raise PlanRefused(problems=tuple(problems))


def _with_shadow(cur: Cursor, group: GroupPlan, spec: ConsumerSpec) -> GroupPlan:
    """Returns the plan with the space that its shadows will take. Raises `PlanRefused` if it replaces too many rows."""
    replaced = sum(part.sink_rows for part in group.partitions)
    if replaced > spec.rewind.max_beside_rows:
        problem = (
            f"{spec.name}: a rewind beside would replace {counted(replaced, 'row')}, which are stored twice until its swap, and "
            f"rewind.max_beside_rows is {spec.rewind.max_beside_rows:,}. Choose a later target or fewer partitions, or raise the limit."
        )
        raise PlanRefused(problems=(problem,))
    cur.execute(SQL["sink_size"], {"tables": [quoted_table(table) for table in group.tables]})
    size, rows_there = single_row(cur)
    return replace(group, shadow_bytes=int(size * replaced / max(rows_there, replaced, 1)))


def preview(connection: Connection, cluster_of: ClusterOf, request: MoveRequest) -> tuple[GroupPlan, ...]:
    """Returns what `plan` would store now. Only reads, so the session may be read-only, and `Adopt` cannot be previewed.

    Raises the errors of `plan`, except for triggers that keep the rows: only the trial delete of `plan` detects these.
    """
    moved, _ = _resolve_all(connection, cluster_of, request)
    with transaction(connection) as cur:
        return _preview(cur, moved, request, trial=False)


def _undone(scenario: Scenario) -> int | None:
    return scenario.rewind_id if isinstance(scenario, Undo) else None


def _preview(cur: Cursor, moved: Sequence[Consumer], request: MoveRequest, *, trial: bool) -> tuple[GroupPlan, ...]:
    """Returns the plans of the groups, with counts. Raises `PlanRefused` if their rows cannot go, and `ReplayExists`. ``trial``: see
    `guards.trial`."""
    if request.beside:
        require_none(cur, {consumer.group_id: consumer.spec.group for consumer in moved})
    undo_of = _undone(request.scenario)
    groups = tuple(_group_plan(cur, consumer, undo_of) for consumer in moved)
    key, moving = {"undo_of": undo_of, **_moving((group.group_id, group.partitions) for group in groups)}, SQL["moving"]
    problems = partial_batches(cur, key, moving)
    for group in groups:
        of_group = (cur, {**key, "group_id": group.group_id}, group.tables, moving)
        problems += guards.problems(*of_group) or (guards.trial(*of_group) if trial else [])
    if problems:
        raise PlanRefused(problems=tuple(problems))
    if not request.beside:
        return groups
    return tuple(_with_shadow(cur, group, consumer.spec) for group, consumer in zip(groups, moved, strict=True))


def _resolve_all(connection: Connection, cluster_of: ClusterOf, request: MoveRequest) -> tuple[list[Consumer], Scenario]:
    """Steps ① to ④: returns the consumers that move, with their moves, and the scenario limited to the chosen partitions."""
    scenario, allow_loss = request.scenario, request.allow_loss
    _check_consumers(request.consumers)
    with transaction(connection) as cur:  # ②
        if isinstance(scenario, Adopt):
            for spec in request.consumers:
                store.ensure_group(cur, spec.group)
        requested = [_consumer(cur, spec, cluster_of(spec)) for spec in request.consumers]
    if isinstance(scenario, Adopt):  # ③
        problems = [problem for consumer in requested for problem in _locate_adopted(connection, consumer, scenario)]
    else:
        problems = [problem for consumer in requested for problem in _locate(consumer)]
    if problems:
        raise PlanRefused(problems=tuple(problems))
    partitions = [place.partition for consumer in requested for place in consumer.places]
    chosen = set(request.scope.select(partitions))
    with transaction(connection) as cur:  # ④
        if isinstance(scenario, Undo):
            problems, outside = _resolve_undo(cur, scenario, requested, chosen, allow_loss=allow_loss)
        else:
            problems = unread_partitions(scenario, partitions)
            scenario = limited_to(scenario, chosen)
            outside = []
            for consumer in requested:
                places = [place for place in consumer.places if place.partition in chosen]
                offsets = targets(cur, consumer.cluster, scenario, consumer.spec.group, consumer.group_id, places)
                consumer.moves, beyond = moves(scenario, places, offsets, allow_loss=allow_loss)
                outside += beyond
                problems += unvalidated(cur, scenario, consumer.group_id, places)
    if problems:
        raise PlanRefused(problems=tuple(problems))
    if outside:
        raise TargetsOutOfRange(outside=tuple(outside))
    if not allow_loss and not isinstance(scenario, Undo):
        _refuse_compacted(requested)
    moved = [consumer for consumer in requested if consumer.moves]
    if not moved:
        raise PlanRefused(problems=("The scenario has no target for any of the chosen partitions.",))
    _require_options(moved, request)
    return moved, scenario


def basis_of(cur: Cursor, spec: ConsumerSpec, last_rewind: int) -> dict[str, Any]:
    """Returns the state that must not change until the plan is applied: the spec's topics and sink, the sink's columns, the last rewind."""
    columns = []
    for sink in spec.sinks.values():
        sink_columns = read_columns(cur, sink.table)
        if not sink_columns:
            raise SinkMissing(table=sink.table)
        prefix = f"{sink.table}." if len(spec.sinks) > 1 else ""
        columns += [[f"{prefix}{column.name}", column.type] for column in sink_columns]
    spec_state = {
        "group": spec.group,
        "topics": list(spec.topics),
        "topic_pattern": spec.topic_pattern,
        **_sinks_of(spec),
        **({"partitions": str(spec.fixed)} if spec.partitions is not None else {}),
    }
    return {"spec": spec_state, "columns": columns, "last_rewind": last_rewind}


def _sinks_of(spec: ConsumerSpec) -> dict[str, Any]:
    sinks = [
        {
            "sink": sink.table,
            "mode": sink.mode.value,
            "key": list(sink.key),
            **({"deletes": sink.deletes.value} if sink.deletes is not Deletes.REFUSE else {}),
        }
        for sink in spec.sinks.values()
    ]
    if len(sinks) == 1:
        return sinks[0]
    return {"sink": spec.shown_tables, "mode": (SinkMode.UPSERT if spec.upserts else SinkMode.APPEND).value, "sinks": sinks}


def partial_batches(cur: Cursor, key: Mapping[str, Any], moving: str = guards.STORED) -> list[str]:
    """Returns the batches without lineage by record that a rewind would take back only in part, each with the nearest boundaries.
    ``key`` and ``moving``: see `guards.problems`."""
    cur.execute(SQL["partial_batches"].replace("{moving}", moving), key)
    problems = []
    for whole_batch_id, members in groupby(rows(cur), key=lambda row: row["whole_batch_id"]):
        parts = list(members)
        before = ", ".join(f"{part['topic']}/{part['partition']} to {part['start']}" for part in parts)
        after = ", ".join(f"{part['topic']}/{part['partition']} to {part['end']}" for part in parts)
        problems.append(
            f"Batch {whole_batch_id} can only be taken back whole, because its rows are made from many records. The nearest boundaries are "
            f"{before} or earlier, and {after}."
        )
    return problems


def _check_consumers(consumers: Sequence[ConsumerSpec]) -> None:
    if not consumers:
        raise BadInput(what="consumers", found="none given", fix="Name one or more.")
    databases = sorted({spec.connections.postgres for spec in consumers})
    if len(databases) > 1:
        found = f"they use several databases: {', '.join(databases)}"
        raise BadInput(what="consumers", found=found, fix="Make one plan per database; no transaction spans two.")
    groups = [spec.group for spec in consumers]
    if duplicates := sorted({group for group in groups if groups.count(group) > 1}):
        raise BadInput(what="consumers", found=f"several belong to group {', '.join(duplicates)}", fix="Name each group once.")


def _consumer(cur: Cursor, spec: ConsumerSpec, cluster: Cluster) -> Consumer:
    cur.execute(SQL["group_now"], {"group": spec.group})
    groups = rows(cur)
    if not groups:
        raise BadInput(what="group", found=f"no group {spec.group!r} has ever run here", fix="Run the consumer once first.")
    (now,) = groups
    return Consumer(spec, cluster, now["group_id"], basis_of(cur, spec, now["last_rewind"]), now, store.positions(cur, spec.group))


def _locate(consumer: Consumer) -> list[str]:
    """Looks up the current logs of the group's partitions; returns the problems."""
    spec, cluster = consumer.spec, consumer.cluster
    topics = cluster.topics(cluster.subscribed(spec))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    assigned = [position for position in consumer.positions if spec.fixed.covers(position.partition)]
    current = [position for position in assigned if uuids.get(position.partition.topic) == position.kafka_uuid]
    topics_read = {position.partition.topic for position in assigned}
    recreated = sorted((topics_read & uuids.keys()) - {position.partition.topic for position in current})
    starts = cluster.log_starts(position.partition for position in current)
    ends = cluster.stable_ends(position.partition for position in current)
    consumer.places = [
        Place(
            position.partition,
            position.topic_id,
            position.kafka_uuid,
            position.position,
            position.validated,
            starts[position.partition],
            max(starts[position.partition], ends[position.partition]),
        )
        for position in current
    ]
    problems = [
        f"Topic {topic} was deleted and created again since group {spec.group} read it. The old records cannot be read again. "
        f"Let {spec.name} start on the new topic (offset_reset: earliest or latest), then plan."
        for topic in recreated
    ]
    if not current and not recreated:
        problems.append(f"Group {spec.group} has no position on its topics yet. Run {spec.name} once; offset_reset sets where it starts.")
    return problems


def _locate_adopted(connection: Connection, consumer: Consumer, scenario: Adopt) -> list[str]:
    """`_locate` from the adopted group's positions."""
    spec = consumer.spec
    if consumer.positions:
        move = f"tidemark rewind plan {spec.name} --from-group kafka:{scenario.group}"
        return [f"Group {spec.group} has positions already, so it cannot adopt others. To move it: {move}"]
    consumer.places, problems = adopt.places(connection, consumer.cluster, spec, scenario.group)
    return problems


def _refuse_compacted(consumers: Iterable[Consumer]) -> None:
    """Raises `CompactedTopics`. A topic whose settings this client may not read counts as not compacted."""
    compacted: set[str] = set()
    for consumer in consumers:
        replayed = {move.partition.topic for move in consumer.moves if not move.hold and move.superseded_from < move.old}
        with contextlib.suppress(NotAllowed, SettingUnknown):
            compacted |= {topic for topic, cleanup in consumer.cluster.cleanups(replayed).items() if cleanup.compacted}
    if compacted:
        raise CompactedTopics(topics=tuple(sorted(compacted)))


def _resolve_undo(
    cur: Cursor, scenario: Undo, requested: Sequence[Consumer], chosen: set[TopicPartition], *, allow_loss: bool
) -> tuple[list[str], list[Outside]]:
    """Moves the consumers to where the stored rewind found them. Returns why it cannot be undone, and targets outside the log."""
    undone = read_plan(cur, scenario.rewind_id)
    problems = undo.problems(cur, undone, {consumer.group_id: consumer.spec.table_names for consumer in requested})
    consumers = {consumer.group_id: consumer for consumer in requested}
    places = {(consumer.group_id, place.topic_id, place.partition): place for consumer in requested for place in consumer.places}
    outside: list[Outside] = []
    for group, part in undone:
        if group.group_id not in consumers:
            continue  # reported by `undo.problems`
        place = places.get((group.group_id, part.topic_id, part.partition))
        if place is None:
            problems.append(f"{part.partition}: the group no longer has a position on the topic of rewind {undone.rewind_id}.")
        elif part.partition not in chosen:
            problems.append(f"{part.partition} is part of rewind {undone.rewind_id}, which can only be undone whole. Choose all of it.")
        elif part.hold:
            consumers[group.group_id].moves.append(place.held())
        elif (beyond := place.outside(part.old, allow_loss=allow_loss)) is not None:
            outside.append(beyond)
        else:
            consumers[group.group_id].moves.append(place.moved(part.old, part.superseded_from))
    return problems, outside


def _moving(moves: Iterable[tuple[int, Sequence[PartitionPlan]]]) -> dict[str, Any]:
    """Returns the parameters of the relation ``moving`` for the moves of each group id."""
    parts = [(group_id, part) for group_id, group_moves in moves for part in group_moves]
    return {
        "rewind_id": 0,
        "group_ids": [group_id for group_id, _ in parts],
        "topic_ids": [part.topic_id for _, part in parts],
        "partitions": [part.partition.partition for _, part in parts],
        "holds": [part.hold for _, part in parts],
        "superseded": [part.superseded_from for _, part in parts],
    }


def _group_plan(cur: Cursor, consumer: Consumer, undo_of: int | None) -> GroupPlan:
    """Counts what the consumer's moves would take out and put back now."""
    spec, now = consumer.spec, consumer.now
    key = {**_moving([(consumer.group_id, consumer.moves)]), "undo_of": undo_of}
    cur.execute(on_tables(SQL["count_superseded"].replace("{moving}", SQL["moving"]), spec.table_names), key)
    counts = {(row.pop("topic_id"), row.pop("partition")): row for row in rows(cur)}
    reports = spec.validation is not None and spec.validation.on_failure is OnFailure.REPORT
    cur.execute(SQL["announced"].replace("{moving}", SQL["moving"]), {**key, "reports": reports})
    announced = scalar(cur)
    ends = {place.partition: place.end for place in consumer.places}
    return GroupPlan(
        consumer=spec.name,
        group=spec.group,
        group_id=consumer.group_id,
        tables=spec.table_names,
        partitions=tuple(replace(move, **counts.get((move.topic_id, move.partition.partition), {})) for move in consumer.moves),
        lag=sum(max(0, ends[move.partition] - move.new) for move in consumer.moves),
        records_per_s=now["records_per_s"],
        group_state=now["state"],
        in_flight=now["in_flight"],
        announced_assets=spec.table_names if announced else (),
        basis=consumer.basis,
    )


def _store(cur: Cursor, request: PlanRequest, groups: Sequence[GroupPlan]) -> Plan:
    names = ("allow_loss", "backfill", "beside", "transform", "reason", "by", "expires_in", "dag_id", "run_id")
    cur.execute(SQL["add_rewind"], {
        **{name: getattr(request, name) for name in names},
        "scenario": json.dumps(to_json(request.scenario)),
        "undo_of": _undone(request.scenario),
        "digest": digest_of(request, groups),
    })  # fmt: skip
    rewind_id = scalar(cur)
    for group in groups:
        cur.execute(SQL["add_group"], {
            "rewind_id": rewind_id, "group_id": group.group_id, "consumer": group.consumer, "group": group.group, "sink": group.table,
            "sinks": list(group.tables), "basis": json.dumps(group.basis), "state": group.group_state, "in_flight": group.in_flight,
            "lag": group.lag, "records_per_s": group.records_per_s, "announced_assets": list(group.announced_assets),
            "shadow_bytes": group.shadow_bytes,
        })  # fmt: skip
        cur.execute(SQL["add_partitions"], {
            **_moving([(group.group_id, group.partitions)]),
            "rewind_id": rewind_id,
            "group_id": group.group_id,
            "targets": [part.target for part in group.partitions],
            "positions": [part.old for part in group.partitions],
            "offsets": [part.new for part in group.partitions],
            "sink_rows": [part.sink_rows for part in group.partitions],
            "failed_records": [part.failed_records for part in group.partitions],
        })  # fmt: skip
    return read_plan(cur, rewind_id)


def digest_of(rewind: MoveRequest | Plan, groups: Iterable[GroupPlan]) -> str:
    """Returns the digest of a rewind: plans with the same digest make the same moves from the same state."""
    bases = {group.group_id: group.basis for group in groups}
    moves = [
        [group.group_id, part.topic_id, part.partition.partition, part.hold, part.target, part.new, part.superseded_from]
        for group in groups
        for part in group.partitions
    ]
    options = (rewind.allow_loss, rewind.backfill, rewind.beside, rewind.transform)
    content = [to_json(rewind.scenario), *options, sorted(bases.items()), sorted(moves)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
