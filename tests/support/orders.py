"""A topic of orders in Avro, as confluent-kafka's serializer writes them, with a real registry."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from confluent_kafka.schema_registry import SchemaRegistryClient, topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from tests.support.scenario import Scenario

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "city", "type": ["null", "string"], "default": None},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "country", "type": "string"}]}},
    ],
}
NEWER = {**ORDER, "fields": [*ORDER["fields"], {"name": "channel", "type": "string", "default": "shop"}]}
AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)

COLUMNS = "id bigint, city text, total numeric(12,2), at timestamptz, country text"

FORMS = {
    "function": """
        from tidemark.transform import Record

        def transform(record: Record) -> dict:
            order = record.data
            return {name: order[name] for name in ("id", "city", "total", "at")} | {"country": order["place"]["country"]}
    """,
    "arrow": """
        import pyarrow as pa

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
            order = batch["value"]
            columns = [order.field(name) for name in ("id", "city", "total", "at")] + [order.field("place").field("country")]
            return pa.RecordBatch.from_arrays(
                [*(batch[name] for name in lineage), *columns], names=[*lineage, "id", "city", "total", "at", "country"]
            )
    """,
    "spark": """
        from pyspark.sql import DataFrame

        def transform(records: DataFrame) -> DataFrame:
            fields = ["value.id", "value.city", "value.total", "value.at", "value.place.country"]
            return records.select("kafka_topic", "kafka_partition", "kafka_offset", *fields)
    """,
}
"""The same transform in each form."""


def order(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": number, "city": None, "total": Decimal("12.50"), "at": AT, "place": {"country": "CH"}, **fields}


class Orders:
    """A topic of Avro records."""

    def __init__(self, scenario: Scenario, client: SchemaRegistryClient, registry: str) -> None:
        self.scenario = scenario
        self.topic = scenario.topics.create()
        self._client, self.registry = client, registry
        scenario.connections = dataclasses.replace(scenario.connections, registry={"url": registry})

    def produce(self, *orders: dict[str, Any] | bytes | None, schema: dict[str, Any] = ORDER) -> None:
        self.scenario.topics.produce(self.topic, [self.written(each, schema) if isinstance(each, dict) else each for each in orders])

    def written(self, value: dict[str, Any], schema: dict[str, Any] = ORDER) -> bytes:
        return self._written(value, schema, MessageField.VALUE)

    def written_key(self, key: dict[str, Any]) -> bytes:
        fields = [{"name": name, "type": "long"} for name in key]
        return self._written(key, {"type": "record", "name": "OrderKey", "fields": fields}, MessageField.KEY)

    def _written(self, value: dict[str, Any], schema: dict[str, Any], side: str) -> bytes:
        own = {**schema, "doc": self.topic}  # so the registry has no such schema yet
        serializer = AvroSerializer(self._client, json.dumps(own), conf={"subject.name.strategy": topic_subject_name_strategy})
        return serializer(value, SerializationContext(self.topic, side))
