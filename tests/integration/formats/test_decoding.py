"""Avro and Protobuf topics with a real registry, written by confluent-kafka's serializers. All three forms of a transform read Avro."""

from __future__ import annotations

import dataclasses
import functools
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessages
from tests.integration.retry.lab import Lab
from tests.support.orders import AT, COLUMNS, FORMS, NEWER, Orders, order
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.spark_here import run_here

from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.web import retries
from tidemark.doctor.examine import examine
from tidemark.doctor.finding import Level
from tidemark.errors import Unavailable
from tidemark.formats.protobuf import compiled
from tidemark.formats.registry import Registry, SubjectMissing
from tidemark.local.airflow_settings import connections_env

LINEAGE = "kafka_offset, id, city, total, at, country"


def consumer(orders: Orders, transform: str = FORMS["arrow"], **keys: Any) -> Scenario:
    scenario = orders.scenario.write(transform, topics=orders.topic, **{"format": {"value": "avro"}, **keys})
    return scenario.make_sink(COLUMNS)


def row(offset: int, number: int) -> tuple[Any, ...]:
    return (offset, number, None, Decimal("12.50"), AT, "CH")


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.thorough) if each == "spark" else each for each in FORMS])
def form(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "spark":
        request.getfixturevalue("session_here")
    return found


def ran(scenario: Scenario, form: str) -> Any:
    return run_here(scenario) if form == "spark" else scenario.run()


def test_records_are_decoded_and_bad_ones_fail_alone(orders: Orders, form: str) -> None:
    """The bad ones are not valid Avro, have an id that the registry does not know yet, or have no id. Their bytes are kept."""
    good = orders.written(order(1))
    unknown = b"\0" + (2**31 - 5).to_bytes(4, "big") + good[5:]
    orders.produce(order(1), good[:-1], order(2), unknown, b"no id", order(3), good + b"\0")
    scenario = consumer(orders, FORMS[form], retry={"delays": ["1h"]})
    ran(scenario, form)
    assert scenario.rows(LINEAGE) == [row(0, 1), row(2, 2), row(5, 3)]
    assert scenario.failed("record_offset, disposition, error_type, error_text, value") == [
        (1, "fail", "Undecodable", "its value does not have the form of its Avro schema", good[:-1]),
        (3, "retry", "SchemaUnknown", f"the registry does not know schema {2**31 - 5} of its value", unknown),
        (4, "fail", "Undecodable", "its value has no schema id: it does not begin with a zero byte and four more", b"no id"),
        (6, "fail", "Undecodable", "its value does not have the form of its Avro schema", good + b"\0"),
    ]
    assert scenario.counts() == {"loaded": 3, "sink_rows": 3, "failed": 3, "retried": 1}
    scenario.check()


@pytest.mark.sampled
def test_old_and_new_schemas_in_one_topic(orders: Orders, form: str) -> None:
    """The transform sees the newest schema. Fields that an old record lacks have their defaults."""
    orders.produce(order(1), order(2))
    orders.produce(order(3, channel="web"), schema=NEWER)
    orders.produce(order(4))
    source = FORMS[form].replace('"country": order["place"]["country"]', '"country": order["channel"]')
    source = source.replace('order.field("place").field("country")', 'order.field("channel")')
    source = source.replace('"value.place.country"', '"value.channel AS country"').replace("records.select(", "records.selectExpr(")
    scenario = consumer(orders, source)
    ran(scenario, form)
    assert scenario.rows("id, country") == [(1, "shop"), (2, "shop"), (3, "web"), (4, "shop")]
    scenario.check()


def test_the_newest_schema_is_known_before_the_first_record(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a slice would start only to find out which schema it needs."""
    asked: list[Any] = []
    by_ids = Registry.by_ids
    monkeypatch.setattr(Registry, "by_ids", lambda self, ids: asked.extend(ids) or by_ids(self, ids))
    scenario = consumer(orders)
    orders.produce(order(1))
    scenario.run()
    assert asked == []
    orders.produce(order(2, channel="web"), schema=NEWER)
    orders.produce(order(3))
    scenario.run()
    assert len(asked) == 1
    assert scenario.rows("id") == [1, 2, 3]


def test_registry_that_is_away_moves_nothing(orders: Orders) -> None:
    orders.produce(order(1))
    scenario = consumer(orders)
    there = scenario.connections
    scenario.connections = dataclasses.replace(there, registry={"url": "http://127.0.0.1:1"})
    with pytest.raises(Unavailable, match="No offset was moved"):
        scenario.run()
    assert scenario.positions() in ({}, {(orders.topic, 0): 0})
    scenario.connections = there
    scenario.run()
    assert scenario.rows(LINEAGE) == [row(0, 1)]
    scenario.check()


def test_topic_without_a_schema_says_which_subject_is_missing(orders: Orders) -> None:
    """`doctor` says it too."""
    scenario = consumer(orders)
    scenario.topics.produce(orders.topic, [b"x"])
    with pytest.raises(SubjectMissing, match=f"has no subject {orders.topic}-value"):
        scenario.run()

    def found() -> list[tuple[Level, str]]:
        examined = examine(scenario.connections, [scenario.spec], scenario.folders)
        return [(one.level, one.found) for one in examined if one.subject.endswith(": check")]

    ((level, text),) = found()
    assert level is Level.FAILURE
    assert f"has no subject {orders.topic}-value" in text
    orders.written(order(1))
    assert [level for level, _ in found()] == [Level.OK]


def test_check_and_ddl_know_the_decoded_columns(orders: Orders) -> None:
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(FORMS["arrow"], topics=orders.topic, format={"value": "avro"})
    ddl = tidemark(scenario, "sink", "ddl", scenario.name)
    assert ddl.returncode == 0, ddl.stderr
    assert '"total"           numeric(12,2)' in ddl.stdout
    scenario.sql(ddl.stdout)
    checked = tidemark(scenario, "consumers", "check", scenario.name)
    assert checked.returncode == 0, checked.stdout
    assert "takes id, city, total, at, country" in checked.stdout
    without = tidemark(scenario, "consumers", "check", scenario.name, env={"TIDEMARK_REGISTRY_URL": ""})
    assert "TIDEMARK_REGISTRY_URL" in without.stdout
    assert without.returncode == 1


@pytest.mark.sampled
def test_drained_records_are_decoded_again(orders: Orders, form: str) -> None:
    """A record waits for its schema. It is loaded with its own values once the registry knows the schema; a broken record fails."""
    scenario = orders.scenario
    runner = run_here if form == "spark" else Scenario.run
    next_id = int.from_bytes(orders.written(order(1))[1:5], "big") + 1
    early = b"\0" + next_id.to_bytes(4, "big") + orders.written(order(7))[5:] + b"\x06web"
    orders.produce(order(1), early, early[:-1])
    lab = Lab(scenario, scenario.topics, topic=orders.topic, transform=FORMS[form], ddl=COLUMNS, runner=runner, format={"value": "avro"})
    try:
        lab.run()
        assert [each[:3] for each in scenario.failed()] == [(at, "retry", "SchemaUnknown") for at in (1, 2)]
        assert int.from_bytes(orders.written(order(2, channel="x"), NEWER)[1:5], "big") == next_id
        lab.climb(timedelta(minutes=5))
        assert scenario.rows(LINEAGE) == [row(0, 1), row(1, 7)]
        assert lab.failed("state, error_type") == [("LOADED", "SchemaUnknown"), ("FAILED", "Undecodable")]
        lab.check()
    finally:
        lab.close()


REFUSES = """
    from tidemark.transform import Fail, Record

    def transform(record: Record) -> dict:
        raise Fail("no")
"""


def test_failed_records_are_shown_decoded(orders: Orders) -> None:
    """Their bytes are kept and shown as well. Without the registry, the reason is shown instead of the decoded value."""
    orders.scenario.topics.produce(orders.topic, [orders.written(order(2)), b"no id"], key=orders.written_key({"id": 9}))
    scenario = consumer(orders, REFUSES, format={"value": "avro", "key": "avro"})
    scenario.run()
    numbers = [number for (number,) in scenario.failed("failed_record_id")]
    shown = [tidemark(scenario, "retries", "show", scenario.name, str(number), "--output", "json") for number in numbers]
    assert [json.loads(each.stdout)["decoded"]["key"] for each in shown] == [{"json": '{"id":9}', "problem": None}] * 2
    values = [json.loads(each.stdout)["decoded"]["value"] for each in shown]
    place = '"place":{"country":"CH"}'
    assert values[0]["json"] == f'{{"id":2,"city":null,"total":12.50,"at":"2026-01-02T03:04:05.678000Z",{place}}}'
    assert values[1] == {"json": None, "problem": "its value has no schema id: it does not begin with a zero byte and four more"}
    table = tidemark(scenario, "retries", "show", scenario.name, str(numbers[0]))
    assert 'value, decoded {"id":2,' in table.stdout
    without = tidemark(scenario, "retries", "show", scenario.name, str(numbers[0]), env={"TIDEMARK_REGISTRY_URL": ""})
    assert "not decoded: TIDEMARK_REGISTRY_URL: it is not set" in without.stdout


def test_page_shows_failed_records_decoded(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the registry that the consumer's connection in Airflow names."""
    orders.produce(order(1))
    scenario = consumer(orders, REFUSES)
    scenario.run()
    ((number,),) = scenario.failed("failed_record_id")
    env = connections_env(scenario.database_url, scenario.connections.kafka, "local[1]", orders.registry)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    one = DeclaredConsumer(scenario.spec)
    assert json.loads(retries.record(one, number)["payload"]["value"]["json"])["place"] == {"country": "CH"}
    monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_REGISTRY", json.dumps({"conn_type": "http", "host": "http://127.0.0.1:1"}))
    value = retries.record(one, number)["payload"]["value"]
    assert value["json"] is None
    assert "is not available" in value["problem"]


PLACE_PROTO = 'syntax = "proto3"; package shop; message Place { string country = 1; }'
ORDER_PROTO = """
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
PROTO_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PROTOBUF = {"value": "protobuf"}


@functools.cache
def messages() -> dict[str, Any]:
    """The schema's classes by name."""
    files = FileDescriptorSet.FromString(compiled(ORDER_PROTO, {"shop/place.proto": PLACE_PROTO}).files).file
    return GetMessages(files, pool=DescriptorPool())


def message(number: int) -> Any:
    found = messages()["shop.Order"](id=number, city="Bern", place={"country": "CH"})
    found.at.FromDatetime(PROTO_AT)
    return found


def parcel(number: int) -> Any:
    return messages()["shop.Parcel"](id=number)


@pytest.fixture
def text_schema(orders: Orders) -> int:
    """The id of the schema, which is registered as text and with a reference, as Java clients and people register it."""
    with SchemaRegistryClient({"url": orders.registry}) as client:
        client.register_schema(f"{orders.topic}-place", Schema(PLACE_PROTO, "PROTOBUF"))
        references = [SchemaReference("shop/place.proto", f"{orders.topic}-place", 1)]
        text = f"{ORDER_PROTO}// {orders.topic}\n"
        return client.register_schema(f"{orders.topic}-value", Schema(text, "PROTOBUF", references))


def framed(schema_id: int, sent: Any, indexes: bytes = b"\0") -> bytes:
    data: bytes = sent.SerializeToString()
    return b"\0" + schema_id.to_bytes(4, "big") + indexes + data


def test_protobuf_records_are_decoded_and_bad_ones_fail_alone(orders: Orders, text_schema: int) -> None:
    scenario = orders.scenario
    first, second, fourth = (framed(text_schema, message(number)) for number in (1, 2, 4))
    orders.produce(first, second[:-1], framed(text_schema, parcel(3), b"\x02\x02"), b"no id", None, fourth)
    scenario.write(None, topics=orders.topic, format=PROTOBUF).make_sink()
    scenario.run()
    assert scenario.rows("id, city, at, place") == [(number, "Bern", PROTO_AT, {"country": "CH"}) for number in (1, 4)]
    assert scenario.failed("record_offset, error_type, error_text") == [
        (1, "Undecodable", "its value does not have the form of its Protobuf schema"),
        (2, "Undecodable", "its value is message 1 of its schema, and shop.Order is 0"),
        (3, "Undecodable", "its value has no schema id: it does not begin with a zero byte and four more"),
    ]
    ((number,), *_) = scenario.failed("failed_record_id")
    shown = tidemark(scenario, "retries", "show", scenario.name, str(number)).stdout
    assert "not decoded: its value does not have the form" in shown
    scenario.check()


@pytest.mark.thorough
def test_spark_form_and_a_message_that_is_not_the_first(orders: Orders, text_schema: int, session_here: Any) -> None:
    scenario = orders.scenario
    orders.produce(framed(text_schema, parcel(3), b"\x02\x02"), framed(text_schema, message(1)))
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
        serializer = ProtobufSerializer(messages()["shop.Parcel"], client, {"use.deprecated.format": False})
        written = serializer(parcel(5), SerializationContext(orders.topic, MessageField.VALUE))
    orders.produce(written)
    scenario.write(None, topics=orders.topic, format=PROTOBUF | {"value_message": "shop.Parcel"}).make_sink()
    scenario.run()
    assert scenario.rows("id") == [5]


def test_protobuf_with_a_schema_file(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    (scenario.folder / "schemas" / "shop").mkdir(parents=True)
    (scenario.folder / "schemas" / "order.proto").write_text(ORDER_PROTO)
    (scenario.folder / "schemas" / "shop" / "place.proto").write_text(PLACE_PROTO)
    monkeypatch.setenv("TIDEMARK_SCHEMAS", str(scenario.folder / "schemas"))
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [message(1).SerializeToString()])
    scenario.write(None, topics=topic, format=PROTOBUF | {"value_schema": "order.proto"}, flatten="_").make_sink()
    scenario.run()
    assert scenario.rows("id, place_country") == [(1, "CH")]
