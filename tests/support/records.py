"""Topic contents that take some effort to produce: numbered and large records, compacted topics, transactions that stay open."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.support.kafka_topics import Topics, checked_producer
from tests.support.scenario import Scenario
from tests.support.waiting import until

LARGEST = 1_048_500
"""About the largest value that a broker accepts by default: its ``message.max.bytes`` is 1,048,588, and includes the batch overhead."""
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COMPACTED = {"cleanup_policy": "compact", "segment_ms": "1", "min_cleanable_dirty_ratio": "0.01", "min_compaction_lag_ms": "0"}


def numbers(start: int, end: int) -> list[bytes]:
    """Values that identify their records."""
    return [f"record {number}".encode() for number in range(start, end)]


def large(number: int, size: int = LARGEST) -> bytes:
    """A large value that does not compress, and is always the same for the same number."""
    return random.Random(number).randbytes(size)


def produce_large(topics: Topics, topic: str, count: int, size: int = LARGEST) -> list[str]:
    """Appends large values to partition 0. Returns their MD5 sums in the format of Postgres' ``md5``."""
    producer = checked_producer(topics.servers, message_max_bytes=size + 1000)
    sums = []
    for number in range(count):
        value = large(number, size)
        sums.append(hashlib.md5(value).hexdigest())
        producer.produce(topic, value=value, partition=0)
        producer.poll(0)
    assert producer.flush(60) == 0
    return sums


def produce_compressed(topics: Topics, topic: str, values: Iterable[bytes], codec: str) -> None:
    """Appends values to partition 0 in batches that the producer compresses."""
    producer = checked_producer(topics.servers, compression_type=codec, linger_ms=5)
    for value in values:
        producer.produce(topic, value=value, partition=0)
    assert producer.flush(30) == 0


def compacted(scenario: Scenario) -> str:
    """Creates a topic of 21 records and waits for its compaction: the records at offsets 19 and 20 remain."""
    topic = scenario.topics.create(**COMPACTED)
    for value in numbers(0, 20):
        scenario.topics.produce(topic, [value], key=b"same")
    scenario.topics.produce(topic, [b"other"], key=b"other")
    with _cleaner_awake(scenario.topics.servers):
        until(lambda: set(scenario.records(topic)) == {19, 20})
    return topic


@contextlib.contextmanager
def open_transaction(topics: Topics, topic: str, value: bytes) -> Iterator[Any]:
    """A transaction that has produced a record and is still open."""
    producer = checked_producer(topics.servers, transactional_id=f"open-{topic}")
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value=value, partition=0)
    producer.flush(30)
    yield producer


@contextlib.contextmanager
def _cleaner_awake(servers: str) -> Iterator[None]:
    """Makes the broker's cleaner look for work every 0.1 s. The default is 15 s."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def alter(value: str | None, operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", value, incremental_operation=operation)
        (done,) = admin.incremental_alter_configs([ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])]).values()
        done.result()

    alter("100", AlterConfigOpType.SET)
    try:
        yield
    finally:
        alter(None, AlterConfigOpType.DELETE)
