"""Consumes a slice of a retry topic: tries its registered messages as the original records.

The transform sees topic, partition, offset, timestamp and headers of the original record, as stored in Postgres. Key and value come from
the message, if they equal the record's byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tidemark.db import session, transaction
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import read
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry.order import Keyed, TurnOrder, held
from tidemark.retry.store import NO_MILLIS, Waiting, read_due
from tidemark.sink.commit import Receipt
from tidemark.sink.retry_commit import Answer, commit_drained, origins, predecessors
from tidemark.sink.target import Target
from tidemark.spec.user_transform import Form
from tidemark.transform import Record
from tidemark.worker.batches import UNIX_EPOCH, Unreadable, input_schema, no_such_time
from tidemark.worker.call_transform import Work, by_record, transform_batch

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Tries:
    """Due records with the keys and values from the logs of their retry topics."""

    records: Waiting
    keys: pa.Array
    values: pa.Array

    def __len__(self) -> int:
        return len(self.records)

    def chosen(self, which: Any) -> Tries:
        """The tries at these indexes."""
        import pyarrow as pa

        if len(which) == len(self):
            return self
        indexes = pa.array(which)
        return Tries(self.records.chosen(which), self.keys.take(indexes), self.values.take(indexes))

    def headers(self) -> list[list[tuple[str, bytes | None]]]:
        """The headers of the original records."""
        stored = self.records.headers
        if not stored:
            return [[] for _ in range(len(self))]
        return [_headers(stored.get(number)) for number in self.records.numbers.tolist()]


def drain_slice(work: Work, part: Slice, *, isolate: bool = False) -> Receipt:
    """Consumes a slice of a retry topic, like `tidemark.worker.slice_worker.SliceWorker` for others. See `commit_drained`."""
    return commit_drained(work.target, part, lambda records: _transform_tries(work, part, records), isolate=isolate)


def read_tries(kafka: KafkaConfig, part: Slice, records: Waiting) -> Iterator[Tries]:
    """Yields the ``records`` that are in the log, poll by poll. Drops all other messages of the slice.

    A message whose payload differs from the record registered at its offset is dropped, too: the log was truncated and has grown again. The
    record is published again from Postgres.
    """
    import numpy as np
    import pyarrow as pa

    retry_offsets = records.message_offsets
    for chunk in read(kafka, part.partition, int(retry_offsets[0]), int(retry_offsets[-1]) + 1):
        offsets = chunk["offset"].to_numpy()
        indexes = np.minimum(np.searchsorted(retry_offsets, offsets), len(retry_offsets) - 1)
        registered = retry_offsets[indexes] == offsets
        same = registered & (records.digests[indexes] == _digests(chunk)).all(axis=1)
        if different := int((registered & ~same).sum()):
            log.warning(
                "messages differ from the records registered at their offsets; the records will be published again partition=%s records=%s",
                part.partition, different,
            )  # fmt: skip
        if not same.all():
            chunk, indexes = chunk.filter(pa.array(same)), indexes[same]
        if len(indexes):
            yield Tries(records.chosen(indexes), chunk["key"], chunk["value"])


def _digests(chunk: pa.RecordBatch) -> Any:
    """The SHA-256 of each key and value as in `Waiting`."""
    import numpy as np

    return np.hstack([_sha256(chunk["key"]), _sha256(chunk["value"])])


def _sha256(column: pa.Array) -> Any:
    import numpy as np

    size, of_null = 32, bytes(32)
    if column.null_count == len(column):
        return np.zeros((len(column), size), np.uint8)
    values = column.to_numpy(zero_copy_only=False).tolist()
    digests = b"".join([of_null if value is None else hashlib.sha256(value).digest() for value in values])
    return np.frombuffer(digests, np.uint8).reshape(-1, size)


def read_all_tries(target: Target, kafka: KafkaConfig, parts: Sequence[Slice]) -> Tries | None:
    """The tries that are due in these slices now; `None` if nothing is due. The commit checks that they still are.

    If records of a topic and of its re-created successor are due, reads only those of the older topic: rows do not tell the two apart.
    """
    import numpy as np
    import pyarrow as pa

    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = {part: read_due(cur, target.group_id, part) for part in parts}
    oldest: dict[str, int] = {}
    for topic_id, topic in sorted(item for records in due.values() for item in records.topics.items()):
        oldest.setdefault(topic, topic_id)
    all_tries: list[Tries] = []
    for part, records in due.items():
        chosen = records.chosen(np.isin(records.topic_ids, [*oldest.values()]))
        if len(chosen):
            all_tries += read_tries(kafka, part, chosen)
    if not all_tries:
        return None
    keys, values = (pa.concat_arrays(getattr(tries, side) for tries in all_tries) for side in ("keys", "values"))
    return Tries(Waiting.joined([tries.records for tries in all_tries]), keys, values)


def batch_of(tries: Tries) -> pa.RecordBatch:
    """The tries as one batch of `input_schema`, possibly of several original partitions."""
    import numpy as np
    import pyarrow as pa

    schema = input_schema()
    records = tries.records
    topic_ids = sorted(records.topics)
    names = pa.array([records.topics[topic_id] for topic_id in topic_ids], pa.string())
    topic = names.take(pa.array(np.searchsorted(topic_ids, records.topic_ids)))
    partition = pa.array(records.partitions.astype(np.int32))
    offset = pa.array(records.offsets)
    missing = records.millis == NO_MILLIS
    micros = pa.array(np.where(missing, 0, records.millis) * 1000, mask=missing)
    header_type = schema.field("headers").type
    if records.headers:
        headers = pa.array([[{"key": name, "value": value} for name, value in pairs] or None for pairs in tries.headers()], header_type)
    else:
        headers = pa.nulls(len(tries), header_type)
    arrays = [
        topic,
        partition,
        offset,
        micros.cast(pa.timestamp("us", "UTC")),
        tries.keys,
        tries.values,
        headers,
        topic,
        partition,
        offset,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _transform_tries(work: Work, part: Slice, records: Waiting) -> Iterator[Answer]:
    orders: dict[tuple[int, TopicPartition], TurnOrder] = {}
    if work.target.max_held is not None:
        for origin, indexes in origins(records).items():
            orders[origin.topic_id, origin.partition] = TurnOrder(predecessors(records, indexes))
    for tries in read_tries(work.kafka, part, records):
        for origin, indexes in origins(tries.records).items():
            own, order = tries.chosen(indexes), orders.get((origin.topic_id, origin.partition))
            if work.form is Form.ARROW:
                output = _batch_of_origin(work, origin, own, order)
            else:
                output = by_record(work, origin, _records(origin, own), order=order)
            yield origin, own.records.offsets, output


def _batch_of_origin(work: Work, origin: Slice, own: Tries, order: TurnOrder | None) -> TransformOutput:
    import numpy as np

    blocked = {} if order is None else order.split(_keyed(own))
    unblocked = own.chosen(np.flatnonzero(~np.isin(own.records.offsets, [*blocked]))) if blocked else own
    output = transform_batch(work, batch_of(unblocked), origin) if len(unblocked) else TransformOutput()
    if order is None:
        return output
    output = order.sift(origin, _keyed(unblocked), output)
    return replace(output, rejects=[*output.rejects, *(held(offset, behind) for offset, behind in blocked.items())])


def _keyed(own: Tries) -> Iterator[Keyed]:
    return zip(own.records.offsets.tolist(), own.keys.to_pylist(), strict=True)


def _records(origin: Slice, own: Tries) -> Iterator[Record | Unreadable]:
    topic, partition = origin.partition.topic, origin.partition.partition
    columns = (own.records.offsets.tolist(), own.records.millis.tolist(), own.keys.to_pylist(), own.values.to_pylist(), own.headers())
    for offset, millis, key, value, headers in zip(*columns, strict=True):
        try:
            timestamp = UNIX_EPOCH + timedelta(milliseconds=0 if millis == NO_MILLIS else millis)
        except OverflowError:
            yield Unreadable(offset, key, no_such_time(millis))
        else:
            yield Record(topic, partition, offset, timestamp, key, value, headers)


def _headers(stored: str | None) -> list[tuple[str, bytes | None]]:
    pairs = json.loads(stored) if stored else []
    return [(name, None if value is None else base64.b64decode(value)) for name, value in pairs]
