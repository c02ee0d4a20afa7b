"""How a scenario's targets become moves, as plain numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import ShiftBy, ToCurrent, ToLatest, ToOffset
from tidemark.rewind.scenarios.targets import SHOWN, Outside, Place, TargetsOutOfRange, moves


def place(position: int, start: int = 10, end: int = 100, partition: int = 0) -> Place:
    return Place(TopicPartition("flights", partition), 1, "uuid", position, position, start, end)


logs = st.integers(0, 50).flatmap(lambda start: st.tuples(st.just(start), st.integers(start, 100)))
places = st.builds(lambda log, position: place(position, *log), logs, st.integers(0, 120))


@given(at=places, target=st.integers(-20, 150), allow_loss=st.booleans())
def test_a_move_is_in_the_log_or_it_is_refused(at: Place, target: int, allow_loss: bool) -> None:
    """A target is never silently clamped: only with allow_loss, only to the start of the log, and the gap is recorded as lost (I5)."""
    found, outside = moves(ToOffset(target), [at], {at.partition: target}, allow_loss=allow_loss)
    if at.start <= target <= at.end:
        assert [(move.target, move.new) for move in found] == [(target, target)]
    elif allow_loss and 0 <= target < at.start:
        assert [(move.target, move.new) for move in found] == [(target, at.start)]
    else:
        assert (found, outside) == ([], [Outside(at.partition, target, at.start, at.end)])
    for move in found:
        assert move.superseded_from == min(target, at.position)
        assert not move.hold
        assert outside == []


@given(at=places, scenario=st.sampled_from([ToCurrent(), ToLatest()]))
def test_what_stays_is_held_wherever_the_group_goes_on_to(at: Place, scenario: ToCurrent | ToLatest) -> None:
    """This holds even for a position that is no longer in the log: nothing moves. To-latest holds only partitions already at the end."""
    target = at.position if isinstance(scenario, ToCurrent) else at.end
    (move,), _ = moves(scenario, [at], {at.partition: target}, allow_loss=False)
    assert move.hold is (target == at.position)
    assert (move.new, move.superseded_from) == ((at.position, at.position) if move.hold else (at.end, min(at.end, at.position)))


def test_partitions_without_a_target_are_no_part_of_it_and_the_others_come_in_order() -> None:
    asked = [place(50, partition=number) for number in (3, 1, 2)]
    found, _ = moves(ShiftBy(1), asked, {asked[0].partition: 51, asked[1].partition: 51}, allow_loss=False)
    assert [move.partition.partition for move in found] == [1, 3]


def test_all_targets_out_of_range_are_named_with_their_logs_and_what_to_do() -> None:
    error = TargetsOutOfRange(
        outside=(Outside(TopicPartition("flights", 0), 5, 10, 100), Outside(TopicPartition("flights", 1), 101, 10, 100))
    )
    first, second, last = str(error).splitlines()
    assert first == "flights/0: target 5 is before the start of the log [10, 100)"
    assert second == "flights/1: target 101 is after the end of the log [10, 100)"
    assert last.startswith("Nothing was planned. Name offsets within the log (to-earliest and to-latest are its ends). With --allow-loss,")
    many = TargetsOutOfRange(outside=tuple(Outside(TopicPartition("flights", number), 101, 10, 100) for number in range(SHOWN + 5)))
    assert str(many).splitlines()[SHOWN] == "and 5 more"
    assert "--allow-loss" not in str(many)
