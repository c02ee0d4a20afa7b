"""Outcomes of a slice's records: the transform's output, and the ledger's counts (I3)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
from tidemark.records.ranges import Slice

if TYPE_CHECKING:
    import pyarrow as pa

ERROR_TEXT_LIMIT = 10_000
DETAIL = "\nDETAIL: "
"""Separates an error's text from its detail, which quotes values. Logs and errors stop before it."""
GIVEN = ("kafka_topic", "kafka_partition", "kafka_offset")
"""The lineage columns of a transform's input and output; the topic's id and the sequence number are added later."""
OPTIONAL = ("disposition", "error")
"""Columns that a transform may add: a record's disposition and its reason. The sink does not store them."""
ONLY = ""
"""The name of a consumer's only sink."""
DELETED = "kafka_deleted"
"""The column of rows that marks those that delete their key's row; missing if none does."""
ABSENT = "kafka_absent".ljust(64, "_")
"""The column of rows with bits, in the columns' order, for the table's columns with a default that a record lacks; missing if the rows have
values, or nulls, for all. Longer than any name of a column in Postgres."""


class Disposition(IntEnum):
    """The treatment of a record. The values are those in `Tally`'s array, where 0 means not mentioned."""

    LOAD = 1
    SKIP = 2
    RETRY = 3
    FAIL = 4
    HELD = 5
    """Not tried because another record of its key waits. Transforms cannot return this."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that is not loaded: ``RETRY`` (may succeed later), ``FAIL`` (never will), or ``HELD`` (was not tried)."""

    offset: int
    disposition: Disposition
    error_type: str
    error_text: str


@dataclass(frozen=True, slots=True)
class TransformOutput:
    """The transform's output for part of a slice: rows to load for each sink (its columns, `GIVEN` and maybe `DELETED` and `ABSENT`),
    skipped offsets, rejects."""

    rows: Mapping[str, pa.RecordBatch] = field(default_factory=dict)
    skipped: Sequence[int] = ()
    rejects: Sequence[Reject] = field(default=())


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Counts of offsets by outcome. Those of a slice add up to its span (I3)."""

    loaded: int = 0
    skipped: int = 0
    retried: int = 0
    failed: int = 0
    unaccounted: int = 0
    sink_rows: int = 0
    """Written rows, including deleting ones."""
    deleted: int = 0
    """The deleting ones of ``sink_rows``."""


class BadOutput(Refused):
    """The transform's output contradicts itself, or does not belong to a record of the slice."""

    part: Slice
    problem: str

    def __str__(self) -> str:
        return f"{self.part}: {self.problem} Nothing of this slice was stored."


def reject(offset: int, disposition: Disposition, error: str | None, error_type: str | None = None) -> Reject:
    """Returns a reject whose text Postgres can store. Without ``error_type``, a text like ``ValueError: no date`` is split at its colon."""
    text = storable(error or "the transform gave no reason")[:ERROR_TEXT_LIMIT]
    if error_type is None:
        match = re.match(r"([A-Z]\w+): (.+)", text, re.DOTALL)
        error_type, text = (match[1], match[2]) if match else ("Error", text)
    return Reject(offset, disposition, error_type, text)


def storable(text: str) -> str:
    """Returns the text of an error with what Postgres cannot store, NUL and half a surrogate pair, as Python writes it."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def quoting(text: str, detail: str | None) -> str:
    """Returns an error's text with its detail, which quotes values, on a line of its own, as psql prints it. `None`: the text alone."""
    return text if detail is None else f"{text}{DETAIL}{detail}"


def only(rows: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
    """Returns the rows of a consumer with one sink."""
    return {ONLY: rows}


def without(output: TransformOutput, offsets: Collection[int], part: Slice) -> TransformOutput:
    """Returns the output without these records of ``part``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def retained(rows: pa.RecordBatch) -> pa.RecordBatch:
        removed = pc.is_in(pa.array(row_offsets(rows, part)), value_set=pa.array(sorted(offsets), pa.int64()))
        return rows.filter(pc.invert(removed))

    return TransformOutput(
        {sink: retained(rows) if rows.num_rows else rows for sink, rows in output.rows.items()},
        [offset for offset in output.skipped if offset not in offsets],
        [reject_ for reject_ in output.rejects if reject_.offset not in offsets],
    )


def skipping(output: TransformOutput, offsets: Set[int], part: Slice) -> TransformOutput:
    """Returns the output with these records of ``part`` skipped, whatever their outcome. Ignores ``offsets`` that it does not mention."""
    mentioned = {*output.skipped, *(reject_.offset for reject_ in output.rejects)}
    for rows in output.rows.values():
        mentioned.update(row_offsets(rows, part).tolist())
    skipped = mentioned & offsets
    if not skipped:
        return output
    remaining = without(output, skipped, part)
    return TransformOutput(remaining.rows, [*remaining.skipped, *sorted(skipped)], remaining.rejects)


def lineage_as(rows: pa.RecordBatch, kinds: Sequence[pa.DataType], part: Slice) -> list[pa.Array]:
    """Returns the rows' topic, partition and offset as these types. Raises `BadOutput`, which quotes no value, if a cast fails."""
    import pyarrow as pa

    arrays = []
    for name, kind in zip(GIVEN, kinds, strict=True):
        try:
            arrays.append(rows.column(name).cast(kind))
        except pa.ArrowException:
            problem = f"{name} is not what the transform was given: a value of type {rows.column(name).type} is no {kind}."
            raise BadOutput(part=part, problem=problem) from None
    return arrays


def row_offsets(rows: pa.RecordBatch, part: Slice) -> Any:
    """Returns the rows' offsets. Raises `BadOutput` unless all rows belong to this partition."""
    import pyarrow as pa
    import pyarrow.compute as pc

    topic, partition, offset = lineage_as(rows, (pa.string(), pa.int64(), pa.int64()), part)
    if topic.null_count or partition.null_count or offset.null_count:
        raise BadOutput(part=part, problem=f"a row has no lineage: {', '.join(GIVEN[:-1])} or {GIVEN[-1]} is null.")
    foreign = pc.or_(pc.not_equal(topic, part.partition.topic), pc.not_equal(partition, part.partition.partition))
    if pc.any(foreign).as_py():
        raise BadOutput(part=part, problem="a row belongs to another partition. The transform must not move rows between partitions.")
    return offset.to_numpy(zero_copy_only=False)
