"""Archives are kept for a limited time, the history of rewinds permanently. Uses a real Postgres."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.integration.rewind.lab import Lab

from tidemark.rewind.archive_retention import remove_archives
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import RewindState, ToOffset, Undo
from tidemark.rewind.rows.archive import ArchiveForged
from tidemark.rewind.store import history
from tidemark.rewind.verify import verify

DAY = timedelta(days=1)


def age(lab: Lab, rewind_id: int) -> None:
    """Makes a rewind look as if it had been applied 25 hours ago."""
    lab.sql("UPDATE tidemark.rewind SET applied_at = applied_at - interval '25 hours' WHERE rewind_id = %s", rewind_id)


def test_removes_archives_whose_time_is_over_and_no_others(lab: Lab) -> None:
    lab.read(60)
    old = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(60)
    new = lab.rewind(ToOffset(40), f"{lab.topic}:0")
    age(lab, old.rewind_id)
    with lab.session() as connection:
        (removed,) = remove_archives(connection, DAY)
        assert (removed.rewind_id, removed.rows) == (old.rewind_id, sum(part.sink_rows for _, part in old))
        assert remove_archives(connection, DAY) == []
        assert [(one.rewind_id, one.state) for one in history(connection)] == [
            (new.rewind_id, RewindState.APPLIED),
            (old.rewind_id, RewindState.APPLIED),
        ]
    lab.undo(new.rewind_id)
    with pytest.raises(PlanRefused, match="are no longer kept"):
        lab.undo(old.rewind_id)


def test_what_an_undo_has_put_back_is_not_removed(lab: Lab) -> None:
    lab.read(60)
    before = lab.rows()
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.undo(done.rewind_id)
    age(lab, done.rewind_id)
    with lab.session() as connection:
        assert remove_archives(connection, DAY) == []
    assert lab.rows() == before


@pytest.mark.parametrize(
    "forged", ["tidemark.batch", "tidemark_archive.rewound_9_9", "tidemark_archive.rewound_1_1; DROP TABLE tidemark.batch"]
)
def test_the_name_of_an_archive_that_was_changed_is_never_executed(lab: Lab, forged: str) -> None:
    """The name is data in a table. Changing it must not decide what is read, put back or dropped."""
    lab.read(60)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    planned = lab.plan(Undo(done.rewind_id))
    lab.sql("CREATE TABLE tidemark_archive.rewound_9_9 (LIKE tidemark.batch)")
    lab.sql("UPDATE tidemark.rewind_archive SET relation = %s", forged)
    age(lab, done.rewind_id)
    before = lab.image()
    with lab.session() as connection:
        for act in (
            lambda: remove_archives(connection, DAY),
            lambda: lab.apply(planned.rewind_id),
            lambda: lab.plan(Undo(done.rewind_id)),
            lambda: verify(connection, done.rewind_id, {lab.spec.name: lab.spec.keys}),
        ):
            with pytest.raises(ArchiveForged, match=r"not tidemark_archive\.rewound_"):
                act()
    assert lab.image() == before
    assert lab.sql("SELECT count(*) FROM tidemark_archive.rewound_9_9") == [(0,)]
