"""Repeats tests of other modules through PgBouncer, in both modes. Its settings are those in docs/deployment.md.

To run other tests through it, set ``TIDEMARK_TEST_POOLER`` to a mode (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from tests.integration import (
    test_consume_runs,
    test_continuous,
    test_group_runs,
    test_search_path,
    test_upgrade,
    test_upsert,
    test_validation,
)
from tests.integration.retry import lab as retries
from tests.integration.retry import test_drain, test_redrive
from tests.integration.retry.outbox import outbox_on
from tests.integration.rewind import lab as rewinds
from tests.integration.rewind import test_apply, test_sinks
from tests.support.kafka_topics import Topics
from tests.support.ledger import DDL, Group, all_loaded
from tests.support.members import Group as Members
from tests.support.members import parts
from tests.support.pooler import MISSING, MODES, PROGRAM, Pooler
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import schema
from tidemark.db import in_sight, pooled, session, transaction
from tidemark.doctor.database import examine_database
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import GroupError
from tidemark.group.wake import Wakeups
from tidemark.kafka.cluster import Cluster
from tidemark.local import LocalStack
from tidemark.rewind.apply import apply
from tidemark.rewind.model import ToOffset
from tidemark.rewind.plan import plan
from tidemark.spec.scope import Scope

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason=MISSING), pytest.mark.sampled]

begin, departures = test_continuous.begin, test_validation.departures
newer, pool = test_upgrade.newer, test_upgrade.pool
cities, team = test_upsert.cities, test_group_runs.team
empty_database = test_search_path.empty_database

test_bounded_run = test_consume_runs.test_records_produced_during_a_run_wait_for_the_next
test_takeover = test_consume_runs.test_newer_run_ends_the_session_of_an_older_one_that_hangs_inside_its_commit
test_takeover_of_a_continuous_run = test_continuous.test_idle_run_learns_too_that_it_was_taken_over
test_group_of_two = test_group_runs.test_members_of_a_run_share_its_partitions
test_upserts = test_upsert.test_last_record_of_a_key_wins_within_a_batch_and_between_batches
test_verdict = test_validation.test_a_run_whose_rows_meet_the_suite_has_passed
test_migration_beside_a_driver = test_upgrade.test_migration_that_is_not_additive_is_refused_while_a_driver_runs


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


def test_staged_batch_is_rewound_and_read_again(scenario: Scenario, topics: Topics) -> None:
    with rewinds.lab_on(scenario, topics, (60, 60, 60)) as lab:
        for ends in ((20, 20, 20), (50, 50, 50), (55, 55, 55)):
            test_sinks.total(lab, *ends)
        test_sinks.test_such_batches_are_taken_back_whole_and_come_back_whole(lab)


def test_rewind_is_planned_applied_and_undone(scenario: Scenario, topics: Topics) -> None:
    with rewinds.lab_on(scenario, topics, (100, 100, 60)) as lab:
        test_apply.test_undo_after_a_replay_with_another_transform_restores_everything(lab)


def test_drain_loads_what_had_failed(scenario: Scenario, topics: Topics) -> None:
    with retries.lab_on(scenario, topics) as lab:
        test_drain.test_record_whose_service_is_back_is_loaded_as_what_it_was(lab)


def test_redrives_take_turns(scenario: Scenario, topics: Topics) -> None:
    """The lock lasts from the first portion to the last, and no longer."""
    with outbox_on(scenario, topics) as outbox:
        test_redrive.test_one_redrive_of_a_consumer_at_a_time(outbox)


def test_rewind_in_the_middle_of_a_continuous_run(scenario: Scenario, topics: Topics, begin: Callable[[], Any]) -> None:
    topic = topics.create()
    scenario.write(topics=topic, run="continuous", run_for="1h").make_sink()
    topics.produce(topic, ["a", "b", "c"])
    running = begin()
    until(lambda: len(scenario.rows()) == 3, "read")
    cluster = Cluster(scenario.connections.kafka)
    with session(scenario.database_url) as connection:
        spec, scope = scenario.spec, Scope.parse(())
        planned = plan(connection, lambda _: cluster, [spec], scope, ToOffset(1), reason="it was read wrongly", by="ann")
        apply(connection, lambda _: cluster, lambda _: spec, planned.rewind_id, by="bob")
    topics.produce(topic, ["d"])
    until(lambda: scenario.rows() == [b"a", b"b", b"c", b"d"], "read again, and on")
    assert running.alive
    assert scenario.sql("SELECT start_offset, end_offset FROM tidemark.batch ORDER BY 1")[0] == (0, 1)
    scenario.check()


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


def test_nothing_of_a_session_stays_behind(empty_database: str, pooler: Pooler) -> None:
    """What a session leaves on a backend would affect the next client: settings, locks, temporary objects, LISTEN, prepared statements."""
    url = pooler.url(empty_database)
    assert schema.migrate(url) == schema.known()
    with contextlib.closing(psycopg2.connect(url)) as watch:
        group = Group(url, watch)
        group.sql(DDL)
        part = group.slice(end=10)
        group.commit(part, all_loaded(part))
        with Wakeups(url, group.name) as wakeups:
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
        with in_sight(driver), session(pooler.url(direct)) as other:
            for _ in range(3):
                with transaction(other):
                    assert seen()
            with transaction(driver), transaction(other):
                assert seen()
