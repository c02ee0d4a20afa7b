"""Detects a truncated log by Kafka's leader epochs (KIP-320): the broker knows where each epoch ended."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from tidemark.errors import BrokerUnavailable
from tidemark.kafka.config import KafkaConfig, connected
from tidemark.kafka.reader import SETTINGS
from tidemark.records.ranges import TopicPartition

ANSWER_S = 15.0
"""How long to wait for the broker."""

_EPOCH_END = re.compile(r"broker end offset is (\d+) ")
"""librdkafka reports the end of the epoch only in its error text."""


def truncated(config: KafkaConfig, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int | None]:
    """Returns the ``positions`` (an offset, and the leader epoch in which the log reached it) that were truncated away.

    Each maps to the offset at which its epoch ends now; `None`: the log does not know the epoch.

    librdkafka asks for the end of the epoch (``OffsetForLeaderEpoch``) before it fetches from an assigned position, so a record or the
    end of the partition means that the position is valid. Retention is not truncation. Raises `BrokerUnavailable`.
    """
    from confluent_kafka import Consumer, KafkaError, KafkaException
    from confluent_kafka import TopicPartition as Wire

    if not positions:
        return {}
    truncation = KafkaError(KafkaError._LOG_TRUNCATION).str()  # noqa: SLF001 - its public name
    settings = {**config, **SETTINGS, "isolation.level": "read_uncommitted", "fetch.message.max.bytes": "1024"}
    consumer = connected(Consumer, settings)
    waiting, truncated_at = set(positions), {}
    last_error, until = "no message arrived", time.monotonic() + ANSWER_S
    try:
        consumer.assign([Wire(part.topic, part.partition, offset, leader_epoch=epoch) for part, (offset, epoch) in positions.items()])
        while waiting and time.monotonic() < until:
            message = consumer.poll(0.1)
            if message is None:
                continue
            part, failure = TopicPartition(str(message.topic()), int(message.partition() or 0)), message.error()
            if failure is None or failure.code() in (KafkaError._PARTITION_EOF, KafkaError._BAD_MSG):  # noqa: SLF001 - their public names
                waiting.discard(part)
            elif failure.code() == KafkaError._AUTO_OFFSET_RESET and part in waiting:  # noqa: SLF001 - its public name
                waiting.discard(part)
                if truncation in failure.str():
                    match = _EPOCH_END.search(failure.str())
                    truncated_at[part] = int(match[1]) if match else None
            else:
                last_error = failure.str()
            if part in positions and part not in waiting:
                consumer.pause([Wire(part.topic, part.partition)])
    except KafkaException as error:
        raise BrokerUnavailable(cause=str(error)) from error
    finally:
        consumer.close()
    if waiting:
        names = ", ".join(map(str, sorted(waiting)))
        raise BrokerUnavailable(cause=f"no answer within {ANSWER_S:g} s whether the log of {names} was truncated: {last_error}")
    return truncated_at
