"""A separate broker for a test module. A test may change its log files while it is stopped."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.kafka_topics import Topics
from tests.support.waiting import until
from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.local import LocalStack
from tidemark.records.ranges import TopicPartition

BATCH_HEADER = 61
"""The number of bytes before the first record in a record batch (magic 2)."""


class OwnBroker:
    """A stack that runs only Kafka."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack

    @property
    def servers(self) -> str:
        return self._stack.kafka.bootstrap_servers()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[Path]:
        """Stops the broker for the block, which gets its data directory. Each start elects leaders, so the leader epochs rise."""
        self._stack.stop(self._stack.kafka)
        try:
            yield self._stack.kafka.data
        finally:
            self._stack.start(self._stack.kafka)

    def restart(self) -> None:
        with self.stopped():
            pass

    def truncate(self, topic: str, to: int) -> None:
        """Truncates the log of partition 0, as an unclean election or a lost disk write would. Returns when the partition has a leader."""
        with self.stopped() as data:
            (segment,) = (data / f"{topic}-0").glob("*.log")
            kept = next(at for at, base in batches(segment) if base >= to)
            segment.write_bytes(segment.read_bytes()[:kept])
            for other in (data / f"{topic}-0").iterdir():
                if other.suffix in (".index", ".timeindex", ".snapshot"):
                    other.unlink()
        self.led(topic)

    def damage(self, topic: str, base_offset: int) -> None:
        """Inverts one byte of the record batch of partition 0 that begins at ``base_offset``."""
        with self.stopped() as data:
            (segment,) = (data / f"{topic}-0").glob("*.log")
            at = next(at for at, base in batches(segment) if base == base_offset)
            changed = bytearray(segment.read_bytes())
            changed[at + BATCH_HEADER + 8] ^= 0xFF
            segment.write_bytes(changed)
        self.led(topic)

    def led(self, topic: str) -> None:
        cluster, partition = Cluster({"bootstrap.servers": self.servers}), TopicPartition(topic, 0)

        def answered() -> bool:
            try:
                return bool(cluster.logs([partition]))
            except BrokerUnavailable:
                return False

        until(answered)


def batches(segment: Path) -> Iterator[tuple[int, int]]:
    """The position and first offset of each record batch in a segment; finally the end of the file, with an offset that no record has."""
    content, at = segment.read_bytes(), 0
    while at < len(content):
        yield at, int.from_bytes(content[at : at + 8], "big")
        at += 12 + int.from_bytes(content[at + 8 : at + 12], "big")
    yield at, 2**63


@contextlib.contextmanager
def own_broker() -> Iterator[OwnBroker]:
    with tempfile.TemporaryDirectory(prefix="tidemark-broker-") as folder:
        stack = LocalStack(Path(folder))
        stack.start(stack.kafka)
        try:
            yield OwnBroker(stack)
        finally:
            stack.stop(stack.kafka)


def produce_batches(topics: Topics, topic: str, *batches: list[bytes]) -> None:
    """Produces one record batch per list of values."""
    for values in batches:
        topics.produce(topic, values)
