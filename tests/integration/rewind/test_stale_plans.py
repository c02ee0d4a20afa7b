"""A plan is refused if its basis has changed, and the error names every change. Mere progress of the group is not such a change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.integration.rewind.lab import Lab

from tidemark.errors import BadInput
from tidemark.offsets.store import TaskIdentity
from tidemark.rewind import store
from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import RewindState, ShiftBy, ToEarliest, ToLatest, ToOffset, Undo
from tidemark.rewind.store import AlreadyDecided


def refused(lab: Lab, rewind_id: int) -> str:
    """The text of the refusal, which changes nothing."""
    before, audit = lab.image(), lab.audit()
    with pytest.raises(StalePlan) as raised:
        lab.apply(rewind_id)
    assert (lab.image(), lab.audit()) == (before, audit)
    assert str(raised.value).endswith(f"Rewind {rewind_id} was not applied. Nothing was changed. Plan again.")
    return "\n".join(raised.value.changes)


def test_progress_since_the_plan_is_superseded_too(lab: Lab) -> None:
    """The plan has the counts at planning time; the applied rewind has the actual ones."""
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    lab.read(90)
    done = lab.apply(planned.rewind_id).plan
    (was,), (part,) = planned.groups[0].partitions, done.groups[0].partitions
    assert (was.old, was.new, was.sink_rows, was.failed_records) == (50, 20, 27, 6)
    assert (part.old, part.new, part.sink_rows, part.failed_records) == (90, 20, 63, 14)
    assert lab.offsets() == [offset for offset in range(20) if offset % 10 > 2]
    lab.check()


def test_plan_that_was_written_to_is_refused_by_its_digest(lab: Lab) -> None:
    """The digest covers everything that was approved."""
    lab.read(50)
    lab.read(50, 1)
    for change in (
        "UPDATE tidemark.rewind_partition SET new_offset = 10, superseded_from = 10, target = 10 WHERE partition = 0",
        "UPDATE tidemark.rewind_partition SET hold = true WHERE partition = 0",
        "UPDATE tidemark.rewind SET backfill = true",
        "UPDATE tidemark.rewind_group SET basis = jsonb_set(basis, '{columns}', '[]')",
        "DELETE FROM tidemark.rewind_partition WHERE partition = 1",
    ):
        planned = lab.plan(ToOffset(20))
        with lab.watch.cursor() as cur:
            cur.execute("SET session_replication_role = replica")  # skips triggers, as the owner can
            cur.execute(change)
            cur.execute("RESET session_replication_role")
        assert "The plan was altered" in refused(lab, planned.rewind_id)


def test_a_topic_that_was_created_again_makes_a_plan_stale(lab: Lab) -> None:
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    lab.consumer.topics.recreate(lab.topic, 3)
    assert "t-" in refused(lab, planned.rewind_id)
    assert f"{lab.topic}/0: the topic was deleted and created again." in refused(lab, planned.rewind_id)
    with pytest.raises(PlanRefused, match="was deleted and created again since group"):
        lab.plan(ToOffset(20))


def test_retention_that_passes_a_target_makes_a_plan_stale(lab: Lab) -> None:
    """Another partition's retention does not."""
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    lab.consumer.topics.trim(lab.topic, {0: 20, 1: 90})
    other = lab.plan(ToOffset(30), f"{lab.topic}:0")
    assert lab.apply(planned.rewind_id).plan.state is RewindState.APPLIED
    lab.read(50)
    third = lab.plan(ToOffset(30), f"{lab.topic}:0")
    lab.consumer.topics.trim(lab.topic, {0: 31})
    assert refused(lab, third.rewind_id) == f"{lab.topic}/0: 30 is no longer in the log [31, 100); retention has passed it."
    assert "has been rewound since" in refused(lab, other.rewind_id)


def test_a_group_that_has_reached_a_target_ahead_of_it_makes_a_plan_stale(lab: Lab) -> None:
    """The rewind forward would have become a rewind back. A group that has not reached its target yet skips what is left."""
    lab.read(50)
    late, planned = (lab.plan(ToOffset(70), f"{lab.topic}:0") for _ in range(2))
    lab.read(69)
    (part,) = lab.apply(planned.rewind_id).plan.groups[0].partitions
    assert (part.old, part.new, part.skip) == (69, 70, 1)
    assert lab.ledger() == [(0, 0, 50), (0, 50, 69), (0, 69, 70)]
    lab.check()
    assert "the group has passed the target 70; its position was 50 and is now 70." in refused(lab, late.rewind_id)
    ahead = lab.plan(ToOffset(80), f"{lab.topic}:0")
    lab.read(100)
    assert refused(lab, ahead.rewind_id) == f"{lab.topic}/0: the group has passed the target 80; its position was 70 and is now 100."


@pytest.mark.thorough
def test_a_partition_at_its_end_stays_there_under_to_latest(lab: Lab) -> None:
    """Records read after the plan was made are not taken back."""
    lab.read(100)
    planned = lab.plan(ToLatest())
    lab.consumer.topics.produce(lab.topic, ["new"] * 10)
    lab.read(110)
    done = lab.apply(planned.rewind_id).plan
    assert [(part.old, part.new) for part in done.groups[0].partitions] == [(110, 110), (0, 100), (0, 60)]
    lab.check()


def changed_sink(lab: Lab) -> str:
    lab.consumer.set(sink={"table": lab.table, "mode": "upsert", "key": ["city"]})
    return "was changed: mode was append and is now upsert."


def changed_topics(lab: Lab) -> str:
    lab.consumer.set(topics=[lab.topic, "more"])
    return f"was changed: topics was ['{lab.topic}'] and is now ['{lab.topic}', 'more']."


def changed_columns(lab: Lab) -> str:
    lab.sql(f"ALTER TABLE {lab.table} ADD COLUMN more text")
    return f"The columns of {lab.table} were changed"


def expired(lab: Lab) -> str:
    lab.sql("UPDATE tidemark.rewind SET planned_at = planned_at - interval '1 day', expires_at = expires_at - interval '1 day'")
    return "The plan expired at"


def deleted_position(lab: Lab) -> str:
    lab.sql("DELETE FROM tidemark.partition_offset WHERE partition = 2")
    return f"{lab.topic}/2: the group's position was deleted."


def deleted_group(lab: Lab) -> str:
    lab.sql("UPDATE tidemark.consumer_group SET name = name || ' (deleted)'")
    return "was deleted."


def another_rewind(lab: Lab) -> str:
    lab.rewind(ToOffset(40), f"{lab.topic}:0")
    return f"Group {lab.spec.group} has been rewound since."


@pytest.mark.sampled
@pytest.mark.parametrize("change", [changed_sink, changed_topics, deleted_position, deleted_group, another_rewind])
def test_a_plan_is_stale_after(lab: Lab, change: Callable[[Lab], str]) -> None:
    """Changes of the spec, or of what the plan would move."""
    lab.read(50)
    planned = lab.plan(ToEarliest())
    text = change(lab)
    assert text in refused(lab, planned.rewind_id)


def test_all_that_moved_is_said_at_once(lab: Lab) -> None:
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    texts = [expired(lab), changed_columns(lab), "retention has passed it"]
    lab.consumer.topics.trim(lab.topic, {0: 40})
    found = refused(lab, planned.rewind_id)
    assert all(text in found for text in texts)


def test_a_changed_transform_is_what_rewinds_are_for(lab: Lab) -> None:
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    lab.consumer.set(transform=f"{lab.consumer.name}:repaired", schedule="@daily")
    assert lab.apply(planned.rewind_id).plan.state is RewindState.APPLIED


def test_a_rejected_plan_is_never_applied(lab: Lab) -> None:
    """The name of the person who rejected it is stored; a second rejection changes nothing."""
    lab.read(50)
    planned = lab.plan(ToEarliest())
    before = lab.image()
    with lab.session() as connection:
        said = store.reject(connection, planned.rewind_id, by="carl")
        assert (said.state, said.decided_by) == (RewindState.REJECTED, "carl")
        assert store.reject(connection, planned.rewind_id, by="dora").decided_by == "carl"
    with pytest.raises(AlreadyDecided, match="was rejected by carl"):
        lab.apply(planned.rewind_id)
    assert lab.image() == before


def test_an_applied_rewind_cannot_be_rejected_and_is_applied_once(lab: Lab) -> None:
    """A retry of the task gets the same numbers and the note that the rewind was already applied. An undone rewind is not applied again."""
    lab.read(50)
    planned = lab.plan(ToEarliest())
    first = lab.apply(planned.rewind_id, approved_by="carl")
    after = lab.image()
    again = lab.apply(planned.rewind_id, by="somebody else")
    assert (first.already, again.already) == (False, True)
    assert (again.plan, lab.image()) == (first.plan, after)
    assert (again.plan.applied_by, again.plan.decided_by) == ("bob", "carl")
    with lab.session() as connection, pytest.raises(AlreadyDecided, match="was applied by bob"):
        store.reject(connection, planned.rewind_id, by="carl")
    lab.undo(planned.rewind_id)
    with pytest.raises(AlreadyDecided, match="has been undone since"):
        lab.apply(planned.rewind_id)


def test_history_is_kept_permanently_newest_first(lab: Lab) -> None:
    """It shows who planned, applied and approved each rewind, the Airflow run, and the old and new offsets."""
    lab.read(50, task=TaskIdentity("consume__x", "run 1", "consume", 0, 1))
    first = lab.plan(ToEarliest(), dag_id="rewind", run_id="manual 1")
    lab.apply(first.rewind_id, approved_by="carl")
    lab.read(30)
    second = lab.rewind(ShiftBy(-10), f"{lab.topic}:0")
    with lab.session() as connection:
        found = store.history(connection, lab.spec.name)
        assert store.history(connection, "nobody") == []
        with pytest.raises(BadInput, match="there is no rewind 99"):
            store.read(connection, 99)
    assert [plan.rewind_id for plan in found] == [second.rewind_id, first.rewind_id]
    assert (found[1].planned_by, found[1].applied_by, found[1].decided_by, found[1].dag_id, found[1].run_id) == (
        "ann", "bob", "carl", "rewind", "manual 1",
    )  # fmt: skip
    assert [(part.old, part.new) for part in found[1].groups[0].partitions] == [(50, 0), (0, 0), (0, 0)]


def test_rewinds_of_one_state_are_looked_for_among_all(lab: Lab) -> None:
    lab.read(50)
    undone = lab.rewind(ToOffset(20), f"{lab.topic}:0").rewind_id
    undo = lab.undo(undone).rewind_id
    expired = lab.plan(ToEarliest()).rewind_id
    lab.sql("UPDATE tidemark.rewind SET expires_at = clock_timestamp() WHERE rewind_id = %s", expired)
    planned = lab.plan(ToEarliest()).rewind_id
    with lab.session() as connection:
        for state, rewind_id in (("UNDONE", undone), ("APPLIED", undo), ("EXPIRED", expired), ("PLANNED", planned)):
            newest = store.summaries(connection, lab.spec.name, limit=1, state=state)
            assert [(plan.rewind_id, totals["partitions"] > 0) for plan, totals in newest] == [(rewind_id, True)]
        assert store.summaries(connection, "nobody", limit=1, state="PLANNED") == []


def test_an_undo_that_a_later_rewind_needs_makes_its_plan_stale(lab: Lab) -> None:
    lab.read(50)
    first = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    planned = lab.plan(Undo(first.rewind_id))
    second = lab.rewind(ToOffset(10), f"{lab.topic}:0")
    found = refused(lab, planned.rewind_id)
    assert f"Rewind {first.rewind_id} is followed by rewinds of the same partitions that stand: {second.rewind_id}." in found
