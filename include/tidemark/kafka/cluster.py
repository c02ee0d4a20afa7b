"""Looks up the cluster: topics with their UUIDs and partitions, log starts, last stable offsets."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from tenacity import RetryError, Retrying, retry_if_exception, retry_if_result, stop_after_delay, wait_fixed

from tidemark.errors import BrokerUnavailable, Refused, TidemarkError
from tidemark.kafka.config import KafkaConfig, connected
from tidemark.kafka.contact import advertised, require_contact
from tidemark.kafka.failures import KafkaRefuses, NotAllowed, failure_of, is_denial
from tidemark.kafka.reader import SETTINGS, read
from tidemark.kafka.truncation import truncated
from tidemark.records.ranges import Log, TopicPartition
from tidemark.spec.files import groups_with_retries
from tidemark.spec.retry_topics import FIRST_HEADER, group_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaException, TopicCollection
    from confluent_kafka.admin import AdminClient

    from tidemark.spec import ConsumerSpec

REQUEST_TIMEOUT_S = 15
HEDGE_S = 2.0
"""How long to wait for a request for topics before another client repeats it."""
RETRY_PAUSE_S = 0.2
"""The pause after a request for topics that no broker answered."""
FIRST_RECORDS_S = 1.0
NO_RECORD = -1
"""Kafka's offset for a time after the last record."""
LATE_S = 5.0
"""How long to wait for an answer beyond the time that the client has for it. An answer that is later than that never comes."""
LEADER_WAIT_S = 5.0
"""How long to wait for a partition's leader: it is briefly unknown when a topic is created or the leader moves."""


class TopicsMissing(Refused):
    """Topics that a spec names do not exist."""

    kafka_name = "UNKNOWN_TOPIC_OR_PARTITION"
    topics: list[str]
    servers: str

    def __str__(self) -> str:
        return f"Topics not found on {self.servers}: {', '.join(self.topics)}. Create them, or correct `topics` in the spec."


class TopicNotCreated(Refused):
    """The cluster refuses to create a topic. ``cause`` is its message."""

    topic: str
    servers: str
    cause: str

    def __str__(self) -> str:
        return f"{self.servers} did not create the topic {self.topic}: {self.cause}. Create it manually, or ask for permission."


PERMANENT = timedelta(days=365_000)
"""A retention beyond this is permanent, and so long that a date could overflow."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A topic's setting. ``stated``: set for this topic; otherwise the broker's default."""

    value: str
    stated: bool


class SettingUnknown(Refused):
    """The broker does not report a setting of a topic, as some services that speak Kafka's protocol do not."""

    setting: str

    def __str__(self) -> str:
        return f"The broker does not report {self.setting} of topics. What needs this setting does not work with this broker."


class TopicSettings(dict[str, Setting]):
    """A topic's settings by Kafka's names. Raises `SettingUnknown` for one that the broker does not report."""

    def __missing__(self, name: str) -> Setting:
        raise SettingUnknown(setting=name)


def in_sync_replicas(settings: TopicSettings) -> int:
    """``min.insync.replicas``, or Kafka's default if the broker does not report it."""
    return int(settings["min.insync.replicas"].value) if "min.insync.replicas" in settings else 1


@dataclass(frozen=True, slots=True)
class Cleanup:
    """A topic's retention and compaction. ``retention``: `None` is permanent. ``compacted``: only the newest record of each key stays, so a
    rewind cannot read all records again."""

    retention: timedelta | None
    compacted: bool


def _cleanup(settings: TopicSettings) -> Cleanup:
    policy, milliseconds = settings["cleanup.policy"].value, int(settings["retention.ms"].value)
    permanent = "delete" not in policy or not 0 <= milliseconds < PERMANENT / timedelta(milliseconds=1)
    return Cleanup(None if permanent else timedelta(milliseconds=milliseconds), "compact" in policy)


ZERO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id of every topic on a cluster that has no ids: Kafka before 2.8, and some compatible ones."""
NO_ID = "no id: "
"""Prefix of a `Topic.kafka_uuid` on such a cluster; the topic's name follows. No id of Kafka has these characters."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it. ``kafka_uuid`` changes if the topic is deleted and created again, unless it begins with `NO_ID`.

    ``racks``: the racks of each partition's replicas; `None` for a broker without a rack.
    """

    name: str
    kafka_uuid: str
    partitions: int
    racks: tuple[tuple[str | None, ...], ...] | None = None

    @property
    def has_id(self) -> bool:
        return not self.kafka_uuid.startswith(NO_ID)

    def all(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, number) for number in range(self.partitions)]


class Cluster:
    """Look-ups through one admin client. Threads may share it. Raises `BrokerUnavailable` if no broker answers.

    A client keeps asking a broker that is down, so a client without an answer is replaced. ``timeout_s`` applies to each request.
    """

    def __init__(self, config: KafkaConfig, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._config, self._timeout_s = config, timeout_s
        self._client: AdminClient | None = None
        self._retry_topics: set[str] = set()

    def use(self, config: KafkaConfig) -> None:
        """Switches to these settings if they differ: a password may have changed."""
        if config != self._config:
            self._config, self._client = config, None

    @property
    def servers(self) -> str:
        return self._config["bootstrap.servers"]

    def matching(self, pattern: str) -> list[str]:
        """The names of topics that ``pattern`` matches completely, sorted. Internal topics (``__...``) never match."""
        from confluent_kafka import KafkaException

        try:
            metadata = self.admin().list_topics(timeout=self._timeout_s)
        except KafkaException as error:
            raise self._failed(error, "DESCRIBE") from error
        expression = re.compile(pattern)
        return sorted(name for name in metadata.topics if not name.startswith("__") and expression.fullmatch(name))

    def subscribed(self, spec: ConsumerSpec) -> Sequence[str]:
        """The topics that the spec names, which may not exist, or that its pattern matches. Omits retry and failed topics: two consumers
        would otherwise keep rereading each other's failed records."""
        if spec.topics:
            return spec.topics
        matching = self.matching(spec.topic_pattern or "")
        suspects = {name: group for name in matching if (group := group_of(name)) is not None}
        if not suspects:
            return matching
        retrying = groups_with_retries()
        retrying |= {spec.group} if spec.retry.delays else set()
        excluded = {name for name, group in suspects.items() if group in retrying or self._holds_retries(name)}
        return [name for name in matching if name not in excluded]

    def _holds_retries(self, name: str) -> bool:
        """Whether the last records of a topic have Tidemark's headers. `False` for an empty or unreadable topic."""
        if name not in self._retry_topics and any(
            _has_our_headers(self._config, part, log) for part, log in self._readable_logs(name).items()
        ):
            self._retry_topics.add(name)
        return name in self._retry_topics

    def _readable_logs(self, name: str) -> dict[TopicPartition, Log]:
        try:
            return self.logs(part for topic in self.topics([name]) for part in topic.all())
        except (NotAllowed, TopicsMissing):
            return {}

    def brokers(self) -> list[str]:
        """The brokers' advertised addresses, ``host:port``, in the order of their ids."""
        from confluent_kafka import KafkaException

        try:
            return advertised(self.admin(), self._timeout_s)
        except KafkaException as error:
            raise self._failed(error, "DESCRIBE") from error

    def release(self) -> str | None:
        """The oldest release of Kafka with which the brokers are compatible, such as ``3.9``; `None` if unknown: Kafka 4 does not say, and
        the settings of brokers may be hidden."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource, ResourceType

        try:
            brokers = self.admin().list_topics(timeout=self._timeout_s).brokers
            resource = ConfigResource(ResourceType.BROKER, str(min(brokers)))
            (future,) = self.admin().describe_configs([resource], request_timeout=self._timeout_s).values()
            entry = self.result(future).get("inter.broker.protocol.version")
        except KafkaException:
            self._client = None
            return None
        return None if entry is None or not entry.value else str(entry.value).partition("-")[0]

    def topics(self, names: Iterable[str], *, missing_ok: bool = False) -> list[Topic]:
        """The topics with these names. Raises `NotAllowed` with all topics that may not be described, and `TopicsMissing` with all that do
        not exist. ``missing_ok`` omits missing topics instead."""
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        distinct = list(dict.fromkeys(names))
        if not distinct:
            return []
        topics, missing, denied = [], [], []
        for name, future in self._describe(TopicCollection(distinct)).items():
            try:
                described = self.result(future)
            except KafkaException as error:
                if is_denial(error.args[0]):
                    denied.append(name)
                elif error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    missing.append(name)
                else:
                    raise self._failed(error, "DESCRIBE", [name]) from error
            else:
                racks = tuple(tuple(node.rack for node in part.replicas) for part in described.partitions)
                uuid = str(described.topic_id)
                topics.append(Topic(name, NO_ID + name if uuid == ZERO_ID else uuid, len(described.partitions), racks))
        if denied:
            raise NotAllowed(topics=sorted(denied), operation="DESCRIBE", servers=self.servers)
        if missing and not missing_ok:
            raise TopicsMissing(topics=sorted(missing), servers=self.servers)
        return topics

    def visible(self, names: Iterable[str]) -> tuple[list[Topic], set[str]]:
        """The existing topics among ``names``, and the names that ACLs hide, which may or may not exist."""
        requested = list(names)
        try:
            return self.topics(requested, missing_ok=True), set()
        except NotAllowed as error:
            return self.topics([name for name in requested if name not in error.topics], missing_ok=True), set(error.topics)

    def logs(
        self, partitions: Iterable[TopicPartition], *, previous: Mapping[TopicPartition, Log] | None = None
    ) -> dict[TopicPartition, Log]:
        """The current log of each partition. Looks up only the end for partitions in ``previous``."""
        ends = self._offsets(partitions, "latest")
        previous = previous or {}
        starts = self.log_starts(partition for partition in ends if partition not in previous)
        starts |= {partition: log.start for partition, log in previous.items()}
        return {part: Log(part, starts[part], max(starts[part], end), epoch) for part, (end, epoch) in ends.items()}

    def truncated(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int | None]:
        """See `tidemark.kafka.truncation.truncated`."""
        return truncated(self._config, positions)

    def log_starts(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The log start offset of each partition."""
        return {partition: offset for partition, (offset, _) in self._offsets(partitions, "earliest").items()}

    def stable_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offset of each partition. All transactions below it have ended."""
        return {partition: offset for partition, (offset, _) in self._offsets(partitions, "latest").items()}

    def high_watermarks(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The end of each partition, open transactions included."""
        return {partition: offset for partition, (offset, _) in self._offsets(partitions, "latest", uncommitted=True).items()}

    def offsets_for_time(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        """The offset of each partition's first record with this timestamp or a later one. Omits partitions without such a record."""
        offsets = self._offsets(partitions, timestamp_ms)
        return {partition: offset for partition, (offset, _) in offsets.items() if offset != NO_RECORD}

    def times_at(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The timestamp (ms) of the first committed record at or after each position. Omits partitions without one within a second."""
        from confluent_kafka import Consumer, KafkaException
        from confluent_kafka import TopicPartition as Wire

        consumer = connected(Consumer, {**self._config, **SETTINGS, "fetch.message.max.bytes": "65536"})
        times: dict[TopicPartition, int] = {}
        try:
            consumer.assign([Wire(part.topic, part.partition, offset) for part, offset in positions.items()])
            until = time.monotonic() + FIRST_RECORDS_S
            while len(times) < len(positions) and time.monotonic() < until:
                for message in consumer.consume(len(positions), 0.05):
                    if message.error() is None:
                        part = TopicPartition(str(message.topic()), int(message.partition() or 0))
                        if part not in times:
                            times[part] = message.timestamp()[1]
                            consumer.pause([Wire(part.topic, part.partition)])
        except KafkaException as error:
            raise self._failed(error, "READ", {part.topic for part in positions}) from error
        finally:
            consumer.close()
        return times

    def group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """A consumer group's offsets in Kafka. Omits partitions without one.

        Uses a consumer, because ``AdminClient.list_consumer_group_offsets`` (confluent-kafka 2.16) may crash the process for a group that
        does not exist. The consumer never joins the group and commits nothing.
        """
        from confluent_kafka import Consumer, KafkaException
        from confluent_kafka import TopicPartition as Wire

        requested = [Wire(part.topic, part.partition) for part in partitions]
        settings = {**self._config, "group.id": group, "enable.auto.commit": "false", "log_level": "0"}
        with contextlib.closing(connected(Consumer, settings)) as consumer:
            try:
                answers = consumer.committed(requested, timeout=self._timeout_s) if requested else []
            except KafkaException as error:
                raise self._failed(error, "DESCRIBE", {part.topic for part in requested}) from error
        return {TopicPartition(part.topic, part.partition): part.offset for part in answers if part.error is None and part.offset >= 0}

    def settings(self, topics: Iterable[str]) -> dict[str, TopicSettings]:
        """All settings of each topic. Raises `NotAllowed` with all topics whose settings may not be read, and
        `BrokerUnavailable` even for a missing topic."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType

        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        if not resources:
            return {}
        futures = self.admin().describe_configs(resources, request_timeout=self._timeout_s)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        settings, denied = {}, []
        for resource, future in futures.items():
            try:
                entries = self.result(future)
            except KafkaException as error:
                if not is_denial(error.args[0]):
                    raise self._failed(error, "DESCRIBE_CONFIGS", [resource.name]) from error
                denied.append(resource.name)
            else:
                settings[resource.name] = TopicSettings(
                    {name: Setting(entry.value or "", int(entry.source) == own) for name, entry in entries.items()}
                )
        if denied:
            raise NotAllowed(topics=sorted(denied), operation="DESCRIBE_CONFIGS", servers=self.servers)
        return settings

    def cleanups(self, topics: Iterable[str]) -> dict[str, Cleanup]:
        """Retention and compaction of each topic. Raises what `settings` raises, and `SettingUnknown`."""
        return {name: _cleanup(settings) for name, settings in self.settings(topics).items()}

    def create(self, topic: str, partitions: int, replication: int | None, settings: Mapping[str, str]) -> bool:
        """Creates a topic and returns once it is visible. ``replication``: `None` is the broker's default.

        Returns `False` if the topic already existed. Raises `NotAllowed` or `TopicNotCreated`.
        """
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        request = NewTopic(topic, num_partitions=partitions, replication_factor=replication or -1, config=dict(settings))
        (future,) = self.admin().create_topics([request], request_timeout=self._timeout_s).values()
        created = True
        try:
            self.result(future)
        except KafkaException as error:
            created = False
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                failed = self._failed(error, "CREATE", [topic])
                permanent = isinstance(failed, BrokerUnavailable) and error.args[0].code() > 0 and not error.args[0].retriable()
                if permanent or isinstance(failed, KafkaRefuses):
                    raise TopicNotCreated(topic=topic, servers=self.servers, cause=error.args[0].str()) from error
                raise failed from error
        visible = Retrying(retry=retry_if_result(lambda topics: not topics), stop=stop_after_delay(LEADER_WAIT_S), wait=wait_fixed(0.05))
        try:
            visible(lambda: self.topics([topic], missing_ok=True))
        except RetryError as error:
            raise BrokerUnavailable(cause=f"{self.servers}: {topic} was created but is not visible") from error
        return created

    def _offsets(
        self, partitions: Iterable[TopicPartition], at: Literal["earliest", "latest"] | int, *, uncommitted: bool = False
    ) -> dict[TopicPartition, tuple[int, int | None]]:
        """Each partition's offset from its leader, with the leader epoch. Requests an invalid offset (librdkafka's -1001) again.

        ``at``: a number is a timestamp (ms), whose offset may be `NO_RECORD`. ``uncommitted``: includes open transactions.
        """
        from confluent_kafka import IsolationLevel, KafkaException
        from confluent_kafka import TopicPartition as Wire
        from confluent_kafka.admin import OffsetSpec

        level = IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED
        spec = OffsetSpec.for_timestamp(at) if isinstance(at, int) else getattr(OffsetSpec, at)()
        requests = {Wire(part.topic, part.partition): spec for part in partitions}
        if not requests:
            return {}

        def request() -> dict[TopicPartition, tuple[int, int | None]]:
            futures: dict[Wire, Future[Any]] = self.admin().list_offsets(requests, isolation_level=level, request_timeout=self._timeout_s)
            offsets = {}
            for part, future in futures.items():
                partition, answer = TopicPartition(part.topic, part.partition), self.result(future)
                if answer.offset < 0 and not (isinstance(at, int) and answer.offset == NO_RECORD):
                    raise _NoOffset(partition=partition, answer=answer.offset)
                epoch = answer.leader_epoch
                offsets[partition] = (answer.offset, epoch if epoch is not None and epoch >= 0 else None)
            return offsets

        retrying = Retrying(
            retry=retry_if_exception(_is_transient), stop=stop_after_delay(LEADER_WAIT_S), wait=wait_fixed(0.1), reraise=True
        )
        try:
            return retrying(request)
        except _NoOffset as error:
            self._client = None
            raise BrokerUnavailable(cause=f"{self.servers}: {error}") from error
        except KafkaException as error:
            raise self._failed(error, "DESCRIBE", {part.topic for part in requests}) from error

    def result(self, future: Future[Any]) -> Any:
        """Returns the result of a request of `admin`. Drops the client after an error: it may keep outdated leaders for minutes after an
        election. Raises `BrokerUnavailable` if the client gives no answer in time, so that nothing waits for it without an end."""
        from confluent_kafka import KafkaException

        try:
            return future.result(self._timeout_s + LATE_S)
        except KafkaException:
            self._client = None
            raise
        except TimeoutError:
            self._client = None
            raise BrokerUnavailable(cause=f"{self.servers}: the client gave no answer within {self._timeout_s + LATE_S:g} s") from None

    def _describe(self, names: TopicCollection) -> dict[str, Future[Any]]:
        """Requests these topics' descriptions and returns the completed futures.

        librdkafka asks the broker that the client's metadata names as controller, and waits for it even if it is down and the others are
        healthy. A new client may do the same until the cluster has noticed. So, without an answer, this asks again with another client
        every `HEDGE_S`, and keeps the first client that gets an answer.
        """
        until = time.monotonic() + self._timeout_s
        tries: dict[Future[Any], tuple[AdminClient, dict[str, Future[Any]]]] = {}
        while True:
            client, remaining_s = self.admin(), until - time.monotonic()
            futures = client.describe_topics(names, request_timeout=max(remaining_s, HEDGE_S))
            tries[next(iter(futures.values()))] = client, futures
            ended = wait(tries, HEDGE_S, FIRST_COMPLETED).done
            for client, futures in [tries.pop(first) for first in ended]:
                wait(futures.values(), LATE_S)  # one request: they complete together
                if not any(map(_unanswered, futures.values())):
                    self._client = client
                    return futures
            if remaining_s <= HEDGE_S:
                wait(futures.values(), HEDGE_S + LATE_S)
                return futures
            self._client = None
            time.sleep(RETRY_PAUSE_S if ended else 0)

    def admin(self) -> AdminClient:
        """The admin client; the next call may return another one."""
        client = self._client
        if client is None:
            client = self._connect()
            require_contact(client, self._connect, self.servers)
            self._client = client
        return client

    def _connect(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        return connected(AdminClient, {**self._config, "log_level": "0"})

    def _failed(self, error: KafkaException, operation: str, topics: Iterable[str] = ()) -> TidemarkError:
        self._client = None
        return failure_of(error.args[0], self.servers, operation, topics)


def _unanswered(future: Future[Any]) -> bool:
    """Whether the request timed out, or its connection broke."""
    from confluent_kafka import KafkaError, KafkaException

    error = future.exception() if future.done() else None
    return isinstance(error, KafkaException) and error.args[0].code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)  # noqa: SLF001


@dataclass
class _NoOffset(Exception):
    partition: TopicPartition
    answer: int

    def __str__(self) -> str:
        return f"no offset for {self.partition} ({self.answer}): its leader is not known yet"


def _is_transient(error: BaseException) -> bool:
    """Whether the error passes once the partition has a leader."""
    from confluent_kafka import KafkaError, KafkaException

    if isinstance(error, _NoOffset):
        return True
    return isinstance(error, KafkaException) and error.args[0].code() in (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,  # after a restart, the broker briefly has older metadata than the client
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError._NOENT,  # noqa: SLF001 - the partition has no leader
    )


_LOOK_BACK = 100
"""How many offsets before the end of a log to read: compaction and transactions leave some without a record."""


def _has_our_headers(config: KafkaConfig, partition: TopicPartition, log: Log) -> bool:
    """Whether the last record of a log has Tidemark's headers."""
    names: list[list[str]] = []
    start = max(log.start, log.end - _LOOK_BACK)
    try:
        for chunk in read(config, partition, start, log.end) if start < log.end else ():
            names += [[] if headers is None else [header["key"] for header in headers] for headers in chunk["headers"].to_pylist()]
    except Refused:
        return False
    return bool(names) and FIRST_HEADER in names[-1]
