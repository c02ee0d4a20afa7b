"""The search for a person's messages while retention removes messages: it may take hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tidemark.erase import kafka_records
from tidemark.erase.kafka_records import Keyed, records_of
from tidemark.kafka.reader import RangeGone
from tidemark.records.ranges import Log, TopicPartition

PARTITIONS = [TopicPartition("orders", number) for number in range(3)]
FIRST, SECOND, THIRD = PARTITIONS


def search(monkeypatch: pytest.MonkeyPatch, after: Callable[[TopicPartition, int, dict[TopicPartition, int]], None]) -> Keyed:
    """Searches three logs with the offsets 0 to 9, all of the person, read three at a time. ``after`` each read, retention may move the
    starts."""
    starts = dict.fromkeys(PARTITIONS, 0)

    def log_starts(partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: starts[partition] for partition in partitions}

    def read(_: Any, partition: TopicPartition, start: int, end: int) -> Iterator[pa.RecordBatch]:
        for offset in range(start, end, 3):
            if offset < starts[partition]:
                raise RangeGone(partition=partition, start=start, end=end, cause="Offset out of range")
            offsets = list(range(offset, min(offset + 3, end)))
            yield pa.RecordBatch.from_pydict({"offset": offsets, "key": [b"ann"] * len(offsets)})
            after(partition, offset, starts)

    topic = SimpleNamespace(name="orders", kafka_uuid="uuid", all=lambda: PARTITIONS)
    cluster: Any = SimpleNamespace(
        subscribed=lambda _: ["orders"],
        topics=lambda _: [topic],
        logs=lambda partitions: {partition: Log(partition, starts[partition], 10) for partition in partitions},
        log_starts=log_starts,
    )
    monkeypatch.setattr(kafka_records, "read", read)
    return records_of(cluster, {}, SimpleNamespace(), b"ann", lambda _: None)  # type: ignore[arg-type]


def starts_of(keyed: Keyed) -> list[int]:
    return [keyed.logs[partition].start for partition in PARTITIONS]


def test_logs_are_searched_from_where_retention_has_moved_their_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an earlier partition is read: a part of a log, and all of one. The plan then counts the rows before these starts."""

    def after(partition: TopicPartition, offset: int, starts: dict[TopicPartition, int]) -> None:
        starts.update({SECOND: 4, THIRD: 12})

    keyed = search(monkeypatch, after)
    assert keyed.offsets == {FIRST: list(range(10)), SECOND: list(range(4, 10))}
    assert starts_of(keyed) == [0, 4, 12]


def test_search_goes_on_where_retention_overtakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has read stays found: the rows are still in the sink."""

    def after(partition: TopicPartition, offset: int, starts: dict[TopicPartition, int]) -> None:
        if (partition, offset) == (FIRST, 3):
            starts[FIRST] = 8

    keyed = search(monkeypatch, after)
    assert keyed.offsets == {FIRST: [0, 1, 2, 3, 4, 5, 8, 9], SECOND: list(range(10)), THIRD: list(range(10))}
    assert starts_of(keyed) == [8, 0, 0]


def test_log_that_lost_messages_without_retention_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a topic that was created again: its start is not after what was read."""

    def after(partition: TopicPartition, offset: int, starts: dict[TopicPartition, int]) -> None:
        if (partition, offset) == (FIRST, 3):
            raise RangeGone(partition=FIRST, start=0, end=10, cause="Offset out of range")

    with pytest.raises(RangeGone):
        search(monkeypatch, after)
