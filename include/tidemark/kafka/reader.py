"""Reads exactly ``[start, end)`` of one partition with librdkafka, read_committed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemark.errors import BrokerUnavailable, Refused
from tidemark.kafka import compiled
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.failures import NotAllowed
from tidemark.kafka.poll import BYTES_A_POLL, MESSAGES_A_POLL, MessagePoller, Poller, PollError
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_POLL = 16
"""Messages of a topic's first poll, when the size of its records is unknown. At the broker's default limit of 1 MB a batch, they fill
`BYTES_A_POLL`."""
SILENCE_S = 60
"""How long to wait for a message, an end of partition or an error that ends the read."""

Begin = tuple[TopicPartition, int, int | None]
"""Where a range begins: partition, offset, leader epoch."""

SETTINGS = {
    "group.id": "tidemark",  # required by librdkafka; never joined, never committed to
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": "true",
    "queued.max.messages.kbytes": "65536",
    "fetch.queue.backoff.ms": "10",  # time before a full queue is checked again; with librdkafka's default of 1 s it idled half of the time
    "fetch.message.max.bytes": "8388608",
    "fetch.max.bytes": "67108864",
    "fetch.wait.max.ms": "5",  # a request that waits at the log's end delays the next partition's; more requests cost the broker CPU
    "check.crcs": "true",
    "log_level": "0",  # important errors arrive as events; the rest would be noise from every worker
}


class RangeGone(Refused):
    """Part of the range to read is no longer in the log."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    partition: TopicPartition
    start: int
    end: int
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.partition}: offsets from {self.start} to {self.end} are no longer all in the log ({self.cause}). Retention deleted "
            "them during the read, the log was truncated, or the topic was re-created. Nothing of this slice was stored; the next run "
            "reports what is lost."
        )


class BatchDamaged(Refused):
    """A record batch in the log cannot be read. ``offset`` is its first offset, `None` if unknown."""

    kafka_name = "CORRUPT_MESSAGE"
    partition: str
    offset: int | None
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.partition}: {_batch_at(self.offset)} is damaged in the broker's log ({self.cause}). Nothing of this slice was stored. "
            "Restore the batch from another replica, or skip it: `tidemark rewind plan NAME --to-offset` with an offset after it."
        )


class NotDecompressed(Refused):
    """A record batch is intact, but the client does not decompress it. ``offset``: as in `BatchDamaged`."""

    kafka_name = "CORRUPT_MESSAGE"
    partition: str
    offset: int | None
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.partition}: {_batch_at(self.offset)} cannot be decompressed ({self.cause}). Its checksum is right, so it is too large "
            "for the client, or its producer compressed it wrongly. Nothing of this slice was stored. Set receive.message.max.bytes in the "
            "Kafka connection to twice its decompressed size (default: 100000000 bytes), or skip it: `tidemark rewind plan NAME "
            "--to-offset` with an offset after it."
        )


def _batch_at(offset: int | None) -> str:
    return "a record batch" if offset is None else f"the record batch that begins at offset {offset}"


def read(config: KafkaConfig, partition: TopicPartition, start: int, end: int, leader_epoch: int | None = None) -> Iterator[pa.RecordBatch]:
    """Reads one range with a client of its own. See `Reader.read`."""
    with contextlib.closing(Reader(config)) as reader:
        yield from reader.read(partition, start, end, leader_epoch)


class Reader:
    """Reads ranges with one client, because connecting takes longer than reading a small range. For one thread."""

    def __init__(self, config: KafkaConfig) -> None:
        self._settings = {**config, **SETTINGS}
        self._idle: Poller | None = None
        self._ahead: Begin | None = None
        """The range that the idle client already fetches."""
        self._sizes: dict[str, int] = {}
        """Messages per poll, by topic."""

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def read(
        self, partition: TopicPartition, start: int, end: int, leader_epoch: int | None = None, *, then: Begin | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the committed records of ``[start, end)`` in order, in chunks of up to `MESSAGES_A_POLL` records and about `BYTES_A_POLL`.

        A chunk has the columns of `tidemark.kafka.poll.chunk_schema`. ``end`` must not lie beyond the last stable offset. ``leader_epoch``:
        an epoch in which the log reached ``end``; a record of a later epoch shows that the log was truncated since. ``then``: the start of
        the next range, which is fetched as soon as this one has been read. A client is not reused after an unfinished or failed read.

        Raises `RangeGone` if the log no longer holds the range, `BatchDamaged`, `NotDecompressed`, and `BrokerUnavailable` after
        `SILENCE_S` without progress.
        """
        poller, ahead = self._idle or _poller(self._settings), self._ahead
        self._idle = self._ahead = None
        try:
            if ahead != (partition, start, leader_epoch):
                poller.assign(partition, start, leader_epoch)
            yield from _chunks(poller, partition, start, end, leader_epoch, self._sizes)
            if then is not None:
                poller.assign(*then)
        except BaseException:
            poller.close()
            raise
        self._idle, self._ahead = poller, then


def _chunks(
    poller: Poller, partition: TopicPartition, start: int, end: int, leader_epoch: int | None, sizes: dict[str, int]
) -> Iterator[pa.RecordBatch]:
    progress_at = time.monotonic()
    last_error = "no message arrived"
    position = start
    while True:
        poll_size = sizes.get(partition.topic, FIRST_POLL)
        polled = poller.poll(min(poll_size, end - position), end)  # never more than remain: it would wait for them
        done = polled.last is not None and polled.last + 1 >= end
        for failure in polled.failures if not done else ():
            done, error_text = _read_up_to(failure, partition, start, end)
            last_error = error_text or last_error
            if done:
                break
        if done:
            poller.unassign()
        if polled.records:
            assert polled.last is not None
            if leader_epoch is not None and (epoch := polled.leader_epoch or 0) > leader_epoch:
                cause = f"it was truncated: a record up to offset {polled.last} has leader epoch {epoch}, the range has {leader_epoch}"
                raise RangeGone(partition=partition, start=start, end=end, cause=cause)
            position = min(polled.last + 1, end - 1)
            sizes[partition.topic] = max(1, min(MESSAGES_A_POLL, BYTES_A_POLL // (polled.bytes // polled.records + 1)))
            yield from polled.chunks
            progress_at = time.monotonic()  # the caller's own time does not count as silence
        if done:
            return
        if time.monotonic() - progress_at > SILENCE_S:
            raise BrokerUnavailable(cause=f"no progress in {partition} below offset {end} for {SILENCE_S} s: {last_error}")


def _poller(settings: KafkaConfig) -> Poller:
    if (library := compiled.library_for(settings)) is None:
        return MessagePoller(settings)
    return compiled.CompiledPoller(library, settings)


def _read_up_to(failure: PollError, partition: TopicPartition, start: int, end: int) -> tuple[bool, str | None]:
    """Returns whether the client's error means that everything below ``end`` was read, and its text if it may be transient.

    Raises `RangeGone`, `NotAllowed`, `BatchDamaged` or `NotDecompressed`.
    """
    from confluent_kafka import KafkaError

    code, text, at = failure.code, failure.text, failure.offset or 0
    if code == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
        return at >= end, None
    if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError.UNKNOWN_TOPIC_OR_PART):  # noqa: SLF001
        raise RangeGone(partition=partition, start=start, end=end, cause=text)
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise NotAllowed(topics=[partition.topic], operation="READ", servers="Kafka")
    if code in (KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG):  # noqa: SLF001
        if at < end:
            kind = NotDecompressed if code == KafkaError._BAD_COMPRESSION else BatchDamaged  # noqa: SLF001
            raise kind(partition=str(partition), offset=failure.offset, cause=text)
        return True, None
    return False, text
