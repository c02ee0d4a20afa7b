"""The dispositions that transforms give to records, and what a plain function may return. For each value and each exception, see
tests/unit/worker/test_slice_worker.py."""

from __future__ import annotations

import pytest
from tests.support.scenario import Scenario
from tests.support.transforms import JUDGES

from tidemark.consume.run import TooManyFailed
from tidemark.sink.fit import SinkMismatch
from tidemark.sink.table import SinkMissing

# ---- dispositions


@pytest.mark.parametrize("form", ["function", "arrow"])
def test_each_record_is_loaded_skipped_retried_or_failed(scenario: Scenario, form: str) -> None:
    """Each record is treated as the transform decides, and the ledger counts it."""
    scenario.feed([b"one", b"skip", b"fail", b"retry", None, b"two"], JUDGES[form], "payload bytea")
    scenario.run()
    assert scenario.rows("payload, kafka_offset") == [(b"one", 0), (b"two", 5)]
    assert scenario.counts() == {"loaded": 2, "skipped": 1, "retried": 1, "failed": 2, "sink_rows": 2}
    assert scenario.failed() == [
        (2, "fail", "Fail", "no carrier"),
        (3, "retry", "Retry", "try later"),
        (4, "fail", "Fail", "no carrier"),
    ]
    scenario.check()


def test_run_stops_when_more_records_fail_than_the_spec_allows(scenario: Scenario) -> None:
    """What was committed stays, including failed records. Once the limit is raised, the next run continues after it."""
    scenario.feed([b"fail", b"good"] * 10, JUDGES["function"], "payload bytea", batch={"max_records": 8, "max_failed_records": 7})
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


TYPES = """
    import datetime as dt
    import uuid
    from decimal import Decimal
    from tidemark.transform import Record

    def transform(record: Record) -> dict:
        return eval(record.value)
"""
COLUMNS = """
    flag boolean, small smallint, number bigint, ratio double precision, name text, raw bytea, moment timestamptz, day date, clock time,
    took interval, price numeric(10, 2), ident uuid, tags text[], extra jsonb
"""


def test_python_values_become_the_tables_own_types(scenario: Scenario) -> None:
    """Each is stored in the type of its column. A value that does not fit fails its record alone."""
    topic = scenario.topics.create()
    row = """
        {"flag": True, "small": 7, "number": 2**62, "ratio": 2, "name": "Ä", "raw": b"\\0", "day": dt.date(2020, 2, 29),
        "moment": dt.datetime(2020, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2))), "clock": dt.time(1, 2, 3),
        "took": dt.timedelta(hours=1), "price": Decimal("1.50"), "ident": uuid.UUID(int=1), "tags": ["a", "b"], "extra": {"a": [1]}}
    """
    scenario.topics.produce(topic, [row.strip(), "{}", '{"small": 40_000}'])
    scenario.write(TYPES, topics=topic).make_sink(COLUMNS)
    scenario.run()
    ((offset, disposition, _, reason),) = scenario.failed()
    assert (offset, disposition, reason.partition(" ")[0]) == (2, "fail", "small")
    texts = "moment::text, day::text, clock::text, took::text, price::text, ident::text"
    one, none = scenario.rows(f"flag, small, number, ratio, name, raw, {texts}, tags, extra")
    assert one == (
        True, 7, 2**62, 2.0, "Ä", b"\0", "2020-01-01 10:00:00+00", "2020-02-29", "01:02:03", "01:00:00", "1.50",
        "00000000-0000-0000-0000-000000000001", ["a", "b"], {"a": [1]},
    )  # fmt: skip
    assert none == (None,) * 14
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
    scenario.feed([b"a"], TYPES, "payload bytea, delay bigint")
    said = {
        ("carier", "str"): "the table has no column carier",
        ("delay", "bytes"): "column delay: the output is binary, the table is bigint",
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


def test_missing_table_is_refused_before_a_record_is_read(scenario: Scenario) -> None:
    """The error says which command prints the DDL."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(topics=topic)
    with pytest.raises(SinkMissing, match="tidemark sink ddl"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 0}
