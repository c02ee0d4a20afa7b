"""What is left of a backfill, and what can be backfilled."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tidemark.records.ranges import TopicPartition
from tidemark.rewind.backfill import Backfill, BackfillPart
from tidemark.rewind.plan_model import PartitionPlan

FLIGHTS = TopicPartition("flights", 0)
NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("position", "end", "left"),
    [(30, 70, 40), (50, 70, 20), (70, 70, 0), (50, 60, 10), (50, 40, 0), (30, 30, 0)],
    ids=["not begun", "half", "done", "cut ahead", "cut behind", "withdrawn"],
)
def test_what_is_left_ends_where_the_group_reads_itself(position: int, end: int, left: int) -> None:
    """The number of records that the rewind skipped does not change."""
    part = BackfillPart(FLIGHTS, 1, "uuid", 30, position, end, 70)
    whole = Backfill(7, "departures", 1, "side", 2, (part, part))
    assert (part.left, whole.left, whole.skipped) == (left, 2 * left, 80)


@pytest.mark.parametrize(
    ("position", "target", "to", "skips"),
    [(30, 70, 70, True), (30, 30, 30, False), (30, 10, 10, False), (30, 40, 70, False)],
    ids=["forward", "nowhere", "back", "to the start of a log that begins behind the target"],
)
def test_only_records_that_kafka_has_can_be_backfilled(position: int, target: int, to: int, skips: bool) -> None:
    assert PartitionPlan(FLIGHTS, 1, "uuid", position, target, to, min(target, position)).can_be_backfilled is skips
