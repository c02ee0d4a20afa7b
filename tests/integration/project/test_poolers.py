"""Tidemark through PgBouncer, in both modes. Its settings are those in docs/deployment/index.md.

To run other tests through it, set ``TIDEMARK_TEST_POOLER`` to a mode (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg2
import pytest
from tests.support.ledger import DDL, Group, all_loaded
from tests.support.members import Group as Members
from tests.support.members import parts
from tests.support.pooler import MODES, Pooler

from tidemark import migrations, project
from tidemark.db import keep_visible, pooled, session, transaction
from tidemark.doctor.database import examine_database
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import GroupError
from tidemark.group.wake import Wakeups
from tidemark.local import LocalStack

pytestmark = [pytest.mark.needs("pgbouncer"), pytest.mark.sampled]

REPEATED = [
    "consume/test_runs::test_records_produced_during_a_run_wait_for_the_next",
    "consume/test_runs::test_newer_run_ends_the_session_of_an_older_one_that_hangs_inside_its_commit",
    "consume/test_continuous::test_idle_run_learns_too_that_it_was_taken_over",
    "consume/test_continuous::test_run_goes_on_from_where_a_rewind_has_put_it",
    "consume/test_group_runs::test_members_of_a_run_share_its_partitions_and_keep_them",
    "sink/test_upsert::test_last_record_of_a_key_wins_within_a_batch_and_between_batches",
    "quality/test_validation::test_a_run_whose_rows_meet_the_suite_has_passed",
    "project/test_upgrade::test_migration_that_is_not_additive_is_refused_while_a_driver_runs",
    "rewind/test_sinks::test_such_batches_are_taken_back_whole_and_come_back_whole",
    "rewind/test_undo::test_undo_at_once_is_as_if_nothing_had_been",
    "retry/test_drain::test_drain_stops_in_front_of_the_first_record_that_is_not_due",
    "retry/test_redrive::test_one_redrive_of_a_consumer_at_a_time",
]
"""Tests of other modules, one for each kind of work."""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pooler(mode: str, poolers: Callable[[str], Pooler]) -> Pooler:
    return poolers(mode)


@pytest.fixture
def database_url(database_url: str, pooler: Pooler) -> str:
    """The URL of the test's database, through the pooler."""
    return pooler.url(database_url)


def test_all_kinds_of_work_pass_through_it(stack: LocalStack, mode: str, tmp_path: Path) -> None:
    tests = [f"tests/integration/{name.replace('::', '.py::')}" for name in REPEATED]
    command = [sys.executable, "-m", "pytest", "-vx", "--timeout=240", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tmp'}", *tests]
    env = os.environ | {"TIDEMARK_TEST_STACK": str(stack.folder), "TIDEMARK_TEST_POOLER": mode, "TIDEMARK_TEST_ALL": "1"}
    env.pop("TIDEMARK_TEST_SHARD", None)
    done = subprocess.run(command, cwd=project.root(), env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_members_notice_each_other_without_notifications(database_url: str) -> None:
    """They poll once per second while they join, and with each heartbeat afterwards."""
    members = Members(database_url)
    first = members.join()
    members.settle()
    second = members.join()
    members.settle()
    assert sorted(members.assignment()) == list(parts(0, 1, 2, 3))
    members.close(first)
    members.settle()
    assert second.assignment == parts(0, 1, 2, 3)
    members.close(second)


def test_nothing_of_a_session_stays_behind(stack: LocalStack, pooler: Pooler) -> None:
    """What a session leaves on a backend would affect the next client: settings, locks, temporary objects, LISTEN, prepared statements."""
    url = pooler.url(stack.create_database(f"empty_{uuid.uuid4().hex}"))
    assert migrations.migrate(url) == migrations.known()
    with contextlib.closing(psycopg2.connect(url)) as watch:
        group = Group(url, watch)
        group.sql(DDL)
        part = group.slice(end=10)
        group.commit(part, all_loaded(part))
        with contextlib.closing(Wakeups(url, group.name)) as wakeups:
            wakeups.wait(0.01)
        with session(url) as connection:
            for _ in range(2):  # without a pooler, the second call would prepare the statement
                with pytest.raises(GroupError):
                    Coordinator(connection, group.name).heartbeat("nobody", None, 1)
        group.check_conserved()
    found = """
        SELECT pg_backend_pid(), current_setting('search_path'), array(SELECT pg_listening_channels()), pg_my_temp_schema() = 0
                   OR NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
               (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
               (SELECT count(*) FROM pg_prepared_statements)
    """
    seen = {}
    with contextlib.ExitStack() as opened:  # concurrent transactions, so each has a separate backend
        for _ in range(8):
            connection = opened.enter_context(session(url))
            connection.autocommit = False
            cur = opened.enter_context(connection.cursor())
            cur.execute(found)
            pid, *state = cur.fetchone() or ()
            seen[pid] = state
    assert len(seen) == 8
    assert {repr(state) for state in seen.values()} == {repr(['"$user", public', [], True, 0, 0])}


def test_session_through_a_pooler_is_known_and_its_driver_in_sight(stack: LocalStack, pooler: Pooler) -> None:
    """Between two transactions, a driver may have no backend. A waiting driver would then be taken for dead."""
    direct = stack.env()["TIDEMARK_DATABASE_URL"]
    name = f"tidemark driver {uuid.uuid4().hex}"

    def seen() -> bool:
        with session(direct) as connection, transaction(connection) as cur:
            cur.execute("SELECT FROM pg_stat_activity WHERE application_name = %s", (name,))
            return cur.rowcount > 0

    with session(direct) as connection:
        assert not pooled(connection)
    for url, found in ((direct, False), (pooler.url(direct), True)):
        assert ("postgres pooler" in {finding.subject for finding in examine_database(url, [])}) is found
    with session(pooler.url(direct), application=name) as driver:
        assert pooled(driver)
        with keep_visible(driver), session(pooler.url(direct)) as other:
            for _ in range(3):
                with transaction(other):
                    assert seen()
            with transaction(driver), transaction(other):
                assert seen()
