"""A failed record as a Kafka message of a retry topic or the failed topic: its own key, value and headers, then Tidemark's headers.

Tidemark's headers are for people and other tools. There are always `COUNT` of them and they come last. Tidemark never trusts them (I7): a
drain strips the last `COUNT` headers (`own_headers`) and reads the facts from Postgres. So forged headers, or the headers of another
consumer's failed topic, change nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tidemark.kafka.producer import Outgoing

T = TypeVar("T")

NAMES = (
    "tidemark.group",
    "tidemark.record",  # its number, for `tidemark retries show`
    "tidemark.retry_number",
    "tidemark.retry_timestamp",  # when it is due; null on the failed topic
    "tidemark.topic",
    "tidemark.partition",
    "tidemark.offset",
    "tidemark.timestamp",  # the record's own; null if it has none
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
YEARS_A_CYCLE, CYCLE_MS = 400, 146_097 * 86_400_000
"""The period of the Gregorian calendar."""


def outgoing(group: str, record: Mapping[str, Any], partitions: int) -> Outgoing:
    """Builds the message for a row of ``failed_record`` (with its topic's name), for a topic with ``partitions`` partitions.

    A record keeps its original partition, modulo ``partitions``, so records of one key stay together and in order.
    """
    own = [(name, None if text is None else base64.b64decode(text)) for name, text in record["headers"]]
    return Outgoing(
        record["hop_topic"],
        record["partition"] % partitions,
        _bytes(record["key"]),
        _bytes(record["value"]),
        own + ours(group, record),
    )


def ours(group: str, record: Mapping[str, Any]) -> list[tuple[str, bytes | None]]:
    """All of Tidemark's headers, in the order of `NAMES`."""
    values = (
        group,
        str(record["failed_record_id"]),
        str(record["retry_number"]),
        _iso(_millis(record["due_at"])),
        record["topic"],
        str(record["partition"]),
        str(record["record_offset"]),
        _iso(record["record_millis"]),
        cut(record["error_type"], TYPE_BYTES),
        cut(record["error_text"], TEXT_BYTES),
    )
    return [(name, None if value is None else value.encode()) for name, value in zip(NAMES, values, strict=True)]


def own_headers(headers: Sequence[T]) -> Sequence[T]:
    """A message's headers without Tidemark's."""
    return headers[:-COUNT]


def cut(text: str, size: int) -> str:
    """Truncates ``text`` to at most ``size`` bytes of UTF-8, ending in an ellipsis if anything was cut."""
    encoded = text.encode()
    return text if len(encoded) <= size else encoded[: size - len("…".encode())].decode(errors="ignore") + "…"


def _bytes(value: memoryview | bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _millis(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - UNIX_EPOCH) // timedelta(milliseconds=1)


def _iso(millis: int | None) -> str | None:
    """Milliseconds since 1970 in ISO 8601. Years before 0 and after 9999 have a sign, as Java's Instant writes them."""
    if millis is None:
        return None
    cycles, rest = divmod(millis, CYCLE_MS)  # Python's years end at 9999, so compute within one period
    moment = UNIX_EPOCH + timedelta(milliseconds=rest)
    year = moment.year + YEARS_A_CYCLE * cycles
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{moment:%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"
