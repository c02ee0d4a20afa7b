"""The commit of a slice of a retry topic: the usual seven steps, for records that were first read elsewhere (I1, I2, I3).

    before ①: read the due records registered in the slice, run the transform on them, spool its output
    ② compare-and-set the retry topic's position; block rewinds; lock the records that are still registered and waiting
    ③ COPY the rows, with the lineage of their origin   ④ update each record: loaded, skipped, next delay or failed
    ⑤ a ledger row of the retry topic, ``drained``

A message that is registered for no record is skipped and counted as unaccounted: a relay died between publishing and registering it, its
record has been withdrawn, discarded or redriven, or another producer wrote it.

With an order by key, a record is tried only if the previous record of its key is settled, before this slice or in it. Otherwise it is
held, and counted as retried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tidemark.db import session, transaction
from tidemark.records.outcome import BadOutput, Disposition, RecordCounts, Reject, TransformOutput, without
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry import store as retries
from tidemark.retry.order import TurnOrder
from tidemark.retry.store import FailedTry, Waiting
from tidemark.sink.commit import CommitSteps, Receipt, commit
from tidemark.sink.load import Refusals, SinkRejected, load_all
from tidemark.sink.spool import Spool, spooled
from tidemark.sink.tally import Tally
from tidemark.sink.target import Target

if TYPE_CHECKING:
    from tidemark.db import Cursor

Answer = tuple[Slice, Any, TransformOutput]
"""An origin (`origins`), the sorted offsets (a numpy array) of its records that were read and tried, and the transform's output."""
Retry = Callable[[Waiting], Iterator[Answer]]
"""Runs the transform on waiting records."""


def commit_drained(target: Target, part: Slice, retry: Retry, *, isolate: bool = False) -> Receipt:
    """Stores a slice of a retry topic in one transaction of its own. Raises the same errors as `commit_slice`, except the breaker's.

    Due records are read and tried before the transaction begins, so that neither locks nor rewinds wait for the transform. A record that
    changed meanwhile (discarded by an operator, withdrawn by a rewind, published again by a relay) keeps its new state.
    """
    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = _ordered(cur, target, retries.read_due(cur, target.group_id, part))
    with spooled(retry(due) if len(due) else iter(())) as answers:
        (receipt,) = commit(target, [part], _RetrySteps(target, part, due, answers, isolate))
    return receipt


@dataclass
class _RetrySteps(CommitSteps):
    target: Target
    part: Slice
    due: Waiting
    answers: Spool[Answer]
    isolate: bool
    records: Waiting = field(init=False)
    tries: list[_Tries] = field(init=False)
    tallies: list[RetryTally] = field(init=False)

    def lock(self, cur: Cursor) -> None:
        self.records = _ordered(cur, self.target, retries.lock_due(cur, self.target.group_id, self.part, self.due))

    def copy_rows(self, cur: Cursor) -> None:
        """Loads one origin at a time: only its rows have an order, which upserts and the isolation of bad records need."""
        self.tries = _tries(self.target, self.records, self.answers)
        refusals = Refusals.of(self.target) if self.isolate else None
        try:
            self.tallies = [load_all(cur, each.origin, self.target.layouts, each.outputs, each.tally, refusals) for each in self.tries]
        except SinkRejected as error:
            raise replace(error, part=self.part) from error  # the caller retries the slice of the retry topic

    def copy_failed(self, cur: Cursor) -> Sequence[RecordCounts]:
        outcomes = Outcomes.zeros(len(self.records))
        for tries, tally in zip(self.tries, self.tallies, strict=True):
            tally.report(outcomes, tries.indexes)
        return [report_outcome(cur, self.target, self.part, self.records, outcomes)]


def _ordered(cur: Cursor, target: Target, records: Waiting) -> Waiting:
    return records if target.max_held is None else retries.in_order(cur, target.group_id, records)


Place = tuple[int, int]
"""The topic id and the partition of an origin."""


def _place(origin: Slice) -> Place:
    return origin.topic_id, origin.partition.partition


def origins(records: Waiting) -> dict[Slice, Any]:
    """Groups records by origin: a slice that spans them. Returns indexes into ``records``, in their order."""
    import numpy as np

    indexes_by_partition: dict[tuple[TopicPartition, int], Any] = {}
    for topic_id in np.unique(records.topic_ids).tolist():
        of_topic = records.topic_ids == topic_id
        for partition in np.unique(records.partitions[of_topic]).tolist():
            indexes = np.flatnonzero(of_topic & (records.partitions == partition))
            indexes_by_partition[TopicPartition(records.topics[topic_id], partition), topic_id] = indexes
    by_origin = {}
    for (partition, topic_id), indexes in sorted(indexes_by_partition.items(), key=lambda item: item[0]):
        offsets = records.offsets[indexes]
        by_origin[Slice(partition, topic_id, int(offsets.min()), int(offsets.max()) + 1, Epoch(0))] = indexes
    return by_origin


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The outcome of each retried record, as columns (numpy arrays)."""

    dispositions: Any
    """A `Disposition`; 0 for a record that is no longer in the log."""
    rows: Any
    deleted: Any
    """How many of ``rows`` delete."""
    rejects: dict[int, Reject]
    """Reasons of retried and failed records, by index."""

    @staticmethod
    def zeros(count: int) -> Outcomes:
        import numpy as np

        return Outcomes(np.zeros(count, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64), {})


class RetryTally(Tally):
    """Accounts only for a slice's records at ``offsets``, which are sorted. ``tried``: mask of records already transformed."""

    def __init__(self, part: Slice, offsets: Any, tried: Any, refused: Mapping[int, Reject] = MappingProxyType({})) -> None:
        self._offsets = offsets
        self._tried = tried
        super().__init__(part, refused=refused)

    @property
    def _size(self) -> int:
        return len(self._offsets)

    def _indexes_of(self, offsets: Any) -> Any:
        import numpy as np

        index = np.searchsorted(self._offsets, offsets)
        foreign = self._offsets[np.minimum(index, self._size - 1)] != offsets
        if foreign.any():
            raise BadOutput(part=self._part, problem=f"kafka_offset {offsets[foreign][0]} is not one of the records being retried.")
        return index

    def _offsets_at(self, index: Any) -> Any:
        return self._offsets[index]

    def report(self, outcomes: Outcomes, indexes: Any) -> None:
        """Stores the outcomes at these indexes. A record that was tried but is missing from the transform's output is skipped."""
        import numpy as np

        missing = (self._dispositions == 0) & self._tried
        outcomes.dispositions[indexes] = np.where(missing, Disposition.SKIP, self._dispositions)
        outcomes.rows[indexes] = sum(self._rows.values(), np.zeros(self._size, np.int64))
        outcomes.deleted[indexes] = self._deleted
        outcomes.rejects.update((int(indexes[self._indexes_of(np.array([offset]))[0]]), each) for offset, each in self.rejects.items())


def report_outcome(cur: Cursor, target: Target, part: Slice, records: Waiting, outcomes: Outcomes) -> RecordCounts:
    """Updates the records (step ④) and returns the ledger's counts. A record missing from the log keeps waiting and is published again."""
    import numpy as np

    dispositions = outcomes.dispositions
    loaded, skipped = dispositions == Disposition.LOAD, dispositions == Disposition.SKIP
    settled = loaded | skipped
    numbers, rows = records.numbers[settled], np.where(loaded, outcomes.rows, -1)[settled]
    held = records.numbers[dispositions == Disposition.HELD].tolist()
    failures = [
        FailedTry(
            int(records.numbers[at]),
            bool(dispositions[at] == Disposition.FAIL),
            outcomes.rejects[at].error_type,
            outcomes.rejects[at].error_text,
        )
        for at in np.flatnonzero((dispositions == Disposition.RETRY) | (dispositions == Disposition.FAIL)).tolist()
    ]
    retries.by_index(cur)
    retries.succeed(cur, part, target.attempt_id, numbers.tolist(), rows.tolist())
    waiting, failed = retries.fail(cur, part, target.ladder, target.attempt_id, failures)
    retries.hold(cur, part, held)
    return RecordCounts(
        loaded=int(loaded.sum()),
        skipped=int(skipped.sum()),
        retried=waiting + len(held),
        failed=failed,
        unaccounted=part.span - len(numbers) - len(failures) - len(held),
        sink_rows=int(outcomes.rows[loaded].sum()),
        deleted=int(outcomes.deleted[loaded].sum()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tries:
    """The answers for an origin's records that are still waiting. Checks an order by key again: a previous record may have changed."""

    origin: Slice
    indexes: Any
    """Indexes into all records, in the order of ``offsets``."""
    offsets: Any
    tried: Any
    """Mask of records already transformed. Complete once `outputs` is exhausted."""
    before: Mapping[int, int | None] | None
    """With an order by key: the records' predecessors, by offset."""
    answers: Spool[Answer]
    answer_indexes: Sequence[int]
    """Indexes of the origin's answers in ``answers``."""

    def tally(self, refused: Mapping[int, Reject] = MappingProxyType({})) -> RetryTally:
        return RetryTally(self.origin, self.offsets, self.tried, refused)

    def outputs(self) -> Iterator[TransformOutput]:
        """Yields the transform's outputs, without records that are no longer waiting."""
        import numpy as np

        order = None if self.before is None else TurnOrder(self.before)
        for index in self.answer_indexes:
            origin, tried, output = self.answers[index]
            at = np.minimum(np.searchsorted(self.offsets, tried), len(self.offsets) - 1)
            waiting = self.offsets[at] == tried
            if not waiting.all():
                output = without(output, set(tried[~waiting].tolist()), origin)
            self.tried[at[waiting]] = True
            if order is not None:
                output = order.sift(origin, [(offset, None) for offset in tried[waiting].tolist()], output)
            yield output


def _tries(target: Target, records: Waiting, answers: Spool[Answer]) -> list[_Tries]:
    import numpy as np

    answer_indexes: dict[Place, list[int]] = {}
    for index, (origin, _, _) in enumerate(answers):
        answer_indexes.setdefault(_place(origin), []).append(index)
    tries = []
    for origin, indexes in origins(records).items():
        by_offset = indexes[np.argsort(records.offsets[indexes])]
        before = predecessors(records, indexes) if target.max_held is not None else None
        tried = np.zeros(len(by_offset), bool)
        tries.append(_Tries(origin, by_offset, records.offsets[by_offset], tried, before, answers, answer_indexes.get(_place(origin), ())))
    return tries


def predecessors(records: Waiting, indexes: Any) -> dict[int, int | None]:
    """Returns the predecessors of some records of one origin, by offset, for `TurnOrder`."""
    pairs = zip(records.offsets[indexes].tolist(), records.numbers[indexes].tolist(), strict=True)
    return {offset: records.before.get(number) for offset, number in pairs}
