"""What the latest records show besides their rows: units that look wrong, fields that are not loaded, and the most frequent failure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tidemark.formats.decoder import Decoder
from tidemark.formats.schema import Node
from tidemark.records.outcome import DETAIL, Disposition
from tidemark.sink.table import Layout
from tidemark.text.wording import counted, first_of, quoted
from tidemark.values.fields import Fields

LAST_SHOWN_MS = 253_402_300_799_999
"""The end of the year 9999, the last of Python's dates. Later timestamps are not shown."""
_FIRST_WEEKS_US = 60 * 86_400_000_000
"""Until 2130, seconds read as milliseconds, or milliseconds read as microseconds, fall into these weeks of 1970."""
_SHOWN_FIELDS = 10
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def times(columns: Iterable[Mapping[str, Sequence[int]]]) -> Iterator[str]:
    """Notes on columns whose times, in microseconds, are all so early or so late that the unit is probably wrong."""
    by_name: dict[str, list[int]] = {}
    for each in columns:
        for name, column_times in each.items():
            by_name.setdefault(name, []).extend(column_times)
    for name, column_times in by_name.items():
        early = all(0 <= micros < _FIRST_WEEKS_US for micros in column_times)
        late = all(micros > LAST_SHOWN_MS * 1_000 for micros in column_times)
        if column_times and (early or late):
            when = "in the first weeks of 1970" if early else "after the year 9999"
            yield f"{name}: all times are {when}; is their unit right? Numbers in a timestamptz are milliseconds since 1970"


def fields_without_column(fields: Fields, layout: Layout, texts: Iterable[str | None]) -> Iterator[str]:
    """A note on the fields of these JSON values that no column gets and the consumer's file does not name."""
    names: dict[str, None] = {}
    for text in texts:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            names |= dict.fromkeys(_OBJECT.decode(text or "{}"))
    if unread := fields.unread(names, layout.columns):
        yield f"fields without a column are not loaded: {_listed(unread)}. Add columns for them, or name them under `drop`"


def fields_of_older_schemas(decoder: Decoder) -> Iterator[str]:
    """Notes on fields that records have in their own Avro schema, but not in the newest one, with which they are read."""
    for schema_id, writer in decoder.writers.items():
        for reader in decoder.readers.values():
            if isinstance(writer, Node) and isinstance(reader, Node) and writer.name == reader.name:
                if lost := list(_fields_not_read(writer, reader)):
                    yield f"fields of schema {schema_id} that the newest schema lacks are not loaded: {_listed(lost)}"
                break


def _fields_not_read(writer: Node, reader: Node, above: str = "") -> Iterator[str]:
    records = [[branch for branch in node.branches if branch.kind == "record"] for node in (writer, reader)]
    if [len(branches) for branches in records] != [1, 1]:
        return
    ((written,), (read,)) = records
    for field in written.fields:
        target = next((own for own in read.fields if field.name in (own.name, *own.aliases)), None)
        if target is None:
            yield f"{above}{field.name}"
        else:
            yield from _fields_not_read(field.type, target.type, f"{above}{field.name}.")


def failures(outcomes: Sequence[tuple[Disposition | None, str | None]]) -> Iterator[str]:
    """A note for each disposition of records that are not loaded, with the most frequent reason."""
    for disposition, verb in ((Disposition.FAIL, "fail"), (Disposition.RETRY, "be retried")):
        reasons = Counter((text or "").partition(DETAIL)[0] for own, text in outcomes if own is disposition)
        if not reasons:
            continue
        ((reason, count), *others) = reasons.most_common()
        most = f", {count:,} of them because" if others else ""
        fix = "; give the column another type, or convert the value in a transform" if " does not fit " in reason else ""
        yield f"{reasons.total():,} of the latest {counted(len(outcomes), 'record')} would {verb}{most}: {reason.removesuffix('.')}{fix}"


def _listed(names: Iterable[str]) -> str:
    return first_of(map(quoted, names), _SHOWN_FIELDS)
