"""Change data in the form in which Debezium's Postgres connector writes it at its defaults, for a table with 8 columns.

Creates, updates and deletes; all changes of a key are in one partition, and a tombstone follows each delete. Without REPLICA IDENTITY FULL,
an update has no ``before``, and that of a delete has only the key. In JSON, each key and value includes its schema; in Avro, its schema id.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from random import Random
from typing import Any

from benchmarks.harness.site import Topic

COLUMNS = (
    ("id", "bigint"),
    ("owner", "text"),
    ("iban", "text"),
    ("balance", "numeric(12,2)"),
    ("credit_limit", "integer"),
    ("active", "boolean"),
    ("opened_on", "date"),
    ("updated_at", "timestamp with time zone"),
)
CREATES, UPDATES = 0.4, 0.5
"""Their shares of the changes; the others are deletes."""
Row = dict[str, Any]
Record = tuple[bytes, bytes | None]

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_TABLE = "bank.public.accounts"
_AVRO = {"int64": "long", "int32": "int"}


def last_id(partition: int) -> int:
    """The account that the last record of a partition creates."""
    return -1 - partition


def changes(topic: Topic, partition: int) -> Iterator[tuple[str, Row]]:
    """The operations in order, each with the resulting row, or with the row that it deletes. A delete takes two records."""
    rng, live, left, number = Random(partition), list[Row](), topic.each, partition
    while left:
        roll = rng.random()
        if left == 1 or not live or roll < CREATES:
            live.append(_opened(rng, last_id(partition) if left == 1 else number))
            number += topic.partitions
            yield "c", live[-1]
        elif left == 2 or roll < CREATES + UPDATES:
            at = rng.randrange(len(live))
            live[at] = {**live[at], "balance": _cents(rng), "active": rng.random() < 0.9, "updated_at": _moment(rng)}
            yield "u", live[at]
        else:
            at = rng.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            left -= 1
            yield "d", live.pop()
        left -= 1


def records(topic: Topic, partition: int) -> Iterator[Record]:
    encode = _json if topic.form == "accounts" else _avro(topic.schema_ids)
    for number, (op, row) in enumerate(changes(topic, partition)):
        key, value = encode({"id": row["id"]}, _event(op, row, number))
        yield key, value
        if op == "d":
            yield key, None


def remaining(topic: Topic) -> Iterator[str]:
    """The rows that remain after all changes, as lines for COPY."""
    for partition in range(topic.partitions):
        rows: dict[int, Row] = {}
        for op, row in changes(topic, partition):
            if op == "d":
                del rows[row["id"]]
            else:
                rows[row["id"]] = row
        for row in rows.values():
            cents = int.from_bytes(row["balance"], signed=True)
            opened = date(1970, 1, 1) + timedelta(days=row["opened_on"])
            plain = {**row, "balance": f"{cents}e-2", "opened_on": opened}
            yield "\t".join("\\N" if value is None else str(value) for value in plain.values()) + "\n"


def avro_schemas() -> dict[str, str]:
    """Of keys and values."""
    return {side: json.dumps(_as_avro(schema, set())) for side, schema in (("key", _KEY), ("value", _ENVELOPE))}


def _opened(rng: Random, number: int) -> Row:
    return {
        "id": number,
        "owner": f"customer-{rng.randrange(10**6):06d}",
        "iban": f"CH{rng.randrange(10**19):019d}",
        "balance": _cents(rng),
        "credit_limit": rng.choice((None, 1_000, 5_000, 20_000)),
        "active": True,
        "opened_on": 18_000 + rng.randrange(2_500),
        "updated_at": _moment(rng),
    }


def _cents(rng: Random) -> bytes:
    """As Java's ``BigInteger.toByteArray``."""
    cents = rng.randrange(-(10**6), 10**9)
    return cents.to_bytes((cents if cents >= 0 else ~cents).bit_length() // 8 + 1, signed=True)


def _moment(rng: Random) -> str:
    return (_BEGIN + timedelta(microseconds=rng.randrange(10**13))).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _event(op: str, row: Row, number: int) -> dict[str, Any]:
    micros = int(_BEGIN.timestamp()) * 10**6 + number * 100
    lsn = 28_270_200 + number * 152
    source = {"version": "3.2.0.Final", "connector": "postgresql", "name": "bank", "ts_ms": micros // 1000, "snapshot": "false"}
    source |= {"db": "bank", "sequence": f'["{lsn}","{lsn}"]', "ts_us": micros, "ts_ns": micros * 1000, "schema": "public"}
    source |= {"table": "accounts", "txId": 750 + number, "lsn": lsn, "xmin": None}
    before = dict.fromkeys(row) | {"id": row["id"]} if op == "d" else None
    event = {"before": before, "after": None if op == "d" else row, "source": source, "transaction": None, "op": op}
    read_at = micros + 90_000
    return event | {"ts_ms": read_at // 1000, "ts_us": read_at, "ts_ns": read_at * 1000}


def _json(key: Row, event: dict[str, Any]) -> tuple[bytes, bytes]:
    after = event["after"]
    if after is not None:
        event = {**event, "after": {**after, "balance": base64.b64encode(after["balance"]).decode()}}
    return _with_schema(_KEY_TEXT, key), _with_schema(_ENVELOPE_TEXT, event)


def _with_schema(schema: str, payload: dict[str, Any]) -> bytes:
    return f'{{"schema":{schema},"payload":{_text(payload)}}}'.encode()


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _avro(ids: dict[str, int]) -> Callable[[Row, dict[str, Any]], tuple[bytes, bytes]]:
    """As Confluent's serializer writes it."""
    import fastavro

    schemas = {side: fastavro.parse_schema(json.loads(text)) for side, text in avro_schemas().items()}

    def written(side: str, datum: dict[str, Any]) -> bytes:
        out = io.BytesIO()
        out.write(b"\0" + ids[side].to_bytes(4))
        fastavro.schemaless_writer(out, schemas[side], datum)
        return out.getvalue()

    return lambda key, event: (written("key", key), written("value", event))


def _as_avro(schema: dict[str, Any], known: set[str]) -> Any:
    """A schema of Kafka Connect's, as the converter to Avro registers it."""
    kind, name = schema["type"], str(schema.get("name", ""))
    notes = {f"connect.{key}": schema[key] for key in ("name", "version", "parameters") if key in schema}
    if kind == "struct" and name in known:
        return name
    if kind == "struct":
        known.add(name)
        fields = [_avro_field(field, known) for field in schema["fields"]]
        return {"type": "record", "name": name.split(".")[-1], "namespace": name.rpartition(".")[0], "fields": fields, **notes}
    plain = _AVRO.get(kind, kind)
    decimal = {"logicalType": "decimal", "precision": 12, "scale": 2} if name == "org.apache.kafka.connect.data.Decimal" else {}
    return {"type": plain, **decimal, **notes} if notes else plain


def _avro_field(field: dict[str, Any], known: set[str]) -> dict[str, Any]:
    name, kind = field["field"], _as_avro(field, known)
    if "default" in field:
        return {"name": name, "type": [kind, "null"], "default": field["default"]}
    return {"name": name, "type": ["null", kind], "default": None} if field["optional"] else {"name": name, "type": kind}


def _field(name: str, kind: str, /, *, optional: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": kind, "optional": optional, **more, "field": name}


def _fields(names: str, kind: str, *, optional: bool = True) -> list[dict[str, Any]]:
    return [_field(name, kind, optional=optional) for name in names.split()]


def _struct(name: str, *fields: dict[str, Any], version: int | None = None) -> dict[str, Any]:
    return {"name": name, **({"version": version} if version else {}), "fields": list(fields)}


_DECIMAL = {"scale": "2", "connect.decimal.precision": "12"}
_SNAPSHOTS = {"allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"}
_ROW = _struct(
    f"{_TABLE}.Value",
    _field("id", "int64", optional=False),
    *_fields("owner iban", "string"),
    _field("balance", "bytes", name="org.apache.kafka.connect.data.Decimal", version=1, parameters=_DECIMAL),
    _field("credit_limit", "int32"),
    _field("active", "boolean"),
    _field("opened_on", "int32", name="io.debezium.time.Date", version=1),
    _field("updated_at", "string", name="io.debezium.time.ZonedTimestamp", version=1),
)
_SOURCE = _struct(
    "io.debezium.connector.postgresql.Source",
    *_fields("version connector name", "string", optional=False),
    _field("ts_ms", "int64", optional=False),
    _field("snapshot", "string", name="io.debezium.data.Enum", version=1, parameters=_SNAPSHOTS, default="false"),
    _field("db", "string", optional=False),
    _field("sequence", "string"),
    *_fields("ts_us ts_ns", "int64"),
    *_fields("schema table", "string", optional=False),
    *_fields("txId lsn xmin", "int64"),
    version=1,
)
_ORDER = _fields("total_order data_collection_order", "int64", optional=False)
_TRANSACTION = _struct("event.block", _field("id", "string", optional=False), *_ORDER, version=1)
_FIELDS_OF_ENVELOPE = (
    _field("before", "struct", **_ROW),
    _field("after", "struct", **_ROW),
    _field("source", "struct", optional=False, **_SOURCE),
    _field("transaction", "struct", **_TRANSACTION),
    _field("op", "string", optional=False),
    *_fields("ts_ms ts_us ts_ns", "int64"),
)
_STRUCT: dict[str, Any] = {"type": "struct", "optional": False}
_ENVELOPE = _STRUCT | _struct(f"{_TABLE}.Envelope", *_FIELDS_OF_ENVELOPE, version=2)
_KEY = _STRUCT | _struct(f"{_TABLE}.Key", _field("id", "int64", optional=False))
_KEY_TEXT, _ENVELOPE_TEXT = _text(_KEY), _text(_ENVELOPE)
