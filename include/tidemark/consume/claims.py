"""The partitions that an attempt holds: claimed when assigned, released when revoked, dropped when lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psycopg2.errors

from tidemark.consume.renamed import require_unread
from tidemark.db import REWIND_LOCK, transaction
from tidemark.errors import DatabaseUnavailable, TidemarkError
from tidemark.group.coordinator import require_member
from tidemark.group.listener import Partitions, RebalanceListener
from tidemark.kafka.cluster import Cluster, Topic
from tidemark.offsets import flow, store
from tidemark.offsets.locks import LockWait
from tidemark.offsets.reset import LogTruncated, TopicRecreated, check_position, first_position
from tidemark.offsets.store import ClaimRefused, Position
from tidemark.records.ranges import Claim, Epoch, Generation, Log, Slice, TopicPartition, plan_batch
from tidemark.rewind.backfill import Backfill, end_now
from tidemark.sink.commit import Receipt
from tidemark.spec.model import OffsetReset

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

Note = tuple[int, str, tuple[object, ...]]
"""A line of the log: level, text and values."""

log = logging.getLogger(__name__)

GRACE_MS = 10_000
"""How long a claim waits for a commit in flight on the partition before it ends that database session."""
CLAIMS_AT_ONCE = 100
TOGETHER_MS = 100
"""How long a claim of several partitions waits for a commit in flight before they are claimed one by one."""

STORE_EVERY_S = 5.0
"""How often a continuous run updates the planned ends on its attempt's row."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims: an attempt, for a group. ``owner`` is written to the partition rows.

    ``member_id`` is set under the group protocol: a claim then holds only while the group has this member.
    ``by_name``: the partitions were named one by one. One without a position is then not new in its topic; it just was not read before.
    ``append_tables``: where a record can be only once (`tidemark.consume.renamed`).
    """

    group: str
    group_id: int
    attempt_id: int
    reset: OffsetReset | None
    generation: Generation
    owner: str
    instance_id: str | None = None
    member_id: str | None = None
    by_name: bool = False
    append_tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookUp:
    """What a look at the cluster found. A run reads up to these ``ends``.

    With ``backfill``, the ends are those of the ranges that a rewind skipped: the side group holds the claims, the results belong to the
    backfill's group.
    """

    topics: Sequence[Topic]
    logs: Mapping[TopicPartition, Log]
    ends: Mapping[TopicPartition, int]
    backfill: Backfill | None = None

    def without(self, topics: Collection[str]) -> LookUp:
        kept = {partition: log_ for partition, log_ in self.logs.items() if partition.topic not in topics}
        ends = {partition: self.ends[partition] for partition in kept}
        return replace(self, topics=[topic for topic in self.topics if topic.name not in topics], logs=kept, ends=ends)


class Holding(RebalanceListener):
    """Tidemark's own rebalance listener. ``me`` returns the current claimant."""

    def __init__(self, connection: Connection, cluster: Cluster, found: LookUp, me: Callable[[], Claimant]) -> None:
        self._connection, self._cluster, self._found, self._me = connection, cluster, found, me
        self._claims: dict[TopicPartition, Claim] = {}
        self._unborn: set[TopicPartition] = set()
        self._refused: set[TopicPartition] = set()
        self._planned: dict[TopicPartition, dict[str, object]] = {}
        self._stored_at = time.monotonic()

    @property
    def found(self) -> LookUp:
        return self._found

    @property
    def complete(self) -> bool:
        """Whether every assigned partition is claimed. A run must not end as if it had read a partition that it could not claim."""
        return not self._refused

    @property
    def claims(self) -> list[Claim]:
        """Sorted by partition."""
        return [self._claims[partition] for partition in sorted(self._claims)]

    @property
    def left(self) -> int:
        """Number of offsets still to be read."""
        return sum(max(0, self._found.ends[claim.partition] - claim.position) for claim in self.claims)

    def see(self, found: LookUp) -> None:
        """Switches to new ends. Claims partitions that were assigned before they were found, and drops deleted ones.

        Raises `TopicRecreated` or `LogTruncated`.
        """
        known = {topic.name: topic.kafka_uuid for topic in self._found.topics}
        for topic in found.topics:
            if known.get(topic.name, topic.kafka_uuid) != topic.kafka_uuid:
                raise self.recreated(topic.name)
        self._found = found
        for partition in self._claims.keys() - found.logs.keys():
            del self._claims[partition]
            log.warning("topic was deleted group=%s partition=%s", self._me().group, partition)
        self._require_same_logs()
        if born := sorted(partition for partition in self._unborn if partition in found.logs):
            self.on_partitions_assigned(born)
        elif self._note_plan() or time.monotonic() - self._stored_at >= STORE_EVERY_S:
            self._store_plan(self._me())

    def recreated(self, topic: str) -> TopicRecreated:
        """The error to raise for a topic that was deleted and created again."""
        positions = {claim.partition.partition: claim.position for claim in self.claims if claim.partition.topic == topic}
        return TopicRecreated(topic=topic, positions=positions)

    def next_batch(self, max_records: int) -> list[Slice]:
        """The slices to read next, within the operator's flow control (`tidemark.offsets.flow`). Empty if nothing is left."""
        backfill = self._found.backfill
        with transaction(self._connection) as cur:
            now = flow.read(cur, self._me().group_id if backfill is None else backfill.group_id)
        open_ = now.open(self.claims, self._found.ends)
        ends = dict(self._found.ends)
        if not any(claim.drained for claim in open_):  # in a retry topic, timestamps are the relay's
            ends = now.bounded(open_, ends, self._cluster.times_at, self._cluster.offsets_for_time)
        slices = plan_batch(open_, ends, max_records)
        return [replace(part, leader_epoch=self._found.logs[part.partition].leader_epoch) for part in slices]

    def require_held(self) -> None:
        """Raises `OffsetFenced` if a partition was taken away or rewound."""
        with transaction(self._connection) as cur:
            store.require_held(cur, self._me().group_id, self.claims)

    def advance(self, receipts: Iterable[Receipt]) -> None:
        for receipt in receipts:
            claim = self._claims[receipt.part.partition]
            self._claims[claim.partition] = replace(claim, position=receipt.part.end, leader_epoch=receipt.part.leader_epoch)

    # ---- the listener

    def on_partitions_assigned(self, partitions: Partitions) -> None:
        """Claims each partition in order: raises its epoch and fetches its position. Writes the plan to the attempt's row.

        Creates missing rows, and stores what a reset or a re-created topic takes away as ``lost_range`` rows. A partition
        about which anything is unusual is claimed in a transaction of its own. Raises `OffsetOutOfRange`, `LogTruncated`, `NoPosition`,
        `TopicRecreated` or `ClaimRefused`; partitions claimed before the error stay claimed. If a newer generation of the same group
        holds a partition, this member has not learned of the rebalance yet: the partition is claimed with the next assignment, if that
        still includes it.
        """
        me = self._me()
        known = sorted(partition for partition in {*partitions, *self._refused} if partition in self._found.logs)
        self._unborn = (self._unborn | set(partitions)) - set(known)  # claimed as soon as a look-up finds them
        for claim in claim_all(self._connection, me, self._found, known, self._cluster):
            self._claims[claim.partition] = claim
        self._refused = set(known) - self._claims.keys()
        self._require_same_logs()
        self._note_plan()
        self._store_plan(me)
        claimed = len(known) - len(self._refused)
        log.info("partitions claimed group=%s attempt=%s generation=%s partitions=%s", me.group, me.attempt_id, me.generation, claimed)

    def on_partitions_revoked(self, partitions: Partitions) -> None:
        """Releases partitions. Those that another owner has claimed meanwhile stay untouched."""
        me = self._me()
        self._store_plan(me)
        self._unborn -= set(partitions)
        self._refused -= set(partitions)
        held = [self._claims.pop(partition) for partition in partitions if partition in self._claims]
        with transaction(self._connection) as cur:
            for claim in held:
                store.release(cur, me.group_id, claim)

    def on_partitions_lost(self, partitions: Partitions) -> None:
        """Drops the partitions without releasing them: another member may own them already."""
        self._unborn -= set(partitions)
        self._refused -= set(partitions)
        for partition in partitions:
            self._claims.pop(partition, None)

    def claim_again(self) -> None:
        """Claims everything again after an interrupted batch or a rewind, at the current positions.

        The epochs rise, so nothing of the old batch can commit any more.
        """
        held = list(self._claims)
        self._claims.clear()
        self.on_partitions_assigned(sorted(held))

    def _require_same_logs(self) -> None:
        """Raises `LogTruncated` if the log was truncated below a position. Stores the log's leader epoch with the positions.

        Asks Kafka only about partitions whose leader has changed since the position was stored: under the same leader, the log is the same.
        """
        logs = self._found.logs
        elected = [claim for claim in self.claims if claim.leader_epoch != logs[claim.partition].leader_epoch]
        _require_same_history(self._cluster, elected)
        noted = []
        for claim in elected:
            log_ = logs[claim.partition]
            if (log_.leader_epoch or 0) >= (claim.leader_epoch or 0) and claim.position <= log_.end:
                self._claims[claim.partition] = replace(claim, leader_epoch=log_.leader_epoch)
                noted.append(self._claims[claim.partition])
        if noted:
            with transaction(self._connection) as cur:
                for claim in noted:
                    store.note_leader_epoch(cur, self._me().group_id, claim)

    def _note_plan(self) -> bool:
        """Updates the planned range of each partition. Returns whether a partition was added."""
        known = len(self._planned)
        for claim in self.claims:
            end = self._found.ends[claim.partition]
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
        return len(self._planned) > known

    def _store_plan(self, me: Claimant) -> None:
        self._stored_at = time.monotonic()
        with transaction(self._connection) as cur:
            store.plan_attempt(cur, me.attempt_id, list(self._planned.values()))


def claim_all(connection: Connection, me: Claimant, found: LookUp, partitions: Collection[TopicPartition], cluster: Cluster) -> list[Claim]:
    """See `Holding.on_partitions_assigned`."""
    wanted = {partition.topic for partition in partitions}
    topics = sorted((topic for topic in found.topics if topic.name in wanted), key=lambda topic: topic.name)
    with transaction(connection) as cur:
        known = store.positions(cur, me.group)
        ids = {topic.name: store.ensure_topic(cur, topic.name, topic.kafka_uuid) for topic in topics}
    claims = []
    for topic in topics:
        mine = [position for position in known if position.topic_id == ids[topic.name]]
        old = [position for position in known if position.partition.topic == topic.name and position.topic_id != ids[topic.name]]
        recreated = bool(old) and not mine
        if recreated and me.reset in (None, OffsetReset.NONE):
            latest = max(position.topic_id for position in old)
            left = {position.partition.partition: position.position for position in old if position.topic_id == latest}
            raise TopicRecreated(topic=topic.name, positions=left)
        if recreated:
            _leave_behind(connection, me, old)
        topic_known = bool(old) or (bool(mine) and not me.by_name)  # then a new partition starts at its log start, even under `latest`
        logs = [found.logs[partition] for partition in topic.all() if partition in partitions]
        for at in range(0, len(logs), CLAIMS_AT_ONCE):
            some = logs[at : at + CLAIMS_AT_ONCE]
            together = _claim_together(connection, me, ids[topic.name], some, cluster, found.backfill, topic_known=topic_known)
            if together is not None:
                claims += together
                continue
            for log_ in some:
                try:
                    claims.append(_claim(connection, me, ids[topic.name], log_, cluster, found.backfill, topic_known=topic_known))
                except ClaimRefused as error:
                    if not _group_went_on(connection, me, error):
                        raise
                    log.warning("claim refused until the next rebalance group=%s: %s", me.group, error)
    return claims


def _claim_together(
    connection: Connection,
    me: Claimant,
    topic_id: int,
    logs: Sequence[Log],
    cluster: Cluster,
    backfill: Backfill | None,
    *,
    topic_known: bool,
) -> list[Claim] | None:
    """Claims several partitions in one transaction, in their order. `None` if that is not possible, for whatever reason: a row is locked, a
    claim is refused. Then nothing is claimed, and claiming them one by one shows why."""
    if backfill is not None or len(logs) == 1:
        return None
    notes: list[Note] = []
    try:
        with transaction(connection) as cur:
            cur.execute("SELECT set_config('lock_timeout', %s, true)", (str(TOGETHER_MS),))
            if me.member_id is not None:
                require_member(cur, me.group, me.group_id, me.member_id)
            claims = [_claim_row(cur, me, topic_id, each, cluster, notes, topic_known=topic_known) for each in logs]
    except TidemarkError:
        return None
    _log(notes)
    return claims


def _group_went_on(connection: Connection, me: Claimant, refused: ClaimRefused) -> bool:
    """Whether a newer generation of the claimant's own group holds the partition, so that a rebalance is about to reach the member.

    A claimant outside the group (a run with manual assignment) has a generation to which no rebalance leads.
    """
    if me.member_id is None:
        return False
    with transaction(connection) as cur:
        return me.generation < refused.current <= store.group_generation(cur, me.group_id)


def _claim(
    connection: Connection, me: Claimant, topic_id: int, found: Log, cluster: Cluster, backfill: Backfill | None, *, topic_known: bool
) -> Claim:
    wait = LockWait(f"position of {found.partition}")
    while True:
        try:
            with transaction(connection) as cur:
                cur.execute("SELECT set_config('lock_timeout', %s, true)", (str(GRACE_MS),))
                if me.member_id is not None:
                    require_member(cur, me.group, me.group_id, me.member_id)
                if backfill is not None:
                    return _claim_skipped(cur, me, topic_id, found, backfill)
                notes: list[Note] = []
                claim = _claim_row(cur, me, topic_id, found, cluster, notes, topic_known=topic_known)
            _log(notes)
            return claim
        except DatabaseUnavailable as error:
            if not isinstance(error.__cause__, psycopg2.errors.LockNotAvailable):
                raise
        with transaction(connection) as cur:
            ended = store.end_writers(cur, me.group_id, topic_id, found.partition)
            if not ended:  # held by a rewind, or by another session that is not a writer
                group_id = me.group_id if backfill is None else backfill.group_id
                wait.say(cur, {"class": REWIND_LOCK, "group_id": group_id, "topic_id": topic_id, "partition": found.partition.partition})
        if ended:
            log.warning("ended a session that held a partition group=%s partition=%s sessions=%s", me.group, found.partition, ended)


def _claim_row(cur: Cursor, me: Claimant, topic_id: int, found: Log, cluster: Cluster, notes: list[Note], *, topic_known: bool) -> Claim:
    """Adds what is to be logged once it is committed to ``notes``."""
    partition = found.partition
    cur.execute(
        "SELECT FROM tidemark.partition_offset WHERE group_id = %s AND topic_id = %s AND partition = %s",
        (me.group_id, topic_id, partition.partition),
    )
    if cur.fetchone() is None:
        first = first_position(found, me.reset, topic_known=topic_known)
        if first < found.end:
            require_unread(cur, me.group, me.group_id, me.append_tables, Slice(partition, topic_id, first, found.end, Epoch(0)))
        store.start_partition(cur, me.group_id, topic_id, partition.partition, first)
        notes.append((logging.INFO, "partition starts group=%s partition=%s offset=%s", (me.group, partition, first)))
    claim = store.claim(cur, me.group_id, topic_id, partition, me.generation, me.owner, instance_id=me.instance_id, end=found.end)
    if claim.position > found.end:  # another run looked later and read further, or the log was truncated
        found = cluster.logs([partition])[partition]
        if claim.position > found.end:
            _require_same_history(cluster, [claim])  # finds the truncation point even if the log has grown since
    jump = check_position(found, claim.position, me.reset)
    if jump is None:
        return claim
    if jump.lost is not None:
        store.record_lost(cur, me.group_id, me.attempt_id, topic_id, partition.partition, *jump.lost, jump.reason)
        lost = (me.group, partition, *jump.lost, jump.reason)
        notes.append((logging.WARNING, "records lost group=%s partition=%s start=%s end=%s reason=%s", lost))
    return store.jump(cur, me.group_id, claim, jump.to)


def _log(notes: Iterable[Note]) -> None:
    for level, text, values in notes:
        log.log(level, text, *values)


def _require_same_history(cluster: Cluster, claims: Iterable[Claim]) -> None:
    """Raises `LogTruncated` for the first claim whose position lies beyond the point where the log was truncated."""
    known = {claim.partition: (claim, claim.leader_epoch) for claim in claims if claim.leader_epoch is not None}
    cut = cluster.truncated({partition: (claim.position, epoch) for partition, (claim, epoch) in known.items()})
    for partition in sorted(cut):
        claim, epoch = known[partition]
        raise LogTruncated(partition=partition, position=claim.position, leader_epoch=epoch, end=cut[partition], drained=claim.drained)


def _claim_skipped(cur: Cursor, me: Claimant, topic_id: int, found: Log, backfill: Backfill) -> Claim:
    """Claims a backfill's partition. What retention has deleted of the rest is permanently lost, and stored as such."""
    partition = found.partition
    claim = store.claim(cur, me.group_id, topic_id, partition, me.generation, me.owner, end=found.end)
    end = end_now(cur, backfill, topic_id, partition)  # under the position's lock, which a rewind needs to lower the end
    jump = None if claim.position >= end else check_position(found, claim.position, me.reset)
    if jump is None:
        return claim
    to = min(jump.to, end)
    store.shorten_skipped(cur, backfill.group_id, topic_id, partition, claim.position, to)
    store.record_lost(cur, backfill.group_id, me.attempt_id, topic_id, partition.partition, claim.position, to, jump.reason)
    log.warning("records lost group=%s partition=%s start=%s end=%s reason=%s", me.group, partition, claim.position, to, jump.reason)
    return store.jump(cur, me.group_id, claim, to)


def leave_gone(connection: Connection, cluster: Cluster, group: str, group_id: int, attempt_id: int, found: LookUp) -> None:
    """Stores what was not read of topics that a pattern matched and that are gone from Kafka as lost, as far as the last sample knows it.

    A topic is gone if neither the newest sample nor a look now finds it, while both find another topic of the group under its UUID: else
    this may be another cluster, or one that has not come back whole.
    """
    with transaction(connection) as cur:
        unseen = store.unseen(cur, group_id)
    if not unseen:
        return
    visible, hidden = cluster.visible({one["name"] for one in unseen})
    there = {topic.name: topic.kafka_uuid for topic in (*visible, *found.topics)}
    same = [one for one in unseen if set(one["others"]) & set(there.values())]
    gone = [one["topic_id"] for one in same if one["name"] not in there and one["name"] not in hidden]
    with transaction(connection) as cur:
        lost = store.leave_gone(cur, group_id, attempt_id, gone, "topic deleted")
    for each in lost:
        log.warning("records lost group=%s partition=%s start=%s end=%s reason=topic deleted", group, each.partition, each.start, each.end)


def _leave_behind(connection: Connection, me: Claimant, old: Iterable[Position]) -> None:
    """Stores the unread rest of a deleted topic as lost: up to the end that the last sample knows, or without one."""
    old = list(old)
    topic_ids = {each.topic_id for each in old}
    with transaction(connection) as cur:
        known = store.left_behind(cur, me.group_id, topic_ids)
        lost = store.leave_gone(cur, me.group_id, me.attempt_id, topic_ids - {topic_id for topic_id, _ in known}, "topic re-created")
        known |= {(each.topic_id, each.partition.partition) for each in lost}
        for each in lost:
            log.warning("topic was re-created group=%s partition=%s lost_from=%s to=%s", me.group, each.partition, each.start, each.end)
        for position in old:
            part = position.partition.partition
            if (position.topic_id, part) not in known:
                store.record_lost(cur, me.group_id, me.attempt_id, position.topic_id, part, position.position, None, "topic re-created")
                log.warning("topic was re-created group=%s partition=%s lost_from=%s", me.group, position.partition, position.position)
