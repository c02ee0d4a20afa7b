"""The trigger that starts the drains, on real databases."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, minutes
from tests.support.waiting import until


@pytest.fixture
def due(airflow: None) -> Any:
    """The trigger's module."""
    from tidemark.airflow.triggers import due

    return due


def test_trigger_sees_what_waits_and_what_is_due_of_consumers_with_a_ladder(lab: Lab, due: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the database's clock. Groups whose file is gone, or that have no ladder, are not looked up. A database that does not answer is
    logged once. No session stays open."""
    folder, key = lab.consumer.folder / "consumers", ("tidemark_postgres", lab.group)
    common = "topics: [t]\ntransform: m:f\nsink: {table: lake.t}\nconnections: {postgres: away}\n"
    (folder / "unladdered.yaml").write_text(common)
    trigger = due.DueTrigger()
    assert asyncio.run(trigger.look()) == {}
    lab.read("a", answers={"a": "retry"})
    lab.relay()
    (waits,) = asyncio.run(trigger.look()).values()
    assert (waits.first, waits.last) == (None, None)
    assert 200 < waits.next_s <= 300
    lab.age(minutes(5))
    seen = asyncio.run(trigger.look())
    assert list(seen) == [key]
    assert seen[key].first == seen[key].last
    assert seen[key].next_s is None
    bell = due.Bell()
    assert bell.rings(seen) == [lab.group]
    lab.sql("INSERT INTO tidemark.flow (group_id, paused) VALUES (%(group_id)s, true)", group_id=lab.group_id)
    assert bell.rings(asyncio.run(trigger.look())) == []
    lab.sql("DELETE FROM tidemark.flow")
    assert bell.rings(asyncio.run(trigger.look())) == [lab.group], "after `resume`, what became due meanwhile is drained at once"

    faraway = folder / "faraway.yaml"
    faraway.write_text(f"{common}retry: {{delays: [5m]}}\n")
    with caplog.at_level(logging.INFO, "tidemark.airflow.triggers.due"):
        for _ in range(3):
            assert list(asyncio.run(trigger.look())) == [key]
        faraway.write_text(f"{common.replace('away', 'tidemark_postgres')}retry: {{delays: [5m]}}\n")
        assert list(asyncio.run(trigger.look())) == [key]
    told = [record.getMessage() for record in caplog.records if record.name == "tidemark.airflow.triggers.due"]
    assert [line.split(" cause=")[0] for line in told] == ["cannot look up what is due of=away"]
    faraway.unlink()
    lab.consumer.spec_file.unlink()
    assert asyncio.run(trigger.look()) == {}
    until(lambda: not lab.sql("SELECT 1 FROM pg_stat_activity WHERE application_name = 'tidemark due'"), "no session is left")
