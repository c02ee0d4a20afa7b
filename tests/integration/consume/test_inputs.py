"""What a log may contain, read by the function and the Arrow form: each kind of record and of gap. For the Spark form, see
test_consume_spark.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.kafka_topics import Topics
from tests.support.raw_records import RawRecord, produce_raw
from tests.support.records import CODECS, compacted, numbers, open_transaction, produce_compressed, produce_large
from tests.support.scenario import ARROW, PLAIN, Scenario
from tests.support.transforms import ECHO_COLUMNS, ECHOES, FORMS, JUDGES, arrow, echoed, told, with_column
from tests.support.waiting import until

from tidemark.db import session, transaction
from tidemark.quality import Violation, check_conservation

LOCAL = ["function", "arrow"]
pytestmark = pytest.mark.usefixtures("reader")
ANY_TIME = {"message_timestamp_after_max_ms": str(2**63 - 1)}
"""Lets a topic take timestamps more than an hour in the future."""


# ---- gaps, transactions, empty topics


def test_empty_topic_and_empty_partitions_are_no_work(scenario: Scenario) -> None:
    """Partitions without records get a position but no slice."""
    empty, some = scenario.topics.create(2), scenario.topics.create(3)
    scenario.topics.produce(some, numbers(0, 4), partition=1)
    scenario.write(topics=[empty, some]).make_sink()
    assert [(part.topic, part.partition) for part in scenario.run().partitions] == [(some, 1)]
    assert scenario.positions() == {(empty, 0): 0, (empty, 1): 0, (some, 0): 0, (some, 1): 4, (some, 2): 0}
    scenario.check()


@pytest.mark.sampled("transform", "reader")
@FORMS
def test_aborted_transactions_are_not_read_and_count_as_unaccounted(scenario: Scenario, transform: str) -> None:
    """Aborted records and the markers of all transactions are offsets in the range without a visible record."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.topics.transaction(topic, [b"x", b"y"], commit=False)
    scenario.topics.transaction(topic, [b"b"])
    scenario.topics.transaction(topic, [b"z"], commit=False)
    scenario.write(transform, topics=topic).make_sink()
    done = scenario.run()
    assert done.records == 8
    assert scenario.rows() == [b"a", b"b"]
    assert scenario.counts() == {"loaded": 2, "sink_rows": 2, "unaccounted": 6}
    assert scenario.run().partitions == ()
    scenario.check()


@pytest.mark.sampled("transform", "reader")
@FORMS
def test_run_stops_before_an_open_transaction(scenario: Scenario, transform: str) -> None:
    """The end of a run is the last stable offset: later records wait until the transaction has ended."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a", b"b"])
    with open_transaction(scenario.topics, topic, b"c") as producer:
        scenario.topics.produce(topic, [b"d"])
        scenario.write(transform, topics=topic).make_sink()
        scenario.run()
        assert scenario.rows() == [b"a", b"b"]
        assert scenario.run().partitions == ()
        producer.commit_transaction(30)
    until(lambda: len(scenario.records(topic)) == 4, "the marker is in the log")  # the broker responds before it writes it
    scenario.run()
    assert scenario.rows() == [b"a", b"b", b"c", b"d"]
    scenario.check()


@pytest.mark.sampled("transform", "reader")
@FORMS
def test_compacted_away_records_are_unaccounted(scenario: Scenario, transform: str) -> None:
    """Offsets removed by compaction are gaps: they are not lost, and the ledger counts them. A slice in which no record is visible is
    committed like any other."""
    scenario.write(transform, topics=compacted(scenario), batch={"max_records": 10}).make_sink("payload bytea")
    assert scenario.run().records == 21
    assert scenario.rows("payload, kafka_offset") == [(b"record 19", 19), (b"other", 20)]
    assert scenario.counts() == {"loaded": 2, "sink_rows": 2, "unaccounted": 19}
    assert [(start, end) for _, _, start, end in scenario.ledger()] == [(0, 10), (10, 20), (20, 21)]
    scenario.check()


@pytest.mark.sampled
def test_hundred_partitions_of_which_some_are_empty(scenario: Scenario) -> None:
    """There may be many partitions, of any size. Batches take the longest first, and no batch exceeds its limit."""
    topic = scenario.topics.create(100)
    for partition in range(100):
        if partition % 4:
            scenario.topics.produce(topic, [f"{partition} {number}" for number in range(partition % 4)], partition=partition)
    scenario.write(ARROW, topics=topic, batch={"max_records": 60}).make_sink("payload bytea")
    done = scenario.run()
    assert (done.records, len(done.partitions)) == (150, 75)
    assert scenario.engine is not None
    assert all(sum(part.span for part in batch) <= 60 for batch in scenario.engine.batches)
    assert scenario.positions() == {(topic, partition): partition % 4 for partition in range(100)}
    found = scenario.rows("kafka_partition, kafka_offset, payload")
    assert found == [(partition, number, f"{partition} {number}".encode()) for partition in range(100) for number in range(partition % 4)]
    assert violations(scenario) == []
    assert scenario.run().partitions == ()


# ---- records


HEADERS: list[Any] = [
    None,
    [],
    [("trace", b"1")],
    [("trace", b"1"), ("trace", b"2"), ("trace", b"1")],
    [("null", None), ("empty", b""), ("", b"no name")],
    [("bytes", b"\xff\xfe\0\x80"), ("zero\0name", b"x"), ("ключ", "значение".encode())],
]


@pytest.mark.sampled("form", "reader", "disposition")
@pytest.mark.parametrize("form", LOCAL)
@pytest.mark.parametrize("disposition", ["fail", "retry"])
def test_failed_record_is_kept_byte_for_byte(scenario: Scenario, form: str, disposition: str) -> None:
    """Key, value, headers (order, repetition, nulls, any bytes) and timestamp are stored exactly as in the record."""
    topic = scenario.topics.create()
    transform = JUDGES[form].replace('"fail").decode()', f'"{disposition}").decode()').replace('b"fail")', f'b"{disposition}")')
    for number, headers in enumerate(HEADERS):
        for key in (None, b"", b"\0\xffkey"):
            value = None if number % 2 else disposition.encode()
            scenario.topics.produce(topic, [value], key=key, headers=headers, timestamp=1_600_000_000_123 + number)
    scenario.write(transform, topics=topic).make_sink("payload bytea")
    scenario.run()
    found = scenario.failed("record_offset, key, value, record_timestamp::text, disposition, attempt_id, retry_number")
    assert len(found) == 18
    assert [key for _, key, *_ in found[:3]] == [None, b"", b"\0\xffkey"]
    assert found[0][2:] == (disposition.encode(), "2020-09-13 12:26:40.123+00", disposition, scenario.attempt_id, 0)
    assert found[3][2] is None
    scenario.check()


@pytest.mark.sampled
def test_many_failed_records_among_many_good_ones_are_all_kept(scenario: Scenario) -> None:
    """Failed records are read a second time by their offsets, over several polls of the reader."""
    scenario.feed([b"fail" if number % 1000 == 7 else b"good" for number in range(25_000)], JUDGES["arrow"], "payload bytea")
    scenario.run()
    assert [offset for offset, *_ in scenario.failed()] == list(range(7, 25_000, 1000))
    assert scenario.counts() == {"loaded": 24_975, "failed": 25, "sink_rows": 24_975}
    scenario.check()


@pytest.mark.sampled("form", "reader")
@pytest.mark.parametrize("form", LOCAL)
def test_every_part_of_a_record_reaches_the_transform_as_it_was_produced(scenario: Scenario, form: str) -> None:
    """Covers key, value, timestamp in milliseconds, and headers in order, with repetitions, nulls and any bytes. A record without headers
    has null in the Arrow form and an empty list in the function form."""
    topic = scenario.topics.create()
    for number, headers in enumerate(HEADERS):
        for key in (None, b"", b"\0\xffkey"):
            scenario.topics.produce(topic, [None, b"", b"\0\xff"], key=key, headers=headers, timestamp=1_600_000_000_123 + number)
    check_echo(scenario, form, topic)


@pytest.mark.sampled("form", "reader")
@pytest.mark.parametrize("form", LOCAL)
def test_record_has_the_brokers_time_where_the_broker_stamps(scenario: Scenario, form: str) -> None:
    """With LogAppendTime, the producer's timestamp is lost: for the transform, and for failed records."""
    topic = scenario.topics.create(message_timestamp_type="LogAppendTime")
    scenario.topics.produce(topic, [b"fail"], timestamp=1_600_000_000_123)
    check_echo(scenario, form, topic)
    just_now = "> now() - interval '10 minutes'"
    assert scenario.rows(f"at {just_now}") == [True]
    fail_all(scenario, form)
    assert [row[0] for row in scenario.failed(f"record_timestamp {just_now}")] == [True]


@pytest.mark.sampled("form", "reader")
@pytest.mark.parametrize("form", LOCAL)
def test_record_without_a_timestamp_has_none(scenario: Scenario, form: str) -> None:
    """Kafka writes -1, which is not a time: null in the Arrow form, and 1970-01-01 in the function form, whose records always have a
    timestamp."""
    topic = scenario.topics.create()
    produce_raw(scenario.topics.servers, topic, [RawRecord(b"fail", -1)])
    scenario.write(ECHOES[form], topics=topic).make_sink(ECHO_COLUMNS)
    scenario.run()
    assert scenario.rows("at") == [datetime(1970, 1, 1, tzinfo=UTC) if form == "function" else None]
    fail_all(scenario, form)
    assert scenario.failed("record_offset, record_timestamp") == [(0, None)]


@pytest.mark.sampled("form", "reader")
@pytest.mark.parametrize("form", LOCAL)
def test_timestamp_that_is_no_moment_of_any_calendar_spoils_nothing_but_itself(scenario: Scenario, form: str) -> None:
    """Nanoseconds written as milliseconds are beyond Postgres' range: null in the Arrow form. Python's years end at 9999: in the function
    form, the record fails, and the error has the number. No value wraps around to a time that looks right."""
    topic = scenario.topics.create(**ANY_TIME)
    times = [1_600_000_000_000, 253_402_300_800_000, 1_600_000_000_000_000_000, 2**63 - 1, -(2**62)]
    produce_raw(scenario.topics.servers, topic, [RawRecord(b"x", millis) for millis in times])
    scenario.write(ECHOES[form], topics=topic).make_sink(ECHO_COLUMNS)
    scenario.run()
    good, far = "2020-09-13 12:26:40+00", "10000-01-01 00:00:00+00"
    if form == "arrow":
        assert scenario.rows("at::text") == [good, far, None, None, None]
        assert scenario.counts() == {"loaded": 5, "sink_rows": 5}
    else:
        assert scenario.rows("at::text") == [good]
        failed = scenario.failed("record_offset, disposition, record_timestamp::text, error_text")
        assert [row[:3] for row in failed] == [(1, "fail", far), (2, "fail", None), (3, "fail", None), (4, "fail", None)]
        assert all(str(millis) in row[3] for row, millis in zip(failed, times[1:], strict=True))


@pytest.mark.sampled("form", "reader")
@pytest.mark.parametrize("form", LOCAL)
def test_record_with_a_header_name_that_is_no_text_fails_alone(scenario: Scenario, form: str) -> None:
    """Kafka's protocol has header names in UTF-8, but no broker checks them. librdkafka's Python binding cannot return such headers at
    all."""
    topic = scenario.topics.create()
    bad = [(b"good", b"1"), (b"\xff\xfe", b"2")]
    produce_raw(
        scenario.topics.servers, topic, [RawRecord(b"a", 0), RawRecord(b"b", 0, bad), RawRecord(b"fail", 0, bad), RawRecord(b"c", 0)]
    )
    scenario.write(JUDGES[form], topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows("payload, kafka_offset") == [(b"a", 0), (b"c", 3)]
    found = scenario.failed("record_offset, disposition, value, error_text")
    assert [row[:3] for row in found] == [(1, "fail", b"b"), (2, "fail", b"fail")]
    assert all("header" in row[3] for row in found)
    assert scenario.counts() == {"loaded": 2, "failed": 2, "sink_rows": 2}


@pytest.mark.sampled("transform", "reader")
@FORMS
def test_records_may_be_compressed_in_any_way(scenario: Scenario, transform: str) -> None:
    """One partition has records of each of Kafka's codecs."""
    topic = scenario.topics.create()
    for codec in CODECS:
        produce_compressed(scenario.topics, topic, numbers(0, 50), codec)
    scenario.write(transform, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows() == numbers(0, 50) * len(CODECS)
    scenario.check()


# ---- large records


@pytest.fixture(scope="module")
def large_records(kafka_servers: str) -> Iterator[tuple[str, list[str]]]:
    """A topic of 100 records of the largest size that a broker takes by default, and their MD5 sums."""
    topics = Topics(kafka_servers)
    topic = topics.create()
    yield topic, produce_large(topics, topic, 100)
    topics.delete_all()


SMALL_BATCHES = arrow("assert batch.nbytes <= 40_000_000, batch.nbytes\n" + with_column("payload", "batch['value']") + "\nreturn given")


@pytest.mark.sampled("transform", "reader")
@pytest.mark.parametrize("transform", [PLAIN, SMALL_BATCHES], ids=LOCAL)
def test_records_of_1_mb_are_loaded_a_few_at_a_time(scenario: Scenario, large_records: tuple[str, list[str]], transform: str) -> None:
    """100 MB in one slice: what a worker holds at a time is limited in bytes as well as in records."""
    topic, sums = large_records
    scenario.write(transform, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows("md5(payload)") == sums
    assert scenario.counts() == {"loaded": 100, "sink_rows": 100}
    assert violations(scenario) == []


@pytest.mark.sampled
def test_failed_records_of_1_mb_are_kept_whole(scenario: Scenario, large_records: tuple[str, list[str]]) -> None:
    """They are scattered over the slice, and are read a second time."""
    topic, sums = large_records
    too_large = (
        "from tidemark.transform import Fail\ndef transform(record):\n    if record.offset % 10 == 3:\n        raise Fail('too large')\n"
    )
    scenario.write(too_large, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.failed("record_offset, md5(value)") == [(offset, sums[offset]) for offset in range(3, 100, 10)]
    assert scenario.counts() == {"skipped": 90, "failed": 10}
    assert violations(scenario) == []


@pytest.mark.sampled
def test_record_larger_than_a_fetch_is_loaded(scenario: Scenario) -> None:
    """Topics may take records of any size. The first record of a fetch is returned whole, whatever the fetch's limit."""
    topic = scenario.topics.create(max_message_bytes="12000000")
    sums = produce_large(scenario.topics, topic, 3, 10_000_000)
    scenario.write(ARROW, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows("md5(payload)") == sums


# ---- helpers


def check_echo(scenario: Scenario, form: str, topic: str) -> None:
    """Loads the topic with a transform that returns everything it gets, and compares that with the topic."""
    scenario.write(ECHOES[form], topics=topic).make_sink(ECHO_COLUMNS)
    scenario.run()
    assert echoed(scenario) == told(scenario, topic)
    scenario.check()


def fail_all(scenario: Scenario, form: str) -> None:
    """Reads the topic again, as another group, with a transform that fails the records whose value is ``fail``."""
    scenario.transform(JUDGES[form])
    scenario.sql(f"TRUNCATE {scenario.table}")
    scenario.set(group=f"{scenario.name}-failed")
    scenario.run()


def violations(scenario: Scenario) -> list[Violation]:
    """The differences between ledger and tables: the part of `Scenario.check` that does not read the topic again."""
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        return check_conservation(cur, scenario.spec.group, [scenario.table])
