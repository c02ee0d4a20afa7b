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
from tidemark.formats.connect import NoValue
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
MOST_BYTES = 2**31 - 1
"""Of a datum. Arrow computes with the end of a slice, and without one its number overflows."""
_SYNTAX = msgspec.json.Decoder(msgspec.Raw)
"""Checks that a text is JSON, and creates nothing."""


class Undecodable(Fail):
    """The key or value is not what the consumer's file says it is."""


class SchemaUnknown(Retry):
    """The registry does not know the schema. It may be registered later."""


@dataclass(kw_only=True, eq=False)
class SchemasMissing(Refused):
    """Records name schemas that the driver has not sent. It fetches them, and the slice is read again."""

    ids: frozenset[SchemaId] = frozenset()
    topics: frozenset[str] = frozenset()
    """Topics whose newest schema is not known."""
    part: Slice | None = None

    def __str__(self) -> str:
        return f"The records use schemas that this task does not have: {', '.join(map(str, (*self.ids, *self.topics)))}."


@dataclass(frozen=True, slots=True)
class Decoder:
    """``readers``: the schemas that the transform sees, by topic and side (``key``, ``value``). ``writers``: Avro schemas by their id; None
    if the registry does not know it, a text if it cannot be used. ``framed``: whether a side's data names its schemas; if not, the
    reader's schema wrote it."""

    encodings: Mapping[str, Encoding]
    readers: Mapping[tuple[str, str], Node | Message] = field(default_factory=dict)
    writers: Mapping[SchemaId, Node | str | None] = field(default_factory=dict)
    framed: Mapping[str, bool] = field(default_factory=dict)
    reads_json: bool = True
    """Whether JSON is checked, and parsed by `objects`. A consumer without code reads the text itself."""

    def with_writers(self, found: Mapping[SchemaId, Node | str | None]) -> Decoder:
        return replace(self, writers={**self.writers, **found})

    def with_readers(self, found: Mapping[tuple[str, str], Node | Message]) -> Decoder:
        return replace(self, readers={**self.readers, **found})

    def without_unknown(self) -> Decoder:
        return replace(self, writers={key: found for key, found in self.writers.items() if found is not None})

    def schema(self, given: pa.Schema, topic: str) -> pa.Schema:
        """The input of a transform for records of this topic, where ``given`` is the input without decoding."""
        import pyarrow as pa

        fields = list(given)
        for side in self._sides():
            at = given.get_field_index(side)
            fields[at] = pa.field(side, self._type(topic, side))
            fields.append(pa.field(f"{side}_bytes", pa.binary()))
        return pa.schema(fields)

    def batch(self, given: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, NoRow]]:
        """The records of one topic as a batch of `schema`, without those that cannot be decoded: their places in ``given``, and why.

        Raises `SchemasMissing`.
        """
        import pyarrow as pa

        topic = given["topic"][0].as_py()
        schema = self.schema(given.schema, topic)
        columns = {name: given[name] for name in given.schema.names}
        wrong: dict[int, NoRow] = {}
        for side in self._sides():
            columns[f"{side}_bytes"] = given[side]
            columns[side], bad = self._decoded(given[side], given["headers"], topic, side)
            wrong |= bad
        made = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        return (made.filter(_without(len(given), wrong)) if wrong else made), wrong

    def objects(self, topic: str, side: str, data: Sequence[bytes | None], headers: Sequence[Any]) -> list[Any]:
        """The keys or values as Python objects; in the place of one that cannot be decoded, the exception to raise."""
        import pyarrow as pa

        values, wrong = self._decoded(pa.array(data, pa.binary()), headers, topic, side)
        objects = [wrong.get(at, value) for at, value in enumerate(_objects(values))]
        if self.encodings[side] in (Encoding.JSON, Encoding.JSON_SCHEMA):
            return [_parsed(each, msgspec.json.decode, side) if isinstance(each, str) else each for each in objects]
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

    def _decoded(self, data: pa.Array, headers: Any, topic: str, side: str) -> tuple[pa.Array, dict[int, NoRow]]:
        import pyarrow as pa

        encoding = self.encodings[side]
        if encoding in BY_SCHEMA:
            reader = self._reader(topic, side)
            if isinstance(reader, Message):
                return self._protobuf(data, headers, reader, side)
            return self._avro(data, headers, reader, side)
        wrong: dict[int, NoRow] = {}
        if encoding is Encoding.JSON_SCHEMA:
            data, wrong = _without_ids(data, headers, side)
        text, bad = _each(data, range(len(data)), pa.string(), lambda some: some.cast(pa.string()), f"its {side} is not UTF-8 text")
        if encoding is not Encoding.STRING and self.reads_json:
            bad |= _not_json(text, side)
        return text, bad | wrong

    def _protobuf(self, data: pa.Array, headers: Any, reader: Message, side: str) -> tuple[pa.Array, dict[int, NoRow]]:
        import numpy as np
        import pyarrow as pa

        wrong: dict[int, NoRow] = {}
        bodies = _bodies(data, headers, reader, side, wrong) if self.framed[side] else data
        valid = bodies.is_valid().to_numpy(zero_copy_only=False)
        said = f"its {side} does not have the form of its Protobuf schema"
        target = reader.type()
        found, bad = _each(bodies.drop_null(), np.flatnonzero(valid), target, reader.decode, said, cost=cost_of_arrow(target))
        return found.take(pa.array(np.cumsum(valid) - 1, mask=~valid)), wrong | bad

    def _avro(self, data: pa.Array, headers: Any, reader: Node, side: str) -> tuple[pa.Array, dict[int, NoRow]]:
        import numpy as np
        import pyarrow as pa

        target = type_of(reader)
        wrong: dict[int, NoRow] = {}
        parts = [pa.nulls(1, target)]
        places = np.zeros(len(data), np.int64)  # of each record in the parts, the first of which is null
        filled = 1
        for where, writer, datums in self._by_schema(data, headers, reader, side, wrong):
            read = _reading(writer, reader, target)
            said = f"its {side} does not have the form of its Avro schema"
            part, bad = _each(datums, where, target, read, said, partial(avro.unreadable, schema=writer), cost_of_avro(writer))
            wrong |= bad
            if len(part) == len(data):
                return part, wrong
            parts.append(part)
            places[where] = np.arange(filled, filled + len(part))
            filled += len(part)
        return pa.concat_arrays(parts).take(pa.array(places)), wrong

    def _by_schema(
        self, data: pa.Array, headers: Any, reader: Node, side: str, wrong: dict[int, NoRow]
    ) -> Iterator[tuple[np.ndarray, Node, pa.Array]]:
        """The places of the data of each schema, the schema, and the data without its id. What has none goes to ``wrong``."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.framed[side]:
            if data.null_count < len(data):
                yield np.flatnonzero(data.is_valid().to_numpy(zero_copy_only=False)), reader, data.drop_null()
            return
        groups = _ids(data, headers, side, wrong)
        if missing := frozenset(found for found, _, _ in groups) - self.writers.keys():
            raise SchemasMissing(ids=missing)
        for found, bare, places in groups:
            writer = self.writers[found]
            if isinstance(writer, Node):
                datums = data if len(places) == len(data) else data.take(pa.array(places))
                yield places, writer, datums if bare else pc.binary_slice(datums, PREFIX_BYTES, MOST_BYTES)
                continue
            unknown = SchemaUnknown(f"the registry does not know schema {found} of its {side}")
            unusable = Undecodable(f"schema {found} of its {side} cannot be used: {writer}")
            wrong |= dict.fromkeys(places.tolist(), unknown if writer is None else unusable)


def _bodies(data: pa.Array, headers: Any, reader: Message, side: str, wrong: dict[int, NoRow]) -> pa.Array:
    """The messages without ids and indexes. Null in the place of a null, and of what goes to ``wrong``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    in_headers = {place for _, bare, places in _ids(data, headers, side, wrong) if bare for place in places.tolist()}
    first = pc.equal(pc.binary_slice(data, PREFIX_BYTES, PREFIX_BYTES + 1), pa.scalar(b"\0"))
    if not wrong and not in_headers and reader.indexes == (0,) and pc.all(first).as_py():
        return pc.binary_slice(data, PREFIX_BYTES + 1, MOST_BYTES)
    said = list(_pairs(headers)) if in_headers else []
    bodies: list[bytes | None] = []
    for place, each in enumerate(data.to_pylist()):
        bodies.append(None)
        if each is None or place in wrong:
            continue
        try:
            if place in in_headers:
                (_, rest), body = id_in(said[place], HEADERS[side]) or (0, b""), each
                indexes, _ = indexes_before(rest)
            else:
                indexes, body = indexes_before(each[PREFIX_BYTES:])
        except ValueError:
            wrong[place] = Undecodable(f"its {side} has no message indexes after its schema id")
            continue
        if indexes == reader.indexes:
            bodies[place] = body
        else:
            wrong[place] = Undecodable(
                f"its {side} is message {_shown(indexes)} of its schema, and {reader.name} is {_shown(reader.indexes)}"
            )
    return pa.array(bodies, pa.binary())


def _objects(values: pa.Array) -> list[Any]:
    """The values as Python objects. In place of a time that Python cannot represent, the exception to raise."""
    try:
        return values.to_pylist(maps_as_pydicts="lossy")  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        return [_object(each) for each in values]


def _object(value: pa.Scalar) -> Any:
    try:
        return value.as_py(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        return Undecodable("it has a time that Python cannot represent: a year before 1 or after 9999")


def _shown(indexes: Sequence[int]) -> str:
    return ".".join(map(str, indexes))


def _ids(data: pa.Array, headers: Any, side: str, wrong: dict[int, NoRow]) -> list[tuple[SchemaId, bool, np.ndarray]]:
    """Each schema id, whether it is in the headers, and the places of its data. Data that has none goes to ``wrong``."""
    import numpy as np

    ids, which = ids_before(data)
    valid = data.is_valid().to_numpy(zero_copy_only=False)
    groups: dict[SchemaId, list[int]] = {}
    for place, said in enumerate(_pairs(headers) if _has_headers(headers) else ()):
        try:
            if valid[place] and (found := id_in(said, HEADERS[side])) is not None:
                groups.setdefault(found[0], []).append(place)
                which[place] = -2
        except ValueError as error:
            wrong[place], which[place] = Undecodable(str(error)), -2
    none = Undecodable(f"its {side} has no schema id: it does not begin with a zero byte and four more")
    wrong |= dict.fromkeys(np.flatnonzero((which == -1) & valid).tolist(), none)
    before = ((found, False, np.flatnonzero(which == at)) for at, found in enumerate(ids))
    return [
        *((found, bare, places) for found, bare, places in before if len(places)),
        *((found, True, np.array(each)) for found, each in groups.items()),
    ]


def _has_headers(headers: Any) -> bool:
    return any(headers) if isinstance(headers, list) else headers.null_count < len(headers)


def _pairs(headers: Any) -> Iterator[list[tuple[str, bytes | None]]]:
    """The headers of each record, given as lists of pairs, or as an Arrow array of structs."""
    for each in headers if isinstance(headers, list) else headers.to_pylist():
        yield [(one["key"], one["value"]) if isinstance(one, dict) else one for one in each or ()]


def _reading(writer: Node, reader: Node, target: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda datums: resolved(plain(avro.decode(datums, writer), writer), target, reader)


def _each(
    data: pa.Array,
    places: Sequence[int] | np.ndarray,
    target: pa.DataType,
    read: Callable[[pa.Array], pa.Array],
    said: str,
    find: Callable[[pa.Array], list[bool]] | None = None,
    cost: Cost | None = None,
) -> tuple[pa.Array, dict[int, NoRow]]:
    """What ``read`` makes of the data. A datum that it refuses becomes null, and its place is returned.

    ``find`` says of each datum whether it is bad. It may miss some; those are found by bisection, which takes long if there are many.
    ``cost`` says what each one takes in memory, and decides how many are read at once.
    """
    import numpy as np
    import pyarrow as pa

    if cost is None:
        return _read_each(data, places, target, read, said, find)
    costs = cost(data)
    if (large := costs > RECORD_BYTES).any():
        why = Undecodable("decoding it may take more than a gigabyte, because its schema has lists of items with many fields")
        return _of_good(large, why, data, places, target, lambda some, where: _each(some, where, target, read, said, find, cost))
    ends = np.flatnonzero(np.diff(np.cumsum(costs) // CHUNK_BYTES)) + 1
    parts: list[pa.Array] = []
    wrong: dict[int, NoRow] = {}
    for start, end in itertools.pairwise([0, *ends.tolist(), len(data)]):
        part, bad = _read_each(data.slice(start, end - start), places[start:end], target, read, said, find)
        parts.append(part)
        wrong |= bad
    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), wrong


def _read_each(
    data: pa.Array,
    places: Sequence[int] | np.ndarray,
    target: pa.DataType,
    read: Callable[[pa.Array], pa.Array],
    said: str,
    find: Callable[[pa.Array], list[bool]] | None,
) -> tuple[pa.Array, dict[int, NoRow]]:
    import numpy as np
    import pyarrow as pa

    try:
        return read(data), {}
    except Unresolvable as error:  # for all of this schema
        return pa.nulls(len(data), target), dict.fromkeys(
            map(int, places), Undecodable(f"it cannot be read with the newest schema: {error}")
        )
    except NoValue as error:
        if len(data) == 1:
            return pa.nulls(1, target), {int(places[0]): Undecodable(f"it cannot be decoded: {error}")}
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, it is a datum's
        if len(data) == 1:
            return pa.nulls(1, target), {int(places[0]): Undecodable(said)}
    if find is not None and any(bad := find(data)):
        return _of_good(
            np.array(bad), Undecodable(said), data, places, target, lambda some, where: _read_each(some, where, target, read, said, None)
        )
    half = len(data) // 2
    first, wrong = _read_each(data.slice(0, half), places[:half], target, read, said, None)
    second, more = _read_each(data.slice(half), places[half:], target, read, said, None)
    return pa.concat_arrays([first, second]), wrong | more


def _of_good(
    bad: np.ndarray,
    why: NoRow,
    data: pa.Array,
    places: Sequence[int] | np.ndarray,
    target: pa.DataType,
    read: Callable[[pa.Array, np.ndarray], tuple[pa.Array, dict[int, NoRow]]],
) -> tuple[pa.Array, dict[int, NoRow]]:
    """Reads the data that is not bad, with its places. The other data becomes null."""
    import numpy as np
    import pyarrow as pa

    wrong: dict[int, NoRow] = {int(place): why for place in np.asarray(places)[bad]}
    if bad.all():
        return pa.nulls(len(data), target), wrong
    found, more = read(data.filter(pa.array(~bad)), np.asarray(places)[~bad])
    return found.take(pa.array(np.cumsum(~bad) - 1, mask=bad)), wrong | more


def _without_ids(data: pa.Array, headers: Any, side: str) -> tuple[pa.Array, dict[int, NoRow]]:
    """The data without schema ids, for formats whose data can be read without its schema. Data that has no id becomes null."""
    import pyarrow.compute as pc

    wrong: dict[int, NoRow] = {}
    bare = [place for _, is_bare, places in _ids(data, headers, side, wrong) if is_bare for place in places.tolist()]
    rest = pc.if_else(_without(len(data), wrong), pc.binary_slice(data, PREFIX_BYTES, MOST_BYTES), None)
    return (pc.if_else(_without(len(data), bare), rest, data) if bare else rest), wrong


def _not_json(text: pa.Array, side: str) -> dict[int, NoRow]:
    checked = ((place, _parsed(each, _SYNTAX.decode, side)) for place, each in enumerate(text.to_pylist()) if each is not None)
    return {place: found for place, found in checked if isinstance(found, Undecodable)}


def _parsed(text: str, parse: Callable[[str], Any], side: str) -> Any:
    try:
        return parse(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return Undecodable(f"its {side} is not JSON: {error}")


def _without(count: int, wrong: Collection[int]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    keep = np.ones(count, dtype=bool)
    keep[list(wrong)] = False
    return pa.array(keep)
