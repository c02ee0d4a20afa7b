"""Looks up the cluster: topics with their UUIDs and partitions, log starts, last stable offsets."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tenacity import RetryError, Retrying, retry_if_exception, retry_if_result, stop_after_delay, wait_fixed

from tidemark.errors import BrokerUnavailable, Refused, TidemarkError
from tidemark.kafka.config import KafkaConfig, connected
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
AGAIN_S = 2.0
"""How long a request for topics may take before another client repeats it."""
PAUSE_S = 0.2
"""Between a request for topics that no broker answered and the next one."""
FIRST_RECORDS_S = 1.0
NO_RECORD = -1
"""Kafka's offset for a time after the last record."""
LEADER_WAIT_S = 5.0
"""How long a partition may be without a known leader, as it is briefly when its topic is created or its leader moves."""


@dataclass(kw_only=True, eq=False)
class TopicsMissing(Refused):
    """Topics that a spec names do not exist."""

    kafka_name = "UNKNOWN_TOPIC_OR_PARTITION"
    topics: list[str]
    servers: str

    def __str__(self) -> str:
        return f"Topics not found on {self.servers}: {', '.join(self.topics)}. Create them, or correct `topics` in the spec."


@dataclass(kw_only=True, eq=False)
class TopicNotMade(Refused):
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
    """A topic's setting. ``stated``: it was set for this topic; otherwise it is the broker's default."""

    value: str
    stated: bool


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What happens to a topic's records. ``retention``: how long they stay by time, `None`: permanently. ``compacted``: only the newest
    record of each key stays, so a rewind cannot read all of them again."""

    retention: timedelta | None
    compacted: bool


def cleanup_of(settings: Mapping[str, Setting]) -> Cleanup:
    """From a topic's settings."""
    policy, milliseconds = settings["cleanup.policy"].value, int(settings["retention.ms"].value)
    permanent = "delete" not in policy or not 0 <= milliseconds < PERMANENT / timedelta(milliseconds=1)
    return Cleanup(None if permanent else timedelta(milliseconds=milliseconds), "compact" in policy)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it. ``kafka_uuid`` changes if the topic is deleted and created again.

    ``racks``: the racks of each partition's replicas; `None` for a broker without a rack.
    """

    name: str
    kafka_uuid: str
    partitions: int
    racks: tuple[tuple[str | None, ...], ...] | None = None

    def all(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, number) for number in range(self.partitions)]


class Cluster:
    """Look-ups through one admin client. Threads may share it. Raises `BrokerUnavailable` if no broker answers.

    A client remembers its brokers and keeps asking one that is down, so a client that got no answer is replaced. ``timeout_s`` is for each
    request.
    """

    def __init__(self, config: KafkaConfig, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._config, self._timeout_s = config, timeout_s
        self._client: AdminClient | None = None
        self._retry_topics: set[str] = set()

    def use(self, config: KafkaConfig) -> None:
        """Connects with these settings from now on, if they differ: a password may have changed."""
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
        """The topics that the spec names, which may not exist, or those that its pattern matches, without retry and failed topics: a record
        that fails in two consumers would be read from each other's again and again."""
        if spec.topics:
            return spec.topics
        matching = self.matching(spec.topic_pattern or "")
        suspects = {name: group for name in matching if (group := group_of(name)) is not None}
        if not suspects:
            return matching
        retrying = groups_with_retries()
        retrying |= {spec.group} if spec.retry.delays else set()
        left_out = {name for name, group in suspects.items() if group in retrying or self._holds_retries(name)}
        return [name for name in matching if name not in left_out]

    def _holds_retries(self, name: str) -> bool:
        """Whether the last records of a topic have Tidemark's headers. `False` if there are none, or if it may not be read."""
        if name not in self._retry_topics and any(_has_our_headers(self._config, part, log) for part, log in self._logs_of(name).items()):
            self._retry_topics.add(name)
        return name in self._retry_topics

    def _logs_of(self, name: str) -> dict[TopicPartition, Log]:
        try:
            return self.logs(part for topic in self.topics([name]) for part in topic.all())
        except (NotAllowed, TopicsMissing):
            return {}

    def brokers(self) -> list[str]:
        """The addresses that the brokers advertise, ``host:port``, by their ids."""
        from confluent_kafka import KafkaException

        try:
            found = self.admin().list_topics(timeout=self._timeout_s).brokers
        except KafkaException as error:
            raise self._failed(error, "DESCRIBE") from error
        return [f"{found[number].host}:{found[number].port}" for number in sorted(found)]

    def topics(self, names: Iterable[str], *, missing_ok: bool = False) -> list[Topic]:
        """The topics of these names. Raises `NotAllowed` with all topics that may not be described, and `TopicsMissing` with all that do
        not exist. ``missing_ok``: omits those instead."""
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        wanted = list(dict.fromkeys(names))
        if not wanted:
            return []
        found, missing, denied = [], [], []
        for name, future in self._describe(TopicCollection(wanted)).items():
            try:
                described = future.result()
            except KafkaException as error:
                if is_denial(error.args[0]):
                    denied.append(name)
                elif error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    missing.append(name)
                else:
                    raise self._failed(error, "DESCRIBE", [name]) from error
            else:
                racks = tuple(tuple(node.rack for node in part.replicas) for part in described.partitions)
                found.append(Topic(name, str(described.topic_id), len(described.partitions), racks))
        if denied:
            raise NotAllowed(topics=sorted(denied), operation="DESCRIBE", servers=self.servers)
        if missing and not missing_ok:
            raise TopicsMissing(topics=sorted(missing), servers=self.servers)
        return found

    def visible(self, names: Iterable[str]) -> tuple[list[Topic], set[str]]:
        """The existing topics among these, and the names that the cluster's ACLs hide: such topics may or may not exist."""
        wanted = list(names)
        try:
            return self.topics(wanted, missing_ok=True), set()
        except NotAllowed as error:
            return self.topics([name for name in wanted if name not in error.topics], missing_ok=True), set(error.topics)

    def logs(self, partitions: Iterable[TopicPartition], *, known: Mapping[TopicPartition, Log] | None = None) -> dict[TopicPartition, Log]:
        """The current log of each partition. For partitions in ``known``, looks up only the end."""
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        ends = self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        known = known or {}
        starts = self.log_starts(partition for partition in ends if partition not in known)
        starts |= {partition: log.start for partition, log in known.items()}
        return {part: Log(part, starts[part], max(starts[part], end), epoch) for part, (end, epoch) in ends.items()}

    def truncated(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int | None]:
        """See `tidemark.kafka.truncation.truncated`."""
        return truncated(self._config, positions)

    def log_starts(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The log start offset of each partition."""
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        found = self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return {partition: offset for partition, (offset, _) in found.items()}

    def stable_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The last stable offset of each partition. All transactions below it have ended."""
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        found = self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {partition: offset for partition, (offset, _) in found.items()}

    def high_watermarks(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The end of each partition including open transactions."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        level = IsolationLevel.READ_UNCOMMITTED
        found = self._offsets(partitions, OffsetSpec.latest(), level=level)  # type: ignore[no-untyped-call]
        return {partition: offset for partition, (offset, _) in found.items()}

    def offsets_for_time(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        """The first offset of each partition whose record has this timestamp or a later one. Partitions without one are omitted."""
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        found = self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms), or_none=True)
        return {partition: offset for partition, (offset, _) in found.items() if offset != NO_RECORD}

    def times_at(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The timestamp (ms) of the first committed record at or after each position. Omitted if none arrives within a second."""
        from confluent_kafka import Consumer, KafkaException
        from confluent_kafka import TopicPartition as Wire

        consumer = connected(Consumer, {**self._config, **SETTINGS, "fetch.message.max.bytes": "65536"})
        found: dict[TopicPartition, int] = {}
        try:
            consumer.assign([Wire(part.topic, part.partition, offset) for part, offset in positions.items()])
            until = time.monotonic() + FIRST_RECORDS_S
            while len(found) < len(positions) and time.monotonic() < until:
                for message in consumer.consume(len(positions), 0.05):
                    if message.error() is None:
                        part = TopicPartition(str(message.topic()), int(message.partition() or 0))
                        if part not in found:
                            found[part] = message.timestamp()[1]
                            consumer.pause([Wire(part.topic, part.partition)])
        except KafkaException as error:
            raise self._failed(error, "READ", {part.topic for part in positions}) from error
        finally:
            consumer.close()
        return found

    def group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets that a consumer group has committed to Kafka, without partitions that it has none of.

        A consumer asks, because ``AdminClient.list_consumer_group_offsets`` (confluent-kafka 2.16) may crash the process for a group that
        does not exist. It never joins the group and commits nothing.
        """
        from confluent_kafka import Consumer, KafkaException
        from confluent_kafka import TopicPartition as Wire

        wanted = [Wire(part.topic, part.partition) for part in partitions]
        settings = {**self._config, "group.id": group, "enable.auto.commit": "false", "log_level": "0"}
        with contextlib.closing(connected(Consumer, settings)) as consumer:
            try:
                answers = consumer.committed(wanted, timeout=self._timeout_s) if wanted else []
            except KafkaException as error:
                raise self._failed(error, "DESCRIBE", {part.topic for part in wanted}) from error
        return {TopicPartition(part.topic, part.partition): part.offset for part in answers if part.error is None and part.offset >= 0}

    def settings(self, topics: Iterable[str]) -> dict[str, dict[str, Setting]]:
        """All settings of each topic, by Kafka's names. Raises `NotAllowed` with all topics whose settings may not be read, and
        `BrokerUnavailable` also for a topic that does not exist."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType  # type: ignore[attr-defined]

        asked = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        if not asked:
            return {}
        futures = self.admin().describe_configs(asked, request_timeout=self._timeout_s)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        found, denied = {}, []
        for resource, future in futures.items():
            try:
                entries = future.result()
            except KafkaException as error:
                if not is_denial(error.args[0]):
                    raise self._failed(error, "DESCRIBE_CONFIGS", [resource.name]) from error
                denied.append(resource.name)
            else:
                found[resource.name] = {name: Setting(entry.value or "", int(entry.source) == own) for name, entry in entries.items()}
        if denied:
            raise NotAllowed(topics=sorted(denied), operation="DESCRIBE_CONFIGS", servers=self.servers)
        return found

    def create(self, topic: str, partitions: int, replication: int | None, settings: Mapping[str, str]) -> bool:
        """Creates a topic and returns once it is visible. ``replication``: `None` is the broker's default.

        Returns `False` if the topic already existed. Raises `NotAllowed` or `TopicNotMade`.
        """
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        wanted = NewTopic(topic, num_partitions=partitions, replication_factor=replication or -1, config=dict(settings))
        (future,) = self.admin().create_topics([wanted], request_timeout=self._timeout_s).values()
        made = True
        try:
            future.result()
        except KafkaException as error:
            made = False
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                failed = self._failed(error, "CREATE", [topic])
                lasts = isinstance(failed, BrokerUnavailable) and error.args[0].code() > 0 and not error.args[0].retriable()
                if lasts or isinstance(failed, KafkaRefuses):
                    raise TopicNotMade(topic=topic, servers=self.servers, cause=error.args[0].str()) from error
                raise failed from error
        seen = Retrying(retry=retry_if_result(lambda found: not found), stop=stop_after_delay(LEADER_WAIT_S), wait=wait_fixed(0.05))
        try:
            seen(lambda: self.topics([topic], missing_ok=True))
        except RetryError as error:
            raise BrokerUnavailable(cause=f"{self.servers}: {topic} was created but is not visible") from error
        return made

    def _offsets(
        self, partitions: Iterable[TopicPartition], spec: Any, *, or_none: bool = False, level: Any = None
    ) -> dict[TopicPartition, tuple[int, int | None]]:
        """The offset from each partition's leader, with its leader epoch. An invalid offset (librdkafka's -1001) is requested again.

        ``or_none``: `NO_RECORD` is valid. ``level``: the isolation level (default: READ_COMMITTED).
        """
        from confluent_kafka import IsolationLevel, KafkaException
        from confluent_kafka import TopicPartition as Wire

        asked = {Wire(part.topic, part.partition): spec for part in partitions}
        if not asked:
            return {}

        def ask() -> dict[TopicPartition, tuple[int, int | None]]:
            futures: dict[Wire, Future[Any]] = self.admin().list_offsets(
                asked, isolation_level=level or IsolationLevel.READ_COMMITTED, request_timeout=self._timeout_s
            )
            found = {}
            for part, future in futures.items():
                partition, answer = TopicPartition(part.topic, part.partition), self._answer(future)
                if answer.offset < 0 and not (or_none and answer.offset == NO_RECORD):
                    raise _NoOffset(partition=partition, answer=answer.offset)
                epoch = answer.leader_epoch
                found[partition] = (answer.offset, epoch if epoch is not None and epoch >= 0 else None)
            return found

        retrying = Retrying(
            retry=retry_if_exception(_for_a_moment), stop=stop_after_delay(LEADER_WAIT_S), wait=wait_fixed(0.1), reraise=True
        )
        try:
            return retrying(ask)
        except _NoOffset as error:
            self._client = None
            raise BrokerUnavailable(cause=f"{self.servers}: {error}") from error
        except KafkaException as error:
            raise self._failed(error, "DESCRIBE", {part.topic for part in asked}) from error

    def _answer(self, future: Future[Any]) -> Any:
        """A client that has met an election may keep the leaders that it knew for minutes, so that the next question needs another one."""
        from confluent_kafka import KafkaException

        try:
            return future.result()
        except KafkaException:
            self._client = None
            raise

    def _describe(self, names: TopicCollection) -> dict[str, Future[Any]]:
        """The answers for these topics, all complete.

        librdkafka asks the broker that the client's metadata names as controller. If that broker is down, it waits for it, although the
        others are healthy; a new client may do the same, until the cluster has noticed. So while there is no answer, this asks again with
        another client every `AGAIN_S`. The first client that gets an answer is kept.
        """
        until = time.monotonic() + self._timeout_s
        tries: dict[Future[Any], tuple[AdminClient, dict[str, Future[Any]]]] = {}
        while True:
            client, left = self.admin(), until - time.monotonic()
            futures = client.describe_topics(names, request_timeout=max(left, AGAIN_S))
            tries[next(iter(futures.values()))] = client, futures
            ended = wait(tries, AGAIN_S, FIRST_COMPLETED).done
            for client, futures in [tries.pop(first) for first in ended]:
                wait(futures.values())  # one request: they complete together
                if not any(map(_unanswered, futures.values())):
                    self._client = client
                    return futures
            if left <= AGAIN_S:
                wait(futures.values())
                return futures
            self._client = None
            time.sleep(PAUSE_S if ended else 0)

    def admin(self) -> AdminClient:
        """The client. The next call may return another one."""
        client = self._client
        if client is None:
            from confluent_kafka.admin import AdminClient

            client = self._client = connected(AdminClient, {**self._config, "log_level": "0"})
        return client

    def _failed(self, error: KafkaException, operation: str, topics: Iterable[str] = ()) -> TidemarkError:
        self._client = None
        return failure_of(error.args[0], self.servers, operation, topics)


def _unanswered(future: Future[Any]) -> bool:
    """Whether the request timed out, or its connection broke."""
    from confluent_kafka import KafkaError, KafkaException

    error = future.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)  # noqa: SLF001


@dataclass
class _NoOffset(Exception):
    partition: TopicPartition
    answer: int

    def __str__(self) -> str:
        return f"the answer for {self.partition} is {self.answer}, which is not an offset: the leader is not known yet"


def _for_a_moment(error: BaseException) -> bool:
    """Whether this is a transient error of a partition whose leader is changing."""
    from confluent_kafka import KafkaError, KafkaException

    if isinstance(error, _NoOffset):
        return True
    return isinstance(error, KafkaException) and error.args[0].code() in (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,  # the broker has older metadata than the client, as briefly after a restart
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError._NOENT,  # noqa: SLF001 - the partition has no leader
    )


_LOOK_BACK = 100
"""Offsets before the end of a log: compaction and transactions leave some without a record."""


def _has_our_headers(config: KafkaConfig, partition: TopicPartition, log: Log) -> bool:
    """Whether the last of the records at the end of a log has Tidemark's headers."""
    names: list[list[str]] = []
    start = max(log.start, log.end - _LOOK_BACK)
    try:
        for chunk in read(config, partition, start, log.end) if start < log.end else ():
            names += [[] if headers is None else [header["key"] for header in headers] for headers in chunk["headers"].to_pylist()]
    except Refused:
        return False
    return bool(names) and FIRST_HEADER in names[-1]
