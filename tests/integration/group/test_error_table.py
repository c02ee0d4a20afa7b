"""Each request in each state, by who sends it: the table in docs/group-protocol.md, which matches Kafka."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.group.players import Player, Scene

from tidemark import project
from tidemark.group.errors import GroupError, IllegalGeneration, UnknownMemberId
from tidemark.group.requests import Leaving
from tidemark.group.states import GroupState
from tidemark.records.ranges import TopicPartition

COLUMNS = ("no group", GroupState.EMPTY, GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, GroupState.STABLE)


def in_state(scene: Scene, state: str) -> tuple[Player, Player]:
    """The leader and a static follower of a group in this state. They know what they knew when the group entered it."""
    leader, follower = scene.player("leader"), scene.player("follower", instance="i-follower")
    if state == "no group":
        leader.member_id = follower.member_id = "gone"
        return leader, follower
    scene.start(leader, follower)
    if state == GroupState.EMPTY:
        leader.leave()
        follower.leave()
    elif state != GroupState.STABLE:
        new = scene.player("new")
        new.join()
        if state == GroupState.COMPLETING_REBALANCE:
            leader.join()
            follower.join()
            scene.finish_join(new, leader, follower)
    assert scene.state == state
    return leader, follower


def with_new_id(scene: Scene, leader: Player, follower: Player) -> object:
    if scene.state is None:
        leader.member_id = "made-up"
        return leader.join()
    new = scene.player("newest")
    new.ask_for_id()
    return new.join()


def changed(player: Player) -> object:
    player.protocols = (("range", {"topics": ["delays"]}), ("sticky", {"topics": ["delays"]}))
    return player.join()


def refused(player: Player) -> object:
    """Sends every request of a member. All of them get the same error."""
    errors: list[GroupError] = []
    for ask in (player.join, player.joined, player.sync, player.heartbeat):
        try:
            ask()
        except GroupError as error:
            errors.append(error)
    errors += filter(None, [player.leave()])
    assert {type(error) for error in errors} == {type(errors[0])}
    assert len(errors) == 5
    raise errors[0]


def replaced(scene: Scene, leader: Player, follower: Player) -> object:
    thief = scene.player("thief", instance="i-follower")
    thief.protocols = follower.protocols
    thief.join()
    return refused(follower)


def unknown(scene: Scene, leader: Player, follower: Player) -> object:
    stranger = scene.player("stranger")
    stranger.member_id, stranger.generation = "made-up", follower.generation
    return refused(stranger)


def of_another_generation(scene: Scene, leader: Player, follower: Player) -> object:
    for player in (leader, follower):
        for ask in (player.sync, player.heartbeat):
            for by in (-1, 1, 1_000_000):
                with pytest.raises((IllegalGeneration, UnknownMemberId)):
                    ask(generation=player.generation + by)
    return follower.heartbeat(generation=follower.generation + 1)


def only(answers: list[GroupError | None]) -> object:
    if answers[0] is not None:
        raise answers[0]
    return None


FLIGHTS = TopicPartition("flights", 0)
Ask = Callable[[Scene, Player, Player], object]
REQUESTS: dict[str, Ask] = {
    "JoinGroup without an id, dynamic": lambda scene, leader, follower: scene.player("newest").coordinator.join(
        scene.player("newest").request()
    ),
    "JoinGroup without an id, static": lambda scene, leader, follower: scene.player("newest", instance="i-newest").join(),
    "JoinGroup, id just handed out": with_new_id,
    "JoinGroup, replaces a static member": lambda scene, leader, follower: scene.player("again", instance="i-follower").join(),
    "JoinGroup of the leader": lambda scene, leader, follower: leader.join(),
    "JoinGroup of a follower, unchanged": lambda scene, leader, follower: follower.join(),
    "JoinGroup of a follower, changed": lambda scene, leader, follower: changed(follower),
    "SyncGroup of the leader": lambda scene, leader, follower: leader.sync({leader.member_id: "own"}),
    "SyncGroup of a follower": lambda scene, leader, follower: follower.sync(),
    "Heartbeat": lambda scene, leader, follower: follower.heartbeat(),
    "any, unknown member id": unknown,
    "any, instance was replaced": replaced,
    "SyncGroup or Heartbeat, other generation": of_another_generation,
    "LeaveGroup": lambda scene, leader, follower: only(scene.coordinator().leave([Leaving(leader.member_id)])),
    "OffsetFetch": lambda scene, leader, follower: scene.coordinator().fetch_offsets([FLIGHTS]),
    "OffsetDelete, a topic that they read": lambda scene, leader, follower: only(
        list(scene.coordinator().delete_offsets(partitions=[FLIGHTS]).values())
    ),
    "DeleteGroups": lambda scene, leader, follower: scene.coordinator().delete_group(),
}


def answered(scene: Scene, request: str, leader: Player, follower: Player) -> str:
    """The answer in the words of the table: the error's name, "parked" or "ok", and the group's new state if it has changed."""
    before = scene.state
    try:
        answer = REQUESTS[request](scene, leader, follower)
        said = "parked" if answer is None and request.startswith(("JoinGroup", "SyncGroup")) else "ok"
    except GroupError as error:
        said = str(error.kafka_name)
    after = scene.state
    gone = f"→ {GroupState.DEAD}" if before is not None else ""
    moved = "" if after == before else gone if after is None else f"→ {after}"
    return " ".join(filter(None, (said, moved)))


def table() -> dict[tuple[str, str], str]:
    """The page's table: the answer by request and state."""
    page = (Path(project.root()) / "docs" / "group-protocol.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Answers by state\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert tuple(lines[0][1:]) == COLUMNS
    return {(line[0], state): cell for line in lines[2:] for state, cell in zip(COLUMNS, line[1:], strict=True)}


TABLE = table()
assert {request for request, _ in TABLE} == set(REQUESTS)


@pytest.mark.parametrize(("request_", "state"), TABLE, ids=lambda part: str(part))
def test_a_request_is_answered_as_the_table_says(scene: Scene, request_: str, state: str) -> None:
    """Kafka: all of GroupCoordinatorTest's tests of the kinds *UnknownGroup, *EmptyGroup, *DuringRebalance and so on."""
    leader, follower = in_state(scene, state)
    assert answered(scene, request_, leader, follower) == TABLE[request_, state]
