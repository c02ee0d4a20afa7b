"""The input of the chaos tests: a topic with records of every kind, transaction markers and aborted records, and the outcome of each."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

from confluent_kafka import KafkaError, Message, Producer
from tests.support.waiting import until

from tidemark.kafka.cluster import Cluster
from tidemark.records.ranges import TopicPartition

TRANSFORM = """
    from typing import TypedDict

    from tidemark.transform import Fail, Record, Skip


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        kind = (record.value or b"")[:1]
        if kind == b"s":
            raise Skip("meant to be skipped")
        if kind == b"f":
            raise Fail("meant to fail")
        if kind == b"r":
            raise KeyError("meant to be tried again")
        return {"payload": record.value}
"""
"""The first letter of a record's value determines its outcome: l load, s skip, r retry, f fail."""

SPARK_TRANSFORM = """
    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        kind = "substr(CAST(value AS STRING), 1, 1)"
        return records.selectExpr(
            "kafka_topic", "kafka_partition", "kafka_offset", "value AS payload",
            f"CASE {kind} WHEN 's' THEN 'skip' WHEN 'f' THEN 'fail' WHEN 'r' THEN 'retry' ELSE 'load' END AS disposition",
            f"CASE WHEN {kind} IN ('f', 'r') THEN 'as it was meant' END AS error",
        )
"""
"""The same transform in the Spark form."""

KINDS = {"l": "loaded", "s": "skipped", "r": "retried", "f": "failed"}
PLAIN, COMMITTED, ABORTED = "lslflr", "llfs", "ll"


class Log:
    """The contents of a topic: ``log[partition][offset]`` is the value that a reader of committed records finds. Missing offsets are
    markers and aborted records."""

    def __init__(self, log: list[dict[int, bytes]]) -> None:
        self.log = log

    def expected(self, partition: int, start: int, end: int) -> Counter[str]:
        """The outcomes of the offsets ``[start, end)``, counted by the ledger's names."""
        values = [value for offset, value in self.log[partition].items() if start <= offset < end]
        counts = Counter(KINDS[chr(value[0])] for value in values)
        return counts + Counter(unaccounted=end - start - len(values))

    def offsets(self, partition: int, kinds: str, end: int) -> list[int]:
        """The offsets below ``end`` whose records are of these kinds, in order."""
        return [offset for offset, value in sorted(self.log[partition].items()) if offset < end and chr(value[0]) in kinds]


class Feed(Log):
    """Appends the same kinds of records to all partitions of a topic. ``ends`` are their last stable offsets."""

    def __init__(self, servers: str, topic: str, partitions: int, value_bytes: int = 0) -> None:
        super().__init__([{} for _ in range(partitions)])
        self.topic = topic
        self.ends = [0] * partitions
        self._value_bytes = value_bytes
        self._rounds = 0
        self._cluster = Cluster({"bootstrap.servers": servers})
        settings: dict[str, Any] = {"bootstrap.servers": servers, "linger.ms": 1, "log_level": 0}
        self._plain = Producer(settings)
        self._transactional = Producer({**settings, "transactional.id": uuid.uuid4().hex})
        self._transactional.init_transactions(60)

    def add(self, rounds: int = 1) -> None:
        """Appends ``rounds`` rounds of `PLAIN`, `COMMITTED` and `ABORTED` records. Every other round ends with the aborted ones, so that
        the log ends with offsets that no reader gets."""
        for _ in range(rounds):
            self._rounds += 1
            self._append(PLAIN)
            self._transaction(COMMITTED, commit=True)
            self._transaction(ABORTED, commit=False)
            if self._rounds % 2:
                self._append("l")

    def _append(self, kinds: str) -> None:
        self._send(self._plain, kinds, keep=True)

    def _transaction(self, kinds: str, *, commit: bool) -> None:
        self._transactional.begin_transaction()
        self._send(self._transactional, kinds, keep=commit)
        if commit:
            self._transactional.commit_transaction(60)
        else:
            self._transactional.abort_transaction(60)
        self.ends = [end + 1 for end in self.ends]
        until(lambda: self._stable_ends() == self.ends, "the markers written")  # the broker answers before it writes them

    def _stable_ends(self) -> list[int]:
        partitions = [TopicPartition(self.topic, partition) for partition in range(len(self.log))]
        return list(self._cluster.stable_ends(partitions).values())

    def _send(self, producer: Producer, kinds: str, *, keep: bool) -> None:
        sent = []
        for partition in range(len(self.log)):
            for number, kind in enumerate(kinds):
                value = f"{kind}{partition}-{self._rounds}-{number}-{'kept' if keep else 'aborted'}".ljust(self._value_bytes, ".")
                producer.produce(
                    self.topic, value=value, partition=partition, on_delivery=lambda error, message: sent.append((error, message))
                )
        assert producer.flush(120) == 0
        for error, message in sent:
            self._delivered(error, message, keep=keep)

    def _delivered(self, error: KafkaError | None, message: Message, *, keep: bool) -> None:
        offset, partition, value = message.offset(), message.partition(), message.value()
        assert error is None, error
        assert offset is not None
        assert partition is not None
        assert value is not None
        self.ends[partition] += 1
        if keep:
            self.log[partition] = {**self.log[partition], offset: bytes(value)}  # a new dict: the reader may be iterating over the old one
