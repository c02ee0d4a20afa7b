"""Polls one partition's records as columns. The poller here uses confluent-kafka's messages; `compiled` has the fast one.

A *chunk* is a `pyarrow.RecordBatch` of `chunk_schema`: records of one partition, in the order of the log.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tidemark.errors import BrokerUnavailable
from tidemark.kafka.config import KafkaConfig, connected
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Message

MESSAGES_A_POLL = 10_000
BYTES_A_POLL = 16 * 1024 * 1024
"""Approximate bytes of a chunk. A worker holds several copies of it on the way into the COPY."""
POLL_S = 0.2
"""How long a poll waits for its last message. Short, because near the end of the log it never arrives."""
NO_MOMENT = -1
"""Kafka's timestamp of a record without one, even if its timestamp type claims one."""
_read_headers = operator.methodcaller("headers")
"""If a name is not valid UTF-8, confluent-kafka 2.16 leaves an exception *and* a list with a hole, and reading the list crashes.
A direct call hides the exception once Python 3.11 has specialised it; this way it is always raised. Never call it twice on such a message.
"""


@dataclass(frozen=True, slots=True)
class PollError:
    """An error in place of a message, with librdkafka's code and text. ``offset``: `None` if unknown."""

    code: int
    text: str
    offset: int | None


@dataclass(frozen=True, slots=True)
class Polled:
    """The result of a poll. ``chunks``: the records below the end of the range; iterate it before the next poll."""

    chunks: Iterable[pa.RecordBatch] = ()
    records: int = 0
    last: int | None = None
    """The offset of the last record; it may lie beyond the end of the range."""
    leader_epoch: int | None = None
    """The leader epoch of the last record below the end."""
    bytes: int = 0
    failures: Sequence[PollError] = ()


class Poller(Protocol):
    """A consumer of one partition at a time, for one thread."""

    def assign(self, partition: TopicPartition, start: int, leader_epoch: int | None) -> None:
        """Switches to this partition and drops the previous one."""

    def unassign(self) -> None:
        """Stops fetching. Polled records stay valid."""

    def poll(self, count: int, end: int) -> Polled:
        """Waits up to `POLL_S` for ``count`` messages. Drops records from ``end`` on. Raises `BrokerUnavailable`."""

    def close(self) -> None: ...


def header_type() -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def chunk_schema() -> pa.Schema:
    """The columns of a chunk. ``millis``: milliseconds since 1970, or `NO_MOMENT`. ``headers``: null for none, and for unreadable ones,
    whose names are not all valid UTF-8; then ``unreadable`` is true."""
    import pyarrow as pa

    return pa.schema(
        [
            ("offset", pa.int64()),
            ("millis", pa.int64()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", header_type()),
            ("unreadable", pa.bool_()),
        ]
    )


def chunk_of(messages: Sequence[Message]) -> pa.RecordBatch:
    """Converts confluent-kafka's messages to a chunk, with ``map``, which calls without a Python frame.

    Call it once for a message, see `_read_headers`.
    """
    import numpy as np
    import pyarrow as pa
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

    both = itertools.chain.from_iterable(map(Message.timestamp, messages))
    kinds, millis = np.fromiter(both, dtype=np.int64, count=2 * len(messages)).reshape(-1, 2).T
    headers, unreadable = _headers(messages)
    arrays = [
        np.fromiter(map(Message.offset, messages), dtype=np.int64, count=len(messages)),
        np.where(kinds == TIMESTAMP_NOT_AVAILABLE, NO_MOMENT, millis),
        pa.array(list(map(Message.key, messages)), pa.binary()),
        pa.array(list(map(Message.value, messages)), pa.binary()),
        pa.array(headers, header_type()) if any(headers) else pa.nulls(len(messages), header_type()),
        unreadable,
    ]
    return pa.RecordBatch.from_arrays([pa.array(each) for each in arrays], schema=chunk_schema())


class MessagePoller:
    """Polls with confluent-kafka, which creates a Python object per message."""

    def __init__(self, settings: KafkaConfig) -> None:
        from confluent_kafka import Consumer

        self._consumer = connected(Consumer, settings)
        self._partition = TopicPartition("", 0)

    def assign(self, partition: TopicPartition, start: int, leader_epoch: int | None) -> None:
        from confluent_kafka import TopicPartition as Wire

        begin = Wire(partition.topic, partition.partition, start)
        if leader_epoch is not None:
            begin = Wire(partition.topic, partition.partition, start, leader_epoch=leader_epoch)
        self._consumer.assign([begin])
        self._partition = partition

    def unassign(self) -> None:
        self._consumer.unassign()

    def poll(self, count: int, end: int) -> Polled:
        from confluent_kafka import KafkaException, Message

        try:
            messages = self._consumer.consume(count, POLL_S)
        except KafkaException as error:
            raise BrokerUnavailable(cause=str(error)) from error
        messages = [message for message in messages if message.topic() is None or self._is_assigned(message)]
        failures = []
        if any(map(Message.error, messages)):
            failed = [(message, failure) for message in messages if (failure := message.error()) is not None]
            failures = [PollError(failure.code(), failure.str(), message.offset()) for message, failure in failed]
            messages = [message for message in messages if message.error() is None]
        last = messages[-1].offset() if messages else None
        if last is not None and last >= end:
            messages = [message for message in messages if (message.offset() or 0) < end]
        if not messages:
            return Polled(last=last, failures=failures)
        size = sum(map(len, messages))
        chunks = map(chunk_of, _bounded(messages) if size > BYTES_A_POLL else [messages])
        return Polled(chunks, len(messages), last, messages[-1].leader_epoch(), size, failures)

    def _is_assigned(self, message: Message) -> bool:
        """False for leftovers of an earlier assignment."""
        return message.partition() == self._partition.partition and message.topic() == self._partition.topic

    def close(self) -> None:
        self._consumer.close()


def _bounded(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Splits the messages into parts of up to `BYTES_A_POLL`, at least one message each. Keeps no reference to yielded parts."""
    remaining = list(reversed(messages))
    del messages
    while remaining:
        part, size = [remaining.pop()], 0
        while remaining and (size := size + len(part[-1])) + len(remaining[-1]) <= BYTES_A_POLL:
            part.append(remaining.pop())
        yield part


def _headers(messages: Sequence[Message]) -> tuple[list[Any], Any]:
    """The headers of each message, `None` for none, and a mask of unreadable ones."""
    import numpy as np

    headers: list[Any] = []
    unreadable = np.zeros(len(messages), dtype=bool)
    remaining = iter(messages)
    while True:
        try:
            for pairs in map(_read_headers, remaining):
                headers.append(pairs or None)
        except (SystemError, UnicodeDecodeError):
            unreadable[len(headers)] = True
            headers.append(None)
        else:
            return headers, unreadable
