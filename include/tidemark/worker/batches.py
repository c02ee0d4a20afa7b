"""Chunks of Kafka's records as the input of a transform, and the payloads stored for records that are not loaded."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.poll import NO_MOMENT, header_type
from tidemark.kafka.reader import read
from tidemark.records.outcome import Disposition, Reject, reject
from tidemark.records.ranges import Slice
from tidemark.retry.order import Keyed
from tidemark.transform import Fail, NoRow, Record

if TYPE_CHECKING:
    import pyarrow as pa

BUFFER_BYTES = 32 * 1024 * 1024
"""Maximum bytes of a slice's rejected records that are held in memory for the hand-off."""
FIRST_MS, LAST_MS = -210_866_803_200_000, 9_223_372_036_854_775
"""From Postgres' first day (4714-11-24 BC) to the last time in microseconds of 64 bits. Timestamps outside become null."""
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BAD_HEADERS = "a header name is not valid UTF-8: the headers cannot be read and are not kept"


def input_schema() -> pa.Schema:
    """Returns the schema of a transform's input: Kafka's columns, and the lineage columns to pass on."""
    import pyarrow as pa

    return pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", header_type()),
            ("kafka_topic", pa.string()),
            ("kafka_partition", pa.int32()),
            ("kafka_offset", pa.int64()),
        ]
    )


def records(part: Slice, chunk: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Reject]]:
    """Returns a chunk of one partition as a batch of `input_schema`. Records whose headers cannot be read become rejects instead."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rejects = unreadable(chunk)
    if rejects:
        chunk = chunk.filter(pc.invert(chunk["unreadable"]))
    count = chunk.num_rows
    topic = pa.repeat(pa.scalar(part.partition.topic), count)
    partition = pa.repeat(pa.scalar(part.partition.partition, pa.int32()), count)
    offset = chunk["offset"]
    arrays = [topic, partition, offset, _timestamps(chunk), chunk["key"], chunk["value"], chunk["headers"], topic, partition, offset]
    return pa.RecordBatch.from_arrays(arrays, schema=input_schema()), rejects


def unreadable(chunk: pa.RecordBatch) -> list[Reject]:
    """Returns the rejects for records whose headers cannot be read: they cannot be retried unchanged."""
    if chunk["unreadable"].true_count == 0:
        return []
    offsets = chunk["offset"].filter(chunk["unreadable"]).to_pylist()
    return [reject(offset, Disposition.FAIL, BAD_HEADERS, Fail.__name__) for offset in offsets]


def keyed(chunk: pa.RecordBatch) -> Iterator[Keyed]:
    """Offsets and keys, for an order by key."""
    yield from zip(_to_python(chunk["offset"]), _to_python(chunk["key"]), strict=True)


def without_offsets(chunk: pa.RecordBatch, offsets: Collection[int]) -> pa.RecordBatch:
    import pyarrow.compute as pc

    return chunk.filter(pc.invert(_offset_mask(chunk, offsets))) if offsets else chunk


def only(chunk: pa.RecordBatch, offsets: Collection[int]) -> pa.RecordBatch:
    return chunk.filter(_offset_mask(chunk, offsets))


def rows(part: Slice, chunk: pa.RecordBatch) -> Iterator[Record | Unreadable]:
    """Returns the records of a chunk one by one, for a plain function. A `Record` always has a timestamp: 1970 if Kafka has none."""
    topic, partition = part.partition.topic, part.partition.partition
    columns = (_to_python(chunk[name]) for name in ("offset", "key", "value", "unreadable", "millis"))
    for offset, key, value, bad, millis, since, headers in zip(*columns, _since_1970(chunk), _headers(chunk["headers"]), strict=True):
        try:
            timestamp = UNIX_EPOCH + since
        except (OverflowError, TypeError):
            yield Unreadable(offset, key, Fail(f"its timestamp, {millis} ms since 1970, is outside the years 1 to 9999"))
            continue
        if bad:
            yield Unreadable(offset, key, Fail(BAD_HEADERS))
        else:
            yield Record(topic, partition, offset, timestamp, key, value, headers)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of a record that cannot be passed to a plain function."""

    offset: int
    key: bytes | None
    error: NoRow


def without_time(kafka: KafkaConfig, parts: Iterable[Slice]) -> str | None:
    """Returns the first record whose timestamp does not fit microseconds of 64 bits."""
    import pyarrow.compute as pc

    for part in parts:
        for chunk in read(kafka, part.partition, part.start, part.end, part.leader_epoch):
            outside = pc.or_(pc.greater(chunk["millis"], LAST_MS), pc.less(chunk["millis"], -LAST_MS))
            if pc.any(outside).as_py():
                return f"{part.partition} offset {chunk['offset'].filter(outside)[0]}"
    return None


def payloads(kafka: KafkaConfig, part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
    """Reads records of a slice again by their offsets, with everything that a retry needs: the `Payloads` of a commit."""
    return _select(read(kafka, part.partition, min(offsets), max(offsets) + 1, part.leader_epoch), offsets)


class HandOffBuffer:
    """Holds a slice's rejected records for the hand-off: reading the slice again for a few records costs as much as the first time.

    The slice is still read again past `BUFFER_BYTES`, and for records that Postgres refused.
    """

    def __init__(self, kafka: KafkaConfig) -> None:
        self._kafka = kafka
        self._chunks: list[pa.RecordBatch] = []
        self._offsets: set[int] = set()
        self._bytes = 0

    def add(self, chunk: pa.RecordBatch, rejects: Sequence[Reject]) -> None:
        if not rejects or self._bytes > BUFFER_BYTES:
            return
        chosen = only(chunk, [reject.offset for reject in rejects])
        self._bytes += chosen.nbytes
        if self._bytes > BUFFER_BYTES:
            self._chunks.clear()
            self._offsets.clear()
        elif chosen.num_rows:
            self._chunks.append(chosen)
            self._offsets.update(chosen["offset"].to_pylist())

    def payloads(self, part: Slice, offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
        """Like the function `payloads`."""
        if not self._offsets >= set(offsets):
            return payloads(self._kafka, part, offsets)
        return _select(self._chunks, offsets)


def _select(chunks: Iterable[pa.RecordBatch], offsets: Collection[int]) -> Iterator[pa.RecordBatch]:
    import numpy as np

    sorted_offsets = np.sort(np.fromiter(offsets, np.int64, len(offsets)))
    for chunk in chunks:
        start, end = np.searchsorted(sorted_offsets, (chunk["offset"][0].as_py(), chunk["offset"][-1].as_py() + 1))
        if start < end and (chosen := only(chunk, sorted_offsets[start:end])).num_rows:
            yield _payloads(chosen)


def _payloads(chunk: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    headers = [
        json.dumps([[name, None if value is None else base64.b64encode(value).decode()] for name, value in pairs])
        for pairs in _headers(chunk["headers"])
    ]
    arrays = [chunk["offset"], _timestamps(chunk), chunk["key"], chunk["value"], pa.array(headers, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, names=["record_offset", "record_timestamp", "key", "value", "headers"])


def _timestamps(chunk: pa.RecordBatch) -> pa.Array:
    """Returns the records' timestamps; null for a record without one."""
    import numpy as np
    import pyarrow as pa

    millis = chunk["millis"].to_numpy()
    missing = (millis == NO_MOMENT) | (millis < FIRST_MS) | (millis > LAST_MS)
    return pa.array(np.where(missing, 0, millis) * 1000, mask=missing).cast(pa.timestamp("us", "UTC"))


def _since_1970(chunk: pa.RecordBatch) -> list[Any]:
    """Each record's timestamp as a `timedelta`; a number or `None` if no `timedelta` can hold it."""
    import numpy as np

    millis = chunk["millis"].to_numpy()
    deltas: list[Any] = np.where(millis == NO_MOMENT, 0, millis).astype("timedelta64[ms]").tolist()
    return deltas


def _headers(column: pa.Array) -> Iterator[list[tuple[str, bytes | None]]]:
    """Returns the headers of each record; an empty list for none."""
    if column.null_count == len(column):
        return ([] for _ in range(len(column)))
    pairs = list(zip(*map(_to_python, column.flatten().flatten()), strict=True))
    ends = itertools.accumulate(column.value_lengths().fill_null(0).to_pylist(), initial=0)
    return (pairs[start:end] for start, end in itertools.pairwise(ends))


def _offset_mask(chunk: pa.RecordBatch, offsets: Collection[int]) -> pa.Array:
    """Mask of the records with one of these offsets."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(chunk["offset"], pa.array(np.fromiter(offsets, np.int64, len(offsets))))


def _to_python(column: pa.Array) -> list[Any]:
    """Returns the values as Python objects: several times as fast through numpy as with ``to_pylist``. Not for numbers with nulls."""
    values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return values
