"""What the protocol costs Postgres: the statements of each call and each commit, without BEGIN and COMMIT. They must not creep up.

A call costs the same in a group of two and of twenty: more members mean more rows in a statement, never more statements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from tests.integration.group.players import Player, Scene
from tests.support import ledger
from tests.support.members import Group, wait_for
from tests.support.statements import COMMIT, counted

from tidemark.db import connect
from tidemark.group import member as member_module
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import RebalanceInProgress
from tidemark.sink import commit as commit_module

UNDER_THE_LOCK = 2
"""One for the group, and one for its members."""
SHARED = 2
"""One for a shared lock on the group's row, and one for the member's own row."""
MOVE = 2
"""A change of state: one for the group's row, and one for the notification."""


def is_stable(scene: Scene, size: int) -> list[Player]:
    players = [scene.player(f"m{number:02}", instance=f"i-{number:02}") for number in range(size)]
    scene.start(*players)
    return players


def is_joining(scene: Scene, size: int) -> list[Player]:
    """All members but the last have rejoined."""
    players = is_stable(scene, size)
    for player in players[:-1]:
        assert player.join() is None
    return players


def has_joined(scene: Scene, size: int) -> list[Player]:
    """The join phase is over; only the member that ended it knows."""
    players = is_joining(scene, size)
    assert players[-1].join() is not None
    return players


def has_missed_the_end(scene: Scene, size: int) -> list[Player]:
    """The join phase is over, and another one has begun before the members know."""
    players = has_joined(scene, size)
    assert scene.player("new", instance="i-new").join() is None
    return players


def is_in_the_next_generation(scene: Scene, size: int) -> list[Player]:
    players = has_joined(scene, size)
    scene.finish_join(*players)
    return players


def is_syncing(scene: Scene, size: int) -> list[Player]:
    """The followers' SyncGroups are parked."""
    players = is_in_the_next_generation(scene, size)
    assert [player.sync() for player in players[1:]] == [None] * (size - 1)
    return players


def is_assigned(scene: Scene, size: int) -> list[Player]:
    players = is_syncing(scene, size)
    players[0].assign()
    return players


def refused(call: Callable[[Player], object]) -> Callable[[Player], None]:
    def act(player: Player) -> None:
        with pytest.raises(RebalanceInProgress):
            call(player)

    return act


def first(players: list[Player]) -> Player:
    return players[0]


def second(players: list[Player]) -> Player:
    return players[1]


def last(players: list[Player]) -> Player:
    return players[-1]


def new(players: list[Player], **options: str) -> Player:
    return players[0].scene.player("new", **options)


def new_static(players: list[Player]) -> Player:
    return new(players, instance="i-new")


CALLS: dict[str, tuple[int, Callable[[Scene, int], list[Player]], Callable[[list[Player]], Player], Callable[[Player], object]]] = {
    "heartbeat": (1, is_stable, second, Player.heartbeat),
    "joined, still parked": (1, is_joining, first, Player.joined),
    "sync, still parked": (1, is_syncing, second, Player.sync),
    "sync, parks": (SHARED, is_in_the_next_generation, second, Player.sync),
    "join, an id is handed out": (UNDER_THE_LOCK + 1, is_stable, new, Player.ask_for_id),
    "join, begins a rebalance": (UNDER_THE_LOCK + MOVE + 2, is_stable, new_static, Player.join),
    "join, parked": (SHARED + 1, is_joining, first, Player.join),
    "join, ends the join phase": (SHARED + 1 + UNDER_THE_LOCK + MOVE + 2, is_joining, last, Player.join),
    "joined, the next join phase has begun": (1, has_missed_the_end, first, refused(Player.joined)),
    "joined, the answer": (1, has_joined, second, Player.joined),
    "joined, the answer to the leader": (1 + UNDER_THE_LOCK + 1, has_joined, first, Player.joined),
    "sync of the leader": (UNDER_THE_LOCK + MOVE + 1, is_syncing, first, Player.assign),
    "sync, the answer": (1, is_assigned, second, Player.sync),
    "sync, the others join again": (1 + SHARED, is_joining, last, refused(Player.sync)),
    "leave": (UNDER_THE_LOCK + MOVE + 2, is_stable, second, Player.leave),
}
"""The number of statements by call, the state of the group, who calls, and the call. A call of a member that waits, or for which there is
nothing new, is one statement on the member's own row. If that finds something to do, the call then takes a shared or an exclusive lock on
the group's row."""


@pytest.mark.parametrize("size", [2, 20])
@pytest.mark.parametrize("call", CALLS)
def test_call_costs_as_many_statements_as_it_is_said_to_whatever_the_size_of_the_group(scene: Scene, call: str, size: int) -> None:
    cost, setup, who, act = CALLS[call]
    player = who(setup(scene, size))
    sent: list[str] = []
    counted(scene.connection, sent)
    act(player)
    assert len(sent) == cost, "\n\n".join(sent)


@pytest.mark.parametrize("count", [10, 1000], ids=["10-records", "1000-records"])
@pytest.mark.parametrize("kinds", [ledger.all_loaded, ledger.of_all_kinds], ids=["all-loaded", "some-failed"])
def test_commit_costs_as_many_statements_whatever_the_number_of_records(
    database_url: str, monkeypatch: pytest.MonkeyPatch, count: int, kinds: Callable[..., Any]
) -> None:
    """There is one COPY for the rows, and one for the failed records if there are any. The statements of the claim are not repeated."""
    sent: list[str] = []
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = ledger.Group(database_url, watch)
        group.sql(ledger.DDL)
        part = group.slice(end=count)
        monkeypatch.setattr(commit_module, "connect", lambda *args, **named: counted(connect(*args, **named), sent))
        group.commit(part, kinds(part))
        group.check_conserved()
    assert len(sent) == COMMIT + (kinds is ledger.of_all_kinds), "\n\n".join(sent)


# ---- real members


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements of all members that are created in the test."""
    sent: list[str] = []
    monkeypatch.setattr(member_module, "connect", lambda *args, **named: counted(connect(*args, **named), sent))
    return sent


def test_members_at_rest_send_their_heartbeats_and_nothing_else(group: Group, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the leader, although it checks the metadata all the time."""
    beats = 0
    heartbeat = Coordinator.heartbeat

    def beat(self: Coordinator, *who: Any) -> None:
        nonlocal beats
        heartbeat(self, *who)
        beats += 1

    group.join(metadata_max_age_ms=1)
    group.join(metadata_max_age_ms=1)
    group.settle()
    monkeypatch.setattr(Coordinator, "heartbeat", beat)
    wait_for(group, lambda: beats >= 4)  # the work of the rebalance is over
    began, before = beats, len(sent)
    wait_for(group, lambda: beats >= began + 20)
    assert abs((len(sent) - before) - (beats - began)) <= len(group.members)  # for heartbeats that have not returned yet


def test_members_statement_is_prepared_once(group: Group, sent: list[str]) -> None:
    for _ in range(2):
        group.join()
    group.settle()
    prepared = [each for each in sent if each.startswith("PREPARE tidemark_beat ")]
    assert len(prepared) == 2
    sent.clear()
    wait_for(group, lambda: len(sent) >= 6)
    assert {each.partition("(")[0].rstrip() for each in sent} == {"EXECUTE tidemark_beat"}


def test_rebalance_sends_no_heartbeats_that_are_not_due(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that takes over its partitions has just received an answer. A late notification may lead to a heartbeat."""
    beats: list[str] = []
    heartbeat = Coordinator.heartbeat

    def beat(self: Coordinator, *who: Any) -> None:
        beats.append(who[0])
        heartbeat(self, *who)

    monkeypatch.setattr(Coordinator, "heartbeat", beat)
    for _ in range(4):
        group.join(heartbeat_interval_ms=40_000)
        group.settle()
    assert len(beats) < 4


REBALANCE = 40
"""The maximum number of statements for each member in a rebalance. Both rounds of a cooperative one, with the heartbeats in between, take
about 20."""


def test_rebalance_costs_each_member_few_statements(group: Group, sent: list[str]) -> None:
    """Members do not poll in a loop while they wait: a notification tells a parked member about the next state."""
    for _ in range(3):
        group.join(heartbeat_interval_ms=3000)
    group.settle()
    sent.clear()
    group.join(heartbeat_interval_ms=3000)
    group.settle()
    assert len(sent) <= REBALANCE * len(group.members), len(sent)
