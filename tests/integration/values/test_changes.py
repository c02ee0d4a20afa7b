"""Debezium's change data, from a source table under random load to an identical sink table."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from tests.support.change_data import UNAVAILABLE, ChangeSource
from tests.support.change_load import completed, differences, replayed
from tests.support.change_story import AVRO, JSON, JSON_WITH_SCHEMAS, Form, Story, story
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.rewind.plan_model import ToEarliest, ToOffset

FORMS = [
    pytest.param(JSON, id="json"),
    pytest.param(JSON_WITH_SCHEMAS, id="json with schemas", marks=pytest.mark.thorough),
    pytest.param(AVRO, id="avro", marks=pytest.mark.thorough),
]

Tell = Callable[..., Story]


@pytest.fixture
def tell(change_source: ChangeSource, scenario: Scenario, request: pytest.FixtureRequest) -> Iterator[Tell]:
    """Starts the test's story: its source, connector and consumer."""
    with ExitStack() as running:

        def begin(form: Form = JSON, **options: Any) -> Story:
            registry = request.getfixturevalue("registry") if form is AVRO else None
            told = running.enter_context(story(change_source, scenario, form, registry=registry, **options))
            request.node.add_report_section("call", "load", f"seed {told.seed}")
            return told

        yield begin


@pytest.mark.parametrize("form", FORMS)
def test_sink_becomes_the_source(tell: Tell, form: Form) -> None:
    """Covers inserts, updates, changes of keys, deletes, wide values, nulls and added columns, read in several runs. Further columns may
    come from the envelope."""
    began = datetime.now(UTC)
    columns = {"changed_at": "$change.source.ts_ms", "operation": "$change.op"}
    told = tell(form, partitions=2 if form is AVRO else 1, more="changed_at timestamptz, operation text", columns=columns)
    for _ in range(3):
        told.run()
        with told.changing(40):
            told.run()
    told.check()
    found = told.scenario.rows("operation, changed_at")
    assert {operation for operation, _ in found} <= {"r", "c", "u"}
    assert all(began < changed_at < datetime.now(UTC) for _, changed_at in found)


@pytest.mark.thorough  # tests/integration/rewind/test_deletions.py: rewinds of deletes; tests/chaos: kills
@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_sink_becomes_the_source_although_runs_are_killed_and_rewound(tell: Tell, deletes: str) -> None:
    """All this happens while the source changes. One rewind goes back to the middle, between two runs; one goes to the start, during a
    run."""
    told = tell(deletes=deletes, partitions=3, batch={"max_records": 60})
    told.run()
    middle = min(told.scenario.positions().values())
    told.change(60)
    told.followed.catch_up()
    with told.changing(40):
        told.kill()
    told.run()
    told.check_conserved()
    with told.changing(30):
        told.rewind(ToOffset(middle))
        told.run()
    with told.changing(30):
        told.run(rewind=ToEarliest())
    told.check()


def test_records_without_a_value_that_was_toasted_fail(tell: Tell) -> None:
    """With the default replica identity, the record of an update lacks a wide value that did not change. All other records load."""
    told = tell(JSON_WITH_SCHEMAS, identity="DEFAULT")
    told.change(60)
    told.followed.catch_up()
    told.run()
    records = told.records()
    lacking = {record.offset for record in records if UNAVAILABLE in str((_payload(record.value).get("after") or {}).get("wide"))}
    assert lacking
    failed = told.scenario.failed("record_offset, disposition, error_text")
    assert {offset for offset, _, _ in failed} == lacking
    for _, _, text in failed:
        assert "wide" in text
        assert "REPLICA IDENTITY FULL" in text
    told.check_conserved()
    loaded = [(record.key, record.value, dict(record.headers)) for record in records if record.offset not in lacking]
    expected = replayed(loaded)
    assert differences(told.rows(), completed(expected, told.rows())) == []


def _payload(value: bytes | None) -> dict[str, Any]:
    return {} if value is None else json.loads(value)["payload"]


@pytest.mark.parametrize("form", FORMS)
def test_truncate_fails_its_record_and_messages_are_skipped(tell: Tell, form: Form) -> None:
    """The records before and after them load."""
    told = tell(form, config={"skipped.operations": "none"})
    before = told.source.rows(told.load.table)
    told.source.transaction([told.load.truncate()])
    told.change(20)
    told.followed.catch_up()
    messages: Collection[int] = ()
    if form is not AVRO:  # the topic of messages has a different schema
        told.scenario.set(topics=[told.topic, f"{told.followed.name}.message"])
        messages = told.scenario.records(f"{told.followed.name}.message")
        assert messages
    told.run()
    ((error,),) = told.scenario.failed("error_text")
    assert "truncate" in error.lower()
    records = told.records()
    tombstones = sum(record.key is not None and record.value is None for record in records)
    counts = told.scenario.counts()
    assert (counts["failed"], counts["skipped"], counts["loaded"]) == (1, tombstones + len(messages), len(records) - tombstones - 1)
    expected, found = told.source.rows(told.load.table), told.rows()
    assert differences({number: row for number, row in found.items() if number in expected}, expected) == []
    assert found.keys() - expected.keys() <= before.keys()
    told.check_conserved()


DERIVED = {
    "id": "bigint", "a_price": "numeric(12,2)", "a_numeric": "numeric", "a_double": "double precision", "a_boolean": "boolean",
    "a_text": "text", "a_bytea": "bytea", "a_date": "date", "a_time": "time without time zone", "an_interval": "interval",
    "a_timestamp": "timestamp without time zone", "a_timestamptz": "timestamp with time zone", "a_uuid": "uuid", "a_jsonb": "jsonb",
    "texts": "text[]",
}  # fmt: skip


@pytest.mark.parametrize(
    "form", [pytest.param(JSON_WITH_SCHEMAS, id="json with schemas", marks=pytest.mark.thorough), pytest.param(AVRO, id="avro")]
)
def test_consumers_new_writes_a_consumer_whose_table_becomes_the_source(tell: Tell, form: Form) -> None:
    """Format, key and types come from the connector's schemas."""
    told = tell(form)
    told.change(20)
    told.insert()
    told.followed.catch_up()
    scenario = told.scenario
    scenario.name, scenario.table = f"{scenario.name}_new", f"{scenario.table}_new"
    env = {"TIDEMARK_EXPECTATIONS": str(scenario.folder / "expectations")}
    done = tidemark(scenario, "consumers", "new", told.topic, "--name", scenario.name, "--table", scenario.table, env=env)
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load(scenario.spec_file.read_text())
    assert written["format"] == {"value": form.value, "key": form.value, "envelope": "debezium"}
    assert written["sink"] == {"table": scenario.table, "mode": "upsert", "key": ["id"], "deletes": "hard"}
    scenario.sql(done.stdout)
    scenario.keys = written
    query = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    types = dict(scenario.sql(query, scenario.table))
    assert {name: types[name] for name in DERIVED} == DERIVED
    assert tidemark(scenario, "consumers", "check", scenario.name, env=env).returncode == 0
    told.change(20)
    told.check()
