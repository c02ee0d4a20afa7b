"""What a poll of one partition finds, as columns. The poller here goes through confluent-kafka's messages; `compiled` has the fast one.

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
"""Approximate bytes passed on at a time. A worker holds several copies of them on their way into the COPY."""
POLL_S = 0.2
"""How long a poll waits for its last message. Short, because near the end it never comes."""
NO_MOMENT = -1
"""Kafka's timestamp of a record that has none, even if the timestamp type claims one."""
_given_headers = operator.methodcaller("headers")
"""If a name is not valid UTF-8, confluent-kafka 2.16 leaves an exception *and* a list with a hole, and reading the list crashes.
A direct call hides the exception once Python 3.11 has specialised it; this way it is always raised. Never call it twice on such a message.
"""


@dataclass(frozen=True, slots=True)
class PollError:
    """An error that came in place of a message, with librdkafka's code and text. ``offset``: `None` if unknown."""

    code: int
    said: str
    offset: int | None


@dataclass(frozen=True, slots=True)
class Polled:
    """``chunks``: the records below the end of the range. Iterate it before the next poll."""

    chunks: Iterable[pa.RecordBatch] = ()
    records: int = 0
    last: int | None = None
    """The offset of the last record; it may lie beyond the end of the range."""
    leader_epoch: int | None = None
    """Of the last record below the end."""
    bytes: int = 0
    failures: Sequence[PollError] = ()


class Poller(Protocol):
    """A consumer of one partition after the other. Not for several threads."""

    def assign(self, partition: TopicPartition, start: int, leader_epoch: int | None) -> None:
        """Reads this partition from now on, and nothing of the one before."""

    def unassign(self) -> None:
        """Fetches nothing more. What was polled stays valid."""

    def poll(self, count: int, end: int) -> Polled:
        """Waits up to `POLL_S` for ``count`` messages. Drops records from ``end`` on. Raises `BrokerUnavailable`."""

    def close(self) -> None: ...


def header_type() -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def chunk_schema() -> pa.Schema:
    """``millis``: milliseconds since 1970, `NO_MOMENT` for none. ``headers``: null for none, and for those that cannot be read because a
    name is not valid UTF-8; then ``unreadable`` is true."""
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
    """Messages of confluent-kafka as a chunk. Columns are built with ``map`` because it calls without a Python frame.

    Call it once for a message, see `_given_headers`.
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
    """Polls with confluent-kafka, which makes Python objects of messages."""

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
        messages = [each for each in messages if each.topic() is None or self._is_assigned(each)]
        failures = []
        if any(map(Message.error, messages)):
            failures = [
                PollError(failure.code(), failure.str(), each.offset()) for each in messages if (failure := each.error()) is not None
            ]
            messages = [each for each in messages if each.error() is None]
        last = messages[-1].offset() if messages else None
        if last is not None and last >= end:
            messages = [each for each in messages if (each.offset() or 0) < end]
        if not messages:
            return Polled(last=last, failures=failures)
        size = sum(map(len, messages))
        chunks = map(chunk_of, _bounded(messages) if size > BYTES_A_POLL else [messages])
        return Polled(chunks, len(messages), last, messages[-1].leader_epoch(), size, failures)

    def _is_assigned(self, message: Message) -> bool:
        """Not said of a partition that was read before."""
        return message.partition() == self._partition.partition and message.topic() == self._partition.topic

    def close(self) -> None:
        self._consumer.close()


def _bounded(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages, up to `BYTES_A_POLL` of them at a time, at least one. Those that it has passed on can be freed."""
    left = list(reversed(messages))
    del messages
    while left:
        part, size = [left.pop()], 0
        while left and (size := size + len(part[-1])) + len(left[-1]) <= BYTES_A_POLL:
            part.append(left.pop())
        yield part


def _headers(messages: Sequence[Message]) -> tuple[list[Any], Any]:
    """The headers of each message, `None` for none, and which ones cannot be read."""
    import numpy as np

    headers: list[Any] = []
    unreadable = np.zeros(len(messages), dtype=bool)
    left = iter(messages)
    while True:
        try:
            for given in map(_given_headers, left):
                headers.append(given or None)
        except (SystemError, UnicodeDecodeError):
            unreadable[len(headers)] = True
            headers.append(None)
        else:
            return headers, unreadable
