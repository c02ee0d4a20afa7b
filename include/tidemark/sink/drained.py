"""The commit of a slice of a retry topic: the usual seven steps, for records that were first read elsewhere (I1, I2, I3).

    before ①: read the due records registered in the slice, run the transform on them, spool its output
    ② compare-and-set the retry topic's position; block rewinds; lock the records that are still registered and waiting
    ③ COPY the rows, with the lineage of their origin   ④ update each record: loaded, skipped, next delay or failed
    ⑤ a ledger row of the retry topic, ``drained``

A message that is registered for no record is skipped and counted as unaccounted: a relay published it and died before registering it, its
record was withdrawn, discarded or redriven since, or another producer wrote it.

With an order by key, a record is tried only if the previous record of its key is settled, before this slice or in it. Otherwise it is
held, and counted as retried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tidemark.db import session, transaction
from tidemark.offsets import store
from tidemark.records.outcome import BadOutput, Disposition, RecordCounts, Reject, TransformOutput, without
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry import store as retries
from tidemark.retry.order import TurnOrder
from tidemark.retry.store import Failure, Waiting
from tidemark.sink.commit import Receipt, commit
from tidemark.sink.load import Refusals, SinkRejected, load, load_all
from tidemark.sink.spool import Spool, spooled
from tidemark.sink.steps import Step, reached
from tidemark.sink.table import Layout
from tidemark.sink.tally import Tally
from tidemark.sink.target import Target

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor

Answer = tuple[Slice, Sequence[int], TransformOutput]
"""An origin (`origins`), the offsets of its records that were found in the log and tried, in order, and the transform's output."""
Judge = Callable[[Sequence[Waiting]], Iterator[Answer]]
"""Runs the transform on records."""


def commit_drained(target: Target, part: Slice, judge: Judge, *, isolate: bool = False) -> Receipt:
    """Stores a slice of a retry topic in one transaction of its own. Raises the same errors as `commit_slice`, except the breaker's.

    Due records are read and tried before the transaction begins, so that neither locks nor rewinds wait for the transform. A record that
    changed meanwhile (discarded by an operator, withdrawn by a rewind, published again by a relay) keeps its new state.
    """
    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = _in_order(cur, target, retries.read_due(cur, target.group_id, part))
    with spooled(judge(due) if due else iter(())) as answers:
        return _commit_tried(target, part, {(record.number, record.hop_offset) for record in due}, answers, isolate=isolate)


def _commit_tried(target: Target, part: Slice, tried: Collection[tuple[int, int]], answers: Spool[Answer], *, isolate: bool) -> Receipt:
    def store_slice(cur: Cursor) -> list[Receipt]:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.group_id, part)
        if twin is not None:
            return [Receipt(part, twin, twin=True)]
        locked = retries.lock_due(cur, target.group_id, part)
        records = _in_order(cur, target, [record for record in locked if (record.number, record.hop_offset) in tried])
        reached(Step.COPY_ROWS, part)
        tries = _tries(target, records, answers)
        if isolate or len(target.layouts) > 1 or target.layouts[0].key:
            tallies = _load_by_origin(cur, target, part, tries, isolate=isolate)
        else:
            tallies = {_place(one.origin): one.tally() for one in tries}
            load(cur, part, target.layouts[0], _rows(tries, tallies, target.layouts[0]))
        reached(Step.COPY_FAILED, part)
        counts = say_what_became(cur, target, part, records, lambda record: tallies[_place(record)].became(record))
        reached(Step.LEDGER, part)
        store.insert_batch(cur, target.group_id, target.attempt_id, part, counts)
        return [Receipt(part, counts)]

    return commit(target, [part], store_slice)[0]


def _in_order(cur: Cursor, target: Target, records: list[Waiting]) -> list[Waiting]:
    return records if target.max_held is None else retries.in_order(cur, target.group_id, records)


Place = tuple[int, TopicPartition]


def _place(of: Slice | Waiting) -> Place:
    return of.topic_id, of.partition


def origins(records: Sequence[Waiting]) -> dict[Slice, list[int]]:
    """The offsets of each origin's records, in order. An origin is a slice that spans them all; other records in it do not matter."""
    by_place: dict[Any, list[int]] = {}
    for record in records:
        by_place.setdefault((record.partition, record.topic_id), []).append(record.offset)
    found = {}
    for (partition, topic_id), offsets in sorted(by_place.items(), key=lambda item: item[0]):
        offsets.sort()
        found[Slice(partition, topic_id, offsets[0], offsets[-1] + 1, Epoch(0))] = offsets
    return found


class TallyOfSome(Tally):
    """Accounts for some records of a slice only."""

    def __init__(self, part: Slice, offsets: Sequence[int], tried: Set[int], refused: Mapping[int, Reject] = MappingProxyType({})) -> None:
        import numpy as np

        self._offsets = np.array(offsets, dtype=np.int64)
        self._tried = tried
        super().__init__(part, refused=refused)

    @property
    def _size(self) -> int:
        return len(self._offsets)

    def _places(self, offsets: Any) -> Any:
        import numpy as np

        index = np.searchsorted(self._offsets, offsets)
        strange = self._offsets[np.minimum(index, self._size - 1)] != offsets
        if strange.any():
            raise BadOutput(part=self._part, problem=f"kafka_offset {offsets[strange][0]} is not one of the records being retried.")
        return index

    def _offsets_at(self, index: Any) -> Any:
        return self._offsets[index]

    def became(self, record: Waiting) -> Outcome | None:
        """The outcome of a record. A record that was tried but is missing from the transform's output is skipped. `None`: it was not
        tried."""
        import numpy as np

        index = int(self._places(np.array([record.offset]))[0])
        said = int(self._said[index])
        if said:
            rows = sum(int(rows[index]) for rows in self._rows.values())
            return Outcome(Disposition(said), rows, int(self._deleted[index]), self.rejects.get(record.offset))
        return Outcome(Disposition.SKIP) if record.offset in self._tried else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a retried record: the number of its rows, or why it failed."""

    disposition: Disposition
    rows: int = 0
    deleted: int = 0
    """Of ``rows``: those that delete."""
    reject: Reject | None = None


def say_what_became(
    cur: Cursor, target: Target, part: Slice, records: Sequence[Waiting], became: Callable[[Waiting], Outcome | None]
) -> RecordCounts:
    """Step ④; returns the counts for the ledger. A record that was not found in the log keeps waiting and is published again."""
    made: dict[int, int | None] = {}
    deleted = 0
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
            deleted += outcome.deleted
    retries.succeed(cur, part, target.attempt_id, made)
    waiting, failed = retries.fail(cur, part, target.ladder, target.attempt_id, failures)
    retries.hold(cur, part, held)
    skipped = sum(rows is None for rows in made.values())
    return RecordCounts(
        loaded=len(made) - skipped,
        skipped=skipped,
        retried=waiting + len(held),
        failed=failed,
        unaccounted=part.span - len(made) - len(failures) - len(held),
        sink_rows=sum(rows or 0 for rows in made.values()),
        deleted=deleted,
    )


@dataclass(frozen=True, slots=True)
class _Tries:
    """The answers for the records of one origin that are still waiting, ``here``, by offset. An order by key is checked again, because a
    previous record may have changed."""

    origin: Slice
    here: Mapping[int, Waiting]
    answers: Spool[Answer]
    places: Sequence[int]
    """Where the origin's answers are among ``answers``."""
    in_order: bool
    tried: set[int] = field(default_factory=set)
    """The offsets of records that have an answer. Complete once `outputs` is exhausted."""

    def tally(self, refused: Mapping[int, Reject] = MappingProxyType({})) -> TallyOfSome:
        return TallyOfSome(self.origin, sorted(self.here), self.tried, refused)

    def outputs(self) -> Iterator[TransformOutput]:
        """The transform's outputs, without those of records that no longer wait."""
        order = TurnOrder({record.offset: record.before for record in self.here.values()}) if self.in_order else None
        for index in self.places:
            origin, tried, judged = self.answers[index]
            if gone := set(tried) - self.here.keys():
                judged = without(judged, gone, origin)
            still = [offset for offset in tried if offset in self.here]
            self.tried.update(still)
            if order is not None:
                judged = order.sift(origin, [(offset, None) for offset in still], judged)
            yield judged


def _tries(target: Target, records: Sequence[Waiting], answers: Spool[Answer]) -> list[_Tries]:
    of_place: dict[Place, list[int]] = {}
    for index, (origin, _, _) in enumerate(answers):
        of_place.setdefault(_place(origin), []).append(index)
    here: dict[Place, dict[int, Waiting]] = {}
    for record in records:
        here.setdefault(_place(record), {})[record.offset] = record
    in_order = target.max_held is not None
    return [
        _Tries(origin, here[place], answers, of_place.get(place, ()), in_order)
        for origin in origins(records)
        for place in (_place(origin),)
    ]


def _rows(tries: Sequence[_Tries], tallies: Mapping[Place, TallyOfSome], layout: Layout) -> Iterator[pa.RecordBatch]:
    """The rows of all origins, accounted for as they are read."""
    for one in tries:
        for judged in one.outputs():
            rows = tallies[_place(one.origin)].take(judged, layout)
            if rows is not None:
                yield rows


def _load_by_origin(cur: Cursor, target: Target, part: Slice, tries: Sequence[_Tries], *, isolate: bool) -> dict[Place, TallyOfSome]:
    """Loads one origin at a time: within it rows have an order, and a bad record can be isolated."""
    refusals = Refusals(target.max_rejected) if isolate else None
    try:
        return {_place(one.origin): load_all(cur, one.origin, target.layouts, one.outputs, one.tally, refusals) for one in tries}
    except SinkRejected as error:
        raise replace(error, part=part) from error  # the caller retries the slice of the retry topic
