"""Which partitions may be read under an operator's settings, without a database or a broker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tidemark.offsets.flow import Flow, FlowTarget
from tidemark.records.ranges import Claim, Epoch, TopicPartition

ORDERS, CLICKS = TopicPartition("orders", 0), TopicPartition("clicks", 0)


def claim(partition: TopicPartition, position: int = 0) -> Claim:
    return Claim(partition, 1, position, Epoch(1))


def opened(flow: Flow, **left: int) -> list[str]:
    """The topics that are read, given how many records each has left."""
    claims = [claim(TopicPartition(topic, 0)) for topic in left]
    return [one.partition.topic for one in flow.open(claims, {one.partition: left[one.partition.topic] for one in claims})]


def test_everything_that_has_something_left_is_open_where_nothing_is_said() -> None:
    assert opened(Flow(), orders=5, clicks=0, visits=1) == ["orders", "visits"]


def test_pauses_cover_what_is_below_them() -> None:
    assert opened(Flow(frozenset({FlowTarget()})), orders=5, clicks=5) == []
    assert opened(Flow(frozenset({FlowTarget("orders")})), orders=5, clicks=5) == ["clicks"]
    assert opened(Flow(frozenset({FlowTarget("orders", 1)})), orders=5) == ["orders"]
    assert opened(Flow(frozenset({FlowTarget("orders", 0)})), orders=5) == []


def test_topics_of_a_higher_priority_come_first_and_others_when_those_are_read() -> None:
    flow = Flow(priorities={"orders": 10, "dull": -1})
    assert opened(flow, orders=5, clicks=5, dull=5) == ["orders"]
    assert opened(flow, orders=0, clicks=5, dull=5) == ["clicks"]
    assert opened(flow, orders=0, clicks=0, dull=5) == ["dull"]


def test_paused_topic_does_not_hold_back_those_below_it() -> None:
    flow = Flow(frozenset({FlowTarget("orders")}), {"orders": 10})
    assert opened(flow, orders=5, clicks=5) == ["clicks"]


times = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


def first_at_or_after(logs: dict[TopicPartition, list[int]], time: int) -> dict[TopicPartition, int]:
    return {one: next(at for at, stamp in enumerate(log) if stamp >= time) for one, log in logs.items() if log and max(log) >= time}


Ends = dict[TopicPartition, int]


def read_to_the_ends(logs: dict[TopicPartition, list[int]], ahead: int) -> Iterator[tuple[Ends, Ends]]:
    """Yields, for each batch, the time of the next record of each open partition, and the end of each that is read."""
    ends = {partition: len(log) for partition, log in logs.items()}
    positions = dict.fromkeys(logs, 0)
    flow = Flow(max_ahead=timedelta(milliseconds=ahead))
    while positions != ends:
        open_ = flow.open([claim(partition, position) for partition, position in positions.items()], ends)
        found = flow.bounded(
            open_,
            ends,
            lambda at: {partition: logs[partition][position] for partition, position in at.items()},
            lambda partitions, time: first_at_or_after({one: logs[one] for one in partitions}, time),
        )
        moved = {partition: end for partition, end in found.items() if end > positions[partition]}
        assert moved, "nothing is left to read"
        yield {one.partition: logs[one.partition][one.position] for one in open_}, moved
        positions |= moved


@given(orders=times.map(sorted), clicks=times.map(sorted), other=times.map(sorted), ahead=st.integers(1, 300))
def test_no_batch_of_any_topic_goes_beyond_the_bound_where_times_rise(
    orders: list[int], clicks: list[int], other: list[int], ahead: int
) -> None:
    """This includes the topic that is behind: a single batch could carry it past all others."""
    logs = {ORDERS: orders, CLICKS: clicks, TopicPartition("orders", 1): other}
    for next_times, moved in read_to_the_ends(logs, ahead):
        for partition, end in moved.items():
            others = [time for one, time in next_times.items() if one.topic != partition.topic]
            assert not others or logs[partition][end - 1] < min(others) + ahead


@given(orders=times, clicks=times, ahead=st.integers(1, 300))
def test_no_topic_runs_further_ahead_than_it_may_and_both_are_read_to_their_ends(orders: list[int], clicks: list[int], ahead: int) -> None:
    """Timestamps may be in any order. The topic that is behind always has something to read, so the run ends."""
    logs = {ORDERS: orders, CLICKS: clicks}
    for next_times, moved in read_to_the_ends(logs, ahead):
        behind = min(next_times, key=lambda partition: (next_times[partition], partition))
        for partition, end in moved.items():
            if len(next_times) == 2 and partition != behind:
                assert max(logs[partition][:end]) < next_times[behind] + ahead
