"""`tidemark sink alter` prints and runs the statements that fit a table to its consumer, with the view of validated rows."""

from __future__ import annotations

import json
from typing import Any

import psycopg2.errors
import pytest
from tests.support.orders import NEWER, Orders, order
from tests.support.scenario import PLAIN, Scenario
from tests.support.shell import tidemark


def type_of(scenario: Scenario, relation: str, column: str) -> list[Any]:
    query = "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attname = %s"
    return [kind for (kind,) in scenario.sql(query, relation, column)]


def test_new_column_reaches_table_and_view(orders: Orders) -> None:
    """Without `--run` the statements are printed, and nothing changes. Afterwards, nothing is left to do."""
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}).make_sink()
    view = f"{scenario.table}_validated"
    orders.written(order(2, channel="web"), schema=NEWER)
    printed = tidemark(scenario, "sink", "alter", scenario.name)
    assert printed.stdout.splitlines()[:2] == [
        f'ALTER TABLE "lake"."{scenario.name}" ADD COLUMN "channel" text;',
        f'CREATE OR REPLACE VIEW "lake"."{scenario.name}_validated" AS',
    ]
    assert type_of(scenario, view, "channel") == []
    done = tidemark(scenario, "sink", "alter", scenario.name, "--run")
    assert (done.returncode, done.stderr) == (0, "ran 2 statements\n")
    assert type_of(scenario, scenario.table, "channel") == type_of(scenario, view, "channel") == ["text"]
    again = tidemark(scenario, "sink", "alter", scenario.name, "--run", "--output", "json")
    assert json.loads(again.stdout) == [{"table": scenario.table, "statements": [], "remaining": []}]


def test_type_changes_although_a_view_shows_the_column(orders: Orders) -> None:
    """Postgres refuses the change alone. The new view has the rights and the comment of the old one."""
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}).make_sink()
    view = f"{scenario.table}_validated"
    create = "".join(scenario.sql("SELECT pg_get_viewdef(%s::regclass)", view)[0])
    scenario.sql(f"DROP VIEW {view}; ALTER TABLE {scenario.table} ALTER COLUMN total TYPE numeric(10,2); CREATE VIEW {view} AS {create}")
    scenario.sql(f"GRANT SELECT, INSERT ON {view} TO pg_monitor; COMMENT ON VIEW {view} IS 'what''s valid'")
    alter = f'ALTER TABLE "lake"."{scenario.name}" ALTER COLUMN "total" TYPE numeric(12,2);'
    with pytest.raises(psycopg2.errors.FeatureNotSupported):
        scenario.sql(alter)
    done = tidemark(scenario, "sink", "alter", scenario.name, "--run")
    assert (done.returncode, done.stderr) == (0, "ran 5 statements\n")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f'DROP VIEW "lake"."{scenario.name}_validated";', alter]
    assert lines[-2].endswith(f'GRANT INSERT, SELECT ON "lake"."{scenario.name}_validated" TO pg_monitor;')
    assert type_of(scenario, scenario.table, "total") == type_of(scenario, view, "total") == ["numeric(12,2)"]
    assert scenario.sql("SELECT has_table_privilege('pg_monitor', %s, 'INSERT'), obj_description(%s::regclass)", view, view) == [
        (True, "what's valid")
    ]


def test_difference_that_no_statement_fixes(scenario: Scenario) -> None:
    """It is named, and the status is 1. A statement that Postgres refuses leaves everything as it was."""
    scenario.feed(["a"], PLAIN, "payload bytea, must text NOT NULL")
    done = tidemark(scenario, "sink", "alter", scenario.name, "--run")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{scenario.table}: column must is NOT NULL without a default, but the output lacks it" in done.stderr
    scenario.sql(f"ALTER TABLE {scenario.table} DROP COLUMN must, DROP COLUMN payload, DROP COLUMN kafka_seq")
    scenario.sql(f"INSERT INTO {scenario.table} VALUES (1, 1, 1)")
    done = tidemark(scenario, "sink", "alter", scenario.name, "--run")
    assert done.returncode == 1
    assert "Postgres refused ALTER TABLE" in done.stderr
    assert type_of(scenario, scenario.table, "payload") == []
