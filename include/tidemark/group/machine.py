"""The group protocol as a state machine over values, without a database or a clock: Kafka's classic group coordinator.

`coordinator` loads a `Group` from its rows under the lock on the group's row, has it handle one request, and stores it again. The group
knows time only as "this timer has passed" and "start this timer"; SQL does both. Every change of state goes through `_move`, which
checks it against the table in `states`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemark.group.errors import (
    FencedInstanceId,
    GroupError,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    MemberIdRequired,
    NonEmptyGroup,
    RebalanceInProgress,
    UnknownMemberId,
)
from tidemark.group.requests import GroupConfig, Joined, JoinRequest, Leaving, MemberMetadata, Protocols, normal_protocols, short_reason
from tidemark.group.states import GroupState, Transition, Why, check_transition

EMPTY_ASSIGNMENT: Mapping[str, Any] = {}
"""The assignment of a member that the leader's result omits."""


@dataclass(slots=True)
class Timer:
    """A deadline by the database's clock: whether it was set, and had passed, when the rows were read."""

    running: bool = False
    passed: bool = False
    changed: bool = False
    ms: int | None = None
    """The new duration if ``changed``; `None`: the timer was stopped."""

    def start(self, ms: int) -> None:
        self.running, self.passed, self.changed, self.ms = True, False, True, ms

    def stop(self) -> None:
        if self.running:
            self.running, self.passed, self.changed, self.ms = False, False, True, None


@dataclass(slots=True)
class MemberRow:
    """A row of ``group_member``."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    expected_members: int | None
    protocols: Protocols
    pending: bool = False
    joining: bool = False
    synced: bool = False
    assignment: Any = None
    member_no: int | None = None
    """`None`: not stored yet."""
    expired: bool = False
    heard: bool = False
    """This member sent the current request, so its session restarts."""

    def metadata(self, protocol: str | None) -> Any:
        return dict(self.protocols).get(protocol) if protocol is not None else None

    def copy_settings(self, request: JoinRequest) -> None:
        """Copies the member's settings from its JoinGroup."""
        self.client_id = request.client_id
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.expected_members = request.expected_members
        self.protocols = normal_protocols(request.protocols)


@dataclass(slots=True)
class Group:
    """A group and its members, oldest first, while it handles one request."""

    name: str
    config: GroupConfig
    take_generation: Callable[[], int]
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, MemberRow] = field(default_factory=dict)
    deadline: Timer = field(default_factory=Timer)
    initial: Timer = field(default_factory=Timer)
    restarted: bool = False
    """The Postgres server has restarted since this group's timers were started."""
    reason: str = ""
    removed: list[MemberRow] = field(default_factory=list)
    moves: list[Transition] = field(default_factory=list)
    reached: list[tuple[GroupState, int]] = field(default_factory=list)
    """The state and generation after each transition. A join phase begins under the last generation."""

    # ---- requests

    def run_due(self) -> None:
        """Handles whatever is due by the clock: expired sessions, an overdue sync, then the end of the join phase."""
        if self.restarted:
            self._start_again()
        expired = [member for member in self.members.values() if member.expired]
        for member in expired:
            self._remove(member)
        if any(not member.pending for member in expired):
            self._rebalance(Why.SESSION_EXPIRES)
        self._end_sync()
        if self.deadline.passed and self.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            for member in self.full():
                if not member.synced:
                    self._remove(member)
            self._rebalance(Why.SYNC_OVERDUE)
        self._settle()

    def join(self, request: JoinRequest, new_id: str) -> Joined | None:
        """Handles JoinGroup; ``new_id`` is for a member without an id. `None`: the join phase is not over, call `joined`."""
        self.reason = short_reason(request.reason)
        holder = self._instance(request.instance_id)
        existing = self.members.get(request.member_id) if request.member_id else holder
        if not self._has_room(existing):
            if existing is not None:
                self._remove(existing)
                self._settle()
            raise GroupMaxSizeReached(group=self.name, max_size=self.config.max_size or 0)
        self._check_protocols(request)
        if request.member_id:
            return self._rejoin(request)
        if holder is not None:
            return self._replace(holder, request, new_id)
        member = MemberRow(
            member_id=new_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            expected_members=request.expected_members,
            protocols=normal_protocols(request.protocols),
            pending=request.instance_id is None,
        )
        self.members[new_id] = member
        if member.pending:
            raise MemberIdRequired(group=self.name, member_id=new_id)
        return self._add(member)

    def joined(self, member_id: str, instance_id: str | None) -> Joined | None:
        """Polls a parked JoinGroup."""
        member = self._identify(member_id, instance_id)
        member.heard = True
        if self.state is GroupState.PREPARING_REBALANCE and not member.joining:
            raise RebalanceInProgress(group=self.name, member_id=member_id)
        return self._answer(member)

    def sync(
        self, member_id: str, instance_id: str | None, generation: int, protocol: str | None, assignments: Mapping[str, Any] | None
    ) -> Any:
        """Handles SyncGroup. `None`: the leader has not assigned yet, call again."""
        member = self._identify(member_id, instance_id)
        self._check_generation(member, generation)
        if protocol is not None and protocol != self.protocol and self.protocol is not None:
            raise InconsistentGroupProtocol(group=self.name, offered=protocol, supported=self.protocol)
        member.heard = True
        if self.state is GroupState.PREPARING_REBALANCE:
            raise RebalanceInProgress(group=self.name, member_id=member_id)
        leads = member_id == self.leader
        if self.state is GroupState.COMPLETING_REBALANCE and leads and assignments is None:
            return None
        member.synced = True
        if self.state is GroupState.COMPLETING_REBALANCE and leads and assignments is not None:
            for recipient in self.full():
                assignment = assignments.get(recipient.member_id)
                recipient.assignment = EMPTY_ASSIGNMENT if assignment is None else assignment
            self._move(GroupState.STABLE, Why.ASSIGNED)
        self._end_sync()
        return member.assignment if self.state is GroupState.STABLE else None

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        """Handles Heartbeat. During a join phase, keeps the session alive, but raises `RebalanceInProgress`."""
        member = self._identify(member_id, instance_id)
        self._check_generation(member, generation)
        member.heard = True
        if self.state is GroupState.PREPARING_REBALANCE:
            raise RebalanceInProgress(group=self.name, member_id=member_id)

    def leave(self, leaving: Sequence[Leaving]) -> list[GroupError | None]:
        """Handles LeaveGroup, and returns each member's error or `None`. All members together cause one rebalance."""
        answers: list[GroupError | None] = []
        rebalance = False
        for leaver in leaving:
            try:
                member = self._leaving_member(leaver)
            except GroupError as error:
                answers.append(error)
                continue
            self._remove(member)
            self.reason = short_reason(leaver.reason)
            rebalance = rebalance or not member.pending
            answers.append(None)
        if rebalance:
            self._rebalance(Why.MEMBER_LEAVES)
        self._settle()
        return answers

    def delete(self) -> None:
        """Handles DeleteGroups, for an empty group only. Discards member ids that were handed out but never joined."""
        if self.state is not GroupState.EMPTY:
            raise NonEmptyGroup(group=self.name, state=self.state, members=len(self.full()))
        for member in list(self.members.values()):
            self._remove(member)
        self._move(GroupState.DEAD, Why.DELETED)

    def subscribed(self) -> frozenset[str]:
        """The topics that any member names in the metadata of any of its protocols."""
        return frozenset(topic for member in self.full() for _, metadata in member.protocols for topic in topics_of(metadata))

    def full(self) -> list[MemberRow]:
        """The members that have joined: those with more than an id."""
        return [member for member in self.members.values() if not member.pending]

    # ---- JoinGroup by kind of member

    def _rejoin(self, request: JoinRequest) -> Joined | None:
        pending = self.members.get(request.member_id)
        if pending is not None and pending.pending and request.instance_id is None:
            pending.copy_settings(request)
            pending.pending = False
            return self._add(pending)
        member = self._identify(request.member_id, request.instance_id)
        member.heard = True
        changed = member.protocols != normal_protocols(request.protocols)
        if self.state is GroupState.STABLE and member.member_id == self.leader:
            why: Why | None = Why.LEADER_REJOINS
        else:
            why = Why.MEMBER_CHANGES if changed else None
        if why is None and self.state is not GroupState.PREPARING_REBALANCE:
            return self._answer(member)  # a retry after a lost response: nothing has changed
        member.copy_settings(request)
        member.joining, member.synced = True, False
        if why is not None:
            self._rebalance(why)
        self._settle()
        return self._answer(member)

    def _add(self, member: MemberRow) -> Joined | None:
        member.joining, member.heard = True, True
        self.leader = self.leader or member.member_id
        if self.state is not GroupState.PREPARING_REBALANCE:
            self._rebalance(Why.MEMBER_JOINS)
        elif self.initial.running:
            self.initial.start(self.config.initial_rebalance_delay_ms)
        self._settle()
        return self._answer(member)

    def _replace(self, member: MemberRow, request: JoinRequest, new_id: str) -> Joined | None:
        """A static member's next process replaces it (KIP-345); the previous one is fenced from now on."""
        topics = topics_of(member.metadata(self.protocol))
        if self.leader == member.member_id:
            self.leader = new_id
        self.members = {new_id if each is member else id_: each for id_, each in self.members.items()}
        member.member_id = new_id
        member.copy_settings(request)
        member.heard = True
        keeps_protocol = self.state is GroupState.STABLE and vote(self.full(), self.leader) == self.protocol
        if not keeps_protocol or topics != topics_of(member.metadata(self.protocol)):
            member.joining, member.synced = True, False
            if self.state is not GroupState.PREPARING_REBALANCE:
                self._rebalance(Why.STATIC_MEMBER_REPLACED)
        self._settle()
        return self._answer(member)

    def _has_room(self, member: MemberRow | None) -> bool:
        """The group size limit (KIP-389). In a join phase the first to join stay: a lowered limit excludes the last ones."""
        limit = self.config.max_size
        if limit is None or self.state is GroupState.EMPTY:
            return True
        if self.state is GroupState.PREPARING_REBALANCE:
            return (member is not None and member.joining) or sum(other.joining for other in self.full()) < limit
        return (member is not None and not member.pending) or len(self.full()) < limit

    def _check_protocols(self, request: JoinRequest) -> None:
        """All current members must support at least one of the offered protocols. The member's own old offer counts too, as in Kafka."""
        common = _common(self.full())
        offered = [name for name, _ in request.protocols]
        if not offered or (common is not None and not common.intersection(offered)):
            raise InconsistentGroupProtocol(
                group=self.name, offered=", ".join(offered) or "no assignor", supported=", ".join(sorted(common or ())) or "no assignor"
            )

    def _answer(self, member: MemberRow) -> Joined | None:
        if self.state not in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            return None
        assert self.protocol is not None
        assert self.leader is not None
        leads = member.member_id == self.leader
        members = {other.member_id: MemberMetadata(other.instance_id, other.metadata(self.protocol)) for other in self.full() if leads}
        return Joined(self.generation, self.protocol, self.leader, member.member_id, members, self.state is GroupState.STABLE)

    # ---- transitions

    def _rebalance(self, why: Why) -> None:
        """Begins a join phase, unless one is in progress. Members parked in SyncGroup notice at their next call."""
        if self.state is GroupState.PREPARING_REBALANCE or (self.state is GroupState.EMPTY and not self.full()):
            return
        first = self.state is GroupState.EMPTY and self.config.initial_rebalance_delay_ms > 0
        self._move(GroupState.PREPARING_REBALANCE, why)
        for member in self.full():
            member.synced = False
        self.deadline.start(self._rebalance_timeout_ms())
        if first:
            self.initial.start(self.config.initial_rebalance_delay_ms)

    def _end_sync(self) -> None:
        """Stops the sync deadline once every member has synced."""
        if self.state is GroupState.STABLE and all(member.synced for member in self.full()):
            self.deadline.stop()

    def _settle(self) -> None:
        """Ends the join phase if nothing is left to wait for."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            return
        full = self.full()
        joining = sum(member.joining for member in full)
        pending = len(self.members) > len(full)
        if not full:  # members with only an id join an empty group later, like any other
            self._end_join(Why.LAST_MEMBER_LEFT)
        elif self.initial.running:
            expected = max((member.expected_members or 0 for member in full), default=0)
            if expected and joining >= expected:
                self._end_join(Why.EXPECTED_JOINED)
            elif self.initial.passed:
                self._end_join(Why.INITIAL_DELAY_OVER)
        elif joining == len(full) and not pending:
            self._end_join(Why.ALL_JOINED)
        elif self.deadline.passed:
            self._end_join(Why.JOIN_OVERDUE)

    def _end_join(self, why: Why) -> None:
        """Begins the next generation, with the members that have joined and static members whose session has not expired."""
        for member in self.full():
            if not member.joining and member.instance_id is None:
                self._remove(member)
        full = self.full()
        joining = [member for member in full if member.joining]
        self.initial.stop()
        if not full:
            self.generation, self.protocol, self.leader = self.take_generation(), None, None
            self.deadline.stop()
            self._move(GroupState.EMPTY, Why.LAST_MEMBER_LEFT)
            return
        if not joining:  # only static members, none of which has joined: wait until one does or their sessions expire
            self.deadline.start(self._rebalance_timeout_ms())
            return
        if self.leader not in {member.member_id for member in joining}:
            self.leader = joining[0].member_id
        self.generation = self.take_generation()
        self.protocol = vote(full, self.leader)
        for member in full:
            member.joining, member.synced, member.assignment = False, False, None
        self.deadline.start(self._rebalance_timeout_ms())
        self._move(GroupState.COMPLETING_REBALANCE, why)

    def _start_again(self) -> None:
        """Restarts every session and deadline after a server restart, as after a failover of Kafka's coordinator."""
        for member in self.members.values():
            member.expired, member.heard = False, True
        if self.deadline.running:
            self.deadline.start(self._rebalance_timeout_ms())
        if self.initial.running:
            self.initial.start(self.config.initial_rebalance_delay_ms)

    def _move(self, target: GroupState, why: Why) -> None:
        check_transition(self.state, target, why)
        self.moves.append(Transition(self.state, target, why))
        self.reached.append((target, self.generation))
        self.state = target

    def _remove(self, member: MemberRow) -> None:
        del self.members[member.member_id]
        self.removed.append(member)
        if self.leader == member.member_id:
            self.leader = next((each.member_id for each in self.full()), None)

    # ---- the member of a request

    def _identify(self, member_id: str, instance_id: str | None) -> MemberRow:
        """The member with these ids. Checks the instance id first, as in Kafka."""
        if instance_id is not None:
            holder = self._instance(instance_id)
            if holder is not None and holder.member_id != member_id:
                raise FencedInstanceId(group=self.name, member_id=member_id, instance_id=instance_id, current=holder.member_id)
            if holder is None:
                raise UnknownMemberId(group=self.name, member_id=member_id, instance_id=instance_id)
        member = self.members.get(member_id)
        if member is None or member.pending:
            raise UnknownMemberId(group=self.name, member_id=member_id, instance_id=instance_id)
        return member

    def _leaving_member(self, leaving: Leaving) -> MemberRow:
        if not leaving.member_id and leaving.instance_id is not None:
            holder = self._instance(leaving.instance_id)
            if holder is None:
                raise UnknownMemberId(group=self.name, member_id="", instance_id=leaving.instance_id)
            return holder
        pending = self.members.get(leaving.member_id)
        if pending is not None and pending.pending and leaving.instance_id is None:
            return pending
        return self._identify(leaving.member_id, leaving.instance_id)

    def _check_generation(self, member: MemberRow, generation: int) -> None:
        if generation != self.generation:
            raise IllegalGeneration(group=self.name, member_id=member.member_id, generation=generation, current=self.generation)

    def _instance(self, instance_id: str | None) -> MemberRow | None:
        if instance_id is None:
            return None
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def _rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.full()), default=1)


def vote(members: Sequence[MemberRow], leader: str | None) -> str:
    """The protocol with the most votes among those that all members support.

    Each member votes for the first protocol in its own list that all members support. The leader's order breaks ties: Kafka does not define
    a tie-break, which would make two coordinators impossible to compare.
    """
    candidates = _common(members) or frozenset()
    names = {member.member_id: [name for name, _ in member.protocols if name in candidates] for member in members}
    votes = Counter(preferences[0] for preferences in names.values())
    most = max(votes.values())
    tied = [name for name, count in votes.items() if count == most]
    return min(tied, key=names[leader].index if leader in names else sorted(tied).index)


def topics_of(metadata: Any) -> frozenset[str]:
    """The topics in a member's metadata; empty if the metadata does not have Tidemark's format."""
    topics = metadata.get("topics", ()) if isinstance(metadata, Mapping) else ()
    return frozenset(topic for topic in topics if isinstance(topic, str)) if isinstance(topics, list | tuple) else frozenset()


def _common(members: Sequence[MemberRow]) -> frozenset[str] | None:
    """The protocols that every member supports; `None`: there are no members, so any protocol will do."""
    if not members:
        return None
    return frozenset[str].intersection(*(frozenset(name for name, _ in member.protocols) for member in members))
