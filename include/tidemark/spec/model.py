"""The keys of a consumer's file, with their types and defaults, as frozen values.

Checks of single values are attached to their types here. Rules that span several keys are in `rules`, messages for wrong types in
`explain`. The keys ``sink`` and ``suite``, for a consumer with one table, are entries of the mappings ``sinks`` and ``suites`` here
(`SHORT_FORMS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tidemark.records.outcome import ONLY
from tidemark.records.ranges import TopicPartition
from tidemark.spec import checks
from tidemark.spec.problem import KeyPath, Problem, SpecInvalid
from tidemark.spec.scope import Item, Ranges, Scope
from tidemark.spec.source import Source


class SinkMode(StrEnum):
    """See `Sink.mode`."""

    APPEND = "append"
    UPSERT = "upsert"


class Deletes(StrEnum):
    """See `Sink.deletes`."""

    REFUSE = "refuse"
    HARD = "hard"
    SOFT = "soft"


class Evolve(StrEnum):
    """See `Sink.evolve`."""

    NONE = "none"
    ADD = "add"


class OffsetReset(StrEnum):
    """What a reset skips is stored as a ``lost_range`` row."""

    EARLIEST = "earliest"
    """Start at the first record that still exists."""
    LATEST = "latest"
    """Start after the last record."""
    NONE = "none"
    """Refuse in both cases."""


class RunMode(StrEnum):
    """See `ConsumerSpec.run`."""

    BOUNDED = "bounded"
    CONTINUOUS = "continuous"


class Envelope(StrEnum):
    """The structure around the row in a value."""

    DEBEZIUM = "debezium"
    """Change data: the row before and after the change, the operation and its source."""


class RetryOrder(StrEnum):
    """See `RetrySettings.order`."""

    NONE = "none"
    KEY = "key"


class OnFailure(StrEnum):
    """See `Validation.on_failure`."""

    BLOCK = "block"
    REPORT = "report"
    REWIND = "rewind"


class Approval(StrEnum):
    """See `RewindSettings.approval`."""

    REQUIRED = "required"
    NONE = "none"


class Encoding(StrEnum):
    """The encoding of a key or value."""

    BYTES = "bytes"
    """Bytes that the transform interprets."""
    STRING = "string"
    """Text in UTF-8."""
    JSON = "json"
    """JSON in UTF-8."""
    JSON_SCHEMA = "json_schema"
    """JSON in UTF-8, after the id of its JSON Schema."""
    AVRO = "avro"
    """Avro: with the id of its schema in the registry, or of one schema file."""
    PROTOBUF = "protobuf"
    """Protobuf, likewise."""


Duration = Annotated[timedelta, BeforeValidator(checks.duration)]
PositiveTime = Annotated[Duration, AfterValidator(checks.positive_time)]
Text = Annotated[str, AfterValidator(checks.non_blank)]
Tag = Annotated[str, AfterValidator(checks.non_blank), Field(max_length=100)]  # airflow.models.dag.TAG_MAX_LEN
Role = Annotated[str, AfterValidator(checks.role_name)]
FieldPath = Annotated[str, AfterValidator(checks.path)]
ConnectionId = Annotated[str, AfterValidator(checks.connection_id)]
_NOT_NULL = BeforeValidator(checks.not_null)


class _Part(BaseModel):
    """Strict and frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=False)


class Sink(_Part):
    """The table that the rows are loaded into."""

    table: Annotated[str, AfterValidator(checks.table_name)]
    """``schema.table``. The schema defaults to ``public``."""
    mode: Annotated[SinkMode, Field(strict=False)] = SinkMode.APPEND
    """``append``: each batch adds rows. ``upsert``: the last record of a key wins."""
    key: tuple[Annotated[str, AfterValidator(checks.column_name)], ...] = ()
    """The columns that identify a row. Only with ``mode: upsert``."""
    deletes: Annotated[Deletes, Field(strict=False)] = Deletes.REFUSE
    """The effect of a deleting record: ``hard`` removes the row of its key, ``soft`` sets the row's column ``kafka_deleted``, ``refuse``
    fails the record. Only with ``mode: upsert``."""
    evolve: Annotated[Evolve, Field(strict=False)] = Evolve.NONE
    """The reaction of a run to missing columns in the table: ``add`` adds them, nullable, before the first commit; ``none`` refuses the
    run. A run never drops a column or changes its type."""
    error_detail: bool = False
    """Whether a failed record's error text may quote values of its rows: Postgres' DETAIL, and a value that does not fit its column."""


class Format(_Part):
    """The encoding of keys and values, which are decoded before the transform. See ``docs/formats.md``."""

    value: Annotated[Encoding, Field(strict=False)] = Encoding.BYTES
    """``bytes``, ``string``, ``json``, ``json_schema``, ``avro`` or ``protobuf``."""
    key: Annotated[Encoding, Field(strict=False)] = Encoding.BYTES
    """As ``value``."""
    value_schema: Annotated[Annotated[str, AfterValidator(checks.schema_file)] | None, _NOT_NULL] = None
    """A file in ``include/schemas`` with the schema of all values: ``.avsc`` or ``.proto``. None: the registry has the schemas."""
    key_schema: Annotated[Annotated[str, AfterValidator(checks.schema_file)] | None, _NOT_NULL] = None
    """As ``value_schema``, for the keys."""
    value_message: Annotated[Text | None, _NOT_NULL] = None
    """The full name of the values' Protobuf message. None: the first one of the schema."""
    key_message: Annotated[Text | None, _NOT_NULL] = None
    """As ``value_message``, for the keys."""
    envelope: Annotated[Annotated[Envelope, Field(strict=False)] | None, _NOT_NULL] = None
    """``debezium``: the values are change data, whose rows are loaded and deleted. See ``docs/changes.md``."""
    placeholder: Annotated[Text | None, _NOT_NULL] = None
    """Debezium's ``unavailable.value.placeholder``, if the connector does not use the default. Such a value fails its record."""

    @property
    def uses_registry(self) -> bool:
        encodings = (self.value if self.value_schema is None else None, self.key if self.key_schema is None else None)
        return Encoding.AVRO in encodings or Encoding.PROTOBUF in encodings


class ConnectionIds(_Part):
    """Ids of the Airflow connections that hold addresses and credentials."""

    postgres: ConnectionId = "tidemark_postgres"
    """The database with the sink and the schema ``tidemark``."""
    kafka: ConnectionId = "tidemark_kafka"
    """The brokers. All settings are in the connection's extra."""
    spark: ConnectionId = "tidemark_spark"
    """Spark's master. Settings are under ``conf`` in the extra."""
    registry: ConnectionId = "tidemark_registry"
    """The schema registry, an HTTP connection. Only used if ``format`` needs one."""


class BreakerSettings(_Part):
    """A limit on failures in a slice. A slice that exceeds it is abandoned, and nothing of it is stored."""

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Maximum share of a slice's records that may be handed to retry or failed."""
    minimum: Annotated[int, Field(ge=1)] = 100
    """``ratio`` does not apply to slices with fewer records."""


class RetryTopics(_Part):
    """How the retry topics and the failed topic are created."""

    partitions: Annotated[int, Field(ge=1)] = 1
    """Number of partitions of each created topic."""
    replication: Annotated[int, Field(ge=1)] | None = None
    """Replication factor. None: the broker's default."""
    create: bool = True
    """Whether the relay creates missing topics."""


class RetrySettings(_Part):
    """Settings for retries of failed records."""

    delays: tuple[PositiveTime, ...] = ()
    """How long a failed record waits before each retry."""
    budget: PositiveTime | None = None
    """No retry starts later than this after the record's first failure. None: only the delays limit retries."""
    per_second: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of records per second that a drain retries. None: no limit."""
    breaker: Annotated[BreakerSettings | None, _NOT_NULL] = None
    order: Annotated[RetryOrder, Field(strict=False)] = RetryOrder.NONE
    """``key``: while a record waits, later records of its key are held. ``none``: they are loaded."""
    max_held: Annotated[int, Field(ge=1)] = 10_000
    """Maximum number of held records per partition with ``order: key``. A slice that would hold more is abandoned."""
    topics: RetryTopics = RetryTopics()
    permanent: tuple[Annotated[str, AfterValidator(checks.exception_name)], ...] = ()
    """Exceptions of a function transform that mean ``fail`` instead of ``retry``: ``ValueError``, ``module.Class``."""


class Batch(_Part):
    """Limits of a batch and of a run."""

    max_records: Annotated[int, Field(ge=1, le=10_000_000)] = 500_000
    """Maximum number of records that are read in one batch, over all partitions."""
    max_failed_records: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of records that a run may hand to retry or failed before it stops. None: no limit."""


class Validation(_Part):
    """Validation with Great Expectations. If omitted, only the conservation check runs."""

    suites: Mapping[str, Annotated[str, AfterValidator(checks.suite_name)]] = Field(default_factory=dict)
    """With ``sinks``: the suite of each sink. Sinks without a suite pass."""
    on_failure: Annotated[OnFailure, Field(strict=False)] = OnFailure.BLOCK
    """The reaction to a failed critical expectation. ``block``: nothing is published; the rows stay, and the validated offset stops
    before them. ``report``: the asset event is published anyway. ``rewind``: as ``block``, and the run is rewound once, including its rows,
    so that the next run reads it again."""


class Objectives(_Part):
    """A consumer's objectives. The DAG ``watch`` fails the consumer's task once when one is missed. At least one is required."""

    lag: PositiveTime | None = None
    """Maximum age of the first record that is not yet committed."""
    failed: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of failed records that are neither redriven nor discarded."""
    freshness: PositiveTime | None = None
    """Maximum time for which a partition's records wait without a commit, or without a check of whether they wait."""


class RewindSettings(_Part):
    """Approval of rewinds in Airflow, and the limit of rewinds beside."""

    approval: Annotated[Approval, Field(strict=False)] = Approval.REQUIRED
    """Whether a person must approve a rewind planned in Airflow."""
    own: bool = True
    """Whether the requester of a rewind may approve it."""
    max_beside_rows: Annotated[int, Field(ge=1)] = 100_000_000
    """Maximum rows that a rewind beside may replace. Until its swap, they are stored twice."""


class Access(_Part):
    """Who may use the consumer's DAGs: roles of Airflow's auth manager. Administrators always may. See ``docs/security.md``."""

    edit: tuple[Role, ...] = ()
    """Roles that may start, pause, clear and mark runs, rewind and redrive, and answer approvals. They may also do what ``view`` allows."""
    view: tuple[Role, ...] = ()
    """Roles that may see the DAGs, their runs, logs and XComs."""


class AirflowSettings(_Part):
    """Settings of the consumer's DAG and its tasks."""

    owner: Annotated[Text, Field(max_length=500)] = "tidemark"  # airflow.models.log.Log.owner
    """The owner of the DAG's tasks, as Airflow shows it."""
    tags: tuple[Tag, ...] = ()
    """The DAG's tags, in addition to ``tidemark`` and ``consume``."""
    retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Number of retries of each task."""
    retry_delay: Duration = timedelta(seconds=30)
    """Delay before the first retry. It doubles with each further retry, up to 5 minutes."""
    execution_timeout: PositiveTime | None = None
    """Maximum duration of a try of the task ``consume``. None: no limit."""
    pool: Annotated[Text, Field(max_length=256)] | None = None
    """The Airflow pool of the tasks. None: Airflow's default pool."""


class SparkSettings(_Part):
    """Settings of the consumer's Spark applications."""

    conf: Mapping[str, Annotated[str, BeforeValidator(checks.spark_value)]] = Field(default_factory=dict)
    """Additional Spark settings, by name."""
    shared: bool = True
    """Whether small runs that Airflow starts share one Spark application. A consumer with settings in ``conf`` always has its own."""


class ConsumerSpec(_Part):
    """One consumer as its file declares it, with every default filled in.

    ``name`` is the file's stem, ``source`` is the file itself, and ``only`` narrows one run; these are not keys of the file. Exactly one of
    ``topics`` and ``topic_pattern`` is set (the other is empty or None).
    """

    name: str
    source: Annotated[Source, Field(repr=False, exclude=True)]
    only: Annotated[Scope, Field(exclude=True)] = Scope()
    """The partitions that one run reads (``consume --partition``)."""

    group: Annotated[str, AfterValidator(checks.group_id)]
    """The consumer group. Its positions are stored under this name."""
    description: Annotated[str | None, _NOT_NULL] = None
    """A description, which Airflow shows with the DAG."""
    topics: tuple[Annotated[str, AfterValidator(checks.topic_name)], ...] = ()
    """The topics to read. Exactly one of this and ``topic_pattern`` is required."""
    topic_pattern: Annotated[Annotated[str, AfterValidator(checks.topic_pattern)] | None, _NOT_NULL] = None
    """A Python regular expression that must match the whole topic name."""
    partitions: Annotated[Mapping[str, Annotated[Ranges, BeforeValidator(checks.partition_numbers)]] | None, _NOT_NULL] = None
    """Fixed partitions, as in Kafka's ``assign``. None: all partitions, including those added later."""
    format: Format = Format()
    transform: Annotated[Annotated[str, AfterValidator(checks.transform_name)] | None, _NOT_NULL] = None
    """``module:function``. See `tidemark.transform`. None: the fields of the value become columns of the same names."""
    columns: Mapping[Annotated[str, AfterValidator(checks.column_name)], FieldPath] = Field(default_factory=dict)
    """Without ``transform``: columns whose field has another name, such as ``country: place.country``, ``$key`` or ``$timestamp``; for
    change data, also ``$change.source.ts_ms``."""
    drop: tuple[FieldPath, ...] = ()
    """Without ``transform``: fields that do not become columns."""
    skip_if: Mapping[FieldPath, Annotated[Any, AfterValidator(checks.alternatives)]] = Field(default_factory=dict)
    """Without ``transform``: skips records in which each of these fields has its value, or one of its values, listed here."""
    flatten: Annotated[Text | None, _NOT_NULL] = None
    """Without ``transform``: fields of nested records become columns, with this text between the names. None: a nested record becomes one
    JSON column."""
    sinks: Mapping[str, Sink] = Field(default_factory=dict)
    """Several tables, by the transform's names for them. A batch loads them in this order, in one transaction."""
    mirror: bool = False
    """Whether positions are also published to Kafka under the group's name, for Kafka's tools. Nothing reads them back."""
    connections: ConnectionIds = ConnectionIds()
    retry: RetrySettings = RetrySettings()
    offset_reset: Annotated[Annotated[OffsetReset, Field(strict=False)] | None, _NOT_NULL] = None
    """Where to read if a partition has no position yet, or its position is out of range, as with Kafka's ``auto.offset.reset``. None: a
    partition without a position starts at its earliest record, and a position out of range is refused."""
    assignment: tuple[Annotated[str, AfterValidator(checks.assignor)], ...] = ("cooperative-sticky",)
    """Assignment strategies in order of preference."""
    members: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of Spark applications that share the group."""
    listeners: tuple[Annotated[str, AfterValidator(checks.listener)], ...] = ()
    """``module:Class`` of each user-defined `tidemark.group.listener.RebalanceListener`."""
    run: Annotated[RunMode, Field(strict=False)] = RunMode.BOUNDED
    """``bounded``: a run reads what is in the topics when it starts, then ends. ``continuous``: it reads for ``run_for``, then until the
    next run has taken over."""
    run_for: PositiveTime = timedelta(minutes=15)
    """How long a continuous run lasts, and how often one starts."""
    batch: Batch = Batch()
    schedule: Annotated[str, AfterValidator(checks.schedule)] | None = None
    """Five cron fields or one of Airflow's presets. None: runs are started manually."""
    timezone: Annotated[str, AfterValidator(checks.timezone)] | None = None
    """The schedule's time zone, by its name in the IANA database. None: Airflow's ``core.default_timezone``."""
    validation: Annotated[Validation | None, _NOT_NULL] = None
    slo: Annotated[Objectives | None, _NOT_NULL] = None
    """Objectives that the DAG ``watch`` checks. None: it does not check the consumer."""
    rewind: RewindSettings = RewindSettings()
    access: Annotated[Access | None, _NOT_NULL] = None
    """None: Airflow's permissions apply, until another consumer has this key; then administrators only."""
    airflow: AirflowSettings = AirflowSettings()
    spark: SparkSettings = SparkSettings()

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(sink.table for sink in self.sinks.values())

    @property
    def evolving(self) -> tuple[str, ...]:
        """The tables to which runs may add columns."""
        return tuple(sink.table for sink in self.sinks.values() if sink.evolve is Evolve.ADD)

    @property
    def keys(self) -> Mapping[str, tuple[str, ...]]:
        """The key columns of each table, in load order; none for an append sink."""
        return {sink.table: sink.key for sink in self.sinks.values()}

    @property
    def shown_tables(self) -> str:
        """Table names for display."""
        return ", ".join(self.table_names)

    @property
    def upserts(self) -> bool:
        """Whether a later record may replace a row in one of the tables."""
        return any(sink.key for sink in self.sinks.values())

    @property
    def suites(self) -> Mapping[str, str]:
        """The suite of each sink that has one."""
        return {} if self.validation is None else self.validation.suites

    @property
    def extras(self) -> list[str]:
        """The extras of Tidemark's distribution that its driver and its validation need."""
        encodings = {self.format.key, self.format.value}
        needed = {
            "driver": True,
            "avro": Encoding.AVRO in encodings,
            "protobuf": Encoding.PROTOBUF in encodings,
            "registry": self.format.uses_registry,
            "quality": bool(self.suites),
        }
        return [extra for extra, is_needed in needed.items() if is_needed]

    @property
    def fixed(self) -> Scope:
        """The partitions that the file fixes; empty (everything) without ``partitions``."""
        return Scope(tuple(Item(topic, numbers) for topic, numbers in (self.partitions or {}).items()))

    def __hash__(self) -> int:
        return hash((self.name, self.group))

    def names(self, partition: TopicPartition) -> bool:
        """Whether the file names this partition, or matches its topic. Positions of others are leftovers of earlier specs."""
        by_name = partition.topic in self.topics or bool(self.topic_pattern and re.fullmatch(self.topic_pattern, partition.topic))
        return by_name and self.fixed.covers(partition)

    def problem(self, path: KeyPath, message: str, fix: str) -> Problem:
        """A problem detected after loading, at the value of ``path`` in the model: ``spec.problem(("topics", 1), ...)``."""
        return self.source.problem(in_file(path), message, fix)

    def invalid(self, *problems: Problem) -> SpecInvalid:
        """The error that reports these problems of this consumer."""
        return SpecInvalid(consumers=(self.name,), problems=tuple(sorted(problems, key=lambda problem: (problem.line, problem.column))))


FILLED_IN = ("name", "source", "only")
"""Fields of `ConsumerSpec` that are not keys of the file."""


@dataclass(frozen=True, slots=True)
class ShortForm:
    """A key of the file for a consumer with one table. The model has its value in the mapping ``several``, under the name `ONLY`."""

    key: str
    several: str
    type: Any
    meaning: str


SHORT_FORMS: Mapping[type[BaseModel], ShortForm] = {
    ConsumerSpec: ShortForm("sink", "sinks", Sink, "The table, if there is only one. Exactly one of this and ``sinks`` is required."),
    Validation: ShortForm(
        "suite", "suites", str, "The suite's file in ``include/expectations``, without its extension. Required with ``sink``."
    ),
}


def keys_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The keys of a mapping in the file, with their types."""
    keys: dict[str, Any] = {}
    short = SHORT_FORMS.get(kind)
    for name, key_field in kind.model_fields.items():
        if short is not None and name == short.several:
            keys[short.key] = short.type
        if kind is not ConsumerSpec or name not in FILLED_IN:
            keys[name] = key_field.annotation
    return keys


def written_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file as fields of the model: without short forms."""
    fields = _written_out(data, SHORT_FORMS[ConsumerSpec])
    if isinstance(validation := data.get("validation"), Mapping):
        fields["validation"] = _written_out(validation, SHORT_FORMS[Validation])
    return fields


def _written_out(keys: Mapping[str, Any], short: ShortForm) -> dict[str, Any]:
    fields = {name: value for name, value in keys.items() if name != short.key}
    several = fields.get(short.several, {})
    if short.key in keys and isinstance(several, Mapping):
        fields[short.several] = {ONLY: keys[short.key], **several}
    return fields


def in_file(path: KeyPath) -> KeyPath:
    """Where the file has the value at this path of the model."""
    match path:
        case ("sinks", "", *rest):
            return ("sink", *rest)
        case ("validation", "suites", ""):
            return ("validation", "suite")
    return path
