"""Debezium's records of a table from the fixture `change_source` match what happened to the table."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from tests.support.change_data import UNAVAILABLE, ChangeSource, avro_converter, json_converter
from tests.support.change_load import COLUMNS, ENUM, Load, completed, differences, replayed

Read = tuple[bytes | None, bytes | None, dict[str, bytes]]


@pytest.fixture
def read(kafka_servers: str) -> Iterator[Any]:
    """Reads all records of a topic with one partition: key, value, headers."""
    consumer = Consumer({"bootstrap.servers": kafka_servers, "group.id": "unused", "enable.auto.commit": False, "log_level": 0})

    def records(topic: str) -> list[Read]:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = [consumer.poll(30) for _ in range(end)]
        assert all(record is not None and record.error() is None for record in found)
        return [(record.key(), record.value(), dict(record.headers() or [])) for record in found]

    yield records
    consumer.close()


def test_a_replayed_topic_is_the_table(change_source: ChangeSource, read: Any) -> None:
    """Covers rows that existed before and all kinds of later changes: of columns and of the key, wide values, nulls, added columns."""
    seed = random.randrange(10**9)
    change_source.execute(ENUM)
    plain, full = (change_source.create(COLUMNS, identity=identity) for identity in ("DEFAULT", "FULL"))
    loads = [Load(Random(seed), plain), Load(Random(seed + 1), full)]
    for load in loads:
        for statements in load.transactions(20):
            change_source.transaction(statements)
    converter = json_converter(schemas=True)
    with change_source.follow(plain, full, converter=converter, config={"skipped.operations": "none"}) as followed:
        loads[0].truncates = True
        for load in loads:
            for statements in load.transactions(150):
                change_source.transaction(statements)
        followed.catch_up()
        records = {table: read(followed.topic(table)) for table in (plain, full)}
    for table in (plain, full):
        expected = change_source.rows(table)
        assert differences(completed(replayed(records[table]), expected), expected) == [], f"{seed=}"
    values = {table: [json.loads(value)["payload"] for _, value, _ in records[table] if value] for table in (plain, full)}
    assert {event["op"] for event in values[plain]} >= {"r", "c", "u", "d"}
    unavailable = {table: any((event["after"] or {}).get("wide") == UNAVAILABLE for event in values[table]) for table in (plain, full)}
    assert unavailable == {plain: True, full: False}


def test_avro_is_in_confluents_wire_format(change_source: ChangeSource, registry: str, read: Any) -> None:
    """Confluent's own deserializer reads keys and values, even after a column was added."""
    table = change_source.create("id int PRIMARY KEY, price numeric(12,2)")
    change_source.execute(f"INSERT INTO {table} VALUES (1, 12.50)")
    with change_source.follow(table, converter=avro_converter(registry)) as followed, SchemaRegistryClient({"url": registry}) as client:
        change_source.execute(f"ALTER TABLE {table} ADD COLUMN note text")
        change_source.execute(f"UPDATE {table} SET note = 'new'")
        change_source.execute(f"DELETE FROM {table}")
        followed.catch_up()
        topic = followed.topic(table)
        decode = AvroDeserializer(client)
        found = [
            (decode(key, SerializationContext(topic, MessageField.KEY)), decode(value, SerializationContext(topic, MessageField.VALUE)))
            for key, value, _ in read(topic)
        ]
    assert [key for key, _ in found] == [{"id": 1}] * 4
    assert [value and (value["op"], value["after"]) for _, value in found] == [
        ("r", {"id": 1, "price": Decimal("12.50")}),
        ("u", {"id": 1, "price": Decimal("12.50"), "note": "new"}),
        ("d", None),
        None,
    ]


def test_a_connector_that_fails_says_why(change_source: ChangeSource) -> None:
    """Its error is raised, so no caller waits in vain."""
    config = {"publication.autocreate.mode": "disabled"}
    with pytest.raises(RuntimeError, match="Publication autocreation is disabled"), change_source.follow("unknown", config=config):
        pass
