"""How the page shows a rebalance: which partitions moved from which member to which."""

from __future__ import annotations

from tidemark.airflow.web.rebalances import moves, rebalances


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
    assert moves({"a": {"orders": [0]}}, {"a": {"orders": [0, 1]}}) == [{"from": None, "to": "a", "partitions": 1, "what": "orders:1"}]


def test_moves_of_the_oldest_known_generation_are_unknown() -> None:
    """The generation before it is not stored. A generation that moves nothing has an empty list of moves."""
    one = {"a": {"orders": [0]}}
    known = {"at": None, "reason": "a member leaves", "protocol": "range"}
    said = rebalances([{**known, "generation": number, "assignment": which} for number, which in ((9, {}), (8, one), (5, one))])
    assert [(each["generation"], each["members"], each["moves"]) for each in said] == [
        (9, 0, [{"from": "a", "to": None, "partitions": 1, "what": "orders:0"}]),
        (8, 1, []),
        (5, 1, None),
    ]
    assert rebalances([]) == []
