"""Topics for tests, on a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from tests.support import other_servers
from tests.support.waiting import until

Value = bytes | str | None
TRY_S = 15
"""How long one request may take before another client repeats it."""
_ELECTION = {
    KafkaError._NOENT,  # no leader
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
"""Errors of a broker that has just started or whose topic is new: it knows the partition's leader a moment later."""


def administer(servers: str, ask: Callable[[AdminClient], Mapping[Any, Future[Any]]], *, done: int | None = None) -> None:
    """Sends a request to the cluster's controller until it is answered, each time with another client: one that has met a broker which has
    just started or missed its heartbeats knows no controller, and waits for one in vain. ``done`` is the error that a request gets if an
    earlier one, whose answer was lost, had its effect."""
    lost: list[KafkaError] = []

    def answered() -> bool:
        client = AdminClient({"bootstrap.servers": servers, "log_level": 0})  # it must outlive the futures
        for future in ask(client).values():
            try:
                future.result()
            except KafkaException as failure:
                error = failure.args[0]
                if lost and error.code() == done:
                    continue
                if error.code() >= 0 and not error.retriable():
                    raise
                lost.append(error)
                return False
        return True

    until(answered, f"{servers} answers a request for the controller")


def checked_producer(servers: str, **config: Any) -> Producer:
    """A producer whose ``poll`` and ``flush`` raise `KafkaException` for a record that was not stored. Kafka's own ``flush`` returns 0 for
    it."""

    def check(error: KafkaError | None, _message: object) -> None:
        if error is not None:
            raise KafkaException(error)

    settings = {key.replace("_", "."): value for key, value in config.items()}
    return Producer({"bootstrap.servers": servers, "log_level": 0, "on_delivery": check, **settings})


def delete_topics(servers: str, names: Iterable[str]) -> None:
    wanted = list(names)
    administer(servers, lambda admin: admin.delete_topics(wanted, request_timeout=TRY_S), done=KafkaError.UNKNOWN_TOPIC_OR_PART)


class Topics:
    """Creates topics with names that no other test uses, and produces to them."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self._made: list[str] = []

    def create(self, partitions: int = 1, *, name: str | None = None, **config: str) -> str:
        """Creates a topic with unlimited retention unless ``config`` (``cleanup_policy="compact"``) says otherwise."""
        name = name or f"t-{uuid.uuid4().hex[:10]}"
        settings = {"retention.ms": "-1", **{key.replace("_", "."): value for key, value in config.items()}}
        wanted = NewTopic(name, partitions, 1, config=other_servers.known(settings))
        administer(self.servers, lambda admin: admin.create_topics([wanted], request_timeout=TRY_S), done=KafkaError.TOPIC_ALREADY_EXISTS)
        self._made.append(name)
        until(lambda: self._led(name, partitions))
        return name

    def produce(self, topic: str, values: Iterable[Value], *, partition: int = 0, key: Value = None, **options: Any) -> None:
        """Appends records to one partition, in order."""
        producer = checked_producer(self.servers, linger_ms=5)
        for value in values:
            producer.produce(topic, value=value, key=key, partition=partition, **options)
            producer.poll(0)
        assert producer.flush(120) == 0

    def transaction(self, topic: str, values: Sequence[Value], *, partition: int = 0, commit: bool = True) -> None:
        """Appends records in a transaction and commits or aborts it. Returns when the marker is in the log: the broker responds before it
        writes the marker."""
        start = self._end(topic, partition)
        producer = checked_producer(self.servers, transactional_id=uuid.uuid4().hex)
        producer.init_transactions(60)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value=value, partition=partition)
        producer.flush(120)
        if commit:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)
        until(lambda: self._end(topic, partition) > start + len(values))

    def alter(self, topic: str, **config: str) -> None:
        """Sets some of a topic's settings; the others stay unchanged. Returns when the broker lists them: the controller responds first."""
        expected = {key.replace("_", "."): value for key, value in config.items()}
        entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in expected.items()]
        wanted = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        administer(self.servers, lambda admin: admin.incremental_alter_configs([wanted], request_timeout=TRY_S))
        until(lambda: {name: self._settings(topic)[name].value for name in expected} == expected, f"{topic} has {expected}")

    def trim(self, topic: str, before: Mapping[int, int]) -> None:
        """Deletes the records below an offset in each partition, as retention does."""
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        administer(self.servers, lambda admin: admin.delete_records(wanted, request_timeout=TRY_S))

    def grow(self, topic: str, partitions: int) -> None:
        """Adds partitions, up to this total. Returns when the broker knows them: a producer drops records for a partition that it does not
        find in the broker's metadata."""
        wanted = NewPartitions(topic, partitions)
        administer(self.servers, lambda admin: admin.create_partitions([wanted], request_timeout=TRY_S), done=KafkaError.INVALID_PARTITIONS)
        until(lambda: self._led(topic, partitions))

    def recreate(self, topic: str, partitions: int = 1, **config: str) -> None:
        """Deletes a topic and creates it again with the same name."""
        self.delete(topic)
        until(lambda: self._created(topic, partitions, config))

    def _created(self, topic: str, partitions: int, config: Mapping[str, str]) -> bool:
        """Creates a topic, unless the cluster is still deleting one of this name: with ZooKeeper it goes on after the topic is gone."""
        try:
            self.create(partitions, name=topic, **config)
        except KafkaException as failure:
            if failure.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            return False
        return True

    def delete(self, topic: str) -> None:
        delete_topics(self.servers, [topic])
        self._made.remove(topic)
        until(lambda: topic not in self._admin.list_topics(timeout=60).topics)

    def adopt(self, names: Iterable[str]) -> None:
        """Takes over topics that something else created, so that they are deleted after the test."""
        self._made += [name for name in names if name not in self._made]

    def _end(self, topic: str, partition: int) -> int:
        """The high watermark, which aborted records and markers move too."""

        def ask() -> tuple[int] | None:
            (asked,) = self._admin.list_offsets({TopicPartition(topic, partition): OffsetSpec.latest()}).values()
            try:
                return (int(asked.result().offset),)
            except KafkaException as error:
                if error.args[0].code() not in _ELECTION:
                    raise
            self._admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})  # the old one may keep what it knows
            return None

        (end,) = until(ask, f"the end of {topic}/{partition}", within_s=60)
        return int(end)

    def _settings(self, topic: str) -> Mapping[str, ConfigEntry]:
        (asked,) = self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)], request_timeout=TRY_S).values()
        found: Mapping[str, ConfigEntry] = asked.result()
        return found

    def _led(self, topic: str, partitions: int) -> bool:
        """Whether the broker knows this many partitions and their leaders. It learns them a moment after the controller's response."""
        metadata = self._admin.list_topics(timeout=60).topics.get(topic)
        if metadata is None or metadata.error is not None:
            return False
        return len(metadata.partitions) == partitions and all(part.leader >= 0 for part in metadata.partitions.values())

    def delete_all(self) -> None:
        if self._made:
            delete_topics(self.servers, self._made)
