"""Merges the offset ranges of a run's batches. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", int, str)
Partition = tuple[int, int]
"""``(topic_id, partition)``, in the order in which partitions are locked."""
Range = tuple[int, int]
"""Offsets ``[start, end)``."""
MOST_RANGES = 100
"""Maximum ranges per partition for the scattered records of a drain, to keep events and XComs small. Beyond it, one range covers all."""


def merge_ranges(slices: Iterable[tuple[T, int, int, int]]) -> dict[tuple[T, int], list[Range]]:
    """Merges ``(topic, partition, start, end)`` into the fewest possible ranges, sorted.

    Adjacent and overlapping ranges are merged, so a run of a thousand batches costs one index scan per partition. Empty ranges are dropped.
    """
    merged: dict[tuple[T, int], list[Range]] = {}
    for topic, partition, start, end in sorted(slices):
        if end <= start:
            continue
        ranges = merged.setdefault((topic, partition), [])
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((start, end))
    return merged


def by_name(ranges: Mapping[tuple[str, int], list[Range]]) -> dict[str, list[list[int]]]:
    """Returns ranges in the form of `ValidationReport.ranges`."""
    return {f"{topic}/{partition}": [list(span) for span in spans] for (topic, partition), spans in ranges.items()}


def covers(ranges: Mapping[Partition, list[Range]], topic_id: int, partition: int, offset: int) -> bool:
    """Whether one of the ranges contains this offset."""
    return any(start <= offset < end for start, end in ranges.get((topic_id, partition), ()))


def predicate(ranges: Mapping[Partition, list[Range]]) -> str:
    """Returns the SQL condition that a row of ``sink`` lies in the ranges. Costs one scan of the lineage index per range.

    ``ranges`` must not be empty. The text contains only numbers, so it is safe in any statement.
    """
    return " OR ".join(
        f"(sink.kafka_topic_id = {int(topic_id)} AND sink.kafka_partition = {int(partition)}"
        f" AND sink.kafka_offset >= {int(start)} AND sink.kafka_offset < {int(end)})"
        for (topic_id, partition), spans in ranges.items()
        for start, end in spans
    )
