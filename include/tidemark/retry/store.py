"""Statements on records that wait for another try, one typed function each. None of them commits; the caller does."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidemark.db import REWIND_LOCK, array, rows, scalar, statements
from tidemark.errors import Broken
from tidemark.offsets.store import locked_position
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry.ladder import Ladder
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.retry", "store.sql")

NO_MILLIS = -(2**63)
NOWHERE = -1
COLUMNS = ("numbers", "message_offsets", "topic_ids", "partitions", "offsets", "millis", "digests")
"""Columns of `Waiting`."""
COPY_HEADER_BYTES, COPY_END_BYTES = 19, 2
COPIED = (
    ("fields", ">i2"),
    *((name, kind) for column in (*COLUMNS[:-1], "with_headers") for name, kind in ((f"{column}_bytes", ">i4"), (column, ">i8"))),
    ("digests_bytes", ">i4"),
    ("digests", "64u1"),
)
"""A row of the statement ``read_due`` in the binary form of COPY."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Waiting records as columns (numpy arrays), in the order of their registered messages in the drained partitions.

    Columns other than ``numbers`` and ``message_offsets`` describe the original records.
    """

    numbers: Any
    message_offsets: Any
    """Offsets of the registered messages in the retry topic."""
    topic_ids: Any
    partitions: Any
    offsets: Any
    millis: Any
    """`NO_MILLIS` for a record without a timestamp."""
    digests: Any
    """The SHA-256 of key and value, 32 bytes each; zeros for null."""
    topics: Mapping[int, str]
    """Names by topic id."""
    headers: Mapping[int, str]
    """As stored in the row, by number; records without headers are missing."""
    before: Mapping[int, int] = field(default_factory=dict)
    """With an order by key: the offset of the earlier record of the key that must be settled first, by number."""

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, index: Any) -> Waiting:
        """Returns the records of a mask or at these indexes."""
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        return replace(self, **columns)

    @staticmethod
    def joined(slices: Sequence[Waiting]) -> Waiting:
        import numpy as np

        columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in slices]) for name in COLUMNS}
        mappings: dict[str, Any] = {
            name: dict(item for each in slices for item in getattr(each, name).items()) for name in ("topics", "headers", "before")
        }
        return Waiting(**columns, **mappings)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A key of a partition with waiting or held records. ``first`` is the offset of the first one, ``held`` the number of held ones."""

    key: bytes
    first: int
    held: int


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A failed try. ``permanent``: no retry can succeed."""

    number: int
    permanent: bool
    error_type: str
    error_text: str


@dataclass(frozen=True, slots=True)
class DueRange:
    """The readable range of a retry topic's partition. ``first``: offset of the first registered message."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    first: int
    end: int


class RecordsChanged(Broken):
    """Records that this transaction had locked could not be updated."""

    part: Slice
    expected: int
    updated: int

    def __str__(self) -> str:
        tried = counted(self.expected, "tried record")
        return f"{self.part}: only {self.updated:,} of {tried} could be updated. Nothing of this slice was stored."


def by_index(cur: Cursor) -> None:
    """Makes the rest of the transaction find records by index, whatever the planner's statistics say."""
    cur.execute(SQL["by_index"])


def lock_out_rewinds(cur: Cursor, group_id: int) -> None:
    """Blocks rewinds of the group until the transaction ends."""
    cur.execute(SQL["lock_out_rewinds"], {"class": REWIND_LOCK, "group_id": group_id})


def lock_due(cur: Cursor, group_id: int, part: Slice, read: Waiting) -> Waiting:
    """Locks the due records still registered in a drained slice, in message order. Returns the ones in ``read``.

    Excludes records that a rewind has withdrawn or an operator has discarded or redriven. Raises `PositionLocked` while a rewind of the
    group is in progress.
    """
    import numpy as np

    with locked_position(group_id, part):
        lock_out_rewinds(cur, group_id)
    cur.execute(SQL["lock_due"], _key(group_id, part))
    locked = dict(cur.fetchall())
    offsets = np.array([locked.get(number, NOWHERE) for number in read.numbers.tolist()], np.int64)
    return read.chosen(offsets == read.message_offsets)


def read_due(cur: Cursor, group_id: int, part: Slice) -> Waiting:
    """Reads the records that `lock_due` would lock now. Locks nothing."""
    import numpy as np

    output = io.BytesIO()
    select = cur.mogrify(SQL["read_due"].rstrip("; \n"), {**_key(group_id, part), "no_millis": str(NO_MILLIS)}).decode()
    cur.copy_expert(f"COPY ({select}) TO STDOUT (FORMAT binary)", output)
    data = output.getbuffer()[COPY_HEADER_BYTES:-COPY_END_BYTES]
    copied = np.frombuffer(data, np.dtype([(name, kind) for name, kind in COPIED]))
    columns: dict[str, Any] = {name: copied[name].astype(np.int64) for name in COLUMNS if name != "digests"}
    topics, headers = {}, {}
    if topic_ids := np.unique(columns["topic_ids"]).tolist():
        cur.execute(SQL["topic_names"], {"topic_ids": topic_ids})
        topics = dict(cur.fetchall())
    if with_headers := columns["numbers"][copied["with_headers"] != 0].tolist():
        cur.execute(SQL["headers"], {"numbers": array(with_headers)})
        headers = dict(cur.fetchall())
    return Waiting(**columns, digests=np.ascontiguousarray(copied["digests"]), topics=topics, headers=headers)


def in_order(cur: Cursor, group_id: int, records: Waiting) -> Waiting:
    """Returns the records with ``before`` set: the records to settle first, in this slice or elsewhere. Needs `lock_due`."""
    if not len(records):
        return records
    cur.execute(SQL["before"], {"group_id": group_id, "numbers": array(records.numbers.tolist())})
    return replace(records, before=dict(cur.fetchall()))


def read_blocked(cur: Cursor, group_id: int, part: Slice) -> list[Blocked]:
    """Reads the keys of a partition whose next records must be held. Needs the position's lock, so that no other slice adds blocked keys.
    A key that is settled meanwhile still holds its records until the next `release`."""
    cur.execute(SQL["blocked"], _key(group_id, part))
    return [Blocked(bytes(key), first, held) for key, first, held in cur.fetchall()]


def hold(cur: Cursor, part: Slice, numbers: Sequence[int]) -> None:
    """Holds records that are not the next ones of their keys. They keep retry number and error. Needs `lock_due`."""
    if not numbers:
        return
    cur.execute(SQL["hold"], {"numbers": list(numbers)})
    _require_updated(part, len(numbers), cur.rowcount)


def release(cur: Cursor, group_id: int, topic: str) -> int:
    """Releases held records, if no earlier record of their key is waiting, for a try through ``topic``. Returns their number. Releases all
    records of a key together; the drain keeps their order."""
    cur.execute(SQL["any_held"], {"group_id": group_id})
    if not scalar(cur):
        return 0
    cur.execute(SQL["release"], {"group_id": group_id, "topic": topic})
    return cur.rowcount


def succeed(cur: Cursor, part: Slice, attempt_id: int, numbers: Sequence[int], rows: Sequence[int]) -> None:
    """Settles records. ``rows``: number of rows of each record; -1 for a skipped one. Needs `lock_due`."""
    if not numbers:
        return
    cur.execute(SQL["succeed"], {"numbers": array(numbers), "rows": array(rows), "attempt_id": attempt_id})
    _require_updated(part, len(numbers), cur.rowcount)


def fail(cur: Cursor, part: Slice, ladder: Ladder, attempt_id: int, failures: Sequence[FailedTry]) -> tuple[int, int]:
    """Sends records that failed again to their next delay, or fails them. Returns the numbers of both.

    Needs `lock_due`.
    """
    if not failures:
        return 0, 0
    cur.execute(
        SQL["fail"],
        {
            "numbers": [failure.number for failure in failures],
            "permanent": [failure.permanent for failure in failures],
            "types": [failure.error_type for failure in failures],
            "texts": [failure.error_text for failure in failures],
            "delays": [rung.delay for rung in ladder.rungs],
            "topics": [rung.topic for rung in ladder.rungs],
            "failed_topic": ladder.failed_topic,
            "budget": ladder.budget,
            "attempt_id": attempt_id,
        },
    )
    by_state = dict(cur.fetchall())
    _require_updated(part, len(failures), sum(by_state.values()))
    return by_state.get("WAITING", 0), by_state.get("FAILED", 0)


def _require_updated(part: Slice, expected: int, updated: int) -> None:
    if updated != expected:
        raise RecordsChanged(part=part, expected=expected, updated=updated)


def due(cur: Cursor, group_id: int) -> list[DueRange]:
    """Reads the readable ranges of the group's retry topics with due records, by the database's clock (I6)."""
    cur.execute(SQL["due"], {"group_id": group_id})
    return [
        DueRange(TopicPartition(row["topic"], row["partition"]), row["topic_id"], row["kafka_uuid"], row["first"], row["end"])
        for row in rows(cur)
    ]


def publish_stranded(cur: Cursor, group_id: int) -> int:
    """Puts waiting records back into the outbox if a drain has already passed their message. Returns their number."""
    cur.execute(SQL["publish_stranded"], {"group_id": group_id})
    return cur.rowcount


def publish_gone(cur: Cursor, group_id: int, topic_id: int, *, partition: int | None = None, before: int | None = None) -> int:
    """Puts waiting records back into the outbox if their message is gone, with its topic or with the log ``before`` an offset."""
    cur.execute(SQL["publish_gone"], {"group_id": group_id, "topic_id": topic_id, "partition": partition, "before": before})
    return cur.rowcount


def _key(group_id: int, part: Slice) -> dict[str, Any]:
    return {
        "group_id": group_id,
        "topic_id": part.topic_id,
        "partition": part.partition.partition,
        "start": part.start,
        "end": part.end,
    }
