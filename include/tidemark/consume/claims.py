"""Taking partitions and giving them back: the seam where the group protocol plugs in.

``on_partitions_assigned`` claims (epoch up, position out) and seeks, ``on_partitions_revoked`` releases. For now one member takes
every partition, in a generation of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2.errors

from tidemark.db import transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.kafka.cluster import Topic
from tidemark.offsets import store
from tidemark.offsets.ranges import Claim, Generation, TopicPartition
from tidemark.offsets.reset import Log, TopicRecreated, check_position, first_position
from tidemark.offsets.store import Position
from tidemark.spec.model import OffsetReset

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

GRACE_MS = 10_000
"""How long a commit that is in flight on a partition is waited for, before its database session is ended."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims: an attempt of a group, in a generation of its own."""

    group: str
    group_id: int
    attempt_id: int
    generation: Generation
    reset: OffsetReset | None

    @property
    def owner(self) -> str:
        return f"attempt {self.attempt_id}"


def on_partitions_assigned(
    connection: Connection, me: Claimant, topics: Iterable[Topic], logs: Mapping[TopicPartition, Log]
) -> list[Claim]:
    """Claims every partition of ``topics``, in order, and returns each with the position to read from.

    Makes the rows that are missing, and stores what a reset or a re-created topic takes away as ``lost_range`` rows. Each partition is
    a transaction of its own. Raises `ClaimRefused`, `OffsetOutOfRange`, `NoPosition` or `TopicRecreated`; what was claimed stays so.
    """
    with transaction(connection) as cur:
        known = store.positions(cur, me.group)
        ids = {topic.name: store.ensure_topic(cur, topic.name, topic.kafka_uuid) for topic in topics}
    claims = []
    for topic in sorted(topics, key=lambda topic: topic.name):
        mine = [position for position in known if position.topic_id == ids[topic.name]]
        old = [position for position in known if position.partition.topic == topic.name and position.topic_id != ids[topic.name]]
        recreated = bool(old) and not mine
        if recreated and me.reset in (None, OffsetReset.NONE):
            latest = max(position.topic_id for position in old)
            left = {position.partition.partition: position.position for position in old if position.topic_id == latest}
            raise TopicRecreated(topic=topic.name, positions=left)
        if recreated:
            _leave_behind(connection, me, old)
        # what is new under a name that the group has read is read from its start, also under `latest`
        claims += [_claim(connection, me, ids[topic.name], logs[partition], topic_known=bool(mine or old)) for partition in topic.all()]
    log.info("partitions claimed group=%s attempt=%s generation=%s partitions=%s", me.group, me.attempt_id, me.generation, len(claims))
    return claims


def on_partitions_revoked(connection: Connection, me: Claimant, held: Iterable[Claim]) -> None:
    """Gives partitions back. What is already somebody else's is left alone."""
    with transaction(connection) as cur:
        for claim in sorted(held, key=lambda claim: claim.partition):
            store.release(cur, me.group_id, claim)


def _claim(connection: Connection, me: Claimant, topic_id: int, found: Log, *, topic_known: bool) -> Claim:
    for grace_ms in (GRACE_MS, GRACE_MS):
        try:
            with transaction(connection) as cur:
                cur.execute("SELECT set_config('lock_timeout', %s, true)", (str(grace_ms),))
                return _claim_row(cur, me, topic_id, found, topic_known=topic_known)
        except DatabaseUnavailable as error:
            if not isinstance(error.__cause__, psycopg2.errors.LockNotAvailable):
                raise
            blocked = error
        with transaction(connection) as cur:
            ended = store.end_older_sessions(cur, me.group_id, me.attempt_id)
        log.warning(
            "ended sessions of older attempts that held a partition group=%s partition=%s sessions=%s", me.group, found.partition, ended
        )
    raise blocked


def _claim_row(cur: Cursor, me: Claimant, topic_id: int, found: Log, *, topic_known: bool) -> Claim:
    partition = found.partition
    cur.execute(
        "SELECT FROM tidemark.partition_offset WHERE group_id = %s AND topic_id = %s AND partition = %s",
        (me.group_id, topic_id, partition.partition),
    )
    if cur.fetchone() is None:
        first = first_position(found, me.reset, topic_known=topic_known)
        store.start_partition(cur, me.group_id, topic_id, partition.partition, first)
        log.info("partition starts group=%s partition=%s offset=%s", me.group, partition, first)
    claim = store.claim(cur, me.group_id, topic_id, partition, me.generation, me.owner)
    jump = check_position(found, claim.position, me.reset)
    if jump is None:
        return claim
    if jump.lost is not None:
        store.record_lost(cur, me.group_id, me.attempt_id, topic_id, partition.partition, *jump.lost, jump.reason)
        log.warning("records lost group=%s partition=%s start=%s end=%s reason=%s", me.group, partition, *jump.lost, jump.reason)
    return store.jump(cur, me.group_id, claim, jump.to)


def _leave_behind(connection: Connection, me: Claimant, old: Iterable[Position]) -> None:
    """Stores that nobody can read the rest of a topic that is gone."""
    with transaction(connection) as cur:
        for position in old:
            store.record_lost(
                cur,
                me.group_id,
                me.attempt_id,
                position.topic_id,
                position.partition.partition,
                position.position,
                None,
                "topic re-created",
            )
            log.warning("topic was re-created group=%s partition=%s lost_from=%s", me.group, position.partition, position.position)
