"""The order of the page's list of retries."""

from __future__ import annotations

from tidemark.airflow.web.retries import most_failed_first


def test_consumer_with_the_most_failed_records_is_first() -> None:
    counts = {"none": (0, 9, 9), "many": (7, 0, 0), "held": (7, 0, 2), "waiting": (7, 3, 0), "also": (7, 0, 0)}
    rows = [{"consumer": name, "failed": failed, "waiting": waiting, "held": held} for name, (failed, waiting, held) in counts.items()]
    assert [row["consumer"] for row in sorted(rows, key=most_failed_first)] == ["waiting", "held", "also", "many", "none"]
