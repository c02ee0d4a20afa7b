"""The latest records of topics, to look at."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tidemark.kafka.config import KafkaConfig
from tidemark.kafka.reader import read
from tidemark.records.ranges import Log

if TYPE_CHECKING:
    from confluent_kafka import Message

LOOK_BACK = 1_000_000
"""Maximum number of offsets of a partition to look back: compaction and transactions leave offsets without records."""
READERS = 8


def latest(kafka: KafkaConfig, logs: Iterable[Log], count: int) -> list[Message]:
    """The last ``count`` committed records of these logs together, oldest first by timestamp. Those of one partition keep their order."""
    with ThreadPoolExecutor(READERS) as pool:
        tails = list(pool.map(lambda log: _tail(kafka, log, count), logs))
    newest_first = heapq.merge(*map(reversed, reversed(tails)), key=lambda message: -message.timestamp()[1])
    return list(itertools.islice(newest_first, count))[::-1]


def _tail(kafka: KafkaConfig, log: Log, count: int) -> list[Message]:
    width = count
    while log.start < log.end:
        width = min(width, LOOK_BACK)
        start = max(log.start, log.end - width)
        found: collections.deque[Message] = collections.deque(maxlen=count)
        for messages in read(kafka, log.partition, start, log.end, log.leader_epoch):
            found.extend(messages)
        if len(found) == count or start == log.start or width == LOOK_BACK:
            return list(found)
        width *= 8
    return []
