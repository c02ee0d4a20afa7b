"""Outcomes of the records of a slice: what a transform returns, and what the ledger counts (I3)."""

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
"""Separates an error's text from what quotes values. Logs and errors stop before it."""
GIVEN = ("kafka_topic", "kafka_partition", "kafka_offset")
"""The lineage columns that a transform gets and returns; the topic's id and the sequence number are added later."""
OPTIONAL = ("disposition", "error")
"""Columns that a transform may add: what should become of a record, and why. The sink does not store them."""
ONLY = ""
"""The name of a consumer's only sink."""
DELETED = "kafka_deleted"
"""The column of rows that says which ones delete their key's row; missing if none does."""
ABSENT = "kafka_absent".ljust(64, "_")
"""The column of rows that says which of the table's columns with a default a record has nothing for, as bits in the columns' order; missing
if the rows have values, or nulls, for all. The name is longer than that of a column can be."""


class Disposition(IntEnum):
    """What happens to a record. The values are those in `Tally`'s array, where 0 means not mentioned."""

    LOAD = 1
    SKIP = 2
    RETRY = 3
    FAIL = 4
    HELD = 5
    """Not tried, because another record of its key waits. Transforms cannot return this."""


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
    """The outcomes of a slice's offsets, counted; together they add up to its span (I3)."""

    loaded: int
    skipped: int
    retried: int
    failed: int
    unaccounted: int
    sink_rows: int
    """Rows that were written, including those that delete."""
    deleted: int = 0
    """Of ``sink_rows``: rows that delete."""


@dataclass(kw_only=True, eq=False)
class BadOutput(Refused):
    """The transform's output contradicts itself, or does not belong to a record of the slice."""

    part: Slice
    problem: str

    def __str__(self) -> str:
        return f"{self.part}: {self.problem} Nothing of this slice was stored."


def reject(offset: int, disposition: Disposition, error: str | None, error_type: str | None = None) -> Reject:
    """A reject whose text Postgres can store. Without ``error_type``, a text like ``ValueError: no date`` is split at its colon."""
    text = (error or "the transform gave no reason").replace("\0", "\\0")[:ERROR_TEXT_LIMIT]
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # Postgres cannot store half a surrogate pair
    if error_type is None:
        match = re.match(r"([A-Z]\w+): (.+)", text, re.DOTALL)
        error_type, text = (match[1], match[2]) if match else ("Error", text)
    return Reject(offset, disposition, error_type, text)


def quoting(text: str, detail: str | None) -> str:
    """An error's text with what quotes values on a line of its own, as psql prints it. `None`: the text alone."""
    return text if detail is None else f"{text}{DETAIL}{detail}"


def only(rows: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
    """The rows of a consumer with one sink."""
    return {ONLY: rows}


def without(judged: TransformOutput, offsets: Collection[int], part: Slice) -> TransformOutput:
    """The output without these records of ``part``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def kept(rows: pa.RecordBatch) -> pa.RecordBatch:
        gone = pc.is_in(pa.array(row_offsets(rows, part)), value_set=pa.array(sorted(offsets), pa.int64()))
        return rows.filter(pc.invert(gone))

    return TransformOutput(
        {sink: kept(rows) if rows.num_rows else rows for sink, rows in judged.rows.items()},
        [offset for offset in judged.skipped if offset not in offsets],
        [reject_ for reject_ in judged.rejects if reject_.offset not in offsets],
    )


def skipping(judged: TransformOutput, offsets: Set[int], part: Slice) -> TransformOutput:
    """The output with these records of ``part`` skipped, whatever became of them. Others of ``offsets`` are not mentioned in it."""
    said = {*judged.skipped, *(reject_.offset for reject_ in judged.rejects)}
    for rows in judged.rows.values():
        said.update(row_offsets(rows, part).tolist())
    gone = said & offsets
    if not gone:
        return judged
    kept = without(judged, gone, part)
    return TransformOutput(kept.rows, [*kept.skipped, *sorted(gone)], kept.rejects)


def lineage_as(rows: pa.RecordBatch, kinds: Sequence[pa.DataType], part: Slice) -> list[pa.Array]:
    """The rows' topic, partition and offset as these types. Raises `BadOutput`, which quotes no value, where a cast fails."""
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
    """The rows' offsets. Raises `BadOutput` unless all rows belong to this partition."""
    import pyarrow as pa
    import pyarrow.compute as pc

    topic, partition, offset = lineage_as(rows, (pa.string(), pa.int64(), pa.int64()), part)
    if topic.null_count or partition.null_count or offset.null_count:
        raise BadOutput(part=part, problem=f"a row has no lineage: {', '.join(GIVEN[:-1])} or {GIVEN[-1]} is null.")
    strangers = pc.or_(pc.not_equal(topic, part.partition.topic), pc.not_equal(partition, part.partition.partition))
    if pc.any(strangers).as_py():
        raise BadOutput(part=part, problem="a row belongs to another partition. The transform must not move rows between partitions.")
    return offset.to_numpy(zero_copy_only=False)
