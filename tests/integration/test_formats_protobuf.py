"""Protobuf topics with a real registry, as confluent-kafka's serializer writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.message_factory import GetMessageClass
from tests.support.orders import Orders
from tests.support.scenario import Scenario
from tests.support.spark_here import run_here

from tidemark.formats import protobuf
from tidemark.formats.protobuf import compiled

PLACE = 'syntax = "proto3"; package shop; message Place { string country = 1; }'
ORDER = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "shop/place.proto";
message Order {
  int64 id = 1;
  optional string city = 2;
  google.protobuf.Timestamp at = 3;
  Place place = 4;
}
message Parcel { int64 id = 1; }
"""
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PROTOBUF = {"value": "protobuf"}


def message_class(name: str) -> Any:
    return GetMessageClass(protobuf._pool(compiled(ORDER, {"shop/place.proto": PLACE}).files).FindMessageTypeByName(name))


def order(number: int) -> Any:
    found = message_class("shop.Order")(id=number, city="Bern", place={"country": "CH"})
    found.at.FromDatetime(AT)
    return found


@pytest.fixture
def text_schema(orders: Orders) -> int:
    """The id of the schema, which is registered as text and with a reference, as Java clients and people register it."""
    with SchemaRegistryClient({"url": orders.registry}) as client:
        client.register_schema(f"{orders.topic}-place", Schema(PLACE, "PROTOBUF"))
        references = [SchemaReference("shop/place.proto", f"{orders.topic}-place", 1)]
        text = f"{ORDER}// {orders.topic}\n"
        return client.register_schema(f"{orders.topic}-value", Schema(text, "PROTOBUF", references))


def framed(schema_id: int, message: Any, indexes: bytes = b"\0") -> bytes:
    data: bytes = message.SerializeToString()
    return b"\0" + schema_id.to_bytes(4, "big") + indexes + data


def test_records_are_decoded_and_bad_ones_fail_alone(orders: Orders, text_schema: int) -> None:
    scenario = orders.scenario
    parcel = framed(text_schema, message_class("shop.Parcel")(id=3), b"\x02\x02")
    orders.produce(framed(text_schema, order(1)), framed(text_schema, order(2))[:-1], parcel, b"no id", None, framed(text_schema, order(4)))
    scenario.write(None, topics=orders.topic, format=PROTOBUF).make_sink()
    scenario.run()
    assert scenario.rows("id, city, at, place") == [(number, "Bern", AT, {"country": "CH"}) for number in (1, 4)]
    assert scenario.failed("record_offset, error_type, error_text") == [
        (1, "Undecodable", "its value does not have the form of its Protobuf schema"),
        (2, "Undecodable", "its value is message 1 of its schema, and shop.Order is 0"),
        (3, "Undecodable", "its value has no schema id: it does not begin with a zero byte and four more"),
    ]
    ((number,), *_) = scenario.failed("failed_record_id")
    shown = scenario.command("retries", "show", scenario.name, str(number)).stdout
    assert "not decoded: its value does not have the form" in shown
    scenario.check()


def test_spark_form_and_a_message_that_is_not_the_first(orders: Orders, text_schema: int, session_here: Any) -> None:
    scenario = orders.scenario
    orders.produce(framed(text_schema, message_class("shop.Parcel")(id=3), b"\x02\x02"), framed(text_schema, order(1)))
    source = """
        from pyspark.sql import DataFrame

        def transform(records: DataFrame) -> DataFrame:
            return records.select("kafka_topic", "kafka_partition", "kafka_offset", "value.id")
    """
    scenario.write(source, topics=orders.topic, format=PROTOBUF | {"value_message": "shop.Parcel"}).make_sink("id bigint")
    run_here(scenario)
    assert scenario.rows("id") == [3]
    assert [each[:3] for each in scenario.failed()] == [(1, "fail", "Undecodable")]


def test_what_confluents_python_client_registers_and_writes(orders: Orders) -> None:
    """This client registers descriptors, not text."""
    scenario = orders.scenario
    with SchemaRegistryClient({"url": orders.registry}) as client:
        serializer = ProtobufSerializer(message_class("shop.Parcel"), client, {"use.deprecated.format": False})
        written = serializer(message_class("shop.Parcel")(id=5), SerializationContext(orders.topic, MessageField.VALUE))
    orders.produce(written)
    scenario.write(None, topics=orders.topic, format=PROTOBUF | {"value_message": "shop.Parcel"}).make_sink()
    scenario.run()
    assert scenario.rows("id") == [5]


def test_schema_file(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    (scenario.folder / "schemas" / "shop").mkdir(parents=True)
    (scenario.folder / "schemas" / "order.proto").write_text(ORDER)
    (scenario.folder / "schemas" / "shop" / "place.proto").write_text(PLACE)
    monkeypatch.setenv("TIDEMARK_SCHEMAS", str(scenario.folder / "schemas"))
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [order(1).SerializeToString()])
    scenario.write(None, topics=topic, format=PROTOBUF | {"value_schema": "order.proto"}, flatten="_").make_sink()
    scenario.run()
    assert scenario.rows("id, place_country") == [(1, "CH")]
