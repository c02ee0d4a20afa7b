"""``tidemark retries``: shows, retries and settles records that were not loaded, and manages their topics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemark.cli.common import (
    Name,
    Output,
    OutputFormat,
    Reason,
    json_value,
    minute,
    option_of,
    plain_table,
    print_json,
    print_lines,
    print_note,
    print_raw,
    print_text,
    stdout,
    who,
    with_options,
)
from tidemark.cli.consume import print_result, run_with_progress
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.connections import from_env, kafka_config, registry_config
from tidemark.db import Connection
from tidemark.profiles import Profile
from tidemark.retry import admin
from tidemark.retry.admin import Payload, RecordDetails, parse_edit, payload_json
from tidemark.retry.filter import Filter, RecordState, parse_key
from tidemark.retry.pending import blocked, due
from tidemark.retry.pending import tried as tries_of
from tidemark.retry.relay import relay as publish
from tidemark.retry.topics import ExistingTopic, ensure_topics
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.spec.problem import read_utf8
from tidemark.text.duration import format_duration
from tidemark.text.moment import parse_moment
from tidemark.text.storable import BIGINT, INTEGER
from tidemark.text.wording import one_line
from tidemark.worker.decoding import Shown, decode_for_people

app = typer.Typer(no_args_is_help=True)

FILTER = "Which records (must match all filters)"
TEXT_WIDTH = 1_000
"""Maximum number of characters of a value that `show` prints. `export` prints the whole value."""


class As(StrEnum):
    TEXT = "text"
    HEX = "hex"


Number = Annotated[
    int, typer.Argument(metavar="NUMBER", min=1, max=BIGINT, help="The record's number, as shown by `tidemark retries list`.")
]


_FILTER_OPTIONS = (
    option_of(FILTER, "number", list[int] | None, "Records with this number. Repeatable.", "N", min=1, max=BIGINT),
    option_of(FILTER, "state", list[RecordState] | None, "Records in this state. Repeatable."),
    option_of(FILTER, "error", str | None, "Type of the last error: KeyError.", "TYPE"),
    option_of(FILTER, "text", str | None, "Part of the error's text.", "TEXT"),
    option_of(FILTER, "topic", str | None, "Topic that the record was first read from.", "TOPIC"),
    option_of(FILTER, "partition", int | None, "Partition of that topic.", "N", min=0, max=INTEGER),
    option_of(FILTER, "from_offset", int | None, "First offset, inclusive.", "N", min=0, max=BIGINT),
    option_of(FILTER, "to_offset", int | None, "Last offset, exclusive.", "N", min=0, max=BIGINT),
    option_of(FILTER, "key", str | None, "The record's key as text.", "TEXT"),
    option_of(FILTER, "key_hex", str | None, "The record's key in hex.", "HEX"),
    option_of(FILTER, "since", str | None, "First failed at or after this time: 2026-03-24T14:00:00Z.", "TIME"),
    option_of(FILTER, "until", str | None, "First failed before this time.", "TIME"),
    option_of(FILTER, "tier", str | None, "Retry topic that the record is in or goes to: 5m, now, failed.", "TIER"),
    option_of(FILTER, "refused", bool, "Only records that the broker refused."),
)


def _filter(options: dict[str, Any]) -> Filter:
    """Builds the filter from the values of `_FILTER_OPTIONS`. Raises `BadInput`."""
    key, key_hex, since, until = (options.pop(name) for name in ("key", "key_hex", "since", "until"))
    return Filter(
        numbers=tuple(options.pop("number") or ()),
        states=tuple(options.pop("state") or ()),
        error_type=options.pop("error"),
        error_text=options.pop("text"),
        key=parse_key(key, key_hex),
        since=None if since is None else parse_moment(since),
        until=None if until is None else parse_moment(until),
        **options,
    )


filtered = with_options("record_filter", _FILTER_OPTIONS, _filter)
"""Adds the filter options to a command, which gets the filter as the argument ``record_filter``."""


@contextlib.contextmanager
def _opened(name: str, needs: Profile = Profile.OPERATOR) -> Iterator[tuple[Connection, ConsumerSpec]]:
    """A database session, and the consumer of this name."""
    spec = find_consumer(name)
    with connected("tidemark retries", needs=needs) as connection:
        yield connection, spec


@app.command()
def relay(
    name: Name,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Publish records that were handed off to their retry topic or the failed topic."""
    with _opened(name, Profile.RUNNER) as (connection, spec):
        result = publish(connection, kafka_config(), spec)
    if output is OutputFormat.JSON:
        print_json(result)
    else:
        for topic, records in sorted(result.published.items()):
            print_text(f"{topic}: {records:,} published")
        if result.again:
            print_text(f"{result.again:,} of them again, because their messages were gone")
        if result.refused:
            print_text(f"{result.refused:,} refused by the broker: tidemark retries list {name} --refused")
        if not result.records and not result.refused and not result.blocked:
            print_text(f"{spec.group}: nothing to publish")
    for obstacle in blocked(result, name):
        print_note(obstacle, style="red")
    if result.blocked:
        raise typer.Exit(1)


@app.command()
def drain(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Try the records that are due now, then stop."""
    spec = find_consumer(name)
    print_result(spec.group, run_with_progress(spec, from_env(), drain=True), output)


@app.command()
def topics(
    name: Name,
    create: Annotated[bool, typer.Option("--create", help="Create missing topics.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Check a consumer's retry topics and failed topic. With --create, create missing ones."""
    spec = find_consumer(name)
    existing = ensure_topics(kafka_cluster(), spec, create=create, now=True)
    if output is OutputFormat.JSON:
        print_json([_topic_json(retry_topic) for retry_topic in existing])
        return
    table = plain_table("", "topic", "partitions", "delay", "kept", "")
    for retry_topic in existing:
        values = _topic_json(retry_topic)
        delay = format_duration(values["delay"]) if values["delay"] else "-"
        retention = "permanently" if values["retention_s"] is None else f"{values['retention_s'] / 86_400:.1f} days"
        table.add_row(values["topic"], str(values["partitions"]), delay, retention, "created" if values["created"] else "")
    stdout.print(table)


@app.command("list")
@filtered
def list_(
    name: Name,
    record_filter: Filter,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of records.")] = 50,
    after: Annotated[int, typer.Option(min=0, max=BIGINT, help="Start after this record number, to continue a list.")] = 0,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List records that were not loaded at the first try, in the order in which they failed."""
    with _opened(name) as (connection, spec):
        records = admin.list_records(connection, spec.group, record_filter, limit=limit, after=after)
    if output is OutputFormat.JSON:
        print_json(records)
        return
    lines = []
    for record in records:
        error = f"{record.error_type}: {record.error_text}" if record.publish_error is None else f"not published: {record.publish_error}"
        position = _shortened(f"{record.topic}/{record.partition}@{record.offset}", 26)
        lines.append((str(record.number), record.state.value, str(record.retry_number), position, error))
    print_lines(("number", "state", "retry", "record", "error"), lines, left=(1, 3))
    if len(records) == limit:
        print_note(f"there may be more: --after {records[-1].number}")


@app.command()
@filtered
def count(
    name: Name,
    record_filter: Filter,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Count records by state and error type, with the newest error text of each. Also show how late the consumer's retries are."""
    with _opened(name) as (connection, spec):
        counts = admin.count_records(connection, spec.group, record_filter)
        tries, overdue = tries_of(connection, spec.group), due(connection, spec.group)
    if output is OutputFormat.JSON:
        print_json({"counts": counts, "tried_24h": tries, "due": overdue})
        return
    lines = []
    for row in counts:
        unpublished = f" ({row.refused:,} not published)" if row.refused else ""
        last = f"{row.last.astimezone(UTC):%m-%d %H:%M}"
        text = row.example if row.texts == 1 else f"{row.texts:,} different texts, such as: {row.example}"
        lines.append((row.state.value, f"{row.records:,}", last, f"{row.error_type}{unpublished}: {text}"))
    print_lines(("state", "records", "last (UTC)", "error"), lines, left=(0,))
    if tries is not None:
        lateness = f"{_seconds(tries.median)}, p99 {_seconds(tries.p99)}, longest {_seconds(tries.longest)}"
        print_text(f"tried in the last 24 h: {tries.records:,}; late by: median {lateness}")
    if overdue is not None:
        print_text(f"due now: {overdue.records:,}; the oldest for {_seconds(overdue.oldest)}")


@app.command()
def show(
    name: Name,
    number: Number,
    as_: Annotated[As, typer.Option("--as", help="How to print key and value.")] = As.TEXT,
    original: Annotated[bool, typer.Option("--original", help="Show the record as it was before the first edit.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one record with its payload, headers, tries and edits."""
    with _opened(name) as (connection, spec):
        record = admin.show_record(connection, spec.group, number)
    payload = record.edits[0].was if original and record.edits else record.payload
    decoded = decode_for_people(spec, registry_config(), record.row["topic"], payload)
    if output is OutputFormat.JSON:
        print_json(_record_json(record, payload) | {"decoded": {side: dataclasses.asdict(shown) for side, shown in decoded.items()}})
    else:
        _print_record(record, payload, as_, decoded)


@app.command()
@filtered
def export(
    name: Name,
    record_filter: Filter,
) -> None:
    """Print records as JSON, one per line, with bytes in base64. `edit --from` reads these lines."""
    with _opened(name) as (connection, spec):
        for record in admin.export_records(connection, spec.group, record_filter):
            print_raw(json.dumps(record, default=json_value))


@app.command()
@filtered
def discard(
    name: Name,
    record_filter: Filter,
    reason: Reason,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Settle waiting or failed records without loading them. They are never tried again, and stay in the table."""
    with _opened(name) as (connection, spec):
        records = admin.discard(connection, spec.group, record_filter, reason=reason, by=who())
    if output is OutputFormat.JSON:
        print_json({"discarded": records})
    else:
        print_text(f"{records:,} discarded")


@app.command()
def edit(
    name: Name,
    reason: Reason,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", min=1, max=BIGINT, help="The record; or use --from.")] = None,
    value: Annotated[str | None, typer.Option(help="The new value, as text.")] = None,
    value_file: Annotated[Path | None, typer.Option(help="A file with the new value, byte for byte.", exists=True, dir_okay=False)] = None,
    null_value: Annotated[bool, typer.Option("--null-value", help="Set the value to null (a tombstone).")] = False,
    key: Annotated[str | None, typer.Option(help="The new key, as text.")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A file of edited `export` lines with the new payloads.", exists=True, dir_okay=False)
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Edit failed records. The original is kept. `tidemark redrive` tries them again."""
    values = [option for option in (value, value_file, null_value or None) if option is not None]
    if (number is None) == (from_ is None):
        raise typer.BadParameter("give a record number or --from FILE, not both")
    if len(values) > 1:
        raise typer.BadParameter("give at most one new value")
    changes = bool(values) or key is not None
    if from_ is None and not changes:
        raise typer.BadParameter("give what to change: --value, --value-file, --null-value or --key; or edit all of it with --from")
    if from_ is not None and changes:
        raise typer.BadParameter("--from contains the new payloads; omit the other options")

    def edited(original: Payload) -> Payload:
        payload = original
        if values:
            new_value = None if null_value else value_file.read_bytes() if value_file else (value or "").encode()
            payload = dataclasses.replace(payload, value=new_value)
        return payload if key is None else dataclasses.replace(payload, key=key.encode())

    edits: list[tuple[int, Callable[[Payload], Payload]]]
    if from_ is not None:
        text = read_utf8(from_, what="--from", fix="Name a file of lines that `tidemark retries export` wrote.")
        lines = [line for line in text.split("\n") if line.strip()]  # other line breaks may be part of a text in JSON
        edits = [(record_number, lambda _, payload=payload: payload) for record_number, payload in map(parse_edit, lines)]  # type: ignore[misc]
    else:
        assert number is not None
        edits = [(number, edited)]
    with _opened(name) as (connection, spec):
        stored = admin.edit(connection, spec.group, edits, reason=reason, by=who())
    changed = [record_number for record_number, action in stored.items() if action is not None]
    if output is OutputFormat.JSON:
        print_json({"edited": changed, "actions": [action for action in stored.values() if action is not None]})
    else:
        print_text(f"{len(changed):,} edited, {len(stored) - len(changed):,} unchanged")


@app.command()
def actions(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of actions.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List what operators have done with the consumer's records, newest first."""
    with _opened(name, Profile.READER) as (connection, spec):
        entries = admin.actions(connection, spec.group, limit=limit)
    if output is OutputFormat.JSON:
        print_json(entries)
        return
    lines = []
    for entry in entries:
        subject = f"{Filter.from_json(entry['filter'])}: {entry['reason']}"
        lines.append((minute(entry["at"]), entry["kind"], f"{entry['records']:,}", entry["by"][:14], subject))
    print_lines(("at (UTC)", "what", "records", "by", "filter, reason"), lines, left=(0, 1, 3))


def _topic_json(existing: ExistingTopic) -> dict[str, Any]:
    retention_ms = int(existing.settings["retention.ms"].value)
    return {
        "topic": existing.topic.name,
        "partitions": existing.topic.partitions,
        "delay": existing.retry_topic.delay,
        "retention_s": None if retention_ms < 0 else retention_ms / 1000,
        "created": existing.created,
    }


def _seconds(length: timedelta) -> str:
    return f"{length.total_seconds():,.1f} s"


def _record_json(record: RecordDetails, payload: Payload) -> dict[str, Any]:
    return {
        **record.row,
        **payload_json(payload),
        "tries": record.tries,
        "edits": [
            {"action_id": edit.action_id, "by": edit.by, "at": edit.at, "reason": edit.reason, **payload_json(edit.was)}
            for edit in record.edits
        ],
        "redrives_of_it": record.redrives,
        "last_action": record.action,
    }


def _print_record(record: RecordDetails, payload: Payload, as_: As, decoded: Mapping[str, Shown]) -> None:
    row = record.row
    due = f", due {minute(row['due_at'])} UTC" if row["due_at"] else ""
    retry_topic = "" if row["retry_topic"] is None else f", {row['retry_topic']}"
    retry_place = "" if row["retry_offset"] is None else f"/{row['retry_partition']}@{row['retry_offset']}"
    pairs = [
        ("record", f"{row['topic']}/{row['partition']}@{row['offset']}, {_when(row['timestamp'])}"),
        ("state", f"{row['state']}, retry {row['retry_number']}{due}{retry_topic}{retry_place}"),
        ("failed", f"{_when(row['created_at'])}, changed {_when(row['changed_at'])}"),
        *([("published", f"no: {row['publish_error']}")] if row["publish_error"] else []),
        *([("tried", f"{_when(row['tried_at'])}, {row['tried_late']:,.1f} s late")] if row["tried_at"] else []),
    ]
    if row["emptied_at"]:
        pairs.append(("payload", f"emptied on {_when(row['emptied_at'])}"))
    else:
        pairs += [("key", _bytes_text(payload.key, as_)), ("value", _bytes_text(payload.value, as_))]
        pairs += [(f"{side}, decoded", shown.json or f"not decoded: {shown.problem}") for side, shown in decoded.items()]
        pairs += [(f"header {name}", _bytes_text(value, as_)) for name, value in payload.headers]
    for failure in record.tries:
        pairs.append((f"try {failure['number']}", f"{failure['at'][:19]} {failure['type']}: {failure['text']}"))
    pairs.append((f"try {row['retry_number']}" if row["state"] != "WAITING" else "last", f"{row['error_type']}: {row['error_text']}"))
    pairs += [(f"edit {edit.action_id}", f"{_when(edit.at)} by {edit.by}: {edit.reason}") for edit in record.edits]
    for redrive in record.redrives:
        outcome = f"{redrive['state']} to {redrive['destination']} by {redrive['by']}: {redrive['reason']}"
        pairs.append((f"redrive {redrive['redrive_id']}", outcome))
    if record.action is not None and record.action["kind"] == "DISCARD":
        pairs.append(("discarded", f"{_when(record.action['at'])} by {record.action['by']}: {record.action['reason']}"))
    width = min(20, max(len(label) for label, _ in pairs))
    stdout.print(f"record {record.number}", style="bold", highlight=False)
    for label, text in pairs:
        first, *rest = text.splitlines() or [""]
        print_text(f"  {one_line(label):<{width}} {first}")
        for line in rest:
            print_text(f"  {'':<{width}} {line}")


def _bytes_text(value: bytes | None, as_: As) -> str:
    if value is None:
        return "null"
    if as_ is As.HEX:
        text = value.hex(" ")
    else:
        try:
            text = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in value.decode())
        except UnicodeDecodeError:
            text = f"{len(value):,} bytes, not valid UTF-8 (--as hex)"
    return text if len(text) <= TEXT_WIDTH else f"{text[:TEXT_WIDTH]}… ({len(value):,} bytes)"


def _when(moment: datetime | str | None) -> str:
    if isinstance(moment, str):  # a time beyond Python's range, as Postgres writes it
        return moment
    return "no time" if moment is None else f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(' ', 'seconds')} UTC"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[-width + 1 :]}"
