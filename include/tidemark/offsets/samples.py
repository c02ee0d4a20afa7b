"""Stored samples: written with their history, and read again. The statements never commit: the caller's transaction does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from psycopg2.extras import execute_values

from tidemark.db import rows, statements
from tidemark.offsets.window import Mark, Observation, Sample, Trend, advance

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.offsets", "samples.sql")

OF_GROUPS = SQL["lag"].replace("{of}", "").replace("{sets}", "group_id")
"""The sums of groups, without their topics and partitions."""
NOTE_SUMS = "INSERT INTO tidemark.lag_group " + OF_GROUPS.replace("{which}", "grp.group_id = %(group_id)s")

LAG_LOCK = 0x6C61_6700  # "lag"
"""With a group's id, the key of the advisory lock of a transaction that stores a sample."""

STEPS: Mapping[timedelta, timedelta] = {
    timedelta(minutes=1): timedelta(hours=2),
    timedelta(minutes=5): timedelta(days=1),
    timedelta(hours=1): timedelta(days=30),
}
"""The steps of the history, and how long each is kept. Migration 0019 and samples.sql have the same numbers."""

Key = tuple[int, int]
"""``topic_id``, partition."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A topic's sums in one step of the history. ``at`` is the start of the step, ``sampled_at`` the time of its last sample.

    ``records`` is the sum over the partitions whose lag is known; ``unknown`` counts the others. ``produced`` and ``consumed`` count
    offsets since the first sample: the difference of two moments by the time between their samples is a rate. A difference below 0 means
    that partitions have gone; the rate is then unknown.
    """

    topic: str
    at: datetime
    sampled_at: datetime
    partitions: int
    unknown: int
    records: int
    open: int | None
    replay: int
    next_at: datetime | None
    produced: int
    consumed: int

    @property
    def seconds(self) -> float | None:
        """How long the first unread record had waited. `None`: unknown."""
        if not self.records and not self.unknown:
            return 0.0
        return None if self.next_at is None else max(0.0, (self.sampled_at - self.next_at).total_seconds())


def step_for(period: timedelta) -> timedelta:
    """The finest step that is kept for this long."""
    return next((step for step, kept in STEPS.items() if period <= kept), max(STEPS))


def history(cur: Cursor, group: str, period: timedelta) -> list[Moment]:
    """A group's topics over the last ``period``, by topic, oldest first: at most 120, 288 or 720 moments of each topic."""
    step_s = int(step_for(period).total_seconds())
    cur.execute(SQL["history"], {"group": group, "step_s": step_s, "period": period})
    return [Moment(**row) for row in rows(cur)]


def may_write(cur: Cursor) -> bool:
    """Whether the role may store samples."""
    cur.execute(SQL["may_write"])
    row = cur.fetchone()
    return bool(row and row[0])


def find_group(cur: Cursor, group: str) -> int | None:
    """The id of a group; `None` if it does not exist."""
    cur.execute(SQL["find_group"], {"group": group})
    row = cur.fetchone()
    return None if row is None else int(row[0])


def state(cur: Cursor, group_id: int) -> tuple[datetime, int]:
    """The database's time, and the number of the group's last rewind."""
    cur.execute(SQL["state"], {"group_id": group_id})
    row = cur.fetchone()
    assert row is not None
    return row[0], row[1]


def replays(cur: Cursor, group_id: int) -> dict[Key, int]:
    """Where the last rewind took each partition from that has not reached it again."""
    cur.execute(SQL["replays"], {"group_id": group_id})
    return {(topic_id, partition): until for topic_id, partition, until in cur.fetchall()}


def last(cur: Cursor, group_id: int) -> dict[Key, Sample]:
    """The last sample of each partition of a group."""
    cur.execute(SQL["last_samples"], {"group_id": group_id})
    return {(row["topic_id"], row["partition"]): _sample(row) for row in rows(cur)}


def store(cur: Cursor, group_id: int, seen: Mapping[Key, Observation], *, gone: Collection[int] = (), new_window: bool = False) -> bool:
    """Stores what was seen of all of a group's partitions, all at the same time, adds it to the history and thins that. ``gone``: topics
    that are no longer in Kafka.

    Returns `False`, and stores nothing, while another process stores a sample of the group.
    """
    cur.execute(SQL["try_lock"], {"class": LAG_LOCK, "group_id": group_id})
    row = cur.fetchone()
    if not seen or not row or not row[0]:
        return False
    found = advanced(cur, group_id, seen, new_window=new_window)
    topic_ids = sorted({topic_id for topic_id, _ in seen})
    at = max(one.at for one in seen.values())
    execute_values(cur, SQL["write"], [_row(group_id, key, sample) for key, sample in sorted(found.items())], page_size=1000)
    cur.execute(SQL["forget"], {"group_id": group_id, "gone": list(gone), "at": at})
    cur.execute(SQL["note_history"], {"group_id": group_id, "topic_ids": topic_ids})
    cur.execute(SQL["forget_sums"], {"group_id": group_id})
    cur.execute(NOTE_SUMS, {"group_id": group_id, "groups": None})
    thin(cur, group_id)
    return True


def advanced(cur: Cursor, group_id: int, seen: Mapping[Key, Observation], *, new_window: bool = False) -> dict[Key, Sample]:
    """What was seen, compared with the last samples. Stores nothing. Drops what is older than the last sample of its partition."""
    before = last(cur, group_id)
    at, applied_no = max(one.at for one in seen.values()), max(one.applied_no for one in seen.values())
    cur.execute(SQL["moves"], {"group_id": group_id, "applied_no": applied_no, "at": at})
    moved = {(topic_id, partition): by for topic_id, partition, by in cur.fetchall()}
    return {
        key: advance(before.get(key), one, moved.get(key, 0), new_window=new_window)
        for key, one in seen.items()
        if key not in before or before[key].seen.at < one.at
    }


def thin(cur: Cursor, group_id: int | None = None) -> int:
    """Deletes history that is older than its step is kept for; of all groups if ``group_id`` is `None`. Returns the number of rows."""
    cur.execute(SQL["thin"], {"group_id": group_id})
    return cur.rowcount


def topic_names(cur: Cursor, topic_ids: Iterable[int]) -> dict[int, str]:
    cur.execute(SQL["topic_names"], {"topic_ids": list(topic_ids)})
    return dict(cur.fetchall())


_SEEN = (
    "position",
    "log_start",
    "log_end",
    "high_watermark",
    "truncated",
    "next_at",
    "retention",
    "committed_at",
    "applied_no",
    "replay_until",
)


def _sample(row: Mapping[str, object]) -> Sample:
    seen = Observation(at=row["sampled_at"], **{name: row[name] for name in _SEEN})  # type: ignore[arg-type]
    base, mid = (
        Mark(*(row[f"{which}_{name}"] for name in ("at", "lag", "next_at", "produced", "consumed")))  # type: ignore[arg-type]
        for which in ("base", "mid")
    )
    trend = row["trend"] and Trend(row["trend"])  # type: ignore[arg-type]
    return Sample(seen, row["produced"], row["consumed"], base, mid, trend, row["open_since"])  # type: ignore[arg-type]


def _row(group_id: int, key: Key, sample: Sample) -> tuple[object, ...]:
    seen = sample.seen
    return (
        *(group_id, *key, seen.at, seen.position, seen.log_start, seen.log_end, seen.high_watermark, seen.truncated, seen.lag),
        *(seen.next_at, seen.retention, sample.losing_from, seen.committed_at, seen.applied_no, seen.replay_until),
        *(sample.produced, sample.consumed, sample.trend),
        *(value for mark in (sample.base, sample.mid) for value in (mark.at, mark.lag, mark.next_at, mark.produced, mark.consumed)),
        sample.open_since,
    )
