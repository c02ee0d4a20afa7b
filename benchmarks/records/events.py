"""The events that every contestant reads. Change data is in `benchmarks.records.accounts`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from benchmarks.harness.site import Topic
from benchmarks.records import accounts
from tests.support.waiting import until

KINDS = ("purchase", "refund", "visit", "signup", "download")
FIELDS = (
    ("event_id", "int64", "long", "int64"),
    ("happened_at", "string", {"type": "long", "logicalType": "timestamp-millis"}, "google.protobuf.Timestamp"),
    ("customer", "string", "string", "string"),
    ("kind", "string", "string", "string"),
    ("amount", "double", "double", "double"),
    ("quantity", "int32", "int", "int32"),
    ("note", "string", "string", "string"),
)
"""The fields: names, and types in the schemas of Kafka Connect, Avro and Protobuf."""
AVRO = {"type": "record", "name": "Event", "fields": [{"name": name, "type": kind} for name, _, kind, _ in FIELDS]}
_LINES = "".join(f"  {kind} {name} = {number};\n" for number, (name, _, _, kind) in enumerate(FIELDS, 1))
PROTOBUF = f"""syntax = "proto3";
package bench;
import "google/protobuf/timestamp.proto";
message Event {{
{_LINES}}}
"""
FILLER = "lorem ipsum dolor sit amet consectetur adipiscing elit "
_CHUNK = 20_000
_LIMIT_S = 120


def value(number: int, width: int) -> bytes:
    """Event ``number`` as JSON of about ``width`` bytes (at least 155, the size of the other fields)."""
    second, millis = divmod(number, 1000)
    clock = f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{millis:03d}"
    head = (
        f'{{"event_id": {number}, "happened_at": "2026-01-{second // 86400 % 28 + 1:02d}T{clock}Z", '
        f'"customer": "customer-{number * 7919 % 100_000:06d}", "kind": "{KINDS[number % 5]}", '
        f'"amount": {number % 100_000 / 100}, "quantity": {number % 20}, "note": "'
    )
    missing = max(0, width - len(head) - 2)
    note = (FILLER * (missing // len(FILLER) + 2))[number % 7 : number % 7 + missing]
    return f'{head}{note}"}}'.encode()


def values(topic: Topic, partition: int) -> Iterable[bytes]:
    """A partition's records in order."""
    numbers = range(partition, topic.records, topic.partitions)
    events = (value(number, topic.width) for number in numbers)
    match topic.form:
        case "avro":
            return _in_avro(events, topic.schema_ids["value"])
        case "protobuf":
            return _in_protobuf(events, topic.schema_ids["value"])
        case "connect":
            return map(_with_schema, events)
    return events


def records(topic: Topic, partition: int) -> Iterable[tuple[bytes | None, bytes | None]]:
    """A partition's keys and values in order."""
    if topic.changes:
        return accounts.records(topic, partition)
    if topic.form == "empty":
        return ((None, b"") for _ in range(topic.each))
    return ((None, each) for each in values(topic, partition))


def schemas(form: str) -> tuple[str, dict[str, str]]:
    """The type of a form's schemas, and the schemas to register for ``key`` and ``value``."""
    match form:
        case "avro":
            return "AVRO", {"value": json.dumps(AVRO)}
        case "accounts-avro":
            return "AVRO", accounts.avro_schemas()
        case "protobuf":
            return "PROTOBUF", {"value": PROTOBUF}
    return "", {}


def _in_protobuf(values: Iterable[bytes], schema_id: int) -> Iterable[bytes]:
    """The same events, as Confluent's serializer writes them."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.json_format import ParseDict
    from google.protobuf.message_factory import GetMessages

    from tidemark.formats.protobuf import compiled

    event = GetMessages(FileDescriptorSet.FromString(compiled(PROTOBUF, {}).files).file)["bench.Event"]
    for each in values:
        yield b"\0" + schema_id.to_bytes(4) + b"\0" + ParseDict(json.loads(each), event()).SerializeToString()


def _in_avro(values: Iterable[bytes], schema_id: int) -> Iterable[bytes]:
    """The same events, as Confluent's serializer writes them."""
    import fastavro

    schema = fastavro.parse_schema(AVRO)
    for each in values:
        event = json.loads(each)
        event["happened_at"] = datetime.fromisoformat(event["happened_at"])
        out = io.BytesIO(b"\0" + schema_id.to_bytes(4))
        out.seek(5)
        fastavro.schemaless_writer(out, schema, event)
        yield out.getvalue()


def _with_schema(payload: bytes) -> bytes:
    return _ENVELOPE + payload + b"}"


_TIMESTAMP = {"name": "io.debezium.time.ZonedTimestamp"}
_FIELDS = [{"field": name, "type": kind, "optional": True} | (_TIMESTAMP if name == "happened_at" else {}) for name, kind, _, _ in FIELDS]
_SCHEMA = json.dumps({"schema": {"type": "struct", "optional": False, "fields": _FIELDS}}, separators=(",", ":"))
_ENVELOPE = _SCHEMA.encode()[:-1] + b',"payload":'


def fill(servers: str, topic: Topic) -> None:
    """Creates the topic and fills it, unless it exists with exactly these records."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    if topic.name in admin.list_topics(timeout=15).topics:
        if _filled(servers, topic):
            return
        admin.delete_topics([topic.name])[topic.name].result()
        until(lambda: topic.name not in admin.list_topics(timeout=15).topics, f"{topic.name} is deleted", _LIMIT_S)
    settings: dict[str, Any] = {"retention.ms": "-1"}
    admin.create_topics([NewTopic(topic.name, topic.partitions, 1, config=settings)])[topic.name].result()
    settings = {"enable.idempotence": True, "linger.ms": 50, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 1_000_000}
    settings["log_level"] = 3  # the coordinator of a new broker is not ready at once: not worth a message
    producer = Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 500_000, **settings})
    for partition in range(topic.partitions):
        for count, (key, content) in enumerate(records(topic, partition)):
            while True:
                try:
                    producer.produce(topic.name, key=key, value=content, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.1)
            if count % _CHUNK == 0:
                producer.poll(0)
    left = producer.flush(_LIMIT_S)
    if left or not _filled(servers, topic):
        raise RuntimeError(f"topic {topic.name} could not be filled: {left} records were not taken")


def _filled(servers: str, topic: Topic) -> bool:
    """Asks until the broker answers: after a restart, it does not lead its partitions at once."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench-look", "enable.auto.commit": False, "log_level": 3})

    def marks() -> list[tuple[int, int]] | None:
        with contextlib.suppress(KafkaException):
            partitions = consumer.list_topics(topic.name, timeout=15).topics[topic.name].partitions
            return [consumer.get_watermark_offsets(TopicPartition(topic.name, number), timeout=15) for number in partitions]
        return None

    with contextlib.closing(consumer):
        return bool(until(marks, f"the marks of {topic.name}", _LIMIT_S) == [(0, topic.each)] * topic.partitions)
