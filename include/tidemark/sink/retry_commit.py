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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tidemark.db import session, transaction
from tidemark.offsets import store
from tidemark.records.outcome import BadOutput, Disposition, RecordCounts, Reject, TransformOutput, without
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry import store as retries
from tidemark.retry.order import TurnOrder
from tidemark.retry.store import FailedTry, Waiting
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

Answer = tuple[Slice, Any, TransformOutput]
"""An origin (`origins`), the offsets (a numpy array) of its records that were found in the log and tried, in order, and the transform's
output."""
Judge = Callable[[Waiting], Iterator[Answer]]
"""Runs the transform on records."""


def commit_drained(target: Target, part: Slice, judge: Judge, *, isolate: bool = False) -> Receipt:
    """Stores a slice of a retry topic in one transaction of its own. Raises the same errors as `commit_slice`, except the breaker's.

    Due records are read and tried before the transaction begins, so that neither locks nor rewinds wait for the transform. A record that
    changed meanwhile (discarded by an operator, withdrawn by a rewind, published again by a relay) keeps its new state.
    """
    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = _in_order(cur, target, retries.read_due(cur, target.group_id, part))
    with spooled(judge(due) if len(due) else iter(())) as answers:
        return _commit_tried(target, part, due, answers, isolate=isolate)


def _commit_tried(target: Target, part: Slice, due: Waiting, answers: Spool[Answer], *, isolate: bool) -> Receipt:
    def store_slice(cur: Cursor) -> list[Receipt]:
        reached(Step.MOVE_OFFSET, part)
        twin = store.move_offset(cur, target.group_id, part)
        if twin is not None:
            return [Receipt(part, twin, twin=True)]
        records = _in_order(cur, target, retries.lock_due(cur, target.group_id, part, due))
        reached(Step.COPY_ROWS, part)
        tries = _tries(target, records, answers)
        if isolate or len(target.layouts) > 1 or target.layouts[0].key:
            tallies = _load_by_origin(cur, target, part, tries, isolate=isolate)
        else:
            tallies = {_place(one.origin): one.tally() for one in tries}
            load(cur, part, target.layouts[0], _rows(tries, tallies, target.layouts[0]))
        reached(Step.COPY_FAILED, part)
        outcomes = Outcomes.of_none(len(records))
        for one in tries:
            tallies[_place(one.origin)].report(outcomes, one.among)
        counts = say_what_became(cur, target, part, records, outcomes)
        reached(Step.LEDGER, part)
        store.insert_batch(cur, target.group_id, target.attempt_id, part, counts)
        return [Receipt(part, counts)]

    return commit(target, [part], store_slice)[0]


def _in_order(cur: Cursor, target: Target, records: Waiting) -> Waiting:
    return records if target.max_held is None else retries.in_order(cur, target.group_id, records)


Place = tuple[int, int]
"""The topic id and the partition of an origin."""


def _place(origin: Slice) -> Place:
    return origin.topic_id, origin.partition.partition


def origins(records: Waiting) -> dict[Slice, Any]:
    """The records of each origin, in their order, as places among ``records``. An origin is a slice that spans them all; other records in
    it do not matter."""
    import numpy as np

    of_place: dict[tuple[TopicPartition, int], Any] = {}
    for topic_id in np.unique(records.topic_ids).tolist():
        of_topic = records.topic_ids == topic_id
        for partition in np.unique(records.partitions[of_topic]).tolist():
            among = np.flatnonzero(of_topic & (records.partitions == partition))
            of_place[TopicPartition(records.topics[topic_id], partition), topic_id] = among
    found = {}
    for (partition, topic_id), among in sorted(of_place.items(), key=lambda item: item[0]):
        offsets = records.offsets[among]
        found[Slice(partition, topic_id, int(offsets.min()), int(offsets.max()) + 1, Epoch(0))] = among
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The outcome of each retried record, as columns (numpy arrays)."""

    said: Any
    """Its `Disposition`; 0: it was not found in the log."""
    rows: Any
    deleted: Any
    """Of ``rows``: those that delete."""
    rejects: dict[int, Reject]
    """Why records are to be retried, or fail, by their places in the columns."""

    @staticmethod
    def of_none(count: int) -> Outcomes:
        import numpy as np

        return Outcomes(np.zeros(count, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64), {})


class TallyOfSome(Tally):
    """Accounts for some records of a slice only: those at ``offsets``, which rise. ``tried``: a mask of those that have an answer."""

    def __init__(self, part: Slice, offsets: Any, tried: Any, refused: Mapping[int, Reject] = MappingProxyType({})) -> None:
        self._offsets = offsets
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

    def report(self, outcomes: Outcomes, among: Any) -> None:
        """Enters the outcomes at the places ``among``. A record that was tried but is missing from the transform's output is skipped."""
        import numpy as np

        outcomes.said[among] = np.where((self._said == 0) & self._tried, Disposition.SKIP, self._said)
        outcomes.rows[among] = sum(self._rows.values(), np.zeros(self._size, np.int64))
        outcomes.deleted[among] = self._deleted
        outcomes.rejects.update((int(among[self._places(np.array([offset]))[0]]), each) for offset, each in self.rejects.items())


def say_what_became(cur: Cursor, target: Target, part: Slice, records: Waiting, outcomes: Outcomes) -> RecordCounts:
    """Step ④; returns the counts for the ledger. A record that was not found in the log keeps waiting and is published again."""
    import numpy as np

    said = outcomes.said
    loaded, skipped = said == Disposition.LOAD, said == Disposition.SKIP
    settled = loaded | skipped
    numbers, rows = records.numbers[settled], np.where(loaded, outcomes.rows, -1)[settled]
    held = records.numbers[said == Disposition.HELD].tolist()
    failures = [
        FailedTry(
            int(records.numbers[at]), bool(said[at] == Disposition.FAIL), outcomes.rejects[at].error_type, outcomes.rejects[at].error_text
        )
        for at in np.flatnonzero((said == Disposition.RETRY) | (said == Disposition.FAIL)).tolist()
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
    """The answers for the records of one origin that are still waiting. An order by key is checked again, because a previous record may
    have changed."""

    origin: Slice
    among: Any
    """Their places among all records, in the order of ``offsets``."""
    offsets: Any
    tried: Any
    """A mask of those that have an answer. Complete once `outputs` is exhausted."""
    before: Mapping[int, int | None] | None
    """With an order by key: each one's predecessor, by offset."""
    answers: Spool[Answer]
    answered: Sequence[int]
    """Where the origin's answers are among ``answers``."""

    def tally(self, refused: Mapping[int, Reject] = MappingProxyType({})) -> TallyOfSome:
        return TallyOfSome(self.origin, self.offsets, self.tried, refused)

    def outputs(self) -> Iterator[TransformOutput]:
        """The transform's outputs, without those of records that no longer wait."""
        import numpy as np

        order = None if self.before is None else TurnOrder(self.before)
        for index in self.answered:
            origin, tried, judged = self.answers[index]
            at = np.minimum(np.searchsorted(self.offsets, tried), len(self.offsets) - 1)
            here = self.offsets[at] == tried
            if not here.all():
                judged = without(judged, set(tried[~here].tolist()), origin)
            self.tried[at[here]] = True
            if order is not None:
                judged = order.sift(origin, [(offset, None) for offset in tried[here].tolist()], judged)
            yield judged


def _tries(target: Target, records: Waiting, answers: Spool[Answer]) -> list[_Tries]:
    import numpy as np

    answered: dict[Place, list[int]] = {}
    for index, (origin, _, _) in enumerate(answers):
        answered.setdefault(_place(origin), []).append(index)
    found = []
    for origin, among in origins(records).items():
        rising = among[np.argsort(records.offsets[among])]
        before = predecessors(records, among) if target.max_held is not None else None
        tried = np.zeros(len(rising), bool)
        found.append(_Tries(origin, rising, records.offsets[rising], tried, before, answers, answered.get(_place(origin), ())))
    return found


def predecessors(records: Waiting, among: Any) -> dict[int, int | None]:
    """By offset, the predecessors of some records of one origin, for `TurnOrder`."""
    pairs = zip(records.offsets[among].tolist(), records.numbers[among].tolist(), strict=True)
    return {offset: records.before.get(number) for offset, number in pairs}


def _rows(tries: Sequence[_Tries], tallies: Mapping[Place, TallyOfSome], layout: Layout) -> Iterator[pa.RecordBatch]:
    """The rows of all origins, accounted for as they are read."""
    for one in tries:
        for judged in one.outputs():
            rows = tallies[_place(one.origin)].take(judged, layout)
            if rows is not None:
                yield rows


def _load_by_origin(cur: Cursor, target: Target, part: Slice, tries: Sequence[_Tries], *, isolate: bool) -> dict[Place, TallyOfSome]:
    """Loads one origin at a time: within it rows have an order, and a bad record can be isolated."""
    refusals = Refusals.of(target) if isolate else None
    try:
        return {_place(one.origin): load_all(cur, one.origin, target.layouts, one.outputs, one.tally, refusals) for one in tries}
    except SinkRejected as error:
        raise replace(error, part=part) from error  # the caller retries the slice of the retry topic
