"""A publication of all tables: rows can still be changed and deleted, in the sinks and in Tidemark's own tables."""

from __future__ import annotations

import json

import pytest
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.sink.fit import SinkMismatch


@pytest.fixture
def upsert(scenario: Scenario) -> Scenario:
    """A consumer with upserts and deletes, in a database whose tables are all published."""
    topic = scenario.topics.create()
    sink = {"table": scenario.table, "mode": "upsert", "key": ["id"], "deletes": "hard"}
    scenario.write(None, topics=topic, format={"value": "json", "key": "string"}, sink=sink)
    scenario.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    return scenario


def test_rows_of_the_table_that_sink_ddl_prints_are_changed_deleted_and_rewound(upsert: Scenario) -> None:
    (topic,) = upsert.spec.topics
    upsert.topics.produce(topic, [json.dumps({"id": 1, "name": "Ada"})], key=b"1")
    upsert.sql(tidemark(upsert, "sink", "ddl", upsert.name).stdout)
    for name in ("Bea", None):
        upsert.run()
        upsert.topics.produce(topic, [None if name is None else json.dumps({"id": 1, "name": name})], key=b"1")
    assert upsert.rows("name") == ["Bea"]
    upsert.run()
    assert upsert.rows("name") == []
    for command in (["pause"], ["resume"], ["rewind", "plan", "--to-earliest", "--reason", "read it again for a test"]):
        done = tidemark(upsert, *command[:2], upsert.name, *command[2:])
        assert done.returncode == 0, done.stderr
    ((number,),) = upsert.sql("SELECT max(rewind_id) FROM tidemark.rewind")
    assert tidemark(upsert, "rewind", "apply", str(number)).returncode == 0
    upsert.run()
    assert upsert.rows("name") == []


def test_table_without_a_replica_identity_is_refused_with_the_statement_that_gives_it_one(upsert: Scenario) -> None:
    """Postgres would refuse the first update, and the rewind of an append sink."""
    upsert.make_sink("id bigint NOT NULL UNIQUE, name text")
    (topic,) = upsert.spec.topics
    upsert.topics.produce(topic, [json.dumps({"id": 1, "name": "Ada"})], key=b"1")
    with pytest.raises(SinkMismatch, match="the publication everything includes the table") as refused:
        upsert.run()
    upsert.sql(refused.value.ddl)
    upsert.run()
    assert upsert.rows("name") == ["Ada"]


def test_append_sink_without_a_replica_identity_could_not_be_rewound(scenario: Scenario) -> None:
    topic = scenario.topics.create()
    scenario.write(None, topics=topic, format={"value": "json"}).make_sink("id bigint")
    scenario.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    scenario.topics.produce(topic, ['{"id": 1}'])
    with pytest.raises(SinkMismatch, match="no other replica identity") as refused:
        scenario.run()
    scenario.sql(refused.value.ddl)
    scenario.run()
    assert scenario.rows("id") == [1]


def test_tables_of_tidemark_have_a_replica_identity(scenario: Scenario) -> None:
    lacking = """
        SELECT relname FROM pg_class WHERE relnamespace = 'tidemark'::regnamespace AND relkind IN ('r', 'p') AND relreplident = 'd'
           AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisprimary)
    """
    assert scenario.sql(lacking) == []
