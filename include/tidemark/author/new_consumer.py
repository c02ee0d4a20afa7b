"""Generates a starter consumer without code: its file, its table's DDL and its suite, from the topic.

A schema in the registry defines the fields and which of them are never null. For plain JSON, both come from a sample of the latest
records.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg2
import yaml

from tidemark import project
from tidemark.author.check import ddl_of, input_schema_of
from tidemark.author.json_sample import JsonSample, NoSketch, SampledField
from tidemark.author.latest_records import latest
from tidemark.connections import DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.db import data_error, session, transaction
from tidemark.errors import BadInput, Refused
from tidemark.formats.registry import Registry
from tidemark.formats.schema import Node
from tidemark.kafka.cluster import Cluster
from tidemark.records.outcome import GIVEN, ONLY
from tidemark.sink.table import read_columns
from tidemark.spec import ConsumerSpec, checks, consumer_names, load_consumer, read_folder
from tidemark.spec.model import Deletes, Encoding, Envelope
from tidemark.values import json_fields
from tidemark.values.debezium import opened_schema
from tidemark.values.fields import RESERVED, FieldReserved, Fields, transform_of

if TYPE_CHECKING:
    import pyarrow as pa

ENCODINGS = {"AVRO": Encoding.AVRO, "JSON": Encoding.JSON_SCHEMA, "PROTOBUF": Encoding.PROTOBUF}
"""Formats by the registry's name of the schema type."""
SAMPLE = 100
"""Default number of latest records to sample."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """``files``: texts by path. ``left_out``: fields whose names cannot be columns: empty, too long, or with quotes, backslashes or
    control characters. ``objects``: columns of nested records, each one JSON document."""

    name: str
    table: str
    files: Mapping[Path, str]
    ddl: str
    left_out: Sequence[str]
    objects: Sequence[str] = ()

    def create_table(self) -> None:
        """Runs the DDL in the environment's database. Raises `TableExists` and `TableRefused`."""
        if _table_exists(self.table):
            raise TableExists(table=self.table, consumer=self.name)
        try:
            with session(database_url()) as connection, transaction(connection) as cur:
                cur.execute(self.ddl)
        except psycopg2.Error as error:  # such as a role that may not create tables
            raise TableRefused(table=self.table, message=data_error(error).message) from None

    def write(self) -> None:
        """Writes the files. Raises `FileTaken`."""
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise FileTaken(path=str(path)) from None


class FileTaken(Refused):
    """A file of this name exists."""

    path: str

    def __str__(self) -> str:
        return f"{self.path} exists already and was not changed. Give the consumer another --name, or remove the file."


class TableExists(Refused):
    """The table of a new consumer exists."""

    table: str
    consumer: str

    def __str__(self) -> str:
        return (
            f"The table {self.table} exists already and was not changed. Name another with --table; or leave out --create-table, and "
            f"compare it with `tidemark sink diff {self.consumer}`."
        )


class TableRefused(Refused):
    """Postgres refused the DDL of a new consumer's table."""

    table: str
    message: str

    def __str__(self) -> str:
        return f"Postgres refused to create the table {self.table}: {self.message} Neither it nor the consumer was created."


def sketched(topic: str, name: str, table: str | None, schedule: str, count: int) -> Sketch:
    """Drafts a consumer of this topic from its ``count`` latest records, for the project. Writes nothing.

    Raises `FileTaken`, `NoSketch`, `BadInput`, and what the registry and the cluster raise.
    """
    consumers = project.consumers()
    _require(checks.consumer_name, name, "--name")
    _require(checks.schedule, schedule, "--schedule")
    table = _require(checks.table_name, table or _free_table(name, consumers), "--table")
    suite = project.expectations() / f"{name}.json"
    file = consumers / f"{name}.yaml"
    if (consumers.is_dir() and name in consumer_names(consumers)) or suite.exists():
        raise FileTaken(path=str(suite if suite.exists() else file))
    cluster = Cluster(kafka_config())
    topics = cluster.topics([topic], missing_ok=True)
    if not topics:
        raise BadInput(what="TOPIC", found=f"{cluster.servers} has no topic {topic}", fix="Correct the name, or create the topic.")
    messages = latest(kafka_config(), cluster.logs(topics[0].all()).values(), count)
    encoding = _encoding(topic, messages)
    keys: dict[str, Any] = {"topics": [topic], "format": _format(topic, encoding, messages), "sink": {"table": table}}
    sample = _sample(topic, encoding, messages)
    if (key := _key_of_changes(topic, encoding, sample)) is not None:
        keys["format"] = {"value": encoding.value, "key": encoding.value, "envelope": Envelope.DEBEZIUM.value}
        keys["sink"] |= {"mode": "upsert", "key": key, "deletes": Deletes.HARD.value}
    fields = _schema_fields(_spec(name, keys)) if sample is None else sample.fields()
    columns = _columns(fields)
    left_out = [field.name for field in fields if field.name not in columns]
    renamed = {column: name for name, column in columns.items() if column != name}
    keys |= {"columns": renamed} if renamed else {}
    keys |= {"drop": left_out} if left_out and fields[0].type is None else {}
    required = [columns[field.name] for field in fields if field.required and field.name in columns]
    keys |= {"schedule": schedule}
    keys |= {"validation": {"suite": name}} if required else {}
    files = {file: _file_text(keys)}
    if required:
        files[suite] = _suite(name, required, "warning" if fields[0].type else "critical")
    objects = [columns[field.name] for field in fields if field.nested and field.name in columns]
    return Sketch(name, table, files, _ddl(_spec(name, keys), fields, columns), left_out, objects)


def sketched_table(spec: ConsumerSpec, partitions: int | None) -> Sketch:
    """The DDL for a JSON consumer without code, from the latest records of its topics. Writes nothing.

    Raises `BadInput` if the table exists, because its types then apply, or if the topics have no values, `FieldReserved`, and `NoSketch`.
    """
    import pyarrow as pa

    if _table_exists(table := spec.sinks[ONLY].table):
        fix = f"Compare it with the latest records: tidemark consumers check {spec.name}. To derive the columns again, drop the table."
        raise BadInput(what=table, found="the table exists already. JSON has no schema, so the table defines the columns", fix=fix)
    function = transform_of(spec, ()).function
    assert isinstance(function, Fields)
    cluster = Cluster(kafka_config())
    topics = cluster.topics(cluster.subscribed(spec))
    logs = cluster.logs(partition for topic in topics for partition in topic.all() if spec.fixed.covers(partition))
    messages = latest(kafka_config(), logs.values(), SAMPLE)
    names = ", ".join(topic.name for topic in topics)
    if messages["value"].null_count == len(messages):
        fix = "Produce a record first, or create the table yourself, with the lineage columns."
        raise BadInput(what=names, found="it has no records with values to derive columns from", fix=fix)
    sample = (
        JsonSample.of_changes(names, messages)
        if spec.format.envelope
        else JsonSample.of(names, spec.format.value, messages, spec.format.key)
    )
    if sample is None:
        raise NoSketch(topic=names, problem="its latest values are not change data of Debezium")
    types = {name: sample.type_at(steps) for name, steps in function.columns if steps[0] in function.json}
    used = {steps for _, steps in function.columns}
    fields = [
        field
        for field in sample.fields()
        if ("value", field.name) not in used and field.name not in function.drop and field.name not in dict(function.columns)
    ]
    if reserved := next((field.name for field in fields if field.name in RESERVED), None):
        raise FieldReserved(field=reserved)
    columns = _columns(fields)
    types |= {field.name: field.type for field in fields if field.name in columns and field.type is not None}
    derived = function.output(input_schema_of(spec), ())
    output = pa.schema([*_typed(types), *(field for field in derived if field.name not in types)])
    left_out = [field.name for field in fields if field.name not in columns]
    return Sketch(spec.name, spec.sinks[ONLY].table, {}, ddl_of(spec, output, partitions), left_out)


def _table_exists(table: str) -> bool:
    """Whether the table exists. False if the environment does not name a database."""
    try:
        url = database_url()
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        return False
    with session(url) as connection, transaction(connection) as cur:
        return bool(read_columns(cur, table))


class _SubjectTypes(Registry):
    def type_of(self, subject: str) -> str | None:
        """The type of a subject's newest schema. `None` if there is no such subject."""
        version = self._answer(lambda: self._client.get_latest_version(subject))
        return None if version is None else version.schema.schema_type or "AVRO"


def _registered(subject: str) -> Encoding | None:
    """The format of a subject's data. `None` if there is no such subject, or no registry."""
    config = registry_config()
    if config is None:
        return None
    subjects = _SubjectTypes(config)
    with subjects:
        schema_type = subjects.type_of(subject)
    return None if schema_type is None else ENCODINGS[schema_type]


def _encoding(topic: str, messages: pa.RecordBatch) -> Encoding:
    if (registered := _registered(f"{topic}-value")) is not None:
        return registered
    if messages["value"].null_count == len(messages):
        raise NoSketch(topic=topic, problem="it has no records with values, and the registry has no schema for it")
    if not all(isinstance(value, dict) for value in JsonSample.of(topic, Encoding.JSON, messages).objects["value"]):
        raise NoSketch(topic=topic, problem="its values are not all JSON objects, and the registry has no schema for it")
    return Encoding.JSON


def _format(topic: str, encoding: Encoding, messages: pa.RecordBatch) -> dict[str, str]:
    """The formats for the consumer's file, with the key's if records have keys."""
    if (registered := _registered(f"{topic}-key")) is not None:
        return {"value": encoding.value, "key": registered.value}
    keys = messages["key"].drop_null().to_pylist()
    if not keys:
        return {"value": encoding.value}
    text = all(map(_is_printable, keys))
    return {"value": encoding.value, "key": Encoding.STRING.value if text else Encoding.BYTES.value}


def _is_printable(data: bytes) -> bool:
    try:
        return data.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _sample(topic: str, encoding: Encoding, messages: pa.RecordBatch) -> JsonSample | None:
    """The sampled records. None for a format with a schema of its own."""
    if encoding not in (Encoding.JSON, Encoding.JSON_SCHEMA):
        return None
    changes = JsonSample.of_changes(topic, messages) if encoding is Encoding.JSON else None
    return changes or JsonSample.of(topic, encoding, messages)


def _key_of_changes(topic: str, encoding: Encoding, sample: JsonSample | None) -> list[str] | None:
    """The source table's key; None if the values are not change data. Raises `NoSketch` if the records have no keys."""
    if sample is not None:
        if "change" not in sample.objects:
            return None
        if sample.objects["key"]:
            return [field.name for field in sample.fields("key")]
    elif encoding is not Encoding.AVRO or not {"op", "before", "after"} <= _field_names(_newest(topic, "value")):
        return None
    elif _registered(f"{topic}-key") is Encoding.AVRO:
        return list(_field_names(_newest(topic, "key")))
    raise NoSketch(topic=topic, problem="it has change data without keys: set message.key.columns in the connector")


def _schema_fields(spec: ConsumerSpec) -> list[SampledField]:
    """The fields of the values' newest schema."""
    import pyarrow as pa

    (topic,), schema = spec.topics, input_schema_of(spec)
    value_type = (opened_schema(schema) if spec.format.envelope else schema).field("value").type
    if not pa.types.is_struct(value_type):
        raise NoSketch(topic=topic, problem=f"its values are of the type {value_type}, and have no fields")
    required = _required_fields(spec, topic) if spec.format.value is Encoding.AVRO else set()
    return [SampledField(child.name, None, child.name in required, pa.types.is_struct(child.type)) for child in value_type]


def _required_fields(spec: ConsumerSpec, topic: str) -> set[str]:
    node = _newest(topic, "value")
    if spec.format.envelope:
        (node,) = next(field.type for field in node.branches[0].fields if field.name == "after").branches
    return {field.name for field in node.branches[0].fields if not _nullable(node) and not _nullable(field.type)}


def _newest(topic: str, side: str) -> Node:
    """The newest Avro schema of the topic's keys or values."""
    config = registry_config()
    assert config is not None
    with Registry(config) as registry:
        return registry.newest(f"{topic}-{side}")[1]


def _field_names(node: Node) -> Set[str]:
    return dict.fromkeys(field.name for field in node.branches[0].fields).keys()


def _nullable(node: Node) -> bool:
    return node.kind == "null" or any(branch.kind == "null" for branch in node.inner if node.kind == "union")


def _columns(fields: Sequence[SampledField]) -> dict[str, str]:
    """The column name of each field: the field's name, with ``_`` if that is reserved. Omits fields whose names cannot be columns."""
    names = [
        field.name
        for field in fields
        if 0 < len(field.name.encode()) <= checks.POSTGRES_NAME_LIMIT and not json_fields.UNREADABLE & {*field.name}
    ]
    columns: dict[str, str] = {}
    for name in names:
        column = name
        while column in RESERVED or (column != name and column in names):
            column += "_"
        columns[name] = column
    return columns


def _ddl(spec: ConsumerSpec, fields: Sequence[SampledField], columns: Mapping[str, str]) -> str:
    import pyarrow as pa

    function = transform_of(spec, ()).function
    input_schema = input_schema_of(spec)
    if isinstance(function, Fields) and "value" not in function.json:
        return ddl_of(spec, function.output(input_schema, None))
    types = {columns[field.name]: field.type for field in fields if field.name in columns and field.type is not None}
    return ddl_of(spec, pa.schema([*_typed(types), *(input_schema.field(name) for name in GIVEN)]))


def _typed(types: Mapping[str, str]) -> list[pa.Field]:
    """Fields for columns of these Postgres types."""
    import pyarrow as pa

    return [pa.field(name, pa.string(), metadata={"postgres": column_type}) for name, column_type in types.items()]


def _file_text(keys: Mapping[str, Any]) -> str:
    """The text of the consumer's file: one line per key."""
    lines = {
        key: yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False) for key, value in keys.items()
    }
    return "".join(f"{key}: {line}" for key, line in lines.items())


def _suite(name: str, columns: Sequence[str], severity: str) -> str:
    lines = [
        json.dumps({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": column}, "severity": severity}, ensure_ascii=False)
        for column in columns
    ]
    return f'{{\n  "name": {json.dumps(name)},\n  "expectations": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n"


def _spec(name: str, keys: Mapping[str, Any]) -> ConsumerSpec:
    """The spec that the consumer's file will have, validated like any such file."""
    with tempfile.TemporaryDirectory(prefix="tidemark-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(_file_text(keys), encoding="utf-8")
        return load_consumer(path)


def _free_table(name: str, consumers: Path) -> str:
    """A table name that no other consumer uses: ``orders.eu`` and ``orders-eu`` would share one."""
    taken = {table for spec in read_folder(consumers)[0].values() for table in spec.table_names} if consumers.is_dir() else set()
    names = (f"public.{_identifier(name)}{f'_{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(table for table in names if table not in taken)


def _identifier(name: str) -> str:
    """The name as a valid Postgres table name."""
    text = re.sub(r"[^a-z0-9_]+", "_", name.lower())[: checks.POSTGRES_NAME_LIMIT - 1]
    return f"_{text}" if text[:1].isdigit() else text


def _require(check: Callable[[str], str], value: str, option: str) -> str:
    try:
        return check(value)
    except checks.InvalidValue as error:
        raise BadInput(what=option, found=f'"{value}" {error.clause}', fix=f"{error.fix[0].upper()}{error.fix[1:]}.") from None
