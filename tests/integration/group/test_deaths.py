"""Coordinators that die or stall anywhere in a call, the cost of a call, and concurrent calls."""

from __future__ import annotations

import ast
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.group.players import Player, Scene, settle, until_somebody_waits
from tests.support.ledger import backend_of, in_thread

from tidemark.db import Connection, connect, transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.group import coordinator as coordinator_module
from tidemark.group.coordinator import Coordinator, GroupConfig, JoinRequest, Leaving
from tidemark.group.errors import FencedInstanceId, GroupError, GroupMaxSizeReached, MemberIdRequired, RebalanceInProgress, UnknownMemberId
from tidemark.group.states import GroupState
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity


class Watched(PostgresCursor):
    """Counts the statements of its connection, and makes the server end the session after one of them."""

    done = 0
    last: int | None = None
    killer: Connection

    def execute(self, *args: Any, **kwargs: Any) -> None:
        super().execute(*args, **kwargs)
        Watched.done += 1
        if Watched.done == Watched.last:
            with Watched.killer, Watched.killer.cursor() as cur:
                cur.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(self.connection),))


@contextlib.contextmanager
def watched(scene: Scene, last: int | None = None) -> Iterator[Connection]:
    """A connection that dies after its ``last`` statement, in the middle of a transaction or just before COMMIT."""
    with contextlib.closing(connect(scene.url)) as connection:
        connection.cursor_factory = Watched
        Watched.done, Watched.last, Watched.killer = 0, last, scene.connection
        yield connection


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
    players = stable(scene)
    players[0].join()
    players[1].join()
    players[2].join()
    scene.finish_join(*players)
    return players


def by(player: Player, connection: Connection) -> Player:
    """Moves a player to this connection. Its next call is otherwise the same as on the old one."""
    before, player.coordinator = player.coordinator, player.scene.coordinator(connection)
    player.coordinator._sent_sync = before._sent_sync
    return player


Setup = Callable[[Scene], list[Player]]
Act = Callable[[list[Player], Connection], object]


def first_id(players: list[Player], connection: Connection) -> object:
    return by(players[0].scene.player("d"), connection).ask_for_id()


def new_static(players: list[Player], connection: Connection) -> object:
    return by(players[0].scene.player("d", instance="i-d"), connection).join()


def replaced(players: list[Player], connection: Connection) -> object:
    return by(players[0].scene.player("a'", instance="i-a", topics=["delays"]), connection).join()


def expired(players: list[Player], connection: Connection) -> object:
    return by(players[1], connection).heartbeat()


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


CALLS: dict[str, tuple[Setup, Act]] = {
    "the first JoinGroup of all": (lambda scene: [scene.player("a")], first_id),
    "a member id is handed out": (stable, first_id),
    "a JoinGroup begins a rebalance": (stable, new_static),
    "a JoinGroup is parked": (stable, lambda players, connection: (players[0].join(), by(players[1], connection).join())),
    "a JoinGroup ends the join phase": (joining, lambda players, connection: by(players[2], connection).join()),
    "a static member is replaced": (stable, replaced),
    "the leader assigns": (joined, lambda players, connection: by(players[0], connection).assign()),
    "a follower syncs": (joined, lambda players, connection: by(players[1], connection).sync()),
    "a Heartbeat": (stable, lambda players, connection: by(players[1], connection).heartbeat()),
    "a Heartbeat that removes another member": (one_is_silent, expired),
    "a Heartbeat at the sync deadline": (one_does_not_sync, expired),
    "a LeaveGroup": (stable, lambda players, connection: by(players[1], connection).leave()),
    "a LeaveGroup of everybody": (
        stable,
        lambda players, connection: (
            players[0].scene.coordinator(connection).leave([Leaving(player.member_id, player.instance_id) for player in players])
        ),
    ),
    "DeleteGroups": (all_left, lambda players, connection: players[0].scene.coordinator(connection).delete_group()),
}


IN_TWO_STEPS = {"a JoinGroup is parked", "a JoinGroup ends the join phase"}
"""During a join phase, a JoinGroup is stored first. Then its caller, or the next one, checks whether all have joined."""


def statements_of(scene: Scene, setup: Setup, act: Act) -> int:
    """The number of statements that the call takes when it is not disturbed."""
    players = setup(scene)
    with watched(scene) as connection, contextlib.suppress(GroupError):
        act(players, connection)
    return Watched.done


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_dies_between_any_two_statements_changes_nothing(scene: Scene, call: str) -> None:
    """Each call changes the group in one transaction. Before its COMMIT nothing has changed, and the next caller continues from there."""
    setup, act = CALLS[call]
    total = statements_of(scene, setup, act)
    assert total >= 1
    for last in range(1, total + 1):
        with contextlib.closing(connect(scene.url)) as own:
            once = Scene(scene.url, own, f"{scene.group}-{last}")
            players = setup(once)
            # if there is a call before the one that dies, it runs on `own` and is committed
            with watched(scene, last) as connection:
                before = rows_of(once) if call not in IN_TWO_STEPS else None
                with pytest.raises(DatabaseUnavailable):
                    act(players, connection)
            if before is not None:
                assert rows_of(once) == before, f"after statement {last} of {total}"
            living = list({each.instance_id or each.name: each for each in once.players}.values())
            for player in living:
                player.coordinator = once.coordinator()
            once.expire(*(player for player in players if player not in living))
            settle(living)
            assert once.state == GroupState.STABLE


def test_a_coordinator_that_stands_still_loses_the_lock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process freezes in the middle of a call, or its machine loses the network, the group waits for 10 s and no longer."""
    assert coordinator_module.IDLE_LIMIT_MS <= 10_000
    (a, *_) = stable(scene)
    limits = {**coordinator_module._LIMITS, "idle_ms": "300"}
    frozen = psycopg2.connect(scene.url)
    cur = frozen.cursor()
    cur.execute(coordinator_module.SQL["lock_group"], {"group": scene.group, **limits})
    with in_thread(a.join) as rejoining:
        rejoining.result(180)
    assert scene.state == GroupState.PREPARING_REBALANCE
    with pytest.raises(psycopg2.Error):
        cur.execute("SELECT 1")
    frozen.close()


@pytest.mark.parametrize("request_", ["heartbeat", "joined", "sync"])
def test_every_call_limits_how_long_it_may_stand_still(scene: Scene, request_: str) -> None:
    """This includes the short calls, because a transition would wait for the lock on their own row."""
    players = joining(scene) if request_ == "joined" else joined(scene)
    if request_ == "sync":
        players[1].sync()
    seen: list[Any] = []

    class Spy(PostgresCursor):
        def execute(self, *args: Any, **kwargs: Any) -> None:
            super().execute(*args, **kwargs)
            with self.connection.cursor(cursor_factory=PostgresCursor) as cur:
                cur.execute("SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('lock_timeout')")
                seen.append(cur.fetchone())

    with contextlib.closing(connect(scene.url)) as connection:
        connection.cursor_factory = Spy
        getattr(by(players[1], connection), request_)()
    assert seen == [("10s", "10s")]


# ---- what a call costs, and what it waits for


@pytest.mark.parametrize("request_", ["heartbeat", "joined", "sync"])
def test_a_beat_is_one_statement_on_the_members_own_row(scene: Scene, request_: str) -> None:
    """If nothing is due, a beat does not lock the group and changes no other row. A coordinator working on the group does not delay it."""
    players = joining(scene) if request_ == "joined" else joined(scene)
    if request_ == "sync":
        players[1].sync()
    before = rows_of(scene)
    with watched(scene) as connection, psycopg2.connect(scene.url) as busy, busy.cursor() as cur:
        cur.execute(coordinator_module.SQL["lock_group"], {"group": scene.group, **coordinator_module._LIMITS})
        assert getattr(by(players[1], connection), request_)() is None
    busy.close()
    assert Watched.done == 1
    after = rows_of(scene)
    for (group, member), (group_then, member_then) in zip(before, after, strict=True):
        assert group == group_then
        changed = {key for key in member if member[key] != member_then[key]}
        assert changed == ({"seen_at"} if member["client_id"] == "b" else set())


def test_a_heartbeat_with_something_due_takes_the_groups_lock_first(scene: Scene) -> None:
    """The lock order is group, then members: a beat that locked its own row before it waited for the group could deadlock with a
    transition."""
    players = one_is_silent(scene)
    with psycopg2.connect(scene.url) as busy, busy.cursor() as cur:
        cur.execute(coordinator_module.SQL["lock_group"], {"group": scene.group, **coordinator_module._LIMITS})
        with contextlib.closing(connect(scene.url)) as connection, in_thread(by(players[1], connection).heartbeat) as beating:
            until_somebody_waits(scene.connection)
            cur.execute("UPDATE tidemark.group_member SET seen_at = seen_at WHERE member_id = %s", (players[1].member_id,))
            busy.commit()
            with pytest.raises(RebalanceInProgress):
                beating.result(180)
    busy.close()


def test_an_attempt_starts_while_the_group_rebalances(scene: Scene) -> None:
    """Foreign keys to the group's row do not wait for its lock."""
    stable(scene)
    with psycopg2.connect(scene.url) as busy, busy.cursor() as cur:
        cur.execute(coordinator_module.SQL["lock_group"], {"group": scene.group, **coordinator_module._LIMITS})
        with transaction(scene.connection) as other:
            other.execute("SET LOCAL lock_timeout = '1s'")
            assert store.new_attempt(other, store.ensure_group(other, scene.group), TaskIdentity()) > 0
    busy.close()


def test_no_moment_comes_from_python() -> None:
    """Only the database's clock counts (I6): the coordinator does not import any other."""
    for module in ("coordinator.py", "machine.py", "states.py"):
        text = (Path(coordinator_module.__file__).parent / module).read_text(encoding="utf-8")
        imports = {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
        imports |= {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        assert not imports & {"time", "datetime"}
    sql = (Path(coordinator_module.__file__).parent / "coordinator.sql").read_text(encoding="utf-8")
    assert "clock_timestamp()" in sql
    assert not any(word in sql.lower() for word in ("now()", "current_timestamp", "localtimestamp"))


# ---- concurrent calls


def test_a_heartbeat_that_finds_another_row_than_it_waited_for_keeps_no_lock(scene: Scene) -> None:
    """Postgres leaves such a row locked. A call that has locked the group's row may change members' rows, so the two would deadlock."""
    player = scene.player("a")
    scene.start(player)
    with contextlib.ExitStack() as stack:
        holder, leader, beating, watch = (stack.enter_context(contextlib.closing(connect(scene.url))) for _ in range(4))
        player.coordinator = scene.coordinator(beating)
        of_group = "WHERE group_id = (SELECT group_id FROM tidemark.consumer_group WHERE name = %s)"
        with leader.cursor() as cur:
            cur.execute("SELECT FROM tidemark.consumer_group WHERE name = %s FOR NO KEY UPDATE", (scene.group,))
        with holder.cursor() as cur:
            cur.execute(f"UPDATE tidemark.group_member SET member_id = 'another' {of_group}", (scene.group,))
        with in_thread(player.heartbeat) as beat:
            until_somebody_waits(watch)
            holder.commit()
            until_somebody_waits(watch)
            with leader.cursor() as cur:
                cur.execute(f"UPDATE tidemark.group_member SET joining = joining {of_group}", (scene.group,))
            leader.commit()
            with pytest.raises(UnknownMemberId):
                beat.result(180)


def run_at_once(acts: list[Callable[[], None]]) -> None:
    """Runs each in a separate thread, all started together. Raises the first error of any of them."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(acts))

    def run(act: Callable[[], None]) -> None:
        begin.wait()
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


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

    run_at_once([lambda name=name: join(name) for name in "abcdefgh"])  # type: ignore[misc]
    assert sorted(told) == ["in"] * 3 + ["out"] * 5
    assert len(scene.members()) == 3


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
                        player.coordinator.tick()
                except UnknownMemberId:
                    player.member_id, player.answer = "", None
                except FencedInstanceId:
                    player.member_id = ""
                except (GroupError, MemberIdRequired):
                    player.answer = None

    run_at_once([lambda name=name: live(name, random.Random(f"{seed} {name}")) for name in "aabcd"])  # type: ignore[misc]
    scene.sql(
        "UPDATE tidemark.group_member SET seen_at = seen_at - interval '1 day' FROM tidemark.consumer_group grp"
        " WHERE grp.group_id = group_member.group_id AND grp.name = %s",
        scene.group,
    )
    players = [scene.player(name) for name in "xyz"]
    settle(players)
    assert scene.members() == ["x", "y", "z"]
