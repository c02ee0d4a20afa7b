"""An operator's view of the records that were not loaded, and the actions on them: list, count, show, export, discard, edit.

Each action is one transaction, with a row in ``retry_action``: who, when, why, which records, how many. Reading changes nothing and locks
nothing. A record is edited in place; its original is kept together with the action.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import REWIND_LOCK, rows, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.retry.filter import Filter, RecordState, statement
from tidemark.text.problems import check_reason

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = {name: statement(text) for name, text in statements("tidemark.retry", "admin.sql").items()}

Headers = Sequence[tuple[str, bytes | None]]

LOCK_MS = 30_000
"""How long an action waits for the transaction of a relay or a drain."""
EXAMPLES = 10
"""Records of a `Selection` that are shown."""
DISCARDED_FROM = (RecordState.FAILED, RecordState.WAITING, RecordState.HELD)
AT_A_TIME = 200
"""Records read at a time with their payloads."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A failed record without its payload. ``due``: it is waiting and its due time has passed."""

    number: int
    state: RecordState
    topic: str
    partition: int
    offset: int
    timestamp: datetime | str | None
    """As Postgres' text if Python cannot represent it."""
    retry_number: int
    due_at: datetime | None
    due: bool | None
    hop_topic: str | None
    hop_partition: int | None
    hop_offset: int | None
    publish_error: str | None
    error_type: str
    error_text: str
    redrives: int
    created_at: datetime
    changed_at: datetime
    value_bytes: int


@dataclass(frozen=True, slots=True)
class Count:
    """The records of one state with one error type. ``texts``: the number of different error texts; ``example``: the newest text.
    ``refused``: how many of the records the broker rejected."""

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
    """The records that a discard would settle, and examples without payloads. No other records have this ``digest``."""

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
class Whole:
    """Everything known about a failed record. ``tries`` are its earlier tries, ``row`` holds its other columns."""

    number: int
    payload: Payload
    tries: Sequence[Mapping[str, Any]]
    edits: Sequence[Edit]
    redrives: Sequence[Mapping[str, Any]]
    action: Mapping[str, Any] | None
    """An operator's latest action on it."""
    row: Mapping[str, Any]


@dataclass(kw_only=True, eq=False)
class NotEditable(Refused):
    """The record's state does not allow an edit: it is being retried, or it is settled."""

    number: int
    state: RecordState

    def __str__(self) -> str:
        why = {
            RecordState.WAITING: "it is waiting for its next retry. Edit it once it has failed, or discard it",
            RecordState.HELD: "it is held until an earlier record of its key is settled. Edit it once it has failed, or discard it",
            RecordState.LOADED: "it has been loaded",
            RecordState.SKIPPED: "it has been skipped",
            RecordState.DISCARDED: "it has been discarded. Redrive it first (tidemark redrive plan --state DISCARDED)",
        }
        return f"Record {self.number} cannot be edited: {why.get(self.state, self.state)}. Nothing was changed."


@dataclass(kw_only=True, eq=False)
class SelectionChanged(Refused):
    """Other records match the filter than those that were shown."""

    group: str

    def __str__(self) -> str:
        fix = "Select the records again, by their numbers or with an end of the time if new ones keep failing."
        return f"The records of {self.group} that match have changed since they were shown. Nothing was discarded. {fix}"


def list_records(connection: Connection, group: str, wanted: Filter, *, limit: int, after: int = 0) -> list[Summary]:
    """The first ``limit`` matching records with numbers above ``after``, in the order in which they were handed off."""
    with transaction(connection) as cur:
        cur.execute(SQL["records"], {**_key(cur, group), **wanted.parameters(group), "after": after, "limit": limit})
        return [_summary(row) for row in rows(cur)]


def count_records(connection: Connection, group: str, wanted: Filter) -> list[Count]:
    """Counts the matching records by state and error type."""
    with transaction(connection) as cur:
        return counted(cur, group, wanted)


def counted(cur: Cursor, group: str, wanted: Filter) -> list[Count]:
    """Like `count_records`, in the caller's transaction."""
    cur.execute(SQL["counts"], {**_key(cur, group), **wanted.parameters(group)})
    return [Count(**{**row, "state": RecordState(row["state"])}) for row in rows(cur)]


@dataclass(frozen=True, slots=True)
class Due:
    """Records that wait in one tier and come due in one bucket of time; ``bucket`` is 0 for those that are due, `None` for held ones."""

    topic: str
    state: RecordState
    bucket: int | None
    records: int
    first: datetime | None
    last: datetime | None


def due_by_tier(connection: Connection, group: str, *, seconds: int, buckets: int) -> list[Due]:
    """When what waits comes due, in ``buckets`` of this many seconds; the last one has all later records."""
    with transaction(connection) as cur:
        cur.execute(SQL["due_by_tier"], {**_key(cur, group), "seconds": seconds, "buckets": buckets})
        return [Due(**{**row, "state": RecordState(row["state"])}) for row in rows(cur)]


def show_record(connection: Connection, group: str, number: int) -> Whole:
    """Everything known about a record. Raises `BadInput` if the group has no record of this number."""
    with transaction(connection) as cur:
        found = list(_whole(cur, group, Filter(numbers=(number,)), 0, 1))
        if not found:
            raise _unknown(group, number)
        cur.execute(SQL["edits"], {"number": number})
        edits = [Edit(each["action_id"], each["by"], each["at"], each["reason"], _payload(each)) for each in rows(cur)]
        cur.execute(SQL["redrives"], {"number": number})
        redrives = rows(cur)
        cur.execute(SQL["last_action"], {"number": number})
        action = rows(cur)
    (row,) = found
    rest = {name: value for name, value in row.items() if name not in ("key", "value", "headers", "story")}
    return Whole(number, _payload(row), row["story"], edits, redrives, action[0] if action else None, rest)


def export_records(connection: Connection, group: str, wanted: Filter) -> Iterator[dict[str, Any]]:
    """Yields the matching records as JSON values; key, value and header values are in base64. `parse_edit` reads such a line."""
    after = 0
    while True:
        with transaction(connection) as cur:
            found = _whole(cur, group, wanted, after, AT_A_TIME)
        for row in found:
            plain = ("number", "state", "topic", "partition", "offset", "timestamp")
            more = ("error_type", "error_text", "retry_number", "due_at", "redrives", "created_at", "changed_at")
            values = {name: row[name] for name in plain} | payload_json(_payload(row)) | {name: row[name] for name in more}
            yield {**values, "tries": row["story"]}
        if len(found) < AT_A_TIME:
            return
        after = found[-1]["number"]


def select_to_discard(connection: Connection, group: str, wanted: Filter) -> Selection:
    """The matching records that `discard` would settle now. Raises as `discard` does. Changes and locks nothing."""
    _refuse_all(wanted)
    settled = replace(wanted, states=tuple(state for state in DISCARDED_FROM if state in (wanted.states or DISCARDED_FROM)))
    if not settled.states:
        raise BadInput(what="states", found="such records are settled already", fix=f"Choose {', '.join(DISCARDED_FROM)}.")
    with transaction(connection) as cur:
        key = _key(cur, group)
        _require(cur, group, wanted)
        asked = {**key, **settled.parameters(group)}
        cur.execute(SQL["to_discard"], asked)
        ((records, digest),) = cur.fetchall()
        counts = counted(cur, group, settled)
        cur.execute(SQL["records"], {**asked, "after": 0, "limit": EXAMPLES})
        return Selection(records, digest, counts, [_summary(row) for row in rows(cur)])


def discard(connection: Connection, group: str, wanted: Filter, *, reason: str, by: str, only: str | None = None) -> int:
    """Discards the matching records that are waiting, held or failed, so that they are not tried again. Returns how many.

    With ``only``, the digest of a `Selection`, it discards exactly those records, or raises `SelectionChanged`. Raises `BadInput` for an
    empty reason, an empty filter, or a number that is not a record of the group.
    """
    why = check_reason(reason)
    _refuse_all(wanted)
    with transaction(connection) as cur:
        key = _begin(cur, group)
        _require(cur, group, wanted)
        action = _add_action(cur, key["group_id"], "DISCARD", wanted, why, by)
        cur.execute(SQL["discard"], {**key, **wanted.parameters(group), "action_id": action})
        ((records, digest),) = cur.fetchall()
        if only not in (None, digest):
            raise SelectionChanged(group=group)
        cur.execute(SQL["count_action"], {"action_id": action, "records": records})
    log.info("discarded group=%s records=%s action=%s by=%s", group, records, action, by)
    return int(records)


def edit(connection: Connection, group: str, number: int, change: Callable[[Payload], Payload], *, reason: str, by: str) -> int | None:
    """Replaces the payload of a failed record and keeps the original. Returns the action's id, or `None` if nothing changed.

    This does not retry the record; a redrive does. Raises `NotEditable` or `BadInput`.
    """
    why = check_reason(reason)
    with transaction(connection) as cur:
        key = _begin(cur, group)
        cur.execute(SQL["lock_record"], {**key, "number": number})
        found = rows(cur)
        if not found:
            raise _unknown(group, number)
        state, was = RecordState(found[0]["state"]), _payload(found[0])
        if state is not RecordState.FAILED and not (state is RecordState.WAITING and found[0]["publish_error"] is not None):
            raise NotEditable(number=number, state=state)
        made = change(was)
        if made == was:
            return None
        action = _add_action(cur, key["group_id"], "EDIT", Filter(numbers=(number,)), why, by, records=1)
        cur.execute(SQL["keep_original"], {"action_id": action, "number": number})
        values = {"key": made.key, "value": made.value, "headers": json.dumps(headers_json(made.headers))}
        cur.execute(SQL["edit"], {**values, "action_id": action, "number": number})
    log.info("edited group=%s record=%s action=%s by=%s", group, number, action, by)
    return action


def actions(connection: Connection, group: str, *, limit: int) -> list[dict[str, Any]]:
    """The operators' actions on the group's records, newest first."""
    with transaction(connection) as cur:
        cur.execute(SQL["actions"], {**_key(cur, group), "limit": limit})
        return rows(cur)


def parse_edit(line: str) -> tuple[int, Payload]:
    """Parses a record's number and payload from a line written by `export_records`. Raises `BadInput`."""
    try:
        said = json.loads(line)
        headers = tuple((str(name), _bytes(value)) for name, value in said["headers"])
        return int(said["number"]), Payload(_bytes(said["key"]), _bytes(said["value"]), headers)
    except (ValueError, KeyError, TypeError) as error:
        fix = 'Write {"number": 7, "key": null, "value": "base64", "headers": [["name", "base64"]]}, as `tidemark retries export` does.'
        raise BadInput(what="record", found=f"this is not a line of an export ({error}): {line[:80]}", fix=fix) from None


def payload_json(payload: Payload) -> dict[str, Any]:
    """The payload as JSON values, as in a line of an export."""
    return {"key": _base64(payload.key), "value": _base64(payload.value), "headers": headers_json(payload.headers)}


def headers_json(headers: Headers) -> list[list[str | None]]:
    """Headers as ``failed_record`` has them."""
    return [[name, _base64(value)] for name, value in headers]


# ---- for redrives as well


def group_key(cur: Cursor, group: str) -> dict[str, int]:
    """``group_id`` as a statement parameter. Raises `BadInput` for a group that has never run."""
    return _key(cur, group)


def add_action(cur: Cursor, group_id: int, kind: str, wanted: Filter, reason: str, by: str, *, records: int = 0) -> int:
    """Records who did what, when and why. Returns the id of the row."""
    return _add_action(cur, group_id, kind, wanted, reason, by, records=records)


def _key(cur: Cursor, group: str) -> dict[str, int]:
    cur.execute("SELECT group_id FROM tidemark.consumer_group WHERE name = %s", (group,))
    found = cur.fetchone()
    if found is None:
        raise BadInput(what="group", found=f"no group {group!r} has ever run here", fix="tidemark groups list shows the groups that have.")
    return {"group_id": int(found[0])}


def begin_change(cur: Cursor, group_id: int) -> None:
    """Sets the lock timeout and blocks rewinds of the group until the transaction ends, as drains do."""
    cur.execute("SELECT set_config('lock_timeout', %s, true)", (str(LOCK_MS),))
    cur.execute(SQL["lock_out_rewinds"], {"class": REWIND_LOCK, "group_id": group_id})


def _summary(row: Mapping[str, Any]) -> Summary:
    return Summary(**{**row, "state": RecordState(row["state"])})


def _refuse_all(wanted: Filter) -> None:
    if not wanted:
        raise BadInput(what="filter", found="it matches every record of the group", fix="Filter by numbers, error, topic or time.")


def _begin(cur: Cursor, group: str) -> dict[str, int]:
    key = _key(cur, group)
    begin_change(cur, key["group_id"])
    return key


def _require(cur: Cursor, group: str, wanted: Filter) -> None:
    """Raises `BadInput` unless each number of the filter is a record of the group."""
    if wanted.numbers:
        cur.execute(SQL["records"], {
            **_key(cur, group), **Filter(numbers=wanted.numbers).parameters(group), "after": 0, "limit": len(wanted.numbers),
        })  # fmt: skip
        there = {row["number"] for row in rows(cur)}
        for number in wanted.numbers:
            if number not in there:
                raise _unknown(group, number)


def _add_action(cur: Cursor, group_id: int, kind: str, wanted: Filter, reason: str, by: str, *, records: int = 0) -> int:
    values = {"group_id": group_id, "kind": kind, "reason": reason, "by": by, "records": records}
    cur.execute(SQL["add_action"], {**values, "filter": json.dumps(wanted.as_json())})
    (action,) = cur.fetchone() or (0,)
    return int(action)


def _whole(cur: Cursor, group: str, wanted: Filter, after: int, limit: int) -> list[dict[str, Any]]:
    cur.execute(SQL["whole"], {**_key(cur, group), **wanted.parameters(group), "after": after, "limit": limit})
    return rows(cur)


def _payload(row: Mapping[str, Any]) -> Payload:
    headers = tuple((name, None if text is None else base64.b64decode(text)) for name, text in row["headers"])
    return Payload(_plain(row["key"]), _plain(row["value"]), headers)


def _plain(value: memoryview | bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _base64(value: memoryview | bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _unknown(group: str, number: int) -> BadInput:
    return BadInput(what="record", found=f"group {group} has no failed record {number}", fix="tidemark retries list shows them.")
