"""How the page shows a rebalance: which partitions moved from which member to which."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidemark.airflow.web.rebalances import Assignment, moves, rebalances
from tidemark.records.ranges import TopicPartition
from tidemark.spec.scope import Scope


def row(generation: int, assignment: Assignment) -> dict[str, object]:
    return {"generation": generation, "at": None, "reason": "a member leaves", "protocol": "range", "assignment": assignment}


def test_partitions_are_listed_by_the_members_they_moved_between() -> None:
    """They are written in the notation of a scope. None stands for no member."""
    before = {"a": {"orders": [0, 1, 2, 5]}, "b": {"orders": [3], "rides": [0]}}
    after = {"b": {"orders": [0, 1, 2, 3]}, "c": {"orders": [5], "rides": [0]}}
    assert moves(before, after) == [
        {"from": "a", "to": "b", "partitions": 3, "what": "orders:0-2"},
        {"from": "a", "to": "c", "partitions": 1, "what": "orders:5"},
        {"from": "b", "to": "c", "partitions": 1, "what": "rides:0"},
    ]
    assert moves(after, {}) == [
        {"from": "b", "to": None, "partitions": 4, "what": "orders:0-3"},
        {"from": "c", "to": None, "partitions": 2, "what": "orders:5 rides:0"},
    ]


def test_moves_of_the_oldest_known_generation_are_unknown() -> None:
    """The generation before it is not stored. A generation that moves nothing has an empty list of moves."""
    one = {"a": {"orders": [0]}}
    said = rebalances([row(9, {}), row(8, one), row(5, one)])
    assert [(each["generation"], each["members"], each["moves"]) for each in said] == [
        (9, 0, [{"from": "a", "to": None, "partitions": 1, "what": "orders:0"}]),
        (8, 1, []),
        (5, 1, None),
    ]
    assert rebalances([]) == []


partitions = st.dictionaries(st.integers(0, 30), st.sampled_from(["a", "b", "c"]))


@given(partitions, partitions)
def test_moves_applied_to_the_old_assignment_give_the_new_one(before: dict[int, str], after: dict[int, str]) -> None:
    """Each partition is in at most one move, which leads from its old owner to its new one."""

    def assignment(owners: dict[int, str]) -> Assignment:
        return {member: {"t": [part for part, owner in owners.items() if owner == member]} for member in set(owners.values())}

    now: dict[int, str | None] = dict(before)
    moved = moves(assignment(before), assignment(after))
    times = Counter[int]()
    for each in moved:
        scope = Scope.parse([each["what"]])
        covered = [part for part in range(31) if any(item.covers(TopicPartition("t", part)) for item in scope.items)]
        assert len(covered) == each["partitions"]
        for part in covered:
            assert now.get(part) == each["from"]
            now[part] = each["to"]
            times[part] += 1
    assert {part: owner for part, owner in now.items() if owner is not None} == after
    assert max(times.values(), default=1) == 1
