"""Exact reads of ``[start, end)`` of one partition, with librdkafka, read_committed, as messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.errors import BrokerUnavailable, Refused
from tidemark.kafka.config import KafkaConfig, connected
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Message

MESSAGES_A_POLL = 10_000
FIRST_POLL = 500
"""The first poll is for fewer: how large the records are is not known yet."""
BYTES_A_POLL = 16 * 1024 * 1024
"""About as many bytes of values are handed on at a time: a worker holds several copies of them on their way into the COPY."""
POLL_S = 0.2
"""`consume` waits this long for the last message it was asked for: short, because near the end it never comes."""
SILENCE_S = 60
"""The broker is given up after this long without a message, an end of partition or an error that ends the read."""

SETTINGS = {
    "group.id": "tidemark",  # librdkafka wants one; it is never joined and never committed to
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": "true",
    "queued.max.messages.kbytes": "65536",
    "fetch.queue.backoff.ms": "10",  # a full queue is looked at again so soon; librdkafka's own second stood still half of the time
    "fetch.message.max.bytes": "8388608",
    "fetch.max.bytes": "67108864",
    "fetch.wait.max.ms": "20",
    "check.crcs": "true",
    "log_level": "0",  # what matters comes as an error event; the rest would be lines from every worker
}


@dataclass(kw_only=True, eq=False)
class RangeGone(Refused):
    """Part of a range that was to be read is no longer in the log."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    partition: TopicPartition
    start: int
    end: int
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.partition}: offsets from {self.start} to {self.end} are not all in the log any more ({self.cause}): retention "
            "passed them while they were being read, the log was truncated, or the topic was re-created. Nothing of this slice was "
            "stored; the next run says what is lost."
        )


@dataclass(kw_only=True, eq=False)
class BatchDamaged(Refused):
    """A record batch in the log cannot be read; ``offset`` is its first one, `None` if the client does not say."""

    kafka_name = "CORRUPT_MESSAGE"
    partition: str
    offset: int | None
    cause: str

    def __str__(self) -> str:
        where = "a record batch" if self.offset is None else f"the record batch that begins at offset {self.offset}"
        return (
            f"{self.partition}: {where} is damaged in the broker's log ({self.cause}). Nothing of this slice was stored. Restore the "
            "batch from another replica, or skip it: `tidemark rewind plan NAME --to-offset` with an offset behind it."
        )


def read(config: KafkaConfig, partition: TopicPartition, start: int, end: int, leader_epoch: int | None = None) -> Iterator[list[Message]]:
    """The committed records of ``[start, end)`` in order, nothing beyond ``end``, in lists of up to `MESSAGES_A_POLL`, `BYTES_A_POLL`.

    ``end`` must not lie beyond the last stable offset. Closes its consumer when exhausted, closed or collected. ``leader_epoch``: one in
    which the log reached up to ``end``; a record that was written later belongs to a log that was truncated since.

    Raises `RangeGone` if the log no longer holds the range, `BatchDamaged`, and `BrokerUnavailable` after `SILENCE_S` without progress.
    """
    from confluent_kafka import Consumer, KafkaException, Message
    from confluent_kafka import TopicPartition as Wire

    consumer = connected(Consumer, {**config, **SETTINGS})
    try:
        begin = Wire(partition.topic, partition.partition, start)
        consumer.assign([begin if leader_epoch is None else Wire(partition.topic, partition.partition, start, leader_epoch=leader_epoch)])
        heard = time.monotonic()
        trouble = "it was silent"
        position, wanted = start, FIRST_POLL
        while True:
            try:
                messages = consumer.consume(min(wanted, end - position), POLL_S)  # no more than are left: it waits for the last one
            except KafkaException as error:
                raise BrokerUnavailable(cause=str(error)) from error
            failures = [message for message in messages if message.error() is not None] if any(map(Message.error, messages)) else []
            records = [message for message in messages if message.error() is None] if failures else messages
            done = bool(records) and (records[-1].offset() or 0) + 1 >= end
            if done:
                records = [message for message in records if (message.offset() or 0) < end]
            for message in failures if not done else ():
                done, said = _read_up_to(message, partition, start, end)
                trouble = said or trouble
                if done:
                    break
            if records:
                if leader_epoch is not None and (epoch := records[-1].leader_epoch() or 0) > leader_epoch:
                    cause = f"it was truncated: offset {records[-1].offset()} is of leader epoch {epoch}, the range of {leader_epoch}"
                    raise RangeGone(partition=partition, start=start, end=end, cause=cause)
                position = min((records[-1].offset() or 0) + 1, end - 1)
                size = sum(map(len, records)) // len(records) + 1
                wanted = max(1, min(MESSAGES_A_POLL, BYTES_A_POLL // size))
                yield from (records[at : at + wanted] for at in range(0, len(records), wanted))
                heard = time.monotonic()  # the caller may take its time: only waiting counts as silence
            if done:
                return
            if time.monotonic() - heard > SILENCE_S:
                raise BrokerUnavailable(cause=f"{partition} gave nothing for {SILENCE_S} s at an offset below {end}: {trouble}")
    finally:
        consumer.close()


def _read_up_to(message: Message, partition: TopicPartition, start: int, end: int) -> tuple[bool, str | None]:
    """Does the client's error mean that everything below ``end`` was read? And its text, if it may pass.

    Raises `RangeGone` or `BatchDamaged`.
    """
    from confluent_kafka import KafkaError

    failure, at = message.error(), message.offset() or 0
    assert failure is not None
    code, said = failure.code(), failure.str()
    if code == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
        return at >= end, None
    if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError.UNKNOWN_TOPIC_OR_PART):  # noqa: SLF001
        raise RangeGone(partition=partition, start=start, end=end, cause=said)
    if code in (KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG):  # noqa: SLF001
        if at < end:
            raise BatchDamaged(partition=str(partition), offset=message.offset(), cause=said)
        return True, None
    return False, said
