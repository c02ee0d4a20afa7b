"""Decodes the keys and values of a batch of records. One decoder serves all forms of a transform."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tidemark.errors import Refused
from tidemark.formats import avro
from tidemark.formats.connect import InvalidConnectValue
from tidemark.formats.memory import CHUNK_BYTES, RECORD_BYTES, Cost, cost_of_arrow, cost_of_avro
from tidemark.formats.protobuf import Message
from tidemark.formats.schema import Node
from tidemark.formats.shape import Unresolvable, plain, resolved, type_of
from tidemark.formats.wire import HEADERS, PREFIX_BYTES, SchemaId, id_in, ids_before, indexes_before
from tidemark.records.ranges import Slice
from tidemark.spec.model import Encoding
from tidemark.transform import Fail, NoRow, Retry

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

SIDES = ("key", "value")
BY_SCHEMA = (Encoding.AVRO, Encoding.PROTOBUF)
"""Formats whose data cannot be read without a schema."""
MAX_DATUM_BYTES = 2**31 - 1
"""Maximum size of a datum. Arrow computes with a slice's end; without one, the number overflows."""
_SYNTAX = msgspec.json.Decoder(msgspec.Raw)
"""Checks that a text is JSON, without creating objects."""

Decoded = tuple["pa.Array", dict[int, NoRow]]
"""Decoded values, and the errors of the undecodable ones, which are null, by their places in the batch."""


class Undecodable(Fail):
    """The key or value does not have the format in the consumer's file."""


class SchemaUnknown(Retry):
    """The registry does not have the schema. It may be registered later."""


class SchemasMissing(Refused):
    """Records use schemas that the driver has not sent. It fetches them, and the slice is read again."""

    ids: frozenset[SchemaId] = frozenset()
    topics: frozenset[str] = frozenset()
    """Topics whose newest schema is missing."""
    part: Slice | None = None

    def __str__(self) -> str:
        return f"The records use schemas that this task does not have: {', '.join(map(str, (*self.ids, *self.topics)))}."


@dataclass(frozen=True, slots=True)
class Decoder:
    """``readers``: the schemas that the transform sees, by topic and side (``key``, ``value``). ``writers``: Avro schemas by id; None if
    the registry does not have it, the reason as text if it is unusable. ``framed``: whether a side's data carries schema ids; if not, it
    was written with the reader's schema."""

    encodings: Mapping[str, Encoding]
    readers: Mapping[tuple[str, str], Node | Message] = field(default_factory=dict)
    writers: Mapping[SchemaId, Node | str | None] = field(default_factory=dict)
    framed: Mapping[str, bool] = field(default_factory=dict)
    reads_json: bool = True
    """Whether JSON is checked, and parsed by `objects`. A consumer without code reads the text itself."""

    def with_writers(self, schemas: Mapping[SchemaId, Node | str | None]) -> Decoder:
        return replace(self, writers={**self.writers, **schemas})

    def without_unknown(self) -> Decoder:
        return replace(self, writers={schema_id: schema for schema_id, schema in self.writers.items() if schema is not None})

    def schema(self, undecoded: pa.Schema, topic: str) -> pa.Schema:
        """The schema of a transform's input for records of this topic, by that of ``undecoded`` records."""
        import pyarrow as pa

        fields = list(undecoded)
        for side in self._sides():
            at = undecoded.get_field_index(side)
            fields[at] = pa.field(side, self._type(topic, side))
            fields.append(pa.field(f"{side}_bytes", pa.binary()))
        return pa.schema(fields)

    def batch(self, records: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, NoRow]]:
        """The records of one topic as a batch of `schema`, without the undecodable ones; the errors of these, by index in ``records``.

        Raises `SchemasMissing`.
        """
        import pyarrow as pa

        topic = records["topic"][0].as_py()
        schema = self.schema(records.schema, topic)
        columns = {name: records[name] for name in records.schema.names}
        errors: dict[int, NoRow] = {}
        for side in self._sides():
            columns[f"{side}_bytes"] = records[side]
            columns[side], side_errors = self._decoded(records[side], records["headers"], topic, side)
            errors |= side_errors
        decoded = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        return (decoded.filter(_all_but(len(records), errors)) if errors else decoded), errors

    def objects(self, topic: str, side: str, data: Sequence[bytes | None], headers: Sequence[Any]) -> list[Any]:
        """The keys or values as Python objects. In place of an undecodable one, the exception to raise."""
        import pyarrow as pa

        values, errors = self._decoded(pa.array(data, pa.binary()), headers, topic, side)
        objects = [errors.get(at, value) for at, value in enumerate(_objects(values))]
        if self.encodings[side] in (Encoding.JSON, Encoding.JSON_SCHEMA):
            return [_parsed(item, msgspec.json.decode, side) if isinstance(item, str) else item for item in objects]
        return objects

    def _sides(self) -> list[str]:
        return [side for side in SIDES if self.encodings[side] is not Encoding.BYTES]

    def _type(self, topic: str, side: str) -> pa.DataType:
        import pyarrow as pa

        if self.encodings[side] not in BY_SCHEMA:
            return pa.string()
        reader = self._reader(topic, side)
        return type_of(reader) if isinstance(reader, Node) else reader.type()

    def _reader(self, topic: str, side: str) -> Node | Message:
        if (topic, side) not in self.readers:
            raise SchemasMissing(topics=frozenset({topic}))
        return self.readers[topic, side]

    def _decoded(self, data: pa.Array, headers: Any, topic: str, side: str) -> Decoded:
        import pyarrow as pa

        encoding = self.encodings[side]
        if encoding in BY_SCHEMA:
            reader = self._reader(topic, side)
            if isinstance(reader, Message):
                return self._protobuf(data, headers, reader, side)
            return self._avro(data, headers, reader, side)
        errors: dict[int, NoRow] = {}
        if encoding is Encoding.JSON_SCHEMA:
            data, errors = _without_ids(data, headers, side)
        texts = _Datums(pa.string(), lambda datums: datums.cast(pa.string()), f"its {side} is not UTF-8 text")
        text, text_errors = texts.decode(data, range(len(data)))
        if encoding is not Encoding.STRING and self.reads_json:
            text_errors |= _json_errors(text, side)
        return text, text_errors | errors

    def _protobuf(self, data: pa.Array, headers: Any, reader: Message, side: str) -> Decoded:
        import numpy as np
        import pyarrow as pa

        errors: dict[int, NoRow] = {}
        bodies = _message_bodies(data, headers, reader, side, errors) if self.framed[side] else data
        valid = bodies.is_valid().to_numpy(zero_copy_only=False)
        target = reader.type()
        messages = _Datums(target, reader.decode, f"its {side} does not have the form of its Protobuf schema", cost=cost_of_arrow(target))
        decoded, decode_errors = messages.decode(bodies.drop_null(), np.flatnonzero(valid))
        return decoded.take(pa.array(np.cumsum(valid) - 1, mask=~valid)), errors | decode_errors

    def _avro(self, data: pa.Array, headers: Any, reader: Node, side: str) -> Decoded:
        import numpy as np
        import pyarrow as pa

        target = type_of(reader)
        errors: dict[int, NoRow] = {}
        parts = [pa.nulls(1, target)]
        places = np.zeros(len(data), np.int64)  # each record's index in the joined parts; the first part is one null
        filled = 1
        for where, writer, datums in self._by_schema(data, headers, reader, side, errors):
            part, decode_errors = _Datums(
                target,
                partial(_read_avro, writer=writer, reader=reader, target=target),
                f"its {side} does not have the form of its Avro schema",
                partial(avro.unreadable, schema=writer),
                cost_of_avro(writer),
            ).decode(datums, where)
            errors |= decode_errors
            if len(part) == len(data):
                return part, errors
            parts.append(part)
            places[where] = np.arange(filled, filled + len(part))
            filled += len(part)
        return pa.concat_arrays(parts).take(pa.array(places)), errors

    def _by_schema(
        self, data: pa.Array, headers: Any, reader: Node, side: str, errors: dict[int, NoRow]
    ) -> Iterator[tuple[np.ndarray, Node, pa.Array]]:
        """Yields each schema with the indexes of its data, and the data without schema ids. Adds data without an id to ``errors``."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.framed[side]:
            if data.null_count < len(data):
                yield np.flatnonzero(data.is_valid().to_numpy(zero_copy_only=False)), reader, data.drop_null()
            return
        groups = _schema_ids(data, headers, side, errors)
        if missing := frozenset(schema_id for schema_id, _, _ in groups) - self.writers.keys():
            raise SchemasMissing(ids=missing)
        for schema_id, bare, places in groups:
            writer = self.writers[schema_id]
            if isinstance(writer, Node):
                datums = data if len(places) == len(data) else data.take(pa.array(places))
                yield places, writer, datums if bare else pc.binary_slice(datums, PREFIX_BYTES, MAX_DATUM_BYTES)
                continue
            unknown = SchemaUnknown(f"the registry does not know schema {schema_id} of its {side}")
            unusable = Undecodable(f"schema {schema_id} of its {side} cannot be used: {writer}")
            errors |= dict.fromkeys(places.tolist(), unknown if writer is None else unusable)


def _message_bodies(data: pa.Array, headers: Any, reader: Message, side: str, errors: dict[int, NoRow]) -> pa.Array:
    """The messages without ids and indexes. Null for a null, and for data that it adds to ``errors``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    in_headers = {place for _, bare, places in _schema_ids(data, headers, side, errors) if bare for place in places.tolist()}
    first = pc.equal(pc.binary_slice(data, PREFIX_BYTES, PREFIX_BYTES + 1), pa.scalar(b"\0"))
    if not errors and not in_headers and reader.indexes == (0,) and pc.all(first).as_py():
        return pc.binary_slice(data, PREFIX_BYTES + 1, MAX_DATUM_BYTES)
    header_lists = list(_header_pairs(headers)) if in_headers else []
    bodies: list[bytes | None] = []
    for place, datum in enumerate(data.to_pylist()):
        bodies.append(None)
        if datum is None or place in errors:
            continue
        try:
            if place in in_headers:
                (_, rest), body = id_in(header_lists[place], HEADERS[side]) or (0, b""), datum
                indexes, _ = indexes_before(rest)
            else:
                indexes, body = indexes_before(datum[PREFIX_BYTES:])
        except ValueError:
            errors[place] = Undecodable(f"its {side} has no message indexes after its schema id")
            continue
        if indexes == reader.indexes:
            bodies[place] = body
        else:
            errors[place] = Undecodable(
                f"its {side} is message {_dotted(indexes)} of its schema, and {reader.name} is {_dotted(reader.indexes)}"
            )
    return pa.array(bodies, pa.binary())


def _read_avro(datums: pa.Array, writer: Node, reader: Node, target: pa.DataType) -> pa.Array:
    return resolved(plain(avro.decode(datums, writer), writer), target, reader)


def _objects(values: pa.Array) -> list[Any]:
    """The values as Python objects. In place of a time that Python cannot represent, the exception to raise."""
    try:
        return values.to_pylist(maps_as_pydicts="lossy")  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        return [_object(value) for value in values]


def _object(value: pa.Scalar) -> Any:
    try:
        return value.as_py(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        return Undecodable("it has a time that Python cannot represent: a year before 1 or after 9999")


def _dotted(indexes: Sequence[int]) -> str:
    return ".".join(map(str, indexes))


def _schema_ids(data: pa.Array, headers: Any, side: str, errors: dict[int, NoRow]) -> list[tuple[SchemaId, bool, np.ndarray]]:
    """Each schema id, whether it is in the headers, and the indexes of its data. Adds data without an id to ``errors``."""
    import numpy as np

    ids, id_indexes = ids_before(data)
    valid = data.is_valid().to_numpy(zero_copy_only=False)
    groups: dict[SchemaId, list[int]] = {}
    for place, pairs in enumerate(_header_pairs(headers) if _has_headers(headers) else ()):
        try:
            if valid[place] and (schema_id := id_in(pairs, HEADERS[side])) is not None:
                groups.setdefault(schema_id[0], []).append(place)
                id_indexes[place] = -2
        except ValueError as error:
            errors[place], id_indexes[place] = Undecodable(str(error)), -2
    missing = Undecodable(f"its {side} has no schema id: it does not begin with a zero byte and four more")
    errors |= dict.fromkeys(np.flatnonzero((id_indexes == -1) & valid).tolist(), missing)
    in_prefix = ((schema_id, False, np.flatnonzero(id_indexes == at)) for at, schema_id in enumerate(ids))
    return [
        *((schema_id, bare, places) for schema_id, bare, places in in_prefix if len(places)),
        *((schema_id, True, np.array(places)) for schema_id, places in groups.items()),
    ]


def _has_headers(headers: Any) -> bool:
    return any(headers) if isinstance(headers, list) else headers.null_count < len(headers)


def _header_pairs(headers: Any) -> Iterator[list[tuple[str, bytes | None]]]:
    """The headers of each record as pairs, from lists of pairs or from an Arrow array of structs."""
    for record_headers in headers if isinstance(headers, list) else headers.to_pylist():
        yield [(header["key"], header["value"]) if isinstance(header, dict) else header for header in record_headers or ()]


@dataclass(frozen=True, slots=True)
class _Datums:
    """Decodes data of one schema with ``read``. ``message`` is the error of a datum that it refuses.

    ``find_bad`` detects bad data. Bisection finds what it misses, which is slow if there is much of it. ``cost`` is the memory that each
    datum takes; it limits how many are read at once.
    """

    target: pa.DataType
    read: Callable[[pa.Array], pa.Array]
    message: str
    find_bad: Callable[[pa.Array], list[bool]] | None = None
    cost: Cost | None = None

    def decode(self, data: pa.Array, places: Sequence[int] | np.ndarray) -> Decoded:
        import numpy as np
        import pyarrow as pa

        if self.cost is None:
            return self._bisect(data, places, self.find_bad)
        costs = self.cost(data)
        if (large := costs > RECORD_BYTES).any():
            reason = Undecodable("decoding it may take more than a gigabyte, because its schema has lists of items with many fields")
            return self._without(large, reason, data, places, self.decode)
        ends = np.flatnonzero(np.diff(np.cumsum(costs) // CHUNK_BYTES)) + 1
        parts: list[pa.Array] = []
        errors: dict[int, NoRow] = {}
        for start, end in itertools.pairwise([0, *ends.tolist(), len(data)]):
            part, chunk_errors = self._bisect(data.slice(start, end - start), places[start:end], self.find_bad)
            parts.append(part)
            errors |= chunk_errors
        return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), errors

    def _bisect(
        self, data: pa.Array, places: Sequence[int] | np.ndarray, find_bad: Callable[[pa.Array], list[bool]] | None = None
    ) -> Decoded:
        import numpy as np
        import pyarrow as pa

        try:
            return self.read(data), {}
        except Unresolvable as error:  # holds for all data of this schema
            reason = Undecodable(f"it cannot be read with the newest schema: {error}")
            return pa.nulls(len(data), self.target), dict.fromkeys(map(int, places), reason)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any error is a datum's fault
            if len(data) == 1:
                reason = Undecodable(f"it cannot be decoded: {error}" if isinstance(error, InvalidConnectValue) else self.message)
                return pa.nulls(1, self.target), {int(places[0]): reason}
        if find_bad is not None and any(bad := find_bad(data)):
            return self._without(np.array(bad), Undecodable(self.message), data, places, self._bisect)
        half = len(data) // 2
        first, errors = self._bisect(data.slice(0, half), places[:half])
        second, second_errors = self._bisect(data.slice(half), places[half:])
        return pa.concat_arrays([first, second]), errors | second_errors

    def _without(
        self,
        bad: np.ndarray,
        reason: NoRow,
        data: pa.Array,
        places: Sequence[int] | np.ndarray,
        decode: Callable[[pa.Array, np.ndarray], Decoded],
    ) -> Decoded:
        """Decodes the good data. Bad data becomes null, with ``reason`` as its error."""
        import numpy as np
        import pyarrow as pa

        errors: dict[int, NoRow] = {int(place): reason for place in np.asarray(places)[bad]}
        if bad.all():
            return pa.nulls(len(data), self.target), errors
        values, decode_errors = decode(data.filter(pa.array(~bad)), np.asarray(places)[~bad])
        return values.take(pa.array(np.cumsum(~bad) - 1, mask=bad)), errors | decode_errors


def _without_ids(data: pa.Array, headers: Any, side: str) -> Decoded:
    """The data without schema ids, for formats that are readable without a schema. Data without an id becomes null."""
    import pyarrow.compute as pc

    errors: dict[int, NoRow] = {}
    in_headers = [place for _, is_bare, places in _schema_ids(data, headers, side, errors) if is_bare for place in places.tolist()]
    rest = pc.if_else(_all_but(len(data), errors), pc.binary_slice(data, PREFIX_BYTES, MAX_DATUM_BYTES), None)
    return (pc.if_else(_all_but(len(data), in_headers), rest, data) if in_headers else rest), errors


def _json_errors(text: pa.Array, side: str) -> dict[int, NoRow]:
    checked = ((place, _parsed(value, _SYNTAX.decode, side)) for place, value in enumerate(text.to_pylist()) if value is not None)
    return {place: result for place, result in checked if isinstance(result, Undecodable)}


def _parsed(text: str, parse: Callable[[str], Any], side: str) -> Any:
    try:
        return parse(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return Undecodable(f"its {side} is not JSON: {error}")


def _all_but(count: int, excluded: Collection[int]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    keep = np.ones(count, dtype=bool)
    keep[list(excluded)] = False
    return pa.array(keep)
