"""The numbers of the page's views of retries."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tidemark.airflow.web.app import _json
from tidemark.airflow.web.retries import in_seconds, most_failed_first
from tidemark.retry.pending import DueRecords


def test_consumer_with_the_most_failed_records_is_first() -> None:
    counts = {"none": (0, 9, 9), "many": (7, 0, 0), "held": (7, 0, 2), "waiting": (7, 3, 0), "also": (7, 0, 0)}
    rows = [{"consumer": name, "failed": failed, "waiting": waiting, "held": held} for name, (failed, waiting, held) in counts.items()]
    assert [row["consumer"] for row in sorted(rows, key=most_failed_first)] == ["waiting", "held", "also", "many", "none"]


def test_moments_are_texts_and_durations_are_seconds() -> None:
    late = in_seconds(DueRecords(3, *(timedelta(minutes=minutes) for minutes in (0.5, 1, 1.5))))
    answer = json.loads(_json({"at": datetime(2026, 3, 24, 14, tzinfo=UTC), "late": late, "none": in_seconds(None)}).body)
    assert answer == {"at": "2026-03-24T14:00:00Z", "late": {"records": 3, "median": 30.0, "p99": 60.0, "oldest": 90.0}, "none": None}
