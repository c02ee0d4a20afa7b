"""The staging table of a batch that is committed as a whole: tasks COPY their rows into it, and the driver promotes them
(`tidemark.sink.staged`).

The table is unlogged and belongs to one batch of an attempt. A task that runs twice stages its rows twice, each time with another
``try_id``.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2

from tidemark.db import session, statements, transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.profiles import STAGING, Profile
from tidemark.records.outcome import GIVEN, ONLY, OPTIONAL, BadOutput, lineage_as, storable
from tidemark.records.ranges import Slice
from tidemark.roles import require
from tidemark.sink.load import Bisection, Refusals, SinkRejected, copy, halves
from tidemark.sink.spool import spooled
from tidemark.sink.table import Layout, quoted, quoted_table
from tidemark.sink.tally import data_columns, dispositions, errors, wrong_deletes
from tidemark.sink.target import Target
from tidemark.sink.types import arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

SQL = statements("tidemark.sink", "staging.sql")

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
        for column, name in zip(layout.columns, own_names(target, layout), strict=True)
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
        bisection = Bisection(cur, store_rows, halves, refuse)
        for batch in ready:
            count += batch.num_rows
            bisection.store(batch)
        bisection.end()
    return Staged(try_id, count)


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
    texts = {"disposition": REFUSED, "error": storable(f"{error.error_type}: {error.text(layout)}")}
    data = {name for name, _ in _columns(target)}
    arrays = [
        pa.nulls(1, values.type) if name in data else pa.array([texts[name]], pa.string()) if name in texts else values
        for name, values in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=_names(target))


def _names(target: Target) -> list[str]:
    return [name for name, _ in (*_columns(target), *BESIDE)]


def _columns(target: Target) -> list[tuple[str, str]]:
    """Returns names and types of the staging table's data columns, sink by sink."""
    return [
        (name, column.type) for layout in target.layouts for column, name in zip(layout.columns, own_names(target, layout), strict=True)
    ]


def own_names(target: Target, layout: Layout) -> list[str]:
    """Returns a sink's column names in the staging table: numbers if there are several sinks, because Postgres limits name lengths."""
    if len(target.layouts) == 1:
        return [column.name for column in layout.columns]
    return [f"{target.layouts.index(layout)}_{number}" for number in range(len(layout.columns))]


def _alias(number: int) -> str:
    return f"sink_{number}"
