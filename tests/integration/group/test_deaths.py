"""Coordinators that die or stall anywhere in a call, the cost of a call, and concurrent calls."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.group.players import Player, Scene, settle, until_somebody_waits
from tests.support.deaths import deaths, hooked
from tests.support.ledger import in_thread

from tidemark.db import connect, transaction
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import FencedInstanceId, GroupError, GroupMaxSizeReached, MemberIdRequired, RebalanceInProgress, UnknownMemberId
from tidemark.group.requests import GroupConfig, JoinRequest, Leaving
from tidemark.group.states import GroupState
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity


def rows_of(scene: Scene) -> list[Any]:
    """Everything that is stored about the group."""
    return scene.sql(
        "SELECT to_jsonb(grp), to_jsonb(member) FROM tidemark.consumer_group grp LEFT JOIN tidemark.group_member member USING (group_id)"
        " WHERE name = %s ORDER BY member_no",
        scene.group,
    )


def stable(scene: Scene) -> list[Player]:
    players = [scene.player("a", instance="i-a"), scene.player("b"), scene.player("c")]
    scene.start(*players)
    return players


def joining(scene: Scene) -> list[Player]:
    """Two of the three members have rejoined."""
    players = stable(scene)
    assert [player.join() for player in players[:2]] == [None, None] if players[0].leads else False
    return players


def joined(scene: Scene) -> list[Player]:
    players = joining(scene)
    players[2].join()
    scene.finish_join(*players)
    return players


def first_has_joined(scene: Scene) -> list[Player]:
    players = stable(scene)
    players[0].join()
    return players


def one_is_silent(scene: Scene) -> list[Player]:
    players = stable(scene)
    scene.expire(players[2])
    return players


def one_does_not_sync(scene: Scene) -> list[Player]:
    players = joined(scene)
    players[0].assign()
    players[1].sync()
    scene.pass_deadline()
    return players


def all_left(scene: Scene) -> list[Player]:
    players = stable(scene)
    for player in players:
        player.leave()
    return players


CALLS: dict[str, tuple[Callable[[Scene], list[Player]], Callable[[list[Player], Scene], object]]] = {
    "the first JoinGroup of all": (lambda scene: [], lambda _, scene: scene.player("a").ask_for_id()),
    "a member id is handed out": (stable, lambda _, scene: scene.player("d").ask_for_id()),
    "a JoinGroup begins a rebalance": (stable, lambda _, scene: scene.player("d", instance="i-d").join()),
    "a JoinGroup is parked": (first_has_joined, lambda players, _: players[1].join()),
    "a JoinGroup ends the join phase": (joining, lambda players, _: players[2].join()),
    "a static member is replaced": (stable, lambda _, scene: scene.player("a'", instance="i-a", topics=["delays"]).join()),
    "the leader assigns": (joined, lambda players, _: players[0].assign()),
    "a follower syncs": (joined, lambda players, _: players[1].sync()),
    "a Heartbeat": (stable, lambda players, _: players[1].heartbeat()),
    "a Heartbeat that removes another member": (one_is_silent, lambda players, _: players[1].heartbeat()),
    "a Heartbeat at the sync deadline": (one_does_not_sync, lambda players, _: players[1].heartbeat()),
    "a LeaveGroup": (stable, lambda players, _: players[1].leave()),
    "a LeaveGroup of everybody": (
        stable,
        lambda players, scene: scene.coordinator().leave([Leaving(player.member_id, player.instance_id) for player in players]),
    ),
    "DeleteGroups": (all_left, lambda _, scene: scene.coordinator().delete_group()),
}
IN_TWO_STEPS = {"a JoinGroup is parked", "a JoinGroup ends the join phase"}
"""During a join phase, a JoinGroup is stored first. Then its caller, or the next one, checks whether all have joined."""


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_dies_between_any_two_statements_changes_nothing(scene: Scene, call: str) -> None:
    """Each call changes the group in one transaction. Before its COMMIT nothing has changed, and the next caller continues from there."""
    setup, act = CALLS[call]
    tried: list[tuple[Scene, list[Player], list[Any]]] = []

    def attempt(dying: type[PostgresCursor]) -> None:
        once = Scene(scene.url, stack.enter_context(contextlib.closing(connect(scene.url))), f"{scene.group}-{len(tried)}")
        players = setup(once)
        tried.append((once, players, rows_of(once)))
        once.connection.cursor_factory = dying
        with contextlib.suppress(GroupError):
            act(players, once)

    with contextlib.ExitStack() as stack:
        for last in deaths(attempt, scene.connection):
            once, players, before = tried[-1]
            once.connection = scene.connection
            assert rows_of(once) == before or call in IN_TWO_STEPS, f"after statement {last}"
            living = list({each.instance_id or each.name: each for each in once.players}.values())
            for player in living:
                player.coordinator = once.coordinator()
            once.expire(*(player for player in players if player not in living))
            settle(living)
            assert once.state == GroupState.STABLE
    assert tried


@contextlib.contextmanager
def held(scene: Scene) -> Iterator[PostgresCursor]:
    """Another session holds the lock on the group's row in the block."""
    with contextlib.closing(psycopg2.connect(scene.url)) as busy, busy.cursor() as cur:
        cur.execute("SELECT FROM tidemark.consumer_group WHERE name = %s FOR NO KEY UPDATE", (scene.group,))
        yield cur


@pytest.mark.parametrize("request_", ["heartbeat", "joined", "sync", "join", "leave"])
def test_every_call_limits_how_long_it_may_stand_still(scene: Scene, request_: str) -> None:
    """If a process freezes in the middle of a call, or its machine loses the network, the group waits for 10 s and no longer. This includes
    the short calls, because a transition would wait for the lock on their own row."""
    players = joining(scene) if request_ == "joined" else joined(scene)
    if request_ == "sync":
        players[1].sync()
    seen: set[tuple[str, str]] = set()

    def note(cursor: PostgresCursor, *_: object) -> None:
        with PostgresCursor(cursor.connection) as cur:
            cur.execute("SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('lock_timeout')")
            seen.add(cur.fetchone())

    scene.connection.cursor_factory = hooked(after=note)
    getattr(players[1], request_)()
    assert seen == {("10s", "10s")}


# ---- what a call costs, and what it waits for


@pytest.mark.parametrize("request_", ["heartbeat", "joined", "sync"])
def test_a_beat_changes_nothing_but_the_members_own_row(scene: Scene, request_: str) -> None:
    """If nothing is due, a beat does not lock the group. A coordinator working on the group does not delay it."""
    players = joining(scene) if request_ == "joined" else joined(scene)
    if request_ == "sync":
        players[1].sync()
    before = rows_of(scene)
    with held(scene):
        assert getattr(players[1], request_)() is None
    for (group, member), (group_then, member_then) in zip(before, rows_of(scene), strict=True):
        assert group == group_then
        changed = {key for key in member if member[key] != member_then[key]}
        assert changed == ({"seen_at"} if member["client_id"] == "b" else set())


def test_a_heartbeat_with_something_due_takes_the_groups_lock_first(scene: Scene) -> None:
    """The lock order is group, then members: a beat that locked its own row before it waited for the group could deadlock with a
    transition."""
    players = one_is_silent(scene)
    with held(scene) as cur, contextlib.closing(connect(scene.url)) as watch, in_thread(players[1].heartbeat) as beating:
        until_somebody_waits(watch)
        cur.execute("UPDATE tidemark.group_member SET seen_at = seen_at WHERE member_id = %s", (players[1].member_id,))
        cur.connection.commit()
        with pytest.raises(RebalanceInProgress):
            beating.result(180)


def test_an_attempt_starts_while_the_group_rebalances(scene: Scene) -> None:
    """Foreign keys to the group's row do not wait for its lock."""
    stable(scene)
    with held(scene), transaction(scene.connection) as other:
        other.execute("SET LOCAL lock_timeout = '1s'")
        assert store.new_attempt(other, store.ensure_group(other, scene.group), TaskIdentity()) > 0


# ---- concurrent calls


def test_a_heartbeat_that_finds_another_row_than_it_waited_for_keeps_no_lock(scene: Scene) -> None:
    """Postgres leaves such a row locked. A call that has locked the group's row may change members' rows, so the two would deadlock."""
    player = scene.player("a")
    scene.start(player)
    of_group = "WHERE group_id = (SELECT group_id FROM tidemark.consumer_group WHERE name = %s)"
    with contextlib.ExitStack() as stack:
        holder, watch = (stack.enter_context(contextlib.closing(connect(scene.url))) for _ in range(2))
        leader = stack.enter_context(held(scene))
        with holder.cursor() as cur:
            cur.execute(f"UPDATE tidemark.group_member SET member_id = 'another' {of_group}", (scene.group,))
        with in_thread(player.heartbeat) as beat:
            until_somebody_waits(watch)
            holder.commit()
            until_somebody_waits(watch)
            leader.execute(f"UPDATE tidemark.group_member SET joining = joining {of_group}", (scene.group,))
            leader.connection.commit()
            with pytest.raises(UnknownMemberId):
                beat.result(180)


def run_at_once(acts: list[Callable[[], None]]) -> None:
    """Runs each in a separate thread, all started together. Raises the first error of any of them."""
    begin = threading.Barrier(len(acts))
    with ThreadPoolExecutor(len(acts)) as pool:
        for done in [pool.submit(lambda act=act: (begin.wait(), act())) for act in acts]:
            done.result()


def test_a_group_that_many_join_at_once_has_exactly_as_many_as_it_may(scene: Scene) -> None:
    """Kafka: GroupCoordinatorConcurrencyTest.testConcurrentJoinGroupEnforceGroupMaxSize."""
    config = GroupConfig(max_size=3)
    told: list[str] = []

    def join(name: str) -> None:
        with contextlib.closing(connect(scene.url)) as connection:
            coordinator = Coordinator(connection, scene.group, config)
            request = JoinRequest("", f"i-{name}", name, (("range", {"topics": []}),))
            try:
                coordinator.join(request)
                told.append("in")
            except GroupMaxSizeReached:
                told.append("out")

    run_at_once([lambda name=name: join(name) for name in "abcdefgh"])
    assert sorted(told) == ["in"] * 3 + ["out"] * 5
    assert len(scene.members()) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_members_that_do_anything_at_once_end_in_a_stable_group(scene: Scene, seed: int) -> None:
    """Kafka: testConcurrentGoodPathSequence, testConcurrentRandomSequence. There are no deadlocks, and all errors are the protocol's."""

    def live(name: str, chance: random.Random) -> None:
        with contextlib.closing(connect(scene.url)) as connection:
            instance = f"i-{name}" if name in "ab" else None
            player = Player(scene, name, (("range", {"topics": []}),), instance, 10_000, 60_000, None, scene.coordinator(connection))
            for _ in range(40):
                try:
                    act = chance.choices(["join", "ask", "sync", "beat", "leave", "restart", "tick"], [6, 6, 6, 6, 1, 1, 1])[0]
                    if act == "join":
                        player.join()
                    elif act == "ask" and (player.member_id or instance):
                        player.joined()
                    elif act == "sync" and player.answer is not None:
                        player.assign() if player.leads else player.sync()
                    elif act == "beat":
                        player.heartbeat()
                    elif act == "leave":
                        player.leave()
                    elif act == "restart":
                        player.member_id, player.answer = "", None
                    else:
                        with contextlib.suppress(UnknownMemberId):  # a stranger's call
                            player.coordinator.heartbeat("nobody", None, 0)
                except UnknownMemberId:
                    player.member_id, player.answer = "", None
                except FencedInstanceId:
                    player.member_id = ""
                except (GroupError, MemberIdRequired):
                    player.answer = None

    run_at_once([lambda name=name: live(name, random.Random(f"{seed} {name}")) for name in "aabcd"])
    scene.sql(
        "UPDATE tidemark.group_member SET seen_at = seen_at - interval '1 day' FROM tidemark.consumer_group grp"
        " WHERE grp.group_id = group_member.group_id AND grp.name = %s",
        scene.group,
    )
    players = [scene.player(name) for name in "xyz"]
    settle(players)
    assert scene.members() == ["x", "y", "z"]
