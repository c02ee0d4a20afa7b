"""Each record of a slice is counted once and each row is numbered: `Tally` and `split_output` compared with a model in plain Python."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples

from tidemark.records.outcome import ERROR_TEXT_LIMIT, ONLY, BadOutput, Disposition, RecordCounts, TransformOutput, only, reject
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink.table import Column, Layout
from tidemark.sink.tally import Tally, split_output

START, SPAN = 1_000, 12
PART = Slice(TopicPartition("flights", 3), 7, START, START + SPAN, Epoch(1))
LAYOUT = Layout("analytics.departures", (Column("city", "text"), Column("population", "bigint")))
WORDS = {"load": Disposition.LOAD, "skip": Disposition.SKIP, "retry": Disposition.RETRY, "fail": Disposition.FAIL}
quick = settings(max_examples=examples(300))


def rows(*offsets: int | None, **columns: Any) -> pa.RecordBatch:
    """Rows of these records; ``columns`` replace those of a valid row, and None removes one."""
    count = len(offsets)
    data: dict[str, Any] = {
        "city": pa.array([f"c{offset}" for offset in offsets], pa.string()),
        "population": pa.array(range(count), pa.int64()),
        "kafka_topic": pa.array(["flights"] * count, pa.string()),
        "kafka_partition": pa.array([3] * count, pa.int32()),
        "kafka_offset": pa.array(offsets, pa.int64()),
    }
    return pa.RecordBatch.from_pydict({name: value for name, value in (data | columns).items() if value is not None})


def test_suppressed_record_is_skipped_whatever_became_of_it() -> None:
    """Whether it would be loaded, skipped, retried, failed or held, it has no row and no failed record, and the breaker ignores it. A
    suppressed record that is not in the output stays unaccounted."""
    counted = Tally(PART, frozenset(range(START, START + 8)))
    output = rows(START, START, START + 9)
    said = [reject(START + number, kind, "x") for number, kind in ((2, Disposition.RETRY), (3, Disposition.FAIL), (4, Disposition.HELD))]
    loaded = counted.take(TransformOutput(only(output), [START + 1], said), LAYOUT)
    assert loaded is not None
    assert loaded.column("kafka_offset").to_pylist() == [START + 9]
    assert (counted.counts().loaded, counted.counts().skipped, counted.counts().unaccounted) == (1, 5, SPAN - 6)
    assert (counted.rejects, counted.held()) == ({}, 0)


OFFSETS = st.integers(START, START + SPAN - 1)


@st.composite
def agreeing(draw: st.DrawFn) -> list[list[tuple[int, str]]]:
    """Batches of (offset, disposition) in any order. A record's rows may be in any batch, but have the same disposition."""
    said = {offset: draw(st.sampled_from(sorted(WORDS))) for offset in range(START, START + SPAN)}
    return [[(offset, said[offset]) for offset in batch] for batch in draw(st.lists(st.lists(OFFSETS, max_size=20), max_size=5))]


@quick
@given(agreeing())
def test_any_interleaving_of_rows_accounts_for_every_offset_once(batches: list[list[tuple[int, str]]]) -> None:
    """The counts add up to the span for any order. A record's rows are numbered 0..n-1 in the order of their arrival."""
    counted, model = Tally(PART), dict[int, str]()
    given_rows: list[int] = []
    stored: list[tuple[int, int]] = []
    for batch in batches:
        model |= dict(batch)
        given_rows += [offset for offset, word in batch if word == "load"]
        offsets = [offset for offset, _ in batch]
        words = pa.array([word for _, word in batch], pa.string())
        taken = counted.take(split_output(rows(*offsets, disposition=words), PART), LAYOUT)
        if taken is not None:
            assert taken.schema.names == [name for name, _ in LAYOUT.copy_columns]
            assert set(taken.column("kafka_topic_id").to_pylist()) == {7}
            assert set(taken.column("kafka_partition").to_pylist()) == {3}
            assert taken.column("city").to_pylist() == [f"c{offset}" for offset in taken.column("kafka_offset").to_pylist()]
            stored += zip(taken.column("kafka_offset").to_pylist(), taken.column("kafka_seq").to_pylist(), strict=True)
        by = Counter(model.values())
        assert counted.counts() == RecordCounts(by["load"], by["skip"], by["retry"], by["fail"], SPAN - len(model), len(given_rows))
    assert [offset for offset, _ in stored] == given_rows
    seen = Counter[int]()
    for offset, seq in stored:
        assert seq == seen[offset]
        seen[offset] += 1
    assert set(counted.rejects) == {offset for offset, word in model.items() if word in ("retry", "fail")}
    assert all(each.disposition is WORDS[model[offset]] for offset, each in counted.rejects.items())


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(WORDS, 2)))
def test_a_record_with_two_dispositions_is_refused_in_whatever_batch_the_second_comes(first: str, second: str) -> None:
    counted = Tally(PART)
    counted.take(split_output(rows(START, START + 1, disposition=pa.array([first, first])), PART), LAYOUT)
    again = [(START + 1, second)], [(START + 2, first), (START + 2, second)]
    for batch in again:
        words = pa.array([word for _, word in batch])
        with pytest.raises(BadOutput, match="with dispositions"):
            counted.take(split_output(rows(*(offset for offset, _ in batch), disposition=words), PART), LAYOUT)


STRANGERS = {
    "an offset before the slice": {"kafka_offset": pa.array([START - 1])},
    "an offset after the slice": {"kafka_offset": pa.array([START + SPAN])},
    "another partition": {"kafka_partition": pa.array([4], pa.int32())},
    "another topic": {"kafka_topic": pa.array(["gates"])},
    "no offset": {"kafka_offset": pa.array([None], pa.int64())},
    "no partition": {"kafka_partition": pa.array([None], pa.int32())},
    "no topic": {"kafka_topic": pa.array([None], pa.string())},
    "an offset with a fraction": {"kafka_offset": pa.array([1000.5])},
    "an offset that is no number": {"kafka_offset": pa.array(["x"])},
    "a partition that is no number": {"kafka_partition": pa.array([b"\xff"])},
}


@pytest.mark.parametrize("word", sorted(WORDS))
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_row_that_no_record_of_the_slice_explains_is_refused_in_every_role(stranger: dict[str, Any], word: str) -> None:
    """The lineage is null, of another partition, or changed. Rows that are only skipped or failed are refused too."""
    batch = rows(START, **stranger).append_column("disposition", pa.array([word]))
    with pytest.raises(BadOutput, match="Nothing of this slice was stored"):
        Tally(PART).take(split_output(batch, PART), LAYOUT)


@pytest.mark.parametrize(
    "same",
    [
        {"kafka_offset": pa.array([START], pa.int32())},
        {"kafka_offset": pa.array([START], pa.uint64())},
        {"kafka_offset": pa.array([float(START)])},
        {"kafka_partition": pa.array([3], pa.int64())},
        {"kafka_topic": pa.array(["flights"]).dictionary_encode()},
        {"kafka_topic": pa.array(["flights"], pa.large_string())},
        {"kafka_topic": pa.array(["flights"], pa.string_view())},
    ],
    ids=lambda same: str(next(iter(same.values())).type),
)
def test_lineage_may_come_in_another_representation(same: dict[str, Any]) -> None:
    """A transform that uses pandas or dictionary encoding returns the same values with another type."""
    taken = Tally(PART).take(split_output(rows(START, **same), PART), LAYOUT)
    assert taken is not None
    assert taken.column("kafka_offset").to_pylist() == [START]


def test_offsets_beyond_32_bits_are_accounted_for() -> None:
    """A partition may hold more than 2^31 records."""
    far = Slice(PART.partition, 7, 2**40, 2**40 + 3, Epoch(1))
    counted = Tally(far)
    taken = counted.take(TransformOutput(only(rows(2**40 + 2, 2**40 + 2)), [2**40], [reject(2**40 + 1, Disposition.FAIL, "no")]), LAYOUT)
    assert taken is not None
    assert taken.column("kafka_offset").to_pylist() == [2**40 + 2] * 2
    assert counted.counts() == RecordCounts(1, 1, 0, 1, 0, 2)


def test_without_a_disposition_everything_is_loaded_and_null_means_load() -> None:
    """``load`` is the default."""
    counted = Tally(PART)
    counted.take(split_output(rows(START, START + 1), PART), LAYOUT)
    counted.take(split_output(rows(START + 2, START + 3, disposition=pa.array([None, "skip"])), PART), LAYOUT)
    counted.take(split_output(rows(START + 4, disposition=pa.nulls(1)), PART), LAYOUT)
    assert counted.counts() == RecordCounts(4, 1, 0, 0, 7, 4)


def test_disposition_and_error_do_not_reach_the_sink() -> None:
    """They are meant for Tidemark, not for the table."""
    extra = {"disposition": pa.array(["load", "fail"]), "error": pa.array([None, "KeyError: 'city'"])}
    judged = split_output(rows(START, START + 1, **extra), PART)
    assert ONLY in judged.rows
    assert judged.rows[ONLY].schema.names == ["city", "population", "kafka_topic", "kafka_partition", "kafka_offset"]
    assert judged.rejects == [reject(START + 1, Disposition.FAIL, "'city'", "KeyError")]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"disposition": pa.array(["held"])}, "a row's disposition is not one of load, skip, retry, fail"),
        ({"disposition": pa.array(["later"])}, "a row's disposition is not one of load, skip, retry, fail"),
        ({"disposition": pa.array([2])}, "disposition has type int64"),
        ({"disposition": pa.array(["fail"]), "error": pa.array([3])}, "error has type int64"),
        ({"kafka_topic": None}, "lacks the lineage columns kafka_topic"),
        ({"city": None}, "lacks column city"),
        ({"city": pa.array([1])}, "city has type int64; the table has text"),
        ({"country": pa.array(["DE"])}, "a column that the table lacks: country"),
    ],
)
def test_an_output_that_changed_its_shape_is_refused(columns: dict[str, Any], problem: str) -> None:
    """The layout was checked with an empty batch; later batches must have the same layout."""
    with pytest.raises(BadOutput, match=problem):
        Tally(PART).take(split_output(rows(START, **columns), PART), LAYOUT)


@pytest.mark.parametrize(
    ("error", "error_type", "expected"),
    [
        ("ValueError: no date", None, ("ValueError", "no date")),
        ("no date", None, ("Error", "no date")),
        ("no: date", None, ("Error", "no: date")),
        ("Two words: x", None, ("Error", "Two words: x")),
        ("ValueError: a\nb", None, ("ValueError", "a\nb")),
        ("ValueError: x", "KeyError", ("KeyError", "ValueError: x")),
        (None, None, ("Error", "the transform gave no reason")),
        ("", "KeyError", ("KeyError", "the transform gave no reason")),
        ("a\0b", None, ("Error", "a\\0b")),
        ("half \ud800 a pair", None, ("Error", "half \\ud800 a pair")),
    ],
)
def test_the_reason_of_a_reject_is_text_that_postgres_stores(error: str | None, error_type: str | None, expected: tuple[str, str]) -> None:
    """An unknown type is taken from the text before the colon. NUL and invalid Unicode are escaped."""
    made = reject(START, Disposition.RETRY, error, error_type)
    assert (made.error_type, made.error_text) == expected
    assert pa.array([made.error_text], pa.string()).to_pylist() == [made.error_text]


def test_a_long_reason_is_cut() -> None:
    """Some exceptions contain their whole input."""
    assert len(reject(START, Disposition.FAIL, "x" * 50_000, "E").error_text) == ERROR_TEXT_LIMIT
