"""How a task processes messages: batches for a transform, rows and verdicts from a plain function, payloads of failed records."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE, Message

from tidemark.formats.decoder import Decoder
from tidemark.formats.schema import parse
from tidemark.kafka.poll import chunk_of
from tidemark.records.outcome import ONLY, Disposition, TransformOutput
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.retry.order import KeyOrder
from tidemark.retry.store import Blocked
from tidemark.sink.table import Column, Layout
from tidemark.sink.tally import Tally
from tidemark.sink.target import Target
from tidemark.spec.model import Encoding
from tidemark.spec.user_transform import Form
from tidemark.transform import Fail, Record, Retry, Skip, to
from tidemark.worker import batches, call_transform
from tidemark.worker.batches import input_schema, payloads, records, rows
from tidemark.worker.call_transform import TransformFailed, Work

PART = Slice(TopicPartition("flights", 3), 7, 100, 200, Epoch(1))
LAYOUT = Layout("analytics.departures", (Column("city", "text"), Column("population", "integer")))
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)


def sent(
    offset: int = 100,
    value: bytes | None = b"{}",
    key: bytes | None = b"k",
    millis: int | None = 1_714_564_800_000,
    headers: list[tuple[str, bytes | None]] | None = None,
) -> Message:
    """A message as confluent-kafka returns it."""
    timestamp = (TIMESTAMP_NOT_AVAILABLE, 0) if millis is None else (TIMESTAMP_CREATE_TIME, millis)
    return Message(topic="flights", partition=3, offset=offset, key=key, value=value, headers=headers, timestamp=timestamp)


def judged(
    function: Callable[[Record], Any], *messages: Any, layout: Layout = LAYOUT, permanent: tuple[type[Exception], ...] = ()
) -> TransformOutput:
    """The output of a plain function for messages, by default for one."""
    task = Work(Target("", 1, 1, (layout,)), {}, Form.FUNCTION, function, permanent)
    return call_transform.by_record(task, PART, rows(PART, chunk_of(messages or [sent()])))


# ---- the input of a transform


def test_messages_become_a_batch_with_kafkas_columns_and_lineage() -> None:
    """The Arrow and the Spark form have the same schema. A missing timestamp, key, value or list of headers is null."""
    batch, _ = records(PART, chunk_of([sent(100, headers=[("a", b"1"), ("a", None)]), sent(103, None, None, None)]))
    assert batch.schema.equals(input_schema())
    first, second = batch.to_pylist()
    assert first["timestamp"] == NOON
    assert first["headers"] == [{"key": "a", "value": b"1"}, {"key": "a", "value": None}]
    assert (first["topic"], first["partition"], first["offset"]) == (first["kafka_topic"], first["kafka_partition"], first["kafka_offset"])
    assert second["kafka_offset"] == 103
    assert [second[name] for name in ("timestamp", "key", "value", "headers")] == [None] * 4


def test_a_plain_function_is_given_one_record() -> None:
    """The record has everything that Kafka returns, with an aware timestamp."""
    seen: list[Record] = []
    judged(seen.append, sent(107, b"v", None, headers=[("h", b"x")]))
    assert seen == [Record("flights", 3, 107, NOON, None, b"v", [("h", b"x")])]


# ---- the outcome of a record


def raising(error: BaseException, cause: BaseException | None = None) -> Callable[[Record], Any]:
    def function(record: Record) -> Any:
        raise error from cause

    return function


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda record: None, "skip"),
        (lambda record: [], "skip"),
        (lambda record: iter(()), "skip"),
        (raising(Skip("tombstone")), "skip"),
        (lambda record: {"city": "a"}, "load"),
        (lambda record: [{"city": "a"}, {"city": "b"}], "load"),
        (lambda record: ({"city": name} for name in "ab"), "load"),
        (raising(Retry("later")), "retry"),
        (raising(KeyError("city")), "retry"),
        (raising(Fail("no city")), "fail"),
        (raising(ValueError("permanent by the spec")), "fail"),
        (raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")), "fail"),  # a subclass of ValueError
        (raising(KeyError("x"), cause=ValueError("y")), "fail"),
        (raising(KeyError("x"), cause=Fail("y")), "fail"),
        (lambda record: "text", "retry"),
        (lambda record: 3, "retry"),
        (lambda record: [3], "retry"),
    ],
)
def test_what_a_function_answers_decides_what_becomes_of_the_record(function: Callable[[Record], Any], expected: str) -> None:
    """Any exception that it raises is the record's answer, and the record is counted once."""
    answer = judged(function, permanent=(ValueError,))
    tally = Tally(PART)
    tally.take(answer, LAYOUT)
    counts = tally.counts()
    assert {"load": counts.loaded, "skip": counts.skipped, "retry": counts.retried, "fail": counts.failed}[expected] == 1
    assert counts.unaccounted == PART.span - 1
    assert all("it must return a mapping" in each.error_text for each in answer.rejects if each.error_type == "TypeError")


def test_error_that_is_its_own_cause_is_the_records_answer() -> None:
    """Python allows circles of causes: ``raise error from error``, or two errors that are raised from each other."""
    error, other = KeyError("x"), KeyError("y")
    other.__cause__ = error
    for cause in (error, other):
        (each,) = judged(raising(error, cause=cause), permanent=(ValueError,)).rejects
        assert each.disposition is Disposition.RETRY


class Textless(Exception):
    """Its text is the result of a method of the user's, which fails."""

    def __str__(self) -> str:
        return {}["text"]  # type: ignore[no-any-return]


class NoText(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(("error", "why"), [(Textless(), "KeyError"), (NoText(), "TypeError")])
def test_error_without_a_text_is_the_records_answer(error: Exception, why: str) -> None:
    """The other records of the slice are loaded. In the Arrow form, it is the transform's failure like any other error."""
    answer = judged(lambda record: raising(error)(record) if record.offset == 101 else {"city": "a"}, sent(100), sent(101))
    assert [(each.offset, each.error_type) for each in answer.rejects] == [(101, type(error).__name__)]
    assert answer.rejects[0].error_text == f"its text cannot be shown: {why}"
    batch, _ = records(PART, chunk_of([sent()]))
    with pytest.raises(TransformFailed, match=f"{type(error).__name__}: its text cannot be shown: {why}"):
        call_transform.call_arrow(raising(error), batch, PART)


def test_a_generator_that_breaks_in_the_middle_gives_no_row() -> None:
    """A record is loaded completely or not at all."""

    def function(record: Record) -> Any:
        yield {"city": "a"}
        raise KeyError("b")

    answer = judged(function)
    assert answer.rows == {}
    assert [(each.error_type, each.disposition) for each in answer.rejects] == [("KeyError", Disposition.RETRY)]


def test_the_records_beside_a_bad_one_are_loaded() -> None:
    """One poison record does not stop its batch, and none of its rows is loaded alone."""

    def function(record: Record) -> Any:
        population = "many" if record.offset == 101 else 1
        return [{"city": "a", "population": 0}, {"city": "b", "population": population}]

    answer = judged(function, sent(100), sent(101), sent(102))
    assert ONLY in answer.rows
    assert answer.rows[ONLY].column("kafka_offset").to_pylist() == [100, 100, 102, 102]
    assert [each.offset for each in answer.rejects] == [101]
    assert "population does not fit integer" in answer.rejects[0].error_text


@pytest.mark.parametrize(
    ("postgres", "value", "text"),
    [
        ("integer", "secret", "x does not fit integer: the value is text that is not a number."),
        ("integer", 4_000_000_007, "x does not fit integer: the value is out of range."),
        ("date", 4_000_007, "x does not fit date: the value is an integer."),
    ],
)
def test_value_that_does_not_fit_is_not_quoted_unless_the_file_allows_it(postgres: str, value: Any, text: str) -> None:
    """By default the text names the column and the problem. With ``sink.error_detail``, a separate line quotes the value."""
    for detail, expected in ((False, text), (True, f"{text}\nDETAIL: {value!r}")):
        answer = judged(lambda record: {"x": value}, layout=Layout("a.b", (Column("x", postgres),), error_detail=detail))
        assert ONLY not in answer.rows
        assert [(each.disposition, each.error_text) for each in answer.rejects] == [(Disposition.FAIL, expected)]


def test_detail_of_a_value_that_cannot_be_shown_says_so() -> None:
    layout = Layout("a.b", (Column("x", "bigint"),), error_detail=True)
    (reject,) = judged(lambda record: {"x": 10**5000}, layout=layout).rejects  # Python does not write a number of so many digits
    assert reject.error_text == "x does not fit bigint: the value is out of range.\nDETAIL: a int, which cannot be shown: ValueError"


@pytest.mark.parametrize("column", ["country", "kafka_offset", "disposition", "", None])
def test_a_column_that_the_table_has_not_stops_the_slice(column: str | None) -> None:
    """The mistake is in the function's code, not in a record. A function may not return lineage columns either. `csv.DictReader` puts the
    surplus fields of a line under ``None``."""
    unknown = rf"flights/3 offset 100: it returned a value for {column!r}, which is not a column of analytics\.departures"
    with pytest.raises(TransformFailed, match=unknown):
        judged(lambda record: {column: 1})


@pytest.mark.parametrize(
    ("row", "sinks", "problem"),
    [
        (to("order", {"id": 1}), ("orders", "lines"), "it returned rows for 'order'; the consumer's sinks are orders, lines"),
        ({"id": 1}, ("orders", "lines"), "it returned rows without the name of a sink; the consumer has orders, lines"),
        (to("orders", {"id": 1}), (ONLY,), "it names the sink 'orders', but the consumer has one sink without a name"),
    ],
)
def test_rows_for_no_sink_are_refused(row: Any, sinks: tuple[str, ...], problem: str) -> None:
    task = Work(Target("", 1, 1, tuple(replace(LAYOUT, sink=sink) for sink in sinks)), {}, Form.FUNCTION, lambda record: row)
    with pytest.raises(TransformFailed, match=problem):
        call_transform.by_record(task, PART, rows(PART, chunk_of([sent()])))


def test_a_column_that_is_left_out_is_null() -> None:
    """An INSERT behaves in the same way."""
    answer = judged(lambda record: {"city": "a"})
    assert ONLY in answer.rows
    assert answer.rows[ONLY].column("population").to_pylist() == [None]


def test_held_record_whose_schema_is_not_known_yet_is_held() -> None:
    """The schema may be known when the record's turn comes. A record that can never be read fails at once."""
    node = parse(json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}]}))
    decoder = Decoder({"value": Encoding.AVRO, "key": Encoding.BYTES}, {("flights", "value"): node}, {9: None}, {"value": True})
    task = Work(Target("", 1, 1, (LAYOUT,)), {}, Form.FUNCTION, lambda record: None, (), decoder)
    order = KeyOrder(10)
    order.begin([Blocked(b"k", 50, 0)])
    given = chunk_of([sent(100, b"\0\0\0\0\x09\x02"), sent(101, b"noise")])
    found = call_transform.by_record(task, PART, rows(PART, given), order=order).rejects
    assert [(each.offset, each.disposition.name, each.error_type) for each in found] == [
        (100, "HELD", "HeldBack"),
        (101, "FAIL", "Undecodable"),
    ]


# ---- the Arrow form


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (raising(KeyError("city")), "flights/3 offsets 100 to 101: KeyError: 'city'"),
        (lambda batch: None, "it returned NoneType"),
        (lambda batch: pa.Table.from_batches([batch]), "it returned Table; it must return a pyarrow.RecordBatch"),
    ],
)
def test_an_arrow_transform_that_fails_is_named_with_its_records(function: Callable[..., Any], problem: str) -> None:
    """It processes whole columns at once, so the whole batch fails. A retry may help if the user's code hit an outage."""
    with pytest.raises(TransformFailed, match=problem) as raised:
        call_transform.call_arrow(function, records(PART, chunk_of([sent(100), sent(101)]))[0], PART)
    assert raised.value.retriable


# ---- the stored data of a failed record


def test_failed_records_are_read_again_with_all_that_is_needed_to_retry_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those offsets are kept, from one read of the range from the first to the last. Headers stay in order, in base64."""
    asked: list[tuple[int, int]] = []

    def read(_config: object, _partition: object, start: int, end: int, _leader_epoch: int | None) -> Any:
        asked.append((start, end))
        yield chunk_of([sent(at) for at in range(start, start + 4)])
        yield chunk_of([sent(at) for at in range(start + 4, start + 6)])
        yield chunk_of([sent(end - 1, None, None, None, [("a", b"\xff"), ("\0", None), ("a", b"")])])

    monkeypatch.setattr(batches, "read", read)
    chunks = list(payloads({}, PART, {150, 112, 110}))
    assert asked == [(110, 151)]
    assert [batch.column("record_offset").to_pylist() for batch in chunks] == [[110, 112], [150]]
    first, last = chunks[0].to_pylist()[0], chunks[1].to_pylist()[0]
    assert (first["record_timestamp"], first["key"], first["value"], first["headers"]) == (NOON, b"k", b"{}", "[]")
    assert (last["record_timestamp"], last["key"], last["value"]) == (None, None, None)
    headers = json.loads(last["headers"])
    assert [(name, value and base64.b64decode(value)) for name, value in headers] == [("a", b"\xff"), ("\0", None), ("a", "")]
