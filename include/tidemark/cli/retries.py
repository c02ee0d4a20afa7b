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
    from tidemark.retry.admin import Headers, Payload, Whole
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


def _asked(name: str, kind: Any, what: str, metavar: str | None = None, **options: Any) -> inspect.Parameter:
    flag = typer.Option(f"--{name.replace('_', '-')}", help=what, metavar=metavar, show_default=False, rich_help_panel=FILTER, **options)
    nothing = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=nothing, annotation=Annotated[kind, flag])


ASKED = (
    _asked("number", list[int] | None, "Records with this number. Repeatable.", "N", min=1, max=BIGINT),
    _asked("state", list[StateName] | None, "Records in this state. Repeatable."),
    _asked("error", str | None, "Type of the last error: KeyError.", "TYPE"),
    _asked("text", str | None, "Part of the error's text.", "TEXT"),
    _asked("topic", str | None, "Topic that the record was first read from.", "TOPIC"),
    _asked("partition", int | None, "Partition of that topic.", "N", min=0, max=INTEGER),
    _asked("from_offset", int | None, "First offset, inclusive.", "N", min=0, max=BIGINT),
    _asked("to_offset", int | None, "Last offset, exclusive.", "N", min=0, max=BIGINT),
    _asked("key", str | None, "The record's key as text.", "TEXT"),
    _asked("key_hex", str | None, "The record's key in hex.", "HEX"),
    _asked("since", str | None, "First failed at or after this time: 2026-03-24T14:00:00Z.", "TIME"),
    _asked("until", str | None, "First failed before this time.", "TIME"),
    _asked("tier", str | None, "Retry topic that the record is in or goes to: 5m, now, failed.", "TIER"),
    _asked("refused", bool, "Only records that the broker refused."),
)
"""The options of `FILTER`."""


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the filter options to a command, which gets them as the argument ``wanted``."""
    hints = get_type_hints(command, localns={"Filter": object}, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.name != "wanted"
    ]

    @functools.wraps(command)
    def asked(**options: Any) -> None:
        command(wanted=_filter(**{one.name: options.pop(one.name) for one in ASKED}), **options)

    asked.__signature__ = inspect.Signature([*own, *ASKED])  # type: ignore[attr-defined]  # read by Typer
    asked.__annotations__ = {each.name: each.annotation for each in (*own, *ASKED)}
    return asked


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
    **same: Any,
) -> Filter:
    """Builds the filter from the options. Raises `BadInput`."""
    from tidemark.errors import BadInput
    from tidemark.retry.filter import Filter, RecordState
    from tidemark.text.moment import parse_moment

    if key is not None and key_hex is not None:
        raise BadInput(what="key", found="both --key and --key-hex are given", fix="Give only one of them.")
    return Filter(
        numbers=tuple(number or ()),
        states=tuple(RecordState(one.value) for one in state or ()),
        error_type=error,
        error_text=text,
        key=_from_hex(key_hex) if key_hex is not None else None if key is None else key.encode(),
        since=None if since is None else parse_moment(since),
        until=None if until is None else parse_moment(until),
        **same,
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
        done = publish(connection, kafka_config(), spec, limit=limit)
    if output is OutputFormat.JSON:
        print_json(done)
    else:
        for topic, records in sorted(done.published.items()):
            stdout.print(f"{topic}: {records:,} published", markup=False, highlight=False)
        if done.again:
            stdout.print(f"{done.again:,} of them again, because their messages were gone", highlight=False)
        if done.refused:
            stdout.print(f"{done.refused:,} refused by the broker: tidemark retries list {name} --refused", markup=False, highlight=False)
        if not done.records and not done.refused and not done.blocked:
            stdout.print(f"{spec.group}: nothing to publish", markup=False, highlight=False)
    for text in blocked(done, name):
        stderr.print(text, style="red", markup=False, highlight=False)
    if done.blocked:
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
    found = ensure_topics(kafka_cluster(), spec, create=create, now=True)
    if output is OutputFormat.JSON:
        print_json([_topic_json(one) for one in found])
        return
    table = plain_table("", "topic", "partitions", "delay", "kept", "")
    for one in found:
        values = _topic_json(one)
        kept = "permanently" if values["retention_s"] is None else _length(values["retention_s"])
        table.add_row(one.topic.name, str(one.topic.partitions), _delay(one), kept, "made" if one.made else "")
    stdout.print(table)


@app.command("list")
@filtered
def list_(
    name: Name,
    wanted: Filter,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of records.")] = 50,
    after: Annotated[int, typer.Option(min=0, max=BIGINT, help="Start after this record number, to continue a list.")] = 0,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List records that were not loaded at the first try, in the order in which they failed."""
    from tidemark.retry.admin import list_records

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        found = list_records(connection, spec.group, wanted, limit=limit, after=after)
    if output is OutputFormat.JSON:
        print_json(found)
        return
    lines = []
    for one in found:
        said = f"{one.error_type}: {one.error_text}" if one.publish_error is None else f"not published: {one.publish_error}"
        where = _tail(f"{one.topic}/{one.partition}@{one.offset}", 26)
        lines.append((str(one.number), one.state.value, str(one.retry_number), where, said))
    print_lines(("number", "state", "retry", "record", "error"), lines, left=(1, 3))
    if len(found) == limit:
        stderr.print(f"there may be more: --after {found[-1].number}", markup=False, highlight=False)


@app.command()
@filtered
def count(
    name: Name,
    wanted: Filter,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Count records by state and error type, with the newest error text of each. Also show how late the consumer's retries are."""
    from tidemark.retry.admin import count_records
    from tidemark.retry.pending import due
    from tidemark.retry.pending import tried as tries_of

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        found = count_records(connection, spec.group, wanted)
        tried, waits = tries_of(connection, spec.group), due(connection, spec.group)
    if output is OutputFormat.JSON:
        print_json({"counts": found, "tried_24h": tried, "due": waits})
        return
    lines = []
    for one in found:
        stuck = f" ({one.refused:,} not published)" if one.refused else ""
        last = f"{one.last.astimezone(UTC):%m-%d %H:%M}"
        said = one.example if one.texts == 1 else f"{one.texts:,} different texts, such as: {one.example}"
        lines.append((one.state.value, f"{one.records:,}", last, f"{one.error_type}{stuck}: {said}"))
    print_lines(("state", "records", "last (UTC)", "error"), lines, left=(0,))
    if tried is not None:
        late = f"{_seconds(tried.median)}, p99 {_seconds(tried.p99)}, longest {_seconds(tried.longest)}"
        stdout.print(f"tried in the last 24 h: {tried.records:,}; late by: median {late}", highlight=False)
    if waits is not None:
        stdout.print(f"due now: {waits.records:,}; the oldest for {_seconds(waits.oldest)}", highlight=False)


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
        found = show_record(connection, spec.group, number)
    payload = found.edits[0].was if original and found.edits else found.payload
    decoded = Decoding(spec, registry_config(), lambda: spec.topics).for_people(found.row["topic"], payload)
    if output is OutputFormat.JSON:
        print_json(_whole_json(found, payload) | {"decoded": {side: dataclasses.asdict(shown) for side, shown in decoded.items()}})
    else:
        _print_whole(found, payload, as_, decoded)


@app.command()
@filtered
def export(
    name: Name,
    wanted: Filter,
    consumers: Consumers = None,
) -> None:
    """Print records as JSON, one per line, with bytes in base64. `edit --from` reads these lines."""
    from tidemark.cli import common
    from tidemark.retry.admin import export_records

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        for record in export_records(connection, spec.group, wanted):
            common.print_raw(json.dumps(record, default=common.json_value))


@app.command()
@filtered
def discard(
    name: Name,
    wanted: Filter,
    reason: Reason,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Settle waiting or failed records without loading them. They are never tried again, and stay in the table."""
    from tidemark.retry.admin import discard as settle

    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        records = settle(connection, spec.group, wanted, reason=reason, by=who())
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
    from tidemark.retry.admin import edit as change
    from tidemark.retry.admin import parse_edit

    values = [one for one in (value, value_file, null_value or None) if one is not None]
    keys = [one for one in (key, key_file) if one is not None]
    if (number is None) == (from_ is None):
        raise typer.BadParameter("give a record number or --from FILE, not both")
    if len(values) > 1 or len(keys) > 1:
        raise typer.BadParameter("give at most one new value and one new key")
    if from_ is None and not (values or keys or header):
        raise typer.BadParameter("give what to change: --value, --value-file, --null-value, --key, --key-file or --header")
    if from_ is not None and (values or keys or header):
        raise typer.BadParameter("--from contains the new payloads; omit the other options")

    def anew(was: Payload) -> Payload:
        made = was
        if values:
            said = None if null_value else value_file.read_bytes() if value_file else (value or "").encode()
            made = dataclasses.replace(made, value=said)
        if keys:
            made = dataclasses.replace(made, key=key_file.read_bytes() if key_file else (key or "").encode())
        if header:
            made = dataclasses.replace(made, headers=_headers(header))
        return made

    todo: list[tuple[int, Callable[[Payload], Payload]]]
    if from_ is not None:
        lines = [line for line in from_.read_text(encoding="utf-8").splitlines() if line.strip()]
        todo = [(which, _always(payload)) for which, payload in map(parse_edit, lines)]
    else:
        assert number is not None
        todo = [(number, anew)]
    spec = spec_of(name, consumers)
    with connected("tidemark retries", needs=Profile.OPERATOR) as connection:
        made = {which: change(connection, spec.group, which, how, reason=reason, by=who()) for which, how in todo}
    changed = [which for which, action in made.items() if action is not None]
    if output is OutputFormat.JSON:
        print_json({"edited": changed, "actions": [action for action in made.values() if action is not None]})
    else:
        stdout.print(f"{len(changed):,} edited, {len(made) - len(changed):,} unchanged", highlight=False)


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
        found = read(connection, spec.group, limit=limit)
    if output is OutputFormat.JSON:
        print_json(found)
        return
    lines = []
    for one in found:
        which = f"{Filter.from_json(one['filter'])}: {one['reason']}"
        lines.append((minute(one["at"]), one["kind"], f"{one['records']:,}", one["by"][:14], which))
    print_lines(("at (UTC)", "what", "records", "by", "filter, reason"), lines, left=(0, 1, 3))


# ---- shared with `redrive`


def _always(payload: Payload) -> Callable[[Payload], Payload]:
    return lambda _: payload


def _headers(words: Sequence[str]) -> Headers:
    made = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"{word!r} is not NAME=TEXT")
        made.append((name, text.encode()))
    return tuple(made)


def _from_hex(text: str) -> bytes:
    from tidemark.errors import BadInput

    try:
        return bytes.fromhex(text)
    except ValueError:
        raise BadInput(what="key", found=f'"{text[:80]}" is not hex', fix="Write two hex digits per byte: 00ff.") from None


def _topic_json(one: ExistingTopic) -> dict[str, Any]:
    kept = int(one.settings["retention.ms"].value)
    return {
        "topic": one.topic.name,
        "partitions": one.topic.partitions,
        "delay": one.wanted.delay,
        "retention_s": None if kept < 0 else kept / 1000,
        "made": one.made,
    }


def _delay(one: ExistingTopic) -> str:
    from tidemark.text.duration import format_duration

    return "-" if not one.wanted.delay else format_duration(one.wanted.delay)


def _seconds(length: timedelta) -> str:
    return f"{length.total_seconds():,.1f} s"


def _length(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} days"


def _whole_json(found: Whole, payload: Payload) -> dict[str, Any]:
    from tidemark.retry.admin import payload_json

    return {
        **found.row,
        **payload_json(payload),
        "tries": found.tries,
        "edits": [
            {"action_id": one.action_id, "by": one.by, "at": one.at, "reason": one.reason, **payload_json(one.was)} for one in found.edits
        ],
        "redrives_of_it": found.redrives,
        "last_action": found.action,
    }


def _print_whole(found: Whole, payload: Payload, as_: As, decoded: Mapping[str, Shown]) -> None:
    row = found.row
    due = f", due {minute(row['due_at'])} UTC" if row["due_at"] else ""
    hop = "" if row["hop_topic"] is None else f", {row['hop_topic']}"
    place = "" if row["hop_offset"] is None else f"/{row['hop_partition']}@{row['hop_offset']}"
    pairs = [
        ("record", f"{row['topic']}/{row['partition']}@{row['offset']}, {_when(row['timestamp'])}"),
        ("state", f"{row['state']}, retry {row['retry_number']}{due}{hop}{place}"),
        ("failed", f"{_when(row['created_at'])}, changed {_when(row['changed_at'])}"),
        *([("published", f"no: {row['publish_error']}")] if row["publish_error"] else []),
        *([("tried", f"{_when(row['tried_at'])}, {row['tried_late']:,.1f} s late")] if row["tried_at"] else []),
    ]
    if row["emptied_at"]:
        pairs.append(("payload", f"emptied on {_when(row['emptied_at'])}"))
    else:
        pairs += [("key", _shown(payload.key, as_)), ("value", _shown(payload.value, as_))]
        pairs += [(f"{side}, decoded", shown.json or f"not decoded: {shown.problem}") for side, shown in decoded.items()]
        pairs += [(f"header {name}", _shown(value, as_)) for name, value in payload.headers]
    for one in found.tries:
        pairs.append((f"try {one['number']}", f"{one['at'][:19]} {one['type']}: {one['text']}"))
    pairs.append((f"try {row['retry_number']}" if row["state"] != "WAITING" else "last", f"{row['error_type']}: {row['error_text']}"))
    pairs += [(f"edit {one.action_id}", f"{_when(one.at)} by {one.by}: {one.reason}") for one in found.edits]
    for each in found.redrives:
        pairs.append((f"redrive {each['redrive_id']}", f"{each['state']} to {each['destination']} by {each['by']}: {each['reason']}"))
    if found.action is not None and found.action["kind"] == "DISCARD":
        pairs.append(("discarded", f"{_when(found.action['at'])} by {found.action['by']}: {found.action['reason']}"))
    width = min(20, max(len(what) for what, _ in pairs))
    stdout.print(f"record {found.number}", style="bold", highlight=False)
    for what, text in pairs:
        first, *more = text.splitlines() or [""]
        stdout.print(f"  {one_line(what):<{width}} {first}", markup=False, highlight=False)
        for line in more:
            stdout.print(f"  {'':<{width}} {line}", markup=False, highlight=False)


def _shown(value: bytes | None, as_: As) -> str:
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


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[-width + 1 :]}"
