"""Consumers without code: how Avro, JSON and their unusual records are loaded into a table that the user created."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from tests.support.orders import AT, Orders, order
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.sink.fit import SinkMismatch

AVRO = {"value": "avro"}


@pytest.fixture
def topic(scenario: Scenario) -> str:
    return scenario.topics.create()


def test_four_lines_load_an_avro_topic(scenario: Scenario, orders: Orders) -> None:
    """The DDL comes from the schema; a nested record is one JSON column."""
    orders.produce(order(1), order(2, city="Zürich"), None)
    scenario.write(None, topics=orders.topic, format=AVRO).make_sink()
    scenario.run()
    assert scenario.rows("id, city, total, at, place") == [
        (1, None, Decimal("12.50"), AT, {"country": "CH"}),
        (2, "Zürich", Decimal("12.50"), AT, {"country": "CH"}),
    ]
    assert scenario.counts() == {"loaded": 2, "sink_rows": 2, "skipped": 1}
    types = "format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum BETWEEN 1 AND 5 ORDER BY attnum"
    found = [kind for (kind,) in scenario.sql(f"SELECT {types}", scenario.table)]
    assert found == ["bigint", "text", "numeric(12,2)", "timestamp with time zone", "jsonb"]
    scenario.check()


def test_columns_may_come_from_elsewhere_and_fields_may_be_dropped(scenario: Scenario, orders: Orders) -> None:
    orders.produce(order(1), order(2), order(3))
    keys: dict[str, Any] = {
        "columns": {"order_id": "id", "country": "place.country", "produced_at": "$timestamp", "whole": "$value"},
        "drop": ["place", "total"],
        "skip_if": {"id": [2, 7]},
    }
    scenario.write(None, topics=orders.topic, format=AVRO, **keys).make_sink()
    scenario.run()
    assert scenario.rows("order_id, city, at, country, whole->>'id', produced_at > now() - interval '1 hour'") == [
        (1, None, AT, "CH", "1", True),
        (3, None, AT, "CH", "3", True),
    ]
    assert scenario.counts() == {"loaded": 2, "sink_rows": 2, "skipped": 1}
    scenario.check()


def test_the_tables_types_decide_where_nothing_is_lost(scenario: Scenario, orders: Orders) -> None:
    """A text column may take a number, a time milliseconds, and a uuid or a date text. If a value does not fit, only its record fails."""
    price = {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4}
    tags = {"type": "array", "items": "string"}
    types = {"id": "int", "number": "long", "ms": "long", "tags": tags, "uid": "string", "day": "string", "small": "long", "price": price}
    schema = {"type": "record", "name": "Event", "fields": [{"name": name, "type": kind} for name, kind in types.items()]}
    event = {"id": 1, "number": 5, "ms": 1_767_323_045_678, "tags": ["a"], "uid": str(UUID(int=7)), "day": "2026-01-02", "small": 3}
    event["price"] = Decimal("1.5000")
    orders.produce(event, {**event, "uid": "x"}, {**event, "small": 2**40}, {**event, "price": Decimal("1.2345")}, event, schema=schema)
    ddl = "id bigint, number text, ms timestamptz, tags text[], uid uuid, day date, small smallint, price numeric(10,2)"
    scenario.write(None, topics=orders.topic, format=AVRO).make_sink(ddl)
    scenario.run()
    row = (1, "5", AT, ["a"], str(UUID(int=7)), date(2026, 1, 2), 3, Decimal("1.50"))
    assert scenario.rows("id, number, ms, tags, uid::text, day, small, price") == [row, row]
    assert scenario.failed("record_offset, error_type, error_text") == [
        (1, "Fail", "uid does not fit uuid: the value is not a uuid"),
        (2, "Fail", "small does not fit smallint: the value is out of range"),
        (3, "Fail", "price does not fit numeric(10,2): the value has more than 2 digits after the point"),
    ]
    scenario.check()


def test_what_does_not_fit_the_table_is_said_before_anything_is_read(scenario: Scenario, orders: Orders) -> None:
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format=AVRO).make_sink("id bigint, city text, total double precision, at timestamp")
    with pytest.raises(SinkMismatch) as caught:
        scenario.run()
    assert "column at: the output is timestamp[us, tz=UTC], the table is timestamp without time zone" in str(caught.value)
    assert 'ADD COLUMN "place" jsonb;' in str(caught.value)


def test_key_that_is_avro_and_nested_records_that_are_flattened(scenario: Scenario, orders: Orders) -> None:
    scenario.topics.produce(orders.topic, [orders.written(order(1))], key=orders.written_key({"id": 9}))
    keys = {"columns": {"key_id": "$key.id"}, "flatten": "_", "format": {"value": "avro", "key": "avro"}}
    scenario.write(None, topics=orders.topic, **keys).make_sink()
    scenario.run()
    assert scenario.rows("id, key_id, place_country") == [(1, 9, "CH")]


EVENT: dict[str, Any] = {
    "id": 1,
    "name": "Zürich",
    "at": "2026-01-02T03:04:05.678Z",
    "price": 12.50,
    "uid": str(UUID(int=7)),
    "tags": ["a", None],
    "place": {"country": "CH", "geo": {"lat": 47.0}},
    "more": "ignored",
}
EVENT_DDL = (
    "id bigint, name text, at timestamptz, price numeric(10,2), uid uuid, tags text[], place jsonb, country text, lat double precision,"
    " ms timestamptz, loaded_at timestamptz DEFAULT now(), missing text"
)


@pytest.mark.parametrize("encoding", ["json", "json_schema"])
def test_json_is_read_in_the_tables_types(scenario: Scenario, topic: str, encoding: str) -> None:
    prefix = b"\0\0\0\0\x07" if encoding == "json_schema" else b""
    bad: list[dict[str, Any]] = [{"id": "one"}, {"at": "2026-01-02T03:04:05"}, {"price": 1.234}, {"place": {"geo": 5}}, {"id": 2**70}]
    events = [EVENT | {"ms": 1_767_323_045_678}, *(EVENT | each for each in bad), EVENT | {"id": None, "place": None}]
    scenario.topics.produce(topic, [prefix + json.dumps(each).encode() for each in events], key=b"k7")
    scenario.topics.produce(topic, [prefix + b"[]", prefix + b"{", None, prefix + b"{}"], key=b"k7")
    columns = {"country": "place.country", "lat": "place.geo.lat"}
    scenario.write(None, topics=topic, format={"value": encoding}, columns=columns).make_sink(EVENT_DDL)
    scenario.run()
    first = (1, "Zürich", AT, Decimal("12.50"), str(UUID(int=7)), ["a", None], EVENT["place"], "CH", 47.0, AT, True, None)
    assert scenario.rows("id, name, at, price, uid::text, tags, place, country, lat, ms, loaded_at IS NOT NULL, missing") == [
        first,
        (None, *first[1:6], None, None, None, None, True, None),
        (*[None] * 10, True, None),
    ]
    assert scenario.failed("record_offset, error_type, error_text") == [
        (1, "Fail", "id does not fit bigint: the value is text that is not a number"),
        (2, "Fail", "at does not fit timestamp with time zone: the value is not a timestamp with zone in ISO 8601"),
        (3, "Fail", "price does not fit numeric(10,2): the value has more than 2 digits after the point"),
        (4, "Fail", "place.geo is an integer, not an object"),
        (5, "Fail", "id does not fit bigint: the value is out of range"),
        (7, "Fail", "the value is a list, not an object"),
        (8, "Undecodable", "it is not JSON: Input data was truncated"),
    ]
    assert scenario.counts() == {"loaded": 3, "sink_rows": 3, "failed": 7, "skipped": 1}
    scenario.check()


def test_json_that_is_skipped_and_keys_as_columns(scenario: Scenario, topic: str) -> None:
    values = [{"id": 1}, {"id": 2, "kind": "ping"}, {"id": 3, "kind": "ping", "test": False}, {"id": 4, "kind": None}]
    scenario.topics.produce(topic, [json.dumps(each) for each in values], key=b"17")
    keys = {"columns": {"number": "$key", "stamped": "$timestamp", "whole": "$value"}, "skip_if": {"kind": ["ping", "pong"], "test": None}}
    scenario.write(None, topics=topic, format={"value": "json", "key": "string"}, **keys)
    scenario.make_sink("id int, number int, stamped timestamptz, whole jsonb")
    scenario.run()
    assert scenario.rows("id, number, whole->'id'") == [(1, 17, 1), (3, 17, 3), (4, 17, 4)]
    assert scenario.rows("stamped > now() - interval '1 hour'") == [True] * 3
    assert scenario.counts() == {"loaded": 3, "sink_rows": 3, "skipped": 1}
    scenario.check()


@pytest.mark.parametrize(("encoding", "column", "stored"), [("string", "text", "Zürich"), ("bytes", "bytea", "Zürich".encode())])
def test_value_without_fields_is_loaded_as_a_whole(scenario: Scenario, topic: str, encoding: str, column: str, stored: Any) -> None:
    scenario.topics.produce(topic, ["Zürich", None], key=b"k")
    scenario.write(None, topics=topic, format={"value": encoding, "key": "string"}, columns={"payload": "$value", "name": "$key"})
    scenario.make_sink(f"payload {column}, name text")
    scenario.run()
    assert [(bytes(each) if column == "bytea" else each, name) for each, name in scenario.rows("payload, name")] == [(stored, "k")]


def test_upsert_keeps_the_last_record_of_a_key_and_refuses_tombstones(scenario: Scenario, orders: Orders) -> None:
    orders.produce(order(1), order(1, city="Bern"), None)
    scenario.write(None, topics=orders.topic, format=AVRO)
    scenario.set(sink={"table": scenario.table, "mode": "upsert", "key": ["id"]})
    scenario.make_sink()
    scenario.run()
    assert scenario.rows("id, city") == [(1, "Bern")]
    assert [each[1:] for each in scenario.failed()] == [
        ("fail", "Fail", "its value is null, which deletes the row of its key; the sink refuses deletes: set sink.deletes to hard or soft")
    ]


def test_ddl_for_json_comes_from_the_latest_records(scenario: Scenario, topic: str) -> None:
    """It has the fields and the `columns`, with paths into JSON, the key and the timestamp. A run then loads them."""
    keys = {"columns": {"land": "place.country", "key_id": "$key.id", "stamped": "$timestamp", "whole": "$value", "title": "name"}}
    scenario.write(None, topics=topic, format={"value": "json", "key": "json"}, drop=["debug"], **keys)
    empty = tidemark(scenario, "sink", "ddl", scenario.name)
    assert (empty.returncode, empty.stdout) == (1, "")
    assert f"{topic}: it has no records with values to derive columns from. Produce a record first" in " ".join(empty.stderr.split())
    event = {"id": 7, "name": "a", "at": "2026-01-02T03:04:05.678Z", "place": {"country": "CH"}, "debug": 1, 'a"b': 1}
    scenario.topics.produce(topic, [json.dumps(event), None], key=b'{"id": 9}')
    made = tidemark(scenario, "sink", "ddl", scenario.name)
    assert 'not loaded, because it cannot be the name of a column: "a"b"' in made.stderr
    scenario.sql(made.stdout)
    assert tidemark(scenario, "consumers", "check", scenario.name).returncode == 0
    scenario.run()
    row = (7, AT, {"country": "CH"}, "CH", 9, True, "a", 7)
    assert scenario.rows("id, at, place, land, key_id, stamped IS NOT NULL, title, whole->'id'") == [row]
    scenario.check()
    again = tidemark(scenario, "sink", "ddl", scenario.name)
    assert (again.returncode, f"{scenario.table}: the table exists already" in " ".join(again.stderr.split())) == (1, True)


def test_ddl_for_json_refuses_a_reserved_name_and_adds_the_key_of_an_upsert(scenario: Scenario, topic: str) -> None:
    scenario.topics.produce(topic, ['{"id": 1, "error": "none"}', '{"id": 1, "error": "late"}'])
    scenario.write(None, topics=topic, format={"value": "json"})
    scenario.set(sink={"table": scenario.table, "mode": "upsert", "key": ["id"]})
    assert 'The field "error" has the name of a column' in tidemark(scenario, "sink", "ddl", scenario.name).stderr
    scenario.set(columns={"reason": "error"})
    scenario.sql(tidemark(scenario, "sink", "ddl", scenario.name).stdout)
    scenario.run()
    assert scenario.rows("id, reason") == [(1, "late")]


def test_json_needs_a_table(scenario: Scenario, topic: str) -> None:
    scenario.write(None, topics=topic, format={"value": "json"})
    checked = tidemark(scenario, "consumers", "check", scenario.name)
    assert "JSON has no schema" in checked.stdout
    assert "`tidemark sink ddl NAME` derives its DDL from the latest records" in " ".join(checked.stdout.split())
    scenario.make_sink("id int")
    checked = tidemark(scenario, "consumers", "check", scenario.name)
    assert checked.returncode == 0, checked.stdout
    assert "none, the fields of json" in checked.stdout
    scenario.set(columns={"name": "title"})
    assert "the table has no column name" in tidemark(scenario, "consumers", "check", scenario.name).stdout


def test_tombstone_with_a_key_in_another_type_than_the_values(scenario: Scenario, orders: Orders) -> None:
    scenario.topics.produce(orders.topic, [orders.written(order(1)), orders.written(order(2))], key=b'{"total": 1}')
    scenario.topics.produce(orders.topic, [None], key=b'{"total": 12.5}')
    sink = {"table": scenario.table, "mode": "upsert", "key": ["total"], "deletes": "hard"}
    scenario.write(None, topics=orders.topic, format={"value": "avro", "key": "json"}, sink=sink).make_sink()
    scenario.run()
    assert scenario.rows("id") == []
    assert scenario.failed() == []
