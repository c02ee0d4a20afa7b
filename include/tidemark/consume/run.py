"""A run of a consumer: what is in the topics now, then stop; or, if it is continuous, whatever comes until its time is up.

    ① look up topics and ends   ② take a seat in the group: claim what is assigned   ③ store what the run will read
    ④ start the engine and check the sink   ⑤ batch after batch until every position has reached its end   ⑥ release, leave

A run with nothing to read ends after ③, without starting Spark. What was committed before a failure stays; the next attempt goes on
from there.

A consumer with one member takes all partitions by hand. With several, each is a member of the group (`tidemark.group.member`): between two
batches it hears what was assigned to it and what was taken away, and it ends when nothing that it holds is left to read.

A drain is a run of its own kind, by hand: it reads what is due in the group's retry topics (`tidemark.consume.window.Drain`).

A run of a backfill (`tidemark.rewind.backfill`) is a bounded one by hand of its side group: it reads what a rewind has skipped, and commits
it as the group's. Its ends are looked at before each batch, because a rewind of the group may draw them nearer.

A continuous run starts the engine first, and then takes over from the run before it, which learns so before its next batch and ends. A run
whose partitions a rewind has moved learns it likewise, claims them again and goes on from the new positions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tidemark import schema
from tidemark.connections import Connections
from tidemark.consume.claims import Found, Holding
from tidemark.consume.seat import Attempt, GroupSeat, Interrupt, TakenByHand
from tidemark.consume.told import Told
from tidemark.consume.window import Bounded, Drain, Window, last_records, look, window_of
from tidemark.consume.work import payloads
from tidemark.db import answering, session, transaction
from tidemark.errors import Broken, Fenced, Refused, TidemarkError, Unavailable
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.offsets.ranges import Slice
from tidemark.offsets.store import ClaimRefused, OffsetFenced, TaskIdentity
from tidemark.retry import Ladder
from tidemark.retry.breaker import Breaker
from tidemark.rewind.backfill import Backfill, SkippedTopicRecreated, ends, find, of_attempt
from tidemark.sink.commit import Receipt, Target, commit_slice
from tidemark.sink.load import SinkRejected
from tidemark.sink.table import Layout
from tidemark.spec import ConsumerSpec, OffsetReset, Order, Run
from tidemark.waiting import waiting

if TYPE_CHECKING:
    from tidemark.db import Connection

log = logging.getLogger(__name__)

DRAIN_RECORDS = 100_000
"""The most offsets of a batch of a drain: what is known of its records is held in memory."""


class Engine(Protocol):
    """Turns slices into committed slices. Made once a run has something to read; used by one thread."""

    def warm_up(self, sample: Sequence[Slice]) -> None:
        """Spends beforehand what the first batch would have to. May read ``sample``; commits nothing."""

    def layout(self, connection: Connection) -> Layout:
        """How the transform's output goes into the sink. Raises `SinkMismatch` before anything is read."""

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        """Commits the slices, and says for each what became of it; one whose transform gave no row at all may be missing.

        ``isolate`` is `commit_slice`'s: slices that were refused for their rows come a second time with it.
        """

    def cancel(self) -> None:
        """Has the `run` that is under way in another thread raise soon; what its tasks still commit, they may."""

    def stop(self) -> None:
        """Ends what was started."""


@dataclass(kw_only=True, eq=False)
class TooManyFailed(Refused):
    """More records failed than the spec allows."""

    failed: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{self.failed} records failed in this run, batch.max_failed_records is {self.limit}: the run stops. They are kept in "
            "tidemark.failed_record; what was committed stays. Mend the transform or raise the limit."
        )


@dataclass(kw_only=True, eq=False)
class SplitPartition(Broken):
    """Two tasks answered for the same slice."""

    part: Slice

    def __str__(self) -> str:
        return f"{self.part} came from two tasks: rows of one Kafka partition must stay in one Spark task."


def kind(error: BaseException) -> str:
    """Which of the four kinds an error is, in one word, for the attempt's row."""
    kinds = {"refused": Refused, "fenced": Fenced, "unavailable": Unavailable, "broken": Broken}
    if isinstance(error, TidemarkError) and error.retriable:
        return "unavailable"
    return next((word for word, each in kinds.items() if isinstance(error, each)), "failed")


def open_attempt(database_url: str, group: str, task: TaskIdentity, *, backfill_of: int | None = None) -> int:
    """Writes the attempt's row, before the driver that it is for is started. ``backfill_of``: it reads what this rewind has skipped.

    Raises `SchemaMismatch`, and `BadInput` if the rewind has left no backfill of the group.
    """
    with session(database_url) as connection:
        schema.require_current(connection)
        with transaction(connection) as cur:
            if backfill_of is not None:
                find(cur, group, backfill_of)
            return store.new_attempt(cur, store.ensure_group(cur, group), task, backfill_of=backfill_of)


Start = Callable[[int | None], Engine]
"""Makes the engine of a run that has so many offsets to read; `None`: nobody knows how many."""


def consume(spec: ConsumerSpec, connections: Connections, attempt_id: int, start: Start, *, drain: bool = False) -> None:
    """Runs an attempt to its end and writes how it ended on its row; raises what made it fail.

    ``drain``: not the consumer's topics are read, but what is due in its retry topics; by hand, bounded, whatever else the spec says.
    """
    try:
        with session(connections.database_url, application=f"{schema.DRIVER}{attempt_id}") as connection, answering(connection):
            schema.require_current(connection)
            _run(connection, _for_drain(spec) if drain else spec, connections, attempt_id, start, drain=drain)
            with transaction(connection) as cur:
                store.end_attempt(cur, attempt_id)
    except BaseException as error:
        said = {"kind": kind(error), "type": type(error).__name__, "text": str(error)}
        with contextlib.suppress(TidemarkError), session(connections.database_url) as connection, transaction(connection) as cur:
            store.end_attempt(cur, attempt_id, said)
        raise


def _for_drain(spec: ConsumerSpec) -> ConsumerSpec:
    """How a drain runs. What is gone from a retry topic is in Postgres all the same, so its drain goes on where the log begins; and what
    fails again has been counted by `max_failed_records` when it failed first."""
    records = min(spec.batch.max_records, DRAIN_RECORDS, spec.retry.per_second or DRAIN_RECORDS)
    batch = spec.batch.model_copy(update={"max_records": records, "max_failed_records": None})
    by_hand = {"run": Run.BOUNDED, "members": 1, "listeners": (), "offset_reset": OffsetReset.EARLIEST}
    return spec.model_copy(update={"batch": batch, **by_hand})


def _run(connection: Connection, spec: ConsumerSpec, connections: Connections, attempt_id: int, start: Start, *, drain: bool) -> None:
    with transaction(connection) as cur:
        backfill = of_attempt(cur, attempt_id)
        if backfill is not None:
            spec = _as_backfill(spec, backfill)
        group_id = store.ensure_group(cur, spec.group)
        earlier = [] if backfill is not None else store.earlier_attempts(cur, attempt_id)  # its positions alone say what is left of it
        if spec.run is Run.CONTINUOUS:  # its ends are those of the moment; it is done when it says so
            earlier = [one for one in earlier if one["state"] == "COMMITTED"]
        done_by = _already_committed(earlier, store.positions(cur, spec.group))
    if done_by is not None:
        log.info("an earlier attempt has committed the whole run group=%s attempt=%s committed_by=%s", spec.group, attempt_id, done_by)
        return

    cluster = Cluster(connections.kafka)
    if backfill is not None:
        window: Window = _Skipped(cluster, spec, connection, backfill)
    elif drain:
        window = Drain(cluster, spec, connection, group_id)
    else:
        window = window_of(cluster, spec)
    interrupt = Interrupt()
    try:
        if spec.run is Run.CONTINUOUS:  # before it takes over from the run before it, which reads meanwhile
            with waiting("Spark to start"):
                interrupt.engine = start(None)
            interrupt.engine.warm_up(last_records(look(cluster, spec)))
        found = window.begin()  # ①
        attempt = Attempt(attempt_id, group_id, spec, connections)
        taken = (
            GroupSeat(connection, attempt, cluster, found, interrupt)
            if spec.members > 1
            else TakenByHand(connection, attempt, cluster, found)
        )
        told = Told(connections.database_url, spec.group if backfill is None else backfill.group, group_id, interrupt)
        with contextlib.closing(told), contextlib.closing(taken) as seat:  # ②, ③, ⑥
            _read(connection, attempt, seat, interrupt, told, start, window, lambda slices: _require_same(cluster, seat.held, slices))
    except Fenced as error:
        if spec.run is not Run.CONTINUOUS:
            raise
        log.info("the next run has taken over group=%s attempt=%s: %s", spec.group, attempt_id, error)
    finally:
        if interrupt.engine is not None:
            interrupt.engine.stop()


def _read(
    connection: Connection,
    attempt: Attempt,
    seat: TakenByHand | GroupSeat,
    interrupt: Interrupt,
    told: Told,
    start: Start,
    window: Window,
    require_same: Callable[[Sequence[Slice]], None],
) -> None:
    spec, attempt_id = attempt.spec, attempt.attempt_id
    limit = spec.batch.max_failed_records
    target: Target | None = None
    rejected = tries = 0
    while True:
        seat.poll()
        interrupt.reset()
        reading = False
        try:
            window.move(seat)
            slices = seat.held.next_batch(spec.batch.max_records)
            if window.over(seat, drained=not slices):
                break
            if slices or spec.run is Run.CONTINUOUS:  # better now than at the commit; a run that waits has none at which it would learn
                seat.held.require_held()
            if not slices:
                tries = 0
                seat.poll(window.wait_s)
                continue
            if interrupt.engine is None:
                with waiting("Spark to start"):
                    interrupt.engine = start(seat.held.left)  # ④
            if target is None:
                target = _target(attempt, interrupt.engine.layout(connection), seat.held.found.backfill)
            reading = True
            require_same(slices)  # ⑤
            with told.in_flight(slices), waiting(f"batch slices={len(slices)}"):
                receipts = _batch(interrupt.engine, target, attempt.connections, slices)
        except TidemarkError as error:
            tries += reading or not isinstance(error, OffsetFenced)  # a fence that was noticed in time is no batch that failed
            if not seat.may_go_on(error, tries, interrupted=interrupt.pulled):
                raise
            try:
                seat.start_over()
            except ClaimRefused as refused:
                raise (refused if interrupt.pulled else error) from refused  # what an interrupted batch died of says nothing
            log.warning("batch ended early, going on from what is committed group=%s attempt=%s: %s", spec.group, attempt_id, error)
            continue
        tries = 0
        seat.held.advance(receipts)
        rejected += sum(receipt.counts.retried + receipt.counts.failed for receipt in receipts)
        _log_batch(spec.group, attempt_id, receipts)
        if limit is not None and rejected > limit:
            raise TooManyFailed(failed=rejected, limit=limit)
    if interrupt.engine is None:
        log.info("nothing to read group=%s attempt=%s partitions=%s", spec.group, attempt_id, len(seat.held.claims))


def _target(attempt: Attempt, layout: Layout, backfill: Backfill | None) -> Target:
    target = Target(attempt.connections.database_url, attempt.group_id, attempt.attempt_id, layout)
    ladder = Ladder.of(attempt.spec)
    target = replace(target, ladder=ladder if backfill is None else replace(ladder, group=backfill.group), breaker=Breaker.of(attempt.spec))
    if attempt.spec.retry.order is Order.KEY:
        target = replace(target, max_held=attempt.spec.retry.max_held)
    limit = attempt.spec.batch.max_failed_records
    target = target if limit is None else replace(target, max_rejected=limit)
    return target if backfill is None else replace(target, group_id=backfill.group_id, side_id=backfill.side_id)


class _Skipped(Bounded):
    """What a rewind has skipped, up to where the group has not been moved back to since."""

    def __init__(self, cluster: Cluster, spec: ConsumerSpec, connection: Connection, backfill: Backfill) -> None:
        super().__init__(cluster, spec)
        self._connection, self._backfill = connection, backfill

    def begin(self) -> Found:
        return _look_back(self._cluster, self._backfill)

    def move(self, seat: TakenByHand | GroupSeat) -> None:
        """Comes after the claims and before the look at their epochs: an end that comes nearer in between is noticed there."""
        with transaction(self._connection) as cur:
            now = ends(cur, self._backfill)
        found = seat.held.found
        seat.see(replace(found, ends={partition: min(now.get(partition, 0), log.end) for partition, log in found.logs.items()}))


def _as_backfill(spec: ConsumerSpec, backfill: Backfill) -> ConsumerSpec:
    """The consumer as one that reads in the backfill's side group, by hand and bounded. What it skips of a log by itself is only what is
    gone from it."""
    reset = OffsetReset.EARLIEST if spec.offset_reset is OffsetReset.LATEST else spec.offset_reset
    return spec.model_copy(update={"group": backfill.side, "run": Run.BOUNDED, "members": 1, "offset_reset": reset})


def _look_back(cluster: Cluster, backfill: Backfill) -> Found:
    """As `look`, at the partitions of which something is left to be read. Raises `TopicsMissing` and `SkippedTopicRecreated`."""
    left = [part for part in backfill.parts if part.left]
    topics = cluster.topics(sorted({part.partition.topic for part in left}))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    for part in left:
        if uuids[part.partition.topic] != part.kafka_uuid:
            raise SkippedTopicRecreated(topic=part.partition.topic, rewind_id=backfill.rewind_id)
    logs = cluster.logs(part.partition for part in left)
    return Found(topics, logs, {part.partition: part.end for part in left}, backfill)


def _require_same(cluster: Cluster, held: Holding, slices: Sequence[Slice]) -> None:
    """Raises `TopicRecreated` or `TopicsMissing` if a topic is not the one any more that was looked at: offsets would mean others."""
    begun = {topic.name: topic.kafka_uuid for topic in held.found.topics}
    for topic in cluster.topics(sorted({part.partition.topic for part in slices})):
        if begun[topic.name] != topic.kafka_uuid:
            raise held.recreated(topic.name)


def _batch(engine: Engine, target: Target, connections: Connections, slices: Sequence[Slice]) -> list[Receipt]:
    """One batch: the engine's receipts, and one for each slice that came out empty (all filtered away, or transaction markers only)."""
    receipts: dict[Slice, Receipt] = {}
    for receipt in _committed(engine, target, slices):
        if receipt.part in receipts:
            raise SplitPartition(part=receipt.part)
        receipts[receipt.part] = receipt
    for part in slices:
        if part not in receipts:
            receipts[part] = commit_slice(target, part, iter(()), lambda part, offsets: payloads(connections.kafka, part, offsets))
    return [receipts[part] for part in slices]


def _committed(engine: Engine, target: Target, slices: Sequence[Slice]) -> list[Receipt]:
    """The engine's receipts. Slices in which rows were refused are tried again with care. Raises the error that matters most."""
    outcomes = engine.run(target, slices, isolate=False)
    refused = [outcome for outcome in outcomes if isinstance(outcome, SinkRejected) and outcome.of_rows]
    errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if refused and not errors:
        for error in refused:
            log.warning("rows were refused, looking for the records slice=%s error=%s text=%s", error.part, error.error_type, error)
        outcomes += engine.run(target, [error.part for error in refused], isolate=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, TidemarkError) and outcome not in refused]
    if errors:
        raise min(errors, key=lambda error: error.retriable)  # what another try cannot mend is said first
    return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]


def _already_committed(earlier: Sequence[dict[str, object]], positions: Sequence[store.Position]) -> int | None:
    """The earlier attempt of this task, if any, whose planned ends have all been reached."""
    at = {(position.topic_id, position.partition.partition): position.position for position in positions}
    for attempt in earlier:
        planned = attempt["planned"]
        if isinstance(planned, list) and planned and all(at.get((one["topic_id"], one["partition"]), 0) >= one["end"] for one in planned):
            return int(str(attempt["attempt_id"]))
    return None


def _log_batch(group: str, attempt_id: int, receipts: Sequence[Receipt]) -> None:
    for receipt in receipts:
        counts = receipt.counts
        log.info(
            "slice committed group=%s attempt=%s slice=%s epoch=%s loaded=%s skipped=%s retried=%s failed=%s unaccounted=%s twin=%s",
            group,
            attempt_id,
            receipt.part,
            receipt.part.epoch,
            counts.loaded,
            counts.skipped,
            counts.retried,
            counts.failed,
            counts.unaccounted,
            receipt.twin,
        )
