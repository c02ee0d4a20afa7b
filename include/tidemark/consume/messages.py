"""Kafka's messages as Arrow batches: the input of a transform, and what is stored of records that are not loaded."""

from __future__ import annotations

import base64
import itertools
import json
import operator
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import MESSAGES_A_POLL, read
from tidemark.records.outcome import Disposition, Reject, reject
from tidemark.records.ranges import Slice
from tidemark.transform import Fail, Record

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Message

KEPT_BYTES = 32 * 1024 * 1024
"""How many bytes of a slice's records that are not loaded are kept in memory for the hand-off."""
MESSAGE_BYTES = 500
"""Approximate size of a message without its value."""
NO_TIMESTAMP = 0  # confluent_kafka.TIMESTAMP_NOT_AVAILABLE
NO_MOMENT = -1
"""Kafka's timestamp of a record that has none, even if the timestamp type claims one."""
FIRST_MS, LAST_MS = -210_866_803_200_000, 9_223_372_036_854_775
"""From Postgres' first day (4714-11-24 BC) to the last moment that 64 bits of microseconds hold. Timestamps outside become null."""
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BAD_HEADERS = "a header name is not valid UTF-8: the headers cannot be read and are not kept"
_given_headers = operator.methodcaller("headers")
"""If a name is not valid UTF-8, confluent-kafka 2.16 leaves an exception *and* a list with a hole, and reading the list crashes.
A direct call hides the exception once Python 3.11 has specialised it; this way it is always raised. Never call it twice on such a message.
"""


def input_schema() -> pa.Schema:
    """The input of a transform: Kafka's columns, and the lineage columns to pass on."""
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
    """Messages of one partition as a batch of `input_schema`. Messages that cannot be read become rejects instead.

    Half of a worker's own CPU time goes here. Columns are built with ``map`` because it calls without a Python frame.
    """
    import pyarrow as pa
    from confluent_kafka import Message

    headers, rejects = all_headers(messages)
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
    """Reads records of a slice again by their offsets, with everything that a retry needs: the `Payloads` of a commit."""
    wanted = frozenset(offsets)
    for messages in read(kafka, part.partition, min(wanted), max(wanted) + 1, part.leader_epoch):
        chosen = [message for message in messages if message.offset() in wanted]
        if chosen:
            yield _payloads(chosen)


class Kept:
    """Keeps records that are not loaded for the hand-off: reading a slice again for a few of them costs as much as the first time.

    The slice is still read again past `KEPT_BYTES`, for records that Postgres refused, and for records with unreadable headers, because a
    message must not be asked for those twice.
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
        """Like the function `payloads`."""
        if not self._messages.keys() >= set(offsets):
            return payloads(self._kafka, part, offsets)
        kept = [self._messages[offset] for offset in sorted(offsets)]
        return (_payloads(kept[at : at + MESSAGES_A_POLL]) for at in range(0, len(kept), MESSAGES_A_POLL))


def record_of(part: Slice, message: Message) -> Record:
    kind, millis = message.timestamp()
    try:
        timestamp = UNIX_EPOCH if kind == NO_TIMESTAMP or millis == NO_MOMENT else UNIX_EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        raise Fail(f"its timestamp, {millis} ms since 1970, is outside the years 1 to 9999") from None
    return Record(
        part.partition.topic,
        part.partition.partition,
        message.offset() or 0,
        timestamp,
        message.key(),
        message.value(),
        _headers(message) or [],
    )


def all_headers(messages: list[Message]) -> tuple[list[Any], list[Reject]]:
    """The headers of the messages, and rejects for those whose headers cannot be read. Asks no message twice."""
    headers: list[Any] = []
    rejects: list[Reject] = []
    left = iter(messages)
    while True:
        try:
            for given in map(_given_headers, left):
                headers.append(given or None)
        except (SystemError, UnicodeDecodeError):
            broken = messages[len(headers) + len(rejects)]
            rejects.append(reject(broken.offset() or 0, Disposition.FAIL, BAD_HEADERS, Fail.__name__))
        else:
            return headers, rejects


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


def _timestamps(messages: list[Message]) -> pa.Array:
    """The records' timestamps; null for a record without one."""
    import numpy as np
    import pyarrow as pa
    from confluent_kafka import Message

    both = itertools.chain.from_iterable(map(Message.timestamp, messages))
    kinds, millis = np.fromiter(both, dtype=np.int64, count=2 * len(messages)).reshape(-1, 2).T
    none = (kinds == NO_TIMESTAMP) | (millis == NO_MOMENT) | (millis < FIRST_MS) | (millis > LAST_MS)
    return pa.array(np.where(none, 0, millis) * 1000, mask=none).cast(pa.timestamp("us", "UTC"))


def _offsets(messages: list[Message]) -> Any:
    """The messages' offsets, which are sorted, as a numpy array."""
    import numpy as np
    from confluent_kafka import Message

    first, last = (messages[at].offset() or 0 for at in (0, -1)) if messages else (0, -1)
    if last - first + 1 == len(messages):
        return np.arange(first, last + 1, dtype=np.int64)
    return np.fromiter(map(Message.offset, messages), dtype=np.int64, count=len(messages))


def _headers(message: Message) -> list[tuple[str, bytes | None]] | None:
    """Raises `Fail` if they cannot be read."""
    try:
        headers: Any = _given_headers(message)  # its type hints are those of a producer's headers; received headers are text and bytes
    except (SystemError, UnicodeDecodeError):
        raise Fail(BAD_HEADERS) from None
    return list(headers) if headers else None


def _headers_json(message: Message) -> str:
    try:
        headers = _headers(message) or []
    except Fail:
        headers = []
    return json.dumps([[name, None if value is None else base64.b64encode(value).decode()] for name, value in headers])
