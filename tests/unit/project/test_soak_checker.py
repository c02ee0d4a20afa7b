"""The soak test's checker reports each anomaly of a history by its name, and nothing for a history without anomalies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.soak.checker import Kind, compare, counted, judge
from tests.soak.history import FATE_OF_REMAINDER, Batch, Fate, Log, Outcome, Recorder, Source, Stored, View, Where, settled

SOURCE = Source("orders", 1)
WHERE = Where("books", SOURCE)
STRANGER = 10**12
"""A value that no producer sends."""
SKIPPED, RETRIED, FAILED = (next(value for value, fate in FATE_OF_REMAINDER.items() if fate is each) for each in list(Fate)[1:])

C, A, U = Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN


def ints(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)


def log_of(records: Sequence[tuple[int, int, Outcome]], unplaced: Sequence[tuple[int, Outcome]] = ()) -> Log:
    """A log from each record's offset, value and outcome, and the value and outcome of records without an offset."""
    rows = sorted([(value, outcome, offset) for offset, value, outcome in records] + [(value, outcome, -1) for value, outcome in unplaced])
    outcomes = np.array([outcome for _, outcome, _ in rows], np.int8)
    return Log(ints([value for value, _, _ in rows]), outcomes, ints([offset for _, _, offset in rows]))


@dataclass(frozen=True)
class Tables:
    """`Stored` as Python types, which are easy to change."""

    position: int
    ledger: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]
    rejects: tuple[tuple[int, int], ...] = ()

    def stored(self) -> Stored:
        columns = [ints([pair[column] for pair in pairs]) for pairs in (self.rows, self.rejects) for column in (0, 1)]
        return Stored(self.position, ints(list(itertools.chain(*self.ledger))).reshape(-1, 2), *columns)


# ---- the tables at the end

LOG = log_of(
    [
        *((0, 100, C), (1, 101, C), (2, 102, A)),
        *((4, 50 + SKIPPED, C), (5, 50 + RETRIED, C), (6, 50 + FAILED, C)),
        *((8, 108, U), (9, 109, U), (11, 111, C)),
    ],
    [(120, A), (121, U)],
)
"""Offsets 3, 7 and 10 are transaction markers."""
CLEAN = Tables(
    10, ((0, 4), (4, 7), (7, 10)), ((0, 100), (1, 101), (8, 108), (3, 121)), ((5, 50 + RETRIED), (6, 50 + FAILED))
)  # 109 is missing, 111 is not read yet


def test_clean_tables_have_no_anomaly():
    """Skipped records, unknown records (stored or not), and records beyond the position are no anomalies."""
    assert judge(WHERE, LOG, CLEAN.stored()) == []
    assert judge(WHERE, LOG, Tables(0, (), ()).stored()) == []


@pytest.mark.parametrize(
    ("kind", "start", "count", "tables"),
    [
        pytest.param(Kind.LOST_WRITE, 1, 1, replace(CLEAN, rows=((0, 100), (8, 108), (3, 121))), id="row-missing"),
        pytest.param(Kind.LOST_WRITE, 5, 2, replace(CLEAN, rejects=()), id="failed-records-missing"),
        pytest.param(Kind.DUPLICATE, 1, 1, replace(CLEAN, rows=(*CLEAN.rows, (1, 101))), id="lineage-twice"),
        pytest.param(Kind.DUPLICATE, 1, 1, replace(CLEAN, rows=(*CLEAN.rows, (9, 101))), id="value-twice-under-two-lineages"),
        pytest.param(Kind.DUPLICATE, 8, 1, replace(CLEAN, rows=(*CLEAN.rows, (8, 108))), id="unknown-record-twice"),
        pytest.param(Kind.DUPLICATE, 5, 1, replace(CLEAN, rows=(*CLEAN.rows, (5, 50 + RETRIED))), id="row-and-failed-record"),
        pytest.param(Kind.ABORTED_READ, 2, 1, replace(CLEAN, rows=(*CLEAN.rows, (2, 102))), id="aborted"),
        pytest.param(Kind.ABORTED_READ, 2, 1, replace(CLEAN, rows=(*CLEAN.rows, (2, 102), (2, 102))), id="aborted-and-twice"),
        pytest.param(Kind.ABORTED_READ, 7, 1, replace(CLEAN, rows=(*CLEAN.rows, (7, 120))), id="aborted-and-never-acknowledged"),
        pytest.param(Kind.ABORTED_READ, 2, 1, replace(CLEAN, rejects=(*CLEAN.rejects, (2, 102))), id="aborted-and-failed"),
        pytest.param(Kind.POLL_SKIP, 4, 1, replace(CLEAN, ledger=((0, 4), (7, 10))), id="gap"),
        pytest.param(Kind.POLL_SKIP, 4, 1, replace(CLEAN, ledger=((0, 4), (7, 10)), rejects=()), id="gap-and-no-lost-write"),
        pytest.param(Kind.POLL_SKIP, 0, 1, replace(CLEAN, ledger=((4, 7), (7, 10)), rows=((8, 108),)), id="not-from-the-start"),
        pytest.param(Kind.NONMONOTONIC, 3, 1, replace(CLEAN, ledger=((0, 4), (3, 7), (7, 10))), id="overlap"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, 10, 1, replace(CLEAN, position=12), id="position-beyond-the-ledger"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, 4, 1, Tables(4, CLEAN.ledger, ((0, 100), (1, 101))), id="position-below-the-ledger"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, 11, 1, replace(CLEAN, rows=(*CLEAN.rows, (11, 111))), id="row-beyond-the-position"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, 9, 1, replace(CLEAN, rows=((0, 100), (9, 101), (8, 108))), id="another-record's-lineage"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, 9, 1, replace(CLEAN, rows=(*CLEAN.rows, (9, STRANGER))), id="value-of-nobody"),
    ],
)
def test_anomaly_of_the_tables_is_told_by_its_name_and_place(kind, start, count, tables):
    """One fault gives one anomaly, with its place and the number of records."""
    assert [(one.kind, one.start, one.count) for one in judge(WHERE, LOG, tables.stored())] == [(kind, start, count)]


def test_record_is_lost_in_whichever_batch_covers_it():
    """A short batch within a long one is a second fault, with a separate name."""
    tables = Tables(10, ((0, 10), (1, 3)), ((0, 100), (1, 101)))
    assert [(one.kind, one.start, one.end, one.count) for one in judge(WHERE, LOG, tables.stored())] == [
        (Kind.NONMONOTONIC, 1, 10, 1),
        (Kind.LOST_WRITE, 5, 7, 2),
    ]


def test_every_kind_is_counted():
    found = judge(WHERE, LOG, replace(CLEAN, rejects=()).stored())
    assert counted(found) == {kind: 2 if kind is Kind.LOST_WRITE else 0 for kind in Kind}
    assert str(found[0]) == "lost-write: books orders/1 [5, 7): committed, passed, and stored nowhere: offsets 5, 6"


# ---- snapshots

FIRST = View(WHERE, 0, 4, 1, (Batch(0, 4, 2, 0),), 1, 4, 2, 1, 0)
SECOND = View(WHERE, 4, 10, 2, (Batch(4, 7, 0, 2), Batch(7, 10, 1, 0)), 3, 10, 1, 8, 2)


def test_clean_snapshots_have_no_anomaly():
    """This includes a snapshot without changes since the last one, and one before the first batch."""
    idle = View(WHERE, 10, 10, 2, (), 3, 10, 0, None, 0)
    empty = View(WHERE, 0, 0, 1, (), 0, 0, 0, None, 0)
    history = [None, empty, FIRST, SECOND, idle]
    assert [compare(before, now) for before, now in itertools.pairwise(history) if now is not None] == [[]] * 4


@pytest.mark.parametrize(
    ("kind", "view"),
    [
        pytest.param(Kind.NONMONOTONIC, View(WHERE, 4, 2, 2, (), 1, 2, 0, None, 0), id="position-back"),
        pytest.param(Kind.NONMONOTONIC, replace(SECOND, epoch=0), id="epoch-back"),
        pytest.param(Kind.NONMONOTONIC, replace(SECOND, ledger_rows=0), id="ledger-rows-gone"),
        pytest.param(Kind.NONMONOTONIC, replace(SECOND, batches=(Batch(3, 7, 0, 2), Batch(7, 10, 1, 0))), id="read-again"),
        pytest.param(Kind.POLL_SKIP, replace(SECOND, batches=(Batch(5, 7, 0, 2), Batch(7, 10, 1, 0))), id="gap-behind-the-snapshot-before"),
        pytest.param(Kind.POLL_SKIP, replace(SECOND, batches=(Batch(4, 6, 0, 2), Batch(7, 10, 1, 0))), id="gap-within-the-snapshot"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, replace(SECOND, position=7), id="position-below-the-ledger"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, replace(SECOND, rows=0, last_row=None), id="rows-missing"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, replace(SECOND, rejected=3), id="too-many-failed-records"),
        pytest.param(Kind.INCONSISTENT_OFFSETS, replace(SECOND, last_row=10), id="row-at-the-position"),
    ],
)
def test_anomaly_of_a_snapshot_is_told_by_its_name(kind, view):
    """The snapshot contradicts the previous one, or itself."""
    assert [anomaly.kind for anomaly in compare(FIRST, view)] == [kind]


# ---- what the log decides


def test_log_settles_what_producers_do_not_know():
    """An unknown record is committed if a reader finds it. If it had no offset, it gets the one found."""
    log = log_of([(0, 100, C), (1, 101, A), (2, 102, U), (3, 103, U)], [(104, U), (105, U), (106, A)])
    decided, problems = settled(log, ints([0, 2, 6]), ints([100, 102, 104]))
    assert problems == []
    assert decided.values.tolist() == [100, 101, 102, 103, 104, 105, 106]
    assert decided.offsets.tolist() == [0, 1, 2, 3, 6, -1, -1]
    assert decided.outcomes.tolist() == [C, A, C, A, C, A, A]
    assert len(settled(log_of([]), ints([]), ints([]))[0].offsets) == 0


@pytest.mark.parametrize(
    ("problem", "offsets", "values"),
    [
        pytest.param("acknowledged as committed, and not to be read", [], [], id="committed-and-gone"),
        pytest.param("aborted, and to be read all the same", [0, 1], [100, 101], id="aborted-and-there"),
        pytest.param("the log holds a value that nobody sent", [0, 2], [100, STRANGER], id="stranger"),
        pytest.param("the log holds a value twice", [0, 2], [100, 100], id="twice"),
        pytest.param("to be read at another offset than the producer was told", [2], [100], id="elsewhere"),
    ],
)
def test_log_that_contradicts_its_producers_is_told(problem, offsets, values):
    """The contradiction is reported; consumers are not judged in that case."""
    _, problems = settled(log_of([(0, 100, C), (1, 101, A)]), ints(offsets), ints(values))
    assert any(text.startswith(problem) for text in problems)


def test_recorder_puts_records_in_the_order_of_their_values():
    """Transactions may end in a different order from that of their records."""
    recorder = Recorder()
    recorder.placed(SOURCE, [4, 5], [40, 50], C)
    recorder.placed(SOURCE, [1], [10], A)
    recorder.unplaced(SOURCE, [60], U)
    log = recorder.log(SOURCE)
    assert (log.values.tolist(), log.offsets.tolist(), log.outcomes.tolist()) == ([10, 40, 50, 60], [1, 4, 5, -1], [A, C, C, U])
    assert recorder.records == {C: 2, A: 1, U: 1}
    assert len(recorder.log(Source("orders", 2)).offsets) == 0
