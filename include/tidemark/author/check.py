"""Checks a consumer before it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark import migrations, project
from tidemark.author.describe import Compared, OutputUnknown, SparkSchema, agreed, compare, outputs_of
from tidemark.connections import DATABASE_URL, database_url, kafka_config, registry_config
from tidemark.consume.assignment import problems_of
from tidemark.consume.evolve import ColumnsRefused, require_owner
from tidemark.consume.renamed import require_own_rows
from tidemark.db import session, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.kafka.cluster import Cleanup, Cluster, Setting, Topic, TopicsMissing, cleanup_of
from tidemark.kafka.failures import NotAllowed
from tidemark.quality import load_suite, validated_view, validated_view_ddl
from tidemark.quality.view import hidden_groups
from tidemark.records.outcome import ONLY
from tidemark.retry.topics import ensure_topics, wanted
from tidemark.sink.table import Difference, SinkMismatch, SinkMissing, create_ddl, data_fields, offers
from tidemark.spec import ConsumerSpec, Problem, Sink, SpecInvalid
from tidemark.spec.files import groups_into
from tidemark.spec.model import Deletes, OffsetReset
from tidemark.spec.user_transform import Form, Transform, load_permanent
from tidemark.values.fields import ColumnsUnknown, transform_of
from tidemark.worker.decoding import Decoding

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TopicFound:
    """``cleanup``: `None` if this client may not read the topic's settings."""

    topic: Topic
    cleanup: Cleanup | None


SLOW_IMPORT_S = 3.0
"""`check` mentions a transform whose import takes longer: a small run has a slice, and so an import, for each partition."""


@dataclass
class CheckReport:
    """The findings: ``problems`` in the consumer's file, ``errors`` in what it names, ``notes`` on what could not be checked."""

    spec: ConsumerSpec
    transform: Transform | None = None
    topics: list[TopicFound] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)
    suites: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    errors: list[TidemarkError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ddl: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems and not self.errors


def check(spec: ConsumerSpec, folders: Sequence[Path], spark_schema: SparkSchema) -> CheckReport:
    """Checks the transform, suite, sink and topics of a consumer whose file is valid. Reports all mistakes at once.

    Parts that need a database or a broker are skipped if the environment names none; ``notes`` says so.
    """
    report = CheckReport(spec)
    for part in (_check_transform, _check_suite, _check_sink, _check_topics, _check_retry_topics, _check_rows, _check_views):
        try:
            part(report, folders, spark_schema)
        except SpecInvalid as error:
            report.problems += [problem for problem in error.problems if problem not in report.problems]
        except TidemarkError as error:
            report.errors.append(error)
    return report


def sink_ddl(spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema, *, partitions: int | None = None) -> str:
    """The DDL of a consumer's tables, derived from its transform's output."""
    return ddl_of_all(spec, outputs_of(transform, spec.tables, spark_schema, _given(spec)), partitions)


def _given(spec: ConsumerSpec) -> pa.Schema:
    """The columns that the transform gets. Asks the schema registry, if the consumer needs one. Raises what `Decoding` raises."""
    return Decoding(spec, registry_config(), lambda: spec.topics or Cluster(kafka_config()).subscribed(spec)).input_schema()


def ddl_of_all(spec: ConsumerSpec, outputs: Mapping[str, pa.Schema], partitions: int | None = None) -> str:
    """The DDL of a consumer's tables for rows of these columns, in load order."""
    return "\n\n".join(ddl_of(spec, outputs[name], partitions, sink=name) for name in spec.tables)


def ddl_of(spec: ConsumerSpec, output: pa.Schema, partitions: int | None = None, *, sink: str = ONLY) -> str:
    """The DDL of one of a consumer's tables for rows of these columns."""
    own = spec.tables[sink]
    view = validated_view_ddl(own.table, groups_into(own.table, spec))
    return create_ddl(own.table, output, view, key=own.key, soft=own.deletes is Deletes.SOFT, partitions=partitions)


def _check_transform(report: CheckReport, folders: Sequence[Path], _schema: SparkSchema) -> None:
    since = time.monotonic()
    report.transform = transform_of(report.spec, folders)
    load_permanent(report.spec, folders)
    seconds = time.monotonic() - since
    if seconds > SLOW_IMPORT_S and report.transform.form is not Form.SPARK and report.spec.spark.shared:
        report.notes.append(
            f"importing the transform took {seconds:.0f} s: in the shared Spark application each slice of a small run imports it again; "
            "with spark: {shared: false} each worker imports it once"
        )


def _check_suite(report: CheckReport, _folders: Sequence[Path], _schema: SparkSchema) -> None:
    for sink, suite in report.spec.suites.items():
        path = project.expectations() / f"{suite}.json"
        if path.is_file():
            report.suites[suite] = len(load_suite(path).expectations)
        else:
            fix = f"create {path.name} in {path.parent}, or correct the name"
            place = ("validation", "suite") if sink == ONLY else ("validation", "suites", sink)
            report.problems.append(report.spec.problem(place, f'suite "{suite}" not found', fix))


def _check_sink(report: CheckReport, _folders: Sequence[Path], spark_schema: SparkSchema) -> None:
    if report.transform is None:
        return
    given = _given(report.spec)
    once = _once(spark_schema)
    try:
        compared = _compared(report.spec, report.transform, once, given)
    except BadInput as error:
        if error.what != DATABASE_URL:
            raise
        report.notes.append(f"sink not compared: {error.what} is not set")
        outputs = outputs_of(report.transform, report.spec.tables, once, given)
        report.columns = {name: [field.name for field in data_fields(output)] for name, output in outputs.items()}
        return
    for name, each in compared.items():
        table = report.spec.tables[name].table
        if each.to_add:
            report.notes.append(f"a run adds to {table}: {', '.join(f'{column.name} {column.type}' for column in each.to_add)}")
        elif each.refused is not None:
            report.problems.append(report.spec.problem(("sinks", name, "table") if name else ("sink", "table"), str(each.refused), ""))
        if isinstance(each.refused, SinkMissing):
            made = ddl_of(report.spec, outputs_of(report.transform, report.spec.tables, once, given)[name], sink=name)
            report.ddl = made if report.ddl is None else f"{report.ddl}\n\n{made}"
    if any(each.layout is None for each in compared.values()):
        return
    layouts = agreed(compared)
    report.columns = {layout.sink: [column.name for column in layout.columns] for layout in layouts}
    if not all(layout.by_record for layout in layouts):
        report.notes.append("the output has no lineage columns: its rows belong to whole batches, so a rewind can only undo whole batches")


@dataclass(frozen=True, slots=True)
class TableDiff:
    """What is between a table and what would be written to it. ``ok``: runs load it, maybe after adding columns."""

    sink: Sink
    ok: bool
    differences: Sequence[Difference]


def sink_diff(spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema) -> dict[str, TableDiff]:
    """The differences between a consumer's tables and what its transform or schema returns now, and what could be wider."""
    given, once = _given(spec), _once(spark_schema)
    compared = _compared(spec, transform, once, given)
    try:
        outputs = outputs_of(transform, spec.tables, once, given)
    except (OutputUnknown, ColumnsUnknown):  # only the tables say which columns there are
        outputs = {}
    found = {}
    for name, each in compared.items():
        sink, refused = spec.tables[name], each.refused
        differences = list(refused.differences) if isinstance(refused, SinkMismatch) else [Difference(str(refused))] if refused else []
        wider = offers(sink.table, each.columns, outputs[name]) if name in outputs else []
        differences += [one for one in wider if one.ddl not in {known.ddl for known in differences}]
        found[name] = TableDiff(sink, each.layout is not None, differences)
    return found


def _compared(spec: ConsumerSpec, transform: Transform, spark_schema: SparkSchema, given: pa.Schema) -> dict[str, Compared]:
    """As `compare`. Columns that this role may not add are refused."""
    with session(database_url()) as connection:
        migrations.require_current(connection)
        compared = compare(transform, spec.tables, connection, spark_schema, given)
        for name, each in compared.items():
            if not each.to_add:
                continue
            try:
                with transaction(connection) as cur:
                    require_owner(cur, spec.tables[name].table, each.to_add)
            except ColumnsRefused as error:
                compared[name] = replace(each, layout=None, refused=error)
    return compared


def _once(spark_schema: SparkSchema) -> SparkSchema:
    """Asks Spark once."""
    asked: list[Mapping[str, pa.Schema]] = []

    def once(function: Callable[..., object], columns: pa.Schema) -> Mapping[str, pa.Schema]:
        if not asked:
            asked.append(spark_schema(function, columns))
        return asked[0]

    return once


def _check_views(report: CheckReport, _folders: Sequence[Path], _schema: SparkSchema) -> None:
    """Whether the views of validated rows show the rows of all consumers of their tables."""
    if not report.columns:
        return
    with contextlib.suppress(BadInput), session(database_url()) as connection, transaction(connection) as cur:
        for table in report.spec.table_names:
            groups = groups_into(table, report.spec)
            if hidden := hidden_groups(cur, table, groups):
                report.notes.append(f"{validated_view(table)} does not show the rows of group {', '.join(hidden)}: run the statement below")
                report.ddl = "\n".join(filter(None, (report.ddl, validated_view_ddl(table, groups))))


def _check_topics(report: CheckReport, _folders: Sequence[Path], _schema: SparkSchema) -> None:
    try:
        config = kafka_config()
    except BadInput as error:
        report.notes.append(f"topics not looked up: {error.what}: {error.found}".replace(": it is not set", " is not set"))
        return
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
            report.problems.append(report.spec.problem(("topics", names.index(name)), message, "create it, or correct the name"))
        topics = cluster.topics(name for name in names if name not in error.topics)
    report.problems += problems_of(report.spec, topics)
    settings: Mapping[str, Mapping[str, Setting]] = {}
    try:
        settings = cluster.settings(topic.name for topic in topics)
    except NotAllowed as error:
        report.notes.append(f"settings of topics not looked up: {error}")
    report.topics = [TopicFound(topic, cleanup_of(settings[topic.name]) if settings else None) for topic in topics]


def _check_rows(report: CheckReport, _folders: Sequence[Path], _schema: SparkSchema) -> None:
    """Whether another group has loaded what the first run would read."""
    if not report.topics or not report.columns or report.spec.offset_reset is OffsetReset.LATEST:
        return
    with contextlib.suppress(BadInput), session(database_url()) as connection, transaction(connection) as cur:
        require_own_rows(cur, report.spec, [found.topic.name for found in report.topics])


def _check_retry_topics(report: CheckReport, _folders: Sequence[Path], _schema: SparkSchema) -> None:
    """Missing topics are not a problem if they are created on demand."""
    known = {found.topic.name for found in report.topics}
    if not known or not known.issuperset(report.spec.topics) or not report.spec.retry.delays:
        return
    create = report.spec.retry.topics.create
    found = {one.topic.name for one in ensure_topics(Cluster(kafka_config()), report.spec, now=True, missing_ok=create)}
    if missing := [one.name for one in wanted(report.spec, now=True) if one.name not in found]:
        report.notes.append(f"retry topics to be created on demand: {', '.join(missing)}")
