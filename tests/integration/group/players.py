"""Members played by hand against the real coordinator: a test decides when they join, sync, send heartbeats, leave and die.

The test also decides when time passes: it makes rows older instead of sleeping. A player's name is its client id, with which the id of a
dynamic member starts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.fetching import fetched
from tests.support.waiting import until

from tidemark.db import Connection, session
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import GroupError, MemberIdRequired, RebalanceInProgress, UnknownMemberId
from tidemark.group.requests import GroupConfig, Joined, JoinRequest, Leaving
from tidemark.group.states import GroupState, Transition, Why

AT_ONCE = GroupConfig(initial_rebalance_delay_ms=0)
"""The first member forms the first generation alone."""
DAY_MS = 86_400_000


@dataclass
class Player:
    """A process that is, or wants to be, a member. What it knows about itself may be out of date."""

    scene: Scene
    name: str
    protocols: tuple[tuple[str, Any], ...]
    instance_id: str | None
    session_timeout_ms: int
    rebalance_timeout_ms: int
    expected: int | None
    coordinator: Coordinator
    member_id: str = ""
    generation: int = -1
    protocol: str | None = None
    answer: Joined | None = None
    assignment: Any = None

    def request(self, reason: str = "") -> JoinRequest:
        return JoinRequest(
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self.name,
            protocols=self.protocols,
            session_timeout_ms=self.session_timeout_ms,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            reason=reason,
            expected_members=self.expected,
        )

    def ask_for_id(self) -> str:
        """Sends the first JoinGroup of a dynamic member, and returns the member id from the answer."""
        try:
            self.coordinator.join(self.request())
        except MemberIdRequired as required:
            self.member_id = required.member_id
            return self.member_id
        raise AssertionError("no MEMBER_ID_REQUIRED")

    def join(self, reason: str = "") -> Joined | None:
        """Sends JoinGroup, after the round trip for a member id if one is needed."""
        if not self.member_id and self.instance_id is None:
            self.ask_for_id()
        return self.take(self.coordinator.join(self.request(reason)))

    def joined(self) -> Joined | None:
        return self.take(self.coordinator.joined(self.member_id, self.instance_id))

    def take(self, answer: Joined | None) -> Joined | None:
        if answer is not None:
            self.answer, self.member_id, self.generation, self.protocol = answer, answer.member_id, answer.generation, answer.protocol
        return answer

    @property
    def leads(self) -> bool:
        return self.answer is not None and self.answer.leader == self.member_id

    def sync(self, assignments: Mapping[str, Any] | None = None, *, generation: int | None = None, protocol: str | None = "own") -> Any:
        """Sends SyncGroup, as a follower or with the given assignments."""
        protocol = self.protocol if protocol == "own" else protocol
        got = self.coordinator.sync(
            self.member_id, self.instance_id, self.generation if generation is None else generation, protocol, assignments
        )
        self.assignment = got if got is not None else self.assignment
        return got

    def assign(self) -> Any:
        """Sends the leader's SyncGroup. Every assignment names its member and its generation."""
        assert self.leads
        assert self.answer is not None
        return self.sync({member: {"of": member, "generation": self.generation} for member in self.answer.members})

    def heartbeat(self, generation: int | None = None) -> None:
        self.coordinator.heartbeat(self.member_id, self.instance_id, self.generation if generation is None else generation)

    def leave(self, reason: str = "") -> GroupError | None:
        (error,) = self.coordinator.leave([Leaving(self.member_id, self.instance_id, reason)])
        return error


@dataclass
class Scene:
    """A group on a real database, its players, and the control over time."""

    url: str
    connection: Connection
    group: str = "departures"
    config: GroupConfig = AT_ONCE
    players: list[Player] = field(default_factory=list)

    def player(
        self,
        name: str,
        protocols: Sequence[str] | Mapping[str, Any] = ("range", "sticky"),
        *,
        instance: str | None = None,
        session_ms: int = 10_000,
        rebalance_ms: int = 60_000,
        expected: int | None = None,
        topics: Iterable[str] = ("flights",),
        config: GroupConfig | None = None,
    ) -> Player:
        """A process that has not joined yet."""
        offered = protocols if isinstance(protocols, Mapping) else {each: {"topics": list(topics)} for each in protocols}
        player = Player(
            self, name, tuple(offered.items()), instance, session_ms, rebalance_ms, expected, self.coordinator(config=config)
        )  # fmt: skip
        self.players.append(player)
        return player

    def coordinator(self, connection: Connection | None = None, config: GroupConfig | None = None) -> Coordinator:
        return Coordinator(connection or self.connection, self.group, config or self.config)

    # ---- the stored state

    def sql(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.connection, self.connection.cursor() as cur:
            cur.execute(text, parameters or None)
            return fetched(cur)

    def of_group(self, column: str) -> Any:
        found = self.sql(f"SELECT {column} FROM tidemark.consumer_group WHERE name = %s", self.group)
        return found[0][0] if found else None

    @property
    def state(self) -> str | None:
        return self.of_group("state")

    @property
    def generation(self) -> int:
        return self.of_group("generation")

    @property
    def leader(self) -> str | None:
        return self.of_group("leader")

    def members(self) -> list[str]:
        """The names of the full members, oldest first."""
        return [
            client
            for (client,) in self.sql(
                "SELECT client_id FROM tidemark.group_member JOIN tidemark.consumer_group USING (group_id)"
                " WHERE name = %s AND NOT pending ORDER BY member_no",
                self.group,
            )
        ]

    # ---- time

    def age(self, *players: Player, ms: int) -> None:
        """Lets this much time pass for the sessions of these members, without a request from them."""
        for player in players:
            self.sql("UPDATE tidemark.group_member SET seen_at = seen_at - %s * interval '1 ms' WHERE member_id = %s", ms, player.member_id)

    def expire(self, *players: Player) -> None:
        self.age(*players, ms=DAY_MS)

    def pass_initial_delay(self) -> None:
        self.sql(
            "UPDATE tidemark.consumer_group SET initial_until = least(deadline, clock_timestamp())"
            " WHERE name = %s AND initial_until IS NOT NULL",
            self.group,
        )

    def pass_deadline(self) -> None:
        """Lets the rebalance timeout pass, for the join phase or for the SyncGroups."""
        self.sql(
            "UPDATE tidemark.consumer_group SET deadline = now, initial_until = CASE WHEN initial_until IS NOT NULL THEN now END"
            "  FROM clock_timestamp() AS now WHERE name = %s AND deadline IS NOT NULL",
            self.group,
        )

    def tick(self) -> str | None:
        """Has a stranger's call run everything that is due, and returns the state."""
        with contextlib.suppress(UnknownMemberId):
            self.coordinator().heartbeat("nobody", None, 0)
        return self.state

    # ---- whole phases

    def start(self, *players: Player) -> None:
        """Starts a new group: these players join within the initial delay, the first leads, and all get an assignment."""
        for player in players:
            player.coordinator = self.coordinator(config=GroupConfig(initial_rebalance_delay_ms=30_000))
            assert player.join() is None
        self.pass_initial_delay()
        self.finish_join(*players)
        for player in players:
            player.coordinator = self.coordinator()
        self.finish_sync(*players)

    def finish_join(self, *players: Player) -> None:
        for player in players:
            assert player.joined() is not None, player.name
        assert self.state == GroupState.COMPLETING_REBALANCE

    def finish_sync(self, *players: Player) -> None:
        """The leader assigns, and all members get their assignments."""
        (leader,) = [player for player in players if player.leads]
        leader.assign()
        for player in players:
            assert player.sync() == {"of": player.member_id, "generation": self.generation}
        assert self.state == GroupState.STABLE

    def rebalance(self, *players: Player) -> None:
        """These players join, and the group becomes Stable. A player that has not joined before must be the first."""
        for player in players:
            player.join()
        self.finish_join(*players)
        self.finish_sync(*players)


def settle(players: Sequence[Player], rounds: int = 20) -> None:
    """Each player acts on its answers until all have an assignment of the same generation. Fails after ``rounds`` rounds."""
    for _ in range(rounds):
        for player in players:
            one_step(player)
        if len({player.generation for player in players}) == 1 and all(
            player.assignment == {"of": player.member_id, "generation": player.generation} for player in players
        ):
            with contextlib.suppress(RebalanceInProgress):
                for player in players:
                    player.heartbeat()
                return
    raise AssertionError(f"not stable after {rounds} rounds: {[(player.name, player.generation) for player in players]}")


def one_step(player: Player) -> None:
    """Takes the next step of a client. After an error, its name decides what the next step is."""
    try:
        if player.answer is None:
            if not player.member_id and player.instance_id is None:
                player.ask_for_id()
            answer = player.joined() if player.assignment == "parked" else player.join()
            player.assignment = "parked" if answer is None else None
        elif player.leads and not player.answer.skip_assignment:
            player.assign()
        else:
            player.sync()
            player.heartbeat()
    except GroupError as error:
        player.answer, player.assignment = None, None
        if error.kafka_name == "UNKNOWN_MEMBER_ID":
            player.member_id = ""


@contextlib.contextmanager
def scene_on(url: str, group: str = "departures") -> Iterator[Scene]:
    with session(url) as connection:
        yield Scene(url, connection, group)


def waits_for_a_lock(connection: Connection) -> bool:
    """Whether a session of this database is waiting for a lock that another one holds."""
    with connection, connection.cursor() as cur:
        cur.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        row = cur.fetchone()
        return row is not None and row[0] > 0


def until_somebody_waits(connection: Connection) -> None:
    until(lambda: waits_for_a_lock(connection))


def moved(record: logging.LogRecord) -> Transition | None:
    """The change of state that a log line tells."""
    if not record.msg.startswith("group moved"):
        return None
    _, source, target, why, *_ = record.args
    return Transition(GroupState(source), GroupState(target), Why(why))
