"""Members join, leave, crash, fall silent and change in any order, on a real Postgres: the invariants, and the final state."""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from tests.integration.group.players import AT_ONCE, Player, Scene, moved, one_step, settle
from tests.support.sampling import examples

from tidemark.db import session
from tidemark.group.errors import FencedInstanceId, GroupError, InconsistentGroupProtocol, NonEmptyGroup, UnknownMemberId
from tidemark.group.requests import GroupConfig, Leaving
from tidemark.group.states import TRANSITIONS, GroupState, Transition

OFFERS = (("range",), ("range", "sticky"), ("sticky", "range"), ("mine", "range"), ("mine", "sticky", "range"))
"""All have an assignor in common, so no process is refused permanently."""
MOST = 5
which = st.integers(0, MOST - 1)


class Moves(logging.Handler):
    """Collects the changes of state, as they are logged after each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Transition] = []

    def emit(self, record: logging.LogRecord) -> None:
        if move := moved(record):
            self.seen.append(move)


class Protocol(RuleBasedStateMachine):
    """A few processes. Some do not know that they are no longer members, and some have a successor with the same instance id."""

    url = ""
    connection: Any = None

    @initialize(
        delayed=st.booleans(),
        limit=st.sampled_from([None, None, None, 3]),
        first=st.lists(st.sampled_from([None, "i-1", "i-2"]), min_size=2, max_size=4),
    )
    def start(self, delayed: bool, limit: int | None, first: list[str | None]) -> None:
        config = GroupConfig(initial_rebalance_delay_ms=3000 if delayed else 0, max_size=limit)
        self.scene = Scene(self.url, self.connection, f"group-{uuid.uuid4().hex[:8]}", config)
        self.living: list[Player] = []
        self.generation = 0
        self.state = GroupState.EMPTY
        self.moves = Moves()
        logger = logging.getLogger("tidemark.group.coordinator")
        logger.setLevel(logging.INFO)
        logger.addHandler(self.moves)
        for instance in first:
            self.a_process_starts(instance, OFFERS[1], None)

    def teardown(self) -> None:
        """Once events stop and all living processes respond, the group becomes Stable (or Empty) within a bounded number of calls."""
        if not hasattr(self, "scene"):
            return
        try:
            self.it_ends_well()
        finally:
            logging.getLogger("tidemark.group.coordinator").removeHandler(self.moves)

    # ---- events
    @precondition(lambda self: len(self.living) < MOST)
    @rule(instance=st.sampled_from([None, None, "i-1", "i-2"]), offer=st.sampled_from(OFFERS), expected=st.sampled_from([None, 2]))
    def a_process_starts(self, instance: str | None, offer: tuple[str, ...], expected: int | None) -> None:
        """If it has the instance id of another process, that process becomes a zombie, which continues to send requests."""
        name = f"{instance or 'dynamic'}-{len(self.scene.players)}"
        self.living.append(self.scene.player(name, offer, instance=instance, expected=expected))
        self.ask(self.living[-1].join, self.living[-1])

    @rule(numbers=st.lists(which, min_size=1, max_size=15))
    def some_go_on(self, numbers: list[int]) -> None:
        """Each does what its client would do next."""
        for number in numbers:
            if player := self.one(number):
                one_step(player)
                self.the_states_follow_the_table()
                self.generations_only_grow()
                self.the_rows_fit_the_state()

    @rule()
    def all_go_on_for_a_while(self) -> None:
        """Usually until the group is Stable, so that the next event happens to a working group."""
        self.some_go_on(list(range(len(self.living))) * 3)

    @rule(number=which)
    def join(self, number: int) -> None:
        if player := self.one(number):
            self.ask(player.join, player)

    @rule(number=which)
    def ask_for_an_id_only(self, number: int) -> None:
        player = self.one(number)
        if player and not player.member_id and player.instance_id is None:
            self.ask(player.ask_for_id, player)

    @rule(number=which)
    def ask_again(self, number: int) -> None:
        player = self.one(number)
        if player and (player.member_id or player.instance_id):
            self.ask(player.joined, player)

    @rule(number=which, complete=st.booleans())
    def sync(self, number: int, complete: bool) -> None:
        """A leader sometimes forgets a member, which then gets an empty assignment."""
        player = self.one(number)
        if player is None or player.answer is None:
            return
        if player.leads and not player.answer.skip_assignment:
            members = list(player.answer.members)[: None if complete else -1]
            given = {member: {"of": member, "generation": player.generation} for member in members}
            self.ask(lambda: player.sync(given), player)
        else:
            self.ask(player.sync, player)

    @rule(number=which, by=st.sampled_from([0, 0, 0, -1, 1]))
    def heartbeat(self, number: int, by: int) -> None:
        """If it is accepted, the sender is a member, and the generation is the group's."""
        player = self.one(number)
        if player and self.ask(lambda: player.heartbeat(player.generation + by), player):
            assert player.generation + by == self.scene.generation
            assert [player.instance_id] == [
                instance
                for (instance,) in self.scene.sql("SELECT instance_id FROM tidemark.group_member WHERE member_id = %s", player.member_id)
            ]

    @rule(number=which)
    def leave(self, number: int) -> None:
        if player := self.one(number):
            error = player.leave()
            assert error is None or isinstance(error, UnknownMemberId | FencedInstanceId)
            player.member_id, player.answer = "", None

    @rule(number=which)
    def crash(self, number: int) -> None:
        """The process sends nothing more; its row stays."""
        if player := self.one(number):
            self.living.remove(player)

    @rule(number=which)
    def fall_silent(self, number: int) -> None:
        """The process is silent for longer than the session timeout, then continues as if nothing had happened."""
        if player := self.one(number):
            self.scene.expire(player)

    @rule()
    def crashed_ones_expire(self) -> None:
        self.scene.expire(*(player for player in self.scene.players if player not in self.living))

    @rule(number=which, offer=st.sampled_from(OFFERS), topics=st.sampled_from([["flights"], ["flights", "delays"]]))
    def change(self, number: int, offer: tuple[str, ...], topics: list[str]) -> None:
        """Changes a process's assignors and topics, which its next JoinGroup reports."""
        if player := self.one(number):
            player.protocols = tuple((name, {"topics": topics}) for name in offer)

    @rule()
    def nothing_in_common(self) -> None:
        """A stranger with another assignor is refused as long as the group has members, and does not disturb them."""
        before = self.scene.state
        stranger = self.scene.player("stranger", ("theirs",), instance="i-stranger")
        self.scene.tick()
        if self.scene.members() and (self.scene.config.max_size is None or self.scene.state == GroupState.STABLE):
            with contextlib.suppress(GroupError):
                stranger.join()
                raise AssertionError(f"joined in {before}")
        self.scene.players.remove(stranger)

    @rule()
    def the_initial_delay_passes(self) -> None:
        self.scene.pass_initial_delay()

    @rule()
    def the_deadline_passes(self) -> None:
        self.scene.pass_deadline()

    @rule()
    def the_server_restarts(self) -> None:
        """No member loses its session because of it."""
        members = self.scene.members()
        self.scene.sql("UPDATE tidemark.consumer_group SET server_start = server_start - interval '1 h' WHERE name = %s", self.scene.group)
        for player in self.scene.players:
            self.scene.age(player, ms=86_400_000)
        self.scene.tick()
        assert set(members) == set(self.scene.members())

    @rule()
    def somebody_ticks(self) -> None:
        self.scene.tick()

    @rule(instance=st.sampled_from(["i-1", "i-2"]))
    def an_operator_removes(self, instance: str) -> None:
        (error,) = self.scene.coordinator().leave([Leaving("", instance)])
        assert error is None or isinstance(error, UnknownMemberId)

    @rule()
    def an_operator_deletes(self) -> None:
        """A group with members stays. The name of a deleted group is free, and the next group with this name has greater generations."""
        if self.scene.tick() is None:
            return
        empty = self.scene.state == GroupState.EMPTY
        try:
            self.scene.coordinator().delete_group()
            assert empty
            assert self.scene.state is None
        except NonEmptyGroup:
            assert not empty

    # ---- invariants
    @invariant()
    def the_states_follow_the_table(self) -> None:
        """Each change starts in the state in which the previous one ended, and is in the table. The last one ends in the stored state."""
        for move in self.moves.seen:
            if self.state is GroupState.DEAD:
                self.state = GroupState.EMPTY  # another group with the same name
            assert move.source is self.state
            assert move in TRANSITIONS
            self.state = move.target
        self.moves.seen.clear()
        stored = self.scene.state
        assert stored == self.state or (stored in (None, GroupState.EMPTY) and self.state in (GroupState.EMPTY, GroupState.DEAD))

    @invariant()
    def generations_only_grow(self) -> None:
        """Even after the group was deleted; each number belongs to one join phase of one group."""
        now = self.scene.of_group("generation")
        if now:
            assert now >= self.generation
            self.generation = now

    @invariant()
    def the_rows_fit_the_state(self) -> None:
        """The leader is a member, no instance id occurs twice, and in Stable every member has an assignment of this generation."""
        found = self.scene.sql("SELECT group_id, state, generation, leader, protocol, deadline IS NOT NULL FROM tidemark.consumer_group"
                               " WHERE name = %s", self.scene.group)  # fmt: skip
        if not found:
            return
        group_id, state, generation, leader, protocol, deadline = found[0]
        members = self.scene.sql(
            "SELECT member_id, instance_id, joining, synced, assignment, protocols FROM tidemark.group_member"
            " WHERE group_id = %s AND NOT pending ORDER BY member_no", group_id
        )  # fmt: skip
        ids = [member_id for member_id, *_ in members]
        assert (leader in ids) if members else leader is None
        assert bool(members) == (state != GroupState.EMPTY)
        instances = [instance for _, instance, *_ in members if instance]
        assert len(instances) == len(set(instances))
        if state == GroupState.PREPARING_REBALANCE:
            assert deadline
            assert not any(synced for _, _, _, synced, _, _ in members)
        if state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            assert not any(joining for _, _, joining, *_ in members)
            assert deadline == (state == GroupState.COMPLETING_REBALANCE or not all(synced for _, _, _, synced, _, _ in members))
            assert all(protocol in dict(protocols) for *_, protocols in members)
        if state == GroupState.COMPLETING_REBALANCE:
            assert all(assignment is None for *_, assignment, _ in members)
        if state == GroupState.STABLE:
            assert all(assignment is not None and assignment.get("generation", generation) == generation for *_, assignment, _ in members)
            owners = [assignment["of"] for *_, assignment, _ in members if assignment]
            assert len(owners) == len(set(owners))

    # ---- helpers

    def one(self, number: int) -> Player | None:
        return self.living[number % len(self.living)] if self.living else None

    def ask(self, call: Any, player: Player) -> bool:
        """Makes a call and acts on its answer as a client does. Any error except the expected kinds of `GroupError` fails the test."""
        try:
            answer = call()
        except InconsistentGroupProtocol:
            raise
        except GroupError as error:
            if isinstance(error, UnknownMemberId):
                player.member_id = ""
            player.answer = None
            return False
        if player.answer is not None and answer is player.answer:
            self.check_answer(player)
        return True

    def check_answer(self, player: Player) -> None:
        answer = player.answer
        assert answer.generation == self.scene.generation
        assert bool(answer.members) == (answer.leader == player.member_id)
        if answer.members:
            assert set(answer.members) == {
                member for (member,) in self.scene.sql(
                    "SELECT member_id FROM tidemark.group_member JOIN tidemark.consumer_group USING (group_id)"
                    " WHERE name = %s AND NOT pending", self.scene.group)
            }  # fmt: skip
            assert answer.protocol == self.scene.of_group("protocol")

    def it_ends_well(self) -> None:
        """Of two processes with the same instance id, the newer one survives; of too many processes, only as many as the group admits."""
        newest = {player.instance_id or player.name: player for player in self.living}
        living = list(newest.values())[: self.scene.config.max_size]
        self.scene.config = AT_ONCE if self.scene.config.max_size is None else GroupConfig(0, max_size=self.scene.config.max_size)
        for player in living:
            player.coordinator = self.scene.coordinator()
            player.answer, player.assignment = None, None
        self.the_initial_delay_passes()
        self.scene.sql(
            "UPDATE tidemark.group_member SET seen_at = seen_at - interval '1 day' FROM tidemark.consumer_group grp"
            " WHERE grp.group_id = group_member.group_id AND grp.name = %s AND NOT member_id = ANY (%s)",
            self.scene.group, [player.member_id for player in living if player.member_id],
        )  # fmt: skip
        if not living:
            assert self.scene.tick() in (None, GroupState.EMPTY)
            return
        settle(living, rounds=12)
        assert self.scene.state == GroupState.STABLE
        assert sorted(self.scene.members()) == sorted(player.name for player in living)
        self.the_states_follow_the_table()
        self.generations_only_grow()
        self.the_rows_fit_the_state()


def test_a_group_keeps_its_rules_whatever_members_do_in_whatever_order(groups_url: str) -> None:
    """Tries any interleaving of actions by processes, operators and the clock, with a new group for each example."""
    with session(groups_url) as connection:
        machine = type("Machine", (Protocol,), {"url": groups_url, "connection": connection})
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=examples(100), stateful_step_count=30, suppress_health_check=list(HealthCheck)),
        )
