"""The generations that are stored for the page: who had which partitions, and why the group rebalanced."""

from __future__ import annotations

from typing import Any

from tests.integration.group.players import Player, Scene

STORED = (
    "SELECT reason, rebalance.protocol, assignment FROM tidemark.rebalance JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
)


def stored(scene: Scene) -> list[tuple[Any, ...]]:
    return scene.sql(f"{STORED} ORDER BY rebalance.generation", scene.group)


def assign(leader: Player, *partitions: tuple[Player, list[int]]) -> None:
    leader.sync({player.member_id: {"partitions": {"flights": parts}, "complete": True} for player, parts in partitions})


def test_each_generation_is_stored_with_its_members_partitions_and_reason(scene: Scene) -> None:
    """A static member is stored under its instance id, so that its next process has the same name. A generation without members is stored
    too. A generation that waits for its leader's assignment is not stored yet."""
    a, b = scene.player("a", instance="seat/0"), scene.player("b")
    assert a.join() is not None
    assert stored(scene) == []
    assign(a, (a, [0, 1, 2]))
    b.join("wants a share")
    a.join()
    b.joined()
    assign(a, (a, [0, 1]), (b, [2]))
    b.sync()
    again = scene.player("a", instance="seat/0")
    assert again.join() is not None  # replaces the first without a rebalance
    again.leave("has read everything")
    b.join()
    assign(b, (b, [0, 1, 2]))
    b.leave()
    alone = {"seat/0": {"flights": [0, 1, 2]}}
    assert stored(scene) == [
        ("a new member joins", "range", alone),
        ("a new member joins: wants a share", "range", {"seat/0": {"flights": [0, 1]}, b.member_id: {"flights": [2]}}),
        ("a member leaves: has read everything", "range", {b.member_id: {"flights": [0, 1, 2]}}),
        ("a member leaves", None, {}),
    ]


def test_only_the_newest_hundred_generations_of_a_group_stay(scene: Scene) -> None:
    a = scene.player("a", instance="seat/0")
    a.join()
    assign(a, (a, [0]))
    (group_id,) = scene.sql("SELECT group_id FROM tidemark.consumer_group WHERE name = %s", scene.group)[0]
    scene.sql(
        "INSERT INTO tidemark.rebalance (group_id, generation, reason, assignment)"
        " SELECT %s, number, '', '{}' FROM generate_series(%s + 1, %s + 120) number",
        group_id, scene.generation, scene.generation,
    )  # fmt: skip
    scene.sql("SELECT setval('tidemark.generation', %s)", scene.generation + 120)
    a.leave()
    kept = scene.sql("SELECT min(generation), max(generation), count(*) FROM tidemark.rebalance WHERE group_id = %s", group_id)
    assert kept == [(scene.generation - 99, scene.generation, 100)]
