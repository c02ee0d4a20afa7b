"""Statements on records that wait for another try, one typed function each. None of them commits; the caller does."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidemark.db import REWIND_LOCK, array, rows, statements
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
COLUMNS = ("numbers", "hops", "topic_ids", "partitions", "offsets", "millis", "digests")
"""Those of `Waiting`."""
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
    """Waiting records as columns (numpy arrays), in the order of the messages that are registered for them in drained partitions.

    The columns other than ``numbers`` and ``hops`` describe the original records.
    """

    numbers: Any
    hops: Any
    """The offsets of the messages."""
    topic_ids: Any
    partitions: Any
    offsets: Any
    millis: Any
    """`NO_MILLIS`: it has no timestamp."""
    digests: Any
    """The SHA-256 of key and value, 32 bytes each; zeros for null."""
    topics: Mapping[int, str]
    """Names by topic id."""
    headers: Mapping[int, str]
    """As stored in the row, by number; records that have none are missing."""
    before: Mapping[int, int] = field(default_factory=dict)
    """With an order by key: by number, the offset of the earlier record of its key that must be settled first."""

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, which: Any) -> Waiting:
        """Some of them: a mask, or their places."""
        columns = {name: getattr(self, name)[which] for name in COLUMNS}
        return replace(self, **columns)

    @staticmethod
    def joined(all_: Sequence[Waiting]) -> Waiting:
        import numpy as np

        columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in all_]) for name in COLUMNS}
        mappings: dict[str, Any] = {
            name: dict(item for each in all_ for item in getattr(each, name).items()) for name in ("topics", "headers", "before")
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
    """How far a partition of a retry topic may be read. ``first`` is the first registered message."""

    partition: TopicPartition
    topic_id: int
    kafka_uuid: str
    first: int
    end: int


@dataclass(kw_only=True, eq=False)
class RecordsChanged(Broken):
    """Records that this transaction had locked could not be updated."""

    part: Slice
    wanted: int
    found: int

    def __str__(self) -> str:
        tried = counted(self.wanted, "tried record")
        return f"{self.part}: only {self.found:,} of {tried} could be updated. Nothing of this slice was stored."


def by_index(cur: Cursor) -> None:
    """Makes the rest of the transaction find records by index, whatever the planner's statistics say."""
    cur.execute(SQL["by_index"])


def lock_due(cur: Cursor, group_id: int, part: Slice, read: Waiting) -> Waiting:
    """Locks the records of a drained slice that are due and still registered there, by hop, until the transaction ends. Returns those that
    were ``read``.

    Records that a rewind withdrew or an operator discarded or redrove are not among them. Raises `PositionLocked` while a rewind of the
    group is in progress.
    """
    import numpy as np

    with locked_position(group_id, part):
        cur.execute(SQL["lock_out_rewinds"], {"class": REWIND_LOCK, "group_id": group_id})
    cur.execute(SQL["lock_due"], _key(group_id, part))
    locked = dict(cur.fetchall())
    hops = np.array([locked.get(number, NOWHERE) for number in read.numbers.tolist()], np.int64)
    return read.chosen(hops == read.hops)


def read_due(cur: Cursor, group_id: int, part: Slice) -> Waiting:
    """The records that `lock_due` would lock now. Locks nothing."""
    import numpy as np

    found = io.BytesIO()
    select = cur.mogrify(SQL["read_due"].rstrip("; \n"), {**_key(group_id, part), "no_millis": str(NO_MILLIS)}).decode()
    cur.copy_expert(f"COPY ({select}) TO STDOUT (FORMAT binary)", found)
    whole = found.getbuffer()[COPY_HEADER_BYTES:-COPY_END_BYTES]
    rows_ = np.frombuffer(whole, np.dtype([(name, kind) for name, kind in COPIED]))
    columns: dict[str, Any] = {name: rows_[name].astype(np.int64) for name in COLUMNS if name != "digests"}
    topics, headers = {}, {}
    if topic_ids := np.unique(columns["topic_ids"]).tolist():
        cur.execute(SQL["topic_names"], {"topic_ids": topic_ids})
        topics = dict(cur.fetchall())
    if with_headers := columns["numbers"][rows_["with_headers"] != 0].tolist():
        cur.execute(SQL["headers"], {"numbers": array(with_headers)})
        headers = dict(cur.fetchall())
    return Waiting(**columns, digests=np.ascontiguousarray(rows_["digests"]), topics=topics, headers=headers)


def in_order(cur: Cursor, group_id: int, records: Waiting) -> Waiting:
    """The same records with ``before`` set: the records that must be settled first, in this slice or elsewhere. Needs `lock_due`."""
    if not len(records):
        return records
    cur.execute(SQL["before"], {"group_id": group_id, "numbers": array(records.numbers.tolist())})
    return replace(records, before=dict(cur.fetchall()))


def read_blocked(cur: Cursor, group_id: int, part: Slice) -> list[Blocked]:
    """The keys of a partition whose next records must be held. Needs the lock of the position, so that no other slice adds blocked keys.
    A key that is settled meanwhile still holds its records until the next `release`."""
    cur.execute(SQL["blocked"], _key(group_id, part))
    return [Blocked(bytes(key), first, held) for key, first, held in cur.fetchall()]


def hold(cur: Cursor, part: Slice, numbers: Sequence[int]) -> None:
    """Holds records that are not next of their key. They keep their retry number and error. Needs `lock_due`."""
    if not numbers:
        return
    cur.execute(SQL["hold"], {"numbers": list(numbers)})
    if cur.rowcount != len(numbers):
        raise RecordsChanged(part=part, wanted=len(numbers), found=cur.rowcount)


def release(cur: Cursor, group_id: int, topic: str) -> int:
    """Releases held records for a try through ``topic`` once no earlier record of their key is waiting. Returns how many. All records of a
    key are released together; the drain keeps their order."""
    cur.execute(SQL["any_held"], {"group_id": group_id})
    if not (cur.fetchone() or (False,))[0]:
        return 0
    cur.execute(SQL["release"], {"group_id": group_id, "topic": topic})
    return cur.rowcount


def succeed(cur: Cursor, part: Slice, attempt_id: int, numbers: Sequence[int], rows: Sequence[int]) -> None:
    """Settles records. ``rows`` is the number of rows each produced; -1: it was skipped. Needs `lock_due`."""
    if not numbers:
        return
    cur.execute(SQL["succeed"], {"numbers": array(numbers), "rows": array(rows), "attempt_id": attempt_id})
    if cur.rowcount != len(numbers):
        raise RecordsChanged(part=part, wanted=len(numbers), found=cur.rowcount)


def fail(cur: Cursor, part: Slice, ladder: Ladder, attempt_id: int, failures: Sequence[FailedTry]) -> tuple[int, int]:
    """Sends records that failed again to their next delay, or fails them. Returns how many will be retried and how many have failed.

    Needs `lock_due`.
    """
    if not failures:
        return 0, 0
    rungs = [rung for number in range(1, len(ladder.delays) + 1) if (rung := ladder.rung(number)) is not None]
    cur.execute(
        SQL["fail"],
        {
            "numbers": [failure.number for failure in failures],
            "permanent": [failure.permanent for failure in failures],
            "types": [failure.error_type for failure in failures],
            "texts": [failure.error_text for failure in failures],
            "delays": [rung.delay for rung in rungs],
            "topics": [rung.topic for rung in rungs],
            "failed_topic": ladder.failed_topic,
            "budget": ladder.budget,
            "attempt_id": attempt_id,
        },
    )
    found = dict(cur.fetchall())
    if sum(found.values()) != len(failures):
        raise RecordsChanged(part=part, wanted=len(failures), found=sum(found.values()))
    return found.get("WAITING", 0), found.get("FAILED", 0)


def due(cur: Cursor, group_id: int) -> list[DueRange]:
    """How far each partition of the group's retry topics with due records may be read, by the database's clock (I6)."""
    cur.execute(SQL["due"], {"group_id": group_id})
    return [
        DueRange(TopicPartition(row["topic"], row["partition"]), row["topic_id"], row["kafka_uuid"], row["first"], row["end"])
        for row in rows(cur)
    ]


def publish_stranded(cur: Cursor, group_id: int) -> int:
    """Puts waiting records whose message a drain has already passed back into the outbox. Returns how many."""
    cur.execute(SQL["publish_stranded"], {"group_id": group_id})
    return cur.rowcount


def publish_gone(cur: Cursor, group_id: int, topic_id: int, *, partition: int | None = None, before: int | None = None) -> int:
    """Puts waiting records back into the outbox whose message is gone: with its topic, or with the log ``before`` an offset."""
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
