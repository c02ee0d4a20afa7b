"""Which records are held, for any form of transform: `KeyOrder` and `TurnOrder` compared with a model in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples

from tidemark.records.outcome import ONLY, TransformOutput
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry.order import HeldTooMany, KeyOrder, Order, TurnOrder, held
from tidemark.retry.store import Blocked
from tidemark.sink.tally import split_output

START, SPAN = 100, 30
PART = Slice(TopicPartition("flights", 3), 1, START, START + SPAN, Epoch(1))
quick = settings(max_examples=examples(300))

ANSWERS = st.sampled_from(("load", "skip", "retry", "fail"))
RECORDS = st.lists(st.tuples(st.sampled_from((b"a", b"b", b"", None)), ANSWERS), max_size=SPAN)
LISTS = st.lists(st.integers(1, 8), min_size=SPAN, max_size=SPAN)
"""The number of records in each successive read."""


@dataclass
class Message:
    at: int
    key: bytes | None
    answer: str


def by_list(order: Order, messages: list[Message]) -> dict[int, str]:
    """The outcome of each record if the transform takes them all at once."""
    blocked = order.split((message.at, message.key) for message in messages)
    free = [message for message in messages if message.at not in blocked]
    batch = pa.RecordBatch.from_pydict(
        {
            "kafka_topic": ["flights"] * len(free),
            "kafka_partition": pa.array([3] * len(free), pa.int32()),
            "kafka_offset": pa.array([message.at for message in free], pa.int64()),
            "disposition": pa.array([message.answer for message in free], pa.string()),
        }
    )
    judged = split_output(batch, PART) if free else TransformOutput({})
    judged = order.sift(PART, ((message.at, message.key) for message in free), judged)
    assert not judged.rows or set(judged.rows[ONLY]["kafka_offset"].to_pylist()).isdisjoint(judged.skipped)
    said = dict.fromkeys(judged.rows[ONLY]["kafka_offset"].to_pylist() if judged.rows else (), "load")
    said |= dict.fromkeys(judged.skipped, "skip")
    said |= {reject.offset: reject.disposition.name.lower() for reject in judged.rejects}
    return said | {offset: held(offset, behind).disposition.name.lower() for offset, behind in blocked.items()}


def one_by_one(order: Order, messages: list[Message]) -> dict[int, str]:
    """The outcome of each record if the transform takes them one by one."""
    said = {}
    for message in messages:
        if order.behind(message.at, message.key) is not None:
            said[message.at] = "held"
            continue
        said[message.at] = message.answer
        order.tried(message.at, message.key, again=message.answer == "retry")
    return said


def in_lists(messages: list[Message], sizes: list[int]) -> list[list[Message]]:
    found = []
    for size in sizes:
        found.append(messages[:size])
        messages = messages[size:]
    return [each for each in found if each]


@quick
@given(RECORDS, LISTS, st.dictionaries(st.sampled_from((b"a", b"b", b"")), st.integers(START - 5, START + 10)))
def test_both_forms_hold_the_same_records_of_a_slice(
    records: list[tuple[bytes | None, str]], sizes: list[int], blocked: dict[bytes, int]
) -> None:
    """A record is held if an earlier record of its key is waiting, from this slice or before it. A record without a key is never held."""
    first, model = dict(blocked), {}
    messages = [Message(START + index, key, answer) for index, (key, answer) in enumerate(records)]
    for message in messages:
        behind = first.get(message.key) if message.key is not None else None
        if behind is not None and behind < message.at:
            model[message.at] = "held"
            continue
        model[message.at] = message.answer
        if message.answer == "retry" and message.key is not None:
            first[message.key] = message.at
    for tell in (by_list, one_by_one):
        order = KeyOrder(1000)
        order.begin([Blocked(key, offset, 0) for key, offset in blocked.items()])
        said: dict[int, str] = {}
        for each in in_lists(messages, sizes):
            said |= tell(order, each)
        assert said == model


@quick
@given(RECORDS, st.randoms(use_true_random=False), LISTS, st.sets(st.integers(START, START + SPAN)))
def test_both_forms_try_the_records_of_a_key_in_order_however_they_were_published(
    records: list[tuple[bytes | None, str]], random: Any, sizes: list[int], elsewhere: set[int]
) -> None:
    """A record of a retry topic is tried once the previous record of its key is settled in this slice. Records in ``elsewhere`` wait in
    other topics. So the records of a key that are tried are its first ones, in order."""
    last: dict[bytes, int] = {}
    messages, before = [], {}
    for index, (key, answer) in enumerate(records):
        messages.append(Message(START + index, key, answer))
        before[START + index] = None if key is None else last.get(key)
        if key is not None:
            last[key] = START + index
    messages = [message for message in messages if message.at not in elsewhere]
    random.shuffle(messages)
    answers = []
    for tell in (by_list, one_by_one):
        order, said = TurnOrder(before), dict[int, str]()
        for each in in_lists(messages, sizes):
            said |= tell(order, each)
        answers.append(said)
        assert set(said) == {message.at for message in messages}
        for key in (b"a", b"b", b""):
            all_of_key = [START + index for index, (other, _) in enumerate(records) if other == key]
            tried = [message.at for message in messages if message.key == key and said[message.at] != "held"]
            assert tried == all_of_key[: len(tried)]
            assert "retry" not in [said[offset] for offset in tried[:-1]]
    assert answers[0] == answers[1]


def test_partition_that_would_have_too_many_held_records_is_refused_at_the_first_beyond_the_limit() -> None:
    """Records that are already held count. A slice that holds no records is never refused."""
    order = KeyOrder(5)
    order.begin([Blocked(b"a", 7, 3), Blocked(b"\xff", 9, 1)])
    for offset, key in enumerate((b"a", b"\xff", b"c")):
        order.behind(START + offset, key)
    order.check(PART, 0)
    order.check(PART, 1)
    with pytest.raises(HeldTooMany) as raised:
        order.check(PART, 2)
    assert (raised.value.held, raised.value.more, raised.value.keys, raised.value.retriable) == (4, 2, 2, False)
    assert r'earlier records of 2 keys wait for a retry: "a", "\xff". With the 4 ' in str(raised.value)
    lowered = KeyOrder(3)
    lowered.begin([Blocked(b"a", 7, 4)])
    lowered.check(PART, 0)
