"""The Arrow form: what it may return, and what is refused."""

from __future__ import annotations

import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.transforms import arrow, set_column, with_column

from tidemark.consume.forms import TransformFailed
from tidemark.errors import TidemarkError
from tidemark.records.outcome import BadOutput
from tidemark.sink.encode import TypesChanged
from tidemark.sink.table import SinkMismatch

PAYLOAD = with_column("payload", "batch['value']")
UNFIT: dict[str, tuple[str, type[TidemarkError], str]] = {
    "another type": (with_column("payload", "pa.nulls(len(batch), pa.int64())"), SinkMismatch, "column payload: the output is int64"),
    "another name": (with_column("other", "batch['value']"), SinkMismatch, "the table has no column other"),
    "one more column": (PAYLOAD + "; " + with_column("other", "batch['value']"), SinkMismatch, "the table has no column other"),
    "a column twice": (PAYLOAD + "; " + PAYLOAD, SinkMismatch, "the column payload 2 times"),
    "a number as disposition": (PAYLOAD + "; " + with_column("disposition", "batch['offset']"), SinkMismatch, "disposition must be text"),
    "a number as error": (PAYLOAD + "; " + with_column("error", "batch['offset']"), SinkMismatch, "error must be text"),
    "no lineage": ("given = batch.select(['kafka_offset', 'value'])", SinkMismatch, "lacks the lineage columns? kafka_topic"),
    "the offset as text": (
        "given = given.set_column(2, 'kafka_offset', batch['value'])",
        SinkMismatch,
        "lineage column kafka_offset is binary",
    ),
    "a dictionary": ("return given.to_pydict()", TransformFailed, "it returned list; it must return a pyarrow.RecordBatch"),
    "a table": ("return pa.table(given.to_pydict())", TransformFailed, "it returned Table; it must return a pyarrow.RecordBatch"),
    "nothing": ("return None", TransformFailed, "it returned NoneType; it must return a pyarrow.RecordBatch"),
    "an exception": (
        "raise OSError('no such file')",
        TransformFailed,
        "OSError: no such file. It must also accept an empty batch",
    ),
}


def test_transform_that_does_not_fit_is_refused_before_a_record_is_read(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """The schema of an empty batch is compared with the table; nothing is read and no offset moves."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    for what, (body, error, said) in UNFIT.items():
        with subtests.test(what):
            scenario.write(arrow(f"{body}\nreturn given"), topics=topic)
            refused(scenario, error, said)
            assert scenario.engine is not None
            assert scenario.engine.batches == []
    scenario.check()


WRONG: dict[str, tuple[str, type[TidemarkError], str]] = {
    "an exception": ("raise OSError('no such file')", TransformFailed, "failed on .*/0 offsets 0 to 2: OSError: no such file"),
    "an exception at one record": (
        "[1 / int(value) for value in batch['value'].to_pylist()]",
        TransformFailed,
        "offsets 0 to 2: ZeroDivisionError",
    ),
    "nothing": ("return None", TransformFailed, "it returned NoneType; it must return a pyarrow.RecordBatch"),
    "a column less": ("return given", BadOutput, "lacks column payload, which it had before"),
    "all that it was given": ("return batch", BadOutput, "lacks column payload, which it had before"),
    "another type": (
        with_column("payload", "batch['offset']") + "; return given",
        BadOutput,
        "payload has type int64; the table has bytea",
    ),
    "one more column": (with_column("extra", "batch['value']"), BadOutput, "a column that the table lacks: extra"),
    "offsets of others": (set_column("kafka_offset", "pc.add(batch['offset'], 100)"), BadOutput, "kafka_offset 100 is outside the range"),
    "another partition": (set_column("kafka_partition", "pc.add(batch['partition'], 1)"), BadOutput, "a row belongs to another partition"),
    "another topic": (set_column("kafka_topic", "pa.array(['x'] * len(batch))"), BadOutput, "a row belongs to another partition"),
    "lineage that is null": (set_column("kafka_offset", "pa.nulls(len(batch), pa.int64())"), BadOutput, "a row has no lineage"),
    "lineage that is null once": (
        set_column("kafka_partition", "pc.if_else(pc.equal(batch['offset'], 1), None, batch['partition'])"),
        BadOutput,
        "a row has no lineage",
    ),
    "lineage that is no number": (
        set_column("kafka_offset", "pa.array(['x'] * len(batch))"),
        BadOutput,
        "lineage is not what the transform was given",
    ),
    "a word that is none": (
        with_column("disposition", "pa.array(['drop'] * len(batch))"),
        BadOutput,
        "'drop' is not one of load, skip, retry, fail",
    ),
    "a number as disposition": (with_column("disposition", "batch['offset']"), BadOutput, "disposition has type int64; it must be text"),
    "a number as error": (
        with_column("disposition", "pa.array(['fail'] * len(batch))") + "; " + with_column("error", "batch['offset']"),
        BadOutput,
        "error has type int64; it must be text",
    ),
}


def test_transform_that_goes_wrong_on_records_refuses_the_slice(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """The result for a batch with records must match the schema from the empty batch and the records that were read. One bad record is
    enough to refuse the slice: the transform works on whole columns, so the record is not known."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"1", b"0", b"2"])
    for what, (then, error, said) in WRONG.items():
        with subtests.test(what):
            scenario.write(arrow(f"if len(batch):\n    {then}\n{PAYLOAD}\nreturn given"), topics=topic)
            refused(scenario, error, said)
    scenario.check()


def test_record_with_contradicting_rows_refuses_the_slice(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """All rows of one record must have one disposition."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    for words in (["load", "skip"], ["fail", "load"], ["retry", "fail"], ["skip", "retry"], [None, "fail"]):
        with subtests.test(words=words):
            body = f"twice = batch.take([0, 0]) if len(batch) else batch\nwords = {words} if len(batch) else []\n"
            body += "given = twice.select(LINEAGE).append_column('payload', twice['value'])\n"
            body += "return given.append_column('disposition', pa.array(words, pa.string()))"
            scenario.write(arrow(body), topics=topic)
            refused(scenario, BadOutput, "record 0 has rows with dispositions .* give all the same")
    scenario.check()


def refused(scenario: Scenario, error: type[TidemarkError], said: str) -> None:
    """The run fails with this error, which is stored in its attempt's row; nothing else is stored. An error in the user's code may be an
    outage."""
    if not scenario.sql("SELECT to_regclass(%s)", scenario.table)[0][0]:
        scenario.make_sink("payload bytea")
    with pytest.raises(error, match=said) as raised:
        scenario.run()
    kind = "unavailable" if error is TransformFailed else "refused"
    assert scenario.attempt() == {"state": "FAILED", "error": {"kind": kind, "type": error.__name__, "text": str(raised.value)}}
    assert scenario.rows() == scenario.ledger() == scenario.failed() == []
    assert set(scenario.positions().values()) == {0}


def test_arrow_rows_of_one_record_are_numbered_and_rows_that_are_filtered_away_are_unaccounted(scenario: Scenario) -> None:
    """A record may have no row, one, or several, in any order; a record without a row is unaccounted."""
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
    """An empty result is valid, too."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.topics.produce(topic, numbers(0, 5), partition=1)
    scenario.write(arrow(PAYLOAD + "\nreturn given.slice(0, 0)"), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.positions() == {(topic, 0): 5, (topic, 1): 5}
    assert scenario.counts() == {"unaccounted": 10}
    scenario.check(filtered=10)


def test_types_that_change_from_batch_to_batch_refuse_the_slice(scenario: Scenario) -> None:
    """A different scale of decimals is the only change that the check of the column lets through; the encoder rejects it."""
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
    """A column that is all null in one batch may have Arrow's null type; that does not count as a change of type."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10_001))
    body = (
        with_column("payload", "pa.nulls(len(batch)) if len(batch) and batch['offset'][0].as_py() else batch['value']") + "\nreturn given"
    )
    scenario.write(arrow(body), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.counts() == {"loaded": 10_001, "sink_rows": 10_001}
    assert set(scenario.rows("payload IS NULL")) == {False, True}
