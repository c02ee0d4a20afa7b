"""Sessions look names up only in ``pg_catalog``, so that no other function is called in place of Postgres' own."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from tests.support.fetching import execute
from tests.support.ledger import DDL, Group, all_loaded
from tests.support.scenario import Scenario

from tidemark import migrations, project
from tidemark.db import session, transaction
from tidemark.local import LocalStack
from tidemark.sink.fit import has_unique_index

PLANTED = """
    CREATE TABLE {schema}.called (what text);
    GRANT INSERT ON {schema}.called TO PUBLIC;
    CREATE FUNCTION {schema}.format(text, text) RETURNS text LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO {schema}.called VALUES ('format'); RETURN pg_catalog.format($1, $2); END$$;
    CREATE FUNCTION {schema}.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO {schema}.called VALUES ('unnest'); RETURN QUERY SELECT pg_catalog.unnest($1); END$$;
    CREATE FUNCTION {schema}.pg_advisory_xact_lock(integer) RETURNS void LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO {schema}.called VALUES ('pg_advisory_xact_lock'); END$$;
    CREATE FUNCTION {schema}.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO {schema}.called VALUES ('set_config'); RETURN pg_catalog.set_config($1, $2, $3); END$$;
"""
"""Each function matches a call of ours at least as well as Postgres' own does, and records that it was called."""


def plant(url: str, where: str) -> None:
    """Creates functions in schema ``where``, and puts it before ``pg_catalog`` in the database's ``search_path``."""
    with contextlib.closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cur:
        cur.execute(PLANTED.format(schema=where))
        cur.execute(f"ALTER DATABASE {connection.info.dbname} SET search_path TO {where}, pg_catalog")


def called(url: str, where: str) -> set[str]:
    return {what for (what,) in execute(url, f"SELECT DISTINCT what FROM {where}.called")}


@pytest.fixture
def empty_database(stack: LocalStack) -> Iterator[str]:
    """A database whose schema ``tidemark`` is empty, and a role with default privileges in it, which two migrations act on."""
    name, role = f"test_{uuid.uuid4().hex[:12]}", f"role_{uuid.uuid4().hex[:12]}"
    url = stack.create_database(name)
    defaults = f"ALTER DEFAULT PRIVILEGES IN SCHEMA tidemark GRANT SELECT, INSERT, UPDATE ON TABLES TO {role}"
    execute(url, f"CREATE ROLE {role}; CREATE SCHEMA tidemark; GRANT USAGE ON SCHEMA tidemark TO {role}", defaults)
    yield url
    execute(stack.postgres.url(), f"DROP DATABASE {name} WITH (FORCE)", f"DROP ROLE {role}")


def test_migrations_do_not_call_functions_planted_in_the_schema(empty_database: str) -> None:
    """Staging tables require CREATE on the schema ``tidemark``. A role with it must not be able to run code as the owner who migrates."""
    plant(empty_database, "tidemark")
    assert migrations.migrate(empty_database) == migrations.known()
    assert called(empty_database, "tidemark") == set()


def test_transactions_and_commits_do_not_call_functions_planted_on_the_search_path(database_url: str) -> None:
    plant(database_url, "public")
    with session(database_url) as connection, transaction(connection) as cur:
        has_unique_index(cur, "tidemark.topic", ["topic_id"])
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = Group(database_url, watch)
        group.sql(DDL)
        part = group.slice(end=10)
        group.commit(part, all_loaded(part))
        group.check_conserved()
    assert called(database_url, "public") == set()


def test_path_is_the_sessions_own_again_after_a_transaction(database_url: str) -> None:
    """Behind a transaction pooler, the next client gets the same session."""
    with session(database_url) as connection:
        with transaction(connection) as cur:
            cur.execute("SHOW search_path")
            assert cur.fetchone() == ("pg_catalog, pg_temp",)
        connection.autocommit = True
        with connection.cursor() as cur:
            cur.execute("SHOW search_path")
            assert cur.fetchone() == ('"$user", public',)


def test_only_db_py_opens_transactions_without_the_path() -> None:
    """Other code that opens a cursor sets the path itself, except in two files that need no path."""
    library = Path(project.root()) / "include" / "tidemark"
    own = {
        str(path.relative_to(library))
        for path in library.rglob("*.py")
        if re.search(r"connection\.cursor\(", text := path.read_text()) and "FIX_PATH" not in text and "SEARCH_PATH" not in text
    }
    assert own == {"group/wake.py", "quality/expectations.py"}  # LISTEN; savepoints in a transaction that validation.py began


def test_trigger_that_needs_the_search_path_is_refused_with_the_way_out(scenario: Scenario) -> None:
    """As with postgres_fdw and logical replication, the function must name its schemas or set its path. Until then nothing is stored."""
    topic = scenario.topics.create(1)
    scenario.topics.produce(topic, ["a"])
    scenario.write(topics=topic).make_sink()
    function = "public.hear() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO heard VALUES ('row'); RETURN NEW; END$$"
    scenario.sql(f"CREATE TABLE public.heard (what text); CREATE FUNCTION {function}")
    scenario.sql(f"CREATE TRIGGER hear BEFORE INSERT ON {scenario.table} FOR EACH ROW EXECUTE FUNCTION public.hear()")
    with pytest.raises(Exception, match=r'relation "heard" does not exist.*ALTER FUNCTION … SET search_path'):
        scenario.run()
    scenario.sql("ALTER FUNCTION public.hear() SET search_path TO public")
    scenario.run()
    assert scenario.sql("SELECT what FROM public.heard") == [("row",)]
    scenario.check()
