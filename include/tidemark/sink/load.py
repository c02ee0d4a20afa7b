"""Writes rows to the sink: an append sink by one COPY, an upsert sink by COPY and merge.

`load_all` loads all sinks of a consumer. `load` is the normal path. `load_carefully` isolates records after `load` has failed: in one
transaction, it finds the records whose rows cannot be stored, marks them as failed and loads the rest.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg2
import psycopg2.errors

from tidemark.db import computed, data_error, is_outage, may_be_row_error, statements, unavailable
from tidemark.errors import Broken, DatabaseUnavailable, Refused, TidemarkError
from tidemark.records.outcome import Disposition, Reject, TransformOutput, quoting, reject
from tidemark.records.ranges import Slice
from tidemark.sink import deletes, kept_rows, suppressed
from tidemark.sink.encode import COPY_BUFFER_BYTES, CopyStream, NotEncodable
from tidemark.sink.table import Layout, first_value, listed, quoted, quoted_table
from tidemark.sink.tally import Tally, by_absent
from tidemark.text.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor
    from tidemark.sink.target import Target

T = TypeVar("T", "pa.RecordBatch", range)
A = TypeVar("A", bound=Tally)
P = TypeVar("P", int, tuple[int, int])

SQL = statements("tidemark.sink", "load.sql")

NOT_FOUND = frozenset({"42P01", "42883", "42704"})
"""SQLSTATEs for a table, a function or operator, and a type that does not exist on the search_path."""
KEY_OF_OTHER_PARTITION = "KeyOfOtherPartition"
OF_OTHER_ROWS = frozenset({"ExclusionViolation", "ForeignKeyViolation", "UniqueViolation"})
"""Errors that a change of another row can resolve, so a retry may succeed."""
_OF_THE_ROW = frozenset({
    "CheckViolation", "NotEncodable", "NotNullViolation", "ProgramLimitExceeded",
    *(name for name, kind in vars(psycopg2.errors).items() if isinstance(kind, type) and issubclass(kind, psycopg2.DataError)),
})  # fmt: skip
"""Errors that depend only on the row itself. Any other error may depend on other rows, for example through a trigger."""
MOST_PASSES = 20
CARE_ROWS, CARE_BYTES = 8192, 16 << 20
"""Minimum rows or bytes per attempt of `load_carefully`."""


class SinkRejected(Refused):
    """Postgres rejected rows of a slice. ``of_rows``: single rows may be at fault, which `Bisection` can isolate.

    ``error_type`` is Postgres' name for the condition (``NotNullViolation``), ``message`` its text without the values of rows. ``detail``
    quotes them, so it must not appear in errors or logs.
    """

    part: Slice
    table: str
    error_type: str
    message: str
    detail: str | None = field(default=None, repr=False)
    of_rows: bool
    misses_object: bool = False
    outage: str | None = None
    """Postgres' message, if the error code is that of an outage."""

    def of_table(self) -> TidemarkError:
        """Returns the error to raise if no row is at fault."""
        return replace(self, of_rows=False) if self.outage is None else DatabaseUnavailable(cause=self.outage)

    def text(self, layout: Layout) -> str:
        """Returns the text to store with the record: with ``detail`` only if the spec allows it."""
        return quoting(self.message, self.detail if layout.error_detail else None)

    def __str__(self) -> str:
        return f"{self.part}: {self.table} rejected the rows ({self.error_type}): {self.message} Nothing of this slice was stored."


class TooManyRejected(Refused):
    """Postgres rejected too many records of a slice: the table or the transform is at fault, not single records."""

    part: Slice
    table: str
    limit: int
    error_type: str
    message: str

    def __str__(self) -> str:
        return (
            f"{self.part}: {self.table} rejected the rows of more than {counted(self.limit, 'record')}, the last one with "
            f"{self.error_type}: {self.message} Nothing of this slice was stored. Fix the transform or the table; if so many records "
            "really are bad, raise batch.max_failed_records."
        )


class CopyCountWrong(Broken):
    """Postgres stored a different number of rows than were encoded."""

    part: Slice
    table: str
    encoded: int
    stored: int

    def __str__(self) -> str:
        sent = counted(self.encoded, "row")
        return f"{self.part}: sent {sent} to {self.table}, Postgres stored {self.stored:,}. Nothing of this slice was stored."


def load_all(
    cur: Cursor,
    part: Slice,
    layouts: Sequence[Layout],
    outputs: Callable[[], Iterator[TransformOutput]],
    tally_of: Callable[[Mapping[int, Reject]], A],
    refusals: Refusals | None,
) -> A:
    """Loads the rows of all sinks, one after the other, and returns the tally. With several sinks, ``outputs`` is called once for each.

    With ``refusals``, records whose rows a sink rejects fail or are retried, and the others are loaded. If an earlier sink already holds
    rows of such a record, loading starts over without the record. Raises the same errors as `load`.
    """
    tally = tally_of({})
    if len(layouts) > 1:
        cur.execute("SAVEPOINT tidemark_sinks")
    for passes in itertools.count(1):
        for layout in layouts:
            rows = (rows for output in outputs() if (rows := tally.take(output, layout)) is not None)
            if refusals is None:
                load(cur, part, layout, rows)
            else:
                load_carefully(cur, part, layout, rows, tally, refusals)
        if not tally.partial:
            return tally
        if refusals is None:
            first = next(iter(tally.refused.values()))
            raise SinkRejected(part=part, table=layouts[0].table, error_type=first.error_type, message=first.error_text, of_rows=True)
        tally = tally_of(start_over(cur, refusals, tally.refused, min(tally.partial), passes))
    raise AssertionError


def start_over(cur: Cursor, refusals: Refusals, refused: Mapping[P, Reject], first: P, passes: int) -> dict[P, Reject]:
    """Rolls back to the savepoint before the first sink. Returns the refusals, by place, that hold without the rows of other refused
    records, the first of which is at ``first``.

    The next pass omits those rows, so it tries the remaining refused records again. After `MOST_PASSES`, all refusals are final.
    """
    cur.execute("ROLLBACK TO SAVEPOINT tidemark_sinks")
    again = passes < MOST_PASSES
    final = {place: each for place, each in refused.items() if not (again and place > first and each.error_type not in _OF_THE_ROW)}
    refusals.refused -= len(refused) - len(final)
    return final


def load(cur: Cursor, part: Slice, layout: Layout, batches: Iterator[pa.RecordBatch]) -> None:
    """Stores rows in the form that `Tally.take` returns. Raises `SinkRejected`, `CopyCountWrong`, or errors of ``batches``."""
    if not layout.key:
        _copy_rows(cur, part, layout.table, layout, batches)
        return
    name = f"tidemark_slice_{layout.sink}" if layout.sink else "tidemark_slice"
    slice_ = quoted_table(f"pg_temp.{name}")
    cur.execute(SQL["make_slice"].format(name=quoted(name), columns=deletes.slice_columns(layout), sink=quoted_table(layout.table)))
    for column, default in _defaults(cur, layout):
        cur.execute(SQL["default_of_slice"].format(slice=slice_, column=quoted(column), default=default))
    rows = _copy_rows(cur, part, f"pg_temp.{name}", layout, batches)
    merge(cur, [part], layout, slice_, rows=rows)
    cur.execute(f"TRUNCATE {slice_}")  # more batches may follow in the same transaction


def load_carefully(cur: Cursor, part: Slice, layout: Layout, batches: Iterator[pa.RecordBatch], tally: Tally, refusals: Refusals) -> None:
    """Like `load`, but records whose rows cannot be stored are marked in ``tally``, as failed or for retry, with Postgres' message."""

    def refuse(rows: pa.RecordBatch, error: SinkRejected) -> None:
        refusals.count(error)
        offset = rows.column("kafka_offset")[0].as_py()
        tally.refuse(reject(offset, refusals.disposition(error), error.text(layout), error.error_type), rows.num_rows, layout.sink)

    def store(rows: pa.RecordBatch) -> int:
        load(cur, part, layout, iter((rows,)))
        return int(rows.num_rows)

    check_at_once(cur)
    bisection = Bisection(cur, store, _halves_of_records, refuse)
    for rows in _whole_records(batches):
        bisection.store(rows)
    bisection.end()


@dataclass
class Refusals:
    """Counts the records that cannot be stored. Raises `TooManyRejected` when there are more than ``limit``.

    ``retries``: records are retried later if another row may be the cause.
    """

    limit: int
    retries: bool = False
    refused: int = 0

    @classmethod
    def of(cls, target: Target) -> Refusals:
        """With an order by key, refused records fail instead of being retried: later records of their key may be stored already."""
        return cls(target.max_rejected, retries=bool(target.ladder) and target.max_held is None)

    def disposition(self, error: SinkRejected) -> Disposition:
        return Disposition.RETRY if self.retries and error.error_type in OF_OTHER_ROWS else Disposition.FAIL

    def count(self, error: SinkRejected) -> None:
        self.refused += 1
        if self.refused > self.limit:
            raise TooManyRejected(
                part=error.part, table=error.table, limit=self.limit, error_type=error.error_type, message=error.message
            ) from error


def check_at_once(cur: Cursor) -> None:
    """Makes deferred constraints check after each statement: at COMMIT the bad row could not be identified."""
    cur.execute("SET CONSTRAINTS ALL IMMEDIATE")


class Bisection(Generic[T]):
    """Stores the rows of a slice in a table, without the records whose rows cannot be stored.

    Postgres' error does not say whether the row or the table is at fault. When the rows of a single record fail, the record is at fault if
    the same statement succeeds without rows. A missing object (of a trigger, say) is the table's fault if no row at all can be stored.
    """

    def __init__(
        self, cur: Cursor, store: Callable[[T], int], split: Callable[[T], Sequence[T]], refuse: Callable[[T, SinkRejected], None]
    ) -> None:
        """``store`` returns the number of rows; ``split`` two halves, or none for a single record."""
        self._cur = cur
        self._store: Callable[[T], int] = store
        self._split: Callable[[T], Sequence[T]] = split
        self._refuse: Callable[[T, SinkRejected], None] = refuse
        self._stored = 0
        self._missing: SinkRejected | None = None

    def store(self, batch: T) -> None:
        """Stores rows in subtransactions: one bad record among n costs O(log n) of them. Raises outages, and `SinkRejected` unless
        ``of_rows``."""
        self._cur.execute("SAVEPOINT tidemark_rows")
        try:
            self._stored += self._store(batch)
        except SinkRejected as error:
            if not error.of_rows:
                raise
            self._cur.execute("ROLLBACK TO SAVEPOINT tidemark_rows")
            refused = error
        else:
            self._cur.execute("RELEASE SAVEPOINT tidemark_rows")
            return
        halves = self._split(batch)
        if not halves:
            self._require_table(batch)
            self._missing = self._missing or (refused if refused.misses_object else None)
            self._refuse(batch, refused)
        for half in halves:
            self.store(half)

    def _require_table(self, batch: T) -> None:
        try:
            self._store(batch[:0])
        except SinkRejected as error:
            raise error.of_table() from None

    def end(self) -> None:
        """Raises `SinkRejected` if objects were missing and no row could be stored."""
        if self._missing is not None and not self._stored:
            raise self._missing.of_table()


def merge(
    cur: Cursor, parts: Sequence[Slice], layout: Layout, source: str, *, rows: int | None = None, any_partition: bool = False
) -> None:
    """Merges the rows of ``source``, which come from ``parts``, into an upsert sink: per key, the last row replaces the sink's.

    A row never replaces the row of a later record of its partition. Records of a re-created topic are later than all of its predecessor's.
    All records of a key must come from one Kafka partition, because there is no order between partitions; rows whose key came from another
    partition are rejected. ``any_partition``: the rows belong to whole batches and have the lineage of the first of ``parts``; the last
    commit wins, except among batches that begin in the same partition. ``rows``: number of rows in ``source``, if known; if as many are
    written, every key is unique, and the checks are skipped.

    Rows of suppressed keys are dropped (`tidemark.sink.suppressed`). Rows below their partition's undo floor are copied before they are
    overwritten (`tidemark.sink.kept_rows`). Deletes remove their key's row (`tidemark.sink.deletes`). Raises `SinkRejected`.
    """
    part, unfiltered = parts[0], source
    names = layout.sink_columns
    if not any_partition:
        source = suppressed.without_keys(cur, layout, parts, source)
    fill = {
        "sink": quoted_table(layout.table),
        "key": listed(layout.key),
        "columns": listed(names),
        "assignments": ", ".join(f"{name} = excluded.{name}" for name in map(quoted, names)),
        "values": ", ".join(f"newer.{quoted(name)}::text" for name in layout.key),
        "same_key": kept_rows.same_key(layout.key),
        "replaceable": kept_rows.replaceable("excluded", any_partition=any_partition),
        "newer_there": kept_rows.newer_there("newer", any_partition=any_partition),
        "same_partition": "true" if any_partition else kept_rows.same_partition("newer"),
    }
    try:
        floor = kept_rows.has_floor(cur, layout.table, parts[:1] if any_partition else parts)
        if not any_partition and deletes.has_deletions(cur, layout, parts, source):
            cur.execute(SQL["not_replaceable"].format(**fill, source=deletes.deletes(source)))
            if (conflict := cur.fetchone()) is not None:
                raise _key_of_other_partition(part, layout, conflict)
            source = deletes.apply(cur, layout, source, floor=floor)
        fill["source"] = source
        if floor:
            kept_rows.keep_replaced(cur, layout, source, any_partition=any_partition)
        cur.execute(SQL["merge"].format(**fill))
        if (written := cur.rowcount) == rows and source == unfiltered:
            return
        latest = first_value(cur, SQL["keys"].format(**fill))
        if latest == written:
            return
        cur.execute(SQL["not_replaceable"].format(**fill))
        if (conflict := cur.fetchone()) is not None:
            raise _key_of_other_partition(part, layout, conflict)
        late = first_value(cur, SQL["came_late"].format(**fill))
        if latest != written + late:
            raise CopyCountWrong(part=part, table=layout.table, encoded=latest, stored=written + late)
        if floor:
            kept_rows.keep_late(cur, layout, source, newer=fill["newer_there"])
    except psycopg2.Error as error:
        raise translated(error, layout.table, part, of_rows=True) from None


def _key_of_other_partition(part: Slice, layout: Layout, conflict: Sequence[Any]) -> SinkRejected:
    *values, topic, partition = conflict
    key = ", ".join(f"{name}={value}" for name, value in zip(layout.key, values, strict=True))
    message = f"the row's key was loaded from {topic}/{partition}; all records of a key must come from one partition, in order."
    return SinkRejected(
        part=part, table=layout.table, error_type=KEY_OF_OTHER_PARTITION, message=message, detail=f"The key is ({key}).", of_rows=True
    )


def _defaults(cur: Cursor, layout: Layout) -> list[tuple[str, str]]:
    """Reads the written columns that have a default, with the default's expression."""
    if not layout.with_default:
        return []
    cur.execute(SQL["defaults"], {"table": layout.table, "columns": layout.with_default})
    return cur.fetchall()


def _copy_rows(cur: Cursor, part: Slice, table: str, layout: Layout, batches: Iterator[pa.RecordBatch]) -> int:
    """COPYs rows and returns their number. Rows without values for columns with a default get a COPY without these columns."""
    groups = (group for rows in batches for group in by_absent(rows, layout))
    stored = copies = 0
    for absent, group in itertools.groupby(groups, operator.itemgetter(0)):
        names = [column for column in layout.copy_columns if column[0] not in absent]
        rows = (each.drop_columns([*absent]) for _, each in group)
        stored, copies = stored + copy(cur, part, table, names, rows, sink=layout.table), copies + 1
    return stored if copies else copy(cur, part, table, layout.copy_columns, iter(()), sink=layout.table)


def copy(
    cur: Cursor, part: Slice, table: str, columns: Sequence[tuple[str, str]], batches: Iterator[pa.RecordBatch], *, sink: str | None = None
) -> int:
    """Runs one binary COPY of ``columns`` (name, type) and returns the number of rows. ``sink``: the sink, if these are the user's rows."""
    stream = CopyStream(columns, computed(cur.connection, batches))
    target = quoted_table(table)
    try:
        cur.copy_expert(
            f"COPY {target} ({listed([name for name, _ in columns])}) FROM STDIN (FORMAT binary)", stream, size=COPY_BUFFER_BYTES
        )
    except psycopg2.Error as error:
        failure = stream.failure
        if isinstance(failure, NotEncodable):
            raise SinkRejected(
                part=part,
                table=sink or table,
                error_type=type(failure).__name__,
                message=f"{failure}.",
                detail=failure.detail,
                of_rows=sink is not None,
            ) from None
        if failure is not None:
            raise failure  # noqa: B904 - it keeps its own cause
        raise translated(error, sink or table, part, of_rows=sink is not None) from None
    if cur.rowcount != stream.rows:
        raise CopyCountWrong(part=part, table=sink or table, encoded=stream.rows, stored=cur.rowcount)
    return stream.rows


def translated(error: psycopg2.Error, table: str, part: Slice, *, of_rows: bool) -> Exception:
    """Translates a Postgres error: an outage, or rejected rows. ``of_rows``: rows were being sent and may be the cause. A malformed COPY
    stream (22P04) is a bug in Tidemark.

    Raise the result ``from None``: a traceback shows causes, and Postgres' own message quotes values.
    """
    of_rows = of_rows and may_be_row_error(error) and error.pgcode != "22P04"
    if is_outage(error) and not of_rows:
        return unavailable(error)
    safe = data_error(error)
    message = safe.message
    if error.pgcode in NOT_FOUND:
        message += (
            " Triggers and functions run with search_path pg_catalog: qualify names with schemas, or ALTER FUNCTION … SET search_path."
        )
    return SinkRejected(
        part=part,
        table=table,
        error_type=_condition(error),
        message=message,
        detail=safe.detail,
        of_rows=of_rows,
        misses_object=error.pgcode in NOT_FOUND,
        outage=unavailable(error).cause if is_outage(error) else None,
    )


def _condition(error: psycopg2.Error) -> str:
    """Returns Postgres' name for the condition, or the SQLSTATE if a function raised its own."""
    has_name = type(error).__module__ == psycopg2.errors.__name__
    return type(error).__name__ if has_name or error.pgcode is None else error.pgcode


def halves(batch: T) -> list[T]:
    """Splits a batch in the middle. Empty for a single element."""
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]] if middle else []


def _halves_of_records(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Splits rows into those of the lower and the upper half of the records. Empty for a single record."""
    import numpy as np
    import pyarrow as pa

    offsets = rows.column("kafka_offset").to_numpy()
    records = np.unique(offsets)
    if len(records) == 1:
        return []
    lower = offsets < records[len(records) // 2]
    return [rows.filter(pa.array(lower)), rows.filter(pa.array(~lower))]


def _whole_records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Regroups rows into batches of at least `CARE_ROWS` or `CARE_BYTES`, never splitting a record's rows."""
    pending: list[pa.RecordBatch] = []
    last = None
    for rows in batches:
        offsets: Any = rows.column("kafka_offset").to_numpy()
        inner = int((offsets != offsets[-1]).sum())  # a record's rows are adjacent
        begins = offsets[0] != last
        for is_complete, part in ((begins, rows.slice(0, inner)), (begins or inner > 0, rows.slice(inner))):
            if is_complete and _is_large_enough(pending):  # pending ends with a whole record
                yield _joined(pending)
                pending = []
            pending.append(part)
        last = offsets[-1]
    if pending:
        yield _joined(pending)


def _is_large_enough(batches: Sequence[pa.RecordBatch]) -> bool:
    return bool(sum(each.num_rows for each in batches) >= CARE_ROWS or sum(each.nbytes for each in batches) >= CARE_BYTES)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    tables = [pa.Table.from_batches([batch]) for batch in batches]
    (joined,) = pa.concat_tables(tables, promote_options="permissive").combine_chunks().to_batches()  # types may be null or text
    return joined
