"""The dispositions that transforms give to records, and what a plain function may return."""

from __future__ import annotations

import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.transforms import JUDGES, MANY_ROWS

from tidemark.consume.forms import TransformFailed
from tidemark.consume.run import TooManyFailed
from tidemark.sink.table import SinkMismatch, SinkMissing
from tidemark.spec.problem import SpecInvalid

# ---- dispositions


@pytest.mark.parametrize("form", ["function", "arrow"])
def test_each_record_is_loaded_skipped_retried_or_failed(scenario: Scenario, form: str) -> None:
    """Each record is treated as the transform decides, and the ledger counts it."""
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
    """What was committed stays, including failed records. Once the limit is raised, the next run continues after it."""
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
    """The rows of a record are numbered in the order in which they were returned. A record without rows counts as skipped."""
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


ANSWERS = """
    from tidemark.transform import Record

    def transform(record: Record):
        return eval(record.value, {"payload": b"x"})
"""
"""Evaluates the record's value as Python and returns the result."""


def test_no_row_is_a_skipped_record(scenario: Scenario) -> None:
    """None and an empty iterable both mean that the record intentionally produces no row."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["None", "[]", "()", "iter(())", "(row for row in [])", "{}.values()"])
    scenario.write(ANSWERS, topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.counts() == {"skipped": 6}
    scenario.check()


def test_answer_that_is_no_row_is_kept_to_be_retried(scenario: Scenario) -> None:
    """A record is kept if the function returns neither rows nor None, and the error names the type that was returned."""
    topic = scenario.topics.create()
    answers = {"'text'": "str", "3": "int", "[1, 2]": "list", "b'x'": "bytes", "[{'payload': b'x'}, None]": "list", "True": "bool"}
    scenario.topics.produce(topic, answers)
    scenario.write(ANSWERS, topics=topic).make_sink("payload bytea")
    scenario.run()
    text = "the transform returned {}; it must return a mapping, an iterable of mappings, or None"
    assert scenario.failed() == [(offset, "retry", "TypeError", text.format(kind)) for offset, kind in enumerate(answers.values())]
    scenario.check()


def test_rows_before_an_exception_are_not_loaded(scenario: Scenario) -> None:
    """A generator that raises halfway fails its record as a whole: none of its rows stay."""
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


def test_function_that_raises_at_every_record_keeps_them_all(scenario: Scenario) -> None:
    """Without a limit on failed records, the run commits once every record is kept. ``max_failed_records`` guards against such mistakes."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 3000))
    scenario.write(ANSWERS, topics=topic).make_sink("payload bytea")
    assert scenario.run().state == "COMMITTED"
    assert scenario.counts() == {"retried": 3000}
    assert {kind for _, _, kind, _ in scenario.failed()} == {"SyntaxError"}
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
    """``retry.permanent`` names classes. Their subclasses count too, and so does an exception of such a class as the cause of the error."""
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
    """A plain function returns Python values. Each is stored in the type of its column."""
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
    """The record is kept with the column and the reason; its neighbours are loaded."""
    topic = scenario.topics.create()
    bad = [f'{{"{column}": {value}}}' for column, value in MISFITS.items()]
    scenario.topics.produce(topic, ['{"name": "before"}', *bad, '{"name": "after"}'])
    scenario.write(TYPES, topics=topic).make_sink(COLUMNS)
    scenario.run()
    assert scenario.rows("name") == ["before", "after"]
    found = {text.split()[0]: disposition for _, disposition, _, text in scenario.failed()}
    assert found == dict.fromkeys(MISFITS, "fail")
    scenario.check()


def test_column_that_the_table_lacks_refuses_the_slice(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """Without a declared result, an unknown key is refused by name at the first record that has it. Nothing is dropped silently. A function
    may not return lineage columns either."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["{'payload': b'good'}", "{'payload': b'', column: 1}"])
    scenario.write(topics=topic).make_sink("payload bytea, carrier text")
    for column in ("carier", "kafka_offset", "disposition"):
        with subtests.test(column):
            scenario.transform(ANSWERS.replace('{"payload": b"x"}', f'{{"column": "{column}"}}'))
            unknown = f"{topic}/0 offset 1: it returned '{column}', which is not a column of {scenario.table}"
            with pytest.raises(TransformFailed, match=unknown):
                scenario.run()
            assert scenario.positions() == {(topic, 0): 0}
            assert scenario.rows() == []
    scenario.check()


DECLARED = """
    from typing import TypedDict
    from tidemark.transform import Record

    class Row(TypedDict):
        payload: bytes
        {column}: {type}

    def transform(record: Record) -> Row:
        return {{"payload": record.value, "{column}": None}}
"""


def test_declared_result_that_does_not_fit_the_table_is_refused_before_a_record_is_read(
    scenario: Scenario, subtests: pytest.Subtests
) -> None:
    """A ``TypedDict`` is compared with the table in the same way as the schemas of the other forms."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(topics=topic).make_sink("payload bytea, delay bigint")
    said = {
        ("carier", "str"): "the table has no column carier",
        ("delay", "str"): "column delay: the output is string, the table is bigint",
        ("kafka_offset", "int"): "the output has the column kafka_offset 2 times",
    }
    for (column, kind), text in said.items():
        with subtests.test(f"{column}: {kind}"):
            scenario.transform(DECLARED.format(column=column, type=kind))
            with pytest.raises(SinkMismatch, match=text):
                scenario.run()
            assert scenario.engine is not None
            assert scenario.engine.batches == []
    scenario.check()


@pytest.mark.parametrize("form", ["function", "arrow"])
def test_one_record_may_make_a_hundred_thousand_rows(scenario: Scenario, form: str) -> None:
    """More rows than a batch has records. Each row gets its number within its record."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["1", "100000", "2"])
    scenario.write(MANY_ROWS[form], topics=topic).make_sink("number bigint")
    scenario.run()
    assert scenario.counts() == {"loaded": 3, "sink_rows": 100_003}
    found = "kafka_offset, count(*), max(kafka_seq) + 1, bool_and(number = kafka_seq)"
    assert scenario.sql(f"SELECT {found} FROM {scenario.table} GROUP BY 1 ORDER BY 1") == [
        (0, 1, 1, True), (1, 100_000, 100_000, True), (2, 2, 2, True),
    ]  # fmt: skip
    scenario.check()


# ---- modules and tables that cannot be used


def test_module_that_raises_on_import_is_refused_with_its_line(scenario: Scenario) -> None:
    """The form of the transform does not matter. Nothing is read."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    source = "import json\n\nRATES = json.loads('no json')\n\ndef transform(record):\n    ...\n"
    scenario.write(source, topics=topic).make_sink("payload bytea")
    with pytest.raises(SpecInvalid) as refused:
        scenario.run()
    said = str(refused.value)
    assert f"importing {scenario.name} raised JSONDecodeError: Expecting value" in said
    assert f"fix {scenario.module_file}:3: RATES = json.loads('no json')" in said
    assert scenario.attempt() == {"state": "FAILED", "error": {"kind": "refused", "type": "SpecInvalid", "text": said}}
    assert scenario.positions() == {(topic, 0): 0}
    scenario.check()


def test_missing_table_is_refused_before_a_record_is_read(scenario: Scenario) -> None:
    """The error says which command prints the DDL."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(topics=topic)
    with pytest.raises(SinkMissing, match="tidemark sink ddl"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 0}


def test_row_that_the_table_refuses_is_a_failed_record_with_postgres_own_words(scenario: Scenario) -> None:
    """Postgres enforces the constraints of the table; test_poison.py covers all kinds."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"good", b"bad"])
    scenario.write(topics=topic).make_sink("payload bytea CONSTRAINT never_bad CHECK (payload <> 'bad')")
    scenario.run()
    ((offset, disposition, kind, text),) = scenario.failed()
    assert (offset, disposition, kind) == (1, "fail", "CheckViolation")
    assert "never_bad" in text
    assert scenario.rows() == [b"good"]
    scenario.check()
