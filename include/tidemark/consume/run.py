"""A run of a consumer. A bounded run reads up to the current ends and stops; a continuous run reads new records until its time is up.

    ① look up topics and ends   ② claim the assigned partitions   ③ store the planned ranges
    ④ start the engine, check the sink and add its columns   ⑤ read batch after batch until every position has reached its end
    ⑥ release, leave

A run with nothing to read ends after ③, without starting Spark. It needs no driver: the caller's process looks up the ends first, and
runs the attempt itself if every partition has reached its end. Commits before a failure stay; the next attempt continues from there.

A consumer with one member assigns itself all partitions (`ManualAssignment`). With several, each run is a member of the group
(`GroupMembership`): between two batches it learns which partitions were assigned or revoked, and it ends when its partitions are read.
A drain reads the due records of the group's retry topics, a backfill the records that a rewind skipped, a replay beside those that it reads
again (`tidemark.consume.extent`). They are bounded and use manual assignment.

A continuous run starts the engine first and then takes over from the previous run, which detects this before its next batch and ends. A
run whose partitions a rewind has moved detects that in the same way, claims them again and continues at the new positions.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemark import migrations, roles
from tidemark.connections import Connections
from tidemark.consume.batch import Engine, Start, require_same_topics, run_batch
from tidemark.consume.claims import LookUp, store_deleted_topics
from tidemark.consume.evolve import evolve_tables
from tidemark.consume.extent import Continuous, Drain, Extent, Side
from tidemark.consume.lookup import last_records, look
from tidemark.consume.membership import Attempt, GroupMembership, Interrupt, ManualAssignment, Membership
from tidemark.consume.rewind_watch import RewindWatch
from tidemark.db import DatabaseUrl, answering, keep_visible, read_url, session, transaction
from tidemark.errors import Broken, BrokerUnavailable, Fenced, Refused, TidemarkError, Unavailable, message_of
from tidemark.kafka.cluster import Cluster, TopicsMissing
from tidemark.kafka.reader import RangeGone
from tidemark.offsets import store
from tidemark.offsets.mirror import mirrored, require_free
from tidemark.offsets.sampling import sample_or_log
from tidemark.offsets.store import ClaimRefused, OffsetFenced, TaskIdentity
from tidemark.packages import optional
from tidemark.profiles import Profile
from tidemark.records.ranges import TopicPartition
from tidemark.retry import Ladder
from tidemark.retry.breaker import Breaker
from tidemark.retry.order import HeldTooMany
from tidemark.rewind import beside
from tidemark.rewind.backfill import Backfill, find
from tidemark.rewind.side import of_attempt
from tidemark.sink.commit import Receipt
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.spec import ConsumerSpec, OffsetReset, RetryOrder, RunMode
from tidemark.text.wording import counted
from tidemark.waiting import waiting
from tidemark.wires import of_servers

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 60.0
"""How often a continuous run samples its group's lag."""
DRAIN_RECORDS = 100_000
"""Maximum offsets in a drain's batch: the stored state of its records is held in memory."""


class TooManyFailed(Refused):
    """More records failed than the spec allows."""

    failed: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{counted(self.failed, 'record')} failed in this run, and batch.max_failed_records is {self.limit}. The run stops; "
            "its commits stay, and the failed records are in tidemark.failed_record. Fix the transform or raise the limit."
        )


class _DriverNeeded(Exception):
    """The attempt has work that needs an engine, so a driver must run it."""


def kind(error: BaseException) -> str:
    """The error's kind in one word, for the attempt's row."""
    kinds = {"refused": Refused, "fenced": Fenced, "unavailable": Unavailable, "broken": Broken}
    if isinstance(error, TidemarkError) and error.retriable:
        return "unavailable"
    return next((name for name, base in kinds.items() if isinstance(error, base)), "failed")


def open_attempt(database_url: DatabaseUrl, group: str, task: TaskIdentity, *, of_rewind: int | None = None) -> int:
    """Writes the attempt's row before its driver starts. ``of_rewind``: the attempt reads the records that this rewind skipped, or its
    replay beside.

    Raises `SchemaMismatch`, `RoleLacks`, and `BadInput` if the rewind has neither for this group.
    """
    with session(database_url) as connection:
        migrations.require_current(connection)
        roles.require(connection, Profile.RUNNER)
        with transaction(connection) as cur:
            if of_rewind is not None and not beside.replays(cur, group, of_rewind):
                find(cur, group, of_rewind)
            return store.new_attempt(cur, store.ensure_group(cur, group), task, of_rewind=of_rewind)


def consume(spec: ConsumerSpec, connections: Connections, attempt_id: int, start: Start | None, *, drain: bool = False) -> bool:
    """Runs an attempt to its end and stores the result on its row. Raises the attempt's error.

    ``start``: `None` in a process without an engine, which does not import the project's code. Unless the attempt is a bounded run with
    manual assignment and every partition is at its end, the function then returns False, and a driver must run the attempt.
    ``drain``: reads the due records of the consumer's retry topics instead of its topics. A drain is bounded and uses manual assignment,
    whatever the spec says.
    """
    if start is None and (drain or spec.run is RunMode.CONTINUOUS or spec.members > 1 or spec.listeners):
        return False
    try:
        application = f"{migrations.DRIVER}{attempt_id}"
        with (
            optional(),
            session(connections.database_url, application=application) as connection,
            answering(connection, url=connections.database_url),
            keep_visible(connection),
        ):
            migrations.require_current(connection)
            _run(connection, _for_drain(spec) if drain else spec, connections, attempt_id, start, drain=drain)
            with transaction(connection) as cur:
                store.end_attempt(cur, attempt_id)
    except _DriverNeeded:
        return False
    except BaseException as error:
        failure = {"kind": kind(error), "type": type(error).__name__, "text": message_of(error)}
        with contextlib.suppress(TidemarkError), session(connections.database_url) as connection, transaction(connection) as cur:
            store.end_attempt(cur, attempt_id, failure)
        raise
    return True


def _for_drain(spec: ConsumerSpec) -> ConsumerSpec:
    """The spec of a drain. Resets to earliest, because records gone from a retry topic are still in Postgres. Without `max_failed_records`,
    which counted the records when they first failed."""
    records = min(spec.batch.max_records, DRAIN_RECORDS, spec.retry.per_second or DRAIN_RECORDS)
    batch = spec.batch.model_copy(update={"max_records": records, "max_failed_records": None})
    overrides = {"run": RunMode.BOUNDED, "members": 1, "listeners": (), "offset_reset": OffsetReset.EARLIEST, "mirror": False}
    return spec.model_copy(update={"batch": batch, **overrides})


def _run(
    connection: Connection, spec: ConsumerSpec, connections: Connections, attempt_id: int, start: Start | None, *, drain: bool
) -> None:
    with transaction(connection) as cur:
        side = _side(cur, attempt_id)
        if side is not None:
            if start is None:
                raise _DriverNeeded
            spec = _as_side_run(spec, side.side)
        group_id = store.ensure_group(cur, spec.group)
        earlier = [] if side is not None else store.earlier_attempts(cur, attempt_id)  # its positions alone decide what is left
        if spec.run is RunMode.CONTINUOUS:  # its ends keep moving, so only the state shows that it is done
            earlier = [attempt for attempt in earlier if attempt["state"] == "COMMITTED"]
        positions = store.positions(cur, spec.group)
        committed_by = _already_committed(earlier, positions)
    if committed_by is not None:
        log.info("an earlier attempt has committed the whole run group=%s attempt=%s committed_by=%s", spec.group, attempt_id, committed_by)
        return

    cluster = Cluster(connections.kafka)
    extent: Extent
    if side is not None:
        extent = Side(cluster, spec, connection, side)
    elif drain:
        extent = Drain(cluster, spec, connection, group_id)
    elif spec.run is RunMode.CONTINUOUS:
        extent = Continuous(cluster, spec)
    else:
        extent = Extent(cluster, spec)
    if start is None and not _at_end(extent.begin(), positions):
        raise _DriverNeeded
    for exposure in of_servers(connections):
        log.warning("%s", exposure)
    watched_group = spec.group if side is None else side.group
    replay = side if isinstance(side, beside.SideReplay) else None
    ConsumerRun(connection, Attempt(attempt_id, group_id, spec, connections), cluster, extent, start, replay).read(watched_group)


def _side(cur: Cursor, attempt_id: int) -> Backfill | beside.SideReplay | None:
    """The backfill or the replay beside that an attempt reads; `None` for an ordinary run."""
    reads = of_attempt(cur, attempt_id)
    if reads is None:
        return None
    group, rewind_id, is_replay = reads
    return beside.find(cur, group, rewind_id) if is_replay else find(cur, group, rewind_id)


class ConsumerRun:
    """An attempt, from the look-ups to the release of its partitions. Owns the engine; the caller owns the session."""

    def __init__(
        self,
        connection: Connection,
        attempt: Attempt,
        cluster: Cluster,
        extent: Extent,
        start: Start | None,
        replay: beside.SideReplay | None,
    ) -> None:
        self._connection, self._attempt, self._cluster, self._extent, self._start = connection, attempt, cluster, extent, start
        self._replay, self._rehearsed = replay, None if replay is None else replay.transform
        self._spec = attempt.spec
        self._engine: Engine | None = None
        self._interrupt = Interrupt(self._cancel)
        self._target: Target | None = None
        self._credentials = attempt.connections.read()
        """The credentials in their files when the last batch began."""
        self._tries = 0
        """Failed tries of the next batch; 0 after each commit."""
        self._max_records = attempt.spec.batch.max_records
        """Maximum records of the next batch."""
        self._batch_offsets = 0
        """Offsets of the last batch."""
        self._rejected = 0
        self._sampled_at: float | None = None

    def read(self, watched_group: str) -> None:
        """Reads the extent to its end. A rewind of ``watched_group`` interrupts the batch in flight."""
        attempt, continuous = self._attempt, self._spec.run is RunMode.CONTINUOUS
        require_free(self._cluster, self._spec)
        try:
            if continuous:  # Spark starts first; the previous run keeps reading until this one takes over
                self._ensure_engine(None).warm_up(last_records(look(self._cluster, self._spec)))
            joined = self._join(self._extent.begin())  # ①, ②, ③
            watch = RewindWatch(attempt.connections.database_url, watched_group, attempt.group_id, self._interrupt)
            with contextlib.closing(watch), contextlib.closing(joined) as membership:  # ⑥
                self._store_deleted_topics(membership)
                self._sample_lag(membership)
                with mirrored(self._cluster, self._spec, lambda: _positions(membership)) as publish:
                    while self._next_batch(membership, watch):
                        publish()
                        if continuous and time.monotonic() - (self._sampled_at or 0.0) >= SAMPLE_EVERY_S:
                            self._sample_lag(membership)
                self._sample_lag(membership)
                if self._engine is None:
                    claims = len(membership.claimed.claims)
                    log.info("nothing to read group=%s attempt=%s partitions=%s", self._spec.group, attempt.attempt_id, claims)
        except Fenced as error:
            if not continuous:
                raise
            log.info("the next run has taken over group=%s attempt=%s: %s", self._spec.group, attempt.attempt_id, error)
        finally:
            if self._engine is not None:
                self._engine.stop()

    def _join(self, lookup: LookUp) -> Membership:
        if self._spec.members > 1:
            return GroupMembership(self._connection, self._attempt, self._cluster, lookup, self._interrupt)
        return ManualAssignment(self._connection, self._attempt, self._cluster, lookup)

    def _sample_lag(self, membership: Membership) -> None:
        """Samples the lag of the whole group, even if this run reads only some partitions. Drains, backfills and replays take no sample."""
        if isinstance(self._extent, Drain | Side):
            return
        topics, new_window = membership.claimed.lookup.topics, self._sampled_at is None
        partitions = [part for topic in topics for part in topic.all() if self._spec.fixed.covers(part)]
        self._sampled_at = time.monotonic()
        sample_or_log(
            self._connection, self._cluster, self._spec.group, topics, partitions, by_pattern=self._by_pattern, new_window=new_window
        )

    def _ensure_engine(self, records: int | None) -> Engine:
        """Returns the engine, and starts it on the first call."""
        if self._engine is None:
            if self._start is None:  # a rewind has moved a position since the look-up
                raise _DriverNeeded
            with waiting("Spark to start"):
                self._engine = self._start(records, self._rehearsed)
        return self._engine

    def _cancel(self) -> None:
        if self._engine is not None:
            self._engine.cancel()

    def _next_batch(self, membership: Membership, watch: RewindWatch) -> bool:
        """Reads one batch, or waits if there is nothing to read. Returns False at the end of the extent."""
        with transaction(self._connection) as cur:
            store.require_wanted(cur, self._attempt.attempt_id)
        membership.poll()
        self._interrupt.reset()
        reading = False
        try:
            self._credentials = self._attempt.connections.read()
            self._cluster.use(self._credentials.kafka)
            self._extent.refresh(membership)
            slices = membership.claimed.next_batch(self._max_records)
            self._batch_offsets = sum(part.end - part.start for part in slices)
            if self._extent.over(membership, drained=not slices):
                return False
            if slices or self._spec.run is RunMode.CONTINUOUS:  # detects a lost partition before the commit, or without one
                membership.claimed.require_held()
            if not slices:
                self._tries = 0
                membership.poll(self._extent.wait_s)
                return True
            engine = self._ensure_engine(membership.claimed.remaining)  # ④
            if self._target is None:
                evolving = self._spec.evolving if self._rehearsed is None else ()
                layouts = evolve_tables(self._connection, self._attempt.attempt_id, engine.layouts, evolving)
                self._target = self._new_target(layouts, membership.claimed.lookup.backfill)
            reading = True
            require_same_topics(self._cluster, membership.claimed, slices)  # ⑤
            where = (self._spec.group, self._attempt.attempt_id)
            log.info("reading group=%s attempt=%s slices=%s offsets=%s", *where, len(slices), self._batch_offsets)
            with watch.in_flight(slices), waiting(f"batch slices={len(slices)}"):
                target = replace(self._target, database_url=read_url(self._credentials.database_url))
                receipts = run_batch(engine, target, self._credentials, slices)
        except TidemarkError as error:
            self._tries += reading or not isinstance(error, OffsetFenced)  # a partition lost before the batch began does not count as a try
            self._recover(membership, error)
            return True
        self._tries = 0
        self._max_records = min(2 * self._max_records, self._spec.batch.max_records)
        membership.claimed.advance(receipts)
        self._account_for(receipts)
        return True

    def _new_target(self, layouts: tuple[Layout, ...], backfill: Backfill | None) -> Target:
        target = _target(self._attempt, layouts, backfill)
        if self._replay is None:
            return target
        with transaction(self._connection) as cur:
            beside.follow_columns(cur, self._replay, layouts)
        return self._replay.onto_shadows(replace(target, ladder=replace(target.ladder, group=self._replay.group)))

    def _recover(self, membership: Membership, error: TidemarkError) -> None:
        """Continues at the committed positions after an error. Raises the error if this run may not continue.

        A batch that met an outage is tried again if its credentials were replaced since it began: the old ones may have been refused.
        """
        interrupted = self._interrupt.called or (isinstance(error, Unavailable) and self._credentials != self._attempt.connections.read())
        if self._drop_deleted_topics(membership, error):
            interrupted = True
        if isinstance(error, HeldTooMany) and error.part.end - error.part.start > 1:  # a drain can finish what a smaller slice stores
            self._max_records, interrupted = max(1, self._batch_offsets // 2), True
        if not membership.may_retry(error, self._tries, interrupted=interrupted):
            raise error
        try:
            membership.reclaim()
        except ClaimRefused as refused:
            raise (refused if interrupted else error) from refused  # the error of an interrupted batch is meaningless
        where = (self._spec.group, self._attempt.attempt_id)
        log.warning("batch ended early, continuing from the committed positions group=%s attempt=%s: %s", *where, error)

    def _store_deleted_topics(self, membership: Membership) -> None:
        """Stores unread records of topics that matched the pattern and were deleted as lost."""
        if self._by_pattern:
            attempt, lookup = self._attempt, membership.claimed.lookup
            store_deleted_topics(self._connection, self._cluster, self._spec.group, attempt.group_id, attempt.attempt_id, lookup)

    @property
    def _by_pattern(self) -> bool:
        return bool(self._spec.topic_pattern) and not isinstance(self._extent, Drain | Side)

    def _drop_deleted_topics(self, membership: Membership, error: TidemarkError) -> bool:
        """Drops topics that matched the pattern and were deleted during the run. Returns False if they did not cause the error. A later run
        stores their unread records as lost."""
        if not self._by_pattern or not isinstance(error, TopicsMissing | RangeGone | BrokerUnavailable):
            return False
        names = {topic.name for topic in membership.claimed.lookup.topics}
        try:
            visible, hidden = self._cluster.visible(names)
        except TidemarkError:
            return False
        deleted = names - hidden - {topic.name for topic in visible}
        if not deleted or deleted == names:
            return False
        log.warning("topics are gone group=%s topics=%s", self._spec.group, ",".join(sorted(deleted)))
        membership.update(membership.claimed.lookup.without(deleted))
        return True

    def _account_for(self, receipts: Sequence[Receipt]) -> None:
        """Logs a committed batch. Raises `TooManyFailed`."""
        self._rejected += sum(receipt.counts.retried + receipt.counts.failed for receipt in receipts)
        _log_batch(self._spec.group, self._attempt.attempt_id, receipts)
        limit = self._spec.batch.max_failed_records
        if limit is not None and self._rejected > limit:
            raise TooManyFailed(failed=self._rejected, limit=limit)


def _positions(membership: Membership) -> dict[TopicPartition, int]:
    return {claim.partition: claim.position for claim in membership.claimed.claims}


def _target(attempt: Attempt, layouts: tuple[Layout, ...], backfill: Backfill | None) -> Target:
    target = Target(read_url(attempt.connections.database_url), attempt.group_id, attempt.attempt_id, layouts)
    ladder = Ladder.of(attempt.spec)
    target = replace(target, ladder=ladder if backfill is None else replace(ladder, group=backfill.group), breaker=Breaker.of(attempt.spec))
    if attempt.spec.retry.order is RetryOrder.KEY:
        target = replace(target, max_held=attempt.spec.retry.max_held)
    limit = attempt.spec.batch.max_failed_records
    target = target if limit is None else replace(target, max_rejected=limit)
    return target if backfill is None else replace(target, group_id=backfill.group_id, side_id=backfill.side_id)


def _as_side_run(spec: ConsumerSpec, side: str) -> ConsumerSpec:
    """The consumer as a bounded run with manual assignment in a side group. Never resets to latest, so it skips only records that are gone
    from the log."""
    reset = OffsetReset.EARLIEST if spec.offset_reset is OffsetReset.LATEST else spec.offset_reset
    overrides = {"group": side, "run": RunMode.BOUNDED, "members": 1, "offset_reset": reset, "mirror": False}
    return spec.model_copy(update=overrides)


def _already_committed(earlier: Sequence[dict[str, object]], positions: Sequence[store.Position]) -> int | None:
    """The id of an earlier attempt of this task that has reached all its planned ends, if any."""
    reached = {(position.topic_id, position.partition.partition): position.position for position in positions}
    for attempt in earlier:
        planned = attempt["planned"]
        if (
            isinstance(planned, list)
            and planned
            and all(reached.get((part["topic_id"], part["partition"]), 0) >= part["end"] for part in planned)
        ):
            return int(str(attempt["attempt_id"]))
    return None


def _at_end(lookup: LookUp, positions: Sequence[store.Position]) -> bool:
    """Whether every partition has a position in this incarnation of its topic, at its end."""
    reached = {(position.kafka_uuid, position.partition): position.position for position in positions}
    uuids = {topic.name: topic.kafka_uuid for topic in lookup.topics}
    return all(reached.get((uuids[partition.topic], partition)) == end for partition, end in lookup.ends.items())


def _log_batch(group: str, attempt_id: int, receipts: Sequence[Receipt]) -> None:
    for receipt in receipts:
        counts = receipt.counts
        log.info(
            "slice committed group=%s attempt=%s slice=%s epoch=%s loaded=%s skipped=%s retried=%s failed=%s unaccounted=%s%s twin=%s",
            group,
            attempt_id,
            receipt.part,
            receipt.part.epoch,
            counts.loaded,
            counts.skipped,
            counts.retried,
            counts.failed,
            counts.unaccounted,
            f" deleted={counts.deleted}" if counts.deleted else "",
            receipt.twin,
        )
