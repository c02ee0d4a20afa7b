"""A rewind removes what it supersedes, moves the group, and can be undone exactly."""

from __future__ import annotations

from tests.integration.rewind.lab import Lab, one_city

from tidemark.rewind.plan_model import RewindState, ToCurrent, ToOffset


def test_rewind_into_a_batch_keeps_its_head_and_replays_to_the_same(lab: Lab) -> None:
    """After a rewind and a replay the sink is the same as before, although the target is in the middle of a batch."""
    lab.read(100, step=40)
    lab.read(60, 1)
    before = lab.rows()
    done = lab.rewind(ToOffset(25), f"{lab.topic}:0,1")
    assert done.state is RewindState.APPLIED
    assert lab.positions() == [25, 25, 0]
    assert lab.offsets() == [offset for offset in range(25) if offset % 10 > 2]
    assert lab.ledger() == [(0, 0, 25), (1, 0, 25)]
    lab.check()
    lab.read(100, step=30)
    lab.read(60, 1, step=7)
    assert lab.rows() == before
    lab.check()


def test_undo_after_a_replay_with_another_transform_restores_everything(lab: Lab) -> None:
    lab.read(90, step=40)
    lab.read(60, 1)
    lab.validate_to(33)
    before = lab.image()
    done = lab.rewind(ToOffset(25), f"{lab.topic}:0,1")
    lab.check()
    lab.read(100, 0, lambda offset: one_city(offset + 1000) if offset % 3 else [])
    lab.check()
    undone = lab.undo(done.rewind_id)
    lab.check()
    after = lab.image()
    assert after == before
    replayed = lab.undo(undone.rewind_id)
    lab.check()
    assert lab.positions() == [100, 25, 0]
    lab.undo(replayed.rewind_id)
    lab.check()
    assert lab.image() == before


def test_to_current_raises_epochs_and_nothing_else(lab: Lab) -> None:
    lab.read(30)
    before, epochs = lab.image(), lab.epochs()
    lab.rewind(ToCurrent())
    assert lab.image() == before
    assert lab.epochs() == [epoch + 1 for epoch in epochs]
