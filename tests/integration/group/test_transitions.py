"""Every row of the transition table, reached through requests to a real group, and the reason that is stored for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import pytest
from tests.integration.group.players import Player, Scene

from tidemark.group.coordinator import GroupConfig
from tidemark.group.errors import GroupError
from tidemark.group.states import TRANSITIONS, GroupState, Transition, Why

SCENES: dict[Transition, Callable[[Scene], object]] = {}


def reaches(source: GroupState, target: GroupState, why: Why) -> Callable[[Callable[[Scene], object]], Callable[[Scene], object]]:
    def keep(act: Callable[[Scene], object]) -> Callable[[Scene], object]:
        SCENES[Transition(source, target, why)] = act
        return act

    return keep


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


def completing(scene: Scene) -> tuple[Player, Player]:
    a, b = stable(scene)
    a.join()
    b.join()
    scene.finish_join(a, b)
    return a, b


def delayed(scene: Scene, **options: object) -> Player:
    a = scene.player("a", config=GroupConfig(), **options)  # type: ignore[arg-type]
    a.join()
    return a


@reaches(EMPTY, PREPARING, Why.MEMBER_JOINS)
def _(scene: Scene) -> None:
    delayed(scene)


@reaches(EMPTY, DEAD, Why.DELETED)
def _(scene: Scene) -> None:
    scene.player("a").ask_for_id()
    scene.coordinator().delete_group()


@reaches(PREPARING, COMPLETING, Why.ALL_JOINED)
def _(scene: Scene) -> None:
    a, b = stable(scene)
    a.join()
    b.join()


@reaches(PREPARING, COMPLETING, Why.EXPECTED_JOINED)
def _(scene: Scene) -> None:
    delayed(scene, expected=1)


@reaches(PREPARING, COMPLETING, Why.INITIAL_DELAY_OVER)
def _(scene: Scene) -> None:
    delayed(scene)
    scene.pass_initial_delay()
    scene.tick()


@reaches(PREPARING, COMPLETING, Why.JOIN_OVERDUE)
def _(scene: Scene) -> None:
    a, _ = stable(scene)
    a.join()
    scene.pass_deadline()
    scene.tick()


@reaches(PREPARING, EMPTY, Why.NOBODY_LEFT)
def _(scene: Scene) -> None:
    delayed(scene).leave()


@reaches(COMPLETING, STABLE, Why.ASSIGNED)
def _(scene: Scene) -> None:
    completing(scene)[0].assign()


@reaches(COMPLETING, PREPARING, Why.MEMBER_JOINS)
def _(scene: Scene) -> None:
    completing(scene)
    scene.player("c").join()


@reaches(STABLE, PREPARING, Why.MEMBER_JOINS)
def _(scene: Scene) -> None:
    stable(scene)
    scene.player("c").join()


def change(player: Player) -> None:
    player.protocols = (("range", {"topics": ["delays"]}),)
    player.join()


@reaches(COMPLETING, PREPARING, Why.MEMBER_CHANGES)
def _(scene: Scene) -> None:
    change(completing(scene)[1])


@reaches(STABLE, PREPARING, Why.MEMBER_CHANGES)
def _(scene: Scene) -> None:
    change(stable(scene)[1])


@reaches(STABLE, PREPARING, Why.LEADER_REJOINS)
def _(scene: Scene) -> None:
    stable(scene)[0].join()


@reaches(COMPLETING, PREPARING, Why.STATIC_MEMBER_REPLACED)
def _(scene: Scene) -> None:
    completing(scene)
    scene.player("a'", instance="i-a").join()


@reaches(STABLE, PREPARING, Why.STATIC_MEMBER_REPLACED)
def _(scene: Scene) -> None:
    stable(scene)
    scene.player("a'", instance="i-a", topics=["delays"]).join()


@reaches(COMPLETING, PREPARING, Why.MEMBER_LEAVES)
def _(scene: Scene) -> None:
    completing(scene)[1].leave()


@reaches(STABLE, PREPARING, Why.MEMBER_LEAVES)
def _(scene: Scene) -> None:
    stable(scene)[1].leave()


@reaches(COMPLETING, PREPARING, Why.SESSION_EXPIRES)
def _(scene: Scene) -> None:
    scene.expire(completing(scene)[1])
    scene.tick()


@reaches(STABLE, PREPARING, Why.SESSION_EXPIRES)
def _(scene: Scene) -> None:
    scene.expire(stable(scene)[1])
    scene.tick()


@reaches(COMPLETING, PREPARING, Why.SYNC_OVERDUE)
def _(scene: Scene) -> None:
    completing(scene)[1].sync()
    scene.pass_deadline()
    scene.tick()


@reaches(STABLE, PREPARING, Why.SYNC_OVERDUE)
def _(scene: Scene) -> None:
    completing(scene)[0].assign()
    scene.pass_deadline()
    scene.tick()


def moves(caplog: pytest.LogCaptureFixture) -> list[Transition]:
    """The changes of state in the log, which has one line for each."""
    found = []
    for record in caplog.records:
        if record.msg.startswith("group moved") and isinstance(record.args, tuple):
            _, source, target, why, *_ = record.args
            found.append(Transition(GroupState(str(source)), GroupState(str(target)), Why(str(why))))
    return found


def test_there_is_a_scene_for_every_row_and_no_other() -> None:
    """Ensures that the next test covers exactly the rows of the table."""
    assert set(SCENES) == set(TRANSITIONS)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.source}-{row.target}-{row.why.name}")
def test_a_row_of_the_table_happens(scene: Scene, row: Transition, caplog: pytest.LogCaptureFixture) -> None:
    """Kafka: GroupMetadataTest's legal transitions. All logged changes are in the table, and the last one matches the stored state."""
    caplog.set_level(logging.INFO, "tidemark.group")
    with contextlib.suppress(GroupError):
        SCENES[row](scene)
    assert row in moves(caplog)
    assert set(moves(caplog)) <= set(TRANSITIONS)
    (state,) = scene.sql("SELECT state FROM tidemark.consumer_group WHERE name = %s OR name LIKE %s", scene.group, scene.group + " (%")[0]
    assert state == moves(caplog)[-1].target
    if row.target is GroupState.PREPARING_REBALANCE:
        assert scene.of_group("rebalance_reason") == row.why
