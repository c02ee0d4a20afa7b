"""What a task does with a slice: read it, transform it, commit it. Runs in a Python worker of Spark."""

from __future__ import annotations

import base64
import functools
import gc
import itertools
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from tidemark.errors import Refused
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import MESSAGES_A_POLL, read
from tidemark.records.outcome import GIVEN, Disposition, Judged, Reject, reject
from tidemark.records.ranges import Slice
from tidemark.retry.order import HasOffset, KeyOrder, KeysBlocked, Order, held
from tidemark.sink.commit import Receipt, Target, commit_slice
from tidemark.sink.table import Layout
from tidemark.sink.tally import judge
from tidemark.sink.types import arrow_type, conform
from tidemark.spec.transform import Form
from tidemark.transform import Fail, Record, Skip

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Message

M = TypeVar("M", bound=HasOffset)

KEPT_BYTES = 32 * 1024 * 1024
"""Of the records of a slice that are not loaded as much is kept for the hand-off."""
MESSAGE_BYTES = 500
"""About what a message takes beside its value."""
FLOAT32_MAX = (2 - 2**-24) * 2.0**127
"""What is greater becomes infinite as a ``real``."""
NO_TIMESTAMP = 0  # confluent_kafka.TIMESTAMP_NOT_AVAILABLE
NO_MOMENT = -1
"""Kafka's own word for a record without a timestamp, also where the type says that there is one."""
FIRST_MS, LAST_MS = -210_866_803_200_000, 9_223_372_036_854_775
"""From Postgres' first day (4714-11-24 BC) to the last moment that 64 bits of microseconds hold. What lies outside is no moment either."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
JUDGE_AT_MOST = 3
"""How often a slice is judged whose keys are blocked meanwhile."""


@dataclass(frozen=True, slots=True)
class Work:
    """All that a task needs besides its slice. Travels to the executors, with the credentials in it, as the task's closure does."""

    target: Target
    kafka: KafkaConfig = field(repr=False)
    form: Form
    function: Callable[..., Any]
    permanent: tuple[type[Exception], ...] = ()


@dataclass(kw_only=True, eq=False)
class TransformFailed(Refused):
    """The transform raised, or returned something else than its form promises.

    ``retriable``: the user's code may have met an outage of its own, so another try is worth it.
    """

    retriable = True
    where: str
    problem: str

    def __str__(self) -> str:
        return f"The transform failed on {self.where}: {self.problem} Nothing of this slice was stored."


def consume_slice(work: Work, part: Slice, *, isolate: bool = False) -> Receipt:
    """Reads ``part`` with librdkafka, transforms it in the Arrow or function form, and commits it; see `commit_slice`."""
    if part.drained:
        from tidemark.consume.drained import drain_slice  # here, because it is made of this module's parts

        return drain_slice(work, part, isolate=isolate)
    retrying = Retrying(retry=retry_if_exception_type(KeysBlocked), stop=stop_after_attempt(JUDGE_AT_MOST), reraise=True)
    return retrying(_consumed, work, part, isolate)


def _consumed(work: Work, part: Slice, isolate: bool) -> Receipt:
    order = None if work.target.max_held is None else KeyOrder(work.target.max_held)
    kept = _Kept(work.kafka)
    return commit_slice(work.target, part, _answers(work, part, order, kept), kept.payloads, isolate=isolate, order=order)


def _answers(work: Work, part: Slice, order: KeyOrder | None, kept: _Kept) -> Iterator[Judged]:
    answer = _by_batch if work.form is Form.ARROW else by_record
    for messages in read(work.kafka, part.partition, part.start, part.end, part.leader_epoch):
        judged = answer(work, part, messages, order=order)
        kept.keep(messages, judged.rejects)
        yield judged


@functools.cache
def collect_less_garbage() -> None:
    """What a worker has imported is left alone for good, and the rest looked at seldom.

    Python looks for garbage after every 700 new objects, and 10,000 messages are alive at a time: half of a reader's CPU went there. And
    Spark has a worker look through all that it holds after each task, which took 50 ms of it.
    """
    import pyarrow as pa

    gc.set_threshold(100_000, 20, 100)
    pa.array([0])  # with its first list it imports pandas, if there is one
    gc.freeze()


def input_schema() -> pa.Schema:
    """What a transform is given: Kafka's columns, and the lineage columns to be passed on."""
    import pyarrow as pa

    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    return pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(header)),
            ("kafka_topic", pa.string()),
            ("kafka_partition", pa.int32()),
            ("kafka_offset", pa.int64()),
        ]
    )


def records(part: Slice, messages: list[Message]) -> tuple[pa.RecordBatch, list[Reject]]:
    """Messages of one partition as a batch of `input_schema`; those that cannot be read have failed, and are not in it.

    Half of a worker's own CPU is spent here: columns are taken with ``map``, which calls without a frame of Python's.
    """
    import pyarrow as pa
    from confluent_kafka import Message

    headers, rejects = _all_headers(messages)
    readable = messages
    if rejects:
        failed = {reject.offset for reject in rejects}
        readable = [message for message in messages if message.offset() not in failed]
    schema = input_schema()
    count = len(readable)
    topic = pa.repeat(pa.scalar(part.partition.topic), count)
    partition = pa.repeat(pa.scalar(part.partition.partition, pa.int32()), count)
    offset = pa.array(_offsets(readable))
    arrays = [
        topic,
        partition,
        offset,
        _timestamps(readable),
        pa.array(list(map(Message.key, readable)), pa.binary()),
        pa.array(list(map(Message.value, readable)), pa.binary()),
        pa.array(headers, schema.field("headers").type) if any(headers) else pa.nulls(count, schema.field("headers").type),
        topic,
        partition,
        offset,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema), rejects


def payloads(kafka: KafkaConfig, part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
    """Records of a slice by their offsets, read again, with all that is needed to try them once more: the `Payloads` of a commit."""
    wanted = frozenset(offsets)
    for messages in read(kafka, part.partition, min(wanted), max(wanted) + 1, part.leader_epoch):
        chosen = [message for message in messages if message.offset() in wanted]
        if chosen:
            yield _payloads(chosen)


class _Kept:
    """Records that are not loaded, kept for the hand-off: reading a slice again for a few of them costs as much as the first time.

    Past `KEPT_BYTES`, and for records that Postgres has refused, it is read again all the same; also where headers cannot be read, because
    no such message can be asked for them twice.
    """

    def __init__(self, kafka: KafkaConfig) -> None:
        self._kafka = kafka
        self._messages: dict[int, Message] = {}
        self._bytes = 0

    def keep(self, messages: Sequence[Message], rejects: Sequence[Reject]) -> None:
        if not rejects or self._bytes > KEPT_BYTES:
            return
        wanted = {reject.offset for reject in rejects if reject.error_text != BAD_HEADERS}
        chosen = [message for message in messages if message.offset() in wanted]
        self._bytes += sum(map(len, chosen)) + MESSAGE_BYTES * len(chosen)
        if self._bytes > KEPT_BYTES:
            self._messages.clear()
        else:
            self._messages.update((message.offset() or 0, message) for message in chosen)

    def payloads(self, part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
        """As the function of this name."""
        if not self._messages.keys() >= set(offsets):
            return payloads(self._kafka, part, offsets)
        kept = [self._messages[offset] for offset in sorted(offsets)]
        return (_payloads(kept[at : at + MESSAGES_A_POLL]) for at in range(0, len(kept), MESSAGES_A_POLL))


def _payloads(messages: list[Message]) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [
        pa.array([message.offset() for message in messages], pa.int64()),
        _timestamps(messages),
        pa.array([message.key() for message in messages], pa.binary()),
        pa.array([message.value() for message in messages], pa.binary()),
        pa.array([_headers_json(message) for message in messages], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=["record_offset", "record_timestamp", "key", "value", "headers"])


def _by_batch(work: Work, part: Slice, messages: list[Message], *, order: Order[Any] | None = None) -> Judged:
    free, blocked = (messages, []) if order is None else order.split(messages)
    batch, rejects = records(part, list(free))
    judged = judge(called(work.function, batch, part), part) if batch.num_rows else Judged(None)
    if order is not None:
        rejects += _all_headers([message for message, _ in blocked])[1]  # without its headers it would not be tried as what it is
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
) -> Judged:
    """What a plain function answers, record by record. ``record`` makes them of the messages; what it raises is that record's answer.

    Those that ``order`` holds are not given to it.
    """
    make: Callable[[Slice, Any], Record] = record or _record
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
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises is that record's answer
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
    return Judged(batch, skipped, rejects + bad)


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
    """A record that cannot be read is not held: it has failed."""
    try:
        make(part, message)
    except Fail as error:
        return _rejected(message.offset() or 0, error, ())
    return held(message, behind)


def _rejected(offset: int, error: Exception, permanent: tuple[type[Exception], ...]) -> Reject:
    """``Fail`` and the spec's permanent types never succeed, also as the cause of another error; all else may."""
    cause: BaseException | None = error
    final = False
    while cause is not None and not final:
        final = isinstance(cause, (Fail, *permanent))
        cause = cause.__cause__
    return reject(offset, Disposition.FAIL if final else Disposition.RETRY, str(error), type(error).__name__)


def _columns(part: Slice, rows: list[Mapping[str, Any]], offsets: list[int], layout: Layout) -> tuple[pa.RecordBatch | None, list[Reject]]:
    """Rows as a batch in the table's own types. A record with a value that has no place in its column fails; the others go on."""
    import pyarrow as pa

    if not rows:
        return None, []
    known = {column.name for column in layout.columns}
    for row, offset in zip(rows, offsets, strict=True):
        if stranger := next((name for name in row if name not in known), None):
            raise TransformFailed(
                where=f"{part.partition} offset {offset}", problem=f"it returned {stranger!r}, which {layout.table} has not."
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
                text = f"{column.name} does not fit {column.type}: {error}"
                bad.setdefault(offset, reject(offset, Disposition.FAIL, text, type(error).__name__))
    good = [(row, offset) for row, offset in zip(rows, offsets, strict=True) if offset not in bad]
    if len(good) == len(rows):
        raise TransformFailed(where=str(part), problem="its values fit their columns one by one, but not together.")
    batch, _ = _columns(part, [row for row, _ in good], [offset for _, offset in good], layout)
    return batch, list(bad.values())


def _column(values: list[Any], postgres: str) -> pa.Array:
    """Python values as the column's Arrow type; JSON columns take any value, numeric columns take what ``Decimal`` holds exactly."""
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
    """Refuses what Arrow would change on the way: it cuts fractions off, takes a naive time for UTC and a number for a moment."""
    import pyarrow as pa

    if pa.types.is_list(target):
        _refuse(values, lambda value: isinstance(value, str | bytes), "is text and no list")
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
        _refuse(values, lambda value: isinstance(value, float | Decimal) and value != int(value), "is no whole number")
    elif pa.types.is_float32(target):
        _refuse(values, lambda value: isinstance(value, int | float) and FLOAT32_MAX < abs(value) < math.inf, "is out of range")


def _refuse(values: list[Any], wrong: Callable[[Any], bool], why: str) -> None:
    for value in values:
        if wrong(value):
            raise ValueError(f"{value} {why}")


def called(function: Callable[..., Any], batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch:
    """What a transform of the Arrow form answers. Raises `TransformFailed`."""
    import pyarrow as pa

    where = f"{part.partition} offsets {batch['offset'][0]} to {batch['offset'][-1]}"
    try:
        answer = function(batch)
    except Exception as error:
        raise TransformFailed(where=where, problem=f"{type(error).__name__}: {error}.") from error
    if not isinstance(answer, pa.RecordBatch):
        raise TransformFailed(where=where, problem=f"it returned {type(answer).__name__}; it must return a pyarrow.RecordBatch.")
    return answer


def _record(part: Slice, message: Message) -> Record:
    kind, millis = message.timestamp()
    try:
        timestamp = EPOCH if kind == NO_TIMESTAMP or millis == NO_MOMENT else EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        raise Fail(f"its timestamp, {millis} ms since 1970, is in no year from 1 to 9999") from None
    return Record(
        part.partition.topic,
        part.partition.partition,
        message.offset() or 0,
        timestamp,
        message.key(),
        message.value(),
        _headers(message) or [],
    )


def _timestamps(messages: list[Message]) -> pa.Array:
    """The records' timestamps as Arrow's; null where a record carries none."""
    import numpy as np
    import pyarrow as pa
    from confluent_kafka import Message

    both = itertools.chain.from_iterable(map(Message.timestamp, messages))
    kinds, millis = np.fromiter(both, dtype=np.int64, count=2 * len(messages)).reshape(-1, 2).T
    none = (kinds == NO_TIMESTAMP) | (millis == NO_MOMENT) | (millis < FIRST_MS) | (millis > LAST_MS)
    return pa.array(np.where(none, 0, millis) * 1000, mask=none).cast(pa.timestamp("us", "UTC"))


BAD_HEADERS = "the name of a header is no UTF-8: its headers cannot be read, and are not kept"
_given_headers = operator.methodcaller("headers")
"""A name that is no UTF-8 makes confluent-kafka 2.16 leave an exception *and* a list with a hole, whose reader crashes. A direct call
lets that pass once Python 3.11 has specialised it; this way the exception is always raised. Not to be asked twice of such a message."""


def _all_headers(messages: list[Message]) -> tuple[list[Any], list[Reject]]:
    """The headers of those whose headers can be read, and rejects for the others; no message is asked twice."""
    headers: list[Any] = []
    rejects: list[Reject] = []
    left = iter(messages)
    while True:
        try:
            for given in map(_given_headers, left):
                headers.append(given or None)
        except (SystemError, UnicodeDecodeError):
            broken = messages[len(headers) + len(rejects)]
            rejects.append(_rejected(broken.offset() or 0, Fail(BAD_HEADERS), ()))
        else:
            return headers, rejects


def _offsets(messages: list[Message]) -> Any:
    """The messages' offsets, which are in order, as numpy's."""
    import numpy as np
    from confluent_kafka import Message

    first, last = (messages[at].offset() or 0 for at in (0, -1)) if messages else (0, -1)
    if last - first + 1 == len(messages):
        return np.arange(first, last + 1, dtype=np.int64)
    return np.fromiter(map(Message.offset, messages), dtype=np.int64, count=len(messages))


def _headers(message: Message) -> list[tuple[str, bytes | None]] | None:
    """Raises `Fail` if they cannot be read."""
    try:
        headers: Any = _given_headers(message)  # confluent-kafka types what a producer may pass; what arrives is text and bytes
    except (SystemError, UnicodeDecodeError):
        raise Fail(BAD_HEADERS) from None
    return list(headers) if headers else None


def _headers_json(message: Message) -> str:
    try:
        headers = _headers(message) or []
    except Fail:
        headers = []
    return json.dumps([[name, None if value is None else base64.b64encode(value).decode()] for name, value in headers])
