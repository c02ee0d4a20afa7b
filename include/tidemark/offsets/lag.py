"""How far groups are behind, as of their last samples, and how they do.

`groups` and `group` read Postgres only, in two queries: the CLI, the page in Airflow and the metrics all show what they return.
`tidemark.offsets.sampling` takes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemark.db import rows
from tidemark.offsets.health import RANK, Dag, Health, LagFacts, LedgerFacts, Runs, judge
from tidemark.offsets.samples import OF_GROUPS, SQL, topic_names
from tidemark.offsets.window import Trend, bounded, catch_up, grows

if TYPE_CHECKING:
    from tidemark.db import Cursor

UNSUMMED = OF_GROUPS.replace("{which}", SQL["unsummed"])
_SETS = "GROUPING SETS ((group_id), (group_id, topic_id), (group_id, topic_id, partition)) ORDER BY 1, 2 NULLS FIRST, 3 NULLS FIRST"
DETAILS = SQL["lag"].replace("{of}", ", topic_id, partition").replace("{sets}", _SETS).replace("{which}", "true")


Dags = Callable[[], Mapping[str, Dag]]
"""Returns what Airflow knows, by group."""
MOST = 10_000
"""Failed records of a group are counted up to here."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group, of a topic (with ``topic``) or of a partition (with ``partition`` too), as of ``sampled_at``.

    `None` is unknown, everywhere. Numbers of several partitions are sums; times are those of the partition that is furthest behind.
    """

    group: str
    topic: str | None
    partition: int | None
    health: Health
    """Of a group, that of everything that it does; of a topic or a partition, that of reading it."""
    why: str
    fix: str
    partitions: int
    unknown: int
    """Partitions whose lag is unknown."""
    records: int | None
    """Records to read, up to the last stable offset. `None` if it is unknown for any partition."""
    known_records: int
    """Records to read in the partitions whose lag is known."""
    open: int | None
    """Records after the last stable offset: of transactions that are open, or behind one."""
    open_s: float | None
    """How long the last stable offset had stayed there when it was last seen."""
    seconds: float | None
    """How long ago the first unread record was produced: its timestamp compared with the database's clock. 0 if nothing waits."""
    clock_ahead: bool
    """The record's timestamp is later than the database's clock, so that ``seconds`` is 0."""
    first_unread_at: datetime | None
    """Timestamp of that record."""
    produced_per_s: float | None
    consumed_per_s: float | None
    """Without moves by rewinds and resets."""
    catch_up_s: float | None
    """How long until nothing waits, at these rates."""
    never: bool
    """Nothing catches up at these rates: the lag grows."""
    committed_at: datetime | None
    retention_used: float | None
    """The age of the first unread record as a share of the retention; of several partitions, the largest. 1 or more: it may be deleted."""
    deleted: int
    """Records that retention has deleted before they were read; the next run stores them as lost ranges, or refuses to skip them."""
    replay_records: int
    """Records to read until the position is again where the last rewind took it from."""
    replay_s: float | None
    """How long that takes at the current rate."""
    sampled_at: datetime | None
    """Of the oldest sample."""
    age_s: float | None
    position: int | None = None
    """Of a partition only, as the next ones."""
    log_start: int | None = None
    log_end: int | None = None
    replay_until: int | None = None


@dataclass(frozen=True, slots=True)
class GroupLag:
    """``topics`` and ``partitions`` are empty in an overview. ``lost_ranges``, ``lost_records``: what was lost for good;
    ``lost_unknown``: in so many of the ranges, an unknown number.

    ``validation_id``, ``verdict``: the last validation of rows that are still there.
    """

    lag: Lag
    ledger: LedgerFacts
    validation_id: int | None
    verdict: str | None
    lost_ranges: int
    lost_records: int
    lost_unknown: int
    runs: Runs
    topics: tuple[Lag, ...] = ()
    partitions: tuple[Lag, ...] = ()


def groups(cur: Cursor, dags: Dags = dict, names: Collection[str] | None = None) -> list[GroupLag]:
    """All groups (``names``: only these), worst first, without topics and partitions. ``dags``: called after Postgres was asked."""
    return sorted(_read(cur, [SQL["sums"], UNSUMMED], dags, names), key=worst_first)


def everything(cur: Cursor, most_partitions: int) -> list[GroupLag]:
    """All groups, with their topics and partitions unless these are more than ``most_partitions`` in all groups together."""
    found = groups(cur)
    few = sum(one.lag.partitions for one in found) <= most_partitions
    return _read(cur, [DETAILS], dict, None) if few else found


def group(cur: Cursor, name: str, dag: Dag | None = None) -> GroupLag | None:
    """A group with its topics and partitions; `None` if it does not exist."""
    found = _read(cur, [DETAILS], lambda: {} if dag is None else {name: dag}, [name])
    return found[0] if found else None


def worst_first(one: GroupLag) -> tuple[int, float, int, str]:
    """Sort key."""
    lag = one.lag
    return RANK[lag.health], -(lag.seconds or 0.0), -lag.known_records, lag.group


def _read(cur: Cursor, queries: Iterable[str], dags: Dags, names: Collection[str] | None) -> list[GroupLag]:
    asked = {"groups": None if names is None else list(names), "most": MOST}
    cur.execute(SQL["groups"], asked)
    found = rows(cur)
    sums: list[dict[str, Any]] = []
    for query in queries:
        cur.execute(query, asked)
        sums += rows(cur)
    topics = topic_names(cur, {row["topic_id"] for row in sums if row.get("topic_id") is not None})
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in sums:
        by_group.setdefault(row["group_id"], []).append(row)
    known = dags()
    return [_group(row, by_group.get(row["group_id"], []), topics, known.get(row["group"])) for row in found]


def _group(row: dict[str, Any], sums: list[dict[str, Any]], topics: Mapping[int, str], dag: Dag | None) -> GroupLag:
    runs = Runs(**{field.name: row[field.name] for field in fields(Runs)})
    ledger = LedgerFacts(**{field.name: row[field.name] for field in fields(LedgerFacts)})
    lags = [_lag(row, one, topics, runs, dag, None if one.get("topic_id") is not None else ledger) for one in sums]
    whole = next((lag for lag in lags if lag.topic is None), None) or _unsampled(row, runs, dag, ledger)
    return GroupLag(
        whole,
        ledger,
        row["validation_id"],
        row["verdict"],
        row["lost_ranges"],
        row["lost_records"] or 0,
        row["lost_unknown"],
        runs,
        tuple(lag for lag in lags if lag.topic is not None and lag.partition is None),
        tuple(lag for lag in lags if lag.partition is not None),
    )


def _lag(
    group: Mapping[str, Any], one: dict[str, Any], topics: Mapping[int, str], runs: Runs, dag: Dag | None, ledger: LedgerFacts | None
) -> Lag:
    now = group["now"]
    facts = LagFacts(
        now=now,
        committed_at=max((at for at in (one["committed_at"], group["committed_at"]) if at is not None), default=None),
        trends=frozenset(trend for trend, column in _TRENDS.items() if one[column]),
        **{field: one[field] for field in _FACTS},
    )
    judged = judge(facts, runs, dag, ledger)
    known, produced, consumed = one["known"] or 0, *_rates(one)
    seconds = None
    if not one["unknown"] and one["timed"]:
        seconds = 0.0 if one["next_at"] is None else (one["sampled_at"] - one["next_at"]).total_seconds()
    left = catch_up(known, produced, consumed)
    return Lag(
        group=group["group"],
        topic=topics.get(one["topic_id"]) if one.get("topic_id") is not None else None,
        partition=one.get("partition"),
        health=judged.health,
        why=judged.why,
        fix=judged.fix,
        partitions=one["partitions"],
        unknown=one["unknown"],
        records=None if one["unknown"] else known,
        known_records=known,
        open=one["open"],
        open_s=None if one["open_for"] is None else one["open_for"].total_seconds(),
        seconds=None if seconds is None else max(0.0, seconds),
        clock_ahead=seconds is not None and seconds < 0,
        first_unread_at=one["next_at"],
        produced_per_s=produced,
        consumed_per_s=consumed,
        catch_up_s=None if left is None or one["unknown"] else left.total_seconds(),
        never=grows(known, produced, consumed),
        committed_at=one["committed_at"],
        retention_used=one["retention_used"],
        deleted=one["deleted"],
        replay_records=one["replay"],
        replay_s=bounded(one["replay"] / consumed).total_seconds() if one["replay"] and consumed else None,
        sampled_at=one["sampled_at"],
        age_s=max(0.0, (now - one["sampled_at"]).total_seconds()),
        **{field: one[field] for field in _OF_PARTITION if one.get("partition") is not None},
    )


_OF_PARTITION = ("position", "log_start", "log_end", "replay_until")
_TRENDS = {
    Trend.IDLE: "idle",
    Trend.KEEPING_UP: "keeping_up",
    Trend.CATCHING_UP: "catching_up",
    Trend.FALLING_BEHIND: "falling_behind",
    Trend.WAITING: "waits",
}
_FACTS = (
    *("sampled_at", "partitions", "waiting", "never_claimed", "truncated", "paused", "deleted", "losing_from", "expires_at", "replay"),
    *("open", "open_for"),
)


def _rates(one: dict[str, Any]) -> tuple[float | None, float | None]:
    length = one["window_s"]
    return (one["produced"] / length, one["consumed"] / length) if length else (None, None)


def _unsampled(row: Mapping[str, Any], runs: Runs, dag: Dag | None, ledger: LedgerFacts) -> Lag:
    judged = judge(LagFacts(now=row["now"], sampled_at=None, partitions=row["partitions"]), runs, dag, ledger)
    nothing: dict[str, Any] = {field.name: None for field in fields(Lag)}
    known = {"group": row["group"], "health": judged.health, "why": judged.why, "fix": judged.fix, "committed_at": row["committed_at"]}
    zero = {"partitions": row["partitions"], "unknown": 0, "known_records": 0, "clock_ahead": False, "never": False, "deleted": 0}
    return Lag(**nothing | known | zero | {"replay_records": 0})
