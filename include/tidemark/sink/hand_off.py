"""Step ④ of a commit: copies records that are not loaded to ``tidemark.failed_record``, with everything that a retry needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from tidemark.errors import Broken
from tidemark.records.outcome import Disposition, Reject
from tidemark.records.ranges import Slice
from tidemark.retry.ladder import Rung
from tidemark.sink.load import copy
from tidemark.sink.table import first_value
from tidemark.sink.target import Target
from tidemark.text.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.db import Cursor

FAILED_COLUMNS = (
    ("group_id", "integer"),
    ("topic_id", "smallint"),
    ("partition", "integer"),
    ("record_offset", "bigint"),
    ("record_timestamp", "timestamp with time zone"),
    ("key", "bytea"),
    ("value", "bytea"),
    ("headers", "json"),
    ("disposition", "text"),
    ("error_type", "text"),
    ("error_text", "text"),
    ("attempt_id", "bigint"),
    ("state", "text"),
    ("retry_number", "integer"),
    ("due_at", "timestamp with time zone"),
    ("retry_topic", "text"),
)

Payloads = Callable[[Slice, Collection[int]], "Iterator[pa.RecordBatch]"]
"""Reads records again that were not loaded, ordered by offset: ``record_offset, record_timestamp, key, value, headers``, typed as in
`FAILED_COLUMNS`."""


class RecordsGone(Broken):
    """Failed records could not be read again from the log."""

    part: Slice
    expected: int
    read: int

    def __str__(self) -> str:
        failed = counted(self.expected, "failed record")
        return f"{self.part}: only {self.read:,} of {failed} found in the log. Nothing of this slice was stored."


def copy_failed(cur: Cursor, target: Target, part: Slice, rejects: dict[int, Reject], payloads: Payloads) -> None:
    """Copies records that are not loaded, with everything that a retry needs (step ④). Raises `RecordsGone`.

    Due times follow the database's clock (I6), which is read once.
    """
    if not rejects:
        return
    rung = target.ladder.first
    due_at = None
    if rung is not None and any(reject.disposition is Disposition.RETRY for reject in rejects.values()):
        due_at = first_value(cur, "SELECT clock_timestamp() + %(delay)s", {"delay": rung.delay})
    copied = copy(cur, part, "tidemark.failed_record", FAILED_COLUMNS, _failed(target, part, rejects, payloads, rung, due_at))
    if copied != len(rejects):
        raise RecordsGone(part=part, expected=len(rejects), read=copied)


def _failed(
    target: Target, part: Slice, rejects: dict[int, Reject], payloads: Payloads, rung: Rung | None, due_at: datetime | None
) -> Iterator[pa.RecordBatch]:
    import numpy as np
    import pyarrow as pa

    for batch in payloads(part, rejects.keys()):
        count = batch.num_rows
        batch_rejects = [rejects[offset] for offset in batch.column("record_offset").to_pylist()]
        waits = [rung is not None and reject.disposition is Disposition.RETRY for reject in batch_rejects]
        states = [
            "WAITING" if waiting else "HELD" if reject.disposition is Disposition.HELD else "FAILED"
            for waiting, reject in zip(waits, batch_rejects, strict=True)
        ]
        topics = {"HELD": None, "WAITING": None if rung is None else rung.topic, "FAILED": target.ladder.failed_topic}
        arrays = [
            pa.array(np.full(count, target.group_id, dtype=np.int32)),
            pa.array(np.full(count, part.topic_id, dtype=np.int16)),
            pa.array(np.full(count, part.partition.partition, dtype=np.int32)),
            *batch.columns,
            pa.array(["fail" if reject.disposition is Disposition.FAIL else "retry" for reject in batch_rejects], pa.string()),
            pa.array([reject.error_type for reject in batch_rejects], pa.string()),
            pa.array([reject.error_text for reject in batch_rejects], pa.string()),
            pa.array(np.full(count, target.attempt_id, dtype=np.int64)),
            pa.array(states, pa.string()),
            pa.array([int(waiting) for waiting in waits], pa.int32()),
            pa.array([due_at if waiting else None for waiting in waits], pa.timestamp("us", "UTC")),
            pa.array([topics[state] for state in states], pa.string()),
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in FAILED_COLUMNS])
