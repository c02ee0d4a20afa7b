"""Statements on records that wait for another try, one typed function each. None of them commits; the caller does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tidemark.db import REWIND_LOCK, rows, statements
from tidemark.errors import Broken
from tidemark.offsets.store import locked_position
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry.ladder import Ladder
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.retry", "store.sql")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting record, registered at ``hop_offset`` of the drained partition. The other fields describe the original record."""

    number: int
    hop_offset: int
    topic_id: int
    partition: TopicPartition
    offset: int
    millis: int | None
    headers: str | None
    """As stored in the row; `None`: it has no headers."""
    digests: tuple[bytes | None, ...] = ()
    """The SHA-256 of key and value, if read by `read_due`."""
    before: int | None = None
    """With an order by key: the offset of the earlier record of its key that must be settled first."""

    def has(self, key: bytes | None, value: bytes | None) -> bool:
        """Whether these are the record's key and value, byte for byte. Needs `read_due`."""
        return self.digests == (_sha256(key), _sha256(value))


@dataclass(frozen=True, slots=True)
class Blocked:
    """A key of a partition with waiting or held records. ``first`` is the offset of the first one, ``held`` the number of held ones."""

    key: bytes
    first: int
    held: int


@dataclass(frozen=True, slots=True)
class Failure:
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


def lock_due(cur: Cursor, group_id: int, part: Slice) -> list[Waiting]:
    """Locks the records of a drained slice that are due and still registered there, by hop, until the transaction ends.

    Records that a rewind withdrew or an operator discarded or redrove are not among them. Raises `PositionLocked` while a rewind of the
    group is in progress.
    """
    with locked_position(group_id, part):
        cur.execute(SQL["lock_out_rewinds"], {"class": REWIND_LOCK, "group_id": group_id})
    cur.execute(SQL["lock_due"], _key(group_id, part))
    return _waiting(cur)


def read_due(cur: Cursor, group_id: int, part: Slice) -> list[Waiting]:
    """The records that `lock_due` would return now, with the digests of their payloads. Locks nothing."""
    cur.execute(SQL["read_due"], _key(group_id, part))
    return _waiting(cur)


def in_order(cur: Cursor, group_id: int, records: Sequence[Waiting]) -> list[Waiting]:
    """The same records with ``before`` set: the record that must be settled first, in this slice or elsewhere. Needs `lock_due`."""
    if not records:
        return []
    cur.execute(SQL["before"], {"group_id": group_id, "numbers": [record.number for record in records]})
    before = dict(cur.fetchall())
    return [replace(record, before=before.get(record.number)) for record in records]


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


def succeed(cur: Cursor, part: Slice, attempt_id: int, made: Mapping[int, int | None]) -> None:
    """Settles records. ``made`` is the number of rows each produced; `None`: it was skipped. Needs `lock_due`."""
    if not made:
        return
    states = ["SKIPPED" if rows_ is None else "LOADED" for rows_ in made.values()]
    said = {"numbers": list(made), "states": states, "rows": [rows_ or 0 for rows_ in made.values()]}
    cur.execute(SQL["succeed"], {**said, "attempt_id": attempt_id})
    if cur.rowcount != len(made):
        raise RecordsChanged(part=part, wanted=len(made), found=cur.rowcount)


def fail(cur: Cursor, part: Slice, ladder: Ladder, attempt_id: int, failures: Sequence[Failure]) -> tuple[int, int]:
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


def _waiting(cur: Cursor) -> list[Waiting]:
    return [
        Waiting(number, hop_offset, topic_id, TopicPartition(topic, partition), offset, millis, headers, tuple(map(_plain, digests)))
        for number, hop_offset, topic_id, topic, partition, offset, millis, headers, *digests in cur.fetchall()
    ]


def _sha256(value: bytes | None) -> bytes | None:
    return None if value is None else hashlib.sha256(value).digest()


def _plain(value: memoryview | None) -> bytes | None:
    return None if value is None else bytes(value)


def _key(group_id: int, part: Slice) -> dict[str, Any]:
    return {
        "group_id": group_id,
        "topic_id": part.topic_id,
        "partition": part.partition.partition,
        "start": part.start,
        "end": part.end,
    }
