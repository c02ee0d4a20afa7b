"""Reads the latest records of topics, as a sample."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.poll import chunk_schema
from tidemark.kafka.reader import read
from tidemark.records.ranges import Log

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_BACK = 1_000_000
"""Maximum number of offsets of a partition to look back: compaction and transactions leave offsets without records."""
READERS = 8


class TimeUp(BaseException):
    """The time is over. Not an `Exception`, because those of a transform are results of its records."""


def require_time(deadline: float) -> None:
    """Raises `TimeUp` after the deadline, by ``time.monotonic``."""
    if time.monotonic() > deadline:
        raise TimeUp


def latest(kafka: KafkaConfig, logs: Iterable[Log], count: int, deadline: float = math.inf) -> pa.RecordBatch:
    """The last ``count`` committed records of these logs together, oldest first by timestamp. Within a partition, records keep their order.

    A chunk (`tidemark.kafka.poll.chunk_schema`) with additional columns ``topic`` and ``partition``. Raises `TimeUp`.
    """
    import pyarrow as pa

    with ThreadPoolExecutor(READERS) as pool:
        tails = list(pool.map(lambda log: _tail(kafka, log, count, deadline), logs))
    ends = itertools.accumulate((tail.num_rows for tail in tails), initial=0)
    newest_first = (range(end - 1, start - 1, -1) for start, end in itertools.pairwise(ends))
    records = pa.Table.from_batches(tails, latest_schema()).combine_chunks()
    millis = records["millis"].to_pylist()
    chosen = itertools.islice(heapq.merge(*reversed(list(newest_first)), key=lambda at: -millis[at]), count)
    return one_batch(records.take(pa.array(list(chosen)[::-1], pa.int64())))


def latest_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([*chunk_schema(), ("topic", pa.string()), ("partition", pa.int32())])


def one_batch(table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _tail(kafka: KafkaConfig, log: Log, count: int, deadline: float) -> pa.RecordBatch:
    import pyarrow as pa

    tail = pa.Table.from_batches([], chunk_schema())
    width = count
    while log.start < log.end:
        require_time(deadline)
        width = min(width, LOOK_BACK)
        start = max(log.start, log.end - width)
        chunks: collections.deque[pa.RecordBatch] = collections.deque()
        for chunk in read(kafka, log.partition, start, log.end, log.leader_epoch):
            chunks.append(chunk)
            require_time(deadline)
            while sum(chunk.num_rows for chunk in chunks) - chunks[0].num_rows >= count:
                chunks.popleft()
        tail = pa.Table.from_batches(chunks, chunk_schema())
        tail = tail.slice(max(0, tail.num_rows - count))
        if tail.num_rows == count or start == log.start or width == LOOK_BACK:
            break
        width *= 8
    place = (pa.scalar(log.partition.topic), pa.scalar(log.partition.partition, pa.int32()))
    columns = [*tail.columns, *(pa.repeat(value, tail.num_rows) for value in place)]
    return one_batch(pa.Table.from_arrays(columns, schema=latest_schema()))
