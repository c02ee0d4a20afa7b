"""The states of a group and the legal transitions between them, in one table. Every change of state is checked against it.

The states and transitions are those of Kafka's classic groups, with one difference: only an Empty group becomes Dead. Kafka also unloads a
group in any state when its coordinator moves to another broker; here the rows are the coordinator, and never move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tidemark.errors import Broken


class GroupState(StrEnum):
    """The states of a group, under Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Why(StrEnum):
    """The reason for a transition."""

    MEMBER_JOINS = "a new member joins"
    MEMBER_CHANGES = "a member rejoins with other protocols or metadata"
    LEADER_REJOINS = "the leader rejoins"
    STATIC_MEMBER_REPLACED = "a static member was replaced by its next process"
    MEMBER_LEAVES = "a member leaves"
    SESSION_EXPIRES = "a member sent no heartbeat within its session timeout"
    SYNC_OVERDUE = "a member sent no SyncGroup within the rebalance timeout"
    ALL_JOINED = "every member has joined"
    EXPECTED_JOINED = "the expected number of members have joined"
    INITIAL_DELAY_OVER = "the initial rebalance delay is over"
    JOIN_OVERDUE = "the rebalance timeout has passed"
    LAST_MEMBER_LEFT = "the last member left"
    ASSIGNED = "the leader has sent the assignment"
    DELETED = "an operator deletes the group"


@dataclass(frozen=True, slots=True)
class Transition:
    source: GroupState
    target: GroupState
    why: Why


TRANSITIONS: tuple[Transition, ...] = (
    Transition(GroupState.EMPTY, GroupState.PREPARING_REBALANCE, Why.MEMBER_JOINS),
    Transition(GroupState.EMPTY, GroupState.DEAD, Why.DELETED),
    Transition(GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, Why.ALL_JOINED),
    Transition(GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, Why.EXPECTED_JOINED),
    Transition(GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, Why.INITIAL_DELAY_OVER),
    Transition(GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, Why.JOIN_OVERDUE),
    Transition(GroupState.PREPARING_REBALANCE, GroupState.EMPTY, Why.LAST_MEMBER_LEFT),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.STABLE, Why.ASSIGNED),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.MEMBER_JOINS),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.MEMBER_CHANGES),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.STATIC_MEMBER_REPLACED),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.MEMBER_LEAVES),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.SESSION_EXPIRES),
    Transition(GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE, Why.SYNC_OVERDUE),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.MEMBER_JOINS),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.MEMBER_CHANGES),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.LEADER_REJOINS),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.STATIC_MEMBER_REPLACED),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.MEMBER_LEAVES),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.SESSION_EXPIRES),
    Transition(GroupState.STABLE, GroupState.PREPARING_REBALANCE, Why.SYNC_OVERDUE),
)
"""Every legal transition, with each of its reasons. All others are errors."""

_ALLOWED = frozenset(TRANSITIONS)


class IllegalTransition(Broken):
    """The coordinator attempted a transition that is not in the table; its transaction was rolled back."""

    source: str
    target: str
    why: str

    def __str__(self) -> str:
        return f'A group cannot go from {self.source} to {self.target} for the reason "{self.why}". Nothing was stored; please report this.'


def check_transition(source: GroupState, target: GroupState, why: Why) -> None:
    """Raises `IllegalTransition` unless the table has this transition."""
    if Transition(source, target, why) not in _ALLOWED:
        raise IllegalTransition(source=source, target=target, why=why)
