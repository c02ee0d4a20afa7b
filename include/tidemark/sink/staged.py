"""The commit of a whole batch at once, for transforms that combine rows of several slices (aggregations, windows, joins).

Tasks COPY their rows into an unlogged staging table of the attempt (`stage`). The driver moves all of them to the sink, with the offsets of
every slice, in one transaction (`promote`) of the same seven steps as `tidemark.sink.commit`.

A task that runs twice stages its rows twice: only rows of tries that reported to the driver are promoted. These are counted, because a
crash of Postgres empties an unlogged table.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import rows, session, statements, transaction
from tidemark.errors import DatabaseUnavailable, Unavailable
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced
from tidemark.profiles import STAGING, Profile
from tidemark.records.outcome import DELETED, GIVEN, ONLY, OPTIONAL, BadOutput, Disposition, RecordCounts, Reject, lineage_as, reject
from tidemark.records.ranges import Slice
from tidemark.retry import store as retries
from tidemark.retry.store import Waiting
from tidemark.roles import require
from tidemark.sink import suppressed
from tidemark.sink.commit import Receipt, commit, enter
from tidemark.sink.hand_off import Payloads, copy_failed
from tidemark.sink.kept_rows import literal
from tidemark.sink.load import (
    KEY_OF_OTHER_PARTITION,
    Bisection,
    CopyCountWrong,
    Refusals,
    SinkRejected,
    certain,
    check_at_once,
    copy,
    merge,
    translated,
)
from tidemark.sink.retry_commit import Outcomes, origins, report_outcome
from tidemark.sink.spool import spooled
from tidemark.sink.steps import Step, reached
from tidemark.sink.table import LINEAGE, Layout, listed, quoted, quoted_table
from tidemark.sink.tally import data_columns, dispositions, errors, wrong_deletes
from tidemark.sink.target import Target
from tidemark.sink.types import arrow_type
from tidemark.spec.model import Deletes
from tidemark.text.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor
    from tidemark.retry.breaker import Breaker

SQL = statements("tidemark.sink", "staged.sql")

OF_SINK = "kafka_sink"
"""The column that names a row's sink, if there are several. `column_of` names their data columns."""
BESIDE = (
    ("kafka_topic_id", "smallint"),
    ("kafka_partition", "integer"),
    ("kafka_offset", "bigint"),
    ("disposition", "text"),
    ("error", "text"),
    ("try_id", "bigint"),
    (OF_SINK, "text"),
)
"""Columns of a staged row besides its data. The first three are null without lineage, the last with a single sink."""
REFUSED = "refused"
"""Disposition of a staged row whose data Postgres rejected: its record fails."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The rows staged by one try of a task."""

    try_id: int
    rows: int


@dataclass(kw_only=True, eq=False)
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


def column_of(sink: str, name: str) -> str:
    """Returns a column's name in an output for several sinks: prefixed with its sink."""
    return name if sink == ONLY else f"{sink}:{name}"


def make_staging(target: Target, number: int) -> str:
    """Creates the staging table for a batch of an attempt and returns its name. Drops tables left behind by ended attempts.

    Raises `RoleLacks` if the role may not create tables.
    """
    table = f"{STAGING}.staged_{target.attempt_id}_{number}_{secrets.token_hex(4)}"  # no other role can guess it
    columns = ", ".join(
        f"{_alias(at)}.{quoted(column.name)} AS {quoted(name)}"
        for at, layout in enumerate(target.layouts)
        for column, name in zip(layout.columns, _own_names(target, layout), strict=True)
    )
    sinks = ", ".join(f"{quoted_table(layout.table)} {_alias(at)}" for at, layout in enumerate(target.layouts))
    beside = ", ".join(f"ADD {quoted(name)} {kind}" for name, kind in BESIDE)
    with session(target.database_url, application=target.application) as connection:
        require(connection, Profile.STAGER)
        with transaction(connection) as cur:
            cur.execute(SQL["left_behind"])
            left_behind = [name for (name,) in cur.fetchall()]
        for name in left_behind:
            with contextlib.suppress(DatabaseUnavailable, psycopg2.Error), transaction(connection) as cur:  # a task may still write to it
                cur.execute("SET LOCAL lock_timeout = '1s'")
                cur.execute(f"DROP TABLE IF EXISTS {quoted_table(name)}")
        with transaction(connection) as cur:
            cur.execute(SQL["make_staging"].format(table=table, columns=columns, sinks=sinks))
            cur.execute(f"ALTER TABLE {table} {beside}")
    return table


def drop_staging(target: Target, table: str) -> None:
    """Drops a staging table that will not be promoted."""
    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        cur.execute(f"DROP TABLE IF EXISTS {table}")


def stage(target: Target, table: str, parts: Sequence[Slice], batches: Iterator[pa.RecordBatch], *, isolate: bool) -> Staged:
    """COPYs a task's rows into the staging table, in a transaction of its own. Raises the same errors as `commit_slice`.

    With ``isolate``, a row whose data Postgres rejects is staged without its data, as `REFUSED`.
    """
    part = parts[0]
    try_id = secrets.randbits(63)
    columns = [*_columns(target), *BESIDE]
    count = 0

    def store_rows(batch: pa.RecordBatch) -> int:
        return copy(cur, part, table, columns, iter((batch,)), sink=target.tables)

    def refuse(batch: pa.RecordBatch, error: SinkRejected) -> None:
        refusals.count(error)
        copy(cur, part, table, columns, iter((_without_data(batch, target, error),)))

    staged = (_staged(own, target, layout, parts, try_id) for batch in batches for layout, own in _by_sink(batch, target))
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(spooled(staged)) if isolate else staged  # so that no COPY waits for the transform
        connection = stack.enter_context(session(target.database_url, application=target.application))
        cur = stack.enter_context(transaction(connection))
        refusals = Refusals.of(target)
        if not isolate:
            count = copy(cur, part, table, columns, staged, sink=target.tables)
        bisection = Bisection(cur, store_rows, _halves, lambda batch: batch.slice(0, 0), refuse)
        for batch in ready:
            count += batch.num_rows
            bisection.store(batch)
        bisection.end()
    return Staged(try_id, count)


def promote(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], payloads: Payloads, *, isolate: bool
) -> list[Receipt]:
    """Moves the staged rows to the sink and the offsets of all ``parts`` with them, in one transaction, and drops the table.

    Returns a receipt for each part. Raises the same errors as `commit_slice`, and `StagedRowsGone`; then nothing is stored.
    """
    parts = sorted(parts, key=lambda part: (part.topic_id, part.partition.partition))
    by_record = target.by_record

    def store_parts(cur: Cursor) -> list[Receipt]:
        for part in parts:
            reached(Step.MOVE_OFFSET, part)
            if store.move_offset(cur, target.position_of, part, ledger=target.group_id) is not None:
                raise OffsetFenced(
                    partition=part.partition, held=part.epoch, current=part.epoch, position=part.end, owner=target.application
                )
        reached(Step.COPY_ROWS, parts[0])
        _require_all(cur, table, staged)
        if any(suppressed.records(cur, target.group_id, target.position_of, part) for part in parts) and by_record:
            cur.execute(suppressed.SQL["skip_staged"].format(table=table, heard=_reported_tries(staged)), {"group_id": target.group_id})
        _make_ready(cur, target, parts[0], table, staged)
        if isolate and by_record:
            _load_carefully(cur, target, parts, table)
        else:
            for layout in target.layouts:
                _load(cur, layout, parts, _ready(layout))
        sink_rows = 0 if by_record else sum(_count(cur, _ready(layout)) for layout in target.layouts)
        counts_by_part = _account(cur, parts, table, staged) if by_record else {parts[0]: {"sink_rows": sink_rows}}
        if target.breaker is not None and by_record:
            for part in parts:
                _check_breaker(cur, target.breaker, part, table, staged, counts_by_part.get(part, {}))
        reached(Step.COPY_FAILED, parts[0])
        for part in parts if by_record else ():
            _copy_failed(cur, target, part, table, staged, payloads)
        reached(Step.LEDGER, parts[0])
        zeros = {"loaded": 0, "skipped": 0, "retried": 0, "failed": 0, "sink_rows": 0, "deleted": 0}
        receipts = []
        for part in parts:
            counts = {**zeros, **counts_by_part.get(part, {})}
            accounted = counts["loaded"] + counts["skipped"] + counts["retried"] + counts["failed"]
            receipts.append(Receipt(part, RecordCounts(**counts, unaccounted=part.span - accounted)))
        ids = [enter(cur, target, receipt.part, receipt.counts) for receipt in receipts]
        if not by_record:
            store.mark_whole_batch(cur, ids)
        _drop(cur, target, table)
        return receipts

    return commit(target, parts, store_parts)


def promote_drained(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], tried: Waiting, *, isolate: bool
) -> list[Receipt]:
    """Like `promote`, for slices of retry topics: the staged rows come from the records ``tried``. Drops rows of records that are no
    longer waiting in these slices. See `tidemark.sink.retry_commit`."""
    parts = sorted(parts, key=lambda part: (part.topic_id, part.partition.partition))

    def store_parts(cur: Cursor) -> list[Receipt]:
        for part in parts:
            reached(Step.MOVE_OFFSET, part)
            if store.move_offset(cur, target.group_id, part) is not None:
                raise OffsetFenced(
                    partition=part.partition, held=part.epoch, current=part.epoch, position=part.end, owner=target.application
                )
        waiting = {part: retries.lock_due(cur, target.group_id, part, tried) for part in parts}
        still_waiting = Waiting.joined([*waiting.values()])
        reached(Step.COPY_ROWS, parts[0])
        _require_all(cur, table, staged)
        _drop_settled(cur, parts[0], table, staged, tried, still_waiting)
        _make_ready(cur, target, parts[0], table, staged)
        if isolate:
            _load_carefully(cur, target, list(origins(still_waiting)), table)
        else:
            for layout in target.layouts:
                _load(cur, layout, list(origins(still_waiting)) or parts, _ready(layout))
        reached(Step.COPY_FAILED, parts[0])
        outcomes = _outcomes(cur, parts[0], table, staged)
        counts = [report_outcome(cur, target, part, records, _outcomes_of(records, outcomes)) for part, records in waiting.items()]
        reached(Step.LEDGER, parts[0])
        receipts = [Receipt(part, part_counts) for part, part_counts in zip(parts, counts, strict=True)]
        for receipt in receipts:
            store.insert_batch(cur, target.group_id, target.attempt_id, receipt.part, receipt.counts)
        _drop(cur, target, table)
        return receipts

    return commit(target, parts, store_parts)


def _drop_settled(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged], tried: Waiting, still_waiting: Waiting) -> None:
    """Removes the staged rows of records that no longer wait. Raises `BadOutput` for rows of a record that was not tried."""
    cur.execute(SQL["strangers"].format(table=table, heard=_reported_tries(staged)), _record_columns(tried))
    row = cur.fetchone()
    if row is not None:
        raise BadOutput(part=part, problem=f"kafka_offset {row[0]} is not one of the records being retried.")
    if len(still_waiting) < len(tried):
        cur.execute(SQL["leave_out"].format(table=table, heard=_reported_tries(staged)), _record_columns(still_waiting))


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


def _outcomes(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged]) -> dict[tuple[int, int, int], _Outcome]:
    """Reads disposition, rows, deleting rows and reject of each staged record, by topic id, partition and offset."""
    cur.execute(SQL["outcomes"].format(table=table, heard=_reported_tries(staged)))
    outcomes = {}
    for topic_id, partition, offset, lowest, highest, count, deleted, error in cur.fetchall():
        if lowest != highest:
            raise BadOutput(part=part, problem=f"record {offset} has rows with different dispositions: give all the same.")
        disposition = Disposition[lowest.upper()]
        failed = reject(offset, disposition, error) if disposition in (Disposition.RETRY, Disposition.FAIL) else None
        loads = disposition is Disposition.LOAD
        outcomes[topic_id, partition, offset] = (disposition, count if loads else 0, deleted if loads else 0, failed)
    return outcomes


def _require_all(cur: Cursor, table: str, staged: Sequence[Staged]) -> None:
    count = _count(cur, f"(SELECT FROM {table} WHERE {_reported_tries(staged)})")
    expected = sum(each.rows for each in staged)
    if count != expected:
        raise StagedRowsGone(table=table, staged=expected, remaining=count)


def _make_ready(cur: Cursor, target: Target, first: Slice, table: str, staged: Sequence[Staged]) -> None:
    """Creates a view of each sink's rows with their lineage: that of the record, or for aggregates the start of the first slice."""
    heard = _reported_tries(staged)
    if target.by_record:
        record = "kafka_topic_id, kafka_partition, kafka_offset"
        lineage = f"{record}, (row_number() OVER (PARTITION BY {record}) - 1)::integer AS kafka_seq"
        cur.execute(SQL["fail_refused"].format(table=table, heard=heard, refused=REFUSED))
    else:
        lineage = (
            f"{first.topic_id}::smallint AS kafka_topic_id, {first.partition.partition} AS kafka_partition, "
            f"{first.start}::bigint AS kafka_offset, (row_number() OVER () - 1)::integer AS kafka_seq"
        )
    for layout in target.layouts:
        names = zip(layout.columns, _own_names(target, layout), strict=True)
        fill = {
            "columns": ", ".join(f"{quoted(name)} AS {quoted(column.name)}" for column, name in names),
            "lineage": lineage if layout.deletes is Deletes.REFUSE else f"{lineage}, disposition = 'delete' AS {DELETED}",
            "of_sink": "true" if len(target.layouts) == 1 else f"{OF_SINK} = {literal(layout.sink)}",
        }
        cur.execute(SQL["make_ready"].format(ready=_ready(layout), table=table, heard=heard, **fill))


def _ready(layout: Layout) -> str:
    """The view of a sink's staged rows to load."""
    return quoted_table(f"pg_temp.tidemark_ready_{layout.sink}" if layout.sink else "pg_temp.tidemark_ready")


def _drop(cur: Cursor, target: Target, table: str) -> None:
    for layout in target.layouts:
        cur.execute(f"DROP VIEW {_ready(layout)}")
    cur.execute(f"DROP TABLE {table}")


def _reported_tries(staged: Sequence[Staged]) -> str:
    """Returns the SQL condition for the rows of these tries."""
    return f"try_id = ANY (ARRAY[{', '.join(str(each.try_id) for each in staged)}]::bigint[])"


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


def _load_carefully(cur: Cursor, target: Target, parts: Sequence[Slice], table: str) -> None:
    """Like `_load` for all sinks, but marks records with rejected rows as failed in the staging table.

    An earlier sink may already hold rows of such a record; then loading starts over without the record, as in `load_all`.
    """
    refusals = Refusals.of(target)
    cur.execute(f"CREATE INDEX ON {table} (kafka_topic_id, kafka_partition, kafka_offset)")
    cur.execute("SAVEPOINT tidemark_sinks")
    refused: dict[Place, Reject] = {}
    for passes in itertools.count(1):
        check_at_once(cur)
        for place, reject_ in refused.items():
            _fail(cur, table, parts, place, reject_)
        partial: set[Place] = set()
        for layout in target.layouts:
            before = set(refused)
            for number in range(len(parts)):
                _load_part_carefully(cur, layout, parts, number, table, refusals, refused)
            if layout is not target.layouts[0]:
                partial |= refused.keys() - before
        if not partial:
            return
        cur.execute("ROLLBACK TO SAVEPOINT tidemark_sinks")
        certain_refusals = certain(refused, min(partial), passes)
        refusals.refused -= len(refused) - len(certain_refusals)
        refused = certain_refusals


Place = tuple[int, int]
"""A record: the number of its slice in the batch, and its offset."""


def _load_part_carefully(
    cur: Cursor, layout: Layout, parts: Sequence[Slice], number: int, table: str, refusals: Refusals, refused: dict[Place, Reject]
) -> None:
    part = parts[number]

    def load_span(span: range) -> int:
        source = SQL["ready_span"].format(ready=_ready(layout), span=_of_span(part, span))
        _load(cur, layout, [part], source)
        return _count(cur, source)

    def refuse(span: range, error: SinkRejected) -> None:
        refusals.count(error)
        place = number, span.start
        refused[place] = Reject(span.start, refusals.disposition(error), error.error_type, error.text(layout))
        _fail(cur, table, parts, place, refused[place])

    bisection = Bisection(cur, load_span, _half_spans, lambda span: span[:0], refuse)
    bisection.store(range(part.start, part.end))
    bisection.end()


def _fail(cur: Cursor, table: str, parts: Sequence[Slice], place: Place, reject_: Reject) -> None:
    """Marks a record in the staging table as failed, or for retry."""
    number, offset = place
    span = _of_span(parts[number], range(offset, offset + 1))
    error = f"{reject_.error_type}: {reject_.error_text}"
    cur.execute(SQL["fail_span"].format(table=table, span=span), {"disposition": reject_.disposition.name.lower(), "error": error})


def _of_span(part: Slice, span: range) -> str:
    """Returns the SQL condition for the rows of these records."""
    where = f"kafka_topic_id = {part.topic_id} AND kafka_partition = {part.partition.partition}"
    return f"{where} AND kafka_offset >= {span.start} AND kafka_offset < {span.stop}"


def _half_spans(span: range) -> list[range]:
    middle = len(span) // 2
    return [span[:middle], span[middle:]] if middle else []


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


def _count(cur: Cursor, source: str) -> int:
    cur.execute(SQL["count"].format(source=source))
    (count,) = cur.fetchone() or (0,)
    return int(count)


def _account(cur: Cursor, parts: Sequence[Slice], table: str, staged: Sequence[Staged]) -> Mapping[Slice, dict[str, int]]:
    """Counts the outcomes of each slice (I3). Raises `BadOutput` for rows that belong to no record of these slices."""
    by_place = {(part.topic_id, part.partition.partition): part for part in parts}
    cur.execute(SQL["account"].format(table=table, heard=_reported_tries(staged)))
    counts_by_part = {}
    for row in rows(cur):
        part = by_place.get((row.pop("kafka_topic_id"), row.pop("kafka_partition")))
        first, last, ambiguous = row.pop("first"), row.pop("last"), row.pop("torn")
        if part is None or first is None:
            raise BadOutput(part=parts[0], problem=f"a row's lineage is not of this batch: return {', '.join(GIVEN)} as they were given.")
        if first < part.start or last >= part.end:
            outside = first if first < part.start else last
            raise BadOutput(part=part, problem=f"kafka_offset {outside} is outside the range that was read.")
        if ambiguous is not None:
            raise BadOutput(part=part, problem=f"record {ambiguous} has rows with different dispositions: give all the same.")
        counts_by_part[part] = row
    return counts_by_part


def _check_breaker(cur: Cursor, breaker: Breaker, part: Slice, table: str, staged: Sequence[Staged], counts: Mapping[str, int]) -> None:
    if counts.get("retried", 0) + counts.get("failed", 0):
        breaker.check(part, RecordCounts(**counts, unaccounted=0), _rejects(cur, part, table, staged).values())


def _rejects(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged]) -> dict[int, Reject]:
    span = _of_span(part, range(part.start, part.end))
    cur.execute(SQL["not_loaded"].format(table=table, heard=_reported_tries(staged), span=span))
    return {offset: reject(offset, Disposition[word.upper()], error) for offset, word, error in cur.fetchall()}


def _copy_failed(cur: Cursor, target: Target, part: Slice, table: str, staged: Sequence[Staged], payloads: Payloads) -> None:
    copy_failed(cur, target, part, _rejects(cur, part, table, staged), payloads)


def _by_sink(batch: pa.RecordBatch, target: Target) -> Iterator[tuple[Layout, pa.RecordBatch]]:
    """Yields each sink's rows, with the sink's own column names."""
    import pyarrow.compute as pc

    if len(target.layouts) == 1:
        yield target.layouts[0], batch
        return
    for layout in target.layouts:
        of_sink = pc.fill_null(batch[OF_SINK], target.layouts[0].sink)  # null in the engine's rows for failed records
        own = batch.filter(pc.equal(of_sink, layout.sink))
        names = {name: name for name in (*GIVEN, *OPTIONAL) if name in batch.schema.names}
        names |= {name: name.partition(":")[2] for name in batch.schema.names if name.partition(":")[0] == layout.sink}
        if own.num_rows:
            yield layout, own.select(list(names)).rename_columns(list(names.values()))


def _staged(batch: pa.RecordBatch, target: Target, layout: Layout, parts: Sequence[Slice], try_id: int) -> pa.RecordBatch:
    """Converts a task's rows for a sink to the staging table's columns: only rows to load have data."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words, error_texts = dispositions(batch, parts[0]), errors(batch, parts[0])
    deletes = pc.equal(words, "delete")
    if pc.any(deletes).as_py() and not layout.by_record:
        raise BadOutput(
            part=parts[0], problem="a row without lineage columns has the disposition delete: deletes need their record's lineage."
        )
    while (wrong := wrong_deletes(batch, deletes, layout)) is not None:
        mask, error_type, text = wrong
        words, deletes = pc.if_else(mask, "fail", words), pc.and_(deletes, pc.invert(mask))
        error_texts = pc.if_else(mask, f"{error_type}: {text}", error_texts)
    loads = pc.or_(deletes, pc.equal(words, "load"))
    count = batch.num_rows
    arrays = []
    for sink_layout in target.layouts:
        if sink_layout is layout:
            arrays += [pc.if_else(loads, values, pa.scalar(None, values.type)) for values in data_columns(batch, layout, parts[0])]
        else:
            arrays += [pa.nulls(count, arrow_type(column.type)) for column in sink_layout.columns]
    if layout.by_record:
        arrays += _lineage(batch, parts)
    else:
        arrays += [pa.nulls(count, arrow_type(kind)) for _, kind in BESIDE[:3]]
    arrays += [words, error_texts, pa.repeat(pa.scalar(try_id, pa.int64()), count)]
    arrays.append(pa.repeat(pa.scalar(layout.sink or None, pa.string()), count))
    return pa.RecordBatch.from_arrays(arrays, names=_names(target))


def _lineage(batch: pa.RecordBatch, parts: Sequence[Slice]) -> list[pa.Array]:
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = {part.partition.topic: part.topic_id for part in parts}
    topic, partition, offset = lineage_as(batch, (pa.string(), pa.int32(), pa.int64()), parts[0])
    topic_at = pc.index_in(topic, value_set=pa.array(list(ids), pa.string()))
    arrays = [pa.array(list(ids.values()), pa.int16()).take(topic_at), partition, offset]
    if any(values.null_count for values in arrays):
        problem = (
            f"a row has no lineage: {', '.join(GIVEN)} must be those of a record of this batch. After an outer join, coalesce both sides."
        )
        raise BadOutput(part=parts[0], problem=problem)
    return arrays


def _without_data(batch: pa.RecordBatch, target: Target, error: SinkRejected) -> pa.RecordBatch:
    """Returns a row that could not be staged, without its data."""
    import pyarrow as pa

    sink = batch[OF_SINK][0].as_py() or ONLY
    layout = next(each for each in target.layouts if each.sink == sink)
    texts = {"disposition": REFUSED, "error": f"{error.error_type}: {error.text(layout)}".replace("\0", "\\0")}
    data = {name for name, _ in _columns(target)}
    arrays = [
        pa.nulls(1, values.type) if name in data else pa.array([texts[name]], pa.string()) if name in texts else values
        for name, values in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=_names(target))


def _halves(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    middle = batch.num_rows // 2
    return [batch.slice(0, middle), batch.slice(middle)] if middle else []


def _names(target: Target) -> list[str]:
    return [name for name, _ in (*_columns(target), *BESIDE)]


def _columns(target: Target) -> list[tuple[str, str]]:
    """Returns names and types of the staging table's data columns, sink by sink."""
    return [
        (name, column.type) for layout in target.layouts for column, name in zip(layout.columns, _own_names(target, layout), strict=True)
    ]


def _own_names(target: Target, layout: Layout) -> list[str]:
    """Returns a sink's column names in the staging table: numbers if there are several sinks, because Postgres limits name lengths."""
    if len(target.layouts) == 1:
        return [column.name for column in layout.columns]
    return [f"{target.layouts.index(layout)}_{number}" for number in range(len(layout.columns))]


def _alias(number: int) -> str:
    return f"sink_{number}"
