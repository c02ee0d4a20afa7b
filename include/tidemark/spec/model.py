"""What a consumer's file may say: the keys, their types and their defaults, as frozen values.

Checks of one value hang on its type here; what spans several keys is in `rules`, the words for a wrong type are in `explain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, RootModel

from tidemark.spec import checks
from tidemark.spec.problem import KeyPath, Problem, SpecInvalid
from tidemark.spec.scope import Item, Ranges, Scope
from tidemark.spec.source import Source


class SinkMode(StrEnum):
    APPEND = "append"
    """Each batch adds rows."""
    UPSERT = "upsert"
    """The last record of a key wins."""


class OffsetReset(StrEnum):
    """Where to go on when there is no position to go on from. As Kafka's ``auto.offset.reset`` it is used where a partition has no
    position yet, and where its position is out of range. What a reset skips is stored as a ``lost_range`` row.

    Left out (None): a partition without a position starts at its earliest record, and a position out of range is refused.
    """

    EARLIEST = "earliest"
    """Go on at the first record that is still there."""
    LATEST = "latest"
    """Go on behind the last record."""
    NONE = "none"
    """Refuse both."""


class RunMode(StrEnum):
    BOUNDED = "bounded"
    """Read up to the end offsets seen at the start, then end."""
    CONTINUOUS = "continuous"
    """Read what comes for a time, then until the next run has taken over."""


class Order(StrEnum):
    """In which order records are tried again."""

    NONE = "none"
    KEY = "key"
    """While a record waits, later ones of its key are held."""


class OnFailure(StrEnum):
    """What a failed critical expectation does."""

    BLOCK = "block"
    """Nothing is published; the rows stay, and the validated offset stops before them."""
    REPORT = "report"
    """It is said, and published all the same."""
    REWIND = "rewind"
    """As ``block``, and the group is moved back to before the run, with its rows, so that the next run reads it again; once."""


class Approval(StrEnum):
    """Does a rewind that was planned in Airflow wait for a person?"""

    REQUIRED = "required"
    NONE = "none"


Duration = Annotated[timedelta, BeforeValidator(checks.duration)]
SomeTime = Annotated[Duration, AfterValidator(checks.some_time)]
Text = Annotated[str, AfterValidator(checks.some_text)]
Tag = Annotated[str, AfterValidator(checks.some_text), Field(max_length=100)]  # airflow.models.dag.TAG_MAX_LEN
ConnectionId = Annotated[str, AfterValidator(checks.connection_id)]
_GIVEN = BeforeValidator(checks.given)


class _Part(BaseModel):
    """Strict, frozen, and nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=False)


class Sink(_Part):
    table: Annotated[str, AfterValidator(checks.table_name)]
    """``schema.table``, the schema always written out."""
    mode: Annotated[SinkMode, Field(strict=False)] = SinkMode.APPEND
    key: tuple[Annotated[str, AfterValidator(checks.column_name)], ...] = ()
    """The columns that an upsert finds the row by; empty for append."""

    @property
    def schema_name(self) -> str:
        return self.table.split(".")[0]

    @property
    def table_name(self) -> str:
        return self.table.split(".")[1]


class Connections(_Part):
    """Ids of the Airflow connections that hold addresses and credentials."""

    postgres: ConnectionId = "tidemark_postgres"
    kafka: ConnectionId = "tidemark_kafka"
    spark: ConnectionId = "tidemark_spark"


class Breaker(_Part):
    """From when on so many records fail that it is no matter of single records: the slice is given up, and nothing of it is stored."""

    ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """At most this share of a slice's records may be handed to retry or failed."""
    consecutive: Annotated[int, Field(ge=1)] | None = None
    """At most so many of them one after the other."""
    minimum: Annotated[int, Field(ge=1)] = 100
    """Slices with fewer records say nothing about the ratio."""


class RetryTopics(_Part):
    """How the retry topics and the failed topic are made."""

    partitions: Annotated[int, Field(ge=1)] = 1
    replication: Annotated[int, Field(ge=1)] | None = None
    """Copies of each partition. None: as the broker does it."""
    create: bool = True
    """Makes the relay those that are missing?"""


class Retry(_Part):
    delays: tuple[SomeTime, ...] = ()
    """How long a failed record waits before each new try."""
    budget: SomeTime | None = None
    """No try is begun later than this after the record first failed. None: no limit but the delays."""
    per_second: Annotated[int, Field(ge=1)] | None = None
    """A drain tries no more records than this in a second. None: as fast as it goes."""
    breaker: Annotated[Breaker | None, _GIVEN] = None
    order: Annotated[Order, Field(strict=False)] = Order.NONE
    max_held: Annotated[int, Field(ge=1)] = 10_000
    """So many records of a partition may be held at most, where the order is by key; a slice that would hold more is given up."""
    topics: RetryTopics = RetryTopics()
    permanent: tuple[Annotated[str, AfterValidator(checks.exception_name)], ...] = ()
    """Exceptions of a plain-function transform that mean ``fail`` and not ``retry``: ``ValueError``, ``module.Class``."""


class Batch(_Part):
    max_records: Annotated[int, Field(ge=1, le=10_000_000)] = 500_000
    max_failed_records: Annotated[int, Field(ge=0)] | None = None
    """A run that hands more records than this to retry or failed stops. None: no limit."""


class Validation(_Part):
    suite: Annotated[str, AfterValidator(checks.suite_name)]
    """The suite's file in ``include/expectations``, without its ending."""
    on_failure: Annotated[OnFailure, Field(strict=False)] = OnFailure.BLOCK


def _approval(value: object) -> object:
    if value not in tuple(Approval):
        raise checks.NotThis("is not an approval", "write required or none")
    return value


def _yes_or_no(value: object) -> object:
    if not isinstance(value, bool):
        raise checks.NotThis("is not true or false", "write true or false")
    return value


def _mapping(value: object) -> object:
    if not isinstance(value, Mapping | BaseModel):
        raise checks.NotThis("is not a mapping", "write {approval: required}, or remove the key")
    return value


class RewindSettings(_Part):
    """Whom Airflow asks before the consumer's group is moved."""

    approval: Annotated[Approval, Field(strict=False), BeforeValidator(_approval)] = Approval.REQUIRED
    own: Annotated[bool, BeforeValidator(_yes_or_no)] = True
    """May who asked for a rewind also approve it?"""


class AirflowSettings(_Part):
    """How the consumer's DAG looks and its task behaves."""

    owner: Text = "tidemark"
    tags: tuple[Tag, ...] = ()
    retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Tries of each task after the first."""
    retry_delay: Duration = timedelta(seconds=30)
    """Before the first of them; it doubles with each further one, up to 5 minutes."""
    execution_timeout: SomeTime | None = None
    pool: Annotated[Text, Field(max_length=256)] | None = None


class SparkSettings(_Part):
    conf: Mapping[str, Annotated[str, BeforeValidator(checks.spark_value)]] = Field(default_factory=dict)
    """Settings beyond the connection's, by their Spark names."""

    def __hash__(self) -> int:
        return hash(frozenset(self.conf.items()))


class FixedPartitions(RootModel[Mapping[str, Annotated[Ranges, BeforeValidator(checks.partition_numbers)]]]):
    """The partitions of each topic that a consumer reads, whatever else the topics have."""

    model_config = ConfigDict(frozen=True, strict=True)

    @property
    def scope(self) -> Scope:
        return Scope(tuple(Item(topic, numbers) for topic, numbers in self.root.items()))

    def __hash__(self) -> int:
        return hash(frozenset(self.root.items()))


class ConsumerSpec(_Part):
    """One consumer as its file declares it, with every default filled in.

    ``name`` is the file's stem, ``source`` the file itself, and ``only`` narrows one run: none of them is a key of the file. Exactly one
    of ``topics`` and ``topic_pattern`` is set (the other is empty, or None).
    """

    name: str
    source: Annotated[Source, Field(repr=False, exclude=True)]
    only: Annotated[Scope, Field(exclude=True)] = Scope()
    """What one run reads of the consumer's partitions (``consume --partition``)."""

    group: Annotated[str, AfterValidator(checks.group_id)]
    description: Annotated[str | None, _GIVEN] = None
    topics: tuple[Annotated[str, AfterValidator(checks.topic_name)], ...] = ()
    topic_pattern: Annotated[Annotated[str, AfterValidator(checks.topic_pattern)] | None, _GIVEN] = None
    """A Python regular expression; a topic is read when all of its name matches."""
    partitions: Annotated[FixedPartitions | None, _GIVEN] = None
    """Kafka's ``assign``. None: all partitions, also those that are added later."""
    transform: Annotated[str, AfterValidator(checks.transform_name)]
    """``module:function``, see `tidemark.transform`."""
    sink: Sink
    connections: Connections = Connections()
    retry: Retry = Retry()
    offset_reset: Annotated[Annotated[OffsetReset, Field(strict=False)] | None, _GIVEN] = None
    """See `OffsetReset`."""
    assignment: tuple[Annotated[str, AfterValidator(checks.assignor)], ...] = ("cooperative-sticky",)
    """Strategies in order of preference."""
    members: Annotated[int, Field(ge=1)] = 1
    """Spark applications that share the group."""
    listeners: tuple[Annotated[str, AfterValidator(checks.listener)], ...] = ()
    """``module:Class`` of each `tidemark.group.listener.RebalanceListener` of the user's."""
    run: Annotated[RunMode, Field(strict=False)] = RunMode.BOUNDED
    run_for: SomeTime = timedelta(minutes=15)
    """How long a continuous run lasts, and how often one is started."""
    batch: Batch = Batch()
    schedule: Annotated[str, AfterValidator(checks.schedule)] | None = None
    """Five cron fields or one of Airflow's presets. None: runs are started by hand."""
    validation: Annotated[Validation | None, _GIVEN] = None
    rewind: Annotated[RewindSettings, BeforeValidator(_mapping)] = RewindSettings()
    airflow: AirflowSettings = AirflowSettings()
    spark: SparkSettings = SparkSettings()

    @property
    def fixed(self) -> Scope:
        """The partitions that the consumer reads, as far as its file fixes them."""
        return Scope() if self.partitions is None else self.partitions.scope

    def problem(self, path: KeyPath, message: str, fix: str) -> Problem:
        """A problem of this file that was found later, at the value of ``path``: ``spec.problem(("validation", "suite"), ...)``."""
        return self.source.problem(path, message, fix)

    def invalid(self, *problems: Problem) -> SpecInvalid:
        """The error that tells these problems of this consumer."""
        return SpecInvalid(consumers=(self.name,), problems=tuple(sorted(problems, key=lambda one: (one.line, one.column))))


FILLED_IN = ("name", "source", "only")
"""Fields of `ConsumerSpec` that are no keys of the file."""
