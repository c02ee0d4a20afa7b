"""Selects failed records by state, error, origin, key, time, tier or number."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tidemark.errors import BadInput
from tidemark.spec.retry_topics import failed_topic
from tidemark.text.moment import iso
from tidemark.text.storable import INTEGER, require_storable
from tidemark.text.wording import quoted

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class RecordState(StrEnum):
    """The current state of a failed record."""

    WAITING = "WAITING"
    """It waits for its next retry."""
    HELD = "HELD"
    """Not tried yet: an earlier record of its key is waiting."""
    FAILED = "FAILED"
    """Its retries are exhausted, or the consumer has none."""
    LOADED = "LOADED"
    SKIPPED = "SKIPPED"
    DISCARDED = "DISCARDED"
    """An operator has discarded it."""


FAILED_TIER = "failed"


def parse_key(text: str | None, in_hex: str | None) -> bytes | None:
    """Returns a record's key, which is given as text or in hex, or not at all. Raises `BadInput`."""
    if text is not None and in_hex is not None:
        raise BadInput(what="key", found="it is given as text and in hex", fix="Give only one of them.")
    if in_hex is not None:
        try:
            return bytes.fromhex(in_hex)
        except ValueError:
            raise BadInput(what="key", found=f'"{in_hex[:80]}" is not hex', fix="Write two hex digits per byte: 00ff.") from None
    require_storable("key", (text or "").replace("\0", ""))  # a key is bytes, which may have a NUL
    return None if text is None else text.encode()


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects records that match all fields that are set. An empty filter matches every record of the group.

    ``error_text`` is a substring, case-insensitive. Offsets are ``[from_offset, to_offset)``; the time of the first failure is
    ``[since, until)``. ``tier`` is ``5m``, ``now`` or ``failed``. ``refused``: the broker rejected the record.
    """

    numbers: tuple[int, ...] = ()
    states: tuple[RecordState, ...] = ()
    error_type: str | None = None
    error_text: str | None = None
    topic: str | None = None
    partition: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    key: bytes | None = None
    since: datetime | None = None
    until: datetime | None = None
    tier: str | None = None
    refused: bool = False

    def __post_init__(self) -> None:
        require_storable("partition", self.partition, INTEGER)
        for name, value in (
            *(("numbers", number) for number in self.numbers),
            ("from_offset", self.from_offset),
            ("to_offset", self.to_offset),
            ("error", self.error_type),
            ("text", self.error_text),
            ("topic", self.topic),
            ("tier", self.tier),
        ):
            require_storable(name, value)
        for low, high, what in ((self.from_offset, self.to_offset, "offset"), (self.since, self.until, "time")):
            if low is not None and high is not None and not low < high:  # type: ignore[operator]
                raise BadInput(what=what, found=f"nothing lies between {low} and {high}", fix="Write the lower one first.")

    def __bool__(self) -> bool:
        return bool(self.as_json())

    def parameters(self, group: str) -> dict[str, Any]:
        """Returns the parameters of `CONDITION`."""
        tier = None if self.tier is None else failed_topic(group) if self.tier == FAILED_TIER else f"{group}.retry.{self.tier}"
        return {
            "numbers": list(self.numbers) or None,
            "states": [state.value for state in self.states] or None,
            "error_type": self.error_type,
            "error_text": None if self.error_text is None else f"%{_like(self.error_text)}%",
            "topic": self.topic,
            "partition": self.partition,
            "from_offset": self.from_offset,
            "to_offset": self.to_offset,
            "key": self.key,
            "since": self.since,
            "until": self.until,
            "retry_topic": tier,
            "refused": self.refused,
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are set, as JSON values; `from_json` restores the filter."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _json_value(value) for name, value in values.items() if value is not None and value is not False and value != ()}

    @classmethod
    def from_json(cls, stored: Any) -> Filter:
        """Restores a filter written by `as_json`. Raises `BadInput` for anything else, as other roles can write the column."""
        try:
            return _reader().validate_json(json.dumps(stored), strict=True)
        except (ValueError, BadInput):
            fix = "Use the Tidemark version that stored it."
            raise BadInput(what="stored filter", found=quoted(str(stored)), fix=fix) from None

    def __str__(self) -> str:
        values = self.as_json() | ({} if self.key is None else {"key": _key_text(self.key)})
        return ", ".join(f"{name.replace('_', ' ')} {_value_text(value)}".strip() for name, value in values.items()) or "all records"


@functools.cache
def _reader() -> TypeAdapter[Filter]:
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid", val_json_bytes="base64"))(Filter))


CONDITION = """(%(numbers)s::bigint[] IS NULL OR record.failed_record_id = ANY (%(numbers)s::bigint[]))
   AND (%(states)s::text[] IS NULL OR record.state = ANY (%(states)s::text[]))
   AND (%(error_type)s::text IS NULL OR record.error_type = %(error_type)s)
   AND (%(error_text)s::text IS NULL OR record.error_text ILIKE %(error_text)s)
   AND (%(topic)s::text IS NULL OR record.topic_id IN (SELECT topic_id FROM tidemark.topic WHERE name = %(topic)s))
   AND (%(partition)s::integer IS NULL OR record.partition = %(partition)s)
   AND (%(from_offset)s::bigint IS NULL OR record.record_offset >= %(from_offset)s)
   AND (%(to_offset)s::bigint IS NULL OR record.record_offset < %(to_offset)s)
   AND (%(key)s::bytea IS NULL OR record.key = %(key)s)
   AND (%(since)s::timestamptz IS NULL OR record.created_at >= %(since)s)
   AND (%(until)s::timestamptz IS NULL OR record.created_at < %(until)s)
   AND (%(retry_topic)s::text IS NULL OR record.retry_topic = %(retry_topic)s)
   AND (NOT %(refused)s::boolean OR record.publish_error IS NOT NULL)"""
"""The filter in SQL, on a row ``record`` of ``failed_record``. Replaces ``{where}`` in a statement."""


def statement(text: str) -> str:
    """Fills the filter's condition into a statement."""
    return text.replace("{where}", CONDITION)


def _like(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_json_value(each) for each in value] if isinstance(value, tuple) else value


def _key_text(key: bytes) -> str:
    """Formats a key as text if printable, otherwise in hex."""
    text = key.decode(errors="replace")
    return f'"{text}"' if text.isprintable() and "\ufffd" not in text else f"0x{key.hex()}"


def _value_text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " or ".join(map(str, value[:5])) + (f" or {len(value) - 5} more" if len(value) > 5 else "")
    return "" if value is True else str(value)
