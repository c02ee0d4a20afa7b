"""The driver's part of decoding: finds the schemas that the workers need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tidemark.records.outcome import Reject
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import Encoding
from tidemark.transform import NoRow
from tidemark.values.json_text import json_text
from tidemark.worker.batches import input_schema, records
from tidemark.worker.call_transform import rejected

if TYPE_CHECKING:
    import pyarrow as pa

    from tidemark.retry.admin import Payload

MOST_SHOWN = 200_000
"""Bytes of a key or a value that is decoded for people. As JSON it repeats the names of fields."""


class Decoding:
    """The consumer's decoder, with the schemas that its records have needed so far.

    ``topics`` returns the topics that the consumer reads. The transform sees the schema of a topic that is the newest when it is first
    needed, until the run ends.
    """

    def __init__(self, spec: ConsumerSpec, registry: RegistryConfig | None, topics: Callable[[], Collection[str]]) -> None:
        self._spec = spec
        self._registry = registry
        self._topics = topics
        self._decoder: Decoder | None = None
        self.needed = any(encoding is not Encoding.BYTES for encoding in (spec.format.key, spec.format.value))

    def decoder(self) -> Decoder | None:
        """With all schemas that are known so far. Raises `BadInput` if the consumer needs a registry and none is named."""
        if self.needed and self._decoder is None:
            said = self._spec.format
            if said.uses_registry and self._registry is None:
                fix = f"Set it, or give {self._spec.name} a schema file: format: {{value: avro, value_schema: order.avsc}}."
                raise BadInput(what=REGISTRY_URL, found=f"it is not set; {self._spec.name} reads Avro", fix=fix)
            encodings, files = {"key": said.key, "value": said.value}, {"key": said.key_schema, "value": said.value_schema}
            framed = {side: file is None for side, file in files.items()}
            self._decoder = Decoder(encodings, framed=framed, reads_json=self._spec.transform is not None)
        return self._decoder

    def input_schema(self) -> pa.Schema:
        """The columns that the transform gets. Raises `TopicsDiffer`, and what `learn` raises."""
        if self.decoder() is None:
            return input_schema()
        topics = sorted(self._topics())
        self.learn(SchemasMissing(topics=frozenset(topics)))
        decoder = self.decoder()
        assert decoder is not None
        schemas = {topic: decoder.schema(input_schema(), topic) for topic in topics}
        for topic in topics[1:]:
            if schemas[topic] != schemas[topics[0]]:
                raise TopicsDiffer(first=topics[0], second=topic)
        return schemas[topics[0]] if topics else input_schema()

    def learn(self, missing: SchemasMissing) -> None:
        """Fetches schemas that records need. Raises `SubjectMissing`, `BadSchema`, `RegistryUnavailable` or `RegistryRefused`."""
        decoder = self.decoder()
        assert decoder is not None
        if missing.ids:
            with self._asked() as registry:
                decoder = decoder.with_writers(registry.by_ids(missing.ids))
        sides = [side for side in SIDES if decoder.encodings[side] in BY_SCHEMA]
        wanted = {(topic, side) for topic in missing.topics for side in sides} - decoder.readers.keys()
        for topic, side in sorted(wanted):
            reader, writers = self._reader(topic, side)
            decoder = decoder.with_readers({(topic, side): reader}).with_writers(writers)
        self._decoder = decoder

    def decoded(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, NoRow]]:
        """Records of one topic, decoded in the driver."""
        while True:
            decoder = self.decoder()
            assert decoder is not None
            try:
                return decoder.batch(batch)
            except SchemasMissing as error:
                self.learn(error)

    def for_people(self, topic: str, payload: Payload) -> dict[str, Shown]:
        """The key and the value of a failed record as JSON, by side, if their bytes are no text. Never raises: the registry may be away."""
        said: dict[str, Shown] = {}
        for side in SIDES:
            data: bytes | None = getattr(payload, side)
            if data is None or getattr(self._spec.format, side) not in (Encoding.JSON_SCHEMA, *BY_SCHEMA):
                continue
            if len(data) > MOST_SHOWN:
                said[side] = Shown(None, f"it has {len(data):,} bytes; those with more than {MOST_SHOWN:,} are not decoded here")
                continue
            try:
                found = self._object(topic, side, data, payload)
                said[side] = Shown(None, str(found)) if isinstance(found, NoRow) else Shown(json_text(found), None)
            except TidemarkError as error:
                said[side] = Shown(None, str(error))
            except Exception as error:  # noqa: BLE001 - whatever it holds, the page shows the record
                said[side] = Shown(None, f"it cannot be shown: {type(error).__name__}")
        return said

    def _object(self, topic: str, side: str, data: bytes, payload: Payload) -> Any:
        while True:
            decoder = self.decoder()
            assert decoder is not None
            try:
                return replace(decoder, reads_json=True).objects(topic, side, [data], [payload.headers])[0]
            except SchemasMissing as error:
                self.learn(error)

    def forget_unknown(self) -> None:
        """Before a batch: schemas that the registry did not know may be registered by now."""
        if self._decoder is not None:
            self._decoder = self._decoder.without_unknown()

    def _reader(self, topic: str, side: str) -> tuple[Node | Message, dict[SchemaId, Node]]:
        """The schema that the transform sees. Most records were written with the newest one, so workers get it as a writer's, too."""
        said = self._spec.format
        encoding, file, name = (getattr(said, key) for key in (side, f"{side}_schema", f"{side}_message"))
        if file is not None:
            return self._from_file(side, file, name), {}
        with self._asked() as registry:
            subject = f"{topic}-{side}"
            if encoding is Encoding.PROTOBUF:
                return registry.newest_message(subject, name), {}
            schema_id, newest = registry.newest(subject)
            return newest, {schema_id: newest}

    def _from_file(self, side: str, name: str, message: str | None) -> Node | Message:
        path = project.schemas() / name
        key = ("format", f"{side}_schema")
        try:
            return compiled(path.read_text(), _imports(path), message) if path.suffix == ".proto" else parse(path.read_text())
        except OSError:
            problem = self._spec.problem(key, f"schema file {name} not found in {path.parent}", "create it, or correct the name")
        except BadSchema as error:
            problem = self._spec.problem(key, f"{name}: {error}", "correct the schema")
        raise self._spec.invalid(problem)

    def _asked(self) -> Registry:
        assert self._registry is not None
        return Registry(self._registry)


def _imports(path: Path) -> dict[str, str]:
    """The other Protobuf files of the folder, by the names that an import gives them."""
    return {str(file.relative_to(project.schemas())): file.read_text() for file in project.schemas().rglob("*.proto") if file != path}


@dataclass(frozen=True, slots=True)
class Shown:
    """A decoded key or value as JSON, or the reason why it cannot be decoded."""

    json: str | None
    problem: str | None


@dataclass(kw_only=True, eq=False)
class TopicsDiffer(Refused):
    """A transform gets the same columns for all topics, but their newest schemas differ."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"The newest schemas of {self.first} and {self.second} differ. Read them in two consumers; both may load the same table."


def undecodable(decoder: Decoder, kafka: KafkaConfig, part: Slice) -> list[Reject]:
    """The records of a slice that cannot be decoded. Raises `SchemasMissing`."""
    found: list[Reject] = []
    for chunk in read(kafka, part.partition, part.start, part.end, part.leader_epoch):
        batch, unreadable = records(part, chunk)
        try:
            _, wrong = decoder.batch(batch)
        except SchemasMissing as error:
            raise replace(error, part=part) from None
        found += unreadable
        found += rejected(batch, wrong)
    return found


def decoded_here(decoding: Decoding, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[TopicPartition, list[Reject]]]:
    """Decodes records of any partitions in the driver. Returns them, and those that cannot be decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not decoding.needed:
        return batch, {}
    made: list[pa.RecordBatch] = []
    failed: dict[TopicPartition, list[Reject]] = {}
    for topic in pc.unique(batch["topic"]).to_pylist():
        own = batch.filter(pc.equal(batch["topic"], topic))
        decoded, wrong = decoding.decoded(own)
        made.append(decoded)
        for at, reject in zip(wrong, rejected(own, wrong), strict=True):
            failed.setdefault(TopicPartition(topic, own["partition"][at].as_py()), []).append(reject)
    (whole,) = pa.Table.from_batches(made).combine_chunks().to_batches() or [made[0]]
    return whole, failed


def learning(decoding: Decoding, slices: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Runs slices; those whose records name schemas that were not sent run again with them."""
    answers = run(slices)
    while missing := [answer for answer in answers if isinstance(answer, SchemasMissing)]:
        for answer in missing:
            decoding.learn(answer)
        again = [answer.part for answer in missing]
        answers = [answer for answer in answers if answer not in missing] + run(again)
    return answers
