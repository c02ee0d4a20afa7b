"""The SQL that accounts for the records of a staged batch, with the cases that `Tally` has in ``tests/unit/sink/test_tally.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, given, settings
from tests.support.accounted import CASES, LAYOUT, PART, SPAN, WRONG, Account, Batch, agreeing, model, output
from tests.support.ledger import Group
from tests.support.sampling import examples

from tidemark.db import Cursor, session, transaction
from tidemark.records.outcome import BadOutput, Disposition
from tidemark.records.ranges import Slice
from tidemark.sink.staged import count_records, make_views, read_outcomes, read_rejects
from tidemark.sink.staging import make_staging, stage
from tidemark.sink.target import Target


@dataclass(frozen=True)
class Staging:
    target: Target
    table: str

    @contextlib.contextmanager
    def staged(self, batches: Sequence[Batch], **columns: Any) -> Iterator[Cursor]:
        """Stages batches in a try of its own, and yields a session that has only its rows. ``columns`` replace some of the last batch."""
        outputs = [output(batch, **(columns if number == len(batches) else {})) for number, batch in enumerate(batches, 1)]
        staged = stage(self.target, self.table, [PART], iter(outputs), isolate=False)
        with session(self.target.database_url) as connection, transaction(connection) as cur:
            make_views(cur, self.table, [staged])
            yield cur
            cur.execute("DROP VIEW pg_temp.tidemark_staged CASCADE")


@pytest.fixture
def staging(database_url: str) -> Iterator[Staging]:
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = Group(database_url, watch)
        group.sql("CREATE SCHEMA IF NOT EXISTS analytics; CREATE TABLE IF NOT EXISTS analytics.departures (city text, population bigint)")
        target = replace(group.target(), layouts=(LAYOUT,))
        yield Staging(target, make_staging(target, 1))


def account(cur: Cursor) -> Account:
    (counts,) = count_records(cur, [PART])
    return Account(counts, read_rejects(cur, PART))


def test_cases_are_counted(staging: Staging, subtests: pytest.Subtests) -> None:
    for name, (batches, counts) in CASES.items():
        with subtests.test(name), staging.staged(batches) as cur:
            assert account(cur) == Account(counts, model(batches).rejects)


def test_rows_that_no_record_of_the_batch_explains_are_refused(staging: Staging, subtests: pytest.Subtests) -> None:
    for name, (batches, columns, problem) in WRONG.items():
        with (
            subtests.test(name),
            pytest.raises(BadOutput, match=f"({problem}).*Nothing of this slice was stored"),
            staging.staged(batches, **columns) as cur,
        ):
            count_records(cur, [PART])


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(agreeing())
def test_any_batches_are_counted_as_the_tallies_count_them(staging: Staging, batches: list[Batch]) -> None:
    """Also what a retry reads: the outcome of each record, with its rows."""
    expected = model(batches)
    with staging.staged(batches) as cur:
        assert account(cur) == expected
        outcomes = read_outcomes(cur, PART)
        assert count_records(cur, [PART, other := Slice(PART.partition, 8, 0, 5, PART.epoch)])[1].unaccounted == other.span
    assert {offset: failed for (_, _, offset), (*_, failed) in outcomes.items() if failed is not None} == expected.rejects
    found = [disposition for disposition, *_ in outcomes.values()]
    counts = expected.counts
    assert [found.count(each) for each in list(Disposition)[:4]] == [counts.loaded, counts.skipped, counts.retried, counts.failed]
    assert (sum(rows for _, rows, _, _ in outcomes.values()), sum(deleted for _, _, deleted, _ in outcomes.values())) == (
        counts.sink_rows,
        counts.deleted,
    )
    assert len(found) == SPAN - counts.unaccounted
