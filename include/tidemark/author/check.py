"""Checks a consumer before it runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark import migrations, project
from tidemark.author import noticed
from tidemark.author.describe import OutputUnknown, SparkSchema, TableComparison, common_layouts, compare, outputs_of
from tidemark.author.latest_records import TimeUp
from tidemark.author.try_records import LocalSpark, try_latest
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.consume.assignment import problems_of
from tidemark.consume.evolve import ColumnsRefused, require_owner
from tidemark.consume.renamed import require_own_rows
from tidemark.db import session, transaction
from tidemark.errors import BadInput, Refused, TidemarkError, Unavailable
from tidemark.kafka.cluster import Cleanup, Cluster, SettingUnknown, Topic, TopicsMissing
from tidemark.kafka.config import jvm
from tidemark.kafka.failures import NotAllowed
from tidemark.packages import optional, require
from tidemark.quality import load_suite, validated_view, validated_view_ddl
from tidemark.quality.view import hidden_groups
from tidemark.records.outcome import ONLY
from tidemark.retry.topics import ensure_topics, required_topics
from tidemark.sink.fit import Difference, SinkGuardsRows, SinkMismatch, SinkNoTable, create_ddl, data_fields, offers, read_table
from tidemark.sink.table import SinkHidden, SinkMissing
from tidemark.spec import ConsumerSpec, Problem, Sink, SpecInvalid
from tidemark.spec.files import groups_into
from tidemark.spec.model import OffsetReset
from tidemark.spec.problem import KeyPath
from tidemark.spec.user_transform import Form, Transform, load_permanent
from tidemark.values.fields import ColumnsUnknown, transform_of
from tidemark.worker.decoding import Decoding

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class CheckedTopic:
    """A topic and its cleanup policy, `None` if this client may not read the topic's settings."""

    topic: Topic
    cleanup: Cleanup | None


SLOW_IMPORT_S = 3.0
"""`check` warns about slower imports of a transform: a small run has a slice, and so an import, for each partition."""


@dataclass
class CheckReport:
    """The findings: ``problems`` in the consumer's file, ``errors`` in what it names, ``notes`` on parts that were not checked and on the
    latest records. ``missing``: the problems that are tables and topics which do not exist yet."""

    spec: ConsumerSpec
    transform: Transform | None = None
    topics: list[CheckedTopic] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    suites: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    errors: list[TidemarkError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ddl: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems and not self.errors


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a check uses besides the consumer's file. ``env`` names the servers. Without ``spark_schema``, the columns of the Spark form are
    not compared, because that starts Spark."""

    folders: Sequence[Path]
    spark_schema: SparkSchema | None
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)


def check(spec: ConsumerSpec, surroundings: Surroundings) -> CheckReport:
    """Checks the transform, suite, sink and topics of a consumer whose file is valid. Reports all mistakes at once.

    Parts that need a database or a broker are skipped if the environment names none; ``notes`` says so.
    """
    report = CheckReport(spec)
    for part in (
        _check_packages,
        _check_transform,
        _check_suite,
        _check_sink,
        _check_topics,
        _check_retry_topics,
        _check_rows,
        _check_views,
    ):
        try:
            with optional():
                part(report, surroundings)
        except SpecInvalid as error:
            report.problems += [problem for problem in error.problems if problem not in report.problems]
        except TidemarkError as error:
            report.errors.append(error)
    return report


TRIED_RECORDS = 200
TRIED_S = 5.0


def try_latest_records(report: CheckReport, surroundings: Surroundings, spark: LocalSpark) -> None:
    """Adds notes on what the latest records show. Not with a problem, without a broker, or in the Spark form, which needs a JVM."""
    if not report.ok or not report.topics or report.transform is None or report.transform.form is Form.SPARK:
        return
    try:
        trial = try_latest(report.spec, surroundings.folders, TRIED_RECORDS, spark, time.monotonic() + TRIED_S)
    except TimeUp:
        report.notes.append(f"the latest {TRIED_RECORDS} records were not tried, because they take more than {TRIED_S:g} s")
    except Unavailable as error:
        report.notes.append(f"the latest records were not tried: {error}")
    except TidemarkError as error:
        report.notes.append(f"the latest records cannot be loaded: {error}")
    else:
        report.notes += noticed.failures([(record.disposition, record.error_text) for record in trial.records])
        report.notes += trial.noticed


def sink_ddl(spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema, *, partitions: int | None = None) -> str:
    """The DDL of a consumer's tables, derived from its transform's output."""
    return ddl_of_all(spec, outputs_of(transform, spec.sinks, spark_schema, input_schema_of(spec)), partitions)


def input_schema_of(spec: ConsumerSpec, env: Mapping[str, str] = os.environ) -> pa.Schema:
    """The schema of the transform's input, from the schema registry if the consumer needs one. Raises what `Decoding` raises."""
    return Decoding(spec, registry_config(env), lambda: spec.topics or Cluster(kafka_config(env)).subscribed(spec)).input_schema()


def ddl_of_all(spec: ConsumerSpec, outputs: Mapping[str, pa.Schema], partitions: int | None) -> str:
    """The DDL of a consumer's tables for rows of these columns, in load order."""
    return "\n\n".join(ddl_of(spec, outputs[name], partitions, sink=name) for name in spec.sinks)


def ddl_of(spec: ConsumerSpec, output: pa.Schema, partitions: int | None = None, *, sink: str = ONLY) -> str:
    """The DDL of one of a consumer's tables for rows of these columns."""
    own = spec.sinks[sink]
    view = validated_view_ddl(own.table, groups_into(own.table, spec))
    return create_ddl(own, output, view, partitions)


def _check_packages(report: CheckReport, _: Surroundings) -> None:
    require(report.spec.extras)


def _check_transform(report: CheckReport, surroundings: Surroundings) -> None:
    since = time.monotonic()
    report.transform = transform_of(report.spec, surroundings.folders)
    load_permanent(report.spec, surroundings.folders)
    seconds = time.monotonic() - since
    if seconds > SLOW_IMPORT_S and report.transform.form is not Form.SPARK and report.spec.spark.shared:
        report.notes.append(
            f"importing the transform took {seconds:.0f} s: in the shared Spark application each slice of a small run imports it again; "
            "with spark: {shared: false} each worker imports it once"
        )


def _check_suite(report: CheckReport, _: Surroundings) -> None:
    for sink, suite in report.spec.suites.items():
        path = project.expectations() / f"{suite}.json"
        if path.is_file():
            report.suites[suite] = len(load_suite(path).expectations)
        else:
            fix = f"create {path.name} in {path.parent}, or correct the name"
            report.problems.append(report.spec.problem(("validation", "suites", sink), f'suite "{suite}" not found', fix))


def _check_sink(report: CheckReport, surroundings: Surroundings) -> None:
    if report.transform is None:
        return
    input_schema = input_schema_of(report.spec, surroundings.env)
    if surroundings.spark_schema is None and report.transform.form is Form.SPARK:
        _check_tables(report, surroundings)
        return
    cached_schema = _cache(surroundings.spark_schema or _no_spark)
    try:
        compared = _compare(report.spec, report.transform, cached_schema, input_schema, surroundings.env)
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        report.notes.append(f"sink not compared: {error.what} is not set")
        outputs = outputs_of(report.transform, report.spec.sinks, cached_schema, input_schema)
        report.columns = {name: [field.name for field in data_fields(output)] for name, output in outputs.items()}
        return
    for name, comparison in compared.items():
        table = report.spec.sinks[name].table
        if comparison.to_add:
            report.notes.append(f"a run adds to {table}: {', '.join(f'{column.name} {column.type}' for column in comparison.to_add)}")
        elif comparison.refused is not None:
            _refuse_table(report, name, comparison.refused)
        if isinstance(comparison.refused, SinkMissing):
            ddl = ddl_of(report.spec, outputs_of(report.transform, report.spec.sinks, cached_schema, input_schema)[name], sink=name)
            report.ddl = ddl if report.ddl is None else f"{report.ddl}\n\n{ddl}"
    if any(comparison.layout is None for comparison in compared.values()):
        return
    layouts = common_layouts(compared)
    report.columns = {layout.sink: [column.name for column in layout.columns] for layout in layouts}
    if not all(layout.by_record for layout in layouts):
        report.notes.append("the output has no lineage columns: its rows belong to whole batches, so a rewind can only undo whole batches")


def _refuse_table(report: CheckReport, sink: str, error: Refused) -> None:
    place = ("sinks", sink, "table")
    if isinstance(error, SinkMissing):
        _refuse_missing(report, place, str(error), "")
    else:
        report.problems.append(report.spec.problem(place, str(error), ""))


def _refuse_missing(report: CheckReport, place: KeyPath, message: str, fix: str) -> None:
    problem = report.spec.problem(place, message, fix)
    report.problems.append(problem)
    report.missing.append(problem)


def _no_spark(*_: object) -> Mapping[str, pa.Schema]:
    raise AssertionError("only the Spark form needs Spark")


def _check_tables(report: CheckReport, surroundings: Surroundings) -> None:
    """Checks what concerns the tables alone."""
    report.notes.append("columns not compared, because that starts Spark; `tidemark consumers check` does it")
    with contextlib.suppress(BadInput), session(database_url(surroundings.env)) as connection:
        for name, sink in report.spec.sinks.items():
            try:
                with transaction(connection) as cur:
                    read_table(cur, sink)
            except (SinkMissing, SinkHidden, SinkNoTable, SinkGuardsRows) as error:
                _refuse_table(report, name, error)


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Differences between a table and the rows for it. ``ok``: runs can load the table, perhaps after adding columns."""

    sink: Sink
    ok: bool
    differences: Sequence[Difference]


def sink_diff(spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema) -> dict[str, TableDiff]:
    """The differences between a consumer's tables and its current output, and columns that could be wider."""
    input_schema, cached_schema = input_schema_of(spec), _cache(spark_schema)
    compared = _compare(spec, transform, cached_schema, input_schema)
    try:
        outputs = outputs_of(transform, spec.sinks, cached_schema, input_schema)
    except (OutputUnknown, ColumnsUnknown):  # only the tables define the columns
        outputs = {}
    diffs = {}
    for name, comparison in compared.items():
        sink, refused = spec.sinks[name], comparison.refused
        differences = list(refused.differences) if isinstance(refused, SinkMismatch) else [Difference(str(refused))] if refused else []
        wider = offers(sink.table, comparison.columns, outputs[name]) if name in outputs else []
        differences += [difference for difference in wider if difference.ddl not in {present.ddl for present in differences}]
        diffs[name] = TableDiff(sink, comparison.layout is not None, differences)
    return diffs


def _compare(
    spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema, input_schema: pa.Schema, env: Mapping[str, str] = os.environ
) -> dict[str, TableComparison]:
    """Like `compare`, but refuses columns that this role may not add."""
    with session(database_url(env)) as connection:
        migrations.require_current(connection)
        compared = compare(transform, spec.sinks, connection, spark_schema, input_schema)
        for name, comparison in compared.items():
            if not comparison.to_add:
                continue
            try:
                with transaction(connection) as cur:
                    require_owner(cur, spec.sinks[name].table, comparison.to_add)
            except ColumnsRefused as error:
                compared[name] = replace(comparison, layout=None, refused=error)
    return compared


def _cache(spark_schema: SparkSchema) -> SparkSchema:
    """Calls Spark once and caches the answer."""
    schemas: list[Mapping[str, pa.Schema]] = []

    def cached(function: Callable[..., object], columns: pa.Schema) -> Mapping[str, pa.Schema]:
        if not schemas:
            schemas.append(spark_schema(function, columns))
        return schemas[0]

    return cached


def _check_views(report: CheckReport, surroundings: Surroundings) -> None:
    """Checks that the views of validated rows show the rows of all consumers of their tables."""
    if not report.columns:
        return
    with contextlib.suppress(BadInput), session(database_url(surroundings.env)) as connection, transaction(connection) as cur:
        for table in report.spec.table_names:
            groups = groups_into(table, report.spec)
            if hidden := hidden_groups(cur, table, groups):
                report.notes.append(f"{validated_view(table)} does not show the rows of group {', '.join(hidden)}: run the statement below")
                report.ddl = "\n".join(filter(None, (report.ddl, validated_view_ddl(table, groups))))


def _check_topics(report: CheckReport, surroundings: Surroundings) -> None:
    try:
        config = kafka_config(surroundings.env)
    except BadInput as error:
        if error.what != BOOTSTRAP_SERVERS:
            raise
        report.notes.append(f"topics not looked up: {error.what} is not set")
        return
    if report.transform is not None and report.transform.form is Form.SPARK:
        jvm(config)
    cluster = Cluster(config)
    names = list(cluster.subscribed(report.spec))
    if report.spec.topic_pattern and (left_out := [name for name in cluster.matching(report.spec.topic_pattern) if name not in names]):
        report.notes.append(f"not read, because they are retry or failed topics: {', '.join(left_out)}")
    if not names:
        report.problems.append(
            report.spec.problem(("topic_pattern",), f"it matches no topic on {cluster.servers}", "correct it, or create a matching topic")
        )
        return
    try:
        topics = cluster.topics(names)
    except TopicsMissing as error:
        for name in error.topics:
            message = f'topic "{name}" not found on {cluster.servers}'
            _refuse_missing(report, ("topics", names.index(name)), message, "create it, or correct the name")
        topics = cluster.topics(name for name in names if name not in error.topics)
    report.problems += problems_of(report.spec, topics)
    cleanups: Mapping[str, Cleanup] = {}
    try:
        cleanups = cluster.cleanups(topic.name for topic in topics)
    except (NotAllowed, SettingUnknown) as error:
        report.notes.append(f"settings of topics not looked up: {error}")
    report.topics = [CheckedTopic(topic, cleanups.get(topic.name)) for topic in topics]


def _check_rows(report: CheckReport, surroundings: Surroundings) -> None:
    """Checks that no other group has loaded the rows that the first run would load."""
    if not report.topics or not report.columns or report.spec.offset_reset is OffsetReset.LATEST:
        return
    with contextlib.suppress(BadInput), session(database_url(surroundings.env)) as connection, transaction(connection) as cur:
        require_own_rows(cur, report.spec, [checked.topic.name for checked in report.topics])


def _check_retry_topics(report: CheckReport, surroundings: Surroundings) -> None:
    """Checks the retry topics. Missing ones are not a problem if they are created on demand."""
    names = {checked.topic.name for checked in report.topics}
    if not names or not names.issuperset(report.spec.topics) or not report.spec.retry.delays:
        return
    create = report.spec.retry.topics.create
    existing = {
        retry.topic.name for retry in ensure_topics(Cluster(kafka_config(surroundings.env)), report.spec, now=True, missing_ok=create)
    }
    if missing := [topic.name for topic in required_topics(report.spec, now=True) if topic.name not in existing]:
        report.notes.append(f"retry topics to be created on demand: {', '.join(missing)}")
