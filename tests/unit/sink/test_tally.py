"""Each record of a slice is counted once and each row is numbered, in a slice and in a retry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.support.accounted import CASES, LAYOUT, PART, SPAN, START, WRONG, Account, Batch, agreeing, model, output
from tests.support.sampling import examples

from tidemark.records.outcome import ERROR_TEXT_LIMIT, ONLY, BadOutput, Disposition, RecordCounts, Reject, reject
from tidemark.records.ranges import Epoch, Slice
from tidemark.sink.retry_commit import Outcomes, RetryTally
from tidemark.sink.tally import Tally, split_output

quick = settings(max_examples=examples(300))


def new_tally(refused: Mapping[int, Reject] | None = None) -> Tally:
    return Tally(PART, refused=refused or {})


def new_retry_tally(refused: Mapping[int, Reject] | None = None) -> RetryTally:
    """All records of the slice are retried."""
    return RetryTally(PART, np.arange(START, START + SPAN), np.zeros(SPAN, bool), refused or {})


tallies = pytest.mark.parametrize("tally_of", [new_tally, new_retry_tally])


def take(tally: Tally, batches: Sequence[Batch], **columns: Any) -> list[pa.RecordBatch]:
    """Returns the rows to load. ``columns`` replace some of the last batch."""
    taken = []
    for number, batch in enumerate(batches, 1):
        rows = tally.take(split_output(output(batch, **(columns if number == len(batches) else {})), PART), LAYOUT)
        taken += [] if rows is None else [rows]
    return taken


def account(tally: Tally) -> Account:
    return Account(tally.counts(), tally.rejects)


@tallies
@pytest.mark.parametrize("case", CASES)
def test_case_is_counted(tally_of: Callable[[], Tally], case: str) -> None:
    """`tests/integration/sink/test_accounting.py` has the same table for the SQL of staged batches."""
    batches, counts = CASES[case]
    tally = tally_of()
    take(tally, batches)
    assert account(tally) == model(batches) == Account(counts, tally.rejects)


@tallies
@pytest.mark.parametrize("case", WRONG)
def test_row_that_no_record_of_the_slice_explains_is_refused(tally_of: Callable[[], Tally], case: str) -> None:
    """The lineage is null, of another record, or changed; or the batch is not what the transform returned before."""
    batches, columns, problem = WRONG[case]
    with pytest.raises(BadOutput, match=f"({problem}).*Nothing of this slice was stored"):
        take(tally_of(), batches, **columns)


@tallies
def test_record_that_a_sink_rejected_keeps_its_disposition_when_loading_starts_over(tally_of: Callable[..., Tally]) -> None:
    """A row that waits for another one is retried, the first time and in a drain. Neither pass loads its record."""
    refused = {START: reject(START, Disposition.RETRY, "no such order"), START + 1: reject(START + 1, Disposition.FAIL, "no city")}
    tally = tally_of(refused)
    take(tally, [[(0, "load"), (1, "load"), (2, "load")]])
    assert account(tally) == Account(RecordCounts(1, 0, 1, 1, SPAN - 3, 1), refused)


@tallies
@quick
@given(agreeing())
def test_any_interleaving_of_rows_accounts_for_every_offset_once(tally_of: Callable[[], Tally], batches: list[Batch]) -> None:
    """The counts add up to the span for any order. A record's rows are numbered 0..n-1 in the order of their arrival."""
    tally = tally_of()
    stored: list[tuple[int, int]] = []
    for taken in take(tally, batches):
        assert taken.schema.names == [name for name, _ in LAYOUT.copy_columns]
        assert set(taken.column("kafka_topic_id").to_pylist()) == {7}
        assert set(taken.column("kafka_partition").to_pylist()) == {3}
        assert taken.column("city").to_pylist() == [f"c{offset}" for offset in taken.column("kafka_offset").to_pylist()]
        stored += zip(taken.column("kafka_offset").to_pylist(), taken.column("kafka_seq").to_pylist(), strict=True)
    assert account(tally) == model(batches)
    assert [offset - START for offset, _ in stored] == [offset for batch in batches for offset, word in batch if word in ("load", "delete")]
    seen = Counter[int]()
    for offset, seq in stored:
        assert seq == seen[offset]
        seen[offset] += 1


def test_suppressed_record_is_skipped_whatever_became_of_it() -> None:
    """Whether it would be loaded, skipped, retried, failed or held, it has no row and no failed record, and the breaker ignores it. A
    suppressed record that is not in the output stays unaccounted."""
    tally = Tally(PART, frozenset(range(START, START + 8)))
    split = split_output(output([(0, "load"), (1, "skip"), (2, "retry"), (3, "fail"), (9, "load")]), PART)
    loaded = tally.take(replace(split, rejects=[*split.rejects, reject(START + 4, Disposition.HELD, "x")]), LAYOUT)
    assert loaded is not None
    assert loaded.column("kafka_offset").to_pylist() == [START + 9]
    assert account(tally) == Account(RecordCounts(1, 5, 0, 0, SPAN - 6, 1), {})
    assert tally.held() == 0


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
    (taken,) = take(Tally(PART), [[(0, "load")]], disposition=None, error=None, **same)
    assert taken.column("kafka_offset").to_pylist() == [START]


def test_offsets_beyond_32_bits_are_accounted_for() -> None:
    """A partition may hold more than 2^31 records."""
    far = Slice(PART.partition, 7, 2**40, 2**40 + 3, Epoch(1))
    counted = Tally(far)
    batch = [(2, "load"), (2, "load"), (0, "skip"), (1, "fail")]
    offsets = pa.array([2**40 + offset for offset, _ in batch])
    taken = counted.take(split_output(output(batch, kafka_offset=offsets), far), LAYOUT)
    assert taken is not None
    assert taken.column("kafka_offset").to_pylist() == [2**40 + 2] * 2
    assert counted.counts() == RecordCounts(1, 1, 0, 1, 0, 2)


def test_without_a_disposition_everything_is_loaded_and_null_means_load() -> None:
    """``load`` is the default."""
    tally = Tally(PART)
    take(tally, [[(0, "load"), (1, "load")]], disposition=None, error=None)
    take(tally, [[(2, "load"), (3, "skip")]], disposition=pa.array([None, "skip"]))
    take(tally, [[(4, "load")]], disposition=pa.nulls(1))
    assert tally.counts() == RecordCounts(4, 1, 0, 0, 7, 4)


def test_disposition_and_error_do_not_reach_the_sink() -> None:
    """They are meant for Tidemark, not for the table."""
    judged = split_output(output([(0, "load"), (1, "fail")], error=pa.array([None, "KeyError: 'city'"])), PART)
    assert ONLY in judged.rows
    assert judged.rows[ONLY].schema.names == ["city", "population", "kafka_topic", "kafka_partition", "kafka_offset"]
    assert judged.rejects == [reject(START + 1, Disposition.FAIL, "'city'", "KeyError")]


def test_retried_record_that_is_missing_from_the_output_is_skipped_if_it_was_tried() -> None:
    """It is in the log, so the transform dropped it. A record that is no longer in the log has no outcome."""
    tried = np.array([True, True, False])
    tally = RetryTally(PART, np.array([START, START + 4, START + 7]), tried)
    take(tally, [[(4, "load"), (4, "delete")]])
    outcomes = Outcomes.zeros(3)
    tally.report(outcomes, np.array([2, 0, 1]))
    assert outcomes.dispositions.tolist() == [Disposition.LOAD, 0, Disposition.SKIP]
    assert (outcomes.rows.tolist(), outcomes.deleted.tolist(), outcomes.rejects) == ([2, 0, 0], [1, 0, 0], {})
    with pytest.raises(BadOutput, match=f"kafka_offset {START + 5} is not one of the records being retried"):
        take(tally, [[(5, "load")]])


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
