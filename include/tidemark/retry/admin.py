"""Operators' access to records that were not loaded: list, count, show, export, discard, edit.

Each action has a row in ``retry_action``: who, when, why, which records, how many. Each call is one transaction. Reads change and lock
nothing. A record is edited in place; its original is kept with the action.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import limit_lock_waits, rows, scalar, single_row, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.offsets.store import require_group
from tidemark.retry.filter import Filter, RecordState, statement
from tidemark.retry.store import lock_out_rewinds
from tidemark.text.problems import check_reason

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = {name: statement(text) for name, text in statements("tidemark.retry", "admin.sql").items()}

Headers = Sequence[tuple[str, bytes | None]]

LOCK_MS = 30_000
"""How long an action waits for the transaction of a relay or a drain."""
EXAMPLES = 10
"""Maximum examples in a `Selection`."""
DISCARDED_FROM = (RecordState.FAILED, RecordState.WAITING, RecordState.HELD)
AT_A_TIME = 200
"""Records per query that reads payloads."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A failed record without its payload. ``due``: it is waiting and its due time has passed."""

    number: int
    state: RecordState
    topic: str
    partition: int
    offset: int
    timestamp: datetime | str | None
    """Postgres' text if Python cannot represent the time."""
    retry_number: int
    due_at: datetime | None
    due: bool | None
    retry_topic: str | None
    retry_partition: int | None
    retry_offset: int | None
    publish_error: str | None
    error_type: str
    error_text: str
    redrives: int
    created_at: datetime
    changed_at: datetime
    value_bytes: int
    failures: int
    """Tries that have failed, over all redrives."""


@dataclass(frozen=True, slots=True)
class Count:
    """Counts the records of one state and error type. ``texts``: number of different error texts; ``example``: the newest text;
    ``refused``: records that the broker rejected."""

    state: RecordState
    error_type: str
    records: int
    texts: int
    first: datetime
    last: datetime
    example: str
    refused: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that a discard would settle, with examples without payloads. ``digest`` identifies exactly these records."""

    records: int
    digest: str
    counts: Sequence[Count]
    examples: Sequence[Summary]


@dataclass(frozen=True, slots=True)
class Payload:
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class Edit:
    """A record's payload before an edit."""

    action_id: int
    by: str
    at: datetime
    reason: str
    was: Payload


@dataclass(frozen=True, slots=True)
class RecordDetails:
    """A failed record with its history. ``tries`` are its earlier tries, ``row`` holds its other columns."""

    number: int
    payload: Payload
    tries: Sequence[Mapping[str, Any]]
    edits: Sequence[Edit]
    redrives: Sequence[Mapping[str, Any]]
    action: Mapping[str, Any] | None
    """The latest operator action on the record."""
    row: Mapping[str, Any]


class NotEditable(Refused):
    """The record's state does not allow an edit: it is being retried, or it is settled."""

    number: int
    state: RecordState

    def __str__(self) -> str:
        reasons = {
            RecordState.WAITING: "it is waiting for its next retry. Edit it once it has failed, or discard it",
            RecordState.HELD: "it is held until an earlier record of its key is settled. Edit it once it has failed, or discard it",
            RecordState.LOADED: "it has been loaded",
            RecordState.SKIPPED: "it has been skipped",
            RecordState.DISCARDED: "it has been discarded. Redrive it first (tidemark redrive plan --state DISCARDED)",
        }
        return f"Record {self.number} cannot be edited: {reasons.get(self.state, self.state)}. Nothing was changed."


class SelectionChanged(Refused):
    """The records that match the filter are no longer those that were shown."""

    group: str

    def __str__(self) -> str:
        fix = "Select the records again, by their numbers or with an end of the time if new ones keep failing."
        return f"The records of {self.group} that match have changed since they were shown. Nothing was discarded. {fix}"


def list_records(connection: Connection, group: str, filter_: Filter, *, limit: int, after: int = 0) -> list[Summary]:
    """Reads the first ``limit`` matching records with numbers above ``after``, in the order of their hand-off."""
    with transaction(connection) as cur:
        cur.execute(SQL["records"], {**condition(cur, group, filter_), "after": after, "limit": limit})
        return [_summary(row) for row in rows(cur)]


def count_records(connection: Connection, group: str, filter_: Filter) -> list[Count]:
    """Counts the matching records by state and error type."""
    with transaction(connection) as cur:
        return _counts(cur, condition(cur, group, filter_))


@dataclass(frozen=True, slots=True)
class Due:
    """Counts records that wait in one tier and come due in one time bucket. ``bucket``: 0 for due records, `None` for held ones."""

    topic: str
    state: RecordState
    bucket: int | None
    records: int
    first: datetime | None
    last: datetime | None


def due_by_tier(connection: Connection, group: str, *, seconds: int, buckets: int) -> list[Due]:
    """Counts waiting records by tier and due time, in ``buckets`` of this many seconds; the last one includes all later records."""
    with transaction(connection) as cur:
        cur.execute(SQL["due_by_tier"], {"group_id": require_group(cur, group), "seconds": seconds, "buckets": buckets})
        return [Due(**{**row, "state": RecordState(row["state"])}) for row in rows(cur)]


def show_record(connection: Connection, group: str, number: int) -> RecordDetails:
    """Reads a record with its history. Raises `BadInput` if the group has no record of this number."""
    with transaction(connection) as cur:
        matches = list(_full_rows(cur, group, Filter(numbers=(number,)), 0, 1))
        if not matches:
            raise _unknown(group, number)
        cur.execute(SQL["edits"], {"number": number})
        edits = [Edit(row["action_id"], row["by"], row["at"], row["reason"], _payload(row)) for row in rows(cur)]
        cur.execute(SQL["redrives"], {"number": number})
        redrives = rows(cur)
        cur.execute(SQL["last_action"], {"number": number})
        action = rows(cur)
    (record,) = matches
    other_columns = {name: value for name, value in record.items() if name not in ("key", "value", "headers", "story")}
    return RecordDetails(number, _payload(record), record["story"], edits, redrives, action[0] if action else None, other_columns)


def export_records(connection: Connection, group: str, filter_: Filter) -> Iterator[dict[str, Any]]:
    """Yields the matching records as JSON values; keys, values and header values are in base64. `parse_edit` parses such a line."""
    after = 0
    while True:
        with transaction(connection) as cur:
            page = _full_rows(cur, group, filter_, after, AT_A_TIME)
        for row in page:
            identity = ("number", "state", "topic", "partition", "offset", "timestamp")
            details = ("error_type", "error_text", "retry_number", "due_at", "redrives", "created_at", "changed_at")
            values = {name: row[name] for name in identity} | payload_json(_payload(row)) | {name: row[name] for name in details}
            yield {**values, "tries": row["story"]}
        if len(page) < AT_A_TIME:
            return
        after = page[-1]["number"]


def select_to_discard(connection: Connection, group: str, filter_: Filter) -> Selection:
    """Returns the matching records that `discard` would settle now. Raises the same errors. Changes and locks nothing."""
    _refuse_all(filter_)
    discardable = replace(filter_, states=tuple(state for state in DISCARDED_FROM if state in (filter_.states or DISCARDED_FROM)))
    if not discardable.states:
        raise BadInput(what="states", found="such records are settled already", fix=f"Choose {', '.join(DISCARDED_FROM)}.")
    with transaction(connection) as cur:
        _require_numbers(cur, group, filter_)
        params = condition(cur, group, discardable)
        cur.execute(SQL["to_discard"], params)
        records, digest = single_row(cur)
        counts = _counts(cur, params)
        cur.execute(SQL["records"], {**params, "after": 0, "limit": EXAMPLES})
        return Selection(records, digest, counts, [_summary(row) for row in rows(cur)])


def discard(connection: Connection, group: str, filter_: Filter, *, reason: str, by: str, only: str | None = None) -> int:
    """Discards matching records that are waiting, held or failed: they are not tried again. Returns their number.

    With ``only``, the digest of a `Selection`, it discards exactly those records, or raises `SelectionChanged`. Then it may be repeated
    when the answer to its COMMIT was lost. Raises `BadInput` for an empty reason, an empty filter, or a number that is not a record of the
    group.
    """
    reason = check_reason(reason)
    _refuse_all(filter_)
    try:
        with transaction(connection) as cur:
            params = condition(cur, group, filter_)
            begin_change(cur, params["group_id"])
            _require_numbers(cur, group, filter_)
            action = add_action(cur, params["group_id"], "DISCARD", filter_, reason, by)
            cur.execute(SQL["discard"], {**params, "action_id": action})
            records, digest = single_row(cur)
            if only not in (None, digest):
                raise SelectionChanged(group=group)
            cur.execute(SQL["count_action"], {"action_id": action, "records": records})
    except SelectionChanged:
        with transaction(connection) as cur:
            cur.execute(SQL["discarded"], {"group_id": params["group_id"], "reason": reason, "by": by, "only": only})
            earlier = cur.fetchone()
        if earlier is None:
            raise
        return int(earlier[0])
    log.info("discarded group=%s records=%s action=%s by=%s", group, records, action, by)
    return int(records)


def edit(
    connection: Connection, group: str, edits: Sequence[tuple[int, Callable[[Payload], Payload]]], *, reason: str, by: str
) -> dict[int, int | None]:
    """Replaces the payloads of failed records, all or none, and keeps the originals. Returns each record's action, `None` if nothing of it
    changed.

    This does not retry the records; a redrive does. Raises `NotEditable` or `BadInput`.
    """
    reason = check_reason(reason)
    with transaction(connection) as cur:
        group_id = require_group(cur, group)
        begin_change(cur, group_id)
        cur.execute(SQL["lock_records"], {"group_id": group_id, "numbers": [number for number, _ in edits]})
        stored = {number: _edit(cur, group, group_id, number, change, reason, by) for number, change in edits}
    for number, action in stored.items():
        if action is not None:
            log.info("edited group=%s record=%s action=%s by=%s", group, number, action, by)
    return stored


def _edit(cur: Cursor, group: str, group_id: int, number: int, change: Callable[[Payload], Payload], reason: str, by: str) -> int | None:
    cur.execute(SQL["original"], {"group_id": group_id, "number": number})
    records = rows(cur)
    if not records:
        raise _unknown(group, number)
    state, original = RecordState(records[0]["state"]), _payload(records[0])
    if state is not RecordState.FAILED and not (state is RecordState.WAITING and records[0]["publish_error"] is not None):
        raise NotEditable(number=number, state=state)
    edited = change(original)
    if edited == original:
        return None
    action = add_action(cur, group_id, "EDIT", Filter(numbers=(number,)), reason, by, records=1)
    cur.execute(SQL["keep_original"], {"action_id": action, "number": number})
    values = {"key": edited.key, "value": edited.value, "headers": json.dumps(headers_json(edited.headers))}
    cur.execute(SQL["edit"], {**values, "action_id": action, "number": number})
    return action


def actions(connection: Connection, group: str, *, limit: int) -> list[dict[str, Any]]:
    """Reads the operators' actions on the group's records, newest first."""
    with transaction(connection) as cur:
        cur.execute(SQL["actions"], {"group_id": require_group(cur, group), "limit": limit})
        return rows(cur)


def parse_edit(line: str) -> tuple[int, Payload]:
    """Parses a record's number and payload from a line written by `export_records`. Raises `BadInput`."""
    try:
        exported = json.loads(line)
        headers = tuple((str(name), _bytes(value)) for name, value in exported["headers"])
        return int(exported["number"]), Payload(_bytes(exported["key"]), _bytes(exported["value"]), headers)
    except (ValueError, KeyError, TypeError) as error:
        fix = 'Write {"number": 7, "key": null, "value": "base64", "headers": [["name", "base64"]]}, as `tidemark retries export` does.'
        raise BadInput(what="record", found=f"this is not a line of an export ({error}): {line[:80]}", fix=fix) from None


def payload_json(payload: Payload) -> dict[str, Any]:
    """Returns the payload as JSON values, as in a line of an export."""
    return {"key": _base64(payload.key), "value": _base64(payload.value), "headers": headers_json(payload.headers)}


def headers_json(headers: Headers) -> list[list[str | None]]:
    """Returns headers as stored in ``failed_record``."""
    return [[name, _base64(value)] for name, value in headers]


# ---- also for redrives


def condition(cur: Cursor, group: str, filter_: Filter) -> dict[str, Any]:
    """Returns the parameters of a statement on the group's matching records. Raises `BadInput` for a group that has never run."""
    return {"group_id": require_group(cur, group), **filter_.parameters(group)}


def add_action(cur: Cursor, group_id: int, kind: str, filter_: Filter, reason: str, by: str, *, records: int = 0) -> int:
    """Stores an action with its user, time and reason. Returns its id."""
    values = {"group_id": group_id, "kind": kind, "reason": reason, "by": by, "records": records}
    cur.execute(SQL["add_action"], {**values, "filter": json.dumps(filter_.as_json())})
    return int(scalar(cur))


def begin_change(cur: Cursor, group_id: int) -> None:
    """Sets the lock timeout and blocks rewinds of the group until the transaction ends, as drains do."""
    limit_lock_waits(cur, LOCK_MS)
    lock_out_rewinds(cur, group_id)


def _summary(row: Mapping[str, Any]) -> Summary:
    return Summary(**{**row, "state": RecordState(row["state"])})


def _counts(cur: Cursor, params: Mapping[str, Any]) -> list[Count]:
    cur.execute(SQL["counts"], params)
    return [Count(**{**row, "state": RecordState(row["state"])}) for row in rows(cur)]


def _refuse_all(filter_: Filter) -> None:
    if not filter_:
        raise BadInput(what="filter", found="it matches every record of the group", fix="Filter by numbers, error, topic or time.")


def _require_numbers(cur: Cursor, group: str, filter_: Filter) -> None:
    """Raises `BadInput` unless each number of the filter is a record of the group."""
    if filter_.numbers:
        params = condition(cur, group, Filter(numbers=filter_.numbers))
        cur.execute(SQL["records"], {**params, "after": 0, "limit": len(filter_.numbers)})
        numbers = {row["number"] for row in rows(cur)}
        for number in filter_.numbers:
            if number not in numbers:
                raise _unknown(group, number)


def _full_rows(cur: Cursor, group: str, filter_: Filter, after: int, limit: int) -> list[dict[str, Any]]:
    cur.execute(SQL["whole"], {**condition(cur, group, filter_), "after": after, "limit": limit})
    return rows(cur)


def _payload(row: Mapping[str, Any]) -> Payload:
    headers = tuple((name, None if text is None else base64.b64decode(text)) for name, text in row["headers"])
    return Payload(_as_bytes(row["key"]), _as_bytes(row["value"]), headers)


def _as_bytes(value: memoryview | bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _base64(value: memoryview | bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _unknown(group: str, number: int) -> BadInput:
    return BadInput(what="record", found=f"group {group} has no failed record {number}", fix="tidemark retries list shows them.")
