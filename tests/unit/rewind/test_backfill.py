"""What is left of a backfill, and how a plan says what happens to skipped records."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tidemark.records.ranges import TopicPartition
from tidemark.rewind.backfill import Backfill, BackfillPart
from tidemark.rewind.plan_model import GroupPlan, PartitionPlan, Plan, RewindState, ToLatest, Undo
from tidemark.rewind.plan_text import as_json, markdown

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


def plan_of(part: PartitionPlan, **changes: object) -> Plan:
    group = GroupPlan("departures", "departures", 1, ("analytics.departures",), (part,), 0, None, "Empty", 0, (), {})
    plan = Plan(7, RewindState.PLANNED, ToLatest(), "the newest first", "ann", NOON, NOON + timedelta(hours=4), False, "digest", (group,))
    return replace(plan, **changes)


def test_a_plan_says_what_becomes_of_what_it_skips() -> None:
    """Records are skipped permanently, or until the backfill. An undo shows none as skipped. An applied plan says how much is left."""
    skips = PartitionPlan(FLIGHTS, 1, "uuid", 30, 70, 70, 30)
    assert "40 skipped permanently;" in markdown(plan_of(skips))
    assert "40 skipped, to be read by the backfill;" in markdown(plan_of(skips, backfill=True))
    assert "40 skipped" not in markdown(plan_of(skips, scenario=Undo(3), undo_of=3))
    assert "0 skipped;" in markdown(plan_of(PartitionPlan(FLIGHTS, 1, "uuid", 70, 30, 30, 30), backfill=True))
    half = plan_of(replace(skips, backfill_left=25), backfill=True, state=RewindState.APPLIED)
    assert "backfill: 25 offsets still to read; tidemark backfill departures 7 reads them" in markdown(half)
    assert (as_json(half)["backfill"], as_json(half)["groups"][0]["partitions"][0]["backfill_left"]) == (True, 25)
    done = plan_of(replace(skips, backfill_left=0), backfill=True, state=RewindState.APPLIED)
    assert "backfill: nothing left to read" in markdown(done)
