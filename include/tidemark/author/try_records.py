"""Shows what a consumer would make of its topics' latest records. Writes nothing anywhere.

1. Read the latest records.
2. Call the transform on those of each partition; a Spark transform on all of them together, as a batch.
3. If the table's columns are known, encode the rows for them, as the COPY would.

Only Postgres knows which rows it would refuse (constraints, triggers), so these count as loaded here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from tidemark.author.describe import agreed, compare
from tidemark.author.latest_records import latest, one_batch
from tidemark.connections import DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.db import session
from tidemark.errors import BadInput
from tidemark.formats.decoder import SchemasMissing
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.poll import chunk_schema
from tidemark.records.outcome import (
    ABSENT,
    DELETED,
    GIVEN,
    ONLY,
    OPTIONAL,
    BadOutput,
    Disposition,
    Reject,
    TransformOutput,
    quoting,
    reject,
)
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink import numeric
from tidemark.sink.encode import CopyStream, NotEncodable
from tidemark.sink.table import LINEAGE, Layout, SinkMissing, columns_of
from tidemark.sink.tally import Tally, by_absent, data_columns, split_output
from tidemark.sink.target import Target
from tidemark.sink.types import base_of, conform
from tidemark.spec import ConsumerSpec
from tidemark.spec.user_transform import Form, Transform, load_permanent
from tidemark.transform import To
from tidemark.values.fields import Fields, transform_of
from tidemark.worker.batches import records, rows
from tidemark.worker.call_transform import Work, by_record, function_output, judged_batch, merged
from tidemark.worker.decoding import Decoding, decoded_here

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
Row = Mapping[str, Any]
LAST_SHOWN_MS = 253_402_300_799_999
"""The end of the year 9999, Python's last. Later timestamps are not shown."""
_FIRST_WEEKS_US = 60 * 86_400_000_000
"""Seconds that are taken for milliseconds, and milliseconds that are taken for microseconds, are times of these weeks until 2130."""
_ADDED = frozenset((*GIVEN, *(name for name, _ in LINEAGE)))


class LocalSpark(Protocol):
    """A local Spark session that starts when it is needed."""

    def schema(self, function: Callable[..., Any], given: pa.Schema) -> Mapping[str, pa.Schema]:
        """The output schema of a transform of the Spark form, for each sink."""

    def rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> Mapping[str, pa.Table]:
        """What a transform of the Spark form makes of records, for each sink."""


@dataclass(frozen=True, slots=True)
class TriedRecord:
    """What would become of a record. ``disposition``: `None` if the transform did not mention it. ``rows``: with several sinks, each row
    is below the name of its sink."""

    partition: TopicPartition
    offset: int
    timestamp_ms: int | None
    disposition: Disposition | None
    rows: Sequence[Row] = ()
    error_type: str | None = None
    error_text: str | None = None


@dataclass
class Trial:
    """``rows``: those of a transform whose rows belong to the whole batch; `None` if each row has its record."""

    records: list[TriedRecord] = field(default_factory=list)
    rows: list[Row] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class _Outcome:
    """What became of the records of one partition, by offset."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    rejects: dict[int, Reject] = field(default_factory=dict)
    times: dict[str, list[int]] = field(default_factory=dict)
    """By column, in microseconds since 1970."""


def try_latest(spec: ConsumerSpec, folders: Sequence[Path], count: int, spark: LocalSpark) -> Trial:
    """What the consumer would make of the last ``count`` records of its topics. Raises what a run would be refused for."""
    transform, permanent = transform_of(spec, folders), load_permanent(spec, folders)
    kafka = kafka_config()
    cluster = Cluster(kafka)
    decoding = Decoding(spec, registry_config(), lambda: cluster.subscribed(spec))
    trial = Trial()
    layouts = _layouts(spec, transform, decoding.input_schema(), spark, trial)
    partitions = [each for topic in cluster.topics(cluster.subscribed(spec)) for each in topic.all() if spec.fixed.covers(each)]
    newest = latest(kafka, cluster.logs(partitions).values(), count)
    by_slice = _slices(newest)

    def work() -> Work:
        target = Target("", 0, 0, layouts or tuple(Layout(sink.table, (), sink=name) for name, sink in spec.tables.items()))
        return Work(target, kafka, transform.form, transform.function, permanent, decoding.decoder())

    if transform.form is Form.SPARK:
        found = _by_spark(transform, decoding, by_slice, layouts, spark, trial)
    elif transform.form is Form.ARROW:
        found = {part: _by_batch(work, decoding, part, own, layouts) for part, own in by_slice.items()}
    else:
        found = {part: _by_function(work, decoding, part, own, layouts) for part, own in by_slice.items()}
    outcomes = {part.partition: outcome for part, outcome in found.items()}
    trial.notes += _notes_on_times(outcomes.values())
    places = zip(_places(newest), newest["offset"].to_pylist(), newest["millis"].to_pylist(), strict=True)
    trial.records = [_tried(TopicPartition(*place), offset, millis, outcomes[TopicPartition(*place)]) for place, offset, millis in places]
    return trial


def _notes_on_times(outcomes: Iterable[_Outcome]) -> list[str]:
    """Columns of which all times are so early or so late that numbers were probably in another unit."""
    times: dict[str, list[int]] = {}
    for outcome in outcomes:
        for name, some in outcome.times.items():
            times.setdefault(name, []).extend(some)
    notes = []
    for name, some in times.items():
        early, late = all(0 <= each < _FIRST_WEEKS_US for each in some), all(each > LAST_SHOWN_MS * 1_000 for each in some)
        if some and (early or late):
            when = "in the first weeks of 1970" if early else "after the year 9999"
            notes.append(f"{name}: all times are {when}; is their unit right? Numbers in a timestamptz are milliseconds since 1970")
    return notes


def _micros(times: pa.Array) -> list[int]:
    import pyarrow as pa

    found: list[int] = times.drop_null().cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_pylist()
    return found


def _layouts(spec: ConsumerSpec, transform: Transform, given: pa.Schema, spark: LocalSpark, trial: Trial) -> tuple[Layout, ...]:
    """The tables' columns. Empty if a table is missing, except for a consumer without code: then those of ``sink ddl``."""
    try:
        with session(database_url()) as connection:
            compared = compare(transform, spec.tables, connection, spark.schema, given)
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        trial.notes.append(f"{DATABASE_URL} is not set, so values are not compared with the table")
        compared = {}
    for each in compared.values():
        if isinstance(each.refused, SinkMissing):
            create = f"`tidemark sink ddl {spec.name}` prints its DDL"
            trial.notes.append(f"table {each.refused.table} does not exist, so values are not compared with it; {create}")
            compared = {}
            break
        if each.refused is not None and each.layout is None:
            raise each.refused
        if each.to_add:
            trial.notes.append(f"a run first adds {', '.join(f'{column.name} {column.type}' for column in each.to_add)} to the table")
    if compared:
        return agreed(compared)
    if isinstance(transform.function, Fields):
        return (Layout(spec.tables[ONLY].table, tuple(columns_of(transform.function.output(given, None)))),)
    return ()


def _slices(found: pa.RecordBatch) -> dict[Slice, pa.RecordBatch]:
    """The chunk of each partition."""
    import pyarrow.compute as pc

    chunks = {}
    for topic, number in dict.fromkeys(_places(found)):
        own = found.filter(pc.and_(pc.equal(found["topic"], topic), pc.equal(found["partition"], number)))
        start, end = own["offset"][0].as_py(), own["offset"][-1].as_py() + 1
        chunks[Slice(TopicPartition(topic, number), 0, start, end, Epoch(0))] = own.select(chunk_schema().names)
    return chunks


def _places(found: pa.RecordBatch) -> list[tuple[str, int]]:
    return list(zip(found["topic"].to_pylist(), found["partition"].to_pylist(), strict=True))


def _by_function(work: Callable[[], Work], decoding: Decoding, part: Slice, chunk: pa.RecordBatch, layouts: Sequence[Layout]) -> _Outcome:
    if layouts:
        return _settled(_learned(decoding, lambda: by_record(work(), part, rows(part, chunk))), part, layouts)
    made = _learned(decoding, lambda: function_output(work(), part, rows(part, chunk)))
    outcome = _Outcome(skipped=set(made.skipped), rejects={reject.offset: reject for reject in made.rejects})
    for offset, row in zip(made.offsets, made.rows, strict=True):
        sink, plain = (row.sink, row.row) if isinstance(row, To) else (ONLY, row)
        outcome.rows.setdefault(offset, []).append(_below(sink, {str(name): _plain(value) for name, value in plain.items()}))
    return outcome


def _below(sink: str, row: Row) -> Row:
    return row if sink == ONLY else {sink: row}


def _by_batch(work: Callable[[], Work], decoding: Decoding, part: Slice, chunk: pa.RecordBatch, layouts: Sequence[Layout]) -> _Outcome:
    batch, unreadable = records(part, chunk)
    judged = _learned(decoding, lambda: judged_batch(work(), batch, part))
    return _settled(replace(judged, rejects=[*judged.rejects, *unreadable]), part, layouts)


def _by_spark(
    transform: Transform,
    decoding: Decoding,
    by_slice: Mapping[Slice, pa.RecordBatch],
    layouts: Sequence[Layout],
    spark: LocalSpark,
    trial: Trial,
) -> dict[Slice, _Outcome]:
    """Like `SparkEngine` with the records of retry topics: the driver reads and decodes them."""
    import pyarrow as pa

    batches = []
    failed: dict[TopicPartition, list[Reject]] = {}
    for part, chunk in by_slice.items():
        batch, failed[part.partition] = records(part, chunk)
        batches.append(batch)
    if not any(batch.num_rows for batch in batches):
        return {part: _settled(TransformOutput(rejects=failed[part.partition]), part, ()) for part in by_slice}
    given, wrong = decoded_here(decoding, one_batch(pa.Table.from_batches(batches)))
    for partition, rejects in wrong.items():
        failed[partition] += rejects
    tables = spark.rows(transform.function, given)
    by_part = {part: TransformOutput(rejects=failed[part.partition]) for part in by_slice}
    if any(name in table.column_names for table in tables.values() for name in (*GIVEN, *OPTIONAL)):
        split = {sink: _split(table, list(by_slice)) for sink, table in tables.items()}
        for part, judged in by_part.items():
            of_sinks = merged({sink: found[part] for sink, found in split.items()})
            by_part[part] = replace(of_sinks, rejects=[*of_sinks.rejects, *judged.rejects])
    else:
        by_sink = {layout.sink: layout for layout in layouts}
        trial.rows = [
            _below(sink, row)
            for sink, table in tables.items()
            for row in _rows_of_all(one_batch(table), by_sink.get(sink), next(iter(by_slice)))
        ]
        trial.notes.append("rows have no lineage: they belong to the whole batch, and a batch of a run has other records")
        if wrong:
            trial.notes.append("a run is refused while such a batch has records that cannot be decoded")
    return {part: _settled(judged, part, layouts) for part, judged in by_part.items()}


def _split(table: pa.Table, parts: Sequence[Slice]) -> dict[Slice, TransformOutput]:
    """The rows of each partition. Raises `BadOutput` for a row of another one."""
    import pyarrow.compute as pc

    if not set(GIVEN) <= set(table.column_names):
        split_output(one_batch(table), parts[0])  # raises
    found, seen = {}, 0
    for part in parts:
        of_topic = pc.equal(table["kafka_topic"], part.partition.topic)
        own = table.filter(pc.and_(of_topic, pc.equal(table["kafka_partition"], part.partition.partition)))
        seen += own.num_rows
        found[part] = split_output(one_batch(own), part)
    if seen < table.num_rows:
        raise BadOutput(part=parts[0], problem=f"a row comes from no record that was read: return {', '.join(GIVEN)} as they were given.")
    return found


def _rows_of_all(batch: pa.RecordBatch, layout: Layout | None, part: Slice) -> list[Row]:
    if layout is None:
        return _values(batch, {})
    import pyarrow as pa

    rows = pa.RecordBatch.from_arrays(data_columns(batch, layout, part), names=[column.name for column in layout.columns])
    columns = [(column.name, column.type) for column in layout.columns]
    try:
        _encode(columns, rows)
    except NotEncodable as error:
        raise BadOutput(part=part, problem=f"{error}.") from None
    return _values(rows, dict(columns))


def _settled(judged: TransformOutput, part: Slice, layouts: Sequence[Layout]) -> _Outcome:
    """The outcome of each record: what a commit would store, up to the COPY. Raises `BadOutput`."""
    import pyarrow as pa

    outcome = _Outcome(skipped=set(judged.skipped), rejects={reject.offset: reject for reject in judged.rejects})
    found: list[tuple[Layout, tuple[str, ...], pa.RecordBatch]] = []
    if not layouts:
        found = [(Layout("", (), sink=sink), (), rows) for sink, rows in judged.rows.items()]
    else:
        tally = Tally(part)
        for layout in layouts:
            taken = tally.take(judged, layout)
            if taken is not None:
                found += [(layout, *each) for rows in _encodable(tally, taken, layout) for each in by_absent(rows, layout)]
        outcome.rejects = tally.rejects
    for layout, absent, batch in found:
        data = batch.drop_columns([name for name in batch.schema.names if name in _ADDED or name in absent])
        types = {column.name: column.type for column in layout.columns}
        for name in data.schema.names:
            if pa.types.is_timestamp(data[name].type) and name in types:
                outcome.times.setdefault(name, []).extend(_micros(data[name]))
        for offset, row in zip(batch["kafka_offset"].to_pylist(), _values(data, types), strict=True):
            if offset in outcome.rejects:  # another sink would refuse its rows
                continue
            if row.get(DELETED):
                shown = {DELETED: True, **{name: row[name] for name in layout.key}}
            else:
                shown = {name: value for name, value in row.items() if name != DELETED}
            outcome.rows.setdefault(offset, []).append(_below(layout.sink, shown))
    return outcome


def _encodable(tally: Tally, rows: pa.RecordBatch, layout: Layout) -> list[pa.RecordBatch]:
    """The rows without those of records with values that the COPY cannot hold: these records fail."""
    import pyarrow.compute as pc

    columns = layout.copy_columns
    try:
        _encode(columns, rows)
    except NotEncodable:
        pass
    else:
        return [rows]
    good = []
    for offset in pc.unique(rows["kafka_offset"]).to_pylist():
        own = rows.filter(pc.equal(rows["kafka_offset"], offset))
        try:
            _encode(columns, own)
        except NotEncodable as error:
            text = quoting(f"{error}.", error.detail if layout.error_detail else None)
            tally.refuse(reject(offset, Disposition.FAIL, text, type(error).__name__), own.num_rows, layout.sink)
        else:
            good.append(own)
    return good


def _encode(columns: Sequence[tuple[str, str]], rows: pa.RecordBatch) -> None:
    """Raises `NotEncodable` or `TypesChanged`."""
    stream = CopyStream(columns, iter([rows.drop_columns([ABSENT]) if ABSENT in rows.schema.names else rows]))
    while stream.read():
        pass


def _tried(partition: TopicPartition, offset: int, millis: int, outcome: _Outcome) -> TriedRecord:
    rows, reject = outcome.rows.get(offset, []), outcome.rejects.get(offset)
    place = (partition, offset, millis if 0 <= millis <= LAST_SHOWN_MS else None)
    if reject is not None:
        return TriedRecord(*place, reject.disposition, (), reject.error_type, reject.error_text)
    if offset in outcome.skipped:
        return TriedRecord(*place, Disposition.SKIP)
    return TriedRecord(*place, Disposition.LOAD if rows else None, rows)


def _learned(decoding: Decoding, act: Callable[[], T]) -> T:
    """The result of ``act``, which is called again while records need schemas that were not fetched yet."""
    while True:
        try:
            return act()
        except SchemasMissing as error:
            decoding.learn(error)


def _values(rows: pa.RecordBatch, types: Mapping[str, str]) -> list[Row]:
    """The rows as Python values, as Postgres would show them in JSON. ``types``: the columns' types, if they are known."""
    columns = {}
    for name, values in zip(rows.schema.names, rows.columns, strict=True):
        postgres = types.get(name)
        if postgres is not None and base_of(postgres).removesuffix("[]") == "numeric":
            columns[name] = [_number(value, postgres.removesuffix("[]")) for value in _python(values)]
        else:
            plain = values if postgres is None else conform(values, postgres)
            columns[name] = [_plain(value, postgres) for value in _python(plain)]
    return [{name: values[at] for name, values in columns.items()} for at in range(rows.num_rows)]


def _number(value: Any, postgres: str) -> Any:
    if isinstance(value, list):
        return [_number(each, postgres) for each in value]
    return None if value is None else numeric.shown(Decimal(value), postgres)


def _python(values: pa.Array) -> list[Any]:
    """The values as Python's; as text, if Python has no such times: it ends in the year 9999, and at microseconds."""
    import pyarrow as pa

    try:
        found: list[Any] = values.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError):
        found = values.cast(pa.string()).to_pylist()
    return found


def _plain(value: Any, postgres: str | None = None) -> Any:
    if isinstance(value, bytes):
        return str(uuid.UUID(bytes=value)) if postgres == "uuid" else f"\\x{value.hex()}"
    if isinstance(value, str) and postgres in ("json", "jsonb"):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:  # Postgres would refuse it
            return value
    return msgspec.to_builtins(value, builtin_types=(Decimal,), str_keys=True, enc_hook=str)
