"""Builds the metrics. Positions and lag have the names of kafka-lag-exporter, so that its dashboards and rules work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tidemark.db import Cursor, rows
from tidemark.metrics.ledger import COMMIT_BUCKETS_S, OUTCOMES, SQL, Totals
from tidemark.offsets.health import PAGE_ONLY, Health
from tidemark.offsets.lag import GroupLag, Lag

HEALTHS = [health for health in Health if health not in PAGE_ONLY]
PARTITIONS = 20_000
"""The most partitions in all groups together for which metrics have the labels ``topic`` and ``partition``."""


def of_work(totals: Mapping[str, Totals]) -> Iterator[Metric]:
    """Counters of committed work, from 0 when the process begins."""
    records = CounterMetricFamily("tidemark_records", "Records of committed slices, by outcome.", labels=["group", "outcome"])
    written = CounterMetricFamily("tidemark_rows", "Rows that commits wrote to the sink.", labels=["group"])
    deleted = CounterMetricFamily("tidemark_deleted_rows", "Of these, rows that delete their key's row.", labels=["group"])
    commits = HistogramMetricFamily("tidemark_commit_seconds", "Duration of commits, from BEGIN to the ledger row.", labels=["group"])
    attempts = CounterMetricFamily("tidemark_attempts", "Attempts that ended, by result.", labels=["group", "result"])
    for group, group_totals in sorted(totals.items()):
        for outcome in OUTCOMES:
            records.add_metric([group, outcome], group_totals.records[outcome])
        written.add_metric([group], group_totals.rows)
        deleted.add_metric([group], group_totals.deleted)
        limits = (*COMMIT_BUCKETS_S, float("inf"))
        counts = accumulate(group_totals.slower_than[limit] for limit in limits)
        buckets = [("+Inf" if limit == float("inf") else str(limit), count) for limit, count in zip(limits, counts, strict=True)]
        commits.add_metric([group], buckets=buckets, sum_value=group_totals.commit_seconds)
        for result, count in sorted(group_totals.attempts.items()):
            attempts.add_metric([group, result], count)
    yield from (records, written, deleted, commits, attempts)


def of_state(cur: Cursor) -> Iterator[Metric]:
    """Gauges and counters of pending, lost, rewound and validated records, without groups that have nothing to report."""

    def read(name: str) -> list[dict[str, Any]]:
        cur.execute(SQL[name])
        return rows(cur)

    failed = GaugeMetricFamily("tidemark_failed_records", "Failed records that are not settled, by state.", labels=["group", "state"])
    for row in read("unsettled"):
        failed.add_metric([row["group"], row["state"]], row["records"])
    yield failed
    text = "How long the oldest due retry has been due; 0 if records wait and none is due."
    yield _gauge("tidemark_retry_overdue_seconds", text, {row["group"]: max(row["late_s"], 0.0) for row in read("due")})
    text = "Records that retention or a re-created topic took before they were read."
    yield _gauge("tidemark_lost_records", text, {row["group"]: row["records"] for row in read("lost")})
    rewinds = CounterMetricFamily("tidemark_rewinds", "Rewinds that were applied.", labels=["group"])
    for row in read("rewinds"):
        rewinds.add_metric([row["group"]], row["rewinds"])
    yield rewinds
    validations = read("validations")
    passed = {row["group"]: float(row["verdict"] != "critical") for row in validations}
    yield _gauge("tidemark_validation_passed", "Whether the last validation found nothing critical.", passed)
    times = {row["group"]: row["validated_at"].timestamp() for row in validations}
    yield _gauge("tidemark_validation_timestamp_seconds", "When the last validation ended.", times)


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["group"])
    for group, value in sorted(values.items()):
        family.add_metric([group], value)
    return family


Field = Callable[[Lag], float | None]
"""Reads a number of a lag; `None` is unknown, and has no sample."""

OF_PARTITIONS: Mapping[str, tuple[str, Field]] = {
    "kafka_consumergroup_group_offset": ("Position: the offset of the next record to read.", lambda lag: lag.position),
    "kafka_consumergroup_group_lag": ("Records to read.", lambda lag: lag.records),
    "kafka_consumergroup_group_lag_seconds": ("How long ago the first unread record was produced.", lambda lag: lag.seconds),
}
OF_GROUPS: Mapping[str, tuple[str, Field]] = {
    "kafka_consumergroup_group_sum_lag": ("Records to read, in all partitions.", lambda lag: lag.records),
    "kafka_consumergroup_group_max_lag_seconds": ("How long ago the first unread record was produced.", lambda lag: lag.seconds),
    "tidemark_open_records": ("Records after the last stable offset, of open transactions or behind one.", lambda lag: lag.open),
    "tidemark_replay_records": ("Records left to read again after a rewind.", lambda lag: lag.replay_records),
    "tidemark_replay_seconds": ("How long that takes at the current rate.", lambda lag: lag.replay_s),
    "tidemark_catch_up_seconds": ("How long until nothing waits; missing if the lag grows.", lambda lag: lag.catch_up_s),
    "tidemark_retention_used_ratio": ("Age of the first unread record as a share of the retention.", lambda lag: lag.retention_used),
    "tidemark_unknown_partitions": ("Partitions whose lag is unknown.", lambda lag: lag.unknown),
    "tidemark_sample_age_seconds": ("Age of the sample that the lag is taken from.", lambda lag: lag.age_s),
    "tidemark_last_commit_timestamp_seconds": (
        "When a partition was last committed.",
        lambda lag: None if lag.committed_at is None else lag.committed_at.timestamp(),
    ),
}


def of_lag(groups: Sequence[GroupLag]) -> Iterator[Metric]:
    """Gauges of lag. ``groups`` include their topics and partitions if these are shown."""
    for name, (text, field) in OF_GROUPS.items():
        yield _lags(name, text, ["group"], [group.lag for group in groups], field)
    topics = [topic for group in groups for topic in group.topics]
    text = "Records to read, in all partitions of the topic."
    yield _lags("kafka_consumergroup_group_topic_sum_lag", text, ["group", "topic"], topics, lambda lag: lag.records)
    healths = GaugeMetricFamily("tidemark_health", "1 for the group's health, 0 for the others.", labels=["group", "health"])
    for group in groups:
        for health in HEALTHS:
            healths.add_metric([group.lag.group, health], float(group.lag.health is health))
    yield healths
    partitions = [partition for group in groups for partition in group.partitions]
    for name, (text, field) in OF_PARTITIONS.items():
        yield _lags(name, text, ["group", "topic", "partition"], partitions, field)
    newest: dict[tuple[str | None, int | None], Lag] = {}
    for partition in partitions:
        key = (partition.topic, partition.partition)
        if key not in newest or (partition.log_end or 0) > (newest[key].log_end or 0):
            newest[key] = partition
    logs = list(newest.values())
    yield _lags("kafka_partition_latest_offset", "Last stable offset.", ["topic", "partition"], logs, lambda lag: lag.log_end)
    yield _lags("kafka_partition_earliest_offset", "First offset in the log.", ["topic", "partition"], logs, lambda lag: lag.log_start)


def _lags(name: str, text: str, labels: Sequence[str], lags: Sequence[Lag], field: Field) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for lag in lags:
        if (value := field(lag)) is not None:
            family.add_metric([str(getattr(lag, label)) for label in labels], value)
    return family
