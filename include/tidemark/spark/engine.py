"""Runs a batch as one Spark job, with one task per slice.

In the Arrow and function forms the task's Python worker reads Kafka itself. In the Spark form, Spark's connector reads exactly the same
ranges and passes Arrow batches to the worker. Both end in `tidemark.sink.commit.commit_slice`, unless the plan of a Spark form mixes rows
of several slices: then the tasks stage their rows, and the driver commits the batch (`tidemark.sink.staged`).
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidemark.author.describe import layouts_of
from tidemark.connections import Connections
from tidemark.errors import TidemarkError, message_of
from tidemark.formats.decoder import Decoder, SchemasMissing
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import jvm
from tidemark.kafka.reader import read
from tidemark.records.outcome import GIVEN, ONLY, OPTIONAL, BadOutput, Reject
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.load import SinkRejected
from tidemark.sink.retry_commit import commit_drained, origins
from tidemark.sink.staged import promote, promote_drained
from tidemark.sink.staging import OF_SINK, Staged, column_of, drop_staging, make_staging, stage
from tidemark.sink.table import Layout
from tidemark.sink.tally import split_output
from tidemark.sink.target import Target
from tidemark.spark.arrow import LARGE_B, LargeRows, drop_mark, mark_large_rows, user_limits_batches, without_byte_count
from tidemark.spark.errors import NotATime, lost_jvm, translated
from tidemark.spark.query_plan import HEADERS_PLACEHOLDER, hands_over_once, partitions_of_tasks, passed_on, reads_headers, why_staged
from tidemark.spark.releases import arrow_schema, few_records, require_spark_form
from tidemark.spark.session import is_shared, name_of, start_session
from tidemark.spark.shared import with_environment
from tidemark.spec import ConsumerSpec
from tidemark.spec.user_transform import Form, Transform
from tidemark.worker.batches import payloads, records, without_time
from tidemark.worker.call_transform import TransformFailed, Work
from tidemark.worker.decoding import Decoding, decode_in_driver, run_with_schemas, undecodable
from tidemark.worker.retry_slice import read_all_tries
from tidemark.worker.slice_worker import SliceWorker, collect_less_garbage

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from tidemark.db import Connection

T = TypeVar("T")

log = logging.getLogger(__name__)

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
ORDER = "tidemark.slices"
"""The job property that tells each task its slice. The order is known only from the plan, which already contains the task's function."""
UNDECODABLE = "tidemark: records cannot be decoded"
HEADERS_ARE_MISSING = "tidemark: the records were read without their headers"
SHARES_PER_CORE = 4
"""Maximum tasks per core in the function and Arrow forms: enough to even out slice sizes and the waits for Kafka and Postgres."""
SOURCE_OPTIONS = {
    "failOnDataLoss": "true",
    "kafka.isolation.level": "read_committed",
    # measured: Spark's defaults lose a third of the rate
    "kafka.max.poll.records": "10000",
    "kafka.max.partition.fetch.bytes": "8388608",
    "kafka.fetch.max.bytes": "67108864",
    "kafka.receive.buffer.bytes": "1048576",
    "kafka.fetch.max.wait.ms": "20",
}


class SparkEngine:
    """The `Engine` of a run. Creating it starts the JVM, so it is created only if there is something to read."""

    def __init__(
        self,
        spec: ConsumerSpec,
        connections: Connections,
        transform: Transform,
        permanent: tuple[type[Exception], ...],
        attempt_id: int,
        folders: Sequence[Path],
        records: int | None = None,
    ) -> None:
        self._spec = spec
        self._configured, self._connections = connections, connections.read()
        self._transform = transform
        self._permanent = permanent
        if transform.form is Form.SPARK:
            jvm(self._connections.kafka)  # a setting that the JVM lacks is refused before it starts
        self._spark = start_session(spec, connections, attempt_id, folders, transform.form, records)
        self._shared = is_shared(self._spark)
        self._job_group = name_of(spec, attempt_id)
        self._spark.sparkContext.setJobGroup(self._job_group, spec.name, interruptOnCancel=True)
        self._batches = 0
        self._decoding = Decoding(spec, connections.registry, lambda: Cluster(connections.read().kafka).subscribed(spec))
        self._count_bytes = user_limits_batches(self._spark)
        if not self._spark.sparkContext.getConf().contains(SHUFFLE_PARTITIONS):  # Spark's default of 200 is for larger batches
            self._spark.conf.set(SHUFFLE_PARTITIONS, self._spark.sparkContext.defaultParallelism)

    def warm_up(self, sample: Sequence[Slice]) -> None:
        """Starts a Python worker for each core and imports its modules. Spark ends idle workers after a minute.

        The Spark form has its own workers, because Spark starts them with other settings. There the JVM reads, so the plan runs over
        ``sample`` to load its classes. In the other forms the workers read ``sample`` themselves.
        """
        cores = self._spark.sparkContext.defaultParallelism
        with lost_jvm(), translated():
            if self._transform.form is not Form.SPARK:
                shares = [list(sample[core::cores]) for core in range(cores)]
                warm = partial(_warm_reader, self._transform.function, dict(self._connections.kafka))
                self._spark.sparkContext.parallelize(shares, cores).mapPartitions(warm).collect()
                return
            self._spark.range(0, cores, 1, cores).mapInArrow(partial(_idle, self._transform.function), "id long").collect()
            if sample:
                result = _transform_records(self._transform.function, kafka_records(self._spark, self._connections, sample))
                result.mapInArrow(_discard, "id long").collect()

    def layouts(self, connection: Connection) -> tuple[Layout, ...]:
        with lost_jvm():
            schema = self._decoding.input_schema()
            return layouts_of(self._transform, self._spec.sinks, connection, partial(output_schema, self._spark), schema)

    def run(self, target: Target, slices: Sequence[Slice], *, isolate: bool) -> list[Receipt | TidemarkError]:
        self._connections = self._configured.read()
        self._decoding.forget_unknown()
        with lost_jvm():
            if self._transform.form is not Form.SPARK:
                return run_with_schemas(self._decoding, slices, lambda subset: self._run_workers(target, subset, isolate))
            if slices[0].drained:
                return self._run_retries(target, slices, isolate)
            try:
                outcomes = self._try_plan(target, slices, isolate)
                if outcomes is None:
                    outcomes = self._run_plan(target, slices, isolate, self._find_undecodable(slices))
            except NotATime:
                raise NotATime(place=without_time(self._connections.kafka, slices)) from None
            if large := [outcome.part for outcome in outcomes if isinstance(outcome, LargeRows)]:
                log.info("rows of more than %s bytes, counting bytes from now on group=%s", LARGE_B, self._spec.group)
                self._count_bytes = True
                outcomes = [outcome for outcome in outcomes if not isinstance(outcome, LargeRows)]
                outcomes += self._run_plan(target, large, isolate)
            return outcomes

    def _try_plan(self, target: Target, slices: Sequence[Slice], isolate: bool) -> list[Receipt | TidemarkError] | None:
        """Returns `None` if nothing is stored because records cannot be decoded or schemas are missing."""
        try:
            outcomes = self._run_plan(target, slices, isolate)
        except TransformFailed as error:
            outcomes = [error]
            if UNDECODABLE not in error.problem:
                raise
        failed = any(isinstance(outcome, TransformFailed) and UNDECODABLE in outcome.problem for outcome in outcomes)
        return None if failed else outcomes

    def _run_plan(
        self, target: Target, slices: Sequence[Slice], isolate: bool, undecodable: Mapping[TopicPartition, Sequence[Reject]] | None = None
    ) -> list[Receipt | TidemarkError]:
        """Checks the plan and runs that same plan: creating a second one would take longer than processing 10,000 records.

        ``undecodable``: failed records, which the transform does not get. They force a staged commit. If they are not known yet (`None`), a
        plan whose tasks commit one slice each finds them itself: some of its slices are stored already.
        """
        if undecodable and not target.by_record:
            first = min(offset.offset for rejects in undecodable.values() for offset in rejects)
            problem = (
                f"the record at offset {first} cannot be decoded, and rows that no single record explains cannot be loaded without it."
            )
            return [BadOutput(part=slices[0], problem=problem)]
        with translated():
            try:
                result, job, marks = self._plan_job(target, slices, isolate, undecodable or {}, headers=self._decoding.needed)
                headers = not self._decoding.needed and reads_headers(job)
            except TransformFailed as error:
                headers = HEADERS_ARE_MISSING in error.problem  # the transform used them while building its plan
                if not headers:
                    raise
            if headers:
                result, job, marks = self._plan_job(target, slices, isolate, undecodable or {}, headers=True)
            reason = "several sinks" if len(target.layouts) > 1 else why_staged(job)
        if reason is not None:
            log.info("staged commit, the plan may mix rows of several slices group=%s plan=%s", self._spec.group, reason)
            hand_off = partial(payloads, self._connections.kafka)
            promote_rows = partial(promote, target, slices, payloads=hand_off, isolate=isolate)
            return self._stage_and_promote(target, slices, slices, result, isolate, promote_rows)
        if not target.by_record:
            problem = f"each row comes from one record, so it must name that record: return {', '.join(GIVEN)} as they were given."
            return [BadOutput(part=slices[0], problem=problem)]
        with translated():
            number = {part.partition: number for number, part in enumerate(slices)}
            order = [number[TopicPartition(*partition)] for partition in partitions_of_tasks(job)]
            marks = marks and hands_over_once(job)
        self._spark.sparkContext.setLocalProperty(ORDER, json.dumps(order))
        try:
            with without_byte_count(self._spark) if marks else few_records(self._spark):
                return _collect(job)
        except TransformFailed as error:
            if undecodable is not None or UNDECODABLE not in error.problem:
                raise
        rejects = self._find_undecodable(slices)
        outcomes: list[Receipt | TidemarkError] = []
        for with_rejects in (False, True):
            group = [part for part in slices if (part.partition in rejects) is with_rejects]
            if group:
                outcomes += self._run_plan(target, group, isolate, rejects if with_rejects else {})
        return outcomes

    def _plan_job(
        self,
        target: Target,
        slices: Sequence[Slice],
        isolate: bool,
        undecodable: Mapping[TopicPartition, Sequence[Reject]],
        *,
        headers: bool,
    ) -> tuple[DataFrame, DataFrame, bool]:
        """Returns the transform's result, the job whose tasks commit one slice each, and whether that job refuses large rows."""
        source = kafka_records(self._spark, self._connections, slices, headers=headers)
        if (decoder := self._decoding.decoder()) is not None:
            source = self._decode(source, decoder, undecodable)
        result = _transform_records(self._transform.function, source)
        if undecodable:
            result = result.unionByName(_reject_rows(self._spark, undecodable), allowMissingColumns=True)
        unchanged = passed_on(source, result, GIVEN[:2])
        task = partial(_direct_task, target, dict(self._connections.kafka), slices, isolate, unchanged)
        rows = result.drop(*unchanged)
        with_marks = None if self._count_bytes else mark_large_rows(rows)
        return result, self._map_in_arrow(rows if with_marks is None else with_marks, task), with_marks is not None

    def _decode(self, source: DataFrame, decoder: Decoder, dropped: Mapping[TopicPartition, Sequence[Reject]]) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        schema = self._decoding.input_schema()
        offsets = {partition: frozenset(reject.offset for reject in rejects) for partition, rejects in dropped.items()}
        return source.mapInArrow(partial(_decode_task, decoder, offsets), from_arrow_schema(schema))

    def _find_undecodable(self, slices: Sequence[Slice]) -> Mapping[TopicPartition, Sequence[Reject]]:
        """The undecodable records of each partition. Reads the slices again for them: a task of Spark's own plan cannot report records."""

        def scan(subset: Sequence[Slice]) -> list[Any]:
            decoder = self._decoding.decoder()
            assert decoder is not None
            parts = self._spark.sparkContext.parallelize(subset, len(subset))
            with translated():
                return _unpickle(
                    parts.mapPartitions(self._for_worker(partial(_scan_task, decoder, dict(self._connections.kafka)))).collect()
                )

        results = run_with_schemas(self._decoding, slices, scan)
        if errors := [result for result in results if isinstance(result, TidemarkError)]:
            raise errors[0]
        return {part.partition: rejects for part, rejects in results if rejects}

    def cancel(self) -> None:
        self._spark.sparkContext.cancelJobGroup(self._job_group)

    def stop(self) -> None:
        from py4j.protocol import Py4JError

        if self._shared:  # the session and the keeper's loan end with this process
            return
        with contextlib.suppress(Py4JError, OSError):  # the JVM is gone, so there is nothing left to stop
            self._spark.stop()

    def _map_in_arrow(self, result: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> DataFrame:
        return result.mapInArrow(self._for_worker(task), "answer binary")

    def _for_worker(self, task: Callable[..., T]) -> Callable[..., T]:
        return with_environment(task) if self._shared else task

    def _run_workers(self, target: Target, slices: Sequence[Slice], isolate: bool) -> list[Receipt | TidemarkError]:
        work = Work(
            target, self._connections.kafka, self._transform.form, self._transform.function, self._permanent, self._decoding.decoder()
        )
        shares = packed(slices, SHARES_PER_CORE * self._spark.sparkContext.defaultParallelism)
        parts = self._spark.sparkContext.parallelize(shares, len(shares))
        with translated():
            return _unpickle(parts.mapPartitions(self._for_worker(partial(_worker_task, work, isolate))).collect())

    def _stage_and_promote(
        self,
        target: Target,
        slices: Sequence[Slice],
        origin_slices: Sequence[Slice],
        result: DataFrame,
        isolate: bool,
        promote_rows: Callable[[str, Sequence[Staged]], list[Receipt]],
    ) -> list[Receipt | TidemarkError]:
        """``origin_slices``: slices whose topics may appear in the lineage of the rows."""
        self._batches += 1
        table = make_staging(target, self._batches)
        try:
            with few_records(self._spark):
                answers = _collect(self._map_in_arrow(result, partial(_staging_task, target, table, origin_slices, isolate)))
            errors = [answer for answer in answers if isinstance(answer, TidemarkError)]
            if errors:
                raise min(errors, key=lambda error: error.retriable)
            return [*promote_rows(table, answers)]
        except TidemarkError as error:
            with contextlib.suppress(TidemarkError):
                drop_staging(target, table)
            if not isinstance(error, SinkRejected):
                return [error]
            if not target.by_record:  # there is no single record to exclude
                return [error.of_table()]
            return [replace(error, part=part) for part in slices]  # the batch is tried again as a whole

    def _run_retries(self, target: Target, slices: Sequence[Slice], isolate: bool) -> list[Receipt | TidemarkError]:
        """Runs slices of retry topics: the driver reads their few records, of any original partition, and the tasks stage the results."""
        due = read_all_tries(target, self._connections.kafka, slices)
        if due is None:
            return [commit_drained(target, part, lambda _: iter(())) for part in slices]
        tried, batch = due
        batch, rejects = decode_in_driver(self._decoding, batch)
        result = _transform_records(self._transform.function, _to_frame(self._spark, batch))
        if rejects and target.by_record:
            result = result.unionByName(_reject_rows(self._spark, rejects), allowMissingColumns=True)
        if not target.by_record:
            problem = f"records are retried one by one, so each row must name its record: return {', '.join(GIVEN)} as they were given."
            return [BadOutput(part=slices[0], problem=problem)]
        return self._stage_and_promote(
            target, slices, list(origins(tried)), result, isolate, partial(promote_drained, target, slices, tried=tried, isolate=isolate)
        )


def _reject_rows(spark: SparkSession, rejects: Mapping[TopicPartition, Sequence[Reject]]) -> DataFrame:
    """A row for each reject, as a transform would return it."""
    rows = [
        (partition.topic, partition.partition, reject.offset, reject.disposition.name.lower(), f"{reject.error_type}: {reject.error_text}")
        for partition, of_partition in rejects.items()
        for reject in of_partition
    ]
    return spark.createDataFrame(rows, "kafka_topic string, kafka_partition int, kafka_offset long, disposition string, error string")


def _collect(job: DataFrame) -> list[Any]:
    with translated():
        return _unpickle(bytes(row.answer) for row in job.collect())


def kafka_records(spark: SparkSession, connections: Connections, slices: Sequence[Slice], *, headers: bool = True) -> DataFrame:
    """Exactly the records of the slices, with the columns of `tidemark.worker.batches.input_schema`.

    Unpacking headers takes a twentieth of the total time. Without ``headers``, their column has the right type but is computed from
    `HEADERS_PLACEHOLDER`, which transforms do not get, so the plan shows whether it uses them (`reads_headers`). Reading them fails.
    """
    from pyspark.sql import functions as F

    def offsets(pick: Callable[[Slice], int]) -> str:
        by_topic: dict[str, dict[str, int]] = {}
        for part in slices:
            by_topic.setdefault(part.partition.topic, {})[str(part.partition.partition)] = pick(part)
        return json.dumps(by_topic)

    by_topic: dict[str, list[int]] = {}
    for part in slices:
        by_topic.setdefault(part.partition.topic, []).append(part.partition.partition)
    reader = spark.read.format("kafka").options(**SOURCE_OPTIONS)
    for name, value in jvm(connections.kafka).items():
        reader = reader.option(f"kafka.{name}", value)
    source = (
        reader.option("assign", json.dumps(by_topic))
        .option("startingOffsets", offsets(lambda part: part.start))
        .option("endingOffsets", offsets(lambda part: part.end))
        .option("includeHeaders", str(headers).lower())
        .load()
    )
    if not headers:
        missing = F.when(F.col(HEADERS_PLACEHOLDER).isNotNull(), F.raise_error(F.lit(HEADERS_ARE_MISSING)))
        source = source.withColumn("headers", missing.cast("array<struct<key: string, value: binary>>"))
    return source.select(*_input_columns(F))


def output_schema(spark: SparkSession, function: Callable[..., Any], schema: pa.Schema) -> dict[str, pa.Schema]:
    """The output schema of a Spark-form transform for each sink. Calls it with an empty DataFrame of ``schema``."""
    from pyspark.sql.pandas.types import from_arrow_schema

    require_spark_form()
    try:
        empty = spark.createDataFrame([], from_arrow_schema(schema))
    except ValueError as error:  # a decimal of more than 38 digits
        problem = f"Spark cannot hold a decoded field: {error}. Use the Arrow or the function form."
        raise TransformFailed(where="building its DataFrame", problem=problem) from error
    convert = arrow_schema()
    return {sink: convert(result.schema) for sink, result in _call_transform(function, empty).items()}


def rows_of(spark: SparkSession, function: Callable[..., Any], batch: pa.RecordBatch) -> dict[str, pa.Table]:
    """The rows that a Spark-form transform returns for these records, by sink. Raises `TransformFailed` or `SparkFailed`."""
    with lost_jvm(), translated():
        return {sink: result.toArrow() for sink, result in _call_transform(function, _to_frame(spark, batch)).items()}


def _to_frame(spark: SparkSession, batch: pa.RecordBatch) -> DataFrame:
    import pyarrow as pa

    return spark.createDataFrame(pa.Table.from_batches([batch])).select(*batch.schema.names)


def _input_columns(F: Any) -> list[Any]:
    names = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
    return [F.col(name) for name in names] + [F.col(name).alias(f"kafka_{name}") for name in ("topic", "partition", "offset")]


def _transform_records(function: Callable[..., Any], records: DataFrame) -> DataFrame:
    """The transform's result. With several sinks: the union of their rows, with `OF_SINK` and each sink's columns named by `column_of`."""
    from pyspark.sql import functions as F

    results = _call_transform(function, records)
    if list(results) == [ONLY]:
        return results[ONLY]
    ours = (*GIVEN, *OPTIONAL)
    tagged = [
        result.select(
            F.lit(sink).alias(OF_SINK),
            *(F.col(f"`{name}`").alias(name if name in ours else column_of(sink, name)) for name in result.columns),
        )
        for sink, result in results.items()
    ]
    return functools.reduce(lambda union, rows: union.unionByName(rows, allowMissingColumns=True), tagged)


def _call_transform(function: Callable[..., Any], records: DataFrame) -> dict[str, DataFrame]:
    """The transform's result for each sink. Raises `TransformFailed`."""
    from pyspark.sql import DataFrame

    where = "building its DataFrame"
    try:
        answer = function(records)
    except Exception as error:
        raise TransformFailed(where=where, problem=f"{type(error).__name__}: {message_of(error)}.") from error
    results = dict(answer) if isinstance(answer, Mapping) else {ONLY: answer}
    for result in results.values():
        if not isinstance(result, DataFrame):
            problem = f"it returned {type(result).__name__}; it must return a DataFrame, or a dict with one for each sink."
            raise TransformFailed(where=where, problem=problem)
    return results


def _idle(_function: Any, items: Iterator[Any]) -> Iterator[Any]:
    """Imports what a slice needs, including the transform. Waits briefly, so that each task gets its own worker."""
    import time

    import confluent_kafka  # noqa: F401
    import pyarrow.compute  # noqa: F401

    collect_less_garbage()
    time.sleep(0.2)
    yield from items


def _warm_reader(function: Any, kafka: dict[str, str], shares: Iterator[Sequence[Slice]]) -> Iterator[Any]:
    """Like `_idle`, but also connects to Kafka and reads the slices, without the transform."""
    for share in _idle(function, shares):
        for part in share:
            for chunk in read(kafka, part.partition, part.start, part.end):
                records(part, chunk)
    return iter(())


def _discard(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Reads everything and returns nothing."""
    for _ in batches:
        pass
    return iter(())


def packed(slices: Sequence[Slice], tasks: int) -> list[list[Slice]]:
    """Distributes the slices over at most ``tasks`` shares of about the same size. Each task has a fixed cost."""
    shares: list[tuple[int, int, list[Slice]]] = [(0, number, []) for number in range(min(tasks, len(slices)))]
    for part in sorted(slices, key=lambda part: part.start - part.end):
        size, number, share = heapq.heappop(shares)
        heapq.heappush(shares, (size + part.end - part.start, number, [*share, part]))
    return [share for _, _, share in shares]


def _worker_task(work: Work, isolate: bool, shares: Iterator[Sequence[Slice]]) -> Iterator[bytes]:
    with contextlib.closing(SliceWorker(work)) as worker:
        slices = list(itertools.chain.from_iterable(shares))
        for part, then in itertools.zip_longest(slices, slices[1:]):
            yield _answer(lambda part=part, then=then: worker.consume(part, then=then, isolate=isolate))  # type: ignore[misc]


def _decode_task(
    decoder: Decoder, dropped: Mapping[TopicPartition, Collection[int]], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Decodes the records of one partition. An error is a `ValueError` with the text `UNDECODABLE`: Spark transports only the text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in batches:
        if not batch.num_rows:
            continue
        excluded = dropped.get(TopicPartition(batch["topic"][0].as_py(), batch["partition"][0].as_py()))
        if excluded:
            batch = batch.filter(pc.invert(pc.is_in(batch["offset"], value_set=pa.array(sorted(excluded), pa.int64()))))
        if not batch.num_rows:
            continue
        try:
            decoded, errors = decoder.batch(batch)
        except SchemasMissing:
            raise ValueError(UNDECODABLE) from None
        if errors:
            raise ValueError(UNDECODABLE)
        yield decoded


def _scan_task(decoder: Decoder, kafka: dict[str, str], parts: Iterator[Slice]) -> Iterator[bytes]:
    for part in parts:
        yield _answer(lambda part=part: (part, undecodable(decoder, kafka, part)))  # type: ignore[misc]


def _direct_task(
    target: Target,
    kafka: dict[str, str],
    parts: Sequence[Slice],
    isolate: bool,
    unchanged: Sequence[str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Commits one of ``parts``, chosen by `ORDER`. The lineage in the rows is checked against it, never trusted."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    order = context.getLocalProperty(ORDER)
    assert order is not None
    part = parts[json.loads(order)[context.partitionId()]]

    def commit(_first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Receipt:
        outputs = (split_output(_add_unchanged(drop_mark(batch, part), part, unchanged), part) for batch in rest)
        return commit_slice(target, part, outputs, partial(payloads, kafka), isolate=isolate)

    return _answer_once(batches, commit)


def _add_unchanged(batch: pa.RecordBatch, part: Slice, unchanged: Sequence[str]) -> pa.RecordBatch:
    """Adds the lineage columns that the job did not send to Python, because the transform returned them unchanged."""
    import pyarrow as pa

    values = dict(zip(GIVEN, (pa.scalar(part.partition.topic), pa.scalar(part.partition.partition, pa.int32())), strict=False))
    for name in unchanged:
        batch = batch.append_column(name, pa.repeat(values[name], batch.num_rows))
    return batch


def _staging_task(
    target: Target, table: str, parts: Sequence[Slice], isolate: bool, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    return _answer_once(batches, lambda _first, rest: stage(target, table, parts, rest, isolate=isolate))


def _answer_once(
    batches: Iterator[pa.RecordBatch], act: Callable[[pa.RecordBatch, Iterator[pa.RecordBatch]], object]
) -> Iterator[pa.RecordBatch]:
    """Yields one answer for a task's rows. ``act`` gets the first batch, and an iterator over all of them.

    A task without rows yields nothing; the driver commits its slice as an empty one.
    """
    import pyarrow as pa

    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is not None:
        answer = _answer(lambda: act(first, itertools.chain([first], filled)))
        yield pa.RecordBatch.from_arrays([pa.array([answer], pa.binary())], names=["answer"])


def _answer(act: Callable[[], object]) -> bytes:
    """A task's result or error, pickled. An error that Spark transports arrives as text, without its class and attributes."""
    collect_less_garbage()
    try:
        return pickle.dumps(act())
    except TidemarkError as error:
        return pickle.dumps(error)


def _unpickle(answers: Iterable[bytes]) -> list[Any]:
    return [pickle.loads(answer) for answer in answers]  # noqa: S301 - pickled by our own tasks
