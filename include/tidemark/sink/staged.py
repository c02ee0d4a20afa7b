"""The commit of a whole batch at once, for transforms that combine rows of several slices (aggregations, windows, joins).

Tasks COPY their rows into a staging table (`tidemark.sink.staging`). The driver moves all of them to the sink, with the offsets of every
slice, in one transaction of the same seven steps as any commit (`tidemark.sink.commit`).

Only rows of tries that reported to the driver are promoted. These are counted, because a crash of Postgres empties an unlogged table.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import rows, statements
from tidemark.errors import Unavailable
from tidemark.offsets import store
from tidemark.records.outcome import DELETED, GIVEN, BadOutput, Disposition, RecordCounts, Reject, reject
from tidemark.records.ranges import Slice
from tidemark.retry import store as retries
from tidemark.retry.store import Waiting
from tidemark.sink import suppressed
from tidemark.sink.commit import CommitSteps, Receipt, commit
from tidemark.sink.hand_off import Payloads, copy_failed
from tidemark.sink.kept_rows import literal
from tidemark.sink.load import (
    KEY_OF_OTHER_PARTITION,
    Bisection,
    CopyCountWrong,
    Refusals,
    SinkRejected,
    check_at_once,
    halves,
    merge,
    start_over,
    translated,
)
from tidemark.sink.retry_commit import Outcomes, origins, report_outcome
from tidemark.sink.staging import OF_SINK, REFUSED, Staged, own_names
from tidemark.sink.table import LINEAGE, Layout, first_value, listed, quoted, quoted_table
from tidemark.sink.target import Target
from tidemark.spec.model import Deletes
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.sink", "staged.sql")
ROWS = "pg_temp.tidemark_staged"
"""The view of the rows to promote."""


class StagedRowsGone(Unavailable):
    """The staging table has lost rows that the tasks staged."""

    table: str
    staged: int
    remaining: int

    def __str__(self) -> str:
        return (
            f"Of {counted(self.staged, 'row')} that the tasks staged, {self.table} holds {self.remaining:,}: Postgres restarted after a "
            "crash, which empties an unlogged table. Nothing of this batch was stored; the next attempt reads it again."
        )


def promote(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], payloads: Payloads, *, isolate: bool
) -> list[Receipt]:
    """Moves the staged rows to the sink and the offsets of all ``parts`` with them, in one transaction, and drops the table.

    Returns a receipt for each part. Raises the same errors as `commit_slice`, and `StagedRowsGone`; then nothing is stored.
    """
    parts = _in_lock_order(parts)
    return commit(target, parts, _OwnRecords(target, parts, table, staged, isolate, payloads))


def promote_drained(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], tried: Waiting, *, isolate: bool
) -> list[Receipt]:
    """Like `promote`, for slices of retry topics: the staged rows come from the records ``tried``. Drops rows of records that are no
    longer waiting in these slices. See `tidemark.sink.retry_commit`."""
    parts = _in_lock_order(parts)
    return commit(target, parts, _RetriedRecords(target, parts, table, staged, isolate, tried))


def _in_lock_order(parts: Sequence[Slice]) -> list[Slice]:
    return sorted(parts, key=lambda part: (part.topic_id, part.partition.partition))


Place = tuple[int, int]
"""A record: the number of its slice in the batch, and its offset."""


@dataclass
class _StagedSteps(CommitSteps):
    target: Target
    parts: Sequence[Slice]
    table: str
    staged: Sequence[Staged]
    isolate: bool
    origins: Sequence[Slice] = field(init=False)
    """The slices that the rows come from; set by `lock`."""

    @abstractmethod
    def exclude(self, cur: Cursor) -> None:
        """Takes out the rows of records that must not be loaded."""

    def copy_rows(self, cur: Cursor) -> None:
        make_views(cur, self.table, self.staged)
        self._require_all(cur)
        self.exclude(cur)
        self._make_ready(cur)
        if self.isolate and self.target.by_record:
            self._load_carefully(cur)
        else:
            for layout in self.target.layouts:
                _load(cur, layout, self.origins, _ready(layout))

    def finish(self, cur: Cursor, batch_ids: Sequence[int]) -> None:
        cur.execute(f"DROP TABLE {self.table} CASCADE")

    def _require_all(self, cur: Cursor) -> None:
        count = _count(cur, ROWS)
        expected = sum(each.rows for each in self.staged)
        if count != expected:
            raise StagedRowsGone(table=self.table, staged=expected, remaining=count)

    def _make_ready(self, cur: Cursor) -> None:
        """Creates a view of each sink's rows with their lineage: that of the record, or for aggregates the start of the first slice."""
        if self.target.by_record:
            record = "kafka_topic_id, kafka_partition, kafka_offset"
            lineage = f"{record}, (row_number() OVER (PARTITION BY {record}) - 1)::integer AS kafka_seq"
            cur.execute(SQL["fail_refused"].format(refused=REFUSED))
        else:
            first = self.parts[0]
            lineage = (
                f"{first.topic_id}::smallint AS kafka_topic_id, {first.partition.partition} AS kafka_partition, "
                f"{first.start}::bigint AS kafka_offset, (row_number() OVER () - 1)::integer AS kafka_seq"
            )
        for layout in self.target.layouts:
            names = zip(layout.columns, own_names(self.target, layout), strict=True)
            fill = {
                "columns": ", ".join(f"{quoted(name)} AS {quoted(column.name)}" for column, name in names),
                "lineage": lineage if layout.deletes is Deletes.REFUSE else f"{lineage}, disposition = 'delete' AS {DELETED}",
                "of_sink": "true" if len(self.target.layouts) == 1 else f"{OF_SINK} = {literal(layout.sink)}",
            }
            cur.execute(SQL["make_ready"].format(ready=_ready(layout), **fill))

    def _load_carefully(self, cur: Cursor) -> None:
        """Like `_load` for all sinks, but marks records with rejected rows as failed in the staging table.

        An earlier sink may already hold rows of such a record; then loading starts over without the record, as in `load_all`.
        """
        refusals = Refusals.of(self.target)
        cur.execute(f"CREATE INDEX ON {self.table} (kafka_topic_id, kafka_partition, kafka_offset)")
        cur.execute("SAVEPOINT tidemark_sinks")
        refused: dict[Place, Reject] = {}
        for passes in itertools.count(1):
            check_at_once(cur)
            for place, reject_ in refused.items():
                self._fail(cur, place, reject_)
            partial: set[Place] = set()
            for layout in self.target.layouts:
                before = set(refused)
                for number in range(len(self.origins)):
                    self._load_origin_carefully(cur, layout, number, refusals, refused)
                if layout is not self.target.layouts[0]:
                    partial |= refused.keys() - before
            if not partial:
                return
            refused = start_over(cur, refusals, refused, min(partial), passes)

    def _load_origin_carefully(self, cur: Cursor, layout: Layout, number: int, refusals: Refusals, refused: dict[Place, Reject]) -> None:
        part = self.origins[number]

        def load_span(span: range) -> int:
            source = SQL["ready_span"].format(ready=_ready(layout), span=_of_span(part, span))
            _load(cur, layout, [part], source)
            return _count(cur, source)

        def refuse(span: range, error: SinkRejected) -> None:
            refusals.count(error)
            place = number, span.start
            refused[place] = Reject(span.start, refusals.disposition(error), error.error_type, error.text(layout))
            self._fail(cur, place, refused[place])

        bisection = Bisection(cur, load_span, halves, refuse)
        bisection.store(range(part.start, part.end))
        bisection.end()

    def _fail(self, cur: Cursor, place: Place, reject_: Reject) -> None:
        """Marks a record in the staging table as failed, or for retry."""
        number, offset = place
        span = _of_span(self.origins[number], range(offset, offset + 1))
        error = f"{reject_.error_type}: {reject_.error_text}"
        cur.execute(SQL["fail_span"].format(span=span), {"disposition": reject_.disposition.name.lower(), "error": error})


@dataclass
class _OwnRecords(_StagedSteps):
    """The steps for slices of the consumer's own topics."""

    payloads: Payloads
    any_suppressed: bool = field(init=False)
    counts: Sequence[RecordCounts] = field(init=False)

    def lock(self, cur: Cursor) -> None:
        skip = [suppressed.records(cur, self.target.group_id, self.target.position_of, part) for part in self.parts]
        self.any_suppressed = any(skip)
        self.origins = self.parts

    def exclude(self, cur: Cursor) -> None:
        if self.any_suppressed and self.target.by_record:
            cur.execute(suppressed.SQL["skip_staged"], {"group_id": self.target.group_id})

    def copy_rows(self, cur: Cursor) -> None:
        super().copy_rows(cur)
        if self.target.by_record:
            self.counts = count_records(cur, self.parts)
        else:
            sink_rows = sum(_count(cur, _ready(layout)) for layout in self.target.layouts)
            self.counts = [_counts_of(part, {"sink_rows": 0 if number else sink_rows}) for number, part in enumerate(self.parts)]
        if self.target.breaker is not None:
            for part, counts in zip(self.parts, self.counts, strict=True):
                if counts.retried or counts.failed:
                    self.target.breaker.check(part, counts, read_rejects(cur, part).values())

    def copy_failed(self, cur: Cursor) -> Sequence[RecordCounts]:
        for part, counts in zip(self.parts, self.counts, strict=True):
            if counts.retried or counts.failed:
                copy_failed(cur, self.target, part, read_rejects(cur, part), self.payloads)
        return self.counts

    def finish(self, cur: Cursor, batch_ids: Sequence[int]) -> None:
        if not self.target.by_record:
            store.mark_whole_batch(cur, batch_ids)
        super().finish(cur, batch_ids)


@dataclass
class _RetriedRecords(_StagedSteps):
    """The steps for slices of retry topics."""

    tried: Waiting
    waiting: Mapping[Slice, Waiting] = field(init=False)
    still_waiting: Waiting = field(init=False)

    def lock(self, cur: Cursor) -> None:
        self.waiting = {part: retries.lock_due(cur, self.target.group_id, part, self.tried) for part in self.parts}
        self.still_waiting = Waiting.joined([*self.waiting.values()])
        self.origins = list(origins(self.still_waiting)) or self.parts

    def exclude(self, cur: Cursor) -> None:
        """Removes the staged rows of records that no longer wait. Raises `BadOutput` for rows of a record that was not tried."""
        if (offset := first_value(cur, SQL["not_tried"], _record_columns(self.tried))) is not None:
            raise BadOutput(part=self.parts[0], problem=f"kafka_offset {offset} is not one of the records being retried.")
        if len(self.still_waiting) < len(self.tried):
            cur.execute(SQL["leave_out"], _record_columns(self.still_waiting))

    def copy_failed(self, cur: Cursor) -> Sequence[RecordCounts]:
        staged = read_outcomes(cur, self.parts[0])
        return [report_outcome(cur, self.target, part, records, _outcomes_of(records, staged)) for part, records in self.waiting.items()]


def make_views(cur: Cursor, table: str, staged: Sequence[Staged]) -> None:
    """Creates the views of the rows to promote, which are those of these tries, and of the outcome of each record."""
    reported = f"try_id = ANY (ARRAY[{', '.join(str(each.try_id) for each in staged)}]::bigint[])"
    cur.execute(SQL["make_views"].format(table=table, reported=reported))


def _record_columns(records: Waiting) -> dict[str, list[int]]:
    return {
        "topic_ids": records.topic_ids.tolist(),
        "partitions": records.partitions.tolist(),
        "offsets": records.offsets.tolist(),
    }


_Outcome = tuple[Disposition, int, int, "Reject | None"]


def _outcomes_of(records: Waiting, staged: Mapping[tuple[int, int, int], _Outcome]) -> Outcomes:
    """Returns the outcomes of tried records. A record missing from the transform's output is skipped."""
    outcomes = Outcomes.zeros(len(records))
    for at, place in enumerate(zip(*_record_columns(records).values(), strict=True)):
        outcomes.dispositions[at], outcomes.rows[at], outcomes.deleted[at], failed = staged.get(place, (Disposition.SKIP, 0, 0, None))
        if failed is not None:
            outcomes.rejects[at] = failed
    return outcomes


def read_outcomes(cur: Cursor, part: Slice) -> dict[tuple[int, int, int], _Outcome]:
    """Reads disposition, rows, deleting rows and reject of each staged record, by topic id, partition and offset."""
    cur.execute(SQL["outcomes"])
    outcomes = {}
    for topic_id, partition, offset, lowest, highest, count, deleted, error in cur.fetchall():
        if lowest != highest:
            raise _contradiction(part, offset)
        disposition = Disposition[lowest.upper()]
        failed = reject(offset, disposition, error) if disposition in (Disposition.RETRY, Disposition.FAIL) else None
        loads = disposition is Disposition.LOAD
        outcomes[topic_id, partition, offset] = (disposition, count if loads else 0, deleted if loads else 0, failed)
    return outcomes


def count_records(cur: Cursor, parts: Sequence[Slice]) -> list[RecordCounts]:
    """Counts the outcomes of each slice's records (I3). Raises `BadOutput` for rows that belong to no record of these slices."""
    by_place = {(part.topic_id, part.partition.partition): part for part in parts}
    cur.execute(SQL["account"])
    counts_by_part: dict[Slice, Mapping[str, int]] = {}
    for row in rows(cur):
        part = by_place.get((row.pop("kafka_topic_id"), row.pop("kafka_partition")))
        first, last, contradictory = row.pop("first"), row.pop("last"), row.pop("contradictory")
        if part is None or first is None:
            raise BadOutput(part=parts[0], problem=f"a row's lineage is not of this batch: return {', '.join(GIVEN)} as they were given.")
        if first < part.start or last >= part.end:
            outside = first if first < part.start else last
            raise BadOutput(part=part, problem=f"kafka_offset {outside} is outside the range that was read.")
        if contradictory is not None:
            raise _contradiction(part, contradictory)
        counts_by_part[part] = row
    return [_counts_of(part, counts_by_part.get(part, {})) for part in parts]


def _contradiction(part: Slice, offset: int) -> BadOutput:
    return BadOutput(part=part, problem=f"record {offset} has rows with different dispositions: give all the same.")


def _counts_of(part: Slice, counts: Mapping[str, int]) -> RecordCounts:
    """Returns the ledger's counts. Missing ones are 0, and the rest of the slice is unaccounted."""
    records = {name: counts.get(name, 0) for name in ("loaded", "skipped", "retried", "failed")}
    unaccounted = part.span - sum(records.values())
    return RecordCounts(**records, unaccounted=unaccounted, sink_rows=counts.get("sink_rows", 0), deleted=counts.get("deleted", 0))


def read_rejects(cur: Cursor, part: Slice) -> dict[int, Reject]:
    """Reads the records of a slice that are not loaded, by offset."""
    cur.execute(SQL["not_loaded"].format(span=_of_span(part, range(part.start, part.end))))
    return {offset: reject(offset, Disposition[word.upper()], error) for offset, word, error in cur.fetchall()}


def _load(cur: Cursor, layout: Layout, parts: Sequence[Slice], source: str) -> None:
    """Loads the rows of ``source``, a relation like `_ready` with rows from ``parts``, into the sink."""
    part = parts[0]
    if layout.key:
        _require_one_partition(cur, layout, part, source)
        merge(cur, parts, layout, source, any_partition=not layout.by_record)
        return
    names = listed([column.name for column in layout.columns] + [name for name, _ in LINEAGE])
    try:
        cur.execute(SQL["append"].format(sink=quoted_table(layout.table), columns=names, source=source))
    except psycopg2.Error as error:
        raise translated(error, layout.table, part, of_rows=layout.by_record) from None
    stored = cur.rowcount
    if stored != (ready := _count(cur, source)):
        raise CopyCountWrong(part=part, table=layout.table, encoded=ready, stored=stored)


def _require_one_partition(cur: Cursor, layout: Layout, part: Slice, source: str) -> None:
    """Requires all rows of an upsert key to come from one partition. Without lineage a key must be unique: rows have no order."""
    key = listed(layout.key)
    several = "count(DISTINCT (kafka_topic_id, kafka_partition)) > 1" if layout.by_record else "count(*) > 1"
    cur.execute(SQL["key_twice"].format(key=key, source=source, several=several))
    key_values = cur.fetchone()
    if key_values is None:
        return
    if layout.by_record:
        cur.execute(SQL["places"].format(source=source, same_key=" AND ".join(f"{quoted(name)} = %s" for name in layout.key)), key_values)
        places = " and ".join(f"{topic}/{partition} offset {offset}" for topic, partition, offset in cur.fetchall())
        problem = f"records of one key came from several partitions ({places}), which have no order. All must come from one partition."
        raise SinkRejected(part=part, table=layout.table, error_type=KEY_OF_OTHER_PARTITION, message=problem, of_rows=False)
    columns = ", ".join(layout.key)
    raise BadOutput(part=part, problem=f"the output has a key ({columns}) more than once. Without lineage columns no row is the last.")


def _ready(layout: Layout) -> str:
    """Returns the view of a sink's staged rows to load."""
    return quoted_table(f"pg_temp.tidemark_ready_{layout.sink}" if layout.sink else "pg_temp.tidemark_ready")


def _of_span(part: Slice, span: range) -> str:
    """Returns the SQL condition for the rows of these records."""
    where = f"kafka_topic_id = {part.topic_id} AND kafka_partition = {part.partition.partition}"
    return f"{where} AND kafka_offset >= {span.start} AND kafka_offset < {span.stop}"


def _count(cur: Cursor, source: str) -> int:
    return int(first_value(cur, SQL["count"].format(source=source)))
