"""What an undo puts back, in which order rewinds can be undone, and what prevents an undo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.integration.rewind.lab import Lab
from tests.support.ledger import payloads, rows

from tidemark.errors import BadInput
from tidemark.records.outcome import TransformOutput, only
from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import RewindState, ToOffset, Undo
from tidemark.rewind.rows.archive import RowsRefused
from tidemark.sink.commit import commit_slice


def test_undo_at_once_is_as_if_nothing_had_been(lab: Lab) -> None:
    lab.read(90, step=40)
    before = lab.image()
    done = lab.rewind(ToOffset(25), f"{lab.topic}:0")
    undone = lab.undo(done.rewind_id)
    assert lab.image() == before
    assert (undone.state, undone.undo_of) == (RewindState.APPLIED, done.rewind_id)
    assert lab.sql("SELECT state FROM tidemark.rewind ORDER BY rewind_id") == [("UNDONE",), ("APPLIED",)]
    *_, batches, failed, lost, written_over, _, archives = lab.audit()
    assert batches == failed == lost == written_over == archives == []


def dropped(lab: Lab, rewind_id: int) -> str:
    lab.sql(f"DROP TABLE tidemark_archive.rewound_{rewind_id}_1")
    lab.sql("UPDATE tidemark.rewind_archive SET removed_at = clock_timestamp()")
    return "are no longer kept"


def column_gone(lab: Lab, rewind_id: int) -> str:
    lab.sql(f"ALTER TABLE {lab.table} DROP COLUMN population")
    return "no longer has the column population"


def column_changed(lab: Lab, rewind_id: int) -> str:
    lab.sql(f"ALTER TABLE {lab.table} ALTER COLUMN population TYPE text")
    return "population is now text; it was bigint"


def column_new(lab: Lab, rewind_id: int) -> str:
    lab.sql(f"ALTER TABLE {lab.table} ADD COLUMN more text")
    lab.sql(f"UPDATE {lab.table} SET more = ''; ALTER TABLE {lab.table} ALTER COLUMN more SET NOT NULL")
    return "has a new column more, NOT NULL without a default"


def topic_created_again(lab: Lab, rewind_id: int) -> str:
    lab.consumer.topics.recreate(lab.topic, 3)
    return "was deleted and created again"


@pytest.mark.sampled
@pytest.mark.parametrize("change", [dropped, column_gone, column_changed, column_new, topic_created_again])
def test_undo_is_refused_with_the_reason(lab: Lab, change: Callable[[Lab, int], str]) -> None:
    """Both when an undo is planned and when an existing plan is applied."""
    lab.read(50)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    planned = lab.plan(Undo(done.rewind_id))
    reason = change(lab, done.rewind_id)
    before = lab.rows if change is not column_gone else lab.offsets
    kept = before()
    with pytest.raises(PlanRefused, match=reason):
        lab.plan(Undo(done.rewind_id))
    with pytest.raises(StalePlan, match=reason if change is not topic_created_again else "created again"):
        lab.apply(planned.rewind_id)
    assert before() == kept


def test_undo_of_the_unknown_the_unapplied_or_a_part_is_refused(lab: Lab) -> None:
    lab.read(50)
    with pytest.raises(BadInput, match="there is no rewind 77"):
        lab.plan(Undo(77))
    planned = lab.plan(ToOffset(20))
    with pytest.raises(PlanRefused, match="is PLANNED: it was never applied"):
        lab.plan(Undo(planned.rewind_id))
    lab.apply(planned.rewind_id)
    with pytest.raises(PlanRefused, match=f"{lab.topic}/1 is part of rewind {planned.rewind_id}, which can only be undone whole"):
        lab.plan(Undo(planned.rewind_id), f"{lab.topic}:0,2")


def test_rows_that_break_a_constraint_by_now_are_kept_in_the_archive(lab: Lab) -> None:
    """All or nothing; the error has Postgres' own text."""
    lab.read(50)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.sql(f"ALTER TABLE {lab.table} ADD CHECK (population < 45)")
    planned = lab.plan(Undo(done.rewind_id))
    with lab.unchanged(RowsRefused, "violates check constraint"):
        lab.apply(planned.rewind_id)


def test_a_head_says_of_its_records_what_is_known(lab: Lab) -> None:
    """Rows and failed records are counted. The rest count as skipped or, if the batch had unaccounted records, as unaccounted."""
    lab.read(40, step=40)
    part = lab.slice(80)
    judged = iter([TransformOutput(only(rows(part, range(45, 80))), [40, 41])])
    commit_slice(lab.target(), part, judged, payloads)
    counts = "SELECT start_offset, end_offset, loaded, skipped, retried, failed, unaccounted, sink_rows FROM tidemark.batch ORDER BY 1"
    assert lab.sql(counts) == [(0, 40, 28, 4, 4, 4, 0, 36), (40, 80, 35, 2, 0, 0, 3, 35)]
    lab.rewind(ToOffset(60), f"{lab.topic}:0")
    assert lab.sql(counts) == [(0, 40, 28, 4, 4, 4, 0, 36), (40, 60, 15, 0, 0, 0, 5, 15)]
    lab.check()
    lab.rewind(ToOffset(35), f"{lab.topic}:0")
    assert lab.sql(counts) == [(0, 35, 23, 4, 4, 4, 0, 31)]
    lab.check()
