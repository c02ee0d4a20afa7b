"""Upgrades of the schema while drivers run: the code of this checkout is the older release, and one more migration makes the newer one."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2
import pytest
from tests.support.points import points_among
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import migrations, project
from tidemark.db import session
from tidemark.doctor.database import examine_database
from tidemark.doctor.finding import Level
from tidemark.local import LocalStack
from tidemark.records.ranges import Slice
from tidemark.sink.steps import Step

ADDITIVE = """
    ALTER TABLE tidemark.partition_offset ADD COLUMN note text;
    ALTER TABLE tidemark.batch ADD COLUMN note text;
    ALTER TABLE tidemark.rewound_batch ADD COLUMN note text;
    ALTER TABLE tidemark.attempt ADD COLUMN host text NOT NULL DEFAULT '';
    CREATE TABLE tidemark.annotation (annotation_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
    CREATE INDEX batch_note ON tidemark.batch (note) WHERE note IS NOT NULL;
"""
LIMIT_S = 180

Migrate = Callable[[str, str, str], list[str]]


@pytest.fixture
def newer(tmp_path: Path) -> Migrate:
    """Applies the next release, with this code's migrations and one more, given its name and statements. Returns what was applied."""
    folder = tmp_path / "newer"

    def migrate(url: str, name: str, statements: str) -> list[str]:
        shutil.copytree(project.migrations(), folder, dirs_exist_ok=True)
        (folder / f"{name}.sql").write_text(statements)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(project, "migrations", lambda: folder)
            return migrations.migrate(url)

    return migrate


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_older_driver_commits_while_and_after_an_additive_migration_is_applied(
    scenario: Scenario, newer: Migrate, pool: ThreadPoolExecutor
) -> None:
    """The migration waits for a commit in progress. The driver's next commits, and the next run of the older code, use the newer schema.
    The older code's `migrate` then has nothing to do."""
    topic = scenario.topics.create(2)
    for partition in (0, 1):
        scenario.topics.produce(topic, map(str, range(40)), partition=partition)
    scenario.write(topics=topic, batch={"max_records": 20}).make_sink()
    migrated = threading.Event()

    def hold(part: Slice) -> None:
        assert part.start == 0 or migrated.wait(LIMIT_S)

    with points_among(scenario.folders[0]) as points:
        commit = points.at(Step.COMMIT, partition=0)
        driver = pool.submit(scenario.run, before=hold)
        commit.reached()
        migration = pool.submit(newer, scenario.database_url, "9000_notes.additive", ADDITIVE)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidemark migrate' AND wait_event_type = 'Lock'"
        until(lambda: scenario.sql(waits)[0][0] > 0)
        commit.release()
        assert migration.result(LIMIT_S) == ["9000_notes.additive"]
        migrated.set()
        assert driver.result(LIMIT_S).records == 80
    scenario.check()

    scenario.topics.produce(topic, ["one", "more"])
    assert scenario.run().records == 2
    scenario.check()
    assert migrations.migrate(scenario.database_url) == []


def test_migration_that_is_not_additive_is_refused_while_a_driver_runs(
    scenario: Scenario, newer: Migrate, pool: ThreadPoolExecutor
) -> None:
    """The error names the driver, and nothing changes. After the run has ended, the migration is applied, and older code is refused."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["one"])
    scenario.write(topics=topic).make_sink()
    breaking = "ALTER TABLE tidemark.batch RENAME COLUMN loaded TO rows_loaded"
    with points_among(scenario.folders[0]) as points:
        commit = points.at(Step.BEGIN)
        driver = pool.submit(scenario.run)
        commit.reached()
        with pytest.raises(migrations.DriversRunning, match=rf"Stop all runs first: 9000_names .*\(driver {scenario.attempt_id}\)"):
            newer(scenario.database_url, "9000_names", breaking)
        commit.release()
        assert driver.result(LIMIT_S).records == 1
    scenario.check()
    assert newer(scenario.database_url, "9000_names", breaking) == ["9000_names"]
    with pytest.raises(migrations.SchemaMismatch, match="9000_names"):
        scenario.run()


def test_server_that_is_too_old_is_refused_before_anything_is_changed(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    url = stack.create_database(f"old_{uuid.uuid4().hex}")
    with session(url) as connection:
        monkeypatch.setattr(migrations, "OLDEST_POSTGRES", connection.server_version // 10_000 + 1)
        with pytest.raises(migrations.PostgresTooOld, match=rf"needs {migrations.OLDEST_POSTGRES} or newer\. Nothing was changed"):
            migrations.migrate(url)
        assert migrations.applied(connection) == []
    assert [one.subject for one in examine_database(url, []) if one.level is Level.FAILURE] == ["postgres version"]


def test_migration_that_gets_no_lock_gives_up_and_leaves_nothing(
    scenario: Scenario, newer: Migrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a transaction stays open, commits do not queue behind the waiting migration for long."""
    monkeypatch.setattr(migrations, "LOCK_WAITS_S", (0.1, 0.1))
    with psycopg2.connect(scenario.database_url) as other, other.cursor() as cur:
        cur.execute("LOCK TABLE tidemark.partition_offset IN ROW EXCLUSIVE MODE")
        with pytest.raises(migrations.MigrationBlocked, match=r"9000_notes\.additive got no lock on its tables in 2 tries"):
            newer(scenario.database_url, "9000_notes.additive", ADDITIVE)
    other.close()
    assert scenario.sql("SELECT count(*) FROM tidemark.migration") == [(len(migrations.known()),)]
    assert newer(scenario.database_url, "9000_notes.additive", ADDITIVE) == ["9000_notes.additive"]
