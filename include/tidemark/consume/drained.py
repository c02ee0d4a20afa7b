"""Consumes a slice of a retry topic: its registered messages are tried as the original records.

The transform sees topic, partition, offset, timestamp and headers of the original record, as stored in Postgres. Key and value come from
the message, provided that they equal the record's byte for byte.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.consume.forms import Work, by_record, judged_batch
from tidemark.consume.messages import UNIX_EPOCH, Unreadable, input_schema, no_such_time, only
from tidemark.db import session, transaction
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import read
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice
from tidemark.retry.order import Keyed, TurnOrder, held
from tidemark.retry.store import Waiting, read_due
from tidemark.sink.commit import Receipt
from tidemark.sink.drained import Answer, commit_drained, origins
from tidemark.sink.target import Target
from tidemark.spec.transform import Form
from tidemark.transform import Record

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Try:
    """A record whose message was found in the log of its retry topic."""

    record: Waiting
    key: bytes | None
    value: bytes | None

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        said = json.loads(self.record.headers) if self.record.headers else []
        return [(name, None if value is None else base64.b64decode(value)) for name, value in said]


def drain_slice(work: Work, part: Slice, *, isolate: bool = False) -> Receipt:
    """Does what `tidemark.consume.work.consume_slice` does, for a slice of a retry topic. See `commit_drained`."""
    return commit_drained(work.target, part, lambda records: _judged(work, part, records), isolate=isolate)


def read_tries(kafka: KafkaConfig, part: Slice, records: Sequence[Waiting]) -> Iterator[list[Try]]:
    """Yields those of ``records`` that are in the log, one list per poll. All other messages of the slice are dropped.

    If a message's payload differs from the record registered at its offset, the log was truncated and has grown again. Such a message is
    dropped as well, and the record is published again from Postgres.
    """
    registered = {record.hop_offset: record for record in records}
    first, last = min(registered), max(registered)
    for chunk in read(kafka, part.partition, first, last + 1):
        here = only(chunk, registered).select(["offset", "key", "value"]).to_pylist()
        tries = [Try(registered[one["offset"]], one["key"], one["value"]) for one in here]
        found = [each for each in tries if each.record.has(each.key, each.value)]
        if len(found) < len(here):
            log.warning(
                "messages differ from the records registered at their offsets; the records will be published again partition=%s records=%s",
                part.partition, len(here) - len(found),
            )  # fmt: skip
        if found:
            yield found


def read_all_tries(target: Target, kafka: KafkaConfig, parts: Sequence[Slice]) -> list[Try]:
    """What is due in these slices now. The commit checks whether it still is.

    If a topic was created again and records of both are due, only those of the older topic are tried: a row does not tell the two apart.
    """
    with session(target.database_url, application=target.application) as connection, transaction(connection) as cur:
        due = {part: read_due(cur, target.group_id, part) for part in parts}
    oldest: dict[str, int] = {}
    for record in (record for records in due.values() for record in records):
        topic = record.partition.topic
        oldest[topic] = min(oldest.get(topic, record.topic_id), record.topic_id)
    found = []
    for part, records in due.items():
        chosen = [record for record in records if record.topic_id == oldest[record.partition.topic]]
        if chosen:
            found += [each for tries in read_tries(kafka, part, chosen) for each in tries]
    return found


def batch_of(tries: Sequence[Try]) -> pa.RecordBatch:
    """The tries as one batch of `input_schema`, possibly of several original partitions."""
    import pyarrow as pa

    schema = input_schema()
    records = [each.record for each in tries]
    topic = pa.array([record.partition.topic for record in records], pa.string())
    partition = pa.array([record.partition.partition for record in records], pa.int32())
    offset = pa.array([record.offset for record in records], pa.int64())
    micros = pa.array([None if record.millis is None else record.millis * 1000 for record in records], pa.int64())
    headers = [[{"key": name, "value": value} for name, value in each.headers] or None for each in tries]
    arrays = [
        topic,
        partition,
        offset,
        micros.cast(pa.timestamp("us", "UTC")),
        pa.array([each.key for each in tries], pa.binary()),
        pa.array([each.value for each in tries], pa.binary()),
        pa.array(headers, schema.field("headers").type),
        topic,
        partition,
        offset,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _judged(work: Work, part: Slice, records: Sequence[Waiting]) -> Iterator[Answer]:
    by_place = {(origin.partition, origin.topic_id): origin for origin in origins(records)}
    before: dict[Slice, dict[int, int | None]] = {origin: {} for origin in by_place.values()}
    for record in records:
        before[by_place[record.partition, record.topic_id]][record.offset] = record.before
    orders = {origin: None if work.target.max_held is None else TurnOrder(of) for origin, of in before.items()}
    for tries in read_tries(work.kafka, part, records):
        of_origin: dict[Slice, list[Try]] = {}
        for each in tries:
            of_origin.setdefault(by_place[each.record.partition, each.record.topic_id], []).append(each)
        for origin, own in of_origin.items():
            if work.form is Form.ARROW:
                judged = _batch_of_origin(work, origin, own, orders[origin])
            else:
                judged = by_record(work, origin, map(_record, own), order=orders[origin])
            yield origin, [each.record.offset for each in own], judged


def _batch_of_origin(work: Work, origin: Slice, own: Sequence[Try], order: TurnOrder | None) -> TransformOutput:
    blocked = {} if order is None else order.split(map(_keyed, own))
    free = [each for each in own if each.record.offset not in blocked]
    judged = judged_batch(work, batch_of(free), origin) if free else TransformOutput()
    judged = judged if order is None else order.sift(origin, map(_keyed, free), judged)
    return replace(judged, rejects=[*judged.rejects, *(held(offset, behind) for offset, behind in blocked.items())])


def _keyed(each: Try) -> Keyed:
    return each.record.offset, each.key


def _record(each: Try) -> Record | Unreadable:
    record, millis = each.record, each.record.millis
    try:
        timestamp = UNIX_EPOCH + timedelta(milliseconds=millis or 0)
    except OverflowError:
        return Unreadable(record.offset, each.key, no_such_time(millis or 0))
    return Record(record.partition.topic, record.partition.partition, record.offset, timestamp, each.key, each.value, each.headers)
