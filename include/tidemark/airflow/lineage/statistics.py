"""Counts of runs for Airflow's own statistics: StatsD, Datadog or OpenTelemetry, as ``[metrics]`` of Airflow's settings says.

The names follow Airflow 3's scheme: ``tidemark.loaded`` with tags, and with ``[metrics] legacy_names_on`` also
``tidemark.<consumer>.<task>.loaded``, for a StatsD without tags.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import psycopg2
from airflow.configuration import conf

from tidemark.airflow.version_compat import stats
from tidemark.db import DatabaseUrl
from tidemark.driver.launch import Progress, progress
from tidemark.errors import TidemarkError
from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)


def counts_of(attempt: Progress) -> dict[str, int]:
    """Returns the counts that an attempt has committed: ``records`` (offsets), and `Progress.counts`."""
    return {"records": attempt.records} | attempt.counts


def report(spec: ConsumerSpec, task_id: str, counts: Mapping[str, int]) -> None:
    """Adds an attempt's counts to the counters. Never raises: statistics must not fail a run."""
    tags = {"consumer": spec.name, "group": spec.group, "task_id": task_id}
    try:
        untagged = conf.getboolean("metrics", "legacy_names_on")
        for count, value in counts.items():
            stats.incr(f"tidemark.{count}", value, tags=tags)
            if untagged:
                stats.incr(f"tidemark.{_segment(spec.name)}.{_segment(task_id)}.{count}", value)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the statistics, the run is committed
        log.warning("statistics not sent consumer=%s cause=%s", spec.name, error)


def report_failed(spec: ConsumerSpec, task_id: str, url: DatabaseUrl, attempt_id: int) -> None:
    """Reports the counts that a failed attempt had committed. Does nothing if the database does not answer."""
    try:
        counts = counts_of(progress(url, attempt_id))
    except (TidemarkError, psycopg2.Error) as error:
        log.warning("statistics not sent consumer=%s cause=%s", spec.name, str(error).strip())
    else:
        report(spec, task_id, counts)


def _segment(name: str) -> str:
    """The name without dots, which separate the segments, as in Airflow's own names."""
    return stats.normalize_name_for_stats(name.replace(".", "__"), log_warning=False)
