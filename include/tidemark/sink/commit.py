"""The commit of slices: rows, offset, failed records and ledger row, together or not at all (I1, I2, I3).

    ① begin   ② compare-and-set the partition row   ③ COPY the rows   ④ COPY the failed records   ⑤ ledger row   ⑥ commit   ⑦ receipt

② comes first: a zombie waits there for the row lock and fails before it has sent a byte. Then the commit reads which records erasures have
suppressed. A failure before ⑥ leaves nothing behind. If the answer to ⑥ is lost, the commit reads the row again to find out whether it
succeeded; nothing is repeated blindly.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import psycopg2
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from tidemark.db import (
    FIX_PATH,
    RELEASE_IF_LOST,
    REWIND_LOCK,
    answering,
    connect,
    is_outage,
    may_be_row_error,
    read_url,
    session,
    transaction,
)
from tidemark.errors import DatabaseUnavailable, Unavailable
from tidemark.offsets import store
from tidemark.offsets.locks import LockWait, held_by_writer
from tidemark.offsets.store import OffsetFenced, PositionLocked
from tidemark.records.outcome import Disposition, RecordCounts, TransformOutput
from tidemark.records.ranges import Slice
from tidemark.retry.order import KeyOrder
from tidemark.retry.store import read_blocked
from tidemark.sink import suppressed
from tidemark.sink.hand_off import Payloads, copy_failed
from tidemark.sink.load import Refusals, load_all, translated
from tidemark.sink.spool import Spool, spooled
from tidemark.sink.steps import Step, reached
from tidemark.sink.tally import Tally
from tidemark.sink.target import Target
from tidemark.waiting import waiting

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

LOCK_TIMEOUT_MS = 120_000
"""How long ② waits for another commit that holds the row: the COPY of a twin or of an older owner, which ends or is terminated."""
IDLE_TIMEOUT_MS = 60_000
"""A live commit is never idle this long between two statements; such a session belongs to a dead process."""
OUTCOME_WAIT_S = 60
"""How long to keep checking whether the commit succeeded, after the connection was lost during COMMIT."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A committed slice. ``twin``: another try of the same task committed it."""

    part: Slice
    counts: RecordCounts
    twin: bool = False


class CommitUnknown(Unavailable):
    """The session was lost during COMMIT, and the database did not return in time to check the outcome."""

    part: Slice
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.part}: the session was lost during COMMIT and Postgres does not answer: {self.cause}. The slice is stored whole or not "
            "at all; the next attempt reads the partition's row and continues from there."
        )


class Sessions:
    """Reuses a database session for successive commits until one fails: connecting takes longer than a small commit.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._idle: tuple[str, Connection] | None = None

    def close(self) -> None:
        if self._idle is not None:
            self._idle[1].close()
            self._idle = None

    @contextlib.contextmanager
    def lent(self, target: Target) -> Iterator[Connection]:
        """Yields a session outside any transaction. Raises the same errors as `tidemark.db.connect`."""
        url = read_url(target.database_url)
        if self._idle is not None and self._idle[0] != url:
            self.close()
        connection = self._idle[1] if self._idle is not None else connect(url, application=target.application)
        self._idle = None
        try:
            yield connection
            with contextlib.suppress(psycopg2.Error):  # lost after the commit
                connection.rollback()  # a twin has nothing to commit
                self._idle = url, connection
        finally:
            if self._idle is None:
                connection.close()


class CommitSteps(ABC):
    """What differs between commits: a slice of a topic, a slice of a retry topic, and a staged batch of either. See `commit`."""

    @abstractmethod
    def lock(self, cur: Cursor) -> None:
        """Reads and locks what the slices' records depend on, after the offsets have moved (②)."""

    @abstractmethod
    def copy_rows(self, cur: Cursor) -> None:
        """Loads the rows (③)."""

    @abstractmethod
    def copy_failed(self, cur: Cursor) -> Sequence[RecordCounts]:
        """Stores the outcomes of all other records (④). Returns the ledger's counts of each slice."""

    def finish(self, cur: Cursor, batch_ids: Sequence[int]) -> None:  # noqa: B027 - only staged batches need it
        """Runs after ⑤ with the ids of the ledger rows."""


def commit_slice(
    target: Target,
    part: Slice,
    outputs: Iterator[TransformOutput],
    payloads: Payloads,
    *,
    isolate: bool = False,
    order: KeyOrder | None = None,
    sessions: Sessions | None = None,
) -> Receipt:
    """Stores a slice in one transaction of its own and returns the receipt.

    ``outputs`` is consumed while Postgres receives the rows, so a slice of any size needs the memory of one batch. Safe to call again for
    the same slice: the second call finds the first one's ledger row. With ``isolate``, records whose rows Postgres rejects become failed
    records, up to ``target.max_rejected``, and the others are loaded. That takes several COPYs, as do several sinks, so ``outputs`` is
    spooled before the transaction begins. ``order`` receives the blocked keys before ``outputs`` is read.

    Raises `OffsetFenced` if another run took over the partition; `SinkRejected` (with ``of_rows``, ``isolate`` may help),
    `TooManyRejected`, `BadOutput` or `Broken` for bad rows; `BreakerTripped` if too many records fail; `HeldTooMany` if too many would be
    held; `KeysBlocked` (with ``isolate``: run the transform on the slice again); `DatabaseUnavailable` for an outage; and any error of
    ``outputs`` or ``payloads``. Then nothing is stored. After `CommitUnknown` the outcome is unknown.
    """
    with contextlib.ExitStack() as stack:
        answers: Iterator[TransformOutput] | Spool[TransformOutput] = outputs
        if isolate or len(target.layouts) > 1:
            if order is not None:
                with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                    order.begin(read_blocked(cur, target.group_id, part))
            answers = stack.enter_context(spooled(outputs))
        (receipt,) = commit(target, [part], _SliceSteps(target, part, answers, payloads, isolate, order), sessions)
    return receipt


@dataclass
class _SliceSteps(CommitSteps):
    target: Target
    part: Slice
    outputs: Iterator[TransformOutput] | Spool[TransformOutput]
    payloads: Payloads
    isolate: bool
    order: KeyOrder | None
    skip: frozenset[int] = field(init=False)
    tally: Tally = field(init=False)

    def lock(self, cur: Cursor) -> None:
        self.skip = suppressed.records(cur, self.target.group_id, self.target.position_of, self.part)
        if self.order is not None:
            blocked = read_blocked(cur, self.target.group_id, self.part)
            if isinstance(self.outputs, Spool):
                self.order.confirm(self.part, blocked)
            else:
                self.order.begin(blocked)

    def copy_rows(self, cur: Cursor) -> None:
        refusals = Refusals.of(self.target) if self.isolate else None
        tally_of = partial(Tally, self.part, self.skip)
        self.tally = load_all(cur, self.part, self.target.layouts, lambda: iter(self.outputs), tally_of, refusals)
        counts, held = self.tally.counts(), self.tally.held()
        if self.target.breaker is not None:
            failures = [reject for reject in self.tally.rejects.values() if reject.disposition is not Disposition.HELD]
            self.target.breaker.check(self.part, replace(counts, retried=counts.retried - held), failures)
        if self.order is not None:
            self.order.check(self.part, held)

    def copy_failed(self, cur: Cursor) -> Sequence[RecordCounts]:
        copy_failed(cur, self.target, self.part, self.tally.rejects, self.payloads)
        return [self.tally.counts()]


def commit(target: Target, parts: Sequence[Slice], steps: CommitSteps, sessions: Sessions | None = None) -> list[Receipt]:
    """Commits slices in one transaction of the seven steps, and returns a receipt for each once the commit is certain.

    A commit does not fail because a rewind or an erasure holds a lock: it starts over until the lock is released. That is safe because ②
    comes first, before ``steps`` has consumed any input.
    """
    wait = LockWait(f"position of {parts[0].partition}")
    while True:
        try:
            if sessions is not None:
                return _commit(target, parts, steps, sessions)
            with contextlib.closing(Sessions()) as new_sessions:
                return _commit(target, parts, steps, new_sessions)
        except PositionLocked as error:
            with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                position = {"group_id": error.group_id, "topic_id": error.topic_id, "partition": error.partition.partition}
                if held_by_writer(cur, **position):
                    raise
                wait.report_holders(cur, {**position, "class": REWIND_LOCK})


def _commit(target: Target, parts: Sequence[Slice], steps: CommitSteps, sessions: Sessions) -> list[Receipt]:
    with waiting(f"commit of={parts[0]}"), sessions.lent(target) as connection, answering(connection, url=target.database_url):
        try:
            with connection.cursor() as cur:
                reached(Step.BEGIN, parts[0])
                limits = "SET LOCAL lock_timeout TO %s; SET LOCAL idle_in_transaction_session_timeout TO %s"
                cur.execute(f"{FIX_PATH}; {RELEASE_IF_LOST}; {limits}", (LOCK_TIMEOUT_MS, IDLE_TIMEOUT_MS))
                receipts = _store(cur, target, parts, steps)
        except psycopg2.Error as error:
            raise translated(error, target.tables, parts[0], of_rows=False) from None
        if not all(receipt.twin for receipt in receipts):
            reached(Step.COMMIT, parts[0])
            try:
                connection.commit()
            except psycopg2.Error as error:
                if may_be_row_error(error) or not is_outage(error):
                    raise translated(error, target.tables, parts[0], of_rows=True) from None
                log.warning("commit outcome unknown, reading the row slice=%s cause=%s", parts[0], str(error).strip())
                _require_committed(target, parts[0], error)
    reached(Step.RECEIPT, parts[0])
    return receipts


def _store(cur: Cursor, target: Target, parts: Sequence[Slice], steps: CommitSteps) -> list[Receipt]:
    """Runs steps ② to ⑤."""
    for part in parts:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.position_of, part, ledger=target.group_id)
        if twin is not None and len(parts) == 1:
            return [Receipt(part, twin, twin=True)]
        if twin is not None:
            raise OffsetFenced(partition=part.partition, held=part.epoch, current=part.epoch, position=part.end, owner=target.application)
    if target.before_rows is not None:
        target.before_rows(cur)
    steps.lock(cur)
    reached(Step.COPY_ROWS, parts[0])
    steps.copy_rows(cur)
    reached(Step.COPY_FAILED, parts[0])
    counts = steps.copy_failed(cur)
    reached(Step.LEDGER, parts[0])
    receipts = [Receipt(part, counts_of_part) for part, counts_of_part in zip(parts, counts, strict=True)]
    steps.finish(cur, [_insert_batch(cur, target, receipt) for receipt in receipts])
    return receipts


def _insert_batch(cur: Cursor, target: Target, receipt: Receipt) -> int:
    """Inserts the ledger row and returns its id. A range loaded by a backfill is no longer skipped."""
    part = receipt.part
    if target.side_id is not None:
        store.shorten_skipped(cur, target.group_id, part.topic_id, part.partition, part.start, part.end)
    return store.insert_batch(cur, target.group_id, target.attempt_id, part, receipt.counts)


def _require_committed(target: Target, part: Slice, lost: psycopg2.Error) -> None:
    """Checks in the ledger whether the commit succeeded, once the old session has released the partition's row."""
    retrying = Retrying(
        retry=retry_if_exception_type(DatabaseUnavailable),
        stop=stop_after_delay(OUTCOME_WAIT_S),
        wait=wait_exponential(multiplier=0.2, max=5),
        reraise=True,
    )

    def read_ledger() -> RecordCounts | None:
        with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
            return store.committed(cur, target.position_of, part, ledger=target.group_id)

    try:
        counts = retrying(read_ledger)
    except DatabaseUnavailable as error:
        raise CommitUnknown(part=part, cause=error.cause) from lost
    if counts is None:
        raise DatabaseUnavailable(cause=f"the session ended before the commit of {part}: {str(lost).strip()}") from lost
