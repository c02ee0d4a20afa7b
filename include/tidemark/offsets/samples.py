"""Stores samples with their history, and reads them. The statements never commit: the caller's transaction does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from psycopg2.extras import execute_values

from tidemark.db import rows, scalar, single_row, statements
from tidemark.offsets.window import Mark, Observation, Sample, Trend, advance
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.offsets", "samples.sql")

OF_GROUPS = SQL["lag"].replace("{of}", "").replace("{sets}", "group_id")
"""SQL for the sums of groups, without topics and partitions."""
NOTE_SUMS = "INSERT INTO tidemark.lag_group " + OF_GROUPS.replace("{which}", "grp.group_id = %(group_id)s")

LAG_LOCK = 0x6C61_6700  # "lag"
"""Class of the advisory lock, on a group's id, of a transaction that stores a sample."""

STEPS: Mapping[timedelta, timedelta] = {
    timedelta(minutes=1): timedelta(hours=2),
    timedelta(minutes=5): timedelta(days=1),
    timedelta(hours=1): timedelta(days=30),
}
"""The steps of the history, and how long each is kept. `sql/0006_lag.sql` and samples.sql use the same values."""

Key = tuple[int, int]
"""``topic_id``, partition."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A topic's sums in one step of the history. ``at`` is the start of the step, ``sampled_at`` the time of its sample with the largest
    lag.

    ``records`` is the sum over the partitions whose lag is known; ``unknown`` counts the others. ``produced`` and ``consumed`` count
    offsets since the first sample: the difference of two moments, divided by the time between their samples, is a rate. A negative
    difference means that partitions are gone; the rate is then unknown.
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
    """Returns the finest step that is kept for this long."""
    return next((step for step, kept_for in STEPS.items() if period <= kept_for), max(STEPS))


def history(cur: Cursor, group: str, period: timedelta) -> list[Moment]:
    """Reads a group's history over the last ``period``, by topic, oldest first: at most 120, 288 or 720 moments per topic."""
    step_s = int(step_for(period).total_seconds())
    cur.execute(SQL["history"], {"group": group, "step_s": step_s, "period": period})
    return [Moment(**row) for row in rows(cur)]


def may_write(cur: Cursor) -> bool:
    """Whether the role may store samples."""
    cur.execute(SQL["may_write"])
    return bool(scalar(cur))


def state(cur: Cursor, group_id: int) -> tuple[datetime, int]:
    """Reads the database's time, and the number of the group's last rewind."""
    cur.execute(SQL["state"], {"group_id": group_id})
    at, applied_no = single_row(cur)
    return at, applied_no


@dataclass(frozen=True, slots=True)
class Replay:
    """A partition that a rewind moved back and that has not yet reached its old position ``until`` again."""

    partition: TopicPartition
    topic_id: int
    rewind_id: int
    until: int


def replays(cur: Cursor, group: str) -> list[Replay]:
    """Returns the partitions that a group is reading again: their lag is caused by a rewind, not an incident."""
    cur.execute(SQL["replays"], {"group": group})
    return [Replay(TopicPartition(topic, partition), *values) for topic, partition, *values in cur.fetchall()]


def last(cur: Cursor, group_id: int) -> dict[Key, Sample]:
    """Reads the last sample of each partition of a group."""
    cur.execute(SQL["last_samples"], {"group_id": group_id})
    return {(row["topic_id"], row["partition"]): _sample(row) for row in rows(cur)}


def store(
    cur: Cursor, group_id: int, observations: Mapping[Key, Observation], *, gone: Collection[int] = (), new_window: bool = False
) -> bool:
    """Stores simultaneous observations of all of a group's partitions, adds them to the history and thins it. ``gone``: ids of topics that
    are no longer in Kafka.

    Returns `False`, and stores nothing, while another process stores a sample of the group.
    """
    cur.execute(SQL["try_lock"], {"class": LAG_LOCK, "group_id": group_id})
    if not scalar(cur) or not observations:
        return False
    new_samples = advanced(cur, group_id, observations, new_window=new_window)
    topic_ids = sorted({topic_id for topic_id, _ in observations})
    at = max(each.at for each in observations.values())
    new_rows = [_row(group_id, key, sample) for key, sample in sorted(new_samples.items())]
    if new_rows:
        names = list(new_rows[0])
        changes = ", ".join(f"{name} = excluded.{name}" for name in names[3:])
        statement = SQL["write"].format(columns=", ".join(names), changes=changes)
        execute_values(cur, statement, [tuple(row.values()) for row in new_rows], page_size=1000)
    cur.execute(SQL["forget"], {"group_id": group_id, "gone": list(gone), "at": at})
    cur.execute(SQL["note_history"], {"group_id": group_id, "topic_ids": topic_ids})
    cur.execute(SQL["forget_sums"], {"group_id": group_id})
    cur.execute(NOTE_SUMS, {"group_id": group_id, "groups": None})
    thin(cur, group_id)
    return True


def advanced(cur: Cursor, group_id: int, observations: Mapping[Key, Observation], *, new_window: bool = False) -> dict[Key, Sample]:
    """Returns the samples that follow the last ones. Stores nothing. Drops observations older than their partition's last sample."""
    last_samples = last(cur, group_id)
    at, applied_no = max(each.at for each in observations.values()), max(each.applied_no for each in observations.values())
    cur.execute(SQL["moves"], {"group_id": group_id, "applied_no": applied_no, "at": at})
    moves = {(topic_id, partition): by for topic_id, partition, by in cur.fetchall()}
    return {
        key: advance(last_samples.get(key), each, moves.get(key, 0), new_window=new_window)
        for key, each in observations.items()
        if key not in last_samples or last_samples[key].observation.at < each.at
    }


def thin(cur: Cursor, group_id: int | None = None) -> int:
    """Deletes history past the retention of its step, of all groups if ``group_id`` is `None`. Returns the number of rows."""
    cur.execute(SQL["thin"], {"group_id": group_id})
    return cur.rowcount


def topic_names(cur: Cursor, topic_ids: Iterable[int]) -> dict[int, str]:
    cur.execute(SQL["topic_names"], {"topic_ids": list(topic_ids)})
    return dict(cur.fetchall())


_OBSERVED = [field.name for field in fields(Observation) if field.name != "at"]
_MARKED = [field.name for field in fields(Mark)]


def _sample(row: Mapping[str, object]) -> Sample:
    observation = Observation(at=row["sampled_at"], **{name: row[name] for name in _OBSERVED})  # type: ignore[arg-type]
    base, mid = (
        Mark(*(row[f"{which}_{name}"] for name in _MARKED))  # type: ignore[arg-type]
        for which in ("base", "mid")
    )
    trend = row["trend"] and Trend(row["trend"])  # type: ignore[arg-type]
    return Sample(observation, row["produced"], row["consumed"], base, mid, trend, row["open_since"])  # type: ignore[arg-type]


def _row(group_id: int, key: Key, sample: Sample) -> dict[str, object]:
    """A sample as a row: values by column, the primary key first."""
    now = sample.observation
    key_columns = {"group_id": group_id, "topic_id": key[0], "partition": key[1]}
    observed = {"sampled_at": now.at, "lag": now.lag, **{name: getattr(now, name) for name in _OBSERVED}}
    compared = {name: getattr(sample, name) for name in ("losing_from", "produced", "consumed", "trend", "open_since")}
    marks = {f"{which}_{name}": getattr(getattr(sample, which), name) for which in ("base", "mid") for name in _MARKED}
    return {**key_columns, **observed, **compared, **marks}
