"""The metrics by name. Those of positions and lag have the names of kafka-lag-exporter, so that its dashboards and rules work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tidemark.metrics.ledger import COMMIT_BUCKETS_S, OUTCOMES, Totals
from tidemark.metrics.state import State


def of_work(totals: Mapping[str, Totals]) -> Iterator[Metric]:
    """Counters, from 0 when the process begins."""
    records = CounterMetricFamily("tidemark_records", "Records of committed slices, by outcome.", labels=["group", "outcome"])
    made = CounterMetricFamily("tidemark_rows", "Rows that commits wrote to the sink.", labels=["group"])
    commits = HistogramMetricFamily("tidemark_commit_seconds", "Duration of commits, from BEGIN to the ledger row.", labels=["group"])
    attempts = CounterMetricFamily("tidemark_attempts", "Attempts that ended, by result.", labels=["group", "result"])
    for group, one in sorted(totals.items()):
        for outcome in OUTCOMES:
            records.add_metric([group, outcome], one.records[outcome])
        made.add_metric([group], one.rows)
        limits = (*COMMIT_BUCKETS_S, float("inf"))
        counts = accumulate(one.slower_than[limit] for limit in limits)
        buckets = [("+Inf" if limit == float("inf") else str(limit), count) for limit, count in zip(limits, counts, strict=True)]
        commits.add_metric([group], buckets=buckets, sum_value=one.commit_seconds)
        for result, count in sorted(one.attempts.items()):
            attempts.add_metric([group, result], count)
    yield from (records, made, commits, attempts)


def of_state(state: State) -> Iterator[Metric]:
    failed = GaugeMetricFamily("tidemark_failed_records", "Failed records that are not settled, by state.", labels=["group", "state"])
    for (group, name), count in sorted(state.unsettled.items()):
        failed.add_metric([group, name], count)
    yield failed
    text = "How long the oldest due retry has been due; 0 if records wait and none is due."
    yield _gauge("tidemark_retry_overdue_seconds", text, state.overdue_s)
    yield _gauge("tidemark_lost_records", "Records that retention or a re-created topic took before they were read.", state.lost)
    rewinds = CounterMetricFamily("tidemark_rewinds", "Rewinds that were applied.", labels=["group"])
    for group, count in sorted(state.rewinds.items()):
        rewinds.add_metric([group], count)
    yield rewinds
    passed = {group: float(verdict != "critical") for group, (verdict, _) in state.validations.items()}
    yield _gauge("tidemark_validation_passed", "Whether the last validation found nothing critical.", passed)
    times = {group: at.timestamp() for group, (_, at) in state.validations.items()}
    yield _gauge("tidemark_validation_timestamp_seconds", "When the last validation ended.", times)


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["group"])
    for group, value in sorted(values.items()):
        family.add_metric([group], value)
    return family
