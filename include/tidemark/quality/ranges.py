"""Which offsets a run wrote: the ranges of its batches, merged where they touch. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Partition = tuple[int, int]
"""``(topic_id, partition)``, in the order in which partitions are locked."""
Range = tuple[int, int]
"""Offsets ``[start, end)``."""
MOST_RANGES = 100
"""Of a partition, where a drain has loaded records here and there: an event and an XCom stay small. With more, one range holds them all."""


def merge_ranges(slices: Iterable[tuple[int, int, int, int]]) -> dict[Partition, list[Range]]:
    """The offsets that ``(topic_id, partition, start, end)`` cover, as few ranges as possible, in order.

    Ranges that touch or overlap become one, so that a run of a thousand batches is one index scan a partition. Empty ones vanish.
    """
    merged: dict[Partition, list[Range]] = {}
    for topic_id, partition, start, end in sorted(slices):
        if end <= start:
            continue
        ranges = merged.setdefault((topic_id, partition), [])
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((start, end))
    return merged


def covers(ranges: Mapping[Partition, list[Range]], topic_id: int, partition: int, offset: int) -> bool:
    """Does one of the ranges hold this offset?"""
    return any(start <= offset < end for start, end in ranges.get((topic_id, partition), ()))


def predicate(ranges: Mapping[Partition, list[Range]], alias: str) -> str:
    """The condition that a sink's row lies in the ranges; one scan of its lineage index for each of them.

    ``ranges`` must not be empty. Numbers only, so that the text is safe in any statement.
    """
    return " OR ".join(
        f"({alias}.kafka_topic_id = {int(topic_id)} AND {alias}.kafka_partition = {int(partition)}"
        f" AND {alias}.kafka_offset >= {int(start)} AND {alias}.kafka_offset < {int(end)})"
        for (topic_id, partition), spans in ranges.items()
        for start, end in spans
    )
