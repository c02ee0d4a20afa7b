"""The events that every contestant reads. Change data is in `benchmarks.accounts`."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable
from datetime import datetime

from benchmarks import accounts
from benchmarks.site import Topic

KINDS = ("purchase", "refund", "visit", "signup", "download")
TYPES = {
    "event_id": "int64",
    "happened_at": "string",
    "customer": "string",
    "kind": "string",
    "amount": "double",
    "quantity": "int32",
    "note": "string",
}
"""The fields, with the type names of Kafka Connect's schemas."""
AVRO = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "event_id", "type": "long"},
        {"name": "happened_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "customer", "type": "string"},
        {"name": "kind", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "quantity", "type": "int"},
        {"name": "note", "type": "string"},
    ],
}
PROTOBUF = """syntax = "proto3";
package bench;
import "google/protobuf/timestamp.proto";
message Event {
  int64 event_id = 1;
  google.protobuf.Timestamp happened_at = 2;
  string customer = 3;
  string kind = 4;
  double amount = 5;
  int32 quantity = 6;
  string note = 7;
}
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
    made = (value(number, topic.width) for number in numbers)
    match topic.form:
        case "avro":
            return _in_avro(made, topic.schema_ids["value"])
        case "protobuf":
            return _in_protobuf(made, topic.schema_ids["value"])
        case "connect":
            return map(_with_schema, made)
    return made


def records(topic: Topic, partition: int) -> Iterable[tuple[bytes | None, bytes | None]]:
    """A partition's keys and values in order."""
    if topic.changes:
        return accounts.records(topic, partition)
    return _with_deletes(topic, partition) if topic.form == "deletes" else ((None, each) for each in values(topic, partition))


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


def deletes(topic: Topic, event_id: int) -> bool:
    """Whether the record for the row ``event_id`` deletes it. Deletes are spread evenly in each partition."""
    return event_id // topic.partitions % 100 < topic.deletes


def _with_deletes(topic: Topic, partition: int) -> Iterable[tuple[bytes, bytes | None]]:
    """First a record for each row, then a record that replaces or deletes it."""
    rows = topic.records // 2
    for number in range(partition, topic.records, topic.partitions):
        row = number % rows
        gone = number >= rows and deletes(topic, row)
        yield b"%d" % row, None if gone else value(row, topic.width)


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


_FIELDS = [
    {"field": name, "type": kind, "optional": True} | ({"name": "io.debezium.time.ZonedTimestamp"} if name == "happened_at" else {})
    for name, kind in TYPES.items()
]
_ENVELOPE = (
    json.dumps({"schema": {"type": "struct", "optional": False, "fields": _FIELDS}}, separators=(",", ":")).encode()[:-1] + b',"payload":'
)


def fill(servers: str, topic: Topic) -> None:
    """Creates the topic and fills it, unless it exists with exactly these records."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    if topic.name in admin.list_topics(timeout=15).topics:
        if _filled(servers, topic):
            return
        admin.delete_topics([topic.name])[topic.name].result()
        deadline = time.monotonic() + _LIMIT_S
        while topic.name in admin.list_topics(timeout=15).topics and time.monotonic() < deadline:
            time.sleep(0.2)
    settings = {"retention.ms": "-1"}
    admin.create_topics([NewTopic(topic.name, topic.partitions, 1, config=settings)])[topic.name].result()
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "log_level": 3,  # the coordinator of a new broker is not ready at once: not worth a message
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 1_000_000,
        }
    )
    for partition in range(topic.partitions):
        for count, (key, made) in enumerate(records(topic, partition)):
            while True:
                try:
                    producer.produce(topic.name, key=key, value=made, partition=partition)
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
    deadline = time.monotonic() + _LIMIT_S
    try:
        while True:
            try:
                partitions = consumer.list_topics(topic.name, timeout=15).topics[topic.name].partitions
                marks = [consumer.get_watermark_offsets(TopicPartition(topic.name, number), timeout=15) for number in partitions]
                return marks == [(0, topic.each)] * topic.partitions
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
    finally:
        consumer.close()
