"""Shows the rows that a consumer would load from its topics' latest records. Writes nothing.

1. Read the latest records.
2. Call the transform on each partition's records; a Spark transform on all records as one batch.
3. If the table's columns are known, encode the rows for the COPY.

Constraints and triggers are not checked: rows that violate them count as loaded here.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tidemark.author import noticed
from tidemark.author.describe import common_layouts, compare
from tidemark.author.latest_records import latest, one_batch, require_time
from tidemark.author.noticed import LAST_SHOWN_MS
from tidemark.connections import DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.db import session
from tidemark.errors import BadInput
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
from tidemark.sink.fit import columns_of
from tidemark.sink.table import LINEAGE, Layout, SinkMissing
from tidemark.sink.tally import Tally, by_absent, data_columns, split_output
from tidemark.sink.target import Target
from tidemark.sink.types import base_of, conform
from tidemark.spec import ConsumerSpec
from tidemark.spec.user_transform import Form, Transform, load_permanent
from tidemark.transform import To
from tidemark.values.fields import Fields, transform_of
from tidemark.worker.batches import records, rows
from tidemark.worker.call_transform import Work, by_record, function_output, merge_outputs, transform_batch
from tidemark.worker.decoding import Decoding, decode_in_driver

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
_ADDED = frozenset((*GIVEN, *(name for name, _ in LINEAGE)))


class LocalSpark(Protocol):
    """A local Spark session that starts on first use."""

    def schema(self, function: Callable[..., Any], input_schema: pa.Schema) -> Mapping[str, pa.Schema]:
        """The output schema of a Spark-form transform, for each sink."""

    def rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> Mapping[str, pa.Table]:
        """The output of a Spark-form transform for these records, for each sink."""


@dataclass(frozen=True, slots=True)
class TriedRecord:
    """A record's outcome. ``disposition``: `None` if the transform did not mention the record. ``rows``: with several sinks, each row is
    nested under its sink's name."""

    partition: TopicPartition
    offset: int
    timestamp_ms: int | None
    disposition: Disposition | None
    rows: Sequence[Row] = ()
    error_type: str | None = None
    error_text: str | None = None


@dataclass
class Trial:
    """``rows``: the rows of a transform without lineage, which belong to the whole batch; `None` if each row belongs to a record.
    ``notes``: on the trial. ``noticed``: what the records show (`tidemark.author.noticed`)."""

    records: list[TriedRecord] = field(default_factory=list)
    rows: list[Row] | None = None
    notes: list[str] = field(default_factory=list)
    noticed: list[str] = field(default_factory=list)


@dataclass
class _Outcome:
    """The outcomes of the records of one partition, by offset."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    rejects: dict[int, Reject] = field(default_factory=dict)
    times: dict[str, list[int]] = field(default_factory=dict)
    """By column, in microseconds since 1970."""


def try_latest(spec: ConsumerSpec, folders: Sequence[Path], count: int, spark: LocalSpark, deadline: float = math.inf) -> Trial:
    """Tries the consumer on the last ``count`` records of its topics. Raises the errors that would refuse a run, and `TimeUp` once
    ``time.monotonic`` is past the deadline."""
    transform, permanent = transform_of(spec, folders), load_permanent(spec, folders)
    kafka = kafka_config()
    cluster = Cluster(kafka)
    decoding = Decoding(spec, registry_config(), lambda: cluster.subscribed(spec))
    trial = Trial()
    layouts = _layouts(spec, transform, decoding.input_schema(), spark, trial)
    topics = cluster.topics(cluster.subscribed(spec))
    partitions = [partition for topic in topics for partition in topic.all() if spec.fixed.covers(partition)]
    newest = latest(kafka, cluster.logs(partitions).values(), count, deadline)
    by_slice = _chunks(newest)
    function = transform.function if isinstance(transform.function, Fields) else _in_time(transform.function, deadline)

    def work() -> Work:
        target = Target("", 0, 0, layouts or tuple(Layout(sink.table, (), sink=name) for name, sink in spec.sinks.items()))
        return Work(target, kafka, transform.form, function, permanent, decoding.decoder())

    if transform.form is Form.SPARK:
        by_part = _by_spark(transform, decoding, by_slice, layouts, spark, trial)
    elif transform.form is Form.ARROW:
        by_part = {part: _by_batch(work, decoding, part, chunk, layouts) for part, chunk in by_slice.items()}
    else:
        by_part = {part: _by_function(work, decoding, part, chunk, layouts) for part, chunk in by_slice.items()}
    outcomes = {part.partition: outcome for part, outcome in by_part.items()}
    trial.noticed += noticed.times(outcome.times for outcome in outcomes.values())
    if isinstance(transform.function, Fields) and transform.function.reads_json and layouts:
        trial.noticed += noticed.fields_without_column(transform.function, layouts[0], _texts(decoding, by_slice))
    if (decoder := decoding.decoder()) is not None:
        trial.noticed += noticed.fields_of_older_schemas(decoder)
    places = zip(_places(newest), newest["offset"].to_pylist(), newest["millis"].to_pylist(), strict=True)
    trial.records = [
        _record_outcome(TopicPartition(*place), offset, millis, outcomes[TopicPartition(*place)]) for place, offset, millis in places
    ]
    return trial


def _in_time(function: Callable[..., Any], deadline: float) -> Callable[..., Any]:
    def called(argument: Any) -> Any:
        require_time(deadline)
        return function(argument)

    return called


def _texts(decoding: Decoding, by_slice: Mapping[Slice, pa.RecordBatch]) -> Iterator[str | None]:
    """The values of records in JSON."""
    for part, chunk in by_slice.items():
        batch, _ = records(part, chunk)
        if batch.num_rows:
            yield from decoding.decode(batch)[0]["value"].to_pylist()


def _microseconds(times: pa.Array) -> list[int]:
    import pyarrow as pa

    micros: list[int] = times.drop_null().cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_pylist()
    return micros


def _layouts(spec: ConsumerSpec, transform: Transform, input_schema: pa.Schema, spark: LocalSpark, trial: Trial) -> tuple[Layout, ...]:
    """The tables' columns. If a table is missing: the columns of ``sink ddl`` for a consumer without code, otherwise nothing."""
    try:
        with session(database_url()) as connection:
            compared = compare(transform, spec.sinks, connection, spark.schema, input_schema)
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        trial.notes.append(f"{DATABASE_URL} is not set, so values are not compared with the table")
        compared = {}
    for comparison in compared.values():
        if isinstance(comparison.refused, SinkMissing):
            create = f"`tidemark sink ddl {spec.name}` prints its DDL"
            trial.notes.append(f"table {comparison.refused.table} does not exist, so values are not compared with it; {create}")
            compared = {}
            break
        if comparison.refused is not None and comparison.layout is None:
            raise comparison.refused
        if comparison.to_add:
            trial.notes.append(f"a run first adds {', '.join(f'{column.name} {column.type}' for column in comparison.to_add)} to the table")
    if compared:
        return common_layouts(compared)
    if isinstance(transform.function, Fields):
        return (Layout(spec.sinks[ONLY].table, tuple(columns_of(transform.function.output(input_schema, None)))),)
    return ()


def _chunks(records: pa.RecordBatch) -> dict[Slice, pa.RecordBatch]:
    """The chunk of each partition."""
    import pyarrow.compute as pc

    chunks = {}
    for topic, number in dict.fromkeys(_places(records)):
        own = records.filter(pc.and_(pc.equal(records["topic"], topic), pc.equal(records["partition"], number)))
        start, end = own["offset"][0].as_py(), own["offset"][-1].as_py() + 1
        chunks[Slice(TopicPartition(topic, number), 0, start, end, Epoch(0))] = own.select(chunk_schema().names)
    return chunks


def _places(records: pa.RecordBatch) -> list[tuple[str, int]]:
    return list(zip(records["topic"].to_pylist(), records["partition"].to_pylist(), strict=True))


def _by_function(work: Callable[[], Work], decoding: Decoding, part: Slice, chunk: pa.RecordBatch, layouts: Sequence[Layout]) -> _Outcome:
    if layouts:
        return _outcome(decoding.with_schemas(lambda: by_record(work(), part, rows(part, chunk))), part, layouts)
    output = decoding.with_schemas(lambda: function_output(work(), part, rows(part, chunk)))
    outcome = _Outcome(skipped=set(output.skipped), rejects={reject.offset: reject for reject in output.rejects})
    for offset, row in zip(output.offsets, output.rows, strict=True):
        sink, plain = (row.sink, row.row) if isinstance(row, To) else (ONLY, row)
        outcome.rows.setdefault(offset, []).append(_under_sink(sink, {str(name): _plain(value) for name, value in plain.items()}))
    return outcome


def _under_sink(sink: str, row: Row) -> Row:
    return row if sink == ONLY else {sink: row}


def _by_batch(work: Callable[[], Work], decoding: Decoding, part: Slice, chunk: pa.RecordBatch, layouts: Sequence[Layout]) -> _Outcome:
    batch, unreadable = records(part, chunk)
    judged = decoding.with_schemas(lambda: transform_batch(work(), batch, part))
    return _outcome(replace(judged, rejects=[*judged.rejects, *unreadable]), part, layouts)


def _by_spark(
    transform: Transform,
    decoding: Decoding,
    by_slice: Mapping[Slice, pa.RecordBatch],
    layouts: Sequence[Layout],
    spark: LocalSpark,
    trial: Trial,
) -> dict[Slice, _Outcome]:
    """Reads and decodes the records in this process, as `SparkEngine` does with retry topics."""
    import pyarrow as pa

    batches = []
    failed: dict[TopicPartition, list[Reject]] = {}
    for part, chunk in by_slice.items():
        batch, failed[part.partition] = records(part, chunk)
        batches.append(batch)
    if not any(batch.num_rows for batch in batches):
        return {part: _outcome(TransformOutput(rejects=failed[part.partition]), part, ()) for part in by_slice}
    decoded, undecodable = decode_in_driver(decoding, one_batch(pa.Table.from_batches(batches)))
    for partition, rejects in undecodable.items():
        failed[partition] += rejects
    tables = spark.rows(transform.function, decoded)
    outputs = {part: TransformOutput(rejects=failed[part.partition]) for part in by_slice}
    if any(name in table.column_names for table in tables.values() for name in (*GIVEN, *OPTIONAL)):
        split = {sink: _split(table, list(by_slice)) for sink, table in tables.items()}
        for part, output in outputs.items():
            from_sinks = merge_outputs({sink: by_part[part] for sink, by_part in split.items()})
            outputs[part] = replace(from_sinks, rejects=[*from_sinks.rejects, *output.rejects])
    else:
        by_sink = {layout.sink: layout for layout in layouts}
        trial.rows = [
            _under_sink(sink, row)
            for sink, table in tables.items()
            for row in _batch_rows(one_batch(table), by_sink.get(sink), next(iter(by_slice)))
        ]
        trial.notes.append("rows have no lineage: they belong to the whole batch, and a batch of a run has other records")
        if undecodable:
            trial.notes.append("a run is refused while such a batch has records that cannot be decoded")
    return {part: _outcome(output, part, layouts) for part, output in outputs.items()}


def _split(table: pa.Table, parts: Sequence[Slice]) -> dict[Slice, TransformOutput]:
    """The output by partition. Raises `BadOutput` for a row of another partition."""
    import pyarrow.compute as pc

    if not set(GIVEN) <= set(table.column_names):
        split_output(one_batch(table), parts[0])  # raises
    outputs, matched = {}, 0
    for part in parts:
        of_topic = pc.equal(table["kafka_topic"], part.partition.topic)
        own = table.filter(pc.and_(of_topic, pc.equal(table["kafka_partition"], part.partition.partition)))
        matched += own.num_rows
        outputs[part] = split_output(one_batch(own), part)
    if matched < table.num_rows:
        raise BadOutput(
            part=parts[0], problem=f"a row has the lineage of a record that was not read: return {', '.join(GIVEN)} as they were given."
        )
    return outputs


def _batch_rows(batch: pa.RecordBatch, layout: Layout | None, part: Slice) -> list[Row]:
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


def _outcome(judged: TransformOutput, part: Slice, layouts: Sequence[Layout]) -> _Outcome:
    """The outcome of each record, as a commit would store it, up to the COPY. Raises `BadOutput`."""
    import pyarrow as pa

    outcome = _Outcome(skipped=set(judged.skipped), rejects={reject.offset: reject for reject in judged.rejects})
    encodable: list[tuple[Layout, tuple[str, ...], pa.RecordBatch]] = []
    if not layouts:
        encodable = [(Layout("", (), sink=sink), (), rows) for sink, rows in judged.rows.items()]
    else:
        tally = Tally(part)
        for layout in layouts:
            sink_rows = tally.take(judged, layout)
            if sink_rows is not None:
                encodable += [(layout, *split) for rows in _encodable(tally, sink_rows, layout) for split in by_absent(rows, layout)]
        outcome.rejects = tally.rejects
    for layout, absent, batch in encodable:
        data = batch.drop_columns([name for name in batch.schema.names if name in _ADDED or name in absent])
        types = {column.name: column.type for column in layout.columns}
        for name in data.schema.names:
            if pa.types.is_timestamp(data[name].type) and name in types:
                outcome.times.setdefault(name, []).extend(_microseconds(data[name]))
        for offset, row in zip(batch["kafka_offset"].to_pylist(), _values(data, types), strict=True):
            if offset in outcome.rejects:  # another sink refuses its rows
                continue
            if row.get(DELETED):
                shown = {DELETED: True, **{name: row[name] for name in layout.key}}
            else:
                shown = {name: value for name, value in row.items() if name != DELETED}
            outcome.rows.setdefault(offset, []).append(_under_sink(layout.sink, shown))
    return outcome


def _encodable(tally: Tally, rows: pa.RecordBatch, layout: Layout) -> list[pa.RecordBatch]:
    """The rows that COPY can encode. Records with any other row fail."""
    import pyarrow.compute as pc

    columns = layout.copy_columns
    try:
        _encode(columns, rows)
    except NotEncodable:
        pass
    else:
        return [rows]
    encodable = []
    for offset in pc.unique(rows["kafka_offset"]).to_pylist():
        record_rows = rows.filter(pc.equal(rows["kafka_offset"], offset))
        try:
            _encode(columns, record_rows)
        except NotEncodable as error:
            error_text = quoting(f"{error}.", error.detail if layout.error_detail else None)
            tally.refuse(reject(offset, Disposition.FAIL, error_text, type(error).__name__), record_rows.num_rows, layout.sink)
        else:
            encodable.append(record_rows)
    return encodable


def _encode(columns: Sequence[tuple[str, str]], rows: pa.RecordBatch) -> None:
    """Raises `NotEncodable`."""
    stream = CopyStream(columns, iter([rows.drop_columns([ABSENT]) if ABSENT in rows.schema.names else rows]))
    while stream.read():
        pass


def _record_outcome(partition: TopicPartition, offset: int, millis: int, outcome: _Outcome) -> TriedRecord:
    rows, reject = outcome.rows.get(offset, []), outcome.rejects.get(offset)
    place = (partition, offset, millis if 0 <= millis <= LAST_SHOWN_MS else None)
    if reject is not None:
        return TriedRecord(*place, reject.disposition, (), reject.error_type, reject.error_text)
    if offset in outcome.skipped:
        return TriedRecord(*place, Disposition.SKIP)
    return TriedRecord(*place, Disposition.LOAD if rows else None, rows)


def _values(rows: pa.RecordBatch, types: Mapping[str, str]) -> list[Row]:
    """The rows as Python values, in the form that Postgres shows in JSON. ``types``: the columns' types, if known."""
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
        return [_number(item, postgres) for item in value]
    return None if value is None else numeric.shown(Decimal(value), postgres)


def _python(values: pa.Array) -> list[Any]:
    """Python values; texts if Python cannot represent the times: it stops at the year 9999, and at microseconds."""
    import pyarrow as pa

    try:
        items: list[Any] = values.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError):
        items = values.cast(pa.string()).to_pylist()
    return items


def _plain(value: Any, postgres: str | None = None) -> Any:
    if isinstance(value, bytes):
        return str(uuid.UUID(bytes=value)) if postgres == "uuid" else f"\\x{value.hex()}"
    if isinstance(value, str) and postgres in ("json", "jsonb"):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:  # Postgres would refuse it
            return value
    return msgspec.to_builtins(value, builtin_types=(Decimal,), str_keys=True, enc_hook=str)
