"""The partitions that an attempt holds: claimed when assigned, released when revoked, dropped when lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import psycopg2.errors

from tidemark.consume.renamed import require_unread
from tidemark.db import REWIND_LOCK, limit_lock_waits, transaction
from tidemark.errors import DatabaseUnavailable, TidemarkError
from tidemark.group.coordinator import require_member
from tidemark.group.listener import Partitions, RebalanceListener
from tidemark.kafka.cluster import Cluster, Topic
from tidemark.offsets import flow, store
from tidemark.offsets.locks import LockWait
from tidemark.offsets.reset import LogTruncated, TopicRecreated, check_position, first_position
from tidemark.offsets.store import ClaimRefused, LostRange, LostReason, Owner, Position
from tidemark.records.ranges import Claim, Epoch, Log, Slice, TopicPartition, plan_batch
from tidemark.rewind.backfill import Backfill, end_now
from tidemark.sink.commit import Receipt
from tidemark.spec.model import OffsetReset

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

GRACE_MS = 10_000
"""How long a claim waits for a commit in flight on its partition. After that, it ends the other database session."""
JOINT_CLAIMS = 100
"""Maximum partitions claimed in one transaction."""
JOINT_WAIT_MS = 100
"""How long a joint claim waits for a commit in flight before the partitions are claimed one by one."""

RECREATED: LostReason = "topic re-created"
STORE_EVERY_S = 5.0
"""How often a continuous run updates the planned ends on its attempt's row."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """An attempt that claims partitions for a group.

    ``member_id`` is set under the group protocol: a claim then holds only while the group has this member.
    ``by_name``: the partitions were named one by one. A partition without a position is then not new in its topic, only unread.
    ``append_tables``: tables in which a record can occur only once (`tidemark.consume.renamed`).
    """

    group: str
    group_id: int
    attempt_id: int
    reset: OffsetReset | None
    owner: Owner
    member_id: str | None = None
    by_name: bool = False
    append_tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookUp:
    """The topics and logs of the cluster, and the ``ends`` up to which a run reads.

    With ``backfill``, the ends of the ranges that a rewind skipped: the side group holds the claims, the results belong to the backfill's
    group.
    """

    topics: Sequence[Topic]
    logs: Mapping[TopicPartition, Log]
    ends: Mapping[TopicPartition, int]
    backfill: Backfill | None = None

    def without(self, topics: Collection[str]) -> LookUp:
        logs = {partition: log_ for partition, log_ in self.logs.items() if partition.topic not in topics}
        ends = {partition: self.ends[partition] for partition in logs}
        return replace(self, topics=[topic for topic in self.topics if topic.name not in topics], logs=logs, ends=ends)


class ClaimedPartitions(RebalanceListener):
    """The rebalance listener that claims and releases partitions. ``claimant`` returns the current claimant."""

    def __init__(self, connection: Connection, cluster: Cluster, lookup: LookUp, claimant: Callable[[], Claimant]) -> None:
        self._connection, self._cluster, self._lookup, self._claimant = connection, cluster, lookup, claimant
        self._claims: dict[TopicPartition, Claim] = {}
        self._pending: set[TopicPartition] = set()
        self._refused: set[TopicPartition] = set()
        self._planned: dict[TopicPartition, dict[str, object]] = {}
        self._stored_at = time.monotonic()

    @property
    def lookup(self) -> LookUp:
        return self._lookup

    @property
    def complete(self) -> bool:
        """Whether every assigned partition is claimed. If not, the run must not end: it has not read the others."""
        return not self._refused

    @property
    def claims(self) -> list[Claim]:
        """The claims, sorted by partition."""
        return [self._claims[partition] for partition in sorted(self._claims)]

    @property
    def remaining(self) -> int:
        """Number of offsets still to be read."""
        return sum(max(0, self._lookup.ends[claim.partition] - claim.position) for claim in self.claims)

    def update(self, lookup: LookUp) -> None:
        """Switches to new ends. Claims partitions that were assigned before a look-up found them, and drops deleted ones.

        Raises `TopicRecreated` or `LogTruncated`.
        """
        uuids = {topic.name: topic.kafka_uuid for topic in self._lookup.topics}
        for topic in lookup.topics:
            if uuids.get(topic.name, topic.kafka_uuid) != topic.kafka_uuid:
                raise self.recreated_error(topic.name)
        self._lookup = lookup
        for partition in self._claims.keys() - lookup.logs.keys():
            del self._claims[partition]
            log.warning("topic was deleted group=%s partition=%s", self._claimant().group, partition)
        self._check_leader_epochs()
        if discovered := sorted(partition for partition in self._pending if partition in lookup.logs):
            self.on_partitions_assigned(discovered)
        elif self._update_plan() or time.monotonic() - self._stored_at >= STORE_EVERY_S:
            self._store_plan(self._claimant())

    def recreated_error(self, topic: str) -> TopicRecreated:
        """The error to raise for a topic that was deleted and created again."""
        positions = {claim.partition.partition: claim.position for claim in self.claims if claim.partition.topic == topic}
        return TopicRecreated(topic=topic, positions=positions)

    def next_batch(self, max_records: int) -> list[Slice]:
        """The slices to read next, within the operator's flow control (`tidemark.offsets.flow`). Empty if nothing is left."""
        with transaction(self._connection) as cur:
            control = flow.read(cur, self._claimant().group_id)
        open_claims = control.open(self.claims, self._lookup.ends)
        ends = dict(self._lookup.ends)
        if not any(claim.drained for claim in open_claims):  # in a retry topic, timestamps are the relay's
            ends = control.bounded(open_claims, ends, self._cluster.times_at, self._cluster.offsets_for_time)
        slices = plan_batch(open_claims, ends, max_records)
        return [replace(part, leader_epoch=self._lookup.logs[part.partition].leader_epoch) for part in slices]

    def require_held(self) -> None:
        """Raises `OffsetFenced` if a partition was taken away or rewound."""
        with transaction(self._connection) as cur:
            store.require_held(cur, self._claimant().group_id, self.claims)

    def advance(self, receipts: Iterable[Receipt]) -> None:
        for receipt in receipts:
            claim = self._claims[receipt.part.partition]
            self._claims[claim.partition] = replace(claim, position=receipt.part.end, leader_epoch=receipt.part.leader_epoch)

    # ---- the listener

    def on_partitions_assigned(self, partitions: Partitions) -> None:
        """Claims each partition in order: raises its epoch and fetches its position. Writes the plan to the attempt's row.

        Creates missing rows, and stores records lost by a reset or a re-created topic as ``lost_range`` rows. Partitions that cannot be
        claimed together are claimed in a transaction each. Raises `OffsetOutOfRange`, `LogTruncated`, `NoPosition`, `TopicRecreated` or
        `ClaimRefused`; partitions claimed before the error stay claimed. If a newer generation of the same group holds a partition, this
        member has not seen the rebalance yet: it claims the partition with the next assignment, if that still includes it.
        """
        claimant = self._claimant()
        visible = sorted(partition for partition in {*partitions, *self._refused} if partition in self._lookup.logs)
        self._pending = (self._pending | set(partitions)) - set(visible)  # claimed as soon as a look-up finds them
        for claim in claim_all(self._connection, claimant, self._lookup, visible, self._cluster):
            self._claims[claim.partition] = claim
        self._refused = set(visible) - self._claims.keys()
        self._check_leader_epochs()
        self._update_plan()
        self._store_plan(claimant)
        claimed = len(visible) - len(self._refused)
        log.info(
            "partitions claimed group=%s attempt=%s generation=%s partitions=%s",
            claimant.group,
            claimant.attempt_id,
            claimant.owner.generation,
            claimed,
        )

    def on_partitions_revoked(self, partitions: Partitions) -> None:
        """Releases partitions, unless another owner has claimed them meanwhile."""
        claimant = self._claimant()
        self._store_plan(claimant)
        self._pending -= set(partitions)
        self._refused -= set(partitions)
        held = [self._claims.pop(partition) for partition in partitions if partition in self._claims]
        with transaction(self._connection) as cur:
            for claim in held:
                store.release(cur, claimant.group_id, claim)

    def on_partitions_lost(self, partitions: Partitions) -> None:
        """Drops the partitions without releasing them: another member may own them already."""
        self._pending -= set(partitions)
        self._refused -= set(partitions)
        for partition in partitions:
            self._claims.pop(partition, None)

    def claim_again(self) -> None:
        """Claims everything again after an interrupted batch or a rewind, at the current positions.

        The epochs rise, so the old batch can no longer commit.
        """
        held = list(self._claims)
        self._claims.clear()
        self.on_partitions_assigned(sorted(held))

    def _check_leader_epochs(self) -> None:
        """Raises `LogTruncated` if a log was truncated below its position. Stores the logs' leader epochs with the positions.

        Asks Kafka only about partitions whose leader has changed since the position was stored: the same leader has the same log.
        """
        logs = self._lookup.logs
        elected = [claim for claim in self.claims if claim.leader_epoch != logs[claim.partition].leader_epoch]
        _require_not_truncated(self._cluster, elected)
        updated = []
        for claim in elected:
            log_ = logs[claim.partition]
            if (log_.leader_epoch or 0) >= (claim.leader_epoch or 0) and claim.position <= log_.end:
                self._claims[claim.partition] = replace(claim, leader_epoch=log_.leader_epoch)
                updated.append(self._claims[claim.partition])
        if updated:
            with transaction(self._connection) as cur:
                for claim in updated:
                    store.note_leader_epoch(cur, self._claimant().group_id, claim)

    def _update_plan(self) -> bool:
        """Updates the planned range of each partition. Returns whether a partition was added."""
        count = len(self._planned)
        for claim in self.claims:
            end = self._lookup.ends[claim.partition]
            if end > claim.position:
                planned = self._planned.setdefault(
                    claim.partition,
                    {
                        "topic": claim.partition.topic,
                        "topic_id": claim.topic_id,
                        "partition": claim.partition.partition,
                        "start": claim.position,
                    },
                )
                planned["end"] = end
        return len(self._planned) > count

    def _store_plan(self, claimant: Claimant) -> None:
        self._stored_at = time.monotonic()
        with transaction(self._connection) as cur:
            store.plan_attempt(cur, claimant.attempt_id, list(self._planned.values()))


def claim_all(
    connection: Connection, claimant: Claimant, lookup: LookUp, partitions: Collection[TopicPartition], cluster: Cluster
) -> list[Claim]:
    """See `ClaimedPartitions.on_partitions_assigned`."""
    names = {partition.topic for partition in partitions}
    topics = sorted((topic for topic in lookup.topics if topic.name in names), key=lambda topic: topic.name)
    with transaction(connection) as cur:
        positions = store.positions(cur, claimant.group)
        ids = {topic.name: store.ensure_topic(cur, topic.name, topic.kafka_uuid) for topic in topics}
    if nameless := [topic.name for topic in topics if not topic.has_id]:
        log.warning("topics have no id in this cluster, deleting and creating them again is not noticed topics=%s", ",".join(nameless))
    claims = []
    for topic in topics:
        current = [position for position in positions if position.topic_id == ids[topic.name]]
        old = [position for position in positions if position.partition.topic == topic.name and position.topic_id != ids[topic.name]]
        recreated = bool(old) and not current
        if recreated and claimant.reset in (None, OffsetReset.NONE):
            latest = max(position.topic_id for position in old)
            last_positions = {position.partition.partition: position.position for position in old if position.topic_id == latest}
            raise TopicRecreated(topic=topic.name, positions=last_positions)
        if recreated:
            _store_recreated_topic(connection, claimant, old)
        topic_is_read = bool(old) or (bool(current) and not claimant.by_name)
        topic_claims = _TopicClaims(connection, claimant, cluster, lookup.backfill, ids[topic.name], topic_is_read)
        logs = [lookup.logs[partition] for partition in topic.all() if partition in partitions]
        for first in range(0, len(logs), JOINT_CLAIMS):
            claims += topic_claims.claim(logs[first : first + JOINT_CLAIMS])
    return claims


@dataclass(frozen=True, slots=True)
class _TopicClaims:
    """Claims partitions of one topic. ``topic_is_read``: a new partition starts at its log start, even under `latest`."""

    connection: Connection
    claimant: Claimant
    cluster: Cluster
    backfill: Backfill | None
    topic_id: int
    topic_is_read: bool

    def claim(self, logs: Sequence[Log]) -> list[Claim]:
        """Claims the partitions in one transaction if possible, otherwise one by one. Omits those that a rebalance is about to move."""
        if self.backfill is None and len(logs) > 1:
            with contextlib.suppress(TidemarkError):  # such as a locked row: claiming them one by one shows the reason
                return self._in_transaction(logs, JOINT_WAIT_MS)
        claims = []
        for log_ in logs:
            try:
                claims.append(self._claim_one(log_))
            except ClaimRefused as error:
                if not self._rebalance_pending(error):
                    raise
                log.warning("claim refused until the next rebalance group=%s: %s", self.claimant.group, error)
        return claims

    def _in_transaction(self, logs: Sequence[Log], wait_ms: int) -> list[Claim]:
        """Claims all of these partitions in order, or none. Waits up to ``wait_ms`` for each commit in flight."""
        claimant = self.claimant
        claim = self._claim_row if self.backfill is None else self._claim_skipped
        messages: list[Callable[[], None]] = []
        with transaction(self.connection) as cur:
            limit_lock_waits(cur, wait_ms)
            if claimant.member_id is not None:
                require_member(cur, claimant.group, claimant.group_id, claimant.member_id)
            claims = [claim(cur, log_, messages) for log_ in logs]
        for message in messages:
            message()
        return claims

    def _claim_one(self, log_: Log) -> Claim:
        """Claims a partition. Ends the session of a commit that holds it for longer than `GRACE_MS`."""
        claimant, backfill, partition = self.claimant, self.backfill, log_.partition
        wait = LockWait(f"position of {partition}")
        while True:
            try:
                return self._in_transaction([log_], GRACE_MS)[0]
            except DatabaseUnavailable as error:
                if not isinstance(error.__cause__, psycopg2.errors.LockNotAvailable):
                    raise
            with transaction(self.connection) as cur:
                ended = store.end_writers(cur, claimant.group_id, self.topic_id, partition)
                if not ended:  # held by a rewind, or by another session that is not a writer
                    group_id = claimant.group_id if backfill is None else backfill.group_id
                    key = {"class": REWIND_LOCK, "group_id": group_id, "topic_id": self.topic_id, "partition": partition.partition}
                    wait.report_holders(cur, key)
            if ended:
                log.warning("ended a session that held a partition group=%s partition=%s sessions=%s", claimant.group, partition, ended)

    def _rebalance_pending(self, refused: ClaimRefused) -> bool:
        """Whether a newer generation of the claimant's own group holds the partition, so that the member is about to see a rebalance.

        False for manual assignment, which has no rebalances.
        """
        if self.claimant.member_id is None:
            return False
        with transaction(self.connection) as cur:
            return self.claimant.owner.generation < refused.current <= store.group_generation(cur, self.claimant.group_id)

    def _claim_row(self, cur: Cursor, log_: Log, messages: list[Callable[[], None]]) -> Claim:
        """Claims a partition, and creates its row if missing. ``messages`` are logged after the commit."""
        claimant, partition, topic_id = self.claimant, log_.partition, self.topic_id
        cur.execute(
            "SELECT FROM tidemark.partition_offset WHERE group_id = %s AND topic_id = %s AND partition = %s",
            (claimant.group_id, topic_id, partition.partition),
        )
        if cur.fetchone() is None:
            first = first_position(log_, claimant.reset, topic_is_read=self.topic_is_read)
            if first < log_.end:
                unread = Slice(partition, topic_id, first, log_.end, Epoch(0))
                require_unread(cur, claimant.group, claimant.group_id, claimant.append_tables, unread)
            store.start_partition(cur, claimant.group_id, topic_id, partition.partition, first)
            messages.append(partial(log.info, "partition starts group=%s partition=%s offset=%s", claimant.group, partition, first))
        claim = store.claim(cur, claimant.group_id, topic_id, partition, claimant.owner, end=log_.end)
        if claim.position > log_.end:  # another run has read past this look-up, or the log was truncated
            log_ = self.cluster.logs([partition])[partition]
            if claim.position > log_.end:
                _require_not_truncated(self.cluster, [claim])  # finds the truncation point even if the log has grown again
        jump = check_position(log_, claim.position, claimant.reset)
        if jump is None:
            return claim
        lost = LostRange(partition, topic_id, claim.position, jump.to, jump.reason)
        store.record_lost(cur, claimant.group_id, claimant.attempt_id, lost)
        if not claim.drained:  # Postgres has the records of a retry topic's messages
            messages.append(partial(_log_lost, claimant.group, lost))
        return store.jump(cur, claimant.group_id, claim, jump.to)

    def _claim_skipped(self, cur: Cursor, log_: Log, messages: list[Callable[[], None]]) -> Claim:
        """Claims a backfill's partition. Stores records that retention has deleted from its rest as lost."""
        claimant, backfill, partition, topic_id = self.claimant, self.backfill, log_.partition, self.topic_id
        assert backfill is not None
        claim = store.claim(cur, claimant.group_id, topic_id, partition, claimant.owner, end=log_.end)
        end = end_now(cur, backfill, topic_id, partition)  # under the position's lock, which a rewind needs to lower the end
        jump = None if claim.position >= end else check_position(log_, claim.position, claimant.reset)
        if jump is None:
            return claim
        lost = LostRange(partition, topic_id, claim.position, min(jump.to, end), jump.reason)
        store.shorten_skipped(cur, backfill.group_id, topic_id, partition, lost.start, min(jump.to, end))
        store.record_lost(cur, backfill.group_id, claimant.attempt_id, lost)
        messages.append(partial(_log_lost, claimant.group, lost))
        return store.jump(cur, claimant.group_id, claim, min(jump.to, end))


def _log_lost(group: str, lost: LostRange) -> None:
    values = (group, lost.partition, lost.start, lost.end, lost.reason)
    log.warning("records lost group=%s partition=%s start=%s end=%s reason=%s", *values)


def _require_not_truncated(cluster: Cluster, claims: Iterable[Claim]) -> None:
    """Raises `LogTruncated` for the first claim whose position lies beyond the point where the log was truncated."""
    by_partition = {claim.partition: (claim, claim.leader_epoch) for claim in claims if claim.leader_epoch is not None}
    cut = cluster.truncated({partition: (claim.position, epoch) for partition, (claim, epoch) in by_partition.items()})
    for partition in sorted(cut):
        claim, epoch = by_partition[partition]
        raise LogTruncated(partition=partition, position=claim.position, leader_epoch=epoch, end=cut[partition], drained=claim.drained)


def store_deleted_topics(connection: Connection, cluster: Cluster, group: str, group_id: int, attempt_id: int, lookup: LookUp) -> None:
    """Stores the unread records of deleted topics that a pattern matched as lost, up to the ends of the last sample.

    A topic counts as deleted if both the newest sample and the cluster lack it, while both have another topic of the group under its UUID:
    otherwise this may be another cluster, or one that is only partly restored. A cluster without UUIDs shows no such topic.
    """
    with transaction(connection) as cur:
        unseen = store.unseen(cur, group_id)
    if not unseen:
        return
    visible, hidden = cluster.visible({topic["name"] for topic in unseen})
    uuids = {topic.name: topic.kafka_uuid for topic in (*visible, *lookup.topics)}
    identified = {topic.kafka_uuid for topic in (*visible, *lookup.topics) if topic.has_id}
    same_cluster = [topic for topic in unseen if set(topic["others"]) & identified]
    deleted = [topic["topic_id"] for topic in same_cluster if topic["name"] not in uuids and topic["name"] not in hidden]
    with transaction(connection) as cur:
        ranges = store.leave_gone(cur, group_id, attempt_id, deleted, "topic deleted")
    for lost in ranges:
        _log_lost(group, lost)


def _store_recreated_topic(connection: Connection, claimant: Claimant, old: Collection[Position]) -> None:
    """Stores the unread records of a re-created topic's predecessors as lost, up to the end in the last sample, if it has one."""
    group_id, attempt_id, reason = claimant.group_id, claimant.attempt_id, RECREATED
    topic_ids = {position.topic_id for position in old}
    with transaction(connection) as cur:
        stored = store.left_behind(cur, group_id, topic_ids)
        ranges = store.leave_gone(cur, group_id, attempt_id, topic_ids - {topic_id for topic_id, _ in stored}, reason)
        stored |= {(lost.topic_id, lost.partition.partition) for lost in ranges}
        for position in old:
            if (position.topic_id, position.partition.partition) not in stored:
                ranges.append(LostRange(position.partition, position.topic_id, position.position, None, reason))
                store.record_lost(cur, group_id, attempt_id, ranges[-1])
    for lost in ranges:
        _log_lost(claimant.group, lost)
