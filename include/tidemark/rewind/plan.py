"""Plans a rewind: resolves it to offsets once and stores them, to be reviewed, approved and applied.

    ① check the request   ② read groups, positions and tables   ③ look up topics and the ranges of their logs in Kafka
    ④ resolve the scenario to one target per partition   ⑤ count the rows to take out, store the plan, check that it can be applied

A running group reads on: nothing is locked, and nothing is written before ⑤. `preview` stores nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from tidemark.db import rows, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster, cleanup_of
from tidemark.kafka.failures import NotAllowed
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.rewind import adopt, guards, undo
from tidemark.rewind.plan_model import Adopt, GroupPlan, PartitionPlan, Plan, Scenario, Undo
from tidemark.rewind.scenarios.scenario import EXPIRES_IN, to_json
from tidemark.rewind.scenarios.targets import (
    Move,
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
from tidemark.sink.table import SinkMissing, on_tables, read_columns
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import Deletes, OnFailure, SinkMode
from tidemark.text.problems import check_reason

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "plan.sql")

ClusterOf = Callable[[ConsumerSpec], Cluster]
"""Returns the Kafka cluster that a consumer reads."""


class PartitionFilter(Protocol):
    """Selects the partitions that a rewind moves; `tidemark.spec.scope.Scope` is one."""

    def select(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Returns the partitions in scope. Raises `BadInput` if the scope names one that is not in ``partitions``."""


@dataclass(kw_only=True, eq=False)
class PlanRefused(Refused):
    """The rewind is not possible as requested; ``problems`` has every reason."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, "Nothing was planned."])


@dataclass(kw_only=True, eq=False)
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
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a rewind. All ``consumers`` move, or none; they share the database of their sinks.

    ``by``: the requester. ``dag_id``, ``run_id``: the Airflow run. ``allow_loss``: a target before the start of the log becomes the start.
    ``backfill``: a separate run reads the skipped records later (`tidemark.rewind.backfill`).
    """

    consumers: Sequence[ConsumerSpec]
    scope: PartitionFilter
    scenario: Scenario
    reason: str
    by: str
    allow_loss: bool = False
    backfill: bool = False
    expires_in: timedelta = EXPIRES_IN
    dag_id: str | None = None
    run_id: str | None = None


def plan(connection: Connection, cluster_of: ClusterOf, request: PlanRequest) -> Plan:
    """Stores and returns the plan of a rewind. Changes nothing else; the consumers keep running.

    The plan leaves out partitions on which the group has no position or for which the scenario has no target.

    Stores nothing if it raises: `TargetsOutOfRange` with every target outside its log, `PlanRefused` with all other obstacles (a topic that
    was created again, rows that can only be taken back together or that the sink does not let go, a later rewind that must be undone
    first), `CompactedTopics` without ``allow_loss``, `BadInput` for a bad request, `SinkMissing`, `TopicsMissing`, `DatabaseUnavailable` or
    `BrokerUnavailable`.
    """
    reason = check_reason(request.reason)  # ①
    moved, scenario = _resolve_all(
        connection, cluster_of, request.consumers, request.scope, request.scenario, allow_loss=request.allow_loss
    )
    if request.backfill and (isinstance(scenario, Undo) or not any(move.skips for consumer in moved for move in consumer.moves)):
        raise PlanRefused(problems=("This rewind skips nothing, so a backfill has nothing to read. Omit --backfill.",))
    rewind = {
        "scenario": json.dumps(to_json(scenario)),
        "undo_of": scenario.rewind_id if isinstance(scenario, Undo) else None,
        "allow_loss": request.allow_loss,
        "backfill": request.backfill,
        "reason": reason,
        "by": request.by,
        "expires_in": request.expires_in,
        "dag_id": request.dag_id,
        "run_id": request.run_id,
    }
    with transaction(connection) as cur:  # ⑤
        stored = _store(cur, rewind, moved)
        key = {"rewind_id": stored.rewind_id, "undo_of": stored.undo_of}
        problems = partial_batches(cur, key)
        for consumer in moved:
            group_key, tables = {**key, "group_id": consumer.group_id}, consumer.spec.table_names
            problems += guards.problems(cur, group_key, tables) or guards.trial(cur, group_key, tables)
        if problems:
            raise PlanRefused(problems=tuple(problems))
    names = ",".join(spec.name for spec in request.consumers)
    log.info("rewind planned rewind=%s consumers=%s by=%s", stored.rewind_id, names, request.by)
    return stored


def preview(
    connection: Connection,
    cluster_of: ClusterOf,
    consumers: Sequence[ConsumerSpec],
    scope: PartitionFilter,
    scenario: Scenario,
    *,
    allow_loss: bool,
) -> tuple[GroupPlan, ...]:
    """Returns what `plan` would store now. Only reads, so the session may be read-only, and `Adopt` cannot be previewed.

    Raises the errors of `plan`, except for triggers that keep the rows: only the trial delete of `plan` detects these.
    """
    moved, scenario = _resolve_all(connection, cluster_of, consumers, scope, scenario, allow_loss=allow_loss)
    undo_of = scenario.rewind_id if isinstance(scenario, Undo) else None
    with transaction(connection) as cur:
        groups = tuple(_group_plan(cur, consumer, undo_of) for consumer in moved)
        key = {"undo_of": undo_of, **_moving(moved)}
        problems = partial_batches(cur, key, SQL["moving"])
        for consumer in moved:
            problems += guards.problems(cur, {**key, "group_id": consumer.group_id}, consumer.spec.table_names, SQL["moving"])
    if problems:
        raise PlanRefused(problems=tuple(problems))
    return groups


def _resolve_all(
    connection: Connection,
    cluster_of: ClusterOf,
    consumers: Sequence[ConsumerSpec],
    scope: PartitionFilter,
    scenario: Scenario,
    *,
    allow_loss: bool,
) -> tuple[list[Consumer], Scenario]:
    """Steps ① to ④: returns the consumers that move, with their moves, and the scenario limited to the chosen partitions."""
    _check_consumers(consumers)
    with transaction(connection) as cur:  # ②
        if isinstance(scenario, Adopt):
            for spec in consumers:
                store.ensure_group(cur, spec.group)
        requested = [_consumer(cur, spec, cluster_of(spec)) for spec in consumers]
    if isinstance(scenario, Adopt):  # ③
        problems = [problem for consumer in requested for problem in _locate_adopted(connection, consumer, scenario)]
    else:
        problems = [problem for consumer in requested for problem in _locate(consumer)]
    if problems:
        raise PlanRefused(problems=tuple(problems))
    chosen = set(scope.select([place.partition for consumer in requested for place in consumer.places]))
    with transaction(connection) as cur:  # ④
        if isinstance(scenario, Undo):
            problems, outside = _resolve_undo(cur, scenario, requested, chosen, allow_loss=allow_loss)
        else:
            problems = unread_partitions(scenario, [place.partition for consumer in requested for place in consumer.places])
            scenario = limited_to(scenario, chosen)
            outside = [target for consumer in requested for target in _resolve(cur, scenario, consumer, chosen, allow_loss=allow_loss)]
            for consumer in requested:
                places = [place for place in consumer.places if place.partition in chosen]
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
    return moved, scenario


def basis_of(cur: Cursor, spec: ConsumerSpec, last_rewind: int) -> dict[str, Any]:
    """Returns the state that must not change until the plan is applied: the spec's topics and sink, the sink's columns, the last rewind."""
    columns = []
    for sink in spec.tables.values():
        sink_columns = read_columns(cur, sink.table)
        if not sink_columns:
            raise SinkMissing(table=sink.table)
        prefix = f"{sink.table}." if len(spec.tables) > 1 else ""
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
        for sink in spec.tables.values()
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
    starts, problems = adopt.starts(consumer.cluster, spec, scenario.group)
    with transaction(connection) as cur:
        topics = {(start.partition.topic, start.kafka_uuid) for start in starts}
        ids = {uuid: store.ensure_topic(cur, topic, uuid) for topic, uuid in topics}
    consumer.places = [
        Place(start.partition, ids[start.kafka_uuid], start.position, start.position, start.log.start, start.log.end) for start in starts
    ]
    return problems


def _resolve(cur: Cursor, scenario: Scenario, consumer: Consumer, chosen: set[TopicPartition], *, allow_loss: bool) -> list[Outside]:
    places = [place for place in consumer.places if place.partition in chosen]
    offsets = targets(cur, consumer.cluster, scenario, consumer.spec.group, consumer.group_id, places)
    consumer.moves, outside = moves(scenario, places, offsets, allow_loss=allow_loss)
    return outside


def _refuse_compacted(consumers: Iterable[Consumer]) -> None:
    """Raises `CompactedTopics`. A topic whose settings this client may not read counts as not compacted."""
    compacted: set[str] = set()
    for consumer in consumers:
        replayed = {move.place.partition.topic for move in consumer.moves if not move.hold and move.superseded_from < move.place.position}
        with contextlib.suppress(NotAllowed):
            compacted |= {topic for topic, settings in consumer.cluster.settings(replayed).items() if cleanup_of(settings).compacted}
    if compacted:
        raise CompactedTopics(topics=tuple(sorted(compacted)))


def _resolve_undo(
    cur: Cursor, scenario: Undo, requested: Sequence[Consumer], chosen: set[TopicPartition], *, allow_loss: bool
) -> tuple[list[str], list[Outside]]:
    """`_resolve` from the stored rewind; also returns why it cannot be undone."""
    images = undo.read_images(cur, scenario.rewind_id)
    places = {(consumer.group_id, place.topic_id, place.partition.partition): place for consumer in requested for place in consumer.places}
    problems = undo.problems(cur, scenario.rewind_id, {consumer.group_id: consumer.spec.table_names for consumer in requested})
    outside: list[Outside] = []
    for image in images:
        place = places.get((image.group_id, image.topic_id, image.partition.partition))
        consumer = next((consumer for consumer in requested if consumer.group_id == image.group_id), None)
        if consumer is None:
            continue  # reported by `undo.problems`
        if place is None:
            problems.append(f"{image.partition}: the group no longer has a position on the topic of rewind {scenario.rewind_id}.")
        elif image.partition not in chosen:
            problems.append(f"{image.partition} is part of rewind {scenario.rewind_id}, which can only be undone whole. Choose all of it.")
        elif image.hold:
            consumer.moves.append(Move(place, place.position, place.position, place.position, hold=True))
        elif not (image.old <= place.end and (image.old >= place.start or allow_loss)):
            outside.append(Outside(image.partition, image.old, place.start, place.end))
        else:
            consumer.moves.append(Move(place, image.old, max(image.old, place.start), image.superseded_from))
    return problems, outside


def _moving(consumers: Sequence[Consumer]) -> dict[str, Any]:
    """Returns the parameters of the relation ``moving``."""
    moves = [(consumer.group_id, move) for consumer in consumers for move in consumer.moves]
    return {
        "rewind_id": 0,
        "group_ids": [group_id for group_id, _ in moves],
        "topic_ids": [move.place.topic_id for _, move in moves],
        "partitions": [move.place.partition.partition for _, move in moves],
        "holds": [move.hold for _, move in moves],
        "superseded": [move.superseded_from for _, move in moves],
    }


def _group_plan(cur: Cursor, consumer: Consumer, undo_of: int | None) -> GroupPlan:
    """Counts what the consumer's moves would take out and put back now."""
    spec, now = consumer.spec, consumer.now
    key = {**_moving([consumer]), "undo_of": undo_of}
    cur.execute(on_tables(SQL["count_superseded"].replace("{moving}", SQL["moving"]), spec.table_names), key)
    counts = {(row.pop("topic_id"), row.pop("partition")): row for row in rows(cur)}
    reports = spec.validation is not None and spec.validation.on_failure is OnFailure.REPORT
    cur.execute(SQL["announced"].replace("{moving}", SQL["moving"]), {**key, "reports": reports})
    (announced,) = cur.fetchone() or (False,)
    return GroupPlan(
        consumer=spec.name,
        group=spec.group,
        group_id=consumer.group_id,
        tables=spec.table_names,
        partitions=tuple(
            PartitionPlan(
                partition=move.place.partition,
                topic_id=move.place.topic_id,
                old=move.place.position,
                new=move.to,
                lost=(move.target, move.to) if not move.hold and move.to > move.target else None,
                superseded_from=move.superseded_from,
                **counts.get((move.place.topic_id, move.place.partition.partition), {}),
            )
            for move in consumer.moves
        ),
        lag=sum(max(0, move.place.end - move.to) for move in consumer.moves),
        records_per_s=now["records_per_s"],
        group_state=now["state"],
        in_flight=now["in_flight"],
        announced_assets=spec.table_names if announced else (),
    )


def _store(cur: Cursor, rewind: Mapping[str, Any], consumers: Sequence[Consumer]) -> Plan:
    cur.execute(SQL["add_rewind"], {**rewind, "digest": _digest(rewind, consumers)})
    (rewind_id,) = cur.fetchone() or (0,)
    for consumer in consumers:
        group = _group_plan(cur, consumer, rewind["undo_of"])
        cur.execute(SQL["add_group"], {
            **consumer.now, "rewind_id": rewind_id, "group_id": consumer.group_id, "consumer": group.consumer, "group": group.group,
            "sink": group.table, "sinks": list(group.tables), "basis": json.dumps(consumer.basis), "lag": group.lag,
            "announced_assets": list(group.announced_assets),
        })  # fmt: skip
        cur.execute(SQL["add_partitions"], {
            **_moving([consumer]),
            "rewind_id": rewind_id,
            "group_id": consumer.group_id,
            "targets": [move.target for move in consumer.moves],
            "positions": [move.place.position for move in consumer.moves],
            "offsets": [move.to for move in consumer.moves],
            "sink_rows": [part.sink_rows for part in group.partitions],
            "failed_records": [part.failed_records for part in group.partitions],
        })  # fmt: skip
    return read_plan(cur, rewind_id)


def _digest(rewind: Mapping[str, Any], consumers: Sequence[Consumer]) -> str:
    bases = {consumer.group_id: consumer.basis for consumer in consumers}
    moves = [
        (consumer.group_id, move.place.topic_id, move.place.partition.partition, move.hold, move.target, move.to, move.superseded_from)
        for consumer in consumers
        for move in consumer.moves
    ]
    return digest_of(json.loads(rewind["scenario"]), rewind["allow_loss"], rewind["backfill"], bases, moves)


def digest_of(
    scenario: Mapping[str, Any], allow_loss: bool, backfill: bool, bases: Mapping[int, Mapping[str, Any]], moves: Iterable[Sequence[Any]]
) -> str:
    """Returns a plan's digest: plans with the same digest make the same moves from the same state. ``bases`` are by group id; each of
    ``moves`` is the group's and the topic's id, partition, hold, target, new offset, and the offset from which rows are superseded."""
    content = [scenario, allow_loss, backfill, sorted(bases.items()), sorted(map(list, moves))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
