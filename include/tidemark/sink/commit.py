"""The commit of one slice: rows, offset, failed records and ledger row, together or not at all (I1, I2, I3).

    ① begin   ② compare-and-set the partition row   ③ COPY the rows   ④ COPY the failed records   ⑤ ledger row   ⑥ commit   ⑦ receipt

② comes first: a zombie waits there for the row lock and fails before it has sent a byte. Then the commit reads which records erasures have
suppressed. A failure before ⑥ leaves nothing behind. If the answer to ⑥ is lost, the commit reads the row again to find out whether it
succeeded; nothing is repeated blindly.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from tidemark.offsets.store import PositionLocked
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


@dataclass(kw_only=True, eq=False)
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
    if isolate or len(target.layouts) > 1:
        if order is not None:
            with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                order.begin(read_blocked(cur, target.group_id, part))
        with spooled(outputs) as answers:
            return _commit_slice(target, part, answers, payloads, isolate=isolate, order=order, sessions=sessions)
    return _commit_slice(target, part, outputs, payloads, isolate=False, order=order, sessions=sessions)


def _commit_slice(
    target: Target,
    part: Slice,
    outputs: Iterator[TransformOutput] | Spool[TransformOutput],
    payloads: Payloads,
    *,
    isolate: bool,
    order: KeyOrder | None,
    sessions: Sessions | None,
) -> Receipt:
    def store_slice(cur: Cursor) -> list[Receipt]:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.position_of, part, ledger=target.group_id)
        if twin is not None:
            return [Receipt(part, twin, twin=True)]
        skip = suppressed.records(cur, target.group_id, target.position_of, part)
        if order is not None:
            blocked = read_blocked(cur, target.group_id, part)
            if isinstance(outputs, Spool):
                order.confirm(part, blocked)
            else:
                order.begin(blocked)
        reached(Step.COPY_ROWS, part)
        refusals = Refusals.of(target) if isolate else None
        tally = load_all(cur, part, target.layouts, lambda: iter(outputs), partial(Tally, part, skip), refusals)
        counts, held = tally.counts(), tally.held()
        if target.breaker is not None:
            failures = [reject for reject in tally.rejects.values() if reject.disposition is not Disposition.HELD]
            target.breaker.check(part, replace(counts, retried=counts.retried - held), failures)
        if order is not None:
            order.check(part, held)
        reached(Step.COPY_FAILED, part)
        copy_failed(cur, target, part, tally.rejects, payloads)
        reached(Step.LEDGER, part)
        enter(cur, target, part, counts)
        return [Receipt(part, counts)]

    return commit(target, [part], store_slice, sessions)[0]


def commit(
    target: Target, parts: Sequence[Slice], store_parts: Callable[[Cursor], list[Receipt]], sessions: Sessions | None = None
) -> list[Receipt]:
    """Runs ``store_parts``, steps ② to ⑤, in one transaction, and returns its result once the commit is certain.

    A commit does not fail because a rewind or an erasure holds a lock: it starts over until the lock is released. That is safe because ②
    comes first, before ``store_parts`` has consumed any input.
    """
    wait = LockWait(f"position of {parts[0].partition}")
    while True:
        try:
            if sessions is not None:
                return _commit(target, parts, store_parts, sessions)
            with contextlib.closing(Sessions()) as new_sessions:
                return _commit(target, parts, store_parts, new_sessions)
        except PositionLocked as error:
            with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                position = {"group_id": error.group_id, "topic_id": error.topic_id, "partition": error.partition.partition}
                if held_by_writer(cur, **position):
                    raise
                wait.report_holders(cur, {**position, "class": REWIND_LOCK})


def _commit(target: Target, parts: Sequence[Slice], store_parts: Callable[[Cursor], list[Receipt]], sessions: Sessions) -> list[Receipt]:
    with waiting(f"commit of={parts[0]}"), sessions.lent(target) as connection, answering(connection, url=target.database_url):
        try:
            with connection.cursor() as cur:
                reached(Step.BEGIN, parts[0])
                limits = "SET LOCAL lock_timeout TO %s; SET LOCAL idle_in_transaction_session_timeout TO %s"
                cur.execute(f"{FIX_PATH}; {RELEASE_IF_LOST}; {limits}", (LOCK_TIMEOUT_MS, IDLE_TIMEOUT_MS))
                receipts = store_parts(cur)
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


def enter(cur: Cursor, target: Target, part: Slice, counts: RecordCounts) -> int:
    """Inserts the ledger row (step ⑤) and returns its id. A range loaded by a backfill is no longer skipped."""
    if target.side_id is not None:
        store.shorten_skipped(cur, target.group_id, part.topic_id, part.partition, part.start, part.end)
    return store.insert_batch(cur, target.group_id, target.attempt_id, part, counts)


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
