"""A consumer without code to start from: its file, its table's DDL and its suite, from what the topic holds.

A schema in the registry says which fields there are and which are never null. Plain JSON has none, so both come from a sample of the
latest records.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import yaml

from tidemark import project
from tidemark.connections import DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.consume import json_fields
from tidemark.consume.check import ddl_of
from tidemark.consume.decode import Decoding
from tidemark.consume.fields import RESERVED, ColumnsUnknown, FieldReserved, Fields, Steps, transform_of
from tidemark.consume.latest import latest
from tidemark.db import session, transaction
from tidemark.errors import BadInput, Refused
from tidemark.formats.decoder import Decoder
from tidemark.formats.registry import Registry
from tidemark.formats.schema import Node
from tidemark.kafka.cluster import Cluster
from tidemark.records.outcome import GIVEN, ONLY
from tidemark.sink.table import read_columns
from tidemark.spec import ConsumerSpec, checks, consumer_names, load_consumer
from tidemark.spec.model import Encoding

if TYPE_CHECKING:
    from confluent_kafka import Message

OF_SCHEMA = {"AVRO": Encoding.AVRO, "JSON": Encoding.JSON_SCHEMA, "PROTOBUF": Encoding.PROTOBUF}
"""What a registry calls a schema's type, and our name of the format."""
SAMPLE = 100
"""Default number of latest records to look at."""
BIGINT = range(-(2**63), 2**63)
WRITE_ONE = "Write a transform that reads it: format: {value: bytes}, or {value: string} for text, and transform: module:function."
_MOMENT = Annotated[datetime, msgspec.Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the values. ``type``: the column's; `None`: the schema decides. ``required``: it is never null."""

    name: str
    type: str | None
    required: bool


@dataclass(frozen=True, slots=True)
class Sketch:
    """``files``: their texts. ``left_out``: fields whose names cannot be columns: empty, too long, or with quotes, backslashes or
    control characters."""

    name: str
    files: Mapping[Path, str]
    ddl: str
    left_out: Sequence[str]

    def write(self) -> None:
        """Writes the files. Raises `FileTaken`."""
        for path, text in self.files.items():
            path.parent.mkdir(exist_ok=True)
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise FileTaken(path=str(path)) from None


@dataclass(kw_only=True, eq=False)
class FileTaken(Refused):
    """A file of this name exists."""

    path: str

    def __str__(self) -> str:
        return f"{self.path} exists already and was not changed. Give the consumer another --name, or remove the file."


@dataclass(kw_only=True, eq=False)
class NoSketch(Refused):
    """The topic's values cannot be read without a transform."""

    topic: str
    problem: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.problem}. {WRITE_ONE}"


def sketched(topic: str, name: str, table: str | None, sample: int, consumers: Path) -> Sketch:
    """A consumer of this topic, whose file will be in the folder ``consumers``. Writes nothing.

    Raises `FileTaken`, `NoSketch`, `BadInput`, and what the registry and the cluster raise.
    """
    _checked(checks.consumer_name, name, "--name")
    table = _checked(checks.table_name, table or f"public.{_identifier(name)}", "--table")
    suite = project.expectations() / f"{name}.json"
    file = consumers / f"{name}.yaml"
    if name in consumer_names(consumers) or suite.exists():
        raise FileTaken(path=str(suite if suite.exists() else file))
    cluster = Cluster(kafka_config())
    found = cluster.topics([topic], missing_ok=True)
    if not found:
        raise BadInput(what="TOPIC", found=f"{cluster.servers} has no topic {topic}", fix="Correct the name, or create the topic.")
    messages = latest(kafka_config(), cluster.logs(found[0].all()).values(), sample)
    encoding = _encoding(topic, messages)
    keys: dict[str, Any] = {"topics": [topic], "format": _format(encoding, messages), "sink": {"table": table}}
    spec = _spec(name, keys)
    fields = _of_sample(topic, encoding, messages) if encoding in (Encoding.JSON, Encoding.JSON_SCHEMA) else _of_schema(spec, topic)
    columns = _columns(fields)
    left_out = [field.name for field in fields if field.name not in columns]
    renamed = {column: name for name, column in columns.items() if column != name}
    keys |= {"columns": renamed} if renamed else {}
    keys |= {"drop": left_out} if left_out and fields[0].type is None else {}
    required = [columns[field.name] for field in fields if field.required and field.name in columns]
    keys |= {"validation": {"suite": name}} if required else {}
    files = {file: _text(keys)}
    if required:
        files[suite] = _suite(name, required, "warning" if fields[0].type else "critical")
    return Sketch(name, files, _ddl(_spec(name, keys), fields, columns), left_out)


def sketched_table(spec: ConsumerSpec, partitions: int | None = None) -> Sketch:
    """The DDL for a consumer of JSON without code, by the latest records of its topics. Writes nothing.

    Raises `ColumnsUnknown` if the table exists, because then its types decide; `BadInput` if the topics have no values, `FieldReserved`,
    and `NoSketch`.
    """
    import pyarrow as pa

    if _table_exists(spec.tables[ONLY].table):
        raise ColumnsUnknown
    function = transform_of(spec, ()).function
    assert isinstance(function, Fields)
    cluster = Cluster(kafka_config())
    topics = cluster.topics(cluster.subscribed(spec))
    logs = cluster.logs(each for topic in topics for each in topic.all() if spec.fixed.covers(each))
    messages = latest(kafka_config(), logs.values(), SAMPLE)
    names = ", ".join(topic.name for topic in topics)
    if all(message.value() is None for message in messages):
        fix = "Produce a record first, or create the table yourself, with the lineage columns."
        raise BadInput(what=names, found="it has no records with values to derive columns from", fix=fix)
    kinds = {name: _sampled(names, steps, spec, messages) for name, steps in function.columns if steps[0] in function.json}
    used = {steps for _, steps in function.columns}
    own = [
        field
        for field in _of_sample(names, spec.format.value, messages)
        if ("value", field.name) not in used and field.name not in function.drop and field.name not in dict(function.columns)
    ]
    if taken := next((field.name for field in own if field.name in RESERVED), None):
        raise FieldReserved(field=taken)
    columns = _columns(own)
    kinds |= {field.name: field.type for field in own if field.name in columns and field.type is not None}
    given = function.output(Decoding(spec, registry_config(), lambda: spec.topics).input_schema(), ())
    first = [pa.field(name, pa.string(), metadata={"postgres": kind}) for name, kind in kinds.items()]
    output = pa.schema([*first, *(field for field in given if field.name not in kinds)])
    return Sketch(spec.name, {}, ddl_of(spec, output, partitions), [field.name for field in own if field.name not in columns])


def _table_exists(table: str) -> bool:
    """Not if the environment names no database."""
    try:
        url = database_url()
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        return False
    with session(url) as connection, transaction(connection) as cur:
        return bool(read_columns(cur, table))


def _sampled(topics: str, steps: Steps, spec: ConsumerSpec, messages: Sequence[Message]) -> str:
    """The type of a column with the field at this path of JSON."""
    side, *path = steps
    found = _parsed(topics, getattr(spec.format, side), messages, side)
    for name in path:
        found = [each.get(name) if isinstance(each, dict) else None for each in found]
    return column_type([each for each in found if each is not None]) if path else "jsonb"


class _Subjects(Registry):
    def type_of(self, subject: str) -> str | None:
        """The type of a subject's newest schema. `None` if there is no such subject."""
        found = self._asked(lambda: self._client.get_latest_version(subject))
        return None if found is None else found.schema.schema_type or "AVRO"


def _encoding(topic: str, messages: Sequence[Message]) -> Encoding:
    config = registry_config()
    if config is not None:
        subjects = _Subjects(config)
        with subjects:
            registered = subjects.type_of(f"{topic}-value")
        if registered is not None:
            return OF_SCHEMA[registered]
    values = [value for message in messages if (value := message.value()) is not None]
    if not values:
        raise NoSketch(topic=topic, problem="it has no records with values, and the registry has no schema of it")
    if not all(isinstance(each, dict) for each in _parsed(topic, Encoding.JSON, messages)):
        raise NoSketch(topic=topic, problem="its values are not all JSON objects, and the registry has no schema of it")
    return Encoding.JSON


def _format(encoding: Encoding, messages: Sequence[Message]) -> dict[str, str]:
    """With the key's format, if there are keys."""
    keys = [key for message in messages if (key := message.key()) is not None]
    if not keys:
        return {"value": encoding.value}
    text = all(isinstance(key, str) or _is_printable(key) for key in keys)
    return {"value": encoding.value, "key": Encoding.STRING.value if text else Encoding.BYTES.value}


def _is_printable(data: bytes) -> bool:
    try:
        return data.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _parsed(topic: str, encoding: Encoding, messages: Sequence[Message], side: str = "value") -> list[Any]:
    """The values (or keys) that are not null; for one that is not JSON, an exception."""
    values = [value for message in messages if (value := getattr(message, side)()) is not None]
    framed = dict.fromkeys(("key", "value"), True)
    encodings = dict.fromkeys(("key", "value"), Encoding.BYTES) | {side: encoding}
    return Decoder(encodings, framed=framed).objects(topic, side, values, [[]] * len(values))


def _of_schema(spec: ConsumerSpec, topic: str) -> list[Field]:
    """The fields of the values' newest schema."""
    import pyarrow as pa

    given = Decoding(spec, registry_config(), lambda: [topic]).input_schema().field("value").type
    if not pa.types.is_struct(given):
        raise NoSketch(topic=topic, problem=f"its values are of the type {given}, and have no fields")
    required = _never_null(topic) if spec.format.value is Encoding.AVRO else set()
    return [Field(each.name, None, each.name in required) for each in given]


def _never_null(topic: str) -> set[str]:
    config = registry_config()
    assert config is not None
    with Registry(config) as registry:
        node = registry.newest(f"{topic}-value")
    return {field.name for field in node.branches[0].fields if not _nullable(node) and not _nullable(field.type)}


def _nullable(node: Node) -> bool:
    return node.kind == "null" or any(each.kind == "null" for each in node.inner if node.kind == "union")


def _of_sample(topic: str, encoding: Encoding, messages: Sequence[Message]) -> list[Field]:
    """The fields of the sampled JSON objects, in the order in which they first appear."""
    objects = [each for each in _parsed(topic, encoding, messages) if isinstance(each, dict)]
    names = list(dict.fromkeys(name for each in objects for name in each))
    if not names:
        raise NoSketch(topic=topic, problem="none of its latest values is a JSON object with fields to derive columns from")
    values = {name: [each[name] for each in objects if each.get(name) is not None] for name in names}
    return [Field(name, column_type(some), len(some) == len(objects)) for name, some in values.items()]


def column_type(values: Sequence[Any]) -> str:
    """The type of a column that can hold these values of JSON, none of which is null."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "bigint" if all(value in BIGINT for value in values) else "numeric"
    if kinds and kinds <= {int, float}:
        return "double precision"
    if kinds == {str} and all(map(_is_moment, values)):
        return "timestamp with time zone"
    return "text" if kinds <= {str} else "jsonb"


def _is_moment(text: str) -> bool:
    """Whether this is a time in ISO 8601 with a time zone, as a run reads it."""
    try:
        msgspec.convert(text, _MOMENT)
    except msgspec.ValidationError:
        return False
    return True


def _columns(fields: Sequence[Field]) -> dict[str, str]:
    """The column of each field: of the same name, unless that is reserved. Without fields that no column can have."""
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


def _ddl(spec: ConsumerSpec, fields: Sequence[Field], columns: Mapping[str, str]) -> str:
    import pyarrow as pa

    fields_of_table = transform_of(spec, ()).function
    given = Decoding(spec, registry_config(), lambda: spec.topics).input_schema()
    if isinstance(fields_of_table, Fields) and "value" not in fields_of_table.json:
        return ddl_of(spec, fields_of_table.output(given, None))
    made = [(columns[field.name], field.type) for field in fields if field.name in columns]
    lineage = [given.field(name) for name in GIVEN]
    return ddl_of(spec, pa.schema([*(pa.field(name, pa.string(), metadata={"postgres": kind}) for name, kind in made), *lineage]))


def _text(keys: Mapping[str, Any]) -> str:
    """The consumer's file: one line for each key."""
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
    """What the consumer's file will say, checked as such a file is."""
    with tempfile.TemporaryDirectory(prefix="tidemark-") as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(_text(keys), encoding="utf-8")
        return load_consumer(path)


def _identifier(name: str) -> str:
    """The name as Postgres may name a table."""
    text = re.sub(r"[^a-z0-9_]+", "_", name.lower())[: checks.POSTGRES_NAME_LIMIT - 1]
    return f"_{text}" if text[:1].isdigit() else text


def _checked(check: Callable[[str], str], value: str, option: str) -> str:
    try:
        return check(value)
    except checks.NotThis as error:
        said = error.context or {}
        raise BadInput(what=option, found=f'"{value}" {said["clause"]}', fix=f"{said['fix'][0].upper()}{said['fix'][1:]}.") from None
