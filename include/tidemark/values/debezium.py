"""Debezium's change data: opens the envelope around each row.

`opened` returns records whose value is the row after the change, or null for a delete, like a topic of rows with tombstones. The column
``change`` has the envelope.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidemark.errors import Refused
from tidemark.sink.types import is_bytes, is_text
from tidemark.values import connect_json
from tidemark.values.arrow_values import places
from tidemark.values.connect_json import Placeholder, Types

if TYPE_CHECKING:
    import pyarrow as pa

LOADED = ("c", "u", "r")
DELETED = "d"
MESSAGE = "m"
OPERATIONS = frozenset((*LOADED, DELETED, MESSAGE, "t"))
TRUNCATED = "it truncates the whole table, which Tidemark does not repeat: delete the rows yourself"


class NoEnvelope(Refused):
    """The values' schema is not one of change data."""

    fields: list[str]

    def __str__(self) -> str:
        return f"The values are not change data of Debezium: they lack {', '.join(self.fields)}. Correct format.envelope, or remove it."


@dataclass(frozen=True, slots=True)
class Opened:
    """``skipped``: indexes of records without a row change. ``errors``: ``Type: reason`` by index. ``types``: for JSON, the schemas of each
    record's ``value`` and ``key``."""

    batch: pa.RecordBatch
    skipped: Set[int] = frozenset()
    errors: dict[int, str] = field(default_factory=dict)
    types: dict[str, list[Types]] = field(default_factory=dict)


def opened_schema(input_schema: pa.Schema) -> pa.Schema:
    """The schema of `opened` records. Raises `NoEnvelope`."""
    import pyarrow as pa

    envelope = input_schema.field("value").type
    row = envelope
    if not pa.types.is_string(envelope):
        names = {child.name for child in envelope} if pa.types.is_struct(envelope) else set()
        if missing := [name for name in ("op", "after") if name not in names]:
            raise NoEnvelope(fields=missing)
        row = envelope.field("after").type
    return input_schema.set(input_schema.get_field_index("value"), pa.field("value", row)).append(pa.field("change", envelope))


def opened(batch: pa.RecordBatch) -> Opened:
    """The rows of decoded records: structs of Avro, or texts of JSON."""
    import pyarrow as pa
    import pyarrow.compute as pc

    errors: dict[int, str] = {}
    types: dict[str, list[Types]] = {}
    schema = opened_schema(batch.schema)
    columns = {name: batch[name] for name in batch.schema.names}
    columns["change"] = batch["value"]
    if pa.types.is_string(batch["value"].type):
        envelopes = connect_json.envelopes(batch["value"].to_pylist(), errors)
        columns["change"], columns["value"] = pa.array(envelopes.payloads, pa.string()), pa.array(envelopes.rows, pa.string())
        operations, types["value"] = envelopes.operations, envelopes.types
    else:
        columns["value"] = pc.struct_field(batch["value"], "after")
        operations = pc.struct_field(batch["value"], "op").to_pylist()
    if pa.types.is_string(batch["key"].type):
        keys, types["key"] = connect_json.payloads(batch["key"].to_pylist())
        columns["key"] = pa.array(keys, pa.string())
    deleted = pa.array([operation == DELETED for operation in operations])
    if pc.any(pc.and_(deleted, columns["value"].is_valid())).as_py():  # a delete has no row, even if its envelope has one
        indexes = [None if is_deleted else at for at, is_deleted in enumerate(deleted.to_pylist())]
        columns["value"] = columns["value"].take(pa.array(indexes, pa.int64()))
    rows = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    present = batch["value"].is_valid().to_pylist()
    has_row = columns["value"].is_valid().to_pylist()
    skipped = set()
    for at, operation in enumerate(operations):
        if at in errors:
            continue
        if not present[at] or operation == MESSAGE:  # a tombstone repeats the delete before it, for Kafka's compaction
            skipped.add(at)
        elif operation in LOADED:
            if not has_row[at]:
                errors[at] = "Undecodable: its envelope has no row after the change"
        elif operation != DELETED:
            errors[at] = f"Fail: {TRUNCATED}" if operation == "t" else f"Undecodable: its envelope has the unknown operation {operation!r}"
    return Opened(rows, skipped, errors, types)


def not_sent(array: pa.Array, placeholder: Placeholder) -> set[int]:
    """The indexes of decoded values that Debezium could not send: they are, or contain, the placeholder."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def is_placeholder(array: pa.Array) -> set[int]:
        kind = array.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return _written_in_numbers(array, placeholder)
        if not (is_text(kind) or is_bytes(kind)):
            return set()
        if pa.types.is_fixed_size_binary(kind):
            array, kind = array.cast(pa.binary()), pa.binary()
        same = pc.equal(array, pa.scalar(placeholder.text.encode(), pa.binary()).cast(kind)).fill_null(False)
        return set(same.to_numpy(zero_copy_only=False).nonzero()[0].tolist())

    return places(array, is_placeholder)


def _written_in_numbers(array: pa.Array, placeholder: Placeholder) -> set[int]:
    """The indexes of lists of numbers, or of days and times decoded from them, that are the placeholder's bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type.value_type
    if not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind)) or pa.types.is_boolean(kind):
        return set()
    candidates = pc.equal(pc.list_value_length(array), len(placeholder.bytes)).fill_null(False)
    matches = set()
    for at in pc.indices_nonzero(candidates).to_pylist():
        values = array[at].values
        if pa.types.is_temporal(kind):
            values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
        if placeholder.is_written_in(values.to_pylist()):
            matches.add(at)
    return matches
