"""Upgrades of the schema while drivers run: the code of this checkout is the older release, and one more migration makes the newer one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2
import pytest
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import project, schema
from tidemark.records.ranges import Slice

ADDITIVE = """
    ALTER TABLE tidemark.partition_offset ADD COLUMN note text;
    ALTER TABLE tidemark.batch ADD COLUMN note text;
    ALTER TABLE tidemark.rewound_batch ADD COLUMN note text;
    ALTER TABLE tidemark.attempt ADD COLUMN host text NOT NULL DEFAULT '';
    CREATE TABLE tidemark.annotation (annotation_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY);
    CREATE INDEX batch_note ON tidemark.batch (note) WHERE note IS NOT NULL;
"""
LIMIT_S = 180

WAITING_IN_ITS_TRANSACTION = """
    import time
    from pathlib import Path
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        if record.offset == 0:
            Path("{folder}/reading").touch()
            until = time.monotonic() + 180
            while not Path("{folder}/go").exists() and time.monotonic() < until:
                time.sleep(0.02)
        return {{"payload": record.value}}
"""


class Release:
    """The next release: this code's migrations and one more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def migrate(self, url: str, name: str, statements: str) -> list[str]:
        for file in project.migrations().glob("*.sql"):
            (self.folder / file.name).write_text(file.read_text())
        (self.folder / f"{name}.sql").write_text(statements)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(project, "migrations", lambda: self.folder)
            return schema.migrate(url)


@pytest.fixture
def newer(tmp_path: Path) -> Release:
    folder = tmp_path / "newer"
    folder.mkdir()
    return Release(folder)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_older_driver_commits_while_and_after_an_additive_migration_is_applied(
    scenario: Scenario, newer: Release, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The migration waits for a commit in progress. The driver's next commits, and the next run of the older code, use the newer schema.
    The older code's `migrate` then has nothing to do."""
    topic = scenario.topics.create(2)
    for partition in (0, 1):
        scenario.topics.produce(topic, map(str, range(40)), partition=partition)
    folder = str(tmp_path)
    scenario.write(WAITING_IN_ITS_TRANSACTION.format(folder=folder), topics=topic, batch={"max_records": 20}).make_sink()
    migrated = threading.Event()

    def hold(part: Slice) -> None:
        assert part.start == 0 or migrated.wait(LIMIT_S)

    driver = pool.submit(scenario.run, before=hold)
    until((tmp_path / "reading").exists)
    migration = pool.submit(newer.migrate, scenario.database_url, "9000_notes.additive", ADDITIVE)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidemark migrate' AND wait_event_type = 'Lock'"
    until(lambda: scenario.sql(waits)[0][0] > 0)
    (tmp_path / "go").touch()
    assert migration.result(LIMIT_S) == ["9000_notes.additive"]
    migrated.set()
    assert driver.result(LIMIT_S).records == 80
    scenario.check()

    scenario.topics.produce(topic, ["one", "more"])
    assert scenario.run().records == 2
    scenario.check()
    assert schema.migrate(scenario.database_url) == []


def test_migration_that_is_not_additive_is_refused_while_a_driver_runs(
    scenario: Scenario, newer: Release, pool: ThreadPoolExecutor
) -> None:
    """The error names the driver, and nothing changes. After the run has ended, the migration is applied, and older code is refused."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["one"])
    scenario.write(topics=topic).make_sink()
    begun, done = threading.Event(), threading.Event()

    def hold(_part: Slice) -> None:
        begun.set()
        assert done.wait(LIMIT_S)

    driver = pool.submit(scenario.run, before=hold)
    assert begun.wait(LIMIT_S)
    breaking = "ALTER TABLE tidemark.batch RENAME COLUMN loaded TO rows_loaded"
    with pytest.raises(schema.DriversRunning, match=rf"Stop all runs first: 9000_names .*\(driver {scenario.attempt_id}\)"):
        newer.migrate(scenario.database_url, "9000_names", breaking)
    done.set()
    assert driver.result(LIMIT_S).records == 1
    scenario.check()
    assert newer.migrate(scenario.database_url, "9000_names", breaking) == ["9000_names"]
    with pytest.raises(schema.SchemaMismatch, match="9000_names"):
        scenario.run()


def test_migration_that_gets_no_lock_gives_up_and_leaves_nothing(
    scenario: Scenario, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a transaction stays open, commits do not queue behind the waiting migration for long."""
    monkeypatch.setattr(schema, "LOCK_WAITS_S", (0.1, 0.1))
    with psycopg2.connect(scenario.database_url) as other, other.cursor() as cur:
        cur.execute("LOCK TABLE tidemark.partition_offset IN ROW EXCLUSIVE MODE")
        with pytest.raises(schema.MigrationBlocked, match=r"9000_notes\.additive got no lock on its tables in 2 tries"):
            newer.migrate(scenario.database_url, "9000_notes.additive", ADDITIVE)
    other.close()
    assert scenario.sql("SELECT count(*) FROM tidemark.migration") == [(len(schema.known()),)]
    assert newer.migrate(scenario.database_url, "9000_notes.additive", ADDITIVE) == ["9000_notes.additive"]
