"""Planning a rewind: everything is resolved to numbers once, and stored as a row that can be read, approved and applied.

    ① check what was asked for   ② read groups, positions and tables   ③ ask Kafka for topics and the ranges of their logs
    ④ resolve the scenario to a target a partition   ⑤ store the plan, count what it would take out, check that it can be applied

A running group goes on reading: nothing is locked, and up to ⑤ nothing is written.
"""

from __future__ import annotations

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
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.rewind import guards, undo
from tidemark.rewind.model import Plan, Scenario, Undo
from tidemark.rewind.scenario import EXPIRES_IN, to_json
from tidemark.rewind.store import read_plan
from tidemark.rewind.targets import Move, Outside, Place, TargetsOutOfRange, moves, strangers, targets, unvalidated, within
from tidemark.sink.table import SinkMissing, on_table, read_columns
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import OnFailure
from tidemark.text.problems import check_reason

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.rewind", "plan.sql")

ClusterOf = Callable[[ConsumerSpec], Cluster]
"""The Kafka cluster that a consumer reads."""


class Scope(Protocol):
    """Which partitions a rewind moves; `tidemark.spec.scope.Scope` is one."""

    def select(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Those of ``partitions`` that are meant. Raises `BadInput` if it names any that are not among them."""


@dataclass(kw_only=True, eq=False)
class PlanRefused(Refused):
    """A rewind that cannot be done as it was asked for, with all the reasons."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.problems, "Nothing was planned."])


@dataclass(slots=True)
class Consumer:
    """A consumer as it is when the plan is made."""

    spec: ConsumerSpec
    cluster: Cluster
    group_id: int
    basis: Mapping[str, Any]
    """What makes the plan stale if it changes; see `basis_of`."""
    now: Mapping[str, Any]
    """The group's state, the attempts in flight, the rate at which it reads."""
    positions: Sequence[store.Position]
    places: list[Place] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


def plan(
    connection: Connection,
    cluster_of: ClusterOf,
    consumers: Sequence[ConsumerSpec],
    scope: Scope,
    scenario: Scenario,
    *,
    reason: str,
    by: str,
    allow_loss: bool = False,
    backfill: bool = False,
    expires_in: timedelta = EXPIRES_IN,
    dag_id: str | None = None,
    run_id: str | None = None,
) -> Plan:
    """Stores what a rewind of these consumers would do, and returns it; changes nothing else, and needs nobody to stop.

    ``connection`` is to the database of the consumers' sinks, which must be one; all of them are moved, or none is. ``by`` says who asks,
    ``dag_id`` and ``run_id`` for which Airflow run. With ``allow_loss`` what lies before the start of a log goes on at the start. With
    ``backfill`` what is skipped will be there for a run of its own to read (`tidemark.rewind.backfill`).
    A partition that the group has no position on, or of which the scenario says nothing, is no part of the plan.

    Raises `TargetsOutOfRange` with every target that no log has, `PlanRefused` with what else stands against it (a topic that was created
    again, rows that can only be taken back together or that the sink does not let go, a later rewind that an undo would need), `BadInput`
    for what was asked for, `SinkMissing`, `TopicsMissing`, `DatabaseUnavailable` or `BrokerUnavailable`. Then nothing is stored.
    """
    reason = check_reason(reason)  # ①
    _check_consumers(consumers)
    with transaction(connection) as cur:  # ②
        asked = [_consumer(cur, spec, cluster_of(spec)) for spec in consumers]
    problems = [problem for consumer in asked for problem in _locate(consumer)]  # ③
    if problems:
        raise PlanRefused(problems=tuple(problems))
    chosen = set(scope.select([place.partition for consumer in asked for place in consumer.places]))
    with transaction(connection) as cur:  # ④
        if isinstance(scenario, Undo):
            problems, outside = _undo(cur, scenario, asked, chosen, allow_loss=allow_loss)
        else:
            problems = strangers(scenario, [place.partition for consumer in asked for place in consumer.places])
            scenario = within(scenario, chosen)
            outside = [each for consumer in asked for each in _resolve(cur, scenario, consumer, chosen, allow_loss=allow_loss)]
            for consumer in asked:
                places = [place for place in consumer.places if place.partition in chosen]
                problems += unvalidated(cur, scenario, consumer.group_id, places)
    if problems:
        raise PlanRefused(problems=tuple(problems))
    if outside:
        raise TargetsOutOfRange(outside=tuple(outside))
    if not any(consumer.moves for consumer in asked):
        raise PlanRefused(problems=("Of the chosen partitions there is none that this scenario says anything about.",))
    if backfill and (isinstance(scenario, Undo) or not any(move.skips for consumer in asked for move in consumer.moves)):
        raise PlanRefused(problems=("This rewind skips nothing, so that there is nothing for a backfill to read: leave --backfill out.",))
    rewind = {
        "scenario": json.dumps(to_json(scenario)),
        "undo_of": scenario.rewind_id if isinstance(scenario, Undo) else None,
        "allow_loss": allow_loss,
        "backfill": backfill,
        "reason": reason,
        "by": by,
        "expires_in": expires_in,
        "dag_id": dag_id,
        "run_id": run_id,
    }
    with transaction(connection) as cur:  # ⑤
        moved = [consumer for consumer in asked if consumer.moves]
        made = _store(cur, rewind, moved)
        problems = torn(cur, made.rewind_id) + [problem for consumer in moved for problem in _guarded(cur, made, consumer)]
        if problems:
            raise PlanRefused(problems=tuple(problems))
    log.info("rewind planned rewind=%s consumers=%s by=%s", made.rewind_id, ",".join(spec.name for spec in consumers), by)
    return made


def basis_of(cur: Cursor, spec: ConsumerSpec, last_rewind: int) -> dict[str, Any]:
    """What must be the same when the plan is applied: topics and sink of the spec, the sink's columns, the last rewind."""
    columns = read_columns(cur, spec.sink.table)
    if not columns:
        raise SinkMissing(table=spec.sink.table)
    said = {
        "group": spec.group,
        "topics": list(spec.topics),
        "topic_pattern": spec.topic_pattern,
        "sink": spec.sink.table,
        "mode": spec.sink.mode.value,
        "key": list(spec.sink.key),
        **({"partitions": str(spec.fixed)} if spec.partitions is not None else {}),
    }
    return {"spec": said, "columns": [[column.name, column.type] for column in columns], "last_rewind": last_rewind}


def torn(cur: Cursor, rewind_id: int) -> list[str]:
    """Batches without lineage by record that this rewind would take back in part, each with what to do instead."""
    cur.execute(SQL["torn_anchors"], {"rewind_id": rewind_id})
    problems = []
    for anchor, members in groupby(rows(cur), key=lambda row: row["anchor_id"]):
        parts = list(members)
        before = ", ".join(f"{part['topic']}/{part['partition']} to {part['start']}" for part in parts)
        behind = ", ".join(f"{part['topic']}/{part['partition']} to {part['end']}" for part in parts)
        problems.append(
            f"Batch {anchor} can only be taken back whole, because its rows are made of many records: the nearest boundaries are "
            f"{before} or before that, and {behind}."
        )
    return problems


def _guarded(cur: Cursor, made: Plan, consumer: Consumer) -> list[str]:
    """What the sink has against it that its rows go."""
    key = {"rewind_id": made.rewind_id, "group_id": consumer.group_id, "undo_of": made.undo_of}
    table = consumer.spec.sink.table
    return guards.problems(cur, key, table) or guards.trial(cur, key, table)


def _check_consumers(consumers: Sequence[ConsumerSpec]) -> None:
    if not consumers:
        raise BadInput(what="consumers", found="there are none", fix="Name one or more.")
    databases = sorted({spec.connections.postgres for spec in consumers})
    if len(databases) > 1:
        found = f"they are in several databases: {', '.join(databases)}"
        raise BadInput(what="consumers", found=found, fix="Plan those of each database by themselves: no transaction spans two.")
    groups = [spec.group for spec in consumers]
    if doubled := sorted({group for group in groups if groups.count(group) > 1}):
        raise BadInput(what="consumers", found=f"several are of group {', '.join(doubled)}", fix="Name each group once.")


def _consumer(cur: Cursor, spec: ConsumerSpec, cluster: Cluster) -> Consumer:
    cur.execute(SQL["group_now"], {"group": spec.group})
    found = rows(cur)
    if not found:
        raise BadInput(what="group", found=f"no group {spec.group!r} has ever run here", fix="Let the consumer run once; it starts there.")
    (now,) = found
    return Consumer(spec, cluster, now["group_id"], basis_of(cur, spec, now["last_rewind"]), now, store.positions(cur, spec.group))


def _locate(consumer: Consumer) -> list[str]:
    """Finds the group's positions in the logs as they are now; returns what stands against it."""
    spec, cluster = consumer.spec, consumer.cluster
    topics = cluster.topics(spec.topics or cluster.matching(spec.topic_pattern or ""))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    mine = [position for position in consumer.positions if spec.fixed.covers(position.partition)]  # what it does not read is not moved
    held = [position for position in mine if uuids.get(position.partition.topic) == position.kafka_uuid]
    known = {position.partition.topic for position in mine}
    gone = sorted((known & uuids.keys()) - {position.partition.topic for position in held})
    starts = cluster.log_starts(position.partition for position in held)
    ends = cluster.stable_ends(position.partition for position in held)
    consumer.places = [
        Place(
            position.partition,
            position.topic_id,
            position.position,
            position.validated,
            starts[position.partition],
            max(starts[position.partition], ends[position.partition]),
        )
        for position in held
    ]
    problems = [
        f"Topic {topic} was deleted and created again since group {spec.group} read it: what the old one held cannot be read again. "
        f"Let {spec.name} start on the new one (offset_reset: earliest or latest), then plan."
        for topic in gone
    ]
    if not held and not gone:
        problems.append(
            f"Group {spec.group} has no position on its topics yet. Let {spec.name} run once; offset_reset says where it starts."
        )
    return problems


def _resolve(cur: Cursor, scenario: Scenario, consumer: Consumer, chosen: set[TopicPartition], *, allow_loss: bool) -> list[Outside]:
    places = [place for place in consumer.places if place.partition in chosen]
    found = targets(cur, consumer.cluster, scenario, consumer.spec.group, consumer.group_id, places)
    consumer.moves, outside = moves(scenario, places, found, allow_loss=allow_loss)
    return outside


def _undo(
    cur: Cursor, scenario: Undo, asked: Sequence[Consumer], chosen: set[TopicPartition], *, allow_loss: bool
) -> tuple[list[str], list[Outside]]:
    """As `_resolve`, from what was stored of the rewind; also what stands against its undo."""
    before = undo.read_images(cur, scenario.rewind_id)
    places = {(consumer.group_id, place.topic_id, place.partition.partition): place for consumer in asked for place in consumer.places}
    problems = undo.problems(cur, scenario.rewind_id, {consumer.group_id: consumer.spec.sink.table for consumer in asked})
    outside: list[Outside] = []
    for image in before:
        place = places.get((image.group_id, image.topic_id, image.partition.partition))
        consumer = next((each for each in asked if each.group_id == image.group_id), None)
        if consumer is None:
            continue  # said by `problems`
        if place is None:
            problems.append(f"{image.partition}: the group has no position on the topic any more that rewind {scenario.rewind_id} was of.")
        elif image.partition not in chosen:
            problems.append(f"{image.partition} is part of rewind {scenario.rewind_id}, which can only be undone whole: choose all of it.")
        elif image.hold:
            consumer.moves.append(Move(place, place.position, place.position, place.position, hold=True))
        elif not (image.old <= place.end and (image.old >= place.start or allow_loss)):
            outside.append(Outside(image.partition, image.old, place.start, place.end))
        else:
            consumer.moves.append(Move(place, image.old, max(image.old, place.start), image.superseded_from))
    return problems, outside


def _store(cur: Cursor, rewind: Mapping[str, Any], consumers: Sequence[Consumer]) -> Plan:
    cur.execute(SQL["add_rewind"], {**rewind, "digest": _digest(rewind, consumers)})
    (rewind_id,) = cur.fetchone() or (0,)
    for consumer in consumers:
        key = {"rewind_id": rewind_id, "group_id": consumer.group_id}
        cur.execute(SQL["add_group"], {
            **consumer.now, **key, "consumer": consumer.spec.name, "group": consumer.spec.group, "sink": consumer.spec.sink.table,
            "basis": json.dumps(consumer.basis), "lag": sum(max(0, move.place.end - move.to) for move in consumer.moves),
        })  # fmt: skip
        cur.execute(SQL["add_partitions"], {
            **key,
            "topic_ids": [move.place.topic_id for move in consumer.moves],
            "partitions": [move.place.partition.partition for move in consumer.moves],
            "holds": [move.hold for move in consumer.moves],
            "targets": [move.target for move in consumer.moves],
            "positions": [move.place.position for move in consumer.moves],
            "offsets": [move.to for move in consumer.moves],
            "superseded": [move.superseded_from for move in consumer.moves],
        })  # fmt: skip
        cur.execute(on_table(SQL["count_superseded"], consumer.spec.sink.table), key)
        validation = consumer.spec.validation
        cur.execute(SQL["note_told"], {**key, "reports": validation is not None and validation.on_failure is OnFailure.REPORT})
    return read_plan(cur, rewind_id)


def _digest(rewind: Mapping[str, Any], consumers: Sequence[Consumer]) -> str:
    """Two plans with the same digest are the same moves, made from the same state."""
    said = [rewind["scenario"], rewind["allow_loss"], rewind["backfill"]]
    state = [
        [
            consumer.group_id,
            consumer.basis,
            [[move.place.topic_id, move.place.partition.partition, move.hold, move.target, move.to] for move in consumer.moves],
        ]
        for consumer in consumers
    ]
    return hashlib.sha256(json.dumps([said, state], sort_keys=True).encode()).hexdigest()
