"""Calls a transform of the Arrow or function form and accounts for every record (I3)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from tidemark.consume.messages import all_headers, record_of, records
from tidemark.errors import Refused
from tidemark.kafka.config import KafkaConfig
from tidemark.records.outcome import GIVEN, Disposition, Reject, TransformOutput, quoting, reject
from tidemark.records.ranges import Slice
from tidemark.retry.order import HasOffset, Order, held
from tidemark.sink.table import Layout
from tidemark.sink.tally import split_output
from tidemark.sink.target import Target
from tidemark.sink.types import arrow_type, conform
from tidemark.spec.transform import Form
from tidemark.transform import Fail, Record, Skip

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Message

M = TypeVar("M", bound=HasOffset)

FLOAT32_MAX = (2 - 2**-24) * 2.0**127
"""Greater values would become infinite in a ``real`` column."""


@dataclass(frozen=True, slots=True)
class Work:
    """Everything a task needs besides its slice. Travels to the executors in the task's closure, including the credentials."""

    target: Target
    kafka: KafkaConfig = field(repr=False)
    form: Form
    function: Callable[..., Any]
    permanent: tuple[type[Exception], ...] = ()


@dataclass(kw_only=True, eq=False)
class TransformFailed(Refused):
    """The transform raised an exception, or returned the wrong type.

    ``retriable``, because the user's code may have met an outage of its own.
    """

    retriable = True
    where: str
    problem: str

    def __str__(self) -> str:
        return f"The transform failed on {self.where}: {self.problem} Nothing of this slice was stored."


def by_batch(work: Work, part: Slice, messages: list[Message], *, order: Order[Any] | None = None) -> TransformOutput:
    free, blocked = (messages, []) if order is None else order.split(messages)
    batch, rejects = records(part, list(free))
    judged = split_output(called(work.function, batch, part), part) if batch.num_rows else TransformOutput(None)
    if order is not None:
        rejects += all_headers([message for message, _ in blocked])[1]  # unreadable headers: fails, as it cannot be retried unchanged
        unreadable = {reject.offset for reject in rejects}
        judged = order.sift(part, [message for message in free if message.offset() not in unreadable], judged)
        rejects += [held(message, behind) for message, behind in blocked if message.offset() not in unreadable]
    return replace(judged, rejects=[*judged.rejects, *rejects]) if rejects else judged


def by_record(
    work: Work,
    part: Slice,
    messages: Sequence[M],
    record: Callable[[Slice, M], Record] | None = None,
    *,
    order: Order[Any] | None = None,
) -> TransformOutput:
    """Calls a plain function record by record. ``record`` turns a message into a record; an exception that it raises counts as the result.

    Records that ``order`` holds back are not passed to the function.
    """
    make: Callable[[Slice, Any], Record] = record or record_of
    rows: list[Mapping[str, Any]] = []
    offsets: list[int] = []
    skipped: list[int] = []
    rejects: list[Reject] = []
    for message in messages:
        offset = message.offset()
        assert offset is not None
        if order is not None and (behind := order.behind(message)) is not None:
            rejects.append(_held(part, message, behind, make))
            continue
        again = False
        try:
            made = _rows(work.function(make(part, message)))
        except Skip:
            skipped.append(offset)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises is the record's result
            rejects.append(_rejected(offset, error, work.permanent))
            again = rejects[-1].disposition is Disposition.RETRY
        else:
            rows += made
            offsets += [offset] * len(made)
            if not made:
                skipped.append(offset)
        if order is not None:
            order.tried(message, again=again)
    batch, bad = _columns(part, rows, offsets, work.target.layout)
    return TransformOutput(batch, skipped, rejects + bad)


def called(function: Callable[..., Any], batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch:
    """Calls a transform of the Arrow form. Raises `TransformFailed`."""
    import pyarrow as pa

    where = f"{part.partition} offsets {batch['offset'][0]} to {batch['offset'][-1]}"
    try:
        answer = function(batch)
    except Exception as error:
        raise TransformFailed(where=where, problem=f"{type(error).__name__}: {error}.") from error
    if not isinstance(answer, pa.RecordBatch):
        raise TransformFailed(where=where, problem=f"it returned {type(answer).__name__}; it must return a pyarrow.RecordBatch.")
    return answer


def _rows(answer: object) -> list[Mapping[str, Any]]:
    if answer is None:
        return []
    if isinstance(answer, Mapping):
        return [answer]
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        made = list(answer)
        if all(isinstance(row, Mapping) for row in made):
            return made
    raise TypeError(f"the transform returned {type(answer).__name__}; it must return a mapping, an iterable of mappings, or None")


def _held(part: Slice, message: HasOffset, behind: int, make: Callable[[Slice, Any], Record]) -> Reject:
    """Holds the record back; one that cannot be read fails instead."""
    try:
        make(part, message)
    except Fail as error:
        return _rejected(message.offset() or 0, error, ())
    return held(message, behind)


def _rejected(offset: int, error: Exception, permanent: tuple[type[Exception], ...]) -> Reject:
    """``Fail`` and the spec's permanent types fail the record, also as the cause of another error. Everything else is retried."""
    cause: BaseException | None = error
    final = False
    while cause is not None and not final:
        final = isinstance(cause, (Fail, *permanent))
        cause = cause.__cause__
    return reject(offset, Disposition.FAIL if final else Disposition.RETRY, str(error), type(error).__name__)


def _columns(part: Slice, rows: list[Mapping[str, Any]], offsets: list[int], layout: Layout) -> tuple[pa.RecordBatch | None, list[Reject]]:
    """Rows as a batch in the table's types. A record with a value that does not fit its column fails; the others go on."""
    import pyarrow as pa

    if not rows:
        return None, []
    known = {column.name for column in layout.columns}
    for row, offset in zip(rows, offsets, strict=True):
        if stranger := next((name for name in row if name not in known), None):
            raise TransformFailed(
                where=f"{part.partition} offset {offset}", problem=f"it returned {stranger!r}, which is not a column of {layout.table}."
            )
    try:
        arrays = [_column([row.get(column.name) for row in rows], column.type) for column in layout.columns]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _without_misfits(part, rows, offsets, layout)
    count = len(rows)
    arrays += [
        pa.repeat(pa.scalar(part.partition.topic), count),
        pa.repeat(pa.scalar(part.partition.partition, pa.int32()), count),
        pa.array(offsets, pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in layout.columns] + list(GIVEN)), []


def _without_misfits(
    part: Slice, rows: list[Mapping[str, Any]], offsets: list[int], layout: Layout
) -> tuple[pa.RecordBatch | None, list[Reject]]:
    import pyarrow as pa

    bad: dict[int, Reject] = {}
    for row, offset in zip(rows, offsets, strict=True):
        for column in layout.columns:
            try:
                _column([row.get(column.name)], column.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                why = error if isinstance(error, Misfit) else f"is of type {type(row[column.name]).__name__}"
                text = f"{column.name} does not fit {column.type}: the value {why}."
                detail = f"{row[column.name]!r}: {error}" if layout.error_detail else None
                bad.setdefault(offset, reject(offset, Disposition.FAIL, quoting(text, detail), type(error).__name__))
    good = [(row, offset) for row, offset in zip(rows, offsets, strict=True) if offset not in bad]
    if len(good) == len(rows):
        raise TransformFailed(where=str(part), problem="its values fit their columns one by one but not as a batch.")
    batch, _ = _columns(part, [row for row, _ in good], [offset for _, offset in good], layout)
    return batch, list(bad.values())


def _column(values: list[Any], postgres: str) -> pa.Array:
    """Python values as the column's Arrow type. JSON columns take any value, numeric columns what ``Decimal`` holds exactly."""
    import pyarrow as pa

    target = arrow_type(postgres)
    assert target is not None
    if postgres in ("json", "jsonb"):
        values = [value if value is None or isinstance(value, str) else json.dumps(value, allow_nan=False) for value in values]
    elif postgres == "uuid":
        return conform(pa.array([None if value is None else str(value) for value in values], pa.string()), postgres)
    else:
        _check_exact(values, target)
    return pa.array(values, target)


def _check_exact(values: list[Any], target: pa.DataType) -> None:
    """Refuses values that Arrow would change silently: it truncates fractions and reads naive times as UTC and numbers as times."""
    import pyarrow as pa

    if pa.types.is_list(target):
        _refuse(values, lambda value: isinstance(value, str | bytes), "is text, not a list")
        _check_exact([each for value in values if isinstance(value, list | tuple) for each in value], target.value_type)
    elif pa.types.is_temporal(target):
        _refuse(values, lambda value: isinstance(value, int | float), "is a number")
    if pa.types.is_timestamp(target):
        aware = target.tz is not None
        _refuse(
            values,
            lambda value: isinstance(value, datetime) and (value.tzinfo is not None) is not aware,
            "has no time zone" if aware else "has a time zone",
        )
    elif pa.types.is_date(target):
        _refuse(values, lambda value: isinstance(value, datetime), "has a time of day")
    elif pa.types.is_time(target):
        _refuse(values, lambda value: isinstance(value, time) and value.tzinfo is not None, "has a time zone")
    elif pa.types.is_integer(target):
        _refuse(values, lambda value: isinstance(value, float | Decimal) and value != int(value), "is not a whole number")
    elif pa.types.is_float32(target):
        _refuse(values, lambda value: isinstance(value, int | float) and FLOAT32_MAX < abs(value) < math.inf, "is out of range")


class Misfit(ValueError):
    """Arrow would change a value silently. The text says why, and does not quote the value."""


def _refuse(values: list[Any], wrong: Callable[[Any], bool], why: str) -> None:
    for value in values:
        if wrong(value):
            raise Misfit(why)
