"""A slice of a retry topic: its registered messages, tried as the records that they were.

A message is only the way round. What a transform is told of a record - topic, partition, offset, timestamp, headers - is its origin's, as
Postgres has it; key and value are the message's, if they are byte for byte the record's.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.consume.forms import Work, by_record, called
from tidemark.consume.messages import UNIX_EPOCH, input_schema
from tidemark.db import session, transaction
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import read
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice
from tidemark.retry.order import TurnOrder, held
from tidemark.retry.store import Waiting, read_due
from tidemark.sink.commit import Receipt
from tidemark.sink.drained import Answer, commit_drained, origins
from tidemark.sink.tally import split_output
from tidemark.sink.target import Target
from tidemark.spec.transform import Form
from tidemark.transform import Fail, Record

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Try:
    """A record that was found in the log of its retry topic."""

    record: Waiting
    key: bytes | None
    value: bytes | None

    def offset(self) -> int:
        """As a message's: the origin's."""
        return self.record.offset

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        said = json.loads(self.record.headers) if self.record.headers else []
        return [(name, None if value is None else base64.b64decode(value)) for name, value in said]


def drain_slice(work: Work, part: Slice, *, isolate: bool = False) -> Receipt:
    """As `tidemark.consume.work.consume_slice`, of a slice of a retry topic; see `commit_drained`."""
    return commit_drained(work.target, part, lambda records: _judged(work, part, records), isolate=isolate)


def read_tries(kafka: KafkaConfig, part: Slice, records: Sequence[Waiting]) -> Iterator[list[Try]]:
    """Those of ``records`` that are in the log, a list for each poll. Every other message of the slice is dropped.

    A message that has another payload than the record that is registered at its offset is another record's: the log was truncated, and has
    grown again. It is dropped as well, so that the record is published again from Postgres.
    """
    registered = {record.hop_offset: record for record in records}
    first, last = min(registered), max(registered)
    for messages in read(kafka, part.partition, first, last + 1):
        here = [(record, message) for message in messages if (record := registered.get(message.offset() or 0)) is not None]
        found = [Try(record, key, value) for record, message in here if record.has(key := message.key(), value := message.value())]
        if len(found) < len(here):
            log.warning(
                "messages are not the records that are registered there, which will be published again partition=%s records=%s",
                part.partition, len(here) - len(found),
            )  # fmt: skip
        if found:
            yield found


def read_all_tries(target: Target, kafka: KafkaConfig, parts: Sequence[Slice]) -> list[Try]:
    """What is due in all of these slices, as it is now: the commit says whether it still is.

    Where a topic was created again, and records of both are due, only the older one's are tried: a row does not say which topic it means.
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
    """Tries as a batch of `input_schema`, whatever their origins are."""
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
    orders: dict[Slice, TurnOrder[Try] | None] = {
        origin: None if work.target.max_held is None else TurnOrder() for origin in by_place.values()
    }
    for tries in read_tries(work.kafka, part, records):
        of_origin: dict[Slice, list[Try]] = {}
        for each in tries:
            of_origin.setdefault(by_place[each.record.partition, each.record.topic_id], []).append(each)
        for origin, own in of_origin.items():
            if work.form is Form.ARROW:
                judged = _batch_of_origin(work, origin, own, orders[origin])
            else:
                judged = by_record(work, origin, own, _record, order=orders[origin])
            yield origin, [each.offset() for each in own], judged


def _batch_of_origin(work: Work, origin: Slice, own: Sequence[Try], order: TurnOrder[Try] | None) -> TransformOutput:
    free, blocked = (own, []) if order is None else order.split(own)
    judged = split_output(called(work.function, batch_of(free), origin), origin) if free else TransformOutput(None)
    judged = judged if order is None else order.sift(origin, free, judged)
    return replace(judged, rejects=[*judged.rejects, *(held(each, behind) for each, behind in blocked)])


def _record(part: Slice, each: Try) -> Record:
    millis = each.record.millis
    try:
        timestamp = UNIX_EPOCH if millis is None else UNIX_EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        raise Fail(f"its timestamp, {millis} ms since 1970, is in no year from 1 to 9999") from None
    return Record(part.partition.topic, part.partition.partition, each.record.offset, timestamp, each.key, each.value, each.headers)
