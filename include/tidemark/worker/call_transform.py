"""Calls a transform of the Arrow or function form and accounts for every record (I3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused, message_of
from tidemark.formats.connect import Misfit
from tidemark.formats.decoder import Decoder
from tidemark.kafka.config import KafkaConfig
from tidemark.records.outcome import DELETED, GIVEN, ONLY, Disposition, Reject, TransformOutput, quoting, reject, without
from tidemark.records.ranges import Slice
from tidemark.retry.order import Order, held
from tidemark.sink.table import Layout
from tidemark.sink.tally import split_output
from tidemark.sink.target import Target
from tidemark.spec.model import Encoding
from tidemark.spec.user_transform import Form
from tidemark.text.wording import one_line
from tidemark.transform import Delete, Fail, NoRow, Record, Skip, To
from tidemark.values.conversion import from_python
from tidemark.values.fields import Fields
from tidemark.worker.batches import Unreadable, keyed, records, rows, unreadable, without_offsets

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any] | To


@dataclass(frozen=True, slots=True)
class Work:
    """Everything a task needs besides its slice. Travels to the executors in the task's closure, including the credentials."""

    target: Target
    kafka: KafkaConfig = field(repr=False)
    form: Form
    function: Callable[..., Any]
    permanent: tuple[type[Exception], ...] = ()
    decoder: Decoder | None = None

    def __post_init__(self) -> None:
        if isinstance(self.function, Fields):
            object.__setattr__(self, "function", self.function.bound(self.target.layouts[0].columns))


class TransformFailed(Refused):
    """The transform raised an exception, or returned the wrong type.

    ``retriable``, because the user's code may have met an outage of its own.
    """

    retriable = True
    where: str
    problem: str

    def __str__(self) -> str:
        return f"The transform failed on {self.where}: {self.problem} Nothing of this slice was stored."


def transform_chunk(work: Work, part: Slice, chunk: pa.RecordBatch, order: Order | None = None) -> TransformOutput:
    """Returns the output of a transform of either form for records of one partition, without those that ``order`` holds back."""
    if work.form is not Form.ARROW:
        return by_record(work, part, rows(part, chunk), order=order)
    blocked = {} if order is None else order.split(keyed(chunk))
    batch, rejects = records(part, without_offsets(chunk, blocked))
    output = transform_batch(work, batch, part)
    if order is not None:
        rejects = unreadable(chunk)
        bad = {reject.offset for reject in rejects}
        output = order.sift(part, keyed(without_offsets(chunk, bad | blocked.keys())), output)
        rejects += [held(offset, behind) for offset, behind in blocked.items() if offset not in bad]
    return replace(output, rejects=[*output.rejects, *rejects]) if rejects else output


def transform_batch(work: Work, batch: pa.RecordBatch, part: Slice) -> TransformOutput:
    """Returns the output for records of one partition. Records that cannot be decoded fail, and the transform does not get them."""
    errors: dict[int, NoRow] = {}
    undecoded = batch
    if work.decoder is not None and batch.num_rows:
        batch, errors = work.decoder.batch(undecoded)
    output = split_results(call_arrow(work.function, batch, part), work.target.layouts, part) if batch.num_rows else TransformOutput()
    if not errors:
        return output
    return replace(output, rejects=[*output.rejects, *decode_rejects(undecoded, errors)])


def decode_rejects(batch: pa.RecordBatch, errors: Mapping[int, NoRow]) -> list[Reject]:
    """Returns the rejects for records that cannot be decoded. ``errors`` has their indexes in ``batch``."""
    return [_reject(batch["offset"][index].as_py(), error, ()) for index, error in errors.items()]


@dataclass(frozen=True, slots=True)
class FunctionOutput:
    """The output of a plain function: its rows as returned, each with its record's offset."""

    rows: list[Row]
    offsets: list[int]
    skipped: list[int]
    rejects: list[Reject]


def by_record(work: Work, part: Slice, source: Iterable[Record | Unreadable], *, order: Order | None = None) -> TransformOutput:
    """Calls a plain function record by record, and converts its rows to the table's columns. See `function_output`."""
    results = function_output(work, part, source, order=order)
    batches, bad = _split_by_sink(part, results, work.target.layouts)
    output = TransformOutput(batches, results.skipped, results.rejects)
    if bad and len(batches) > 1:  # a record that one sink refuses is loaded into none
        output = without(output, bad, part)
    return replace(output, rejects=[*output.rejects, *bad.values()])


def function_output(work: Work, part: Slice, source: Iterable[Record | Unreadable], *, order: Order | None = None) -> FunctionOutput:
    """Calls a plain function record by record. Records that ``order`` holds back are not passed to it."""
    rows: list[Row] = []
    offsets: list[int] = []
    skipped: list[int] = []
    rejects: list[Reject] = []
    if work.decoder is not None:
        source = _decode_records(work.decoder, part.partition.topic, source)
    for record in source:
        offset = record.offset
        if order is not None and (behind := order.behind(offset, record.key)) is not None:
            if isinstance(record, Unreadable) and isinstance(record.error, Fail):  # it cannot be retried unchanged
                rejects.append(_reject(offset, record.error, ()))
            else:
                rejects.append(held(offset, behind))
            continue
        again = False
        try:
            if isinstance(record, Unreadable):
                raise record.error
            results = _to_rows(work.function(record))
        except Skip:
            skipped.append(offset)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises is the record's result
            rejects.append(_reject(offset, error, work.permanent))
            again = rejects[-1].disposition is Disposition.RETRY
        else:
            rows += results
            offsets += [offset] * len(results)
            if not results:
                skipped.append(offset)
        if order is not None:
            order.tried(offset, record.key, again=again)
    return FunctionOutput(rows, offsets, skipped, rejects)


def _decode_records(decoder: Decoder, topic: str, source: Iterable[Record | Unreadable]) -> list[Record | Unreadable]:
    """Returns the records with decoded keys and values, all decoded at once. A record that cannot be decoded becomes `Unreadable`."""
    by_offset = {record.offset: record for record in source}
    records = [record for record in by_offset.values() if isinstance(record, Record)]
    headers = [record.headers for record in records]
    for side, raw, attribute in (("value", "value", "data"), ("key", "key", "key_data")):
        if decoder.encodings[side] is Encoding.BYTES:
            continue
        decoded = decoder.objects(topic, side, [getattr(record, raw) for record in records], headers)
        for record, value in zip(records, decoded, strict=True):
            current = by_offset[record.offset]
            if not isinstance(current, Record):
                continue
            failed = isinstance(value, NoRow)
            by_offset[record.offset] = Unreadable(record.offset, record.key, value) if failed else replace(current, **{attribute: value})
    return list(by_offset.values())


def call_arrow(function: Callable[..., Any], batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch | Mapping[str, pa.RecordBatch]:
    """Calls a transform of the Arrow form: one result, or one for each sink by name. Raises `TransformFailed`."""
    where = f"{part.partition} offsets {batch['offset'][0]} to {batch['offset'][-1]}"
    try:
        answer = function(batch)
    except Exception as error:
        raise TransformFailed(where=where, problem=f"{type(error).__name__}: {one_line(message_of(error))}.") from error
    require_batches(answer, where)
    return answer


def require_batches(answer: object, where: str) -> None:
    """Raises `TransformFailed` unless a transform of the Arrow form may return this."""
    import pyarrow as pa

    for batch in answer.values() if isinstance(answer, Mapping) else [answer]:
        if not isinstance(batch, pa.RecordBatch):
            problem = f"it returned {type(batch).__name__}; it must return a pyarrow.RecordBatch, or a dict with one for each sink."
            raise TransformFailed(where=where, problem=problem)


def _to_rows(answer: object) -> list[Row]:
    """Returns the rows in the result of a plain function. Raises `TypeError`."""
    if answer is None:
        return []
    if isinstance(answer, Mapping | To):
        return [answer]
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        rows = list(answer)
        if all(isinstance(row, Mapping | To) for row in rows):
            return rows
    raise TypeError(f"the transform returned {type(answer).__name__}; it must return a mapping, an iterable of mappings, or None")


def split_results(answer: pa.RecordBatch | Mapping[str, pa.RecordBatch], layouts: Sequence[Layout], part: Slice) -> TransformOutput:
    """Returns the output of a transform of the Arrow form, by sink. Raises `TransformFailed` and `BadOutput`."""
    sinks = [layout.sink for layout in layouts]
    if not isinstance(answer, Mapping):
        require_sinks([ONLY], sinks, str(part))
        return split_output(answer, part)
    require_sinks(answer, sinks, str(part))
    return merge_outputs({sink: split_output(batch, part) for sink, batch in answer.items()})


def merge_outputs(outputs: Mapping[str, TransformOutput]) -> TransformOutput:
    """Merges outputs that each have one sink."""
    rejects = {reject.offset: reject for output in outputs.values() for reject in output.rejects}
    skipped = {offset for output in outputs.values() for offset in output.skipped}
    return TransformOutput({sink: output.rows[ONLY] for sink, output in outputs.items()}, sorted(skipped), list(rejects.values()))


def require_sinks(names: Iterable[str], sinks: Sequence[str], where: str) -> None:
    """Raises `TransformFailed` if a result names none of the consumer's sinks."""
    for name in names:
        if name in sinks:
            continue
        if sinks == [ONLY]:
            problem = f"it names the sink {name!r}, but the consumer has one sink without a name: return plain rows, or define sinks."
        elif name == ONLY:
            problem = f"it returned rows without the name of a sink; the consumer has {', '.join(sinks)}."
        else:
            problem = f"it returned rows for {name!r}; the consumer's sinks are {', '.join(sinks)}."
        raise TransformFailed(where=where, problem=problem)


def _split_by_sink(part: Slice, results: FunctionOutput, layouts: Sequence[Layout]) -> tuple[dict[str, pa.RecordBatch], dict[int, Reject]]:
    """Returns the rows of each sink in its table's types, and rejects for the records with values that do not fit."""
    by_sink: dict[str, tuple[list[Mapping[str, Any]], list[int]]] = {}
    for row, offset in zip(results.rows, results.offsets, strict=True):
        sink, values = (row.sink, row.row) if isinstance(row, To) else (ONLY, row)
        rows, offsets = by_sink.setdefault(sink, ([], []))
        rows.append(values)
        offsets.append(offset)
    require_sinks(by_sink, [layout.sink for layout in layouts], str(part))
    batches: dict[str, pa.RecordBatch] = {}
    bad: dict[int, Reject] = {}
    for layout in layouts:
        batch, rejects = _to_batch(part, *by_sink.get(layout.sink, ([], [])), layout)
        bad |= {reject.offset: reject for reject in rejects}
        if batch is not None:
            batches[layout.sink] = batch
    return batches, bad


def _reject(offset: int, error: Exception, permanent: tuple[type[Exception], ...]) -> Reject:
    """Returns the reject for an error. ``Fail`` and the spec's permanent types fail the record, also as its cause. Others are retried."""
    final = any(isinstance(cause, (Fail, *permanent)) for cause in _causes(error))
    return reject(offset, Disposition.FAIL if final else Disposition.RETRY, message_of(error), type(error).__name__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its chain of causes, each once: user code may make the chain a circle."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the value's own repr may raise anything
        return f"a {type(value).__name__}, which cannot be shown: {type(error).__name__}"


def _to_batch(part: Slice, rows: list[Mapping[str, Any]], offsets: list[int], layout: Layout) -> tuple[pa.RecordBatch | None, list[Reject]]:
    """Rows as a batch in the table's types. A record with a value that does not fit its column fails; the others go on."""
    import pyarrow as pa

    if not rows:
        return None, []
    allowed = {column.name for column in layout.columns}
    for row, offset in zip(rows, offsets, strict=True):
        for name in row:
            if name not in allowed:
                problem = f"it returned a value for {name!r}, which is not a column of {layout.table}."
                raise TransformFailed(where=f"{part.partition} offset {offset}", problem=problem)
    arrays = []
    bad: dict[int, Reject] = {}
    for column in layout.columns:
        values = [row.get(column.name) for row in rows]
        array, misfits = from_python(values, column.type)
        arrays.append(array)
        for index, problem in misfits.items():
            text = f"{column.name} does not fit {column.type}: the value {problem}."
            detail = _safe_repr(values[index]) if layout.error_detail else None
            bad.setdefault(offsets[index], reject(offsets[index], Disposition.FAIL, quoting(text, detail), Misfit.__name__))
    if bad:
        good = [(row, offset) for row, offset in zip(rows, offsets, strict=True) if offset not in bad]
        batch, _ = _to_batch(part, [row for row, _ in good], [offset for _, offset in good], layout)
        return batch, list(bad.values())
    count = len(rows)
    arrays += [
        pa.repeat(pa.scalar(part.partition.topic), count),
        pa.repeat(pa.scalar(part.partition.partition, pa.int32()), count),
        pa.array(offsets, pa.int64()),
    ]
    names = [column.name for column in layout.columns] + list(GIVEN)
    if any(isinstance(row, Delete) for row in rows):
        names.append(DELETED)
        arrays.append(pa.array([isinstance(row, Delete) for row in rows]))
    return pa.RecordBatch.from_arrays(arrays, names=names), []
