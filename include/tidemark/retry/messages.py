"""A failed record as a Kafka message of a retry topic or the failed topic: its own key, value and headers, then Tidemark's headers.

Tidemark's headers are for people and other tools. There are always `COUNT` of them, after all others. Tidemark never trusts them (I7): a
drain reads a record's headers and all facts from Postgres. So forged headers, or the headers of another consumer's failed topic, have no
effect.
"""

from __future__ import annotations

import base64
import functools
import json
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tidemark.kafka.producer import Outgoing
from tidemark.spec.retry_topics import FIRST_HEADER

NAMES = (
    FIRST_HEADER,
    "tidemark.record",  # number, for `tidemark retries show`
    "tidemark.retry_number",
    "tidemark.retry_timestamp",  # when it is due; null on the failed topic
    "tidemark.topic",
    "tidemark.partition",
    "tidemark.offset",
    "tidemark.timestamp",  # of the record; null if it has none
    "tidemark.error_type",
    "tidemark.error_text",
)
"""The names of Tidemark's headers, in order. Values are UTF-8: numbers in digits, times in ISO 8601."""
COUNT = len(NAMES)
TYPE_BYTES, TEXT_BYTES = 250, 2_000
"""Size limits of the error headers; Postgres keeps the full error."""
HEADER_BYTES = 4_096
"""Upper bound for the size of Tidemark's headers. A retry topic's max.message.bytes must exceed the source's by this."""
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
YEARS_A_CYCLE, CYCLE_S = 400, 146_097 * 86_400
"""The period of the Gregorian calendar."""


class Row(NamedTuple):
    """A row of ``failed_record`` to publish, with its topic's name."""

    failed_record_id: int
    topic: str
    partition: int
    record_offset: int
    record_millis: int | None
    key: bytes | None
    value: bytes | None
    headers: str | None
    """As stored in the row; `None` without headers."""
    error_type: str
    error_text: str
    retry_number: int
    due_millis: int | None
    retry_topic: str


def partition_of(record: Row, partitions: int) -> int:
    """Returns the record's original partition, modulo ``partitions``, so that records of one key stay together and in order."""
    return record.partition % partitions


def outgoing(group: str, record: Row, partitions: int) -> Outgoing:
    """Builds the message for a record, for a topic with ``partitions`` partitions."""
    own = [(name, None if text is None else base64.b64decode(text)) for name, text in json.loads(record.headers)] if record.headers else []
    return Outgoing(
        record.retry_topic,
        partition_of(record, partitions),
        _bytes(record.key),
        _bytes(record.value),
        own + tidemark_headers(group, record),
    )


def tidemark_headers(group: str, record: Row) -> list[tuple[str, bytes | None]]:
    """Returns Tidemark's headers, in the order of `NAMES`."""
    values = (
        group.encode(),
        b"%d" % record.failed_record_id,
        b"%d" % record.retry_number,
        _iso(record.due_millis),
        record.topic.encode(),
        b"%d" % record.partition,
        b"%d" % record.record_offset,
        _iso(record.record_millis),
        truncate(record.error_type, TYPE_BYTES).encode(),
        truncate(record.error_text, TEXT_BYTES).encode(),
    )
    return list(zip(NAMES, values, strict=True))


def truncate(text: str, size: int) -> str:
    """Truncates ``text`` to at most ``size`` bytes of UTF-8, ending in an ellipsis if it was too long."""
    encoded = text.encode()
    return text if len(encoded) <= size else encoded[: size - len("…".encode())].decode(errors="ignore") + "…"


def _bytes(value: memoryview | bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _iso(millis: int | None) -> bytes | None:
    """Formats milliseconds since 1970 in ISO 8601. Years before 0 and after 9999 have a sign, like Java's Instant."""
    if millis is None:
        return None
    seconds, rest = divmod(millis, 1000)
    return b"%b.%03dZ" % (_iso_second(seconds), rest)


@functools.lru_cache(maxsize=1024)
def _iso_second(seconds: int) -> bytes:
    """Cached: an outbox's records share few seconds, and formatting one takes longer than the rest of a message."""
    cycles, rest = divmod(seconds, CYCLE_S)  # Python's years end at 9999, so compute within one period
    moment = UNIX_EPOCH + timedelta(seconds=rest)
    year = moment.year + YEARS_A_CYCLE * cycles
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{moment:%m-%dT%H:%M:%S}".encode()
