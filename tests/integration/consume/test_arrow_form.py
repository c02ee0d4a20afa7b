"""The Arrow form: what it may return, and what is refused. For each misfit, see
tests/unit/sink/test_fit.py and tests/unit/sink/test_tally.py."""

from __future__ import annotations

import pytest
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.transforms import arrow, set_column, with_column

from tidemark.errors import TidemarkError
from tidemark.records.outcome import BadOutput
from tidemark.sink.fit import SinkMismatch
from tidemark.worker.call_transform import TransformFailed

PAYLOAD = with_column("payload", "batch['value']")
UNFIT: dict[str, tuple[type[TidemarkError], str]] = {
    with_column("other", "batch['value']"): (SinkMismatch, "the table has no column other"),
    "given = batch.select(['kafka_offset', 'value'])": (SinkMismatch, "lacks the lineage columns? kafka_topic"),
    "return given.to_pydict()": (TransformFailed, "it returned list; it must return a pyarrow.RecordBatch"),
    "raise OSError('no such file')": (TransformFailed, "OSError: no such file. It must also accept an empty batch"),
}


def test_transform_that_does_not_fit_is_refused_before_a_record_is_read(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """The schema of an empty batch is compared with the table; nothing is read and no offset moves."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    for body, (error, said) in UNFIT.items():
        with subtests.test(body):
            scenario.write(arrow(f"{body}\nreturn given"), topics=topic)
            scenario.refuses(error, said)
            assert scenario.engine is not None
            assert scenario.engine.batches == []
    scenario.check()


TWICE = """twice = batch.take([0, 0])
    given = twice.select(LINEAGE).append_column('payload', twice['value'])
    return given.append_column('disposition', pa.array([None, 'fail'], pa.string()))"""
"""Returns two rows of the first record, with two dispositions."""
WRONG: dict[str, tuple[type[TidemarkError], str]] = {
    "raise OSError('no such file')": (TransformFailed, "failed on .*/0 offsets 0 to 2: OSError: no such file"),
    set_column("kafka_offset", "pc.add(batch['offset'], 100)"): (BadOutput, "kafka_offset 100 is outside the range"),
    TWICE: (BadOutput, "record 0 has rows with dispositions .* give all the same"),
}


def test_transform_that_goes_wrong_on_records_refuses_the_slice(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """The result for a batch with records must match the schema from the empty batch and the records that were read. One bad record is
    enough to refuse the slice: the transform works on whole columns, so the record is not known."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"1", b"0", b"2"])
    for then, (error, said) in WRONG.items():
        with subtests.test(then):
            scenario.write(arrow(f"if len(batch):\n    {then}\n{PAYLOAD}\nreturn given"), topics=topic)
            scenario.refuses(error, said)
    scenario.check()


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


def test_decimals_of_several_scales_are_stored_with_theirs(scenario: Scenario) -> None:
    """Batches may differ in type, as long as the column holds all values of each type."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 15_000))
    body = "scale = 2 if not len(batch) or batch['offset'][0].as_py() == 0 else 1\n"
    body += with_column("price", "pa.array([1] * len(batch), pa.int64()).cast(pa.decimal128(20 + scale, scale))") + "\nreturn given"
    scenario.write(arrow(body), topics=topic).make_sink("price numeric")
    scenario.run()
    assert set(scenario.rows("scale(price)")) == {1, 2}
    scenario.check()


def test_batches_of_nulls_and_batches_of_values_are_one_column(scenario: Scenario) -> None:
    """A column that is all null in one batch may have Arrow's null type; that does not count as a change of type."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, numbers(0, 10_001))
    some_null = with_column("payload", "pa.nulls(len(batch)) if len(batch) and batch['offset'][0].as_py() else batch['value']")
    scenario.write(arrow(some_null + "\nreturn given"), topics=topic).make_sink("payload bytea")
    scenario.run()
    assert scenario.counts() == {"loaded": 10_001, "sink_rows": 10_001}
    assert set(scenario.rows("payload IS NULL")) == {False, True}
