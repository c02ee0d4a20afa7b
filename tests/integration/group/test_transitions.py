"""Every row of the transition table, reached through requests to a real group, and the reason that is stored for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
from tests.integration.group.players import Player, Scene, moved

from tidemark.group.errors import GroupError
from tidemark.group.requests import GroupConfig
from tidemark.group.states import TRANSITIONS, GroupState, Transition, Why

EMPTY, PREPARING, COMPLETING, STABLE, DEAD = (
    GroupState.EMPTY,
    GroupState.PREPARING_REBALANCE,
    GroupState.COMPLETING_REBALANCE,
    GroupState.STABLE,
    GroupState.DEAD,
)


def stable(scene: Scene) -> tuple[Player, Player]:
    a, b = scene.player("a", instance="i-a"), scene.player("b")
    scene.start(a, b)
    return a, b


def all_join(scene: Scene) -> tuple[Player, Player]:
    a, b = stable(scene)
    a.join()
    b.join()
    return a, b


def completing(scene: Scene) -> tuple[Player, Player]:
    players = all_join(scene)
    scene.finish_join(*players)
    return players


def delayed(scene: Scene, **options: object) -> Player:
    a = scene.player("a", config=GroupConfig(initial_rebalance_delay_ms=30_000), **options)
    a.join()
    return a


def change(player: Player) -> None:
    player.protocols = (("range", {"topics": ["delays"]}),)
    player.join()


def overdue(scene: Scene) -> None:
    scene.pass_deadline()
    scene.tick()


SCENES: dict[tuple[GroupState, GroupState, Why], Callable[[Scene], object]] = {
    (EMPTY, PREPARING, Why.MEMBER_JOINS): delayed,
    (EMPTY, DEAD, Why.DELETED): lambda scene: (scene.player("a").ask_for_id(), scene.coordinator().delete_group()),
    (PREPARING, COMPLETING, Why.ALL_JOINED): all_join,
    (PREPARING, COMPLETING, Why.EXPECTED_JOINED): lambda scene: delayed(scene, expected=1),
    (PREPARING, COMPLETING, Why.INITIAL_DELAY_OVER): lambda scene: (delayed(scene), scene.pass_initial_delay(), scene.tick()),
    (PREPARING, COMPLETING, Why.JOIN_OVERDUE): lambda scene: (stable(scene)[0].join(), overdue(scene)),
    (PREPARING, EMPTY, Why.LAST_MEMBER_LEFT): lambda scene: delayed(scene).leave(),
    (COMPLETING, STABLE, Why.ASSIGNED): lambda scene: completing(scene)[0].assign(),
    (STABLE, PREPARING, Why.LEADER_REJOINS): lambda scene: stable(scene)[0].join(),
    (COMPLETING, PREPARING, Why.SYNC_OVERDUE): lambda scene: (completing(scene)[1].sync(), overdue(scene)),
    (STABLE, PREPARING, Why.SYNC_OVERDUE): lambda scene: (completing(scene)[0].assign(), overdue(scene)),
}
for source, members in ((COMPLETING, completing), (STABLE, stable)):
    acts: dict[Why, Callable[[Scene, Player], object]] = {
        Why.MEMBER_JOINS: lambda scene, _: scene.player("c").join(),
        Why.MEMBER_CHANGES: lambda _, b: change(b),
        Why.STATIC_MEMBER_REPLACED: lambda scene, _: scene.player("a'", instance="i-a", topics=["delays"]).join(),
        Why.MEMBER_LEAVES: lambda _, b: b.leave(),
        Why.SESSION_EXPIRES: lambda scene, b: (scene.expire(b), scene.tick()),
    }
    SCENES |= {(source, PREPARING, why): lambda scene, members=members, act=act: act(scene, members(scene)[1]) for why, act in acts.items()}
assert {(row.source, row.target, row.why) for row in TRANSITIONS} == set(SCENES)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source}-{row.target}-{row.why.name}")
def test_a_row_of_the_table_happens(scene: Scene, row: Transition, caplog: pytest.LogCaptureFixture) -> None:
    """Kafka: GroupMetadataTest's legal transitions. All logged changes are in the table, and the last one matches the stored state."""
    caplog.set_level(logging.INFO, "tidemark.group")
    with contextlib.suppress(GroupError):
        SCENES[row.source, row.target, row.why](scene)
    moves = [move for record in caplog.records if (move := moved(record))]
    assert row in moves
    assert set(moves) <= set(TRANSITIONS)
    (state,) = scene.sql("SELECT state FROM tidemark.consumer_group WHERE name = %s OR name LIKE %s", scene.group, scene.group + " (%")[0]
    assert state == moves[-1].target
    if row.target is GroupState.PREPARING_REBALANCE:
        assert scene.of_group("rebalance_reason") == row.why
