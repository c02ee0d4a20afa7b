"""The commit of a slice of a retry topic: the same seven steps as of any slice, for records whose origin is elsewhere (I1, I2, I3).

    ② compare-and-set the retry topic's position; hold rewinds off; lock the records that are registered in the slice, due, and still wait
    ③ COPY the rows, with the lineage of their origin   ④ say what became of each record: loaded, skipped, the next delay, failed
    ⑤ a ledger row of the retry topic, ``drained``

A message that nobody is registered at is read past: a relay published it and died before it could say so, its record was withdrawn,
discarded or sent round again since, or somebody else wrote it. It is counted as unaccounted.

Where there is an order by key, a record is tried only if the one of its key before it is settled, before this slice or in it; else it is
held, and counted as retried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tidemark.offsets import store
from tidemark.offsets.ranges import Epoch, Slice
from tidemark.offsets.store import Counts
from tidemark.retry import store as retries
from tidemark.retry.store import Failure, Waiting
from tidemark.sink.commit import Receipt, Target, commit
from tidemark.sink.load import Refusals, SinkRejected, load, load_carefully
from tidemark.sink.steps import Step, reached
from tidemark.sink.table import Layout
from tidemark.sink.tally import BadOutput, Disposition, Judged, Reject, Tally

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor

Judge = Callable[[Sequence[Waiting]], "Iterator[tuple[Slice, Collection[int], Judged]]"]
"""Tries records: yields an origin (`origins`), the offsets of it that were found in the log and tried, and the transform's answer."""


def commit_drained(target: Target, part: Slice, judge: Judge, *, isolate: bool = False) -> Receipt:
    """Stores a slice of a retry topic in one transaction of its own. Raises as `commit_slice` does, but for the breaker."""

    def store_slice(cur: Cursor) -> list[Receipt]:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.group_id, part)
        if twin is not None:
            return [Receipt(part, twin, twin=True)]
        records = retries.lock_due(cur, target.group_id, part)
        if target.max_held is not None:
            records = retries.in_order(cur, target.group_id, records)
        reached(Step.COPY_ROWS, part)
        tallies = {origin: TallyOfSome(origin, target.layout, offsets) for origin, offsets in origins(records).items()}
        answers = judge(records) if records else iter(())
        if isolate or target.layout.key:
            _load_by_origin(cur, target, part, answers, tallies, isolate=isolate)
        else:
            load(cur, part, target.layout, (rows for _, rows in _taken(answers, tallies)))
        reached(Step.COPY_FAILED, part)
        by_place = {(origin.topic_id, origin.partition): tally for origin, tally in tallies.items()}
        counts = say_what_became(cur, target, part, records, lambda record: by_place[record.topic_id, record.partition].became(record))
        reached(Step.LEDGER, part)
        store.insert_batch(cur, target.group_id, target.attempt_id, part, counts)
        return [Receipt(part, counts)]

    return commit(target, [part], store_slice)[0]


def origins(records: Sequence[Waiting]) -> dict[Slice, list[int]]:
    """The offsets of each origin's records, in order; an origin is a slice that holds them all, and other records that are no concern."""
    by_place: dict[Any, list[int]] = {}
    for record in records:
        by_place.setdefault((record.partition, record.topic_id), []).append(record.offset)
    found = {}
    for (partition, topic_id), offsets in sorted(by_place.items(), key=lambda item: item[0]):
        offsets.sort()
        found[Slice(partition, topic_id, offsets[0], offsets[-1] + 1, Epoch(0))] = offsets
    return found


class TallyOfSome(Tally):
    """Accounts for these records of a slice only, wherever in it they are."""

    def __init__(self, part: Slice, layout: Layout, offsets: Sequence[int]) -> None:
        import numpy as np

        self._offsets = np.array(offsets, dtype=np.int64)
        self.tried: set[int] = set()
        super().__init__(part, layout)

    @property
    def _size(self) -> int:
        return len(self._offsets)

    def _places(self, offsets: Any) -> Any:
        import numpy as np

        index = np.searchsorted(self._offsets, offsets)
        strange = self._offsets[np.minimum(index, self._size - 1)] != offsets
        if strange.any():
            raise BadOutput(part=self._part, problem=f"kafka_offset {offsets[strange][0]} is none of those that were tried again.")
        return index

    def _offsets_at(self, index: Any) -> Any:
        return self._offsets[index]

    def became(self, record: Waiting) -> Outcome | None:
        """What became of one of the records. One that was tried and that the transform does not mention, it does not want any more; `None`:
        it was not tried."""
        import numpy as np

        index = int(self._places(np.array([record.offset]))[0])
        said = int(self._said[index])
        if said:
            return Outcome(Disposition(said), int(self._rows[index]), self.rejects.get(record.offset))
        return Outcome(Disposition.SKIP) if record.offset in self.tried else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record that was tried again: the rows that it made, or why it failed."""

    disposition: Disposition
    rows: int = 0
    reject: Reject | None = None


def say_what_became(
    cur: Cursor, target: Target, part: Slice, records: Sequence[Waiting], became: Callable[[Waiting], Outcome | None]
) -> Counts:
    """Step ④, and the counts for the ledger. A record that was not found in the log goes on waiting, and is published anew."""
    made: dict[int, int | None] = {}
    failures = []
    held = []
    for record in records:
        outcome = became(record)
        if outcome is None:
            continue
        if outcome.disposition is Disposition.HELD:
            held.append(record.number)
        elif outcome.reject is not None:
            permanent = outcome.disposition is Disposition.FAIL
            failures.append(Failure(record.number, permanent, outcome.reject.error_type, outcome.reject.error_text))
        else:
            made[record.number] = outcome.rows if outcome.disposition is Disposition.LOAD else None
    retries.succeed(cur, part, target.attempt_id, made)
    waiting, failed = retries.fail(cur, part, target.ladder, target.attempt_id, failures)
    retries.hold(cur, part, held)
    skipped = sum(rows is None for rows in made.values())
    return Counts(
        loaded=len(made) - skipped,
        skipped=skipped,
        retried=waiting + len(held),
        failed=failed,
        unaccounted=part.span - len(made) - len(failures) - len(held),
        sink_rows=sum(rows or 0 for rows in made.values()),
    )


Answers = Iterator[tuple[Slice, Collection[int], Judged]]


def _taken(answers: Answers, tallies: dict[Slice, TallyOfSome]) -> Iterator[tuple[Slice, pa.RecordBatch]]:
    for origin, tried, judged in answers:
        tallies[origin].tried.update(tried)
        rows = tallies[origin].take(judged)
        if rows is not None:
            yield origin, rows


def _load_by_origin(
    cur: Cursor, target: Target, part: Slice, answers: Answers, tallies: dict[Slice, TallyOfSome], *, isolate: bool
) -> None:
    """Rows of one origin at a time: within it they have an order, and a record that is to blame can be found."""
    held: dict[Slice, list[pa.RecordBatch]] = {}
    for origin, rows in _taken(answers, tallies):
        held.setdefault(origin, []).append(rows)
    refusals = Refusals(target.max_rejected)
    for origin, batches in held.items():
        try:
            if isolate:
                load_carefully(cur, origin, target.layout, iter(batches), tallies[origin], refusals)
            else:
                load(cur, origin, target.layout, iter(batches))
        except SinkRejected as error:
            raise replace(error, part=part) from error  # it is the slice of the retry topic that is tried again
