"""The profile `runner` and the grants on the sink in docs/deployment/index.md are sufficient for runs, and grant no more than needed.
All SQL in the documentation runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from tests.support.documented import blocks
from tests.support.kafka_topics import Topics
from tests.support.roles import Roles
from tests.support.scenario import Scenario, tidy_imports
from tests.support.shell import tidemark
from tests.support.transforms import PICKY

from tidemark.consume.run import open_attempt
from tidemark.db import connect, session
from tidemark.offsets.store import TaskIdentity
from tidemark.profiles import Profile
from tidemark.quality import ValidatedRun, Verdict, validate
from tidemark.sink.fit import SinkGuardsRows


@pytest.fixture
def consumer(roles: Roles, project_dir: Path, topics: Topics) -> Iterator[Scenario]:
    """A consumer that the owner creates and migrates, and that the lesser role runs."""
    with tidy_imports():
        owners = Scenario(project_dir, roles.url(roles.owner), topics)
        roles.give(roles.run, Profile.RUNNER)
        topic = topics.create(2)
        topics.produce(topic, ["a", "bad", "c"])
        topics.produce(topic, ["d"], partition=1)
        owners.write(PICKY, topics=topic).make_sink()
        roles.give_sink(roles.run, owners.table)
        runs = Scenario(project_dir, roles.url(roles.run), topics)
        runs.name, runs.table, runs.keys = owners.name, owners.table, owners.keys
        yield runs


def test_a_role_with_the_documented_grants_runs_validates_and_looks_up_offsets(consumer: Scenario) -> None:
    """Rows, failed records, ledger and verdict: tasks can do all of their work with the documented rights alone."""
    done = consumer.run()
    assert consumer.counts() == {"loaded": 3, "failed": 1, "sink_rows": 3}
    consumer.check()
    verdict = validate(consumer.database_url, ValidatedRun(attempt_id=done.attempt_id), group=consumer.name, suites={consumer.table: None})
    assert verdict.verdict is Verdict.PASSED
    assert tidemark(consumer, "offsets", consumer.name).returncode == 0


def test_a_role_to_which_row_level_security_applies_is_refused_by_check_and_run_alike(consumer: Scenario, roles: Roles) -> None:
    """Postgres has no COPY into such a table, so not even the good rows could load."""
    roles.own(f"ALTER TABLE {consumer.table} ENABLE ROW LEVEL SECURITY; CREATE POLICY all_rows ON {consumer.table} USING (true)")
    checked = tidemark(consumer, "consumers", "check", consumer.name)
    assert checked.returncode == 1
    with pytest.raises(SinkGuardsRows) as refused:
        consumer.run()
    assert str(refused.value) in " ".join((checked.stdout + checked.stderr).split())
    assert "BYPASSRLS" in str(refused.value)


def test_a_member_of_a_group_joins_reads_and_leaves_with_the_same_rights(consumer: Scenario) -> None:
    consumer.set(members=2)
    consumer.run(task=TaskIdentity(f"consume__{consumer.name}", "run", "consume", 0, 1))
    assert consumer.counts() == {"loaded": 3, "failed": 1, "sink_rows": 3}
    assert consumer.sql("SELECT count(*) FROM tidemark.group_member") == [(0,)]


def test_a_new_attempt_of_the_same_role_ends_the_sessions_of_the_older_one(consumer: Scenario) -> None:
    """``pg_terminate_backend`` needs no grant for sessions of the same role."""
    consumer.run()
    old = open_attempt(consumer.database_url, consumer.name, TaskIdentity())
    ((group_id,),) = consumer.sql("SELECT group_id FROM tidemark.consumer_group")
    with session(consumer.database_url, application=f"tidemark/{group_id}/{old}") as zombie:
        with zombie.cursor() as cur:
            cur.execute("SELECT FROM tidemark.partition_offset FOR UPDATE")
        consumer.run()
        with pytest.raises(psycopg2.OperationalError), zombie.cursor() as cur:
            cur.execute("SELECT 1")
    consumer.check()


def test_command_names_the_grant_that_is_missing(consumer: Scenario, roles: Roles) -> None:
    """A problem with the sink is reported at the line that names the table."""
    roles.own(f"REVOKE USAGE ON SCHEMA lake FROM {roles.run}")
    for output in ("table", "json"):
        done = tidemark(consumer, "consumers", "check", consumer.name, "--output", output)
        assert done.returncode == 1
        assert f'GRANT USAGE ON SCHEMA "lake" TO "{roles.run}";' in done.stdout.replace("\\", "")
        assert output == "json" or re.search(rf"{consumer.spec_file}:\d+:\d+: The role {roles.run} may not use the schema of", done.stdout)
    roles.own(f"REVOKE USAGE ON SCHEMA tidemark FROM {roles.run}")
    done = tidemark(consumer, "offsets", consumer.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"may not use the schema tidemark. Its owner must run: tidemark migrate --grant-to {roles.run} --as PROFILE" in done.stderr


def test_sql_and_settings_of_every_page_are_taken_by_postgres(database_url: str) -> None:
    """They run unchanged, in one transaction that is rolled back. Only the name of Airflow's database is replaced."""
    with contextlib.closing(connect(database_url, application="documentation")) as connection, connection.cursor() as cur:
        cur.execute("CREATE ROLE tidemark_run; CREATE SCHEMA lake; CREATE TABLE lake.cities ()")
        for block in blocks("sql"):
            cur.execute(block.code.replace("DATABASE airflow", f"DATABASE {connection.info.dbname}"))
        for block in (one for one in blocks("ini") if not one.code.startswith("[")):  # blocks with a section belong to airflow.cfg
            for name, value in re.findall(r"^(\w+) = (\w+)", block.code, re.MULTILINE):
                cur.execute(f"SET LOCAL {name} = '{value}'")
        connection.rollback()
