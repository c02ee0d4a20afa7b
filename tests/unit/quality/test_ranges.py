"""The ranges of offsets that a run wrote."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tidemark.quality.merged_ranges import covers, merge_ranges, predicate

slices = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 60), st.integers(0, 60)), max_size=30)


def test_partitions_and_topics_are_never_merged() -> None:
    """Offsets of different partitions are unrelated. The order of the ranges is the order of locking."""
    assert list(merge_ranges([(2, 0, 0, 5), (1, 1, 5, 9), (1, 0, 5, 9)])) == [(1, 0), (1, 1), (2, 0)]


@given(slices)
def test_merged_ranges_hold_exactly_the_offsets_of_the_slices(parts: list[tuple[int, int, int, int]]) -> None:
    """No offset is added or lost, and no two ranges touch: a run of a thousand batches needs one index scan per partition."""
    merged = merge_ranges(parts)
    offsets = {(topic, partition, n) for topic, partition, start, end in parts for n in range(start, end)}
    assert {(*key, n) for key, spans in merged.items() for start, end in spans for n in range(start, end)} == offsets
    for spans in merged.values():
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    around = {(topic, partition, n) for topic in (1, 2, 3) for partition in range(4) for n in range(62)}
    assert {offset for offset in around if covers(merged, *offset)} == offsets


def test_the_condition_names_every_range_once() -> None:
    """The condition is an OR of index ranges."""
    text = predicate(merge_ranges([(1, 0, 0, 10), (1, 0, 20, 30), (1, 3, 5, 6)]))
    assert text.count(" OR ") == 2
    assert "(sink.kafka_topic_id = 1 AND sink.kafka_partition = 3 AND sink.kafka_offset >= 5 AND sink.kafka_offset < 6)" in text
