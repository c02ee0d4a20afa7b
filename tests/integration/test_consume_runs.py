"""Whole runs: real topics are read and really committed; only Spark is left out, whose part is in test_consume_spark.py."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.scenario import ARROW, PLAIN, Scenario, eventually

from tidemark.connections import Connections
from tidemark.consume import claims
from tidemark.consume.run import TooManyFailed
from tidemark.consume.work import TransformFailed
from tidemark.db import session, transaction
from tidemark.errors import BrokerUnavailable, DatabaseUnavailable, TidemarkError
from tidemark.kafka import cluster
from tidemark.kafka.cluster import TopicsMissing
from tidemark.kafka.reader import RangeGone
from tidemark.offsets import store
from tidemark.offsets.ranges import Slice
from tidemark.offsets.reset import NoPosition, OffsetOutOfRange, TopicRecreated
from tidemark.offsets.store import ClaimRefused, OffsetFenced, TaskIdentity
from tidemark.schema import SchemaMismatch
from tidemark.sink.commit import SinkRejected
from tidemark.sink.encode import TypesChanged
from tidemark.sink.table import SinkMismatch, SinkMissing
from tidemark.sink.tally import BadOutput

FORMS = pytest.mark.parametrize("transform", [PLAIN, ARROW], ids=["function", "arrow"])
LINEAGE = ["kafka_topic", "kafka_partition", "kafka_offset"]


def numbers(start: int, end: int) -> list[bytes]:
    return [f"record {number}".encode() for number in range(start, end)]


# ---- run after run


@FORMS
def test_first_run_loads_all_the_second_nothing_the_third_what_was_produced_in_between(scenario: Scenario, transform: str) -> None:
    """A run reads what is in the topics when it starts and goes on where the last one stopped."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 70))
    scenario.topics.produce(topic, numbers(70, 100), partition=1)
    scenario.write(transform, topics=topic).make_sink()
    first = scenario.run()
    assert (first.state, first.records, first.total) == ("COMMITTED", 100, 100)
    assert [(part.partition, part.start, part.end, part.loaded) for part in first.partitions] == [(0, 0, 70, 70), (1, 0, 30, 30)]
    second = scenario.run()
    assert (second.state, second.planned, second.partitions) == ("COMMITTED", True, ())
    assert scenario.engine is None, "a run with nothing to read starts no engine"
    scenario.topics.produce(topic, numbers(100, 105), partition=1)
    third = scenario.run()
    assert [(part.partition, part.start, part.end) for part in third.partitions] == [(1, 30, 35)]
    assert scenario.rows() == [*numbers(0, 70), *numbers(70, 105)]
    scenario.check()


@FORMS
def test_run_larger_than_a_batch_commits_batch_after_batch(scenario: Scenario, transform: str) -> None:
    """No batch has more than ``batch.max_records`` offsets; together they are the run."""
    topic = scenario.topics.create(3)
    for partition, count in enumerate((50, 7, 20)):
        scenario.topics.produce(topic, numbers(0, count), partition=partition)
    scenario.write(transform, topics=topic, batch={"max_records": 30}).make_sink()
    done = scenario.run()
    assert done.records == 77
    assert scenario.engine is not None
    assert all(sum(part.span for part in batch) <= 30 for batch in scenario.engine.batches)
    assert len(scenario.rows()) == 77
    scenario.check()


def test_batch_of_one_record_is_a_batch(scenario: Scenario) -> None:
    """``max_records: 1`` is slow, and right."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 2))
    scenario.topics.produce(topic, numbers(0, 2), partition=1)
    scenario.write(topics=topic, batch={"max_records": 1}).make_sink()
    scenario.run()
    assert [(start, end) for _, _, start, end in scenario.ledger()] == [(0, 1), (1, 2)] * 2
    scenario.check()


def test_records_produced_during_a_run_wait_for_the_next(scenario: Scenario) -> None:
    """A run ends at the end offsets that it saw when it started."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic).make_sink()
    done = scenario.run(before=lambda part: scenario.topics.produce(topic, numbers(10, 15)))
    assert done.records == 10
    assert scenario.run().records == 5
    assert scenario.rows() == numbers(0, 15)
    scenario.check()


def test_consumer_of_several_topics_keeps_them_apart(scenario: Scenario) -> None:
    """Each topic has an id of its own in the lineage, so that equal partitions and offsets do not meet."""
    one, two = scenario.topics.create(), scenario.topics.create(2)
    scenario.topics.produce(one, [b"a", b"b"])
    scenario.topics.produce(two, [b"c"])
    scenario.topics.produce(two, [b"d"], partition=1)
    scenario.write(topics=[two, one]).make_sink()
    scenario.run()
    assert sorted(scenario.rows("payload, kafka_partition, kafka_offset")) == [(b"a", 0, 0), (b"b", 0, 1), (b"c", 0, 0), (b"d", 1, 0)]
    assert len(set(scenario.rows("kafka_topic_id"))) == 2
    scenario.check()


def test_topic_pattern_reads_what_matches_whole_also_topics_that_come_later(scenario: Scenario) -> None:
    """A pattern is a regular expression for the whole name. A topic that appears later is read from its first record."""
    prefix = scenario.topics.create()
    first = scenario.topics.create(name=f"{prefix}.eu")
    scenario.topics.produce(prefix, [b"not mine"])
    scenario.topics.produce(first, [b"eu"])
    scenario.write(topic_pattern=rf"{prefix}\..+").make_sink()
    scenario.run()
    assert scenario.rows() == [b"eu"]
    second = scenario.topics.create(name=f"{prefix}.us")
    scenario.topics.produce(second, [b"us"])
    scenario.run()
    assert scenario.rows() == [b"eu", b"us"]
    scenario.check()


def test_pattern_that_matches_nothing_yet_is_a_run_with_nothing_to_read(scenario: Scenario) -> None:
    """The topics of a pattern may come later; `consumers check` is who complains."""
    scenario.write(topic_pattern="no-such-.*").make_sink()
    assert scenario.run().partitions == ()


def test_topic_that_does_not_exist_is_refused_by_name(scenario: Scenario) -> None:
    """All that are missing are named; nothing is claimed."""
    scenario.write(topics=[scenario.topics.create(), "no-such-a", "no-such-b"]).make_sink()
    with pytest.raises(TopicsMissing) as missing:
        scenario.run()
    assert missing.value.topics == ["no-such-a", "no-such-b"]
    assert scenario.attempt()["error"]["kind"] == "refused"
    assert scenario.positions() == {}


def test_partitioned_sink_takes_each_kafka_partition_into_its_own_table(scenario: Scenario) -> None:
    """``sink ddl --partitions`` makes one table a Kafka partition, and one for partitions that come later."""
    topic = scenario.topics.create(3)
    for partition in range(3):
        scenario.topics.produce(topic, numbers(0, 3), partition=partition)
    scenario.write(topics=topic).make_sink(partitions=2)
    scenario.run()
    assert [scenario.sql(f"SELECT count(*) FROM {scenario.table}_{part}") for part in ("p0", "p1", "rest")] == [[(3,)]] * 3
    scenario.check()


# ---- what the log may hold


def test_empty_topic_and_empty_partitions_are_no_work(scenario: Scenario) -> None:
    """Partitions without records get a position and no slice."""
    empty, some = scenario.topics.create(2), scenario.topics.create(3)
    scenario.topics.produce(some, numbers(0, 4), partition=1)
    scenario.write(topics=[empty, some]).make_sink()
    assert [(part.topic, part.partition) for part in scenario.run().partitions] == [(some, 1)]
    assert scenario.positions() == {(empty, 0): 0, (empty, 1): 0, (some, 0): 0, (some, 1): 4, (some, 2): 0}
    scenario.check()


@FORMS
def test_aborted_transactions_are_not_read_and_count_as_unaccounted(scenario: Scenario, transform: str) -> None:
    """Aborted records and the markers of all transactions are offsets of the range without a record."""
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


@FORMS
def test_range_of_markers_alone_moves_the_position(scenario: Scenario, transform: str) -> None:
    """A slice in which no record is visible is committed like any other."""
    topic = scenario.topics.create()
    scenario.topics.transaction(topic, [b"x", b"y"], commit=False)
    scenario.write(transform, topics=topic, batch={"max_records": 2}).make_sink()
    scenario.run()
    assert scenario.positions() == {(topic, 0): 3}
    assert scenario.counts() == {"unaccounted": 3}
    scenario.check()


@FORMS
def test_run_stops_before_an_open_transaction(scenario: Scenario, transform: str) -> None:
    """The end of a run is the last stable offset: what lies behind waits until the transaction has ended."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a", b"b"])
    with open_transaction(scenario, topic, b"c") as producer:
        scenario.topics.produce(topic, [b"d"])
        scenario.write(transform, topics=topic).make_sink()
        scenario.run()
        assert scenario.rows() == [b"a", b"b"]
        assert scenario.run().partitions == ()
        producer.commit_transaction(30)
    scenario.run()
    assert scenario.rows() == [b"a", b"b", b"c", b"d"]
    scenario.check()


def test_compacted_away_records_are_unaccounted(scenario: Scenario) -> None:
    """Offsets that compaction took are gaps: nobody lost them, and the ledger says how many there were."""
    config = {"cleanup_policy": "compact", "segment_ms": "1", "min_cleanable_dirty_ratio": "0.01", "min_compaction_lag_ms": "0"}
    topic = scenario.topics.create(**config)
    for value in numbers(0, 20):
        scenario.topics.produce(topic, [value], key=b"same")
    scenario.topics.produce(topic, [b"other"], key=b"other")
    eventually(lambda: len(scenario.records(topic)) < 21, within_s=60)
    scenario.write(topics=topic).make_sink()
    done = scenario.run()
    assert done.records == 21
    counts = scenario.counts()
    assert counts["loaded"] + counts["unaccounted"] == 21
    assert counts["unaccounted"] > 0
    assert scenario.rows()[-1] == b"other"
    scenario.check()


@FORMS
def test_null_values_and_empty_values_are_records(scenario: Scenario, transform: str) -> None:
    """A tombstone is null, an empty value is empty."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [None, b"", b"\0\xff"], key=b"k")
    scenario.write(transform, topics=topic).make_sink()
    scenario.run()
    assert scenario.rows() == [None, b"", b"\0\xff"]
    scenario.check()


# ---- dispositions


JUDGES = {
    "function": """
        from tidemark.transform import Fail, Record, Retry, Skip

        def transform(record: Record) -> dict:
            word = (record.value or b"fail").decode()
            if word == "skip":
                raise Skip("not wanted")
            if word == "fail":
                raise Fail("no carrier")
            if word == "retry":
                raise Retry("try later")
            return {"payload": record.value}
    """,
    "arrow": """
        import pyarrow as pa
        import pyarrow.compute as pc

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            word = pc.fill_null(batch["value"], b"fail").cast(pa.string())
            said = pc.if_else(pc.is_in(word, pa.array(["skip", "fail", "retry"])), word, None)
            names = {"fail": "Fail: no carrier", "retry": "Retry: try later"}
            error = pa.array([names.get(each) for each in word.to_pylist()], pa.string())
            lineage = [batch[name] for name in ("kafka_topic", "kafka_partition", "kafka_offset")]
            columns = ["kafka_topic", "kafka_partition", "kafka_offset", "payload", "disposition", "error"]
            return pa.RecordBatch.from_arrays([*lineage, batch["value"], said, error], names=columns)
    """,
}


@pytest.mark.parametrize("form", JUDGES)
def test_each_record_is_loaded_skipped_retried_or_failed(scenario: Scenario, form: str) -> None:
    """What a transform says of a record is what becomes of it, and the ledger counts it."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"one", b"skip", b"fail", b"retry", None, b"two"])
    scenario.write(JUDGES[form], topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows("payload, kafka_offset") == [(b"one", 0), (b"two", 5)]
    assert scenario.counts() == {"loaded": 2, "skipped": 1, "retried": 1, "failed": 2, "sink_rows": 2}
    assert scenario.failed() == [
        (2, "fail", "Fail", "no carrier"),
        (3, "retry", "Retry", "try later"),
        (4, "fail", "Fail", "no carrier"),
    ]
    scenario.check()


HEADERS: list[Any] = [
    None,
    [],
    [("trace", b"1")],
    [("trace", b"1"), ("trace", b"2"), ("trace", b"1")],
    [("null", None), ("empty", b""), ("", b"no name")],
    [("bytes", b"\xff\xfe\0\x80"), ("zero\0name", b"x"), ("ключ", "значение".encode())],
]


@pytest.mark.parametrize("form", JUDGES)
@pytest.mark.parametrize("disposition", ["fail", "retry"])
def test_failed_record_is_kept_byte_for_byte(scenario: Scenario, form: str, disposition: str) -> None:
    """Key, value, headers (order, repetition, nulls, any bytes) and timestamp are kept as the record has them."""
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


def test_failed_record_of_a_topic_that_the_broker_stamps_has_the_brokers_time(scenario: Scenario) -> None:
    """With LogAppendTime the record's timestamp is the broker's."""
    topic = scenario.topics.create(message_timestamp_type="LogAppendTime")
    scenario.topics.produce(topic, [b"fail"], timestamp=1_600_000_000_123)
    scenario.write(JUDGES["function"], topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.failed("record_timestamp > now() - interval '10 minutes'") == [(True,)]
    scenario.check()


def test_many_failed_records_among_many_good_ones_are_all_kept(scenario: Scenario) -> None:
    """Failed records are read a second time by their offsets, over several polls of the reader."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"fail" if number % 1000 == 7 else b"good" for number in range(25_000)])
    scenario.write(JUDGES["arrow"], topics=topic).make_sink("payload bytea")
    scenario.run()
    assert [offset for offset, *_ in scenario.failed()] == list(range(7, 25_000, 1000))
    assert scenario.counts() == {"loaded": 24_975, "failed": 25, "sink_rows": 24_975}
    scenario.check()


def test_error_text_that_postgres_cannot_store_is_made_storable(scenario: Scenario) -> None:
    """U+0000, lone surrogates and very long texts in an exception's message must not stop the record from being kept."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"0", b"1", b"2", b"3"])
    scenario.write(
        """
        from tidemark.transform import Record

        def transform(record: Record) -> dict:
            raise ValueError(["a\\0b", "lone \\ud800", "x" * 100_000, ""][int(record.value)])
        """,
        topics=topic,
    ).make_sink("payload bytea")
    scenario.run()
    texts = [text for (text,) in scenario.failed("error_text")]
    assert texts[0] == "a\\0b"
    assert texts[1].startswith("lone ")
    assert texts[2] == "x" * 10_000
    assert texts[3]
    scenario.check()


def test_run_stops_when_more_records_fail_than_the_spec_allows(scenario: Scenario) -> None:
    """What was committed stays, failed records included; the next run goes on behind it once the limit is raised."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"fail", b"good"] * 10)
    scenario.write(JUDGES["function"], topics=topic, batch={"max_records": 8, "max_failed_records": 7}).make_sink("payload bytea")
    with pytest.raises(TooManyFailed) as stopped:
        scenario.run()
    assert (stopped.value.failed, stopped.value.limit) == (8, 7)
    assert scenario.attempt()["error"]["kind"] == "refused"
    assert scenario.counts()["failed"] == 8
    scenario.check()
    scenario.set(batch={"max_records": 8, "max_failed_records": 8})
    scenario.run()
    assert scenario.counts() == {"loaded": 10, "failed": 10, "sink_rows": 10}
    scenario.check()


# ---- the function form


def test_one_record_makes_as_many_rows_as_the_function_returns(scenario: Scenario) -> None:
    """Rows of one record are numbered in the order in which they were returned; none at all is a skipped record."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a b c", b"", b"d"])
    scenario.write(
        """
        from collections.abc import Iterator
        from typing import TypedDict
        from tidemark.transform import Record

        class Row(TypedDict):
            word: str

        def transform(record: Record) -> Iterator[Row]:
            for word in record.text().split():
                yield {"word": word}
        """,
        topics=topic,
    ).make_sink()
    scenario.run()
    assert scenario.rows("word, kafka_offset, kafka_seq") == [("a", 0, 0), ("b", 0, 1), ("c", 0, 2), ("d", 2, 0)]
    assert scenario.counts() == {"loaded": 2, "skipped": 1, "sink_rows": 4}
    scenario.check()


@pytest.mark.parametrize("answer", ["None", "[]", "iter(())", "(row for row in [])"])
def test_no_row_is_a_skipped_record(scenario: Scenario, answer: str) -> None:
    """None and an empty iterable say the same: meant to make no row."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a", b"b"])
    source = f"from tidemark.transform import Record\n\ndef transform(record: Record):\n    return {answer}\n"
    scenario.write(source, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.counts() == {"skipped": 2}
    scenario.check()


@pytest.mark.parametrize("answer", ["'text'", "3", "[1, 2]", "b'x'", "[{'payload': b'x'}, None]"])
def test_answer_that_is_no_row_is_kept_to_be_retried(scenario: Scenario, answer: str) -> None:
    """A function that returns neither rows nor None has not dealt with the record: it is kept, with what was returned."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    source = f"from tidemark.transform import Record\n\ndef transform(record: Record):\n    return {answer}\n"
    scenario.write(source, topics=topic).make_sink("payload bytea")
    scenario.run()
    ((_, disposition, kind, text),) = scenario.failed()
    assert (disposition, kind) == ("retry", "TypeError")
    assert "must return" in text
    scenario.check()


def test_rows_before_an_exception_are_not_loaded(scenario: Scenario) -> None:
    """A generator that raises half-way fails its record as a whole: no row of it stays."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(
        """
        from tidemark.transform import Record

        def transform(record: Record):
            yield {"payload": record.value}
            raise OSError("gone")
        """,
        topics=topic,
    ).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows() == []
    assert scenario.failed() == [(0, "retry", "OSError", "gone")]
    scenario.check()


PERMANENT = """
    from tidemark.transform import Fail, Record, Retry

    class BadRow(Exception):
        pass

    class WorseRow(BadRow):
        pass

    def chained(outer, inner):
        try:
            raise inner
        except Exception as error:
            raise outer from error

    def transform(record: Record) -> dict:
        match record.value:
            case b"json":
                return record.json()
            case b"key":
                return {}["carrier"]
            case b"bad":
                raise BadRow("bad")
            case b"worse":
                raise WorseRow("worse")
            case b"chained":
                chained(RuntimeError("outer"), WorseRow("inner"))
            case b"fail inside":
                chained(RuntimeError("outer"), Fail("inner"))
            case b"retry":
                raise Retry("later")
            case b"other":
                raise RuntimeError("other")
            case b"stop":
                raise StopIteration("odd")
"""


def test_permanent_exceptions_fail_a_record_and_all_others_retry_it(scenario: Scenario) -> None:
    """``retry.permanent`` names classes; their subclasses count, and so does one that caused the error."""
    topic = scenario.topics.create()
    said = ["json", "key", "bad", "worse", "chained", "fail inside", "retry", "other", "stop"]
    scenario.topics.produce(topic, said)
    scenario.write(PERMANENT, topics=topic, retry={"permanent": ["ValueError", f"{scenario.name}.BadRow"]}).make_sink("payload bytea")
    scenario.run()
    assert {said[offset]: (disposition, kind) for offset, disposition, kind, _ in scenario.failed()} == {
        "json": ("fail", "JSONDecodeError"),
        "key": ("retry", "KeyError"),
        "bad": ("fail", "BadRow"),
        "worse": ("fail", "WorseRow"),
        "chained": ("fail", "RuntimeError"),
        "fail inside": ("fail", "RuntimeError"),
        "retry": ("retry", "Retry"),
        "other": ("retry", "RuntimeError"),
        "stop": ("retry", "StopIteration"),
    }
    scenario.check()


TYPES = """
    import datetime as dt
    import decimal
    import uuid
    from typing import Any, TypedDict
    from tidemark.transform import Record

    class Row(TypedDict):
        flag: bool | None
        small: int | None
        number: int | None
        ratio: float | None
        name: str | None
        raw: bytes | None
        moment: dt.datetime | None
        day: dt.date | None
        clock: dt.time | None
        took: dt.timedelta | None
        price: decimal.Decimal | None
        ident: uuid.UUID | None
        tags: list[str] | None
        extra: dict[str, Any] | None

    def transform(record: Record) -> Row:
        return eval(record.value, {"dt": dt, "Decimal": decimal.Decimal, "uuid": uuid})
"""
COLUMNS = """
    flag boolean, small smallint, number bigint, ratio double precision, name text, raw bytea, moment timestamptz, day date, clock time,
    took interval, price numeric(10, 2), ident uuid, tags text[], extra jsonb
"""


def test_python_values_become_the_tables_own_types(scenario: Scenario) -> None:
    """A plain function returns Python values; each is stored as what its column is."""
    topic = scenario.topics.create()
    scenario.topics.produce(
        topic,
        [
            """{"flag": True, "small": 7, "number": 2**62, "ratio": 2, "name": "Ä", "raw": b"\\0", "day": dt.date(2020, 2, 29),
            "moment": dt.datetime(2020, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2))), "clock": dt.time(1, 2, 3),
            "took": dt.timedelta(hours=1), "price": Decimal("1.50"), "ident": uuid.UUID(int=1), "tags": ["a", "b"], "extra": {"a": [1]}}""",
            "{}",
        ],
    )
    scenario.write(TYPES, topics=topic).make_sink(COLUMNS)
    scenario.run()
    assert scenario.failed() == []
    texts = "moment::text, day::text, clock::text, took::text, price::text, ident::text"
    one, none = scenario.rows(f"flag, small, number, ratio, name, raw, {texts}, tags, extra")
    assert one == (
        True, 7, 2**62, 2.0, "Ä", b"\0", "2020-01-01 10:00:00+00", "2020-02-29", "01:02:03", "01:00:00", "1.50",
        "00000000-0000-0000-0000-000000000001", ["a", "b"], {"a": [1]},
    )  # fmt: skip
    assert none == (None,) * 14
    scenario.check()


MISFITS = {
    "small": "40_000",
    "number": "2**70",
    "flag": "'yes'",
    "name": "7",
    "moment": "dt.datetime(2020, 1, 1)",
    "price": "Decimal('1.555')",
    "ident": "'no-uuid'",
    "tags": "'ab'",
    "ratio": "'1'",
    "day": "'today'",
    "extra": "{1, 2}",
    "raw": "3",
}


def test_value_that_does_not_fit_its_column_fails_its_record_alone(scenario: Scenario) -> None:
    """The record is kept with the column and the value's trouble; its neighbours are loaded."""
    topic = scenario.topics.create()
    bad = [f'{{"{column}": {value}}}' for column, value in MISFITS.items()]
    scenario.topics.produce(topic, ['{"name": "before"}', *bad, '{"name": "after"}'])
    scenario.write(TYPES, topics=topic).make_sink(COLUMNS)
    scenario.run()
    assert scenario.rows("name") == ["before", "after"]
    found = {text.split()[0]: disposition for _, disposition, _, text in scenario.failed()}
    assert found == dict.fromkeys(MISFITS, "fail")
    scenario.check()


def test_column_that_the_table_lacks_refuses_the_slice(scenario: Scenario) -> None:
    """Without a declared result a stray key is seen at its first record, and named; nothing is dropped on the quiet."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    source = "from tidemark.transform import Record\n\ndef transform(record: Record):\n    return {'payload': b'', 'carier': 1}\n"
    scenario.write(source, topics=topic).make_sink("payload bytea, carrier text")
    with pytest.raises(TransformFailed, match="'carier'"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 0}
    scenario.check()


# ---- the Arrow form


def arrow(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "import pyarrow as pa\nimport pyarrow.compute as pc\n\nLINEAGE = ['kafka_topic', 'kafka_partition', 'kafka_offset']\n\n"
    return f"{head}\ndef transform(batch: pa.RecordBatch) -> pa.RecordBatch:\n    given = batch.select(LINEAGE)\n{lines}"


def with_column(name: str, values: str) -> str:
    return f"given = given.append_column('{name}', {values})"


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (with_column("payload", "pa.nulls(len(batch), pa.int64())") + "\nreturn given", SinkMismatch, "column payload"),
        (with_column("other", "batch['value']") + "\nreturn given", SinkMismatch, "no column other"),
        ("return batch.select(['kafka_offset', 'value']).rename_columns(['kafka_offset', 'payload'])", SinkMismatch, "kafka_topic"),
        ("return given.to_pydict()", TransformFailed, "returned dict"),
        ("raise OSError('no such file')", TransformFailed, "no such file"),
    ],
)
def test_arrow_transform_that_does_not_fit_is_refused_before_a_record_is_read(
    scenario: Scenario, body: str, error: type[TidemarkError], said: str
) -> None:
    """The schema of an empty batch is compared with the table; nothing is read and no offset moves."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(arrow(body), topics=topic).make_sink("payload bytea")
    with pytest.raises(error, match=said):
        scenario.run()
    assert scenario.ledger() == []
    assert said in scenario.attempt()["error"]["text"]
    scenario.check()


ONCE_FILLED = "if len(batch):\n    {}\n" + with_column("payload", "batch['value']") + "\nreturn given"


@pytest.mark.parametrize(
    ("then", "error", "said"),
    [
        ("raise OSError('no such file')", TransformFailed, "no such file"),
        ("return None", TransformFailed, "NoneType"),
        ("return given", BadOutput, "lacks column payload"),
        ("return batch", BadOutput, "lacks"),
        (with_column("payload", "pa.array(range(len(batch)))") + "; return given", BadOutput, "payload came as int64"),
        ("given = given.set_column(2, 'kafka_offset', pc.add(batch['offset'], 100))", BadOutput, "outside the range"),
        ("given = given.set_column(1, 'kafka_partition', pc.add(batch['partition'], 1))", BadOutput, "another partition"),
        ("given = given.set_column(2, 'kafka_offset', pa.nulls(len(batch), pa.int64()))", BadOutput, "no lineage"),
        ("given = given.set_column(2, 'kafka_offset', batch['value'])", BadOutput, "lineage"),
        (with_column("disposition", "pa.array(['drop'] * len(batch))"), BadOutput, "'drop'"),
        (with_column("disposition", "pa.array([1] * len(batch))"), BadOutput, "disposition"),
        (with_column("extra", "batch['value']"), BadOutput, "extra"),
    ],
)
def test_arrow_transform_that_goes_wrong_on_records_refuses_the_slice(
    scenario: Scenario, then: str, error: type[TidemarkError], said: str
) -> None:
    """What a filled batch gives is held to what the empty one promised, and to the records that were read."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a", b"b"])
    scenario.write(arrow(ONCE_FILLED.format(then)), topics=topic).make_sink("payload bytea")
    with pytest.raises(error, match=said):
        scenario.run()
    assert scenario.attempt()["state"] == "FAILED"
    assert scenario.rows() == []
    scenario.check()


@pytest.mark.parametrize("words", [["load", "skip"], ["fail", "load"], ["retry", "fail"], ["skip", "retry"], [None, "fail"]])
def test_record_with_contradicting_rows_refuses_the_slice(scenario: Scenario, words: list[str | None]) -> None:
    """All rows of one record must have one disposition."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    body = f"twice = batch.take([0, 0]) if len(batch) else batch\nwords = {words} if len(batch) else []\n"
    body += "given = twice.select(LINEAGE).append_column('payload', twice['value'])\n"
    body += "return given.append_column('disposition', pa.array(words, pa.string()))"
    scenario.write(arrow(body), topics=topic).make_sink("payload bytea")
    with pytest.raises(BadOutput, match="give all one"):
        scenario.run()
    scenario.check()


def test_arrow_rows_of_one_record_are_numbered_and_rows_that_are_filtered_away_are_unaccounted(scenario: Scenario) -> None:
    """A record may have no row, one, or several, in any order; what left no trace is unaccounted."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"0", b"1", b"2", b"3"])
    body = "twice = batch.take([3, 1, 3, 1, 3]) if len(batch) else batch\n"
    body += "return twice.select(LINEAGE).append_column('payload', twice['value'])"
    scenario.write(arrow(body), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.rows("kafka_offset, kafka_seq") == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
    assert scenario.counts() == {"loaded": 2, "unaccounted": 2, "sink_rows": 5}
    scenario.check(filtered=2)


def test_run_whose_rows_are_all_filtered_away_moves_the_positions(scenario: Scenario) -> None:
    """No row at all is an answer, too."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.topics.produce(topic, numbers(0, 5), partition=1)
    scenario.write(arrow(with_column("payload", "batch['value']") + "\nreturn given.slice(0, 0)"), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.positions() == {(topic, 0): 5, (topic, 1): 5}
    assert scenario.counts() == {"unaccounted": 10}
    scenario.check(filtered=10)


def test_types_that_change_from_batch_to_batch_refuse_the_slice(scenario: Scenario) -> None:
    """Decimals of another scale are the one change that the column's own check lets through; the encoder's does not."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 15_000))
    body = "scale = 2 if not len(batch) or batch['offset'][0].as_py() == 0 else 1\n"
    body += with_column("price", "pa.array([1] * len(batch), pa.int64()).cast(pa.decimal128(20 + scale, scale))") + "\nreturn given"
    scenario.write(arrow(body), topics=topic).make_sink("price numeric")
    with pytest.raises(TypesChanged, match=r"decimal128\(22, 2\)(.|\n)*decimal128\(21, 1\)"):
        scenario.run()
    assert scenario.rows("price") == []
    scenario.check()


def test_batches_of_nulls_and_batches_of_values_are_one_column(scenario: Scenario) -> None:
    """A column that is all null in one batch may come as Arrow's null type; that is no change of type."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10_001))
    body = with_column("payload", "pa.nulls(len(batch)) if len(batch) == 1 else batch['value']") + "\nreturn given"
    scenario.write(arrow(body), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.counts() == {"loaded": 10_001, "sink_rows": 10_001}


# ---- sinks that do not fit


def test_missing_table_is_refused_before_a_record_is_read(scenario: Scenario) -> None:
    """The error says which command prints the DDL."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(topics=topic)
    with pytest.raises(SinkMissing, match="tidemark sink ddl"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 0}


def test_table_that_refuses_a_row_refuses_the_slice_with_postgres_own_words(scenario: Scenario) -> None:
    """A constraint of the table is Postgres' to keep; the attempt's row says which."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"good", b"bad"])
    scenario.write(topics=topic).make_sink("payload bytea CONSTRAINT never_bad CHECK (payload <> 'bad')")
    with pytest.raises(SinkRejected) as refused:
        scenario.run()
    assert refused.value.sqlstate == "23514"
    assert "never_bad" in scenario.attempt()["error"]["text"]
    assert scenario.rows() == []
    scenario.check()


# ---- where to start, and positions that the log does not have


@pytest.mark.parametrize(("reset", "loaded"), [(None, 3), ("earliest", 3), ("latest", 0)])
def test_first_position_is_what_offset_reset_says(scenario: Scenario, reset: str | None, loaded: int) -> None:
    """Left out is earliest. What ``latest`` skips at the first run was never the group's: it is no lost range."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 3))
    scenario.write(topics=topic, offset_reset=reset).make_sink()
    scenario.run()
    assert len(scenario.rows()) == loaded
    scenario.topics.produce(topic, numbers(3, 5))
    scenario.run()
    assert scenario.rows()[-2:] == numbers(3, 5)
    assert len(scenario.rows()) == loaded + 2
    assert scenario.lost() == []
    scenario.check()


def test_offset_reset_none_refuses_to_choose_a_first_position(scenario: Scenario) -> None:
    """No position appears; what to write instead is in the message."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 3))
    scenario.write(topics=topic, offset_reset="none").make_sink()
    with pytest.raises(NoPosition, match="offset_reset: earliest"):
        scenario.run()
    assert scenario.positions() == {}
    scenario.set(offset_reset="earliest")
    scenario.run()
    scenario.set(offset_reset="none")
    scenario.topics.produce(topic, numbers(3, 5))
    scenario.run()
    assert scenario.rows() == numbers(0, 5)
    scenario.check()


def test_topic_whose_start_was_trimmed_before_the_first_run_starts_at_what_is_there(scenario: Scenario) -> None:
    """A group that never had a position lost nothing."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.topics.trim(topic, {0: 3})
    scenario.write(topics=topic).make_sink()
    scenario.run()
    assert scenario.ledger() == [(topic, 0, 3, 5)]
    assert scenario.lost() == []
    scenario.check()


@pytest.mark.parametrize("reset", [None, "none"])
def test_retention_ahead_of_the_position_is_refused(scenario: Scenario, reset: str | None) -> None:
    """Records that are gone before they were read stop the run; nothing is clamped, not even for the partitions that are well."""
    topic = trimmed_below_the_position(scenario)
    scenario.set(offset_reset=reset)
    with pytest.raises(OffsetOutOfRange) as refused:
        scenario.run()
    assert (refused.value.position, refused.value.start, refused.value.end) == (10, 15, 20)
    assert "records 10 to 14 are gone" in scenario.attempt()["error"]["text"]
    assert scenario.positions()[topic, 0] == 10
    assert scenario.lost() == []


def test_retention_ahead_of_the_position_is_a_lost_range_where_the_user_allowed_it(scenario: Scenario) -> None:
    """``earliest`` goes on with what is left, ``lost_range`` says what is not, and the closing word of the run says it, too."""
    trimmed_below_the_position(scenario)
    scenario.set(offset_reset="earliest")
    done = scenario.run()
    assert [(lost.start, lost.end, lost.reason) for lost in done.lost] == [(10, 15, "retention")]
    assert scenario.lost() == [(0, 10, 15, "retention")]
    assert scenario.rows(where="kafka_partition = 0") == numbers(0, 10) + numbers(15, 20)
    scenario.check()


def test_reset_to_latest_gives_up_what_is_still_there_as_well(scenario: Scenario) -> None:
    """``latest`` means: go on behind the last record. All of what is skipped is the lost range."""
    topic = trimmed_below_the_position(scenario)
    scenario.set(offset_reset="latest")
    scenario.run()
    assert scenario.lost() == [(0, 10, 20, "reset to latest")]
    scenario.topics.produce(topic, numbers(20, 22))
    scenario.run()
    assert scenario.rows(where="kafka_partition = 0") == numbers(0, 10) + numbers(20, 22)
    scenario.check()


def test_retention_up_to_the_end_leaves_a_lost_range_and_nothing_to_read(scenario: Scenario) -> None:
    """The whole rest is lost; the next record is read."""
    topic = trimmed_below_the_position(scenario, before=20)
    scenario.set(offset_reset="earliest")
    scenario.run()
    assert scenario.lost() == [(0, 10, 20, "retention")]
    scenario.topics.produce(topic, [b"next"])
    scenario.run()
    assert scenario.rows(where="kafka_partition = 0")[-1] == b"next"
    scenario.check()


def test_retention_that_passes_a_range_while_it_is_read_refuses_the_slice(scenario: Scenario) -> None:
    """The run fails with the reason, and the next one stores what was lost."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic, offset_reset="earliest").make_sink()
    with pytest.raises(RangeGone):
        scenario.run(before=lambda part: scenario.topics.trim(topic, {0: 5}))
    assert scenario.rows() == []
    scenario.run()
    assert scenario.rows() == numbers(5, 10)
    assert scenario.lost() == [(0, 0, 5, "retention")]
    scenario.check()


@pytest.mark.parametrize("reset", ["earliest", "latest", None])
def test_position_beyond_the_end_is_refused_whatever_the_spec_allows(scenario: Scenario, reset: str | None) -> None:
    """The log was truncated: what it holds now is not what was loaded, and no reset can know that."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.write(topics=topic, offset_reset=reset).make_sink()
    scenario.run()
    scenario.sql("UPDATE tidemark.partition_offset SET next_offset = 9")
    with pytest.raises(OffsetOutOfRange, match="beyond the end of the log, 5"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 9}


# ---- topics that change


@pytest.mark.parametrize("records", [2, 5, 9], ids=["fewer", "as many", "more"])
@pytest.mark.parametrize("reset", [None, "none"])
def test_recreated_topic_is_refused(scenario: Scenario, records: int, reset: str | None) -> None:
    """A topic is known by its UUID, not by its name: a new one's offsets are other records, however many there are."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.set(offset_reset=reset)
    scenario.topics.recreate(topic)
    scenario.topics.produce(topic, numbers(100, 100 + records))
    with pytest.raises(TopicRecreated) as refused:
        scenario.run()
    assert refused.value.positions == {0: 5}
    assert scenario.rows() == numbers(0, 5)
    assert scenario.lost() == []


@pytest.mark.parametrize("reset", ["earliest", "latest"])
@pytest.mark.parametrize("records", [2, 9], ids=["fewer", "more"])
def test_recreated_topic_is_read_from_its_start_where_the_user_allowed_it(scenario: Scenario, reset: str, records: int) -> None:
    """The new topic has an id of its own in the lineage; the rest of the old one is a lost range whose end nobody knows."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.write(topics=topic, offset_reset="earliest").make_sink()
    scenario.run()
    scenario.set(offset_reset=reset)
    scenario.topics.recreate(topic)
    scenario.topics.produce(topic, numbers(100, 100 + records))
    done = scenario.run()
    assert [(lost.partition, lost.start, lost.end, lost.reason) for lost in done.lost] == [
        (0, 5, None, "topic re-created"),
        (1, 0, None, "topic re-created"),
    ]
    assert scenario.rows() == numbers(0, 5) + numbers(100, 100 + records)
    assert scenario.run().partitions == ()
    assert len(scenario.lost()) == 2
    scenario.check()


def test_topic_that_is_recreated_twice_is_noticed_twice(scenario: Scenario) -> None:
    """Each incarnation's rest is lost once, also of those that were never read."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 3))
    scenario.write(topics=topic, offset_reset="earliest").make_sink()
    scenario.run()
    for round_ in (1, 2):
        scenario.topics.recreate(topic)
        scenario.topics.produce(topic, numbers(round_ * 10, round_ * 10 + 2))
        scenario.run()
    assert scenario.rows() == numbers(0, 3) + numbers(10, 12) + numbers(20, 22)
    assert [(start, end) for _, start, end, _ in scenario.lost()] == [(3, None), (2, None)]
    scenario.check()


def test_recreation_that_was_refused_is_still_refused_by_the_next_run(scenario: Scenario) -> None:
    """Having looked at the new topic once does not make it the known one."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 3))
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.topics.recreate(topic)
    for _ in range(2):
        with pytest.raises(TopicRecreated):
            scenario.run()
    scenario.set(offset_reset="earliest")
    scenario.run()
    assert scenario.lost() == [(0, 3, None, "topic re-created")]
    scenario.check()


@pytest.mark.parametrize("reset", [None, "earliest", "latest"])
def test_added_partition_is_read_from_its_first_record(scenario: Scenario, reset: str | None) -> None:
    """Also under ``latest``: what was produced to it before anyone noticed it is not skipped."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 2))
    scenario.write(topics=topic, offset_reset=reset).make_sink()
    scenario.run()
    scenario.topics.grow(topic, 3)
    eventually(lambda: scenario.records(topic, 2) == {})
    scenario.topics.produce(topic, numbers(10, 12), partition=2)
    scenario.run()
    assert scenario.rows(where="kafka_partition = 2") == numbers(10, 12)
    assert set(scenario.positions()) == {(topic, 0), (topic, 1), (topic, 2)}
    scenario.check()


def test_added_partition_is_refused_under_offset_reset_none(scenario: Scenario) -> None:
    """``none`` chooses no position, not even an obvious one; the partitions that have one stay where they are."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 2))
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.set(offset_reset="none")
    scenario.topics.grow(topic, 2)
    eventually(lambda: scenario.records(topic, 1) == {})
    with pytest.raises(NoPosition, match=rf"{topic}/1"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 2}


# ---- runs that meet, and runs that end in the middle


GATED = """
    import threading
    from tidemark.transform import Record

    entered, gate = threading.Event(), threading.Event()

    def transform(record: Record) -> dict:
        entered.set()
        assert gate.wait(60)
        return {"payload": record.value}
"""


def test_run_that_waited_before_its_commit_is_fenced_by_a_newer_run(scenario: Scenario) -> None:
    """The older run's slice begins after the newer one claimed: its compare-and-set finds another epoch, and nothing of it stays."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic).make_sink()
    entered, gate = threading.Event(), threading.Event()

    def wait(part: Slice) -> None:
        entered.set()
        assert gate.wait(60)

    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(scenario.run, before=wait)
        assert entered.wait(60)
        older_attempt = scenario.attempt_id
        assert scenario.run().records == 10
        gate.set()
        with pytest.raises(OffsetFenced) as fenced:
            older.result(60)
    assert fenced.value.current > fenced.value.held
    assert scenario.attempt(older_attempt)["error"]["kind"] == "fenced"
    assert scenario.rows() == numbers(0, 10)
    scenario.check()


def test_newer_run_ends_the_session_of_an_older_one_that_hangs_inside_its_commit(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim waits a while for the commit in flight and then ends its session: no run can block a group for ever."""
    monkeypatch.setattr(claims, "GRACE_MS", 300)
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(GATED, topics=topic).make_sink("payload bytea")
    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(scenario.run)
        module = eventually(lambda: sys.modules.get(scenario.name))
        assert module.entered.wait(60)
        older_attempt = scenario.attempt_id
        newer = pool.submit(scenario.run)
        eventually(
            lambda: scenario.attempt_id != older_attempt and scenario.sql("SELECT 1 FROM tidemark.partition_offset WHERE owner_epoch = 2")
        )
        module.gate.set()
        with pytest.raises((DatabaseUnavailable, OffsetFenced)):
            older.result(60)
        assert newer.result(60).records == 10
    assert scenario.rows() == numbers(0, 10)
    scenario.check()


def test_runs_that_start_together_never_load_a_record_twice(scenario: Scenario) -> None:
    """Some of them are fenced, or refused their claim; whatever happens, each record is loaded once."""
    topic = scenario.topics.create(3)
    for partition in range(3):
        scenario.topics.produce(topic, numbers(0, 40), partition=partition)
    scenario.write(topics=topic, batch={"max_records": 30}).make_sink()
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(scenario.run) for _ in range(4)]
        errors = [error for each in runs if (error := each.exception(120)) is not None]
    assert all(isinstance(error, OffsetFenced | ClaimRefused | DatabaseUnavailable) for error in errors), errors
    scenario.run()
    assert len(scenario.rows()) == 120
    scenario.check()


def test_run_that_failed_in_the_middle_is_finished_by_the_next(scenario: Scenario) -> None:
    """Slices that were committed stay, those that were not are read again; the failed attempt says why it failed."""
    topic = scenario.topics.create(3)
    for partition in range(3):
        scenario.topics.produce(topic, numbers(0, 10), partition=partition)
    scenario.write(topics=topic, batch={"max_records": 20}).make_sink()
    with pytest.raises(BrokerUnavailable):
        scenario.run(before=fail_when(lambda part: part.partition.partition == 1))
    assert scenario.attempt()["error"] == {
        "kind": "unavailable",
        "type": "BrokerUnavailable",
        "text": str(BrokerUnavailable(cause="it was unplugged")),
    }
    assert 0 < len(scenario.rows()) < 30
    scenario.check()
    scenario.run()
    assert len(scenario.rows()) == 30
    assert scenario.sql("SELECT count(*) FROM tidemark.partition_offset WHERE owner IS NOT NULL") == [(0,)]
    scenario.check()


def test_runs_of_new_consumers_that_start_together_share_a_topic(scenario: Scenario) -> None:
    """Groups and topics are known by one row each, whoever writes it first."""
    names = [f"group-{number}" for number in range(20)]
    topic = scenario.topics.create()

    def start(name: str) -> tuple[int, int]:
        with session(scenario.database_url) as connection, transaction(connection) as cur:
            return store.ensure_group(cur, name), store.ensure_topic(cur, topic, "uuid of the topic")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(start, [name for name in names for _ in range(8)]))
    assert len(set(found)) == 20
    assert scenario.sql("SELECT count(*) FROM tidemark.consumer_group UNION ALL SELECT count(*) FROM tidemark.topic") == [(20,), (1,)]


def test_runs_use_up_no_topic_ids(scenario: Scenario) -> None:
    """A topic's id is a smallint in each row of the sink: only a topic that was never seen may take a new one."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    scenario.sql("ALTER TABLE tidemark.topic ALTER COLUMN topic_id RESTART WITH 32766")
    for start in range(4):
        scenario.topics.produce(topic, numbers(start, start + 1))
        scenario.run()
    assert scenario.rows("payload, kafka_topic_id") == [(value, 32766) for value in numbers(0, 4)]
    scenario.check()


TASK = TaskIdentity("consume__x", "scheduled__1", "consume", -1, 1)


def test_second_try_of_a_task_whose_first_try_committed_everything_has_nothing_to_do(scenario: Scenario) -> None:
    """Airflow may try a task again whose word got lost. The run was bounded by the first try's plan: what came later is the next's."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic).make_sink()
    scenario.run(task=TASK)
    scenario.topics.produce(topic, numbers(10, 12))
    again = scenario.run(task=TASK)
    assert (again.state, again.records) == ("COMMITTED", 0)
    assert scenario.rows() == numbers(0, 10)
    assert scenario.run(task=TaskIdentity("consume__x", "scheduled__2", "consume", -1, 1)).records == 2
    scenario.check()


def test_second_try_of_a_task_whose_first_try_stopped_half_way_reads_the_rest(scenario: Scenario) -> None:
    """A try that did not commit all it planned is gone on from."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic, batch={"max_records": 4}).make_sink()
    with pytest.raises(BrokerUnavailable):
        scenario.run(task=TASK, before=fail_when(lambda part: part.start == 4))
    assert scenario.run(task=TASK).records == 6
    assert scenario.rows() == numbers(0, 10)
    scenario.check()


def test_second_try_of_a_task_that_had_nothing_to_read_reads_what_came_since(scenario: Scenario) -> None:
    """An empty plan is not a run that was committed: there is nothing that the second try could repeat."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    scenario.run(task=TASK)
    scenario.topics.produce(topic, numbers(0, 3))
    assert scenario.run(task=TASK).records == 3
    scenario.check()


# ---- what is away, or not of this version


def test_database_without_the_schema_is_refused_with_the_command_that_makes_it(scenario: Scenario, stack: Any) -> None:
    """Nobody finds out by a missing relation."""
    scenario.write(topics=scenario.topics.create())
    scenario.sql("DROP SCHEMA tidemark CASCADE")
    with pytest.raises(SchemaMismatch, match="tidemark migrate"):
        scenario.run()


def test_database_of_a_newer_version_is_refused(scenario: Scenario) -> None:
    """Older code does not write into a newer schema."""
    scenario.write(topics=scenario.topics.create())
    scenario.sql(
        "INSERT INTO tidemark.migration SELECT 'future', '9999_future', applied_at_utc FROM tidemark.migration LIMIT 1"
        if has_hash(scenario)
        else "INSERT INTO tidemark.migration (migration_id) VALUES ('9999_future')"
    )
    with pytest.raises(SchemaMismatch, match="9999_future"):
        scenario.run()


def test_broker_that_is_away_fails_the_attempt_as_unavailable(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed and nothing moves; Airflow may try again."""
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT_S", 2)
    scenario.write(topics=scenario.topics.create()).make_sink()
    scenario.connections = Connections(scenario.database_url, {"bootstrap.servers": "127.0.0.1:9"})
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:9"):
        scenario.run()
    assert scenario.attempt()["error"]["kind"] == "unavailable"
    assert scenario.positions() == {}


def test_database_that_is_away_fails_the_run_as_unavailable(scenario: Scenario) -> None:
    """There is no row to write it on; the error says it."""
    scenario.write(topics=scenario.topics.create())
    scenario.database_url = "postgresql://postgres@127.0.0.1:9/none"
    with pytest.raises(DatabaseUnavailable) as away:
        scenario.run()
    assert away.value.retriable


def test_database_session_that_is_lost_in_the_middle_fails_the_attempt_as_unavailable(scenario: Scenario) -> None:
    """The driver's own session is gone: what was committed stays, the attempt's row is written over a new one."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.write(topics=topic).make_sink()

    def lose(part: Slice) -> None:
        driver = "application_name LIKE 'tidemark driver%' AND datname = current_database()"
        scenario.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {driver}")

    with pytest.raises(DatabaseUnavailable):
        scenario.run(before=lose)
    assert scenario.attempt()["error"]["kind"] == "unavailable"
    assert scenario.rows() == numbers(0, 10)
    assert scenario.run().state == "COMMITTED"
    scenario.check()


# ---- helpers


def trimmed_below_the_position(scenario: Scenario, before: int = 15) -> str:
    """A topic of which 10 records were read, and whose first partition has since grown to 20 and lost those below ``before``."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.topics.produce(topic, numbers(0, 2), partition=1)
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.topics.produce(topic, numbers(10, 20))
    scenario.topics.trim(topic, {0: before})
    return topic


def fail_when(condition: Callable[[Slice], bool]) -> Callable[[Slice], None]:
    def before(part: Slice) -> None:
        if condition(part):
            raise BrokerUnavailable(cause="it was unplugged")

    return before


def has_hash(scenario: Scenario) -> bool:
    return bool(scenario.sql("SELECT 1 FROM pg_attribute WHERE attrelid = 'tidemark.migration'::regclass AND attname = 'migration_hash'"))


@contextlib.contextmanager
def open_transaction(scenario: Scenario, topic: str, value: bytes) -> Iterator[Any]:
    """A transaction that has produced a record and not ended."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": scenario.topics.servers, "transactional.id": scenario.name})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value=value, partition=0)
    producer.flush(30)
    yield producer
