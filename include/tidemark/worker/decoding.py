"""The driver's part of decoding: finds the schemas that the workers need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidemark import project
from tidemark.connections import REGISTRY_URL
from tidemark.errors import BadInput, Refused, TidemarkError
from tidemark.formats.decoder import BY_SCHEMA, SIDES, Decoder, SchemasMissing
from tidemark.formats.protobuf import Message, compiled
from tidemark.formats.registry import Registry, RegistryConfig
from tidemark.formats.schema import BadSchema, Node, parse
from tidemark.formats.wire import SchemaId
from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import read
from tidemark.packages import optional
from tidemark.records.outcome import Reject
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import Encoding
from tidemark.spec.problem import KeyPath
from tidemark.transform import NoRow
from tidemark.values.json_text import json_text
from tidemark.worker.batches import input_schema, records
from tidemark.worker.call_transform import decode_rejects

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.retry.admin import Payload

T = TypeVar("T")

MAX_SHOWN_BYTES = 200_000
"""Maximum bytes of a key or value that is decoded for display. As JSON it repeats the field names."""


class Decoding:
    """The consumer's decoder, with the schemas that its records have needed so far.

    ``topics`` returns the topics that the consumer reads. For the whole run, the transform sees the schema that was a topic's newest on
    first use.
    """

    def __init__(self, spec: ConsumerSpec, registry: RegistryConfig | None, topics: Callable[[], Collection[str]]) -> None:
        self._spec = spec
        self._registry = registry
        self._topics = topics
        self._decoder: Decoder | None = None
        self.needed = any(encoding is not Encoding.BYTES for encoding in (spec.format.key, spec.format.value))

    def decoder(self) -> Decoder | None:
        """Returns the decoder with all schemas fetched so far. Raises `BadInput` if the consumer needs a registry and none is set."""
        if self.needed and self._decoder is None:
            format_ = self._spec.format
            if format_.uses_registry and self._registry is None:
                sides = {side: getattr(format_, side) for side in ("value", "key") if getattr(format_, f"{side}_schema") is None}
                side, encoding = next(item for item in sides.items() if item[1] in BY_SCHEMA)
                example = f"{side}: {encoding}, {side}_schema: order.{'avsc' if encoding is Encoding.AVRO else 'proto'}"
                fix = f"Set it, or give {self._spec.name} a schema file: format: {{{example}}}."
                raise BadInput(what=REGISTRY_URL, found=f"it is not set; {self._spec.name} reads {encoding.title()}", fix=fix)
            encodings = {"key": format_.key, "value": format_.value}
            files = {"key": format_.key_schema, "value": format_.value_schema}
            framed = {side: file is None for side, file in files.items()}
            self._decoder = Decoder(encodings, framed=framed, reads_json=self._spec.transform is not None)
        return self._decoder

    def input_schema(self) -> pa.Schema:
        """Returns the columns that the transform gets. Raises `TopicsDiffer` and the errors of `learn`."""
        if self.decoder() is None:
            return input_schema()
        topics = sorted(self._topics())
        self.learn(SchemasMissing(topics=frozenset(topics)))
        decoder = self._required()
        schemas = {topic: decoder.schema(input_schema(), topic) for topic in topics}
        for topic in topics[1:]:
            if schemas[topic] != schemas[topics[0]]:
                raise TopicsDiffer(first=topics[0], second=topic)
        return schemas[topics[0]] if topics else input_schema()

    def learn(self, missing: SchemasMissing) -> None:
        """Fetches missing schemas. Raises `SubjectMissing`, `BadSchema`, `RegistryUnavailable` or `RegistryRefused`."""
        decoder = self._required()
        if missing.ids:
            with self._open_registry() as registry:
                decoder = decoder.with_writers(registry.by_ids(missing.ids))
        sides = [side for side in SIDES if decoder.encodings[side] in BY_SCHEMA]
        readers = {(topic, side) for topic in missing.topics for side in sides} - decoder.readers.keys()
        for topic, side in sorted(readers):
            reader, writers = self._reader(topic, side)
            decoder = replace(decoder, readers={**decoder.readers, (topic, side): reader}).with_writers(writers)
        self._decoder = decoder

    def decode(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, NoRow]]:
        """Decodes records of one topic in the driver. Returns them and the errors, by index."""
        return self.with_schemas(lambda: self._required().batch(batch))

    def for_people(self, topic: str, payload: Payload) -> dict[str, Shown]:
        """Returns key and value of a failed record as JSON, by side, unless they are text. Never raises: the registry may be down."""
        shown: dict[str, Shown] = {}
        for side in SIDES:
            data: bytes | None = getattr(payload, side)
            if data is None or getattr(self._spec.format, side) not in (Encoding.JSON_SCHEMA, *BY_SCHEMA):
                continue
            if len(data) > MAX_SHOWN_BYTES:
                shown[side] = Shown(None, f"it has {len(data):,} bytes; values of more than {MAX_SHOWN_BYTES:,} are not decoded here")
                continue
            try:
                with optional():
                    value = self._decode_value(topic, side, data, payload)
                shown[side] = Shown(None, str(value)) if isinstance(value, NoRow) else Shown(json_text(value), None)
            except TidemarkError as error:
                shown[side] = Shown(None, str(error))
            except Exception as error:  # noqa: BLE001 - the page shows the record in any case
                shown[side] = Shown(None, f"it cannot be shown: {type(error).__name__}")
        return shown

    def _decode_value(self, topic: str, side: str, data: bytes, payload: Payload) -> Any:
        headers = [payload.headers]
        return self.with_schemas(lambda: replace(self._required(), reads_json=True).objects(topic, side, [data], headers)[0])

    def with_schemas(self, act: Callable[[], T]) -> T:
        """The result of ``act``. Fetches missing schemas and calls it again until it has all of them."""
        while True:
            try:
                return act()
            except SchemasMissing as error:
                self.learn(error)

    def _required(self) -> Decoder:
        decoder = self.decoder()
        assert decoder is not None
        return decoder

    def forget_unknown(self) -> None:
        """Call it before a batch: schemas that were missing in the registry may be registered by now."""
        if self._decoder is not None:
            self._decoder = self._decoder.without_unknown()

    def _reader(self, topic: str, side: str) -> tuple[Node | Message, dict[SchemaId, Node]]:
        """Returns the schema that the transform sees. Most records have the newest schema, so workers get it as a writer's, too."""
        encoding, file, name = (getattr(self._spec.format, key) for key in (side, f"{side}_schema", f"{side}_message"))
        if file is not None:
            return self._read_file(side, file, name), {}
        with self._open_registry() as registry:
            subject = f"{topic}-{side}"
            if encoding is Encoding.PROTOBUF:
                return registry.newest_message(subject, name), {}
            schema_id, newest = registry.newest(subject)
            return newest, {schema_id: newest}

    def _read_file(self, side: str, name: str, message: str | None) -> Node | Message:
        path = project.schemas() / name
        key = ("format", f"{side}_schema")
        text = self._read_text(key, path)
        try:
            if path.suffix != ".proto":
                return parse(text)
            others = [file for file in project.files_below(project.schemas(), "*.proto") if file != path]
            imports = {str(file.relative_to(project.schemas())): self._read_text(key, file) for file in others}
            return compiled(text, imports, message)
        except BadSchema as error:
            problem = self._spec.problem(key, f"{name}: {error}", "correct the schema")
        raise self._spec.invalid(problem)

    def _read_text(self, key: KeyPath, file: Path) -> str:
        """The text of a schema file. Raises `SpecInvalid`, which names it."""
        name = file.relative_to(project.schemas())
        try:
            return file.read_text(encoding="utf-8")
        except FileNotFoundError:
            problem, fix = f"schema file {name} not found in {project.schemas()}", "create it, or correct the name"
        except OSError as error:
            problem, fix = f"schema file {name} cannot be read: {error.strerror}", "make it readable"
        except UnicodeDecodeError:
            problem, fix = f"schema file {name} is not UTF-8 text", "save it as UTF-8"
        raise self._spec.invalid(self._spec.problem(key, problem, fix))

    def _open_registry(self) -> Registry:
        assert self._registry is not None
        return Registry(self._registry)


def decode_for_people(spec: ConsumerSpec, registry: RegistryConfig | None, topic: str, payload: Payload) -> dict[str, Shown]:
    """See `Decoding.for_people`."""
    return Decoding(spec, registry, lambda: spec.topics).for_people(topic, payload)


@dataclass(frozen=True, slots=True)
class Shown:
    """A decoded key or value as JSON, or the reason why it cannot be decoded."""

    json: str | None
    problem: str | None


class TopicsDiffer(Refused):
    """A transform gets the same columns for all topics, but their newest schemas differ."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"The newest schemas of {self.first} and {self.second} differ. Read them in two consumers; both may load the same table."


def undecodable(decoder: Decoder, kafka: KafkaConfig, part: Slice) -> list[Reject]:
    """Returns the records of a slice that cannot be decoded. Raises `SchemasMissing`."""
    rejects: list[Reject] = []
    for chunk in read(kafka, part.partition, part.start, part.end, part.leader_epoch):
        batch, unreadable = records(part, chunk)
        try:
            _, errors = decoder.batch(batch)
        except SchemasMissing as error:
            raise replace(error, part=part) from None
        rejects += unreadable
        rejects += decode_rejects(batch, errors)
    return rejects


def decode_in_driver(decoding: Decoding, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[TopicPartition, list[Reject]]]:
    """Decodes records of any partitions in the driver. Returns them, and the rejects for records that cannot be decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not decoding.needed:
        return batch, {}
    batches: list[pa.RecordBatch] = []
    rejects: dict[TopicPartition, list[Reject]] = {}
    for topic in pc.unique(batch["topic"]).to_pylist():
        of_topic = batch.filter(pc.equal(batch["topic"], topic))
        decoded, errors = decoding.decode(of_topic)
        batches.append(decoded)
        for index, reject in zip(errors, decode_rejects(of_topic, errors), strict=True):
            rejects.setdefault(TopicPartition(topic, of_topic["partition"][index].as_py()), []).append(reject)
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or [batches[0]]
    return whole, rejects


def run_with_schemas(decoding: Decoding, slices: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Runs slices. Fetches schemas that the workers lacked, and runs the slices that need them again."""
    answers = run(slices)
    while missing := [answer for answer in answers if isinstance(answer, SchemasMissing)]:
        for answer in missing:
            decoding.learn(answer)
        incomplete = [answer.part for answer in missing]
        answers = [answer for answer in answers if answer not in missing] + run(incomplete)
    return answers
