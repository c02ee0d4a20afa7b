"""The commit of a whole batch at once, for transforms that combine rows of several slices (aggregations, windows, joins).

Tasks COPY their rows into an unlogged staging table of the attempt (`stage`). The driver moves all of them to the sink, with the offsets of
every slice, in one transaction (`promote`) of the same seven steps as `tidemark.sink.commit`.

A task that runs twice stages its rows twice: only rows of tries that reported to the driver are promoted. These are counted, because a
crash of Postgres empties an unlogged table.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import rows, session, statements, transaction
from tidemark.errors import DatabaseUnavailable, Unavailable
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced
from tidemark.profiles import Profile
from tidemark.records.outcome import DELETED, GIVEN, BadOutput, Disposition, RecordCounts, Reject, reject
from tidemark.records.ranges import Slice
from tidemark.retry import store as retries
from tidemark.retry.store import Waiting
from tidemark.roles import require
from tidemark.sink import suppressed
from tidemark.sink.commit import Receipt, commit, enter
from tidemark.sink.drained import Outcome, origins, say_what_became
from tidemark.sink.hand_off import Payloads, copy_failed
from tidemark.sink.load import KEY_OF_OTHER_PARTITION, CopyCountWrong, Refusals, SinkRejected, check_at_once, copy, halve, merge, translated
from tidemark.sink.spool import spooled
from tidemark.sink.steps import Step, reached
from tidemark.sink.table import LINEAGE, listed, quoted, quoted_table
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

READY = "pg_temp.tidemark_ready"
"""A view of the staged rows to load, in the sink's form."""
BESIDE = (
    ("kafka_topic_id", "smallint"),
    ("kafka_partition", "integer"),
    ("kafka_offset", "bigint"),
    ("disposition", "text"),
    ("error", "text"),
    ("try_id", "bigint"),
)
"""The columns of a staged row besides its data. Without lineage the first three are null."""
REFUSED = "refused"
"""The disposition of a staged row whose data Postgres rejected: its record fails."""


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
    found: int

    def __str__(self) -> str:
        return (
            f"Of {counted(self.staged, 'row')} that the tasks staged, {self.table} holds {self.found:,}: Postgres restarted after a crash, "
            "which empties an unlogged table. Nothing of this batch was stored; the next attempt reads it again."
        )


def make_staging(target: Target, number: int) -> str:
    """Creates the staging table for a batch of an attempt and returns its name. Drops tables left behind by ended attempts.

    Raises `RoleLacks` if the role may not create tables.
    """
    table = f"tidemark.staged_{target.attempt_id}_{number}"
    columns = listed([column.name for column in target.layout.columns])
    beside = ", ".join(f"ADD {quoted(name)} {kind}" for name, kind in BESIDE)
    with session(target.database_url, application=target.application) as connection:
        require(connection, Profile.STAGER)
        with transaction(connection) as cur:
            cur.execute(SQL["left_behind"])
            left_behind = [name for (name,) in cur.fetchall()]
        for name in left_behind:
            with contextlib.suppress(DatabaseUnavailable), transaction(connection) as cur:  # a task may still be writing to it
                cur.execute("SET LOCAL lock_timeout = '1s'")
                cur.execute(f"DROP TABLE IF EXISTS {quoted_table(name)}")
        with transaction(connection) as cur:
            cur.execute(f"DROP TABLE IF EXISTS {table}")
            cur.execute(SQL["make_staging"].format(table=table, columns=columns, sink=quoted_table(target.layout.table)))
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
    columns = [(column.name, column.type) for column in target.layout.columns] + list(BESIDE)
    count = 0

    def store_rows(batch: pa.RecordBatch) -> None:
        copy(cur, part, table, columns, iter((batch,)), sink=target.layout.table)

    def refuse(batch: pa.RecordBatch, error: SinkRejected) -> None:
        refusals.count(error)
        copy(cur, part, table, columns, iter((_without_data(batch, target, error),)))

    staged = (_staged(batch, target, parts, try_id) for batch in batches)
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(spooled(staged)) if isolate else staged  # so that no COPY waits for the transform
        connection = stack.enter_context(session(target.database_url, application=target.application))
        cur = stack.enter_context(transaction(connection))
        refusals = Refusals(target.max_rejected)
        if not isolate:
            count = copy(cur, part, table, columns, staged, sink=target.layout.table)
        for batch in ready:
            count += batch.num_rows
            halve(cur, batch, store_rows, _halves, refuse)
    return Staged(try_id, count)


def promote(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], payloads: Payloads, *, isolate: bool
) -> list[Receipt]:
    """Moves the staged rows to the sink and the offsets of all ``parts`` with them, in one transaction, and drops the table.

    Returns a receipt for each part. Raises the same errors as `commit_slice`, and `StagedRowsGone`; then nothing is stored.
    """
    parts = sorted(parts, key=lambda part: (part.topic_id, part.partition.partition))
    by_record = target.layout.by_record

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
            cur.execute(suppressed.SQL["skip_staged"].format(table=table, heard=_heard(staged)), {"group_id": target.group_id})
        _make_ready(cur, target, parts[0], table, staged)
        if isolate and by_record:
            _load_carefully(cur, target, parts, table)
        else:
            _load(cur, target, parts, READY)
        found = _account(cur, parts, table, staged) if by_record else {parts[0]: {"sink_rows": _count(cur, READY)}}
        if target.breaker is not None and by_record:
            for part in parts:
                _check_breaker(cur, target.breaker, part, table, staged, found.get(part, {}))
        reached(Step.COPY_FAILED, parts[0])
        for part in parts if by_record else ():
            _copy_failed(cur, target, part, table, staged, payloads)
        reached(Step.LEDGER, parts[0])
        nothing = {"loaded": 0, "skipped": 0, "retried": 0, "failed": 0, "sink_rows": 0, "deleted": 0}
        receipts = []
        for part in parts:
            counts = {**nothing, **found.get(part, {})}
            mentioned = counts["loaded"] + counts["skipped"] + counts["retried"] + counts["failed"]
            receipts.append(Receipt(part, RecordCounts(**counts, unaccounted=part.span - mentioned)))
        ids = [enter(cur, target, receipt.part, receipt.counts) for receipt in receipts]
        if not by_record:
            store.anchor_batches(cur, ids)
        cur.execute(f"DROP VIEW {READY}")
        cur.execute(f"DROP TABLE {table}")
        return receipts

    return commit(target, parts, store_parts)


def promote_drained(
    target: Target, parts: Sequence[Slice], table: str, staged: Sequence[Staged], tried: Sequence[Waiting], *, isolate: bool
) -> list[Receipt]:
    """Like `promote`, for slices of retry topics: the staged rows come from the records ``tried``. Rows of records that are no longer
    waiting and registered there are dropped. See `tidemark.sink.drained`."""
    parts = sorted(parts, key=lambda part: (part.topic_id, part.partition.partition))
    judged = {(record.number, record.hop_offset) for record in tried}

    def store_parts(cur: Cursor) -> list[Receipt]:
        for part in parts:
            reached(Step.MOVE_OFFSET, part)
            if store.move_offset(cur, target.group_id, part) is not None:
                raise OffsetFenced(
                    partition=part.partition, held=part.epoch, current=part.epoch, position=part.end, owner=target.application
                )
        locked = {part: retries.lock_due(cur, target.group_id, part) for part in parts}
        waiting = {part: [record for record in found if (record.number, record.hop_offset) in judged] for part, found in locked.items()}
        still = [record for records in waiting.values() for record in records]
        reached(Step.COPY_ROWS, parts[0])
        _require_all(cur, table, staged)
        _leave_out(cur, parts[0], table, staged, tried, still)
        _make_ready(cur, target, parts[0], table, staged)
        if isolate:
            _load_carefully(cur, target, list(origins(still)), table)
        else:
            _load(cur, target, list(origins(still)) or parts, READY)
        reached(Step.COPY_FAILED, parts[0])
        outcomes = _outcomes(cur, parts[0], table, staged)

        def became(record: Waiting) -> Outcome:
            place = (record.topic_id, record.partition.partition, record.offset)
            return outcomes.get(place, Outcome(Disposition.SKIP))  # tried, but missing from the transform's output

        counts = [say_what_became(cur, target, part, records, became) for part, records in waiting.items()]
        reached(Step.LEDGER, parts[0])
        receipts = [Receipt(part, each) for part, each in zip(parts, counts, strict=True)]
        for receipt in receipts:
            store.insert_batch(cur, target.group_id, target.attempt_id, receipt.part, receipt.counts)
        cur.execute(f"DROP VIEW {READY}")
        cur.execute(f"DROP TABLE {table}")
        return receipts

    return commit(target, parts, store_parts)


def _leave_out(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged], tried: Sequence[Waiting], still: Sequence[Waiting]) -> None:
    """Removes the staged rows of records that no longer wait. Raises `BadOutput` for rows that belong to none of the records tried."""
    cur.execute(SQL["strangers"].format(table=table, heard=_heard(staged)), _places(tried))
    stranger = cur.fetchone()
    if stranger is not None:
        raise BadOutput(part=part, problem=f"kafka_offset {stranger[0]} is not one of the records being retried.")
    if len(still) < len(tried):
        cur.execute(SQL["leave_out"].format(table=table, heard=_heard(staged)), _places(still))


def _places(records: Sequence[Waiting]) -> dict[str, list[int]]:
    return {
        "topic_ids": [record.topic_id for record in records],
        "partitions": [record.partition.partition for record in records],
        "offsets": [record.offset for record in records],
    }


def _outcomes(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged]) -> dict[tuple[int, int, int], Outcome]:
    """The outcome of each staged record, by topic id, partition and offset."""
    cur.execute(SQL["outcomes"].format(table=table, heard=_heard(staged)))
    found = {}
    for topic_id, partition, offset, word, other, count, deleted, error in cur.fetchall():
        if word != other:
            raise BadOutput(part=part, problem=f"record {offset} has rows with different dispositions: give all the same.")
        said = Disposition[word.upper()]
        failed = reject(offset, said, error) if said in (Disposition.RETRY, Disposition.FAIL) else None
        loads = said is Disposition.LOAD
        found[topic_id, partition, offset] = Outcome(said, count if loads else 0, deleted if loads else 0, failed)
    return found


def _require_all(cur: Cursor, table: str, staged: Sequence[Staged]) -> None:
    found = _count(cur, f"(SELECT FROM {table} WHERE {_heard(staged)})")
    if found != sum(one.rows for one in staged):
        raise StagedRowsGone(table=table, staged=sum(one.rows for one in staged), found=found)


def _make_ready(cur: Cursor, target: Target, first: Slice, table: str, staged: Sequence[Staged]) -> None:
    """Creates the view `READY`, with the lineage of the records, or of the batch: the start of its first slice."""
    heard = _heard(staged)
    if target.layout.by_record:
        record = "kafka_topic_id, kafka_partition, kafka_offset"
        lineage = f"{record}, (row_number() OVER (PARTITION BY {record}) - 1)::integer AS kafka_seq"
        cur.execute(SQL["fail_refused"].format(table=table, heard=heard, refused=REFUSED))
    else:
        lineage = (
            f"{first.topic_id}::smallint AS kafka_topic_id, {first.partition.partition} AS kafka_partition, "
            f"{first.start}::bigint AS kafka_offset, (row_number() OVER () - 1)::integer AS kafka_seq"
        )
    columns = listed([column.name for column in target.layout.columns])
    if target.layout.deletes is not Deletes.REFUSE:
        lineage += f", disposition = 'delete' AS {DELETED}"
    cur.execute(SQL["make_ready"].format(table=table, columns=columns, lineage=lineage, heard=heard))


def _heard(staged: Sequence[Staged]) -> str:
    """SQL condition for the rows of these tries."""
    return f"try_id = ANY (ARRAY[{', '.join(str(one.try_id) for one in staged)}]::bigint[])"


def _load(cur: Cursor, target: Target, parts: Sequence[Slice], source: str) -> None:
    """Loads the rows of ``source``, a relation in the form of `READY`, made from ``parts``, into the sink."""
    layout, part = target.layout, parts[0]
    if layout.key:
        _require_one_place(cur, target, part, source)
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
    """Like `_load`, but marks records whose rows are rejected as failed in the staging table."""
    refusals = Refusals(target.max_rejected)
    check_at_once(cur)
    cur.execute(f"CREATE INDEX ON {table} (kafka_topic_id, kafka_partition, kafka_offset)")

    for part in parts:

        def load_span(span: range, part: Slice = part) -> None:
            _load(cur, target, [part], SQL["ready_span"].format(span=_of_span(part, span)))

        def refuse(span: range, error: SinkRejected, part: Slice = part) -> None:
            refusals.count(error)
            said = {"error": f"{error.error_type}: {error.text(target.layout)}"}
            cur.execute(SQL["fail_span"].format(table=table, span=_of_span(part, span)), said)

        halve(cur, range(part.start, part.end), load_span, _half_spans, refuse)


def _of_span(part: Slice, span: range) -> str:
    """SQL condition for the rows of these records."""
    where = f"kafka_topic_id = {part.topic_id} AND kafka_partition = {part.partition.partition}"
    return f"{where} AND kafka_offset >= {span.start} AND kafka_offset < {span.stop}"


def _half_spans(span: range) -> list[range]:
    middle = len(span) // 2
    return [span[:middle], span[middle:]] if middle else []


def _require_one_place(cur: Cursor, target: Target, part: Slice, source: str) -> None:
    """For an upsert: all rows of a key must come from one partition. Without lineage a key must be unique, as no row would be the last."""
    key = listed(target.layout.key)
    several = "count(DISTINCT (kafka_topic_id, kafka_partition)) > 1" if target.layout.by_record else "count(*) > 1"
    cur.execute(SQL["key_twice"].format(key=key, source=source, several=several))
    found = cur.fetchone()
    if found is None:
        return
    if target.layout.by_record:
        cur.execute(SQL["places"].format(source=source, same_key=" AND ".join(f"{quoted(name)} = %s" for name in target.layout.key)), found)
        places = " and ".join(f"{topic}/{partition} offset {offset}" for topic, partition, offset in cur.fetchall())
        problem = f"records of one key came from several partitions ({places}), which have no order. All must come from one partition."
        raise SinkRejected(part=part, table=target.layout.table, error_type=KEY_OF_OTHER_PARTITION, message=problem, of_rows=False)
    columns = ", ".join(target.layout.key)
    raise BadOutput(part=part, problem=f"the output has a key ({columns}) more than once. Without lineage columns no row is the last.")


def _count(cur: Cursor, source: str) -> int:
    cur.execute(SQL["count"].format(source=source))
    (count,) = cur.fetchone() or (0,)
    return int(count)


def _account(cur: Cursor, parts: Sequence[Slice], table: str, staged: Sequence[Staged]) -> Mapping[Slice, dict[str, int]]:
    """The counts of each slice (I3). Raises `BadOutput` for rows that belong to no record of these slices."""
    by_place = {(part.topic_id, part.partition.partition): part for part in parts}
    cur.execute(SQL["account"].format(table=table, heard=_heard(staged)))
    found = {}
    for row in rows(cur):
        part = by_place.get((row.pop("kafka_topic_id"), row.pop("kafka_partition")))
        first, last, torn = row.pop("first"), row.pop("last"), row.pop("torn")
        if part is None or first is None:
            raise BadOutput(part=parts[0], problem=f"a row's lineage is not of this batch: return {', '.join(GIVEN)} as they were given.")
        if first < part.start or last >= part.end:
            outside = first if first < part.start else last
            raise BadOutput(part=part, problem=f"kafka_offset {outside} is outside the range that was read.")
        if torn is not None:
            raise BadOutput(part=part, problem=f"record {torn} has rows with different dispositions: give all the same.")
        found[part] = row
    return found


def _check_breaker(cur: Cursor, breaker: Breaker, part: Slice, table: str, staged: Sequence[Staged], found: Mapping[str, int]) -> None:
    if not found.get("retried", 0) + found.get("failed", 0):
        return
    span = _of_span(part, range(part.start, part.end))
    cur.execute(SQL["in_a_row"].format(table=table, heard=_heard(staged), span=span))
    (in_a_row,) = cur.fetchone() or (0,)
    breaker.check(part, RecordCounts(**found, unaccounted=0), in_a_row, _rejects(cur, part, table, staged).values())


def _rejects(cur: Cursor, part: Slice, table: str, staged: Sequence[Staged]) -> dict[int, Reject]:
    span = _of_span(part, range(part.start, part.end))
    cur.execute(SQL["not_loaded"].format(table=table, heard=_heard(staged), span=span))
    return {offset: reject(offset, Disposition[word.upper()], error) for offset, word, error in cur.fetchall()}


def _copy_failed(cur: Cursor, target: Target, part: Slice, table: str, staged: Sequence[Staged], payloads: Payloads) -> None:
    copy_failed(cur, target, part, _rejects(cur, part, table, staged), payloads)


def _staged(batch: pa.RecordBatch, target: Target, parts: Sequence[Slice], try_id: int) -> pa.RecordBatch:
    """A task's rows in the form of the staging table: only rows to load have data."""
    import pyarrow as pa
    import pyarrow.compute as pc

    said, error_texts = dispositions(batch, parts[0]), errors(batch, parts[0])
    deletes = pc.equal(said, "delete")
    if pc.any(deletes).as_py() and not target.layout.by_record:
        raise BadOutput(
            part=parts[0], problem="a row without lineage columns has the disposition delete: deletes need their record's lineage."
        )
    while (wrong := wrong_deletes(batch, deletes, target.layout)) is not None:
        mask, error_type, text = wrong
        said, deletes = pc.if_else(mask, "fail", said), pc.and_(deletes, pc.invert(mask))
        error_texts = pc.if_else(mask, f"{error_type}: {text}", error_texts)
    loads = pc.or_(deletes, pc.equal(said, "load"))
    arrays = [pc.if_else(loads, values, pa.scalar(None, values.type)) for values in data_columns(batch, target.layout, parts[0])]
    count = batch.num_rows
    if target.layout.by_record:
        arrays += _lineage(batch, parts)
    else:
        arrays += [pa.nulls(count, arrow_type(kind)) for _, kind in BESIDE[:3]]
    arrays += [said, error_texts, pa.repeat(pa.scalar(try_id, pa.int64()), count)]
    return pa.RecordBatch.from_arrays(arrays, names=_names(target))


def _lineage(batch: pa.RecordBatch, parts: Sequence[Slice]) -> list[pa.Array]:
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = {part.partition.topic: part.topic_id for part in parts}
    topic, partition, offset = (batch.column(name) for name in GIVEN)
    try:
        known = pc.index_in(topic.cast(pa.string()), value_set=pa.array(list(ids), pa.string()))
        arrays = [pa.array(list(ids.values()), pa.int16()).take(known), partition.cast(pa.int32()), offset.cast(pa.int64())]
    except pa.ArrowException as error:
        raise BadOutput(part=parts[0], problem=f"a row's lineage is not what the transform was given: {error}.") from error
    if any(values.null_count for values in arrays):
        problem = (
            f"a row has no lineage: {', '.join(GIVEN)} must be those of a record of this batch. After an outer join, coalesce both sides."
        )
        raise BadOutput(part=parts[0], problem=problem)
    return arrays


def _without_data(batch: pa.RecordBatch, target: Target, error: SinkRejected) -> pa.RecordBatch:
    """A row that could not be staged, without its data."""
    import pyarrow as pa

    said = {"disposition": REFUSED, "error": f"{error.error_type}: {error.text(target.layout)}".replace("\0", "\\0")}
    data = {column.name for column in target.layout.columns}
    arrays = [
        pa.nulls(1, values.type) if name in data else pa.array([said[name]], pa.string()) if name in said else values
        for name, values in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=_names(target))


def _halves(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    middle = batch.num_rows // 2
    return [batch.slice(0, middle), batch.slice(middle)] if middle else []


def _names(target: Target) -> list[str]:
    return [column.name for column in target.layout.columns] + [name for name, _ in BESIDE]
