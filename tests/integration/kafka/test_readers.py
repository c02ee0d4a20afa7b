"""Both readers return the same for a log: the compiled reader, and the one that turns messages into Python objects."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kafka_topics import Topics, checked_producer
from tests.support.raw_records import RawRecord, produce_raw
from tests.support.readers import READERS, read_with, reading_with
from tests.support.records import compacted, large, numbers, produce_large
from tests.support.sampling import examples
from tests.support.sanitized import run_sanitized
from tests.support.scenario import Scenario

from tidemark.errors import BadInput, BrokerUnavailable
from tidemark.kafka import compiled, reader
from tidemark.kafka.compiled import CompiledPoller
from tidemark.kafka.poll import BYTES_A_POLL, NO_MOMENT, MessagePoller
from tidemark.kafka.reader import NotDecompressed, RangeGone, Reader, read
from tidemark.records.ranges import TopicPartition

ANY_TIME = {"message_timestamp_after_max_ms": str(2**63 - 1)}
EDGES = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ed ef f0 f1 f4 f5 ff")
"""The bytes at which the rules of UTF-8 change."""

DATA = st.one_of(st.none(), st.just(b""), st.binary(max_size=20))
NAMES = st.one_of(st.text(max_size=5).map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=5))
HEADERS = st.lists(st.tuples(NAMES, DATA), max_size=4)
TIMES = st.one_of(st.just(NO_MOMENT), st.integers(0, 2**41), st.integers(-(2**60), 2**60))
RECORDS = st.builds(RawRecord, value=st.one_of(DATA, st.integers(0, 9).map(lambda number: large(number, 200_000))),
                    timestamp_ms=TIMES, headers=HEADERS, key=DATA)  # fmt: skip


TRANSACTIONS = st.tuples(st.lists(DATA, min_size=1, max_size=3), st.booleans())
"""Values, and whether they are committed."""
STEPS = st.lists(st.one_of(st.lists(RECORDS, min_size=1, max_size=12), TRANSACTIONS), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def many(kafka_servers: str) -> Iterator[Topics]:
    topics = Topics(kafka_servers)
    yield topics
    topics.delete_all()


def chunks(servers: str, topic: str, start: int, end: int, **more: str) -> Any:
    return read({"bootstrap.servers": servers, **more}, TopicPartition(topic, 0), start, end)


@settings(max_examples=examples(60))
@given(STEPS, st.data())
def test_any_log_is_read_as_it_was_written(many: Topics, steps: list[Any], data: st.DataObject) -> None:
    """With both readers, in any range, keys, values, headers, timestamps and gaps match what was produced."""
    topic = many.create(max_message_bytes="4000000", **ANY_TIME)
    log: list[dict[str, Any] | None] = []
    for step in steps:
        if isinstance(step, tuple):
            values, commit = step
            many.transaction(topic, values, commit=commit)
            log += [{"value": value, "key": None, "headers": None, "unreadable": False} if commit else None for value in values]
            log.append(None)  # the transaction marker
        else:
            produce_raw(many.servers, topic, step)
            log += map(expected, step)
    start = data.draw(st.integers(0, len(log) - 1))
    end = data.draw(st.integers(start + 1, len(log)))
    found = {each: read_with(each, many.servers, topic, start, end) for each in READERS}
    assert found["compiled"].equals(found["python"])
    rows = found["compiled"].to_pylist()
    assert [row["offset"] for row in rows] == [offset for offset in range(start, end) if log[offset] is not None]
    for row in rows:
        record = log[row["offset"]]
        assert {name: row[name] for name in record} == record


def expected(record: RawRecord) -> dict[str, Any]:
    """Returns the record as it appears in a chunk. In librdkafka, the name of a header ends at a zero byte."""
    headers, unreadable = [], False
    for name, value in record.headers:
        try:
            headers.append({"key": name.partition(b"\0")[0].decode(), "value": value})
        except UnicodeDecodeError:
            unreadable = True
    return {
        "value": record.value,
        "key": record.key,
        "millis": record.timestamp_ms,
        "headers": None if unreadable else headers or None,
        "unreadable": unreadable,
    }


def test_name_of_a_header_is_text_for_both_where_python_says_so(topics: Topics) -> None:
    """Every byte sequence that may break a rule of UTF-8: too long, too short, surrogates, beyond the last character."""
    topic = topics.create()
    names = [bytes(each) for size in (1, 2, 3) for each in itertools.product(EDGES, repeat=size)]
    names += [bytes(each) for each in itertools.product(b"\xf0\xf1\xf4\xf5", EDGES, EDGES[:8], EDGES[:8])]
    for at in range(0, len(names), 5000):
        produce_raw(topics.servers, topic, [RawRecord(b"", 0, [(name, b"")]) for name in names[at : at + 5000]])
    found = {each: read_with(each, topics.servers, topic, 0, len(names)) for each in READERS}
    assert found["compiled"].equals(found["python"])
    assert found["compiled"]["unreadable"].to_pylist() == [expected(RawRecord(b"", 0, [(name, b"")]))["unreadable"] for name in names]


@pytest.mark.thorough  # writing them takes seconds
def test_headers_that_kafkas_client_does_not_read_are_unreadable_not_missing(topics: Topics) -> None:
    """It reads up to 100,000. Python's client does not tell more of them from none, so this holds for the compiled reader only."""
    topic = topics.create(max_message_bytes="10000000")
    produce_raw(topics.servers, topic, [RawRecord(b"", 0, [(b"", None)] * 100_001), RawRecord(b"", 0, [(b"a", b"b")])])
    found = read_with("compiled", topics.servers, topic, 0, 2)
    assert found["unreadable"].to_pylist() == [True, False]
    assert found["headers"].null_count == 1


@pytest.mark.usefixtures("reader")
def test_gaps_of_compaction_are_no_records(scenario: Scenario) -> None:
    """This includes ranges that begin, end or lie in a gap."""
    topic = compacted(scenario)
    for start, end in itertools.product((0, 7, 18, 19, 20), (5, 19, 20, 21)):
        if start < end:
            found = [offset for chunk in chunks(scenario.topics.servers, topic, start, end) for offset in chunk["offset"].to_pylist()]
            assert found == [offset for offset in (19, 20) if start <= offset < end]


@pytest.mark.usefixtures("reader")
def test_chunks_are_bounded_by_bytes(topics: Topics) -> None:
    """A chunk has at least one record, and a record may be as large as the broker accepts."""
    topic = topics.create()
    topics.produce(topic, numbers(0, 2000))
    produce_large(topics, topic, 60)
    sizes = [chunk.nbytes for chunk in chunks(topics.servers, topic, 0, 2060)]
    assert max(sizes) < 2 * BYTES_A_POLL
    assert sum(sizes) > 3 * BYTES_A_POLL


@pytest.mark.usefixtures("reader")
def test_reader_may_be_left_at_any_chunk(topics: Topics) -> None:
    """Its messages and its client are released with it."""
    topic = topics.create()
    topics.produce(topic, numbers(0, 5000))
    for wanted in (0, 1, 2):
        reading = chunks(topics.servers, topic, 0, 5000)
        assert all(chunk.num_rows > 0 for chunk in itertools.islice(reading, wanted))
        reading.close()


@pytest.mark.usefixtures("reader")
def test_range_that_is_not_in_the_log_is_refused(topics: Topics) -> None:
    """Such a range was deleted by retention, or is beyond the end."""
    topic = topics.create()
    topics.produce(topic, numbers(0, 10))
    topics.trim(topic, {0: 5})
    for start, end in ((3, 8), (50, 60)):
        with pytest.raises(RangeGone, match="out of range"):
            list(chunks(topics.servers, topic, start, end))


@pytest.mark.usefixtures("reader")
def test_broker_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SILENCE_S", 1)
    with pytest.raises(BrokerUnavailable, match="no progress in t/0 below offset 5 for 1 s"):
        list(chunks("127.0.0.1:1", "t", 0, 5))


@pytest.mark.parametrize("wrong", [{"no.such": "setting"}, {"security.protocol": "ssl", "ssl.ca.location": "/no/such/file"}], ids=str)
def test_settings_that_librdkafka_refuses_are_told_in_the_same_words(wrong: dict[str, str]) -> None:
    said = []
    for each in READERS:
        with reading_with(each), pytest.raises(BadInput) as raised:
            next(chunks("127.0.0.1:1", "t", 0, 5, **wrong))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_settings_that_confluent_kafka_adds_to_are_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """confluent-kafka serves librdkafka's own OAuth methods and knows where its plugins are. The message is logged once per process."""
    compiled._log_uncompiled.cache_clear()
    caplog.set_level(logging.INFO, logger=compiled.__name__)
    assert compiled.library_for({}) is not None
    assert compiled.library_for({"sasl.mechanism": "SCRAM-SHA-256"}) is not None
    for settings_ in ({"sasl.mechanisms": "oauthbearer"}, {"plugin.library.paths": "x"}) * 2:
        assert compiled.library_for(settings_) is None
    assert len([record for record in caplog.records if record.name == compiled.__name__]) == 1


# ---- memory

READ_ALL = """
import sys
from tidemark.kafka import compiled
from tidemark.kafka.reader import read
from tidemark.records.ranges import TopicPartition

assert compiled.library() is not None
servers, topic, end = sys.argv[1], sys.argv[2], int(sys.argv[3])
for start in range(0, end, end // 3):
    for chunk in read({"bootstrap.servers": servers}, TopicPartition(topic, 0), start, end):
        chunk.validate(full=True)
left = read({"bootstrap.servers": servers}, TopicPartition(topic, 0), 0, end)
next(left)
left.close()
"""


def test_no_byte_outside_of_its_buffers_is_touched(topics: Topics, tmp_path: Path) -> None:
    """The reader reads with AddressSanitizer."""
    topic = topics.create()
    for number in range(30):
        headers = [(b"name", None), (b"", b""), (b"x" * number, b"y" * number), (b"\xff" if number % 5 == 0 else b"z", b"z")][: number % 5]
        produce_raw(topics.servers, topic, [RawRecord(b"v" * size, 0, headers, None if size % 3 else b"k" * size) for size in range(40)])
    run_sanitized(["-c", READ_ALL, topics.servers, topic, "1200"], tmp_path, "address")


RANGES = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1), st.integers(0, 19), st.integers(1, 20), st.booleans())


@pytest.mark.parametrize("reader_", READERS)
@settings(max_examples=examples(60))
@given(st.lists(RANGES, min_size=2, max_size=8), st.lists(st.sampled_from(["next", "another", None]), min_size=8, max_size=8))
def test_one_client_reads_range_after_range_as_if_each_were_its_only_one(
    two_topics: dict[str, str], many: Topics, reader_: str, ranges: list[tuple[str, int, int, int, bool]], aheads: list[str | None]
) -> None:
    """This includes a range that begins before the previous one, a partition with the same number in another topic, a read after one that
    was abandoned, and any range that was fetched ahead."""
    begins = [(TopicPartition(two_topics[name], partition), start, None) for name, partition, start, *_ in ranges]
    with reading_with(reader_), contextlib.closing(Reader({"bootstrap.servers": many.servers})) as client:
        for at, (name, partition, start, length, leave) in enumerate(ranges):
            end = min(start + length, 20)
            then = {"next": begins[(at + 1) % len(begins)], "another": begins[at - 1], None: None}[aheads[at]]
            reading = client.read(TopicPartition(two_topics[name], partition), start, end, then=then)
            if leave:
                next(reading)
                reading.close()
                continue
            values = [value for chunk in reading for value in chunk["value"].to_pylist()]
            assert values == [f"{name}{partition} {offset}".encode() for offset in range(start, end)]


@pytest.mark.usefixtures("reader")
def test_next_range_is_fetched_before_it_is_asked_for(two_topics: dict[str, str], many: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition is not assigned again, which would discard what has been fetched."""
    assigned: list[Any] = []
    for poller in (CompiledPoller, MessagePoller):
        assign = poller.assign
        monkeypatch.setattr(poller, "assign", lambda self, *of, assign=assign: assigned.append(of) or assign(self, *of))
    one, other = (TopicPartition(two_topics["a"], partition) for partition in range(2))
    with contextlib.closing(Reader({"bootstrap.servers": many.servers})) as client:
        list(client.read(one, 0, 20, then=(other, 5, None)))
        assert assigned == [(one, 0, None), (other, 5, None)]
        values = [value for chunk in client.read(other, 5, 20) for value in chunk["value"].to_pylist()]
    assert values == [f"a1 {offset}".encode() for offset in range(5, 20)]
    assert len(assigned) == 2


@pytest.fixture(scope="module")
def two_topics(many: Topics) -> dict[str, str]:
    """Two topics with two partitions of twenty records each. Each record names its topic, partition and offset."""
    made = {name: many.create(2) for name in ("a", "b")}
    for name, topic in made.items():
        for partition in range(2):
            many.produce(topic, [f"{name}{partition} {offset}".encode() for offset in range(20)], partition=partition)
    return made


BOMB = bytes(90_000_000)
"""It has 3 kB in zstd."""


@pytest.mark.usefixtures("reader")
def test_batch_that_is_too_large_once_decompressed_says_so_and_what_to_set(topics: Topics) -> None:
    """librdkafka has a limit for zstd only. The batch is not damaged, so no replica would help."""
    topic = topics.create()
    producer = checked_producer(topics.servers, message_max_bytes=200_000_000, compression_type="zstd")
    producer.produce(topic, BOMB)
    assert producer.flush(60) == 0
    partition = TopicPartition(topic, 0)
    with pytest.raises(NotDecompressed, match=r"begins at offset 0 cannot be decompressed .*Set receive.message.max.bytes"):
        list(read({"bootstrap.servers": topics.servers}, partition, 0, 1))
    (chunk,) = read({"bootstrap.servers": topics.servers, "receive.message.max.bytes": "300000000"}, partition, 0, 1)
    assert len(chunk["value"][0].as_py()) == len(BOMB)
