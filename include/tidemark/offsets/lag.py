"""Lag and health of groups, as of their last samples.

`groups` and `group` read only Postgres, in two queries. The CLI, the page in Airflow and the metrics all show their results.
`tidemark.offsets.sampling` takes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
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
"""Returns Airflow's facts, by group."""
MOST = 10_000
"""Limit of the count of a group's failed records."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group, of a topic (with ``topic``) or of a partition (with ``partition`` too), as of ``sampled_at``.

    `None` is unknown, everywhere. Numbers of several partitions are sums; times are those of the partition that is furthest behind.
    """

    group: str
    topic: str | None
    partition: int | None
    health: Health
    """For a group, of everything it does; for a topic or a partition, of reading only."""
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
    """Records after the last stable offset: of open transactions, or behind one."""
    open_s: float | None
    """How long the last stable offset had not moved, at the last sample."""
    seconds: float | None
    """Age of the first unread record: its timestamp compared with the database's clock. 0 without lag."""
    clock_ahead: bool
    """The record's timestamp is later than the database's clock, so ``seconds`` is 0."""
    first_unread_at: datetime | None
    """Timestamp of the first unread record."""
    produced_per_s: float | None
    consumed_per_s: float | None
    """Excludes moves by rewinds and resets."""
    catch_up_s: float | None
    """Time to catch up at these rates."""
    never: bool
    """At these rates, the lag grows."""
    committed_at: datetime | None
    retention_used: float | None
    """Age of the first unread record as a share of retention; the largest of several partitions. From 1 on, it may be deleted."""
    deleted: int
    """Unread records that retention has deleted; the next run stores them as lost ranges, or refuses to skip them."""
    replay_records: int
    """Records to read until the position is where it was before the last rewind."""
    replay_s: float | None
    """Time to read them at the current rate."""
    sampled_at: datetime | None
    """Of the oldest sample."""
    age_s: float | None
    position: int | None = None
    """This and the next fields: only for a partition."""
    log_start: int | None = None
    log_end: int | None = None
    replay_until: int | None = None


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A group's lag and facts. ``topics`` and ``partitions`` are empty in an overview. ``lost_unknown``: lost ranges of unknown length.

    ``validation_id``, ``verdict``: the last validation whose rows still exist.
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


def groups(cur: Cursor, names: Collection[str] | None = None) -> list[GroupLag]:
    """Reads all groups (``names``: only these), worst first, without topics and partitions."""
    return sorted(each_group(cur, dict, names), key=worst_first)


def each_group(cur: Cursor, dags: Dags, names: Collection[str] | None) -> Iterator[GroupLag]:
    """Reads the same groups by name, one after the other. ``dags`` is called after the queries.

    Objects of a thousand groups at once let Python's garbage collector search the whole process more often, which takes an api-server
    0.3 s.
    """
    return _read(cur, [SQL["sums"], UNSUMMED], dags, names)


def everything(cur: Cursor, most_partitions: int) -> list[GroupLag]:
    """Reads all groups, with topics and partitions unless all groups together have more than ``most_partitions``."""
    overview = groups(cur)
    has_details = sum(each.lag.partitions for each in overview) <= most_partitions
    return list(_read(cur, [DETAILS], dict, None)) if has_details else overview


def group(cur: Cursor, name: str) -> GroupLag | None:
    """Reads a group with its topics and partitions; `None` if it does not exist."""
    return next(_read(cur, [DETAILS], dict, [name]), None)


def worst_first(group: GroupLag) -> tuple[int, float, int, str]:
    """Returns the sort key."""
    lag = group.lag
    return RANK[lag.health], -(lag.seconds or 0.0), -lag.known_records, lag.group


def _read(cur: Cursor, queries: Iterable[str], dags: Dags, names: Collection[str] | None) -> Iterator[GroupLag]:
    params = {"groups": None if names is None else list(names), "most": MOST}
    cur.execute(SQL["groups"], params)
    group_rows = rows(cur)
    sums: list[dict[str, Any]] = []
    for query in queries:
        cur.execute(query, params)
        sums += rows(cur)
    topics = topic_names(cur, {row["topic_id"] for row in sums if row.get("topic_id") is not None})
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in sums:
        by_group.setdefault(row["group_id"], []).append(row)
    dag_by_group = dags()
    for row in group_rows:
        yield _group(row, by_group.get(row["group_id"], []), topics, dag_by_group.get(row["group"]))


def _group(row: dict[str, Any], sums: list[dict[str, Any]], topics: Mapping[int, str], dag: Dag | None) -> GroupLag:
    runs = Runs(**{name: row[name] for name in _RUNS})
    ledger = LedgerFacts(**{name: row[name] for name in _LEDGER})
    lags = [_lag(row, each, topics, runs, dag, None if each.get("topic_id") is not None else ledger) for each in sums]
    total = next((lag for lag in lags if lag.topic is None), None) or _unsampled(row, runs, dag, ledger)
    return GroupLag(
        total,
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
    group: Mapping[str, Any], sums: dict[str, Any], topics: Mapping[int, str], runs: Runs, dag: Dag | None, ledger: LedgerFacts | None
) -> Lag:
    now = group["now"]
    facts = LagFacts(
        now=now,
        committed_at=max((at for at in (sums["committed_at"], group["committed_at"]) if at is not None), default=None),
        trends=frozenset(trend for trend, column in _TRENDS.items() if sums[column]),
        **{field: sums[field] for field in _FACTS},
    )
    judgement = judge(facts, runs, dag, ledger)
    known_records, produced, consumed = sums["known"] or 0, *_rates(sums)
    seconds = None
    if not sums["unknown"] and sums["timed"]:
        seconds = 0.0 if sums["next_at"] is None else (sums["sampled_at"] - sums["next_at"]).total_seconds()
    remaining = catch_up(known_records, produced, consumed)
    return Lag(
        group=group["group"],
        topic=topics.get(sums["topic_id"]) if sums.get("topic_id") is not None else None,
        partition=sums.get("partition"),
        health=judgement.health,
        why=judgement.why,
        fix=judgement.fix,
        partitions=sums["partitions"],
        unknown=sums["unknown"],
        records=None if sums["unknown"] else known_records,
        known_records=known_records,
        open=sums["open"],
        open_s=None if sums["open_for"] is None else sums["open_for"].total_seconds(),
        seconds=None if seconds is None else max(0.0, seconds),
        clock_ahead=seconds is not None and seconds < 0,
        first_unread_at=sums["next_at"],
        produced_per_s=produced,
        consumed_per_s=consumed,
        catch_up_s=None if remaining is None or sums["unknown"] else remaining.total_seconds(),
        never=grows(known_records, produced, consumed),
        committed_at=sums["committed_at"],
        retention_used=sums["retention_used"],
        deleted=sums["deleted"],
        replay_records=sums["replay"],
        replay_s=bounded(sums["replay"] / consumed).total_seconds() if sums["replay"] and consumed else None,
        sampled_at=sums["sampled_at"],
        age_s=max(0.0, (now - sums["sampled_at"]).total_seconds()),
        **{field: sums[field] for field in _OF_PARTITION if sums.get("partition") is not None},
    )


_RUNS, _LEDGER = (tuple(field.name for field in fields(facts)) for facts in (Runs, LedgerFacts))
_ZEROS = {"unknown": 0, "known_records": 0, "clock_ahead": False, "never": False, "deleted": 0, "replay_records": 0}
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


def _rates(sums: dict[str, Any]) -> tuple[float | None, float | None]:
    length = sums["window_s"]
    return (sums["produced"] / length, sums["consumed"] / length) if length else (None, None)


def _unsampled(row: Mapping[str, Any], runs: Runs, dag: Dag | None, ledger: LedgerFacts) -> Lag:
    judgement = judge(LagFacts(now=row["now"], sampled_at=None, partitions=row["partitions"]), runs, dag, ledger)
    unknown: dict[str, Any] = {field.name: None for field in fields(Lag)} | _ZEROS | asdict(judgement)
    return Lag(**unknown | {name: row[name] for name in ("group", "committed_at", "partitions")})
