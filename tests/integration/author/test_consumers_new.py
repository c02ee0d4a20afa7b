"""`tidemark consumers new`: the files that it writes pass the check and load the topic. It overwrites nothing."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from tests.support.orders import AT, ORDER, Orders, order
from tests.support.scenario import Scenario, as_json
from tests.support.shell import tidemark

from tidemark.author.json_sample import column_type
from tidemark.quality import load_suite


class Shell:
    """Runs ``tidemark`` in the scenario's project, to create the scenario's consumer."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.expectations = scenario.folder / "expectations"
        self.env = {"TIDEMARK_EXPECTATIONS": str(self.expectations)}

    def call(self, *words: str) -> CompletedProcess[str]:
        return tidemark(self.scenario, *words, env=self.env)

    def new(self, topic: str, *words: str) -> CompletedProcess[str]:
        return self.call("consumers", "new", topic, "--name", self.scenario.name, "--table", self.scenario.table, *words)

    def create(self, topic: str, *words: str) -> str:
        """Creates the consumer's files and returns the DDL."""
        done = self.new(topic, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, topic: str, *words: str) -> str:
        """Returns the error, and checks that nothing was written."""
        before = self.files()
        done = self.new(topic, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert self.files() == before
        return done.stderr.rstrip("\n")

    def files(self) -> dict[Path, str]:
        return {path: path.read_text() for path in self.scenario.folder.rglob("*") if path.is_file()}

    def loads(self, ddl: str) -> None:
        """Creates the table as printed. Then the check passes, a run loads everything, and the validation passes."""
        name = self.scenario.name
        self.scenario.sql(ddl)
        checked = self.call("consumers", "check", name)
        assert checked.returncode == 0, checked.stdout
        self.scenario.run()
        assert self.scenario.failed() == []
        if self.scenario.spec.validation is not None:
            validated = self.call("validate", name)
            assert validated.returncode == 0, validated.stdout
        self.scenario.check()

    @property
    def not_null(self) -> list[tuple[str, str]]:
        suite = load_suite(self.expectations / f"{self.scenario.name}.json")
        assert {each.type for each in suite.expectations} == {"expect_column_values_to_not_be_null"}
        return [(each.kwargs["column"], each.severity) for each in suite.expectations]


@pytest.fixture
def shell(scenario: Scenario) -> Shell:
    return Shell(scenario)


@pytest.fixture
def registered(shell: Shell, orders: Orders) -> Orders:
    shell.env["TIDEMARK_REGISTRY_URL"] = orders.registry
    return orders


def test_avro_topic(shell: Shell, registered: Orders) -> None:
    """Fields, types and not-null expectations come from the schema. A field with a reserved name gets a column with another name."""
    schema = {**ORDER, "fields": [*ORDER["fields"], {"name": "error", "type": "string"}, {"name": "Groesse", "type": "int"}]}
    event = order(1, error="none", Groesse=5)
    shell.scenario.topics.produce(registered.topic, [registered.written(event, schema), None], key="k1")
    ddl = shell.create(registered.topic)
    assert shell.scenario.spec_file.read_text() == (
        f"topics: [{registered.topic}]\n"
        "format: {value: avro, key: string}\n"
        f"sink: {{table: {shell.scenario.table}}}\n"
        "columns: {error_: error}\n"
        "schedule: '*/5 * * * *'\n"
        f"validation: {{suite: {shell.scenario.name}}}\n"
    )
    assert shell.not_null == [(name, "critical") for name in ("id", "total", "at", "place", "error_", "Groesse")]
    shell.loads(ddl)
    assert shell.scenario.rows('id, city, at, place, error_, "Groesse"') == [(1, None, AT, {"country": "CH"}, "none", 5)]


def test_registered_keys(shell: Shell, registered: Orders) -> None:
    """Keys get the format of their registered schema, so that records without a value can delete rows."""
    registered.scenario.topics.produce(registered.topic, [registered.written(order(1))], key=registered.written_key({"id": 1}))
    ddl = shell.create(registered.topic)
    assert yaml.safe_load(shell.scenario.spec_file.read_text())["format"] == {"value": "avro", "key": "avro"}
    shell.loads(ddl)


def test_json_topic(shell: Shell) -> None:
    """Names that are not plain identifiers are kept. Fields with reserved names get columns with other names; unusable names get none."""
    topic = shell.scenario.topics.create(2)
    event = {
        "id": 7, "Order No": 1, "größe": 2.5, "Ünsinn?": True, "100%": "x", "a.b": "2026-01-02T03:04:05Z", "$n": None,
        "at": "2026-01-02T03:04:05",
        "tags": ["a"], "place": {"country": "CH"}, "error": "none", "kafka_offset": 3, "long": 2**66, "mixed": 1, "l" * 64: 1, "": 2,
        'a"b': 3,
    }  # fmt: skip
    more = {"id": None, "Order No": 2, "größe": 3, "100%": "y", "mixed": "two"}
    shell.scenario.topics.produce(topic, [json.dumps(event)], key=b"k1")
    shell.scenario.topics.produce(topic, [None, json.dumps(more)], key=b"\xff", partition=1)
    done = as_json(shell.create(topic, "--output", "json"))
    assert done["left_out"] == ["l" * 64, "", 'a"b']
    assert done["files"] == [str(shell.scenario.spec_file), str(shell.expectations / f"{shell.scenario.name}.json")]
    assert yaml.safe_load(shell.scenario.spec_file.read_text()) == {
        "topics": [topic],
        "format": {"value": "json", "key": "bytes"},
        "sink": {"table": shell.scenario.table},
        "columns": {"error_": "error", "kafka_offset_": "kafka_offset"},
        "schedule": "*/5 * * * *",
        "validation": {"suite": shell.scenario.name},
    }
    assert shell.not_null == [(name, "warning") for name in ("Order No", "größe", "100%", "mixed")]
    shell.loads(done["ddl"])
    types = (
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert shell.scenario.sql(types, shell.scenario.table)[:-4] == [
        ("id", "bigint"), ("Order No", "bigint"), ("größe", "double precision"), ("Ünsinn?", "boolean"), ("100%", "text"),
        ("a.b", "timestamp with time zone"), ("$n", "text"), ("at", "text"), ("tags", "jsonb"), ("place", "jsonb"), ("error_", "text"),
        ("kafka_offset_", "bigint"), ("long", "numeric"), ("mixed", "jsonb"),
    ]  # fmt: skip
    names = 'id, "Order No", "größe", "Ünsinn?", "a.b"::text, "$n", at, tags, place, error_, kafka_offset_, mixed'
    assert shell.scenario.rows(names) == [
        (7, 1, 2.5, True, "2026-01-02 03:04:05+00", None, "2026-01-02T03:04:05", ["a"], {"country": "CH"}, "none", 3, 1),
        (None, 2, 3.0, None, None, None, None, None, None, None, None, "two"),
    ]


def test_json_schema_topic(shell: Shell, registered: Orders) -> None:
    topic = shell.scenario.topics.create()
    schema = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": topic})
    shell.scenario.topics.produce(topic, [framed(registered, topic, Schema(schema, "JSON")) + json.dumps({"id": None}).encode()])
    shell.loads(shell.create(topic))
    spec = yaml.safe_load(shell.scenario.spec_file.read_text())
    assert (spec["format"], "validation" in spec) == ({"value": "json_schema"}, False)
    assert not shell.expectations.exists()
    assert shell.scenario.counts() == {"loaded": 1, "sink_rows": 1}


def test_protobuf_topic(shell: Shell, registered: Orders) -> None:
    topic = shell.scenario.topics.create()
    schema = f'syntax = "proto3"; message Order {{ int64 id = 1; optional string city = 2; }} // {topic}'
    shell.scenario.topics.produce(topic, [framed(registered, topic, Schema(schema, "PROTOBUF")) + b"\0\x08\x05"])
    shell.loads(shell.create(topic))
    assert yaml.safe_load(shell.scenario.spec_file.read_text())["format"] == {"value": "protobuf"}
    assert shell.scenario.rows("id, city") == [(5, None)]


def framed(registered: Orders, topic: str, schema: Schema) -> bytes:
    """Registers the schema of the topic's values. Returns the bytes that precede each value."""
    with SchemaRegistryClient({"url": registered.registry}) as client:
        return b"\0" + client.register_schema(f"{topic}-value", schema).to_bytes(4, "big")


def test_name_and_table_come_from_the_topic(shell: Shell) -> None:
    """Only the topic is required; no database is needed."""
    shell.env["TIDEMARK_DATABASE_URL"] = ""
    topic = shell.scenario.topics.create(name=f"Shop.{shell.scenario.name}-V2")
    shell.scenario.topics.produce(topic, ['{"id": 1}'])
    done = shell.call("consumers", "new", topic)
    assert done.returncode == 0, done.stderr
    assert f'CREATE TABLE "public"."shop_{shell.scenario.name}_v2"' in done.stdout
    assert (shell.scenario.folder / "consumers" / f"{topic}.yaml").exists()
    assert f"Next: read the DDL and run it, then `tidemark consumers check {topic}`" in done.stderr


def test_new_project_loads_a_topic_with_two_commands(shell: Shell) -> None:
    """The folders need not exist. The command creates the table, says which columns are JSON, and refuses to change a table."""
    home = shell.scenario.folder / "home"
    shell.env |= {"TIDEMARK_HOME": str(home), "TIDEMARK_CONSUMERS": "", "TIDEMARK_EXPECTATIONS": ""}
    topic = shell.scenario.topics.create()
    shell.scenario.topics.produce(topic, ['{"id": 1, "place": {"country": "CH"}}'])
    done = shell.new(topic, "--create-table", "--schedule", "@hourly")
    assert done.returncode == 0, done.stderr
    assert 'Nested records become JSON columns: "place".' in done.stderr
    file = home / "include" / "consumers" / f"{shell.scenario.name}.yaml"
    assert yaml.safe_load(file.read_text())["schedule"] == "@hourly"
    assert shell.scenario.rows("id") == []
    file.unlink()
    assert f"The table {shell.scenario.table} exists already" in shell.refused(topic, "--create-table", "--name", "another")
    assert "--schedule" in shell.refused(topic, "--schedule", "often")
    taken = f"{shell.scenario.table}_taken"
    shell.scenario.sql(f"CREATE DOMAIN {taken} AS text")
    refused = shell.refused(topic, "--create-table", "--name", "another", "--table", taken)
    assert refused.startswith(f"Postgres refused to create the table {taken}: type ")


def test_two_topics_of_one_spelling_get_two_tables_or_one_view_of_both(shell: Shell) -> None:
    """``orders.eu`` and ``orders-eu`` would be one table. A table of two consumers has one view, of the rows of both groups."""
    first, second = (shell.scenario.topics.create(name=f"{shell.scenario.name}{mark}eu") for mark in ".-")
    for topic in (first, second):
        shell.scenario.topics.produce(topic, ['{"id": 1}'])
    table = f"{shell.scenario.name}_eu"
    created = [shell.call("consumers", "new", topic) for topic in (first, second)]
    assert [done.returncode for done in created] == [0, 0]
    for name, done in zip((table, f"{table}_2"), created, strict=True):
        assert f'CREATE TABLE "public"."{name}"' in done.stdout
    file = shell.scenario.folder / "consumers" / f"{second}.yaml"
    file.write_text(file.read_text().replace(f"public.{table}_2", f"public.{table}"))
    shell.scenario.sql(created[0].stdout)
    hides = f"public.{table}_validated does not show the rows of group {second}: run the statement below"
    (report,) = json.loads(shell.call("consumers", "check", first, "--output", "json").stdout)
    assert any(note.startswith(hides) for note in report["notes"])
    shell.scenario.sql(report["ddl"])
    assert hides not in " ".join(shell.call("consumers", "check", first).stdout.split())


def test_sample_is_the_latest_records(shell: Shell) -> None:
    topic = shell.scenario.topics.create()
    shell.scenario.topics.produce(topic, ["no json", '{"id": 1}', '{"id": 2}'])
    assert "its values are not all JSON objects" in shell.refused(topic)
    shell.create(topic, "--sample", "2")


def test_nothing_is_overwritten(shell: Shell) -> None:
    topic = shell.scenario.topics.create()
    shell.scenario.topics.produce(topic, ['{"id": 1}'])
    shell.create(topic)
    assert f"{shell.scenario.name}.json exists already" in shell.refused(topic)
    (shell.expectations / f"{shell.scenario.name}.json").unlink()
    assert f"{shell.scenario.name}.yaml exists already" in shell.refused(topic)
    shell.scenario.spec_file.rename(shell.scenario.spec_file.with_suffix(".yml"))
    assert "exists already" in shell.refused(topic)


def test_what_cannot_be_sketched_is_refused_with_a_way_out(shell: Shell, registered: Orders) -> None:
    scenario = shell.scenario
    topic = scenario.topics.create()
    assert "it has no records with values" in shell.refused(topic)
    scenario.topics.produce(topic, [None])
    assert "it has no records with values" in shell.refused(topic)
    scenario.topics.produce(topic, ["[1]"])
    error = shell.refused(topic)
    assert error.endswith(
        "Write a transform that reads it: format: {value: bytes}, or {value: string} for text, and transform: module:function."
    )
    assert f"has no topic {topic}-gone" in shell.refused(f"{topic}-gone")
    assert "--table" in shell.refused(topic, "--table", "Shop.Orders")
    assert "--name" in shell.refused(topic, "--name", "a/b")
    other = scenario.topics.create()
    framed(registered, other, Schema('"string"', "AVRO"))
    assert "its values are of the type string, and have no fields" in shell.refused(other)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "text"),
        ([1, -(2**63), 2**63 - 1], "bigint"),
        ([1, 2**63], "numeric"),
        ([1, 2.5], "double precision"),
        ([True, False], "boolean"),
        ([True, 1], "jsonb"),
        (["2026-01-02T03:04:05Z", "2026-01-02 03:04:05.678+01:00"], "timestamp with time zone"),
        (["2026-01-02T03:04:05Z", "2026-01-02T03:04:05"], "text"),
        (["2026-01-02"], "text"),
        (["", "a"], "text"),
        ([{}, []], "jsonb"),
        (["a", 1], "jsonb"),
    ],
)
def test_type_of_a_column_holds_all_values(values: list[Any], expected: str) -> None:
    assert column_type(values) == expected
