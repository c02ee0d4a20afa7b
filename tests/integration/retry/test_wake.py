"""The trigger that starts the drains, on real databases."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, minutes

from tidemark.local.airflow_settings import connections_env

NOWHERE = "postgresql://nobody@127.0.0.1:9/nowhere"
POSTGRES = "AIRFLOW_CONN_TIDEMARK_POSTGRES"


@pytest.fixture
def due(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trigger's module. Airflow has connections to the test's database and to one that is unreachable."""
    env = {
        POSTGRES: connections_env(lab.url, {}, "local[1]")[POSTGRES],
        "AIRFLOW_CONN_AWAY": connections_env(NOWHERE, {}, "local[1]")[POSTGRES],
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "TIDEMARK_CONSUMERS": str(lab.consumer.folder / "consumers"),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    from tidemark.airflow import due

    return due


def fail_one(lab: Lab, value: str = "a") -> None:
    """Makes a record fail and wait in its first retry topic, with a delay of five minutes."""
    lab.say({value: "retry"})
    lab.produce(value)
    lab.run()
    lab.relay()


def sessions(lab: Lab) -> int:
    return int(lab.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidemark due'")[0][0])


def test_trigger_sees_what_waits_and_what_is_due_of_consumers_with_a_ladder(lab: Lab, due: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the database's clock. Groups whose file is gone, or that have no ladder, are not looked up. A database that does not answer is
    logged once. No session stays open."""
    folder, key = lab.consumer.folder / "consumers", ("tidemark_postgres", lab.group)
    common = "topics: [t]\ntransform: m:f\nsink: {table: lake.t}\nconnections: {postgres: away}\n"
    (folder / "unladdered.yaml").write_text(common)
    trigger = due.DueTrigger()
    assert asyncio.run(trigger.look()) == {}
    fail_one(lab)
    (waits,) = asyncio.run(trigger.look()).values()
    assert (waits.first, waits.last) == (None, None)
    assert 200 < waits.next_s <= 300
    lab.age(minutes(5))
    seen = asyncio.run(trigger.look())
    assert list(seen) == [key]
    assert seen[key].first == seen[key].last
    assert seen[key].next_s is None

    faraway = folder / "faraway.yaml"
    faraway.write_text(f"{common}retry: {{delays: [5m]}}\n")
    with caplog.at_level(logging.INFO, "tidemark.airflow.due"):
        for _ in range(3):
            assert list(asyncio.run(trigger.look())) == [key]
        faraway.write_text(f"{common.replace('away', 'tidemark_postgres')}retry: {{delays: [5m]}}\n")
        assert list(asyncio.run(trigger.look())) == [key]
    told = [record.getMessage() for record in caplog.records if record.name == "tidemark.airflow.due"]
    assert [line.split(" cause=")[0] for line in told] == ["cannot look up what is due of=away"]
    faraway.unlink()
    lab.consumer.spec_file.unlink()
    assert asyncio.run(trigger.look()) == {}
    assert sessions(lab) == 0


def test_trigger_fires_once_when_a_record_is_due_and_anew_when_that_was_taken_up(
    lab: Lab, due: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fire before a record is due, or twice for the same record, however often it polls. It polls in a thread, so the
    triggerer's event loop is not blocked."""
    for name, seconds in (("ASK_EVERY_S", 0.3), ("ASK_AT_MOST_EVERY_S", 0.05), ("QUIET_S", 0.3)):
        monkeypatch.setattr(due, name, seconds)
    fired: list[float] = []

    async def watch() -> None:
        async for _event in due.DueTrigger().run():
            fired.append(time.monotonic())

    async def play() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.to_thread(fail_one, lab)
        await quiet(asked, 3)
        assert fired == []
        await asyncio.to_thread(lab.age, minutes(5))
        await reached(lambda: len(fired) == 1)
        await quiet(asked, 3)
        assert len(fired) == 1, "it is due still"
        await asyncio.to_thread(lab.say, {"b": "retry"})
        await asyncio.to_thread(lab.drain)
        await asyncio.to_thread(fail_one, lab, "b")
        await quiet(asked, 3)
        assert len(fired) == 1
        await asyncio.to_thread(lab.age, minutes(5))
        await reached(lambda: len(fired) == 2)
        assert not watching.done()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    asks = 0
    ask = due._ask

    def counted(*arguments: Any) -> Any:
        nonlocal asks
        asks += 1
        assert threading.current_thread() is not threading.main_thread()
        return ask(*arguments)

    def asked() -> int:
        return asks

    monkeypatch.setattr(due, "_ask", counted)
    asyncio.run(play())
    assert lab.states() == {"LOADED": 1, "WAITING": 1}
    assert sessions(lab) == 0


async def reached(what: Callable[[], bool], within_s: float = 180) -> None:
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.02)


async def quiet(asked: Callable[[], int], times: int) -> None:
    """Waits until the trigger has polled ``times`` more times."""
    until = asked() + times
    await reached(lambda: asked() >= until)
