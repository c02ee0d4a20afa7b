"""``tidemark retries``: shows, retries and settles records that were not loaded, and manages their topics."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tidemark.cli.common import (
    Consumers,
    Name,
    Output,
    OutputFormat,
    Reason,
    Transforms,
    connected,
    kafka_cluster,
    minute,
    plain_table,
    print_json,
    print_lines,
    spec_of,
    stderr,
    stdout,
    who,
)
from tidemark.profiles import Profile
from tidemark.text.storable import BIGINT, INTEGER
from tidemark.text.wording import one_line

if TYPE_CHECKING:
    from tidemark.retry.admin import Headers, Payload, RecordDetails
    from tidemark.retry.filter import Filter
    from tidemark.retry.topics import ExistingTopic
    from tidemark.worker.decoding import Shown

app = typer.Typer(help="Show, retry and settle records that were not loaded.", no_args_is_help=True)

FILTER = "Which records (must match all filters)"
TEXT_WIDTH = 1_000
"""Maximum number of characters of a value that `show` prints. `export` prints the whole value."""


class As(StrEnum):
    TEXT = "text"
    HEX = "hex"


class StateName(StrEnum):
    WAITING = "WAITING"
    HELD = "HELD"
    FAILED = "FAILED"
    LOADED = "LOADED"
    SKIPPED = "SKIPPED"
    DISCARDED = "DISCARDED"


Number = Annotated[
    int, typer.Argument(metavar="NUMBER", min=1, max=BIGINT, help="The record's number, as shown by `tidemark retries list`.")
]


def _filter_option(name: str, kind: Any, text: str, metavar: str | None = None, **options: Any) -> inspect.Parameter:
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, metavar=metavar, show_default=False, rich_help_panel=FILTER, **options)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


FILTER_OPTIONS = (
    _filter_option("number", list[int] | None, "Records with this number. Repeatable.", "N", min=1, max=BIGINT),
    _filter_option("state", list[StateName] | None, "Records in this state. Repeatable."),
    _filter_option("error", str | None, "Type of the last error: KeyError.", "TYPE"),
    _filter_option("text", str | None, "Part of the error's text.", "TEXT"),
    _filter_option("topic", str | None, "Topic that the record was first read from.", "TOPIC"),
    _filter_option("partition", int | None, "Partition of that topic.", "N", min=0, max=INTEGER),
    _filter_option("from_offset", int | None, "First offset, inclusive.", "N", min=0, max=BIGINT),
    _filter_option("to_offset", int | None, "Last offset, exclusive.", "N", min=0, max=BIGINT),
    _filter_option("key", str | None, "The record's key as text.", "TEXT"),
    _filter_option("key_hex", str | None, "The record's key in hex.", "HEX"),
    _filter_option("since", str | None, "First failed at or after this time: 2026-03-24T14:00:00Z.", "TIME"),
    _filter_option("until", str | None, "First failed before this time.", "TIME"),
    _filter_option("tier", str | None, "Retry topic that the record is in or goes to: 5m, now, failed.", "TIER"),
    _filter_option("refused", bool, "Only records that the broker refused."),
)
"""The options of `FILTER`."""


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the filter options to a command, which gets the filter as the argument ``record_filter``."""
    hints = get_type_hints(command, localns={"Filter": object}, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "record_filter"
    ]

    @functools.wraps(command)
    def with_filter(**options: Any) -> None:
        command(record_filter=_filter(**{option.name: options.pop(option.name) for option in FILTER_OPTIONS}), **options)

    with_filter.__signature__ = inspect.Signature([*own, *FILTER_OPTIONS])  # type: ignore[attr-defined]  # read by Typer
    with_filter.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *FILTER_OPTIONS)}
    return with_filter


def _filter(
    *,
    number: Sequence[int] | None,
    state: Sequence[StateName] | None,
    error: str | None,
    text: str | None,
    key: str | None,
    key_hex: str | None,
    since: str | None,
    until: str | None,
    **others: Any,
) -> Filter:
    """Builds the filter from the options. Raises `BadInput`."""
    from tidemark.errors import BadInput
    from tidemark.retry.filter import Filter, RecordState
    from tidemark.text.moment import parse_moment

    if key is not None and key_hex is not None:
        raise BadInput(what="key", found="both --key and --key-hex are given", fix="Give only one of them.")
    return Filter(
        numbers=tuple(number or ()),
        states=tuple(RecordState(name.value) for name in state or ()),
        error_type=error,
        error_text=text,
        key=_from_hex(key_hex) if key_hex is not None else None if key is None else key.encode(),
        since=None if since is None else parse_moment(since),
        until=None if until is None else parse_moment(until),
        **others,
    )


@app.command()
def relay(
    name: Name,
    limit: Annotated[int | None, typer.Option(min=1, max=BIGINT, help="Maximum number of records (default: all).")] = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Publish records that were handed off to their retry topic or the failed topic."""
    from tidemark.connections import kafka_config
    from tidemark.retry.pending import blocked
    from tidemark.retry.relay import relay as publish

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.RUNNER) as connection:
        result = publish(connection, kafka_config(), spec, limit=limit)
    if output is OutputFormat.JSON:
        print_json(result)
    else:
        for topic, records in sorted(result.published.items()):
            stdout.print(f"{topic}: {records:,} published", markup=False, highlight=False)
        if result.again:
            stdout.print(f"{result.again:,} of them again, because their messages were gone", highlight=False)
        if result.refused:
            stdout.print(f"{result.refused:,} refused by the broker: tidemark retries list {name} --refused", markup=False, highlight=False)
        if not result.records and not result.refused and not result.blocked:
            stdout.print(f"{spec.group}: nothing to publish", markup=False, highlight=False)
    for obstacle in blocked(result, name):
        stderr.print(obstacle, style="red", markup=False, highlight=False)
    if result.blocked:
        raise typer.Exit(1)


@app.command()
def drain(name: Name, consumers: Consumers = None, transforms: Transforms = None, output: Output = OutputFormat.TABLE) -> None:
    """Try the records that are due now, then stop."""
    from tidemark.cli.consume import consume_once

    consume_once(name, consumers, transforms or [], output, drain=True)


@app.command()
def topics(
    name: Name,
    create: Annotated[bool, typer.Option("--create", help="Create missing topics.")] = False,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Check a consumer's retry topics and failed topic. With --create, create missing ones."""
    from tidemark.retry.topics import ensure_topics

    spec = spec_of(name, consumers)
    existing = ensure_topics(kafka_cluster(), spec, create=create, now=True)
    if output is OutputFormat.JSON:
        print_json([_topic_json(retry_topic) for retry_topic in existing])
        return
    table = plain_table("", "topic", "partitions", "delay", "kept", "")
    for retry_topic in existing:
        values = _topic_json(retry_topic)
        retention = "permanently" if values["retention_s"] is None else _days(values["retention_s"])
        created = "made" if retry_topic.created else ""
        table.add_row(values["topic"], str(values["partitions"]), _delay(retry_topic), retention, created)
    stdout.print(table)


@app.command("list")
@filtered
def list_(
    name: Name,
    record_filter: Filter,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of records.")] = 50,
    after: Annotated[int, typer.Option(min=0, max=BIGINT, help="Start after this record number, to continue a list.")] = 0,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List records that were not loaded at the first try, in the order in which they failed."""
    from tidemark.retry.admin import list_records

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        records = list_records(connection, spec.group, record_filter, limit=limit, after=after)
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
        stderr.print(f"there may be more: --after {records[-1].number}", markup=False, highlight=False)


@app.command()
@filtered
def count(
    name: Name,
    record_filter: Filter,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Count records by state and error type, with the newest error text of each. Also show how late the consumer's retries are."""
    from tidemark.retry.admin import count_records
    from tidemark.retry.pending import due
    from tidemark.retry.pending import tried as tries_of

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        counts = count_records(connection, spec.group, record_filter)
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
        stdout.print(f"tried in the last 24 h: {tries.records:,}; late by: median {lateness}", highlight=False)
    if overdue is not None:
        stdout.print(f"due now: {overdue.records:,}; the oldest for {_seconds(overdue.oldest)}", highlight=False)


@app.command()
def show(
    name: Name,
    number: Number,
    as_: Annotated[As, typer.Option("--as", help="How to print key and value.")] = As.TEXT,
    original: Annotated[bool, typer.Option("--original", help="Show the record as it was before the first edit.")] = False,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one record with its payload, headers, tries and edits."""
    from tidemark.connections import registry_config
    from tidemark.retry.admin import show_record
    from tidemark.worker.decoding import Decoding

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        record = show_record(connection, spec.group, number)
    payload = record.edits[0].was if original and record.edits else record.payload
    decoded = Decoding(spec, registry_config(), lambda: spec.topics).for_people(record.row["topic"], payload)
    if output is OutputFormat.JSON:
        print_json(_record_json(record, payload) | {"decoded": {side: dataclasses.asdict(shown) for side, shown in decoded.items()}})
    else:
        _print_record(record, payload, as_, decoded)


@app.command()
@filtered
def export(
    name: Name,
    record_filter: Filter,
    consumers: Consumers = None,
) -> None:
    """Print records as JSON, one per line, with bytes in base64. `edit --from` reads these lines."""
    from tidemark.cli import common
    from tidemark.retry.admin import export_records

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        for record in export_records(connection, spec.group, record_filter):
            common.print_raw(json.dumps(record, default=common.json_value))


@app.command()
@filtered
def discard(
    name: Name,
    record_filter: Filter,
    reason: Reason,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Settle waiting or failed records without loading them. They are never tried again, and stay in the table."""
    from tidemark.retry.admin import discard as settle

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        records = settle(connection, spec.group, record_filter, reason=reason, by=who())
    if output is OutputFormat.JSON:
        print_json({"discarded": records})
    else:
        stdout.print(f"{records:,} discarded", highlight=False)


@app.command()
def edit(
    name: Name,
    reason: Reason,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", min=1, max=BIGINT, help="The record; or use --from.")] = None,
    value: Annotated[str | None, typer.Option(help="The new value, as text.")] = None,
    value_file: Annotated[Path | None, typer.Option(help="A file with the new value, byte for byte.", exists=True, dir_okay=False)] = None,
    null_value: Annotated[bool, typer.Option("--null-value", help="Set the value to null (a tombstone).")] = False,
    key: Annotated[str | None, typer.Option(help="The new key, as text.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with the new key, byte for byte.", exists=True, dir_okay=False)] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=TEXT", help="Replace all headers. Repeatable.")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A file of edited `export` lines with the new payloads.", exists=True)
    ] = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Edit failed records. The original is kept. `tidemark redrive` tries them again."""
    from tidemark.retry.admin import edit as edit_record
    from tidemark.retry.admin import parse_edit

    values = [option for option in (value, value_file, null_value or None) if option is not None]
    keys = [option for option in (key, key_file) if option is not None]
    if (number is None) == (from_ is None):
        raise typer.BadParameter("give a record number or --from FILE, not both")
    if len(values) > 1 or len(keys) > 1:
        raise typer.BadParameter("give at most one new value and one new key")
    if from_ is None and not (values or keys or header):
        raise typer.BadParameter("give what to change: --value, --value-file, --null-value, --key, --key-file or --header")
    if from_ is not None and (values or keys or header):
        raise typer.BadParameter("--from contains the new payloads; omit the other options")

    def edited(original: Payload) -> Payload:
        payload = original
        if values:
            new_value = None if null_value else value_file.read_bytes() if value_file else (value or "").encode()
            payload = dataclasses.replace(payload, value=new_value)
        if keys:
            payload = dataclasses.replace(payload, key=key_file.read_bytes() if key_file else (key or "").encode())
        if header:
            payload = dataclasses.replace(payload, headers=_headers(header))
        return payload

    edits: list[tuple[int, Callable[[Payload], Payload]]]
    if from_ is not None:
        lines = [line for line in from_.read_text(encoding="utf-8").splitlines() if line.strip()]
        edits = [(record_number, _always(payload)) for record_number, payload in map(parse_edit, lines)]
    else:
        assert number is not None
        edits = [(number, edited)]
    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        stored = {
            record_number: edit_record(connection, spec.group, record_number, change, reason=reason, by=who())
            for record_number, change in edits
        }
    changed = [record_number for record_number, action in stored.items() if action is not None]
    if output is OutputFormat.JSON:
        print_json({"edited": changed, "actions": [action for action in stored.values() if action is not None]})
    else:
        stdout.print(f"{len(changed):,} edited, {len(stored) - len(changed):,} unchanged", highlight=False)


@app.command()
def actions(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of actions.")] = 50,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List what operators have done with the consumer's records, newest first."""
    from tidemark.retry.admin import actions as read
    from tidemark.retry.filter import Filter

    spec = spec_of(name, consumers)
    with connected("tidemark retries") as connection:
        entries = read(connection, spec.group, limit=limit)
    if output is OutputFormat.JSON:
        print_json(entries)
        return
    lines = []
    for entry in entries:
        subject = f"{Filter.from_json(entry['filter'])}: {entry['reason']}"
        lines.append((minute(entry["at"]), entry["kind"], f"{entry['records']:,}", entry["by"][:14], subject))
    print_lines(("at (UTC)", "what", "records", "by", "filter, reason"), lines, left=(0, 1, 3))


# ---- shared with `redrive`


def _always(payload: Payload) -> Callable[[Payload], Payload]:
    return lambda _: payload


def _headers(options: Sequence[str]) -> Headers:
    headers = []
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=TEXT")
        headers.append((name, text.encode()))
    return tuple(headers)


def _from_hex(text: str) -> bytes:
    from tidemark.errors import BadInput

    try:
        return bytes.fromhex(text)
    except ValueError:
        raise BadInput(what="key", found=f'"{text[:80]}" is not hex', fix="Write two hex digits per byte: 00ff.") from None


def _topic_json(existing: ExistingTopic) -> dict[str, Any]:
    retention_ms = int(existing.settings["retention.ms"].value)
    return {
        "topic": existing.topic.name,
        "partitions": existing.topic.partitions,
        "delay": existing.retry_topic.delay,
        "retention_s": None if retention_ms < 0 else retention_ms / 1000,
        "made": existing.created,
    }


def _delay(existing: ExistingTopic) -> str:
    from tidemark.text.duration import format_duration

    return "-" if not existing.retry_topic.delay else format_duration(existing.retry_topic.delay)


def _seconds(length: timedelta) -> str:
    return f"{length.total_seconds():,.1f} s"


def _days(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} days"


def _record_json(record: RecordDetails, payload: Payload) -> dict[str, Any]:
    from tidemark.retry.admin import payload_json

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
        stdout.print(f"  {one_line(label):<{width}} {first}", markup=False, highlight=False)
        for line in rest:
            stdout.print(f"  {'':<{width}} {line}", markup=False, highlight=False)


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
