"""Calls a transform of the Arrow or function form and accounts for every record (I3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
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
from tidemark.values.plain import Misfit
from tidemark.worker.batches import Unreadable, keyed, records, unreadable, without_offsets

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


def by_batch(work: Work, part: Slice, chunk: pa.RecordBatch, *, order: Order | None = None) -> TransformOutput:
    blocked = {} if order is None else order.split(keyed(chunk))
    batch, rejects = records(part, without_offsets(chunk, blocked))
    judged = judged_batch(work, batch, part)
    if order is not None:
        rejects = unreadable(chunk)
        bad = {reject.offset for reject in rejects}
        judged = order.sift(part, keyed(without_offsets(chunk, bad | blocked.keys())), judged)
        rejects += [held(offset, behind) for offset, behind in blocked.items() if offset not in bad]
    return replace(judged, rejects=[*judged.rejects, *rejects]) if rejects else judged


def judged_batch(work: Work, batch: pa.RecordBatch, part: Slice) -> TransformOutput:
    """What the transform makes of records of one partition. Those that cannot be decoded fail, and it does not see them."""
    wrong: dict[int, NoRow] = {}
    given = batch
    if work.decoder is not None and batch.num_rows:
        batch, wrong = work.decoder.batch(given)
    judged = split_results(called(work.function, batch, part), work.target.layouts, part) if batch.num_rows else TransformOutput()
    if not wrong:
        return judged
    return replace(judged, rejects=[*judged.rejects, *rejected(given, wrong)])


def rejected(batch: pa.RecordBatch, wrong: Mapping[int, NoRow]) -> list[Reject]:
    """The rejects for records that cannot be decoded, by their places in ``batch``."""
    return [_rejected(batch["offset"][at].as_py(), error, ()) for at, error in wrong.items()]


@dataclass(frozen=True, slots=True)
class FunctionOutput:
    """What a plain function makes of records: its rows as it returned them, each with its record's offset."""

    rows: list[Row]
    offsets: list[int]
    skipped: list[int]
    rejects: list[Reject]


def by_record(work: Work, part: Slice, given: Iterable[Record | Unreadable], *, order: Order | None = None) -> TransformOutput:
    """Calls a plain function record by record, and fits its rows into the table's columns. See `function_output`."""
    made = function_output(work, part, given, order=order)
    batches, bad = _of_sinks(part, made, work.target.layouts)
    judged = TransformOutput(batches, made.skipped, made.rejects)
    if bad and len(batches) > 1:  # a record that one sink refuses is loaded into none
        judged = without(judged, bad, part)
    return replace(judged, rejects=[*judged.rejects, *bad.values()])


def function_output(work: Work, part: Slice, given: Iterable[Record | Unreadable], *, order: Order | None = None) -> FunctionOutput:
    """Calls a plain function record by record. Records that ``order`` holds back are not passed to it."""
    rows: list[Row] = []
    offsets: list[int] = []
    skipped: list[int] = []
    rejects: list[Reject] = []
    if work.decoder is not None:
        given = _decoded(work.decoder, part.partition.topic, given)
    for record in given:
        offset = record.offset
        if order is not None and (behind := order.behind(offset, record.key)) is not None:
            if isinstance(record, Unreadable) and isinstance(record.error, Fail):  # it cannot be retried unchanged
                rejects.append(_rejected(offset, record.error, ()))
            else:
                rejects.append(held(offset, behind))
            continue
        again = False
        try:
            if isinstance(record, Unreadable):
                raise record.error
            made = _rows(work.function(record))
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
            order.tried(offset, record.key, again=again)
    return FunctionOutput(rows, offsets, skipped, rejects)


def _decoded(decoder: Decoder, topic: str, given: Iterable[Record | Unreadable]) -> list[Record | Unreadable]:
    """The records with decoded keys and values. All are decoded at once; one that cannot be decoded is unreadable."""
    made = {record.offset: record for record in given}
    records = [record for record in made.values() if isinstance(record, Record)]
    headers = [record.headers for record in records]
    for side, of, attribute in (("value", "value", "data"), ("key", "key", "key_data")):
        if decoder.encodings[side] is Encoding.BYTES:
            continue
        decoded = decoder.objects(topic, side, [getattr(record, of) for record in records], headers)
        for record, value in zip(records, decoded, strict=True):
            known = made[record.offset]
            if not isinstance(known, Record):
                continue
            broken = isinstance(value, NoRow)
            made[record.offset] = Unreadable(record.offset, record.key, value) if broken else replace(known, **{attribute: value})
    return list(made.values())


def called(function: Callable[..., Any], batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch | Mapping[str, pa.RecordBatch]:
    """Calls a transform of the Arrow form: one result, or one for each sink by name. Raises `TransformFailed`."""
    where = f"{part.partition} offsets {batch['offset'][0]} to {batch['offset'][-1]}"
    try:
        answer = function(batch)
    except Exception as error:
        raise TransformFailed(where=where, problem=f"{type(error).__name__}: {one_line(str(error))}.") from error
    require_batches(answer, where)
    return answer


def require_batches(answer: object, where: str) -> None:
    """Raises `TransformFailed` unless a transform of the Arrow form may return this."""
    import pyarrow as pa

    for each in answer.values() if isinstance(answer, Mapping) else [answer]:
        if not isinstance(each, pa.RecordBatch):
            problem = f"it returned {type(each).__name__}; it must return a pyarrow.RecordBatch, or a dict with one for each sink."
            raise TransformFailed(where=where, problem=problem)


def _rows(answer: object) -> list[Row]:
    if answer is None:
        return []
    if isinstance(answer, Mapping | To):
        return [answer]
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        made = list(answer)
        if all(isinstance(row, Mapping | To) for row in made):
            return made
    raise TypeError(f"the transform returned {type(answer).__name__}; it must return a mapping, an iterable of mappings, or None")


def split_results(answer: pa.RecordBatch | Mapping[str, pa.RecordBatch], layouts: Sequence[Layout], part: Slice) -> TransformOutput:
    """What a transform of the Arrow form returned, by sink. Raises `TransformFailed` and `BadOutput`."""
    known = [layout.sink for layout in layouts]
    if not isinstance(answer, Mapping):
        require_sinks([ONLY], known, str(part))
        return split_output(answer, part)
    require_sinks(answer, known, str(part))
    return merged({sink: split_output(batch, part) for sink, batch in answer.items()})


def merged(found: Mapping[str, TransformOutput]) -> TransformOutput:
    """One output of several, each for one sink."""
    rejects = {reject.offset: reject for each in found.values() for reject in each.rejects}
    skipped = {offset for each in found.values() for offset in each.skipped}
    return TransformOutput({sink: each.rows[ONLY] for sink, each in found.items()}, sorted(skipped), list(rejects.values()))


def require_sinks(names: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raises `TransformFailed` for results that belong to none of the consumer's sinks."""
    for name in names:
        if name in known:
            continue
        if known == [ONLY]:
            problem = f"it names the sink {name!r}, but the consumer has one sink without a name: return rows alone, or write sinks."
        elif name == ONLY:
            problem = f"it returned rows without the name of a sink; the consumer has {', '.join(known)}."
        else:
            problem = f"it returned rows for {name!r}; the consumer's sinks are {', '.join(known)}."
        raise TransformFailed(where=where, problem=problem)


def _of_sinks(part: Slice, made: FunctionOutput, layouts: Sequence[Layout]) -> tuple[dict[str, pa.RecordBatch], dict[int, Reject]]:
    """The rows of each sink in its table's types, and the records with values that do not fit."""
    of_sink: dict[str, tuple[list[Mapping[str, Any]], list[int]]] = {}
    for row, offset in zip(made.rows, made.offsets, strict=True):
        sink, plain = (row.sink, row.row) if isinstance(row, To) else (ONLY, row)
        rows, offsets = of_sink.setdefault(sink, ([], []))
        rows.append(plain)
        offsets.append(offset)
    require_sinks(of_sink, [layout.sink for layout in layouts], str(part))
    batches: dict[str, pa.RecordBatch] = {}
    bad: dict[int, Reject] = {}
    for layout in layouts:
        batch, wrong = _columns(part, *of_sink.get(layout.sink, ([], [])), layout)
        bad |= {reject.offset: reject for reject in wrong}
        if batch is not None:
            batches[layout.sink] = batch
    return batches, bad


def _rejected(offset: int, error: Exception, permanent: tuple[type[Exception], ...]) -> Reject:
    """``Fail`` and the spec's permanent types fail the record, also as the cause of another error. Everything else is retried."""
    cause: BaseException | None = error
    final = False
    while cause is not None and not final:
        final = isinstance(cause, (Fail, *permanent))
        cause = cause.__cause__
    return reject(offset, Disposition.FAIL if final else Disposition.RETRY, str(error), type(error).__name__)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the value's
        return f"a {type(value).__name__}, which cannot be shown: {type(error).__name__}"


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
    arrays = []
    bad: dict[int, Reject] = {}
    for column in layout.columns:
        values = [row.get(column.name) for row in rows]
        array, wrong = from_python(values, column.type)
        arrays.append(array)
        for at, why in wrong.items():
            text = f"{column.name} does not fit {column.type}: the value {why}."
            detail = _shown(values[at]) if layout.error_detail else None
            bad.setdefault(offsets[at], reject(offsets[at], Disposition.FAIL, quoting(text, detail), Misfit.__name__))
    if bad:
        good = [(row, offset) for row, offset in zip(rows, offsets, strict=True) if offset not in bad]
        batch, _ = _columns(part, [row for row, _ in good], [offset for _, offset in good], layout)
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
