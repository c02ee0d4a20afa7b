"""A preview shows the same as a plan but stores nothing: its session is read-only."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.integration.rewind.lab import Lab

from tidemark.db import Cursor
from tidemark.errors import BrokerUnavailable, Refused
from tidemark.kafka.cluster import REQUEST_TIMEOUT_S, Cluster
from tidemark.offsets.store import TaskIdentity
from tidemark.rewind.plan import MoveRequest, preview
from tidemark.rewind.plan_model import GroupPlan, Scenario, ShiftBy, ToBatch, ToCurrent, ToLatest, ToOffset, ToValidated, Undo
from tidemark.spec.scope import Scope

RUN = TaskIdentity("consume__cities", "scheduled__2026-03-29", "consume", -1, 1)


class _Reading(Cursor):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        super().execute("SET LOCAL transaction_read_only TO on")


def previewed(lab: Lab, scenario: Scenario, *scope: str, **options: bool) -> tuple[GroupPlan, ...]:
    with lab.session() as connection:
        connection.cursor_factory = _Reading
        return preview(connection, lambda _: lab.cluster, MoveRequest([lab.spec], Scope.parse(scope), scenario, **options))


def test_preview_has_the_numbers_of_the_plan(lab: Lab) -> None:
    """Covers rewinds back, forward, of some partitions and to a batch, and an undo."""
    lab.read(80, step=30, task=RUN)
    lab.read(50, 1)
    (batch,) = lab.sql("SELECT batch_id FROM tidemark.batch WHERE group_id = %s AND start_offset = 30", lab.group_id)
    for scenario, scope in (
        (ToOffset(25), ()),
        (ShiftBy(-10), (f"{lab.topic}:0-1",)),
        (ToLatest(), ()),
        (ToCurrent(), ()),
        (ToBatch(batch_id=batch[0]), ()),
        (ToBatch(dag_id=RUN.dag_id, run_id=RUN.run_id), ()),
    ):
        assert previewed(lab, scenario, *scope) == lab.plan(scenario, *scope).groups, scenario
    done = lab.rewind(ToOffset(25), f"{lab.topic}:0-1")
    lab.read(40)
    (found,) = previewed(lab, Undo(done.rewind_id))
    assert [(part.old, part.new, part.rows_back, part.failed_back, part.sink_rows > 0) for part in found.partitions] == [
        (40, 80, 50, 10, True),
        (25, 50, 23, 4, False),
    ]
    assert (found,) == lab.plan(Undo(done.rewind_id)).groups


def test_preview_is_refused_for_the_plans_reasons_and_stores_nothing(lab: Lab) -> None:
    lab.read(80)
    before = lab.audit()
    impossible = [(scenario, {}) for scenario in (ToOffset(5000), ToValidated(), Undo(10**9))]
    unneeded = [(ToOffset(90), {"beside": True}), (ToCurrent(), {"beside": True}), (ToOffset(20), {"backfill": True})]
    for scenario, options in [*impossible, *unneeded]:
        refused_alike(lab, scenario, **options)
    assert lab.audit() == before
    assert previewed(lab, ToOffset(20), f"{lab.topic}:0", beside=True) == lab.rewind(ToOffset(20), f"{lab.topic}:0", beside=True).groups
    refused_alike(lab, ToOffset(30), beside=True)


def refused_alike(lab: Lab, scenario: Scenario, **options: bool) -> None:
    with pytest.raises(Refused) as planned:
        lab.plan(scenario, f"{lab.topic}:0", **options)
    with pytest.raises(type(planned.value)) as found:
        previewed(lab, scenario, f"{lab.topic}:0", **options)
    assert str(found.value) == str(planned.value)


def test_preview_does_not_wait_long_for_a_kafka_that_is_away(lab: Lab) -> None:
    lab.read(10)
    away = Cluster({"bootstrap.servers": "127.0.0.1:1"}, timeout_s=1)
    began = time.monotonic()
    with lab.session() as connection, pytest.raises(BrokerUnavailable):
        preview(connection, lambda _: away, MoveRequest([lab.spec], Scope.parse([]), ToLatest()))
    assert time.monotonic() - began < REQUEST_TIMEOUT_S
