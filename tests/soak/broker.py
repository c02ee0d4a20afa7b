"""What a soak asks the broker: the ends of topics, and the records that a read_committed reader gets. Uses no code of the library."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Sequence

import numpy as np
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.soak.history import Int64s, Source

ANSWER_S = 10.0
READ_SILENCE_S = 60.0


class Unfinished(Exception):
    """Something that should end in the soak's last phase did not."""


def ends(servers: str, sources: Sequence[Source], isolation: IsolationLevel = IsolationLevel.READ_COMMITTED) -> dict[Source, int]:
    """The last stable offsets or, with READ_UNCOMMITTED, the high watermarks."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    latest = {TopicPartition(*source): OffsetSpec.latest() for source in sources}
    answers = admin.list_offsets(latest, isolation_level=isolation, request_timeout=ANSWER_S)
    return {Source(wire.topic, wire.partition): future.result().offset for wire, future in answers.items()}


def still_open(servers: str, sources: Sequence[Source]) -> list[str]:
    """The partitions with an open transaction, or the client's error if the broker cannot answer."""
    try:
        stable, high = ends(servers, sources), ends(servers, sources, IsolationLevel.READ_UNCOMMITTED)
    except KafkaException as error:  # the broker has just been restarted
        return [str(error)]
    return [f"{source}: stable up to {stable[source]} of {high[source]}" for source in sources if stable[source] != high[source]]


def read_all(servers: str, source: Source) -> tuple[Int64s, Int64s]:
    """Offsets and values of all committed records of a partition. Raises `Unfinished` if the broker stops responding."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"soak-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    offsets, values = array("q"), array("q")
    try:
        consumer.assign([TopicPartition(*source, 0)])
        heard = time.monotonic()
        while time.monotonic() - heard < READ_SILENCE_S:
            for message in consumer.consume(10_000, 0.1):
                heard = time.monotonic()
                failure = message.error()
                if failure is None:
                    offset = message.offset()
                    assert offset is not None
                    offsets.append(offset)
                    values.append(int(message.value() or b""))
                elif failure.code() == KafkaError._PARTITION_EOF:
                    return np.array(offsets, np.int64), np.array(values, np.int64)
        raise Unfinished(f"{source} was silent for {READ_SILENCE_S} s while it was read")
    finally:
        consumer.close()
