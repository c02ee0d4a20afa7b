"""What happens to a slice's records: a table of cases, and a model in plain Python, for all that account for records: `Tally`,
`RetryTally` and the SQL of staged batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tidemark.records.outcome import Disposition, RecordCounts, Reject, reject
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink.table import Column, Layout
from tidemark.spec.model import Deletes

START, SPAN = 1_000, 12
PART = Slice(TopicPartition("flights", 3), 7, START, START + SPAN, Epoch(1))
LAYOUT = Layout("analytics.departures", (Column("city", "text"), Column("population", "bigint")), key=("city",), deletes=Deletes.HARD)
WORDS = ("load", "delete", "skip", "retry", "fail")
Batch = Sequence[tuple[int, str]]
"""Offsets, counted from the slice's start, and dispositions."""


@dataclass(frozen=True)
class Account:
    """What happens to a slice."""

    counts: RecordCounts
    rejects: Mapping[int, Reject] | None = None


def output(batch: Batch, **columns: Any) -> pa.RecordBatch:
    """A transform's output. ``columns`` replace those of a valid one, and None removes one."""
    offsets = [START + offset for offset, _ in batch]
    data: dict[str, Any] = {
        "city": pa.array([f"c{offset}" for offset in offsets], pa.string()),
        "population": pa.array(range(len(batch)), pa.int64()),
        "kafka_topic": pa.array([PART.partition.topic] * len(batch), pa.string()),
        "kafka_partition": pa.array([PART.partition.partition] * len(batch), pa.int32()),
        "kafka_offset": pa.array(offsets, pa.int64()),
        "disposition": pa.array([word for _, word in batch], pa.string()),
        "error": pa.array([f"ValueError: {offset}" for offset in offsets], pa.string()),
    }
    return pa.RecordBatch.from_pydict({name: value for name, value in (data | columns).items() if value is not None})


CASES: dict[str, tuple[list[Batch], RecordCounts]] = {
    "nothing": ([], RecordCounts(0, 0, 0, 0, SPAN, 0)),
    "each disposition": ([list(enumerate(WORDS))], RecordCounts(2, 1, 1, 1, SPAN - 5, 2, 1)),
    "several rows of a record": ([[(3, "load"), (1, "load"), (3, "load")], [(3, "load")]], RecordCounts(2, 0, 0, 0, SPAN - 2, 4)),
    "a record that loads and deletes": ([[(0, "load"), (0, "delete"), (0, "load")]], RecordCounts(1, 0, 0, 0, SPAN - 1, 3, 1)),
    "a record that fails twice": ([[(5, "fail")], [(5, "fail")]], RecordCounts(0, 0, 0, 1, SPAN - 1, 0)),
    "one failure": ([[(0, "fail")]], RecordCounts(0, 0, 0, 1, SPAN - 1, 0)),
    "failures in a row": ([[(2, "retry"), (0, "retry"), (1, "fail")]], RecordCounts(0, 0, 2, 1, SPAN - 3, 0)),
    "failures with a skipped record between": (
        [[(0, "retry"), (1, "skip"), (2, "retry"), (3, "retry")]],
        RecordCounts(0, 1, 3, 0, SPAN - 4, 0),
    ),
    "failures with gaps of the log between": ([[(0, "retry"), (5, "fail"), (11, "retry")]], RecordCounts(0, 0, 2, 1, SPAN - 3, 0)),
    "the whole slice": ([[(offset, "load") for offset in range(SPAN)]], RecordCounts(SPAN, 0, 0, 0, 0, SPAN)),
}
"""Batches, and what is counted."""
OUTSIDE = "is outside the range that was read|is not one of the records being retried"
NO_LINEAGE = "a row has no lineage|is not what the transform was given"
ELSEWHERE = "a row belongs to another partition|a row has no lineage|a row's lineage is not of this batch"
UNKNOWN = "a row's disposition is not one of load, skip, retry, fail"
TWO = "has rows with (different )?dispositions"
WRONG: dict[str, tuple[list[Batch], dict[str, Any], str]] = {
    "an offset before the slice": ([[(-1, "load")]], {}, OUTSIDE),
    "an offset after the slice": ([[(SPAN, "fail")]], {}, OUTSIDE),
    "another partition": ([[(0, "load")]], {"kafka_partition": pa.array([4], pa.int32())}, ELSEWHERE),
    "another topic": ([[(0, "skip")]], {"kafka_topic": pa.array(["gates"])}, ELSEWHERE),
    "no offset": ([[(0, "load")]], {"kafka_offset": pa.array([None], pa.int64())}, NO_LINEAGE),
    "no partition": ([[(0, "fail")]], {"kafka_partition": pa.array([None], pa.int32())}, NO_LINEAGE),
    "no topic": ([[(0, "skip")]], {"kafka_topic": pa.array([None], pa.string())}, NO_LINEAGE),
    "an offset with a fraction": ([[(0, "load")]], {"kafka_offset": pa.array([1000.5])}, NO_LINEAGE),
    "an offset that is no number": ([[(0, "retry")]], {"kafka_offset": pa.array(["x"])}, NO_LINEAGE),
    "a partition that is no number": ([[(0, "load")]], {"kafka_partition": pa.array([b"\xff"])}, NO_LINEAGE),
    "an unknown disposition": ([[(0, "later")]], {}, UNKNOWN),
    "the engine's disposition": ([[(0, "held")]], {}, UNKNOWN),
    "a disposition that is no text": ([[(0, "load")]], {"disposition": pa.array([2])}, "disposition has type int64"),
    "an error that is no text": ([[(0, "fail")]], {"error": pa.array([3])}, "error has type int64"),
    "a column of another type": ([[(0, "load")]], {"city": pa.array([1])}, "city has type int64; the table has text"),
    "a missing column": ([[(0, "load")]], {"city": None}, "lacks column city"),
    "a missing column of a delete": ([[(0, "delete")]], {"city": None}, "lacks column city"),
    "a column that the table lacks": ([[(0, "load")]], {"country": pa.array(["DE"])}, "a column that the table lacks: country"),
    **{f"{one} and {two}": ([[(1, one), (0, one), (0, two)]], {}, TWO) for one, two in permutations(("load", "skip", "retry", "fail"), 2)},
    "load, then delete and fail": ([[(0, "load")], [(1, "skip"), (0, "delete")], [(0, "fail")]], {}, TWO),
    "fail, then skip": ([[(0, "fail")], [(0, "skip")]], {}, TWO),
}
"""Batches, with columns of the last one, that no record of the slice explains; and the problem."""


def model(batches: Sequence[Batch]) -> Account:
    """The account of batches that do not contradict themselves."""
    rows = Counter(offset for batch in batches for offset, _ in batch)
    deletes = sum(word == "delete" for batch in batches for _, word in batch)
    outcome = {offset: word.replace("delete", "load") for batch in batches for offset, word in batch}
    found = Counter(outcome.values())
    return Account(
        RecordCounts(
            found["load"],
            found["skip"],
            found["retry"],
            found["fail"],
            SPAN - len(outcome),
            sum(count for offset, count in rows.items() if outcome[offset] == "load"),
            deletes,
        ),
        {
            START + offset: reject(START + offset, Disposition[word.upper()], f"ValueError: {START + offset}")
            for offset, word in outcome.items()
            if word in ("retry", "fail")
        },
    )


@st.composite
def agreeing(draw: st.DrawFn) -> list[Batch]:
    """Batches in any order. A record's rows may be in any batch, but have the same disposition, or load and delete."""
    words = {offset: draw(st.sampled_from([("load", "delete"), ("load",), ("skip",), ("retry",), ("fail",)])) for offset in range(SPAN)}
    row = st.integers(0, SPAN - 1).flatmap(lambda offset: st.tuples(st.just(offset), st.sampled_from(words[offset])))
    return draw(st.lists(st.lists(row, max_size=20), max_size=5))  # type: ignore[return-value]
