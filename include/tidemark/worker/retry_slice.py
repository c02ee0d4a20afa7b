"""Consumes a slice of a retry topic: tries its registered messages as the original records, which the transform cannot tell from others.

The transform sees topic, partition, offset, timestamp and headers of the original record, as stored in Postgres. Key and value come from
the message, if they equal the record's byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.db import session, transaction
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.poll import NO_MOMENT, chunk_schema, header_type
from tidemark.kafka.reader import read
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry.order import TurnOrder
from tidemark.retry.store import NO_MILLIS, Waiting, read_due
from tidemark.sink.commit import Receipt
from tidemark.sink.retry_commit import Answer, commit_drained, origins, predecessors
from tidemark.sink.target import Target
from tidemark.worker.batches import records
from tidemark.worker.call_transform import Work, transform_chunk

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


def drain_slice(work: Work, part: Slice, *, isolate: bool = False) -> Receipt:
    """Consumes a slice of a retry topic, like `tidemark.worker.slice_worker.SliceWorker` for others. See `commit_drained`."""
    return commit_drained(work.target, part, lambda records: _transform_tries(work, part, records), isolate=isolate)


def read_tries(kafka: KafkaConfig, part: Slice, records: Waiting) -> Iterator[tuple[Waiting, pa.RecordBatch]]:
    """Yields the ``records`` that are in the log, poll by poll, each time with a chunk (`tidemark.kafka.poll`) of the original records.

    Drops all other messages of the slice. A message whose payload differs from the record registered at its offset is dropped, too: the log
    was truncated and has grown again. The record is published again from Postgres.
    """
    import numpy as np
    import pyarrow as pa

    retry_offsets = records.message_offsets
    for chunk in read(kafka, part.partition, int(retry_offsets[0]), int(retry_offsets[-1]) + 1):
        offsets = chunk["offset"].to_numpy()
        indexes = np.minimum(np.searchsorted(retry_offsets, offsets), len(retry_offsets) - 1)
        registered = retry_offsets[indexes] == offsets
        same = registered & (records.digests[indexes] == np.hstack([_sha256(chunk["key"]), _sha256(chunk["value"])])).all(axis=1)
        if different := int((registered & ~same).sum()):
            log.warning(
                "messages differ from the records registered at their offsets; the records will be published again partition=%s records=%s",
                part.partition, different,
            )  # fmt: skip
        if not same.all():
            chunk, indexes = chunk.filter(pa.array(same)), indexes[same]
        if len(indexes):
            tried = records.chosen(indexes)
            yield tried, _originals(tried, chunk)


def _originals(records: Waiting, messages: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a chunk of the original records, with the keys and values of their messages."""
    import numpy as np
    import pyarrow as pa

    count = len(records)
    headers = pa.nulls(count, header_type())
    if records.headers:
        headers = pa.array([_headers(records.headers.get(number)) for number in records.numbers.tolist()], header_type())
    millis = np.where(records.millis == NO_MILLIS, NO_MOMENT, records.millis)
    readable = pa.array(np.zeros(count, bool))
    arrays = [pa.array(records.offsets), pa.array(millis), messages["key"], messages["value"], headers, readable]
    return pa.RecordBatch.from_arrays(arrays, schema=chunk_schema())


def by_origin(records: Waiting, chunk: pa.RecordBatch) -> Iterator[tuple[Slice, pa.RecordBatch]]:
    """Splits a chunk of original records, as `read_tries` yields it, by origin."""
    import pyarrow as pa

    for origin, indexes in origins(records).items():
        yield origin, chunk if len(indexes) == len(records) else chunk.take(pa.array(indexes))


def _sha256(column: pa.Array) -> Any:
    """Returns the SHA-256 of each value as in `Waiting`."""
    import numpy as np

    size, of_null = 32, bytes(32)
    if column.null_count == len(column):
        return np.zeros((len(column), size), np.uint8)
    values = column.to_numpy(zero_copy_only=False).tolist()
    digests = b"".join([of_null if value is None else hashlib.sha256(value).digest() for value in values])
    return np.frombuffer(digests, np.uint8).reshape(-1, size)


def read_all_tries(target: Target, kafka: KafkaConfig, parts: Sequence[Slice]) -> tuple[Waiting, pa.RecordBatch] | None:
    """Returns the records that are due in these slices now, with a batch of `input_schema`, or `None` if nothing is due. The commit checks
    that they still are.

    If records of a topic and of its re-created successor are due, reads only those of the older topic: rows do not tell the two apart.
    """
    import numpy as np
    import pyarrow as pa

    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = {part: read_due(cur, target.group_id, part) for part in parts}
    oldest: dict[str, int] = {}
    for topic_id, topic in sorted(item for waiting in due.values() for item in waiting.topics.items()):
        oldest.setdefault(topic, topic_id)
    tried, batches = [], []
    for part, waiting in due.items():
        chosen = waiting.chosen(np.isin(waiting.topic_ids, [*oldest.values()]))
        for of_poll, chunk in read_tries(kafka, part, chosen) if len(chosen) else ():
            tried.append(of_poll)
            batches += [records(origin, own)[0] for origin, own in by_origin(of_poll, chunk)]
    return (Waiting.joined(tried), pa.concat_batches(batches)) if tried else None


def _transform_tries(work: Work, part: Slice, waiting: Waiting) -> Iterator[Answer]:
    orders: dict[tuple[int, TopicPartition], TurnOrder] = {}
    if work.target.max_held is not None:
        for origin, indexes in origins(waiting).items():
            orders[origin.topic_id, origin.partition] = TurnOrder(predecessors(waiting, indexes))
    for tried, chunk in read_tries(work.kafka, part, waiting):
        for origin, own in by_origin(tried, chunk):
            order = orders.get((origin.topic_id, origin.partition))
            yield origin, own["offset"].to_numpy(), transform_chunk(work, origin, own, order)


def _headers(stored: str | None) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers as stored in Postgres; `None` for none."""
    pairs = json.loads(stored) if stored else []
    return [(name, None if value is None else base64.b64decode(value)) for name, value in pairs] or None
