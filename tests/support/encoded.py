"""Encoded values, alone and in a batch, as a consumer reads them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
import pyarrow as pa

from tidemark.worker.batches import input_schema


def record(name: str, /, **fields: Any) -> dict[str, Any]:
    """An Avro schema. A field is its type, or a mapping with its type and its default."""
    named = [{"name": field, **(kind if "default" in kind else {"type": kind})} for field, kind in fields.items()]
    return {"type": "record", "name": name, "fields": named}


def written(schema: Any, value: Any) -> bytes:
    """The value as fastavro writes it in this Avro schema, without a schema id."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def framed(data: bytes, schema_id: int = 7) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + data


def batch(values: Sequence[bytes | None], headers: Sequence[Any] | None = None, key: bytes | None = None) -> pa.RecordBatch:
    """Records of partition 0 of the topic ``orders``."""
    rows = [
        {"topic": "orders", "partition": 0, "offset": at, "kafka_topic": "orders", "kafka_partition": 0, "kafka_offset": at}
        | {"key": key, "value": value, "headers": headers[at] if headers else None}
        for at, value in enumerate(values)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=input_schema())
