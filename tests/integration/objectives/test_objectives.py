"""Objectives of a real group: what counts, what is stored, and when the trigger of the DAG ``watch`` fires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.kafka_topics import Topics
from tests.support.rewound import rewound
from tests.support.roles import Roles
from tests.support.scenario import Scenario, tidy_imports
from tests.support.transforms import PICKY
from tests.support.waiting import until

from tidemark.db import session, transaction
from tidemark.local.airflow_settings import connections_env
from tidemark.objectives import Objective, ObjectiveChanges, changes, report
from tidemark.offsets import flow, samples, store
from tidemark.offsets.flow import FlowTarget
from tidemark.offsets.window import Observation
from tidemark.profiles import Profile

MINUTE = timedelta(minutes=1)
POSTGRES = "AIRFLOW_CONN_TIDEMARK_POSTGRES"
NOTHING = ObjectiveChanges({}, ())
SLO = {"lag": "10m", "failed": 0, "freshness": "1h"}


class Watched:
    """A consumer that has read three records from each of two partitions; one record failed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.topic = scenario.topics.create(2)
        scenario.write(PICKY, topics=self.topic, slo=SLO).make_sink()
        scenario.topics.produce(self.topic, ["a", "bad", "c"])
        scenario.topics.produce(self.topic, ["d", "e", "f"], partition=1)
        scenario.run()

    def look(self, *, stored: bool = True) -> ObjectiveChanges:
        with session(self.scenario.database_url) as connection, transaction(connection) as cur:
            return report(cur, self.scenario.spec) if stored else changes(cur, self.scenario.spec)

    def sample(self, *ends: int, waits: float | None = None, partitions: tuple[int, ...] = (0, 1)) -> None:
        """Stores a sample with these end offsets. The first unread record of a partition has waited for ``waits`` minutes."""
        with session(self.scenario.database_url) as connection, transaction(connection) as cur:
            group_id = store.ensure_group(cur, self.scenario.spec.group)
            now, applied_no = samples.state(cur, group_id)
            seen = {}
            for topic_id, partition, position in self.positions():
                if partition in partitions:
                    next_at = now - waits * MINUTE if waits is not None and position < ends[partition] else None
                    seen[topic_id, partition] = Observation(now, position, 0, ends[partition], next_at=next_at, applied_no=applied_no)
            assert samples.store(cur, group_id, seen)

    def positions(self) -> list[tuple[int, int, int]]:
        return self.scenario.sql("SELECT topic_id, partition, next_offset FROM tidemark.partition_offset ORDER BY 1, 2")

    def pass_(self, minutes: float) -> None:
        """Makes commits and samples older by this many minutes."""
        age = minutes * MINUTE
        self.scenario.sql("UPDATE tidemark.partition_offset SET committed_at = committed_at - %s", age)
        self.scenario.sql("UPDATE tidemark.lag_partition SET sampled_at = sampled_at - %s, next_at = next_at - %s", age, age)

    def settle(self) -> None:
        self.scenario.sql("UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL")

    def reported(self) -> dict[str, str]:
        return dict(self.scenario.sql("SELECT objective, missed FROM tidemark.objective"))


@pytest.fixture
def watched(scenario: Scenario) -> Watched:
    return Watched(scenario)


def test_failed_records_are_reported_once_and_again_after_a_recovery(watched: Watched) -> None:
    """Looking alone stores nothing, so news is found again if a run dies before it reports. A consumer that has not run, or has no
    objectives, has nothing to report."""
    watched.sample(3, 3)
    miss = ObjectiveChanges({Objective.FAILED: "1 failed record, objective 0"}, ())
    assert [watched.look(stored=False), watched.look(stored=False), watched.look(), watched.look()] == [miss, miss, miss, NOTHING]
    assert watched.reported() == {"failed": "1 failed record, objective 0"}
    watched.settle()
    assert [watched.look(), watched.look()] == [ObjectiveChanges({}, (Objective.FAILED,)), NOTHING]
    assert watched.reported() == {}
    watched.scenario.sql("UPDATE tidemark.failed_record SET state = 'FAILED'")
    assert watched.look() == miss
    watched.scenario.set(slo={"lag": "1h"})
    assert watched.look() == ObjectiveChanges({}, (Objective.FAILED,)), "it is no longer an objective"
    watched.scenario.set(group="never_ran")
    assert watched.look() == NOTHING


def test_lag_and_freshness_are_missed_while_records_wait_and_recover_when_they_are_read(watched: Watched) -> None:
    """No objective is missed while no record waits, however old the last commit is. Freshness allows more time than lag."""
    watched.settle()
    watched.pass_(240)
    watched.sample(3, 3)
    assert watched.look() == NOTHING
    watched.scenario.topics.produce(watched.topic, ["g"], partition=1)
    watched.sample(3, 4, waits=14)
    assert watched.look() == ObjectiveChanges({Objective.LAG: "lag is 14 min, objective 10m"}, ())
    watched.pass_(61)
    watched.sample(3, 4, waits=75)
    (missed,) = watched.look().missed.items()
    assert missed[0] is Objective.FRESHNESS
    watched.scenario.run()
    watched.sample(3, 4)
    assert watched.look() == ObjectiveChanges({}, (Objective.FRESHNESS, Objective.LAG))


def test_lag_without_a_sample_is_unknown_and_reported_once(watched: Watched) -> None:
    """This is reported after the objective's own time, because it may still be met until then. A partition that is missing from the last
    sample no longer exists in Kafka."""
    watched.settle()
    watched.sample(3, 3)
    watched.pass_(9)
    assert watched.look() == NOTHING
    watched.pass_(5)
    (text,) = watched.look().missed.values()
    assert text.startswith("lag is unknown since ")
    assert watched.look() == NOTHING
    watched.sample(3, partitions=(0,))
    assert watched.look() == ObjectiveChanges({}, (Objective.LAG,))


def test_what_is_paused_or_replayed_after_a_rewind_raises_no_alarm(watched: Watched) -> None:
    """This holds even if the replay takes longer than the objectives allow. Records that wait in another partition do count."""
    watched.settle()
    with session(watched.scenario.database_url) as connection, transaction(connection) as cur:
        flow.pause(cur, store.ensure_group(cur, watched.scenario.spec.group), [FlowTarget(watched.topic, 1)], "the sink is being moved")
    rewound(watched.scenario, "--to-earliest", "--topic", f"{watched.topic}:0")
    watched.sample(3, 9, waits=90)
    watched.pass_(90)
    assert [position for _, _, position in watched.positions()] == [0, 3]
    assert watched.look() == NOTHING
    with session(watched.scenario.database_url) as connection, transaction(connection) as cur:
        flow.resume(cur, store.ensure_group(cur, watched.scenario.spec.group), [FlowTarget()])
    assert list(watched.look().missed) == [Objective.LAG, Objective.FRESHNESS]


def test_of_two_reports_at_the_same_time_one_has_the_news(watched: Watched) -> None:
    """The second waits for the first one's row."""
    watched.sample(3, 3)
    spec, url = watched.scenario.spec, watched.scenario.database_url
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool, session(url) as connection:
        with transaction(connection) as cur:
            first = report(cur, spec)
            second = pool.submit(watched.look)
            until(lambda: watched.scenario.sql(waits), "the second waits")
        assert (list(first.missed), second.result(60)) == ([Objective.FAILED], NOTHING)


# The trigger


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the DAG, with a temporary Airflow home."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    from tidemark.airflow.dags import watch

    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(watch, "RENEW_AFTER_S", 0.5)
    return watch


def connect(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(POSTGRES, connections_env(url, {}, "local[1]")[POSTGRES])


async def fired(trigger: Any) -> list[str]:
    """Returns the payload of the trigger's only event."""
    events = [event.payload async for event in trigger.run()]
    assert len(events) == 1
    payload: list[str] = events[0]
    return payload


def test_trigger_fires_with_the_consumers_that_have_news_and_without_names_when_its_time_is_over(
    watched: Watched, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks repeatedly in a thread, and stores nothing. It also ends when another consumer has gained objectives, so that the next run
    has a task for it. It never names consumers other than its own."""
    name = watched.scenario.name
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(watched.scenario.folder / "consumers"))
    connect(monkeypatch, watched.scenario.database_url)
    watched.sample(3, 3)
    trigger = watch.ObjectivesTrigger([name])
    assert trigger.serialize() == ("tidemark.airflow.dags.watch.ObjectivesTrigger", {"consumers": [name]})
    assert [asyncio.run(fired(trigger)) for _ in range(2)] == [[name], [name]]
    assert asyncio.run(fired(watch.ObjectivesTrigger(["other"]))) == []
    watched.look()

    async def settled_while_it_waits() -> list[str]:
        waiting = asyncio.create_task(fired(trigger))
        done, _ = await asyncio.wait([waiting], timeout=1)
        assert not done
        await asyncio.to_thread(watched.settle)
        return await waiting

    assert asyncio.run(settled_while_it_waits()) == [name]
    watched.look()
    monkeypatch.setattr(watch, "RUN_FOR_S", 0.5)
    assert asyncio.run(fired(trigger)) == []
    sessions = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'tidemark watch'"  # one ends some time after it was closed
    until(lambda: not watched.scenario.sql(sessions), "no session is left")


@pytest.fixture
def lesser(roles: Roles, topics: Topics, project_dir: Path) -> Iterator[tuple[Watched, str, str]]:
    """A consumer of an owner, and the URLs of two roles: one may only read, the other may run."""
    with tidy_imports():
        reader, runner = roles.new("reader", Profile.READER), roles.new("runner", Profile.RUNNER)
        yield Watched(Scenario(project_dir, roles.url(roles.owner), topics)), roles.url(reader), roles.url(runner)


def test_trigger_fires_only_if_the_role_may_store_the_report(
    lesser: tuple[Watched, str, str], watch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the task would fail repeatedly. The message is logged once. The profile `runner` is sufficient."""
    watched, reader, runner = lesser
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(watched.scenario.folder / "consumers"))
    trigger = watch.ObjectivesTrigger([watched.scenario.name])
    connect(monkeypatch, reader)
    with caplog.at_level(logging.INFO, "tidemark.airflow.dags.watch"):
        assert [asyncio.run(trigger.look()) for _ in range(2)] == [[], []]
    (said,) = (record.getMessage() for record in caplog.records if record.name == "tidemark.airflow.dags.watch")
    assert said.startswith("cannot look up objectives of=tidemark_postgres cause=The role reader_")
    assert "lacks rights of the profile runner" in said
    connect(monkeypatch, runner)
    assert asyncio.run(trigger.look()) == [watched.scenario.name]
    with session(runner) as connection, transaction(connection) as cur:
        assert list(report(cur, watched.scenario.spec).missed) == [Objective.FAILED]
    assert asyncio.run(trigger.look()) == []
