"""The commit of one slice: rows, offset, failed records and ledger row, together or not at all (I1, I2, I3).

    ① begin   ② compare-and-set the partition row   ③ COPY the rows   ④ COPY the failed records   ⑤ ledger row   ⑥ commit   ⑦ receipt

② comes first: a zombie waits there for the row lock and fails before it has sent a byte. Whatever happens before ⑥ leaves nothing.
If the answer to ⑥ is lost, the row is read again and says whether it happened; nothing is repeated blindly.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psycopg2
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from tidemark.db import FIX_PATH, RELEASE_IF_LOST, REWIND_LOCK, answering, connect, is_outage, session, transaction
from tidemark.errors import DatabaseUnavailable, Unavailable
from tidemark.offsets import store
from tidemark.offsets.locks import LockWait, held_by_writer
from tidemark.offsets.store import PositionLocked
from tidemark.records.outcome import Disposition, RecordCounts, TransformOutput
from tidemark.records.ranges import Slice
from tidemark.retry.order import KeyOrder
from tidemark.retry.store import read_blocked
from tidemark.sink.hand_off import Payloads, copy_failed
from tidemark.sink.load import Refusals, load, load_carefully, translated
from tidemark.sink.spool import spooled
from tidemark.sink.steps import Step, reached
from tidemark.sink.tally import Tally
from tidemark.sink.target import Target
from tidemark.waiting import waiting

if TYPE_CHECKING:
    from tidemark.db import Cursor

log = logging.getLogger(__name__)

LOCK_TIMEOUT_MS = 120_000
"""How long ② waits for another commit that holds the row: a twin's or an older owner's COPY, which ends or is ended."""
IDLE_TIMEOUT_MS = 60_000
"""Between two statements nothing takes long; a session that is idle inside its transaction belongs to a process that is gone."""
OUTCOME_WAIT_S = 60
"""How long a database that went away during COMMIT is asked again whether the commit happened."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A slice that is committed. ``twin``: another try of the same task did it."""

    part: Slice
    counts: RecordCounts
    twin: bool = False


@dataclass(kw_only=True, eq=False)
class CommitUnknown(Unavailable):
    """The session was lost during COMMIT, and the database did not come back to say whether it happened."""

    part: Slice
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.part}: the session was lost during COMMIT and Postgres does not answer: {self.cause}. The slice is stored whole or not "
            "at all; its row says which, and the next attempt goes on from there."
        )


def commit_slice(
    target: Target,
    part: Slice,
    judged: Iterator[TransformOutput],
    payloads: Payloads,
    *,
    isolate: bool = False,
    order: KeyOrder | None = None,
) -> Receipt:
    """Stores a slice in one transaction of its own and returns the receipt.

    ``judged`` is consumed while Postgres takes the rows, so a slice of any size needs the memory of one batch. Safe to call again
    for the same slice: the second finds the first one's ledger row. With ``isolate`` records whose rows Postgres refuses become failed
    records, up to ``target.max_rejected``, and the others are loaded; that takes several COPYs, so ``judged`` is spooled before the
    transaction begins. ``order`` gets the blocked keys before ``judged`` is asked for anything.

    Raises `OffsetFenced` if the partition was taken away, `SinkRejected` (if its ``of_rows`` is set, ``isolate`` may help),
    `TooManyRejected`, `BadOutput` or `Broken` for what is wrong with the rows, `BreakerTripped` where too many records fail, `HeldTooMany`
    where too many would be held, `KeysBlocked` (with ``isolate``: judge the slice again), `DatabaseUnavailable` for an outage, and whatever
    ``judged`` or ``payloads`` raise; then nothing is stored. `CommitUnknown` leaves open whether it is.
    """
    if isolate:
        if order is not None:
            with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                order.begin(read_blocked(cur, target.group_id, part))
        with spooled(judged) as answers:
            return _commit_slice(target, part, iter(answers), payloads, isolate=True, order=order)
    return _commit_slice(target, part, judged, payloads, isolate=False, order=order)


def _commit_slice(
    target: Target, part: Slice, judged: Iterator[TransformOutput], payloads: Payloads, *, isolate: bool, order: KeyOrder | None
) -> Receipt:
    def store_slice(cur: Cursor) -> list[Receipt]:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.position_of, part, ledger=target.group_id)
        if twin is not None:
            return [Receipt(part, twin, twin=True)]
        if order is not None:
            blocked = read_blocked(cur, target.group_id, part)
            if isolate:
                order.confirm(part, blocked)
            else:
                order.begin(blocked)
        reached(Step.COPY_ROWS, part)
        tally = Tally(part, target.layout)
        rows = (rows for one in judged if (rows := tally.take(one)) is not None)
        if isolate:
            load_carefully(cur, part, target.layout, rows, tally, Refusals(target.max_rejected))
        else:
            load(cur, part, target.layout, rows)
        counts, held = tally.counts(), tally.held()
        if target.breaker is not None:
            failures = [reject for reject in tally.rejects.values() if reject.disposition is not Disposition.HELD]
            target.breaker.check(part, replace(counts, retried=counts.retried - held), tally.longest_failure(), failures)
        if order is not None:
            order.check(part, held)
        reached(Step.COPY_FAILED, part)
        copy_failed(cur, target, part, tally.rejects, payloads)
        reached(Step.LEDGER, part)
        enter(cur, target, part, counts)
        return [Receipt(part, counts)]

    return commit(target, [part], store_slice)[0]


def commit(target: Target, parts: Sequence[Slice], store_parts: Callable[[Cursor], list[Receipt]]) -> list[Receipt]:
    """One transaction around steps ② to ⑤, which are ``store_parts``; returns what it returns once that is stored for sure.

    A commit never fails because a rewind holds a position: it begins again until the rewind has ended. Nothing of ``store_parts`` was used
    up by then, because ② comes first.
    """
    wait = LockWait(f"position of {parts[0].partition}")
    while True:
        try:
            return _commit(target, parts, store_parts)
        except PositionLocked as error:
            with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
                position = {"group_id": error.group_id, "topic_id": error.topic_id, "partition": error.partition.partition}
                if held_by_writer(cur, **position):
                    raise
                wait.say(cur, {**position, "class": REWIND_LOCK})


def _commit(target: Target, parts: Sequence[Slice], store_parts: Callable[[Cursor], list[Receipt]]) -> list[Receipt]:
    with (
        waiting(f"commit of={parts[0]}"),
        contextlib.closing(connect(target.database_url, application=target.application)) as connection,
        answering(connection),
    ):
        try:
            with connection.cursor() as cur:
                reached(Step.BEGIN, parts[0])
                limits = "SET LOCAL lock_timeout TO %s; SET LOCAL idle_in_transaction_session_timeout TO %s"
                cur.execute(f"{FIX_PATH}; {RELEASE_IF_LOST}; {limits}", (LOCK_TIMEOUT_MS, IDLE_TIMEOUT_MS))
                receipts = store_parts(cur)
        except psycopg2.Error as error:
            raise translated(error, target.layout.table, parts[0], of_rows=False) from error
        if not all(receipt.twin for receipt in receipts):
            reached(Step.COMMIT, parts[0])
            try:
                connection.commit()
            except psycopg2.Error as error:
                if not is_outage(error):
                    raise translated(error, target.layout.table, parts[0], of_rows=True) from error
                log.warning("commit outcome unknown, reading the row slice=%s cause=%s", parts[0], str(error).strip())
                _require_committed(target, parts[0], error)
    reached(Step.RECEIPT, parts[0])
    return receipts


def enter(cur: Cursor, target: Target, part: Slice, counts: RecordCounts) -> int:
    """Step ⑤: the ledger row, whose id it returns. What a backfill enters is no lost range any more."""
    if target.side_id is not None:
        store.shorten_skipped(cur, target.group_id, part.topic_id, part.partition, part.start, part.end)
    return store.insert_batch(cur, target.group_id, target.attempt_id, part, counts)


def _require_committed(target: Target, part: Slice, lost: psycopg2.Error) -> None:
    """Did the commit whose answer was lost happen? The ledger says it, once the old session has let go of the partition's row."""
    retrying = Retrying(
        retry=retry_if_exception_type(DatabaseUnavailable),
        stop=stop_after_delay(OUTCOME_WAIT_S),
        wait=wait_exponential(multiplier=0.2, max=5),
        reraise=True,
    )

    def ask() -> RecordCounts | None:
        with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
            return store.committed(cur, target.position_of, part, ledger=target.group_id)

    try:
        counts = retrying(ask)
    except DatabaseUnavailable as error:
        raise CommitUnknown(part=part, cause=error.cause) from lost
    if counts is None:
        raise DatabaseUnavailable(cause=f"the session ended before the commit of {part}: {str(lost).strip()}") from lost
