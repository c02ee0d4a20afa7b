"""What becomes of the records of a slice: the words in which a transform answers, and in which the ledger counts (I3)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
from tidemark.records.ranges import Slice

if TYPE_CHECKING:
    import pyarrow as pa

ERROR_TEXT_LIMIT = 10_000
GIVEN = ("kafka_topic", "kafka_partition", "kafka_offset")
"""The lineage columns as a transform gets and returns them; the topic's id and the sequence number are added on the way."""
OPTIONAL = ("disposition", "error")
"""Columns that a transform may add: what is to become of a record, and why. They are not stored in the sink."""


class Disposition(IntEnum):
    """What becomes of a record. The values are those of `Tally`'s array, where 0 stands for not mentioned."""

    LOAD = 1
    SKIP = 2
    RETRY = 3
    FAIL = 4
    HELD = 5
    """Not tried: one of its key waits. No transform says this."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that is not loaded: ``RETRY`` (may succeed later), ``FAIL`` (never will), or ``HELD`` (was not tried)."""

    offset: int
    disposition: Disposition
    error_type: str
    error_text: str


@dataclass(frozen=True, slots=True)
class TransformOutput:
    """Part of a slice as the transform answered it: rows to load (sink columns and `GIVEN`), skipped offsets, rejects."""

    rows: pa.RecordBatch | None
    skipped: Sequence[int] = ()
    rejects: Sequence[Reject] = field(default=())


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """What became of the offsets of a slice; they add up to its span (I3)."""

    loaded: int
    skipped: int
    retried: int
    failed: int
    unaccounted: int
    sink_rows: int


@dataclass(kw_only=True, eq=False)
class BadOutput(Refused):
    """The transform returned something that no record of the slice explains, or contradicts itself."""

    part: Slice
    problem: str

    def __str__(self) -> str:
        return f"{self.part}: {self.problem} Nothing of this slice was stored."


def reject(offset: int, disposition: Disposition, error: str | None, error_type: str | None = None) -> Reject:
    """A reject whose text Postgres can store. ``ValueError: no date`` without a type is split at its colon."""
    text = (error or "the transform gave no reason").replace("\0", "\\0")[:ERROR_TEXT_LIMIT]
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair is no text to Postgres
    if error_type is None:
        match = re.match(r"([A-Z]\w+): (.+)", text, re.DOTALL)
        error_type, text = (match[1], match[2]) if match else ("Error", text)
    return Reject(offset, disposition, error_type, text)


def without(judged: TransformOutput, offsets: Collection[int], part: Slice) -> TransformOutput:
    """An answer without all that it says of these records of ``part``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = judged.rows
    if rows is not None and rows.num_rows:
        gone = pc.is_in(pa.array(row_offsets(rows, part)), value_set=pa.array(sorted(offsets), pa.int64()))
        rows = rows.filter(pc.invert(gone))
    return TransformOutput(
        rows,
        [offset for offset in judged.skipped if offset not in offsets],
        [reject_ for reject_ in judged.rejects if reject_.offset not in offsets],
    )


def row_offsets(rows: pa.RecordBatch, part: Slice) -> Any:
    """The rows' offsets, if they are rows of this partition."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        kinds = zip(GIVEN, (pa.string(), pa.int64(), pa.int64()), strict=True)
        topic, partition, offset = (rows.column(name).cast(kind) for name, kind in kinds)
    except pa.ArrowException as error:
        raise BadOutput(part=part, problem=f"a row's lineage is not what the transform was given: {error}.") from error
    if topic.null_count or partition.null_count or offset.null_count:
        raise BadOutput(part=part, problem=f"a row has no lineage: {', '.join(GIVEN[:-1])} or {GIVEN[-1]} is null.")
    strangers = pc.or_(pc.not_equal(topic, part.partition.topic), pc.not_equal(partition, part.partition.partition))
    if pc.any(strangers).as_py():
        raise BadOutput(part=part, problem="a row belongs to another partition: the transform must not move rows between them.")
    return offset.to_numpy(zero_copy_only=False)
