"""The group coordinator on Postgres rows: the process that makes a call acts as the coordinator.

A call that changes the group is one transaction. It locks the group's row, handles sessions and timers that are due by the database's
clock, handles the request, stores the changes and wakes the waiting members. If a process dies during a call, the group stays unchanged,
and the next caller continues from there. As long as nothing is due, other calls change the member's own row only: a `heartbeat`, a `joined`
or `sync` that has to wait, and the response to a follower's `joined` or repeated `sync` are one statement each. The `join` of a member in
a join phase, and a follower's first `sync`, share the group's row, so members do not wait for each other.

The protocol itself is in `machine`, the legal transitions in `states`, the statements in ``coordinator.sql``. All times come from
``clock_timestamp()``, never from this process (I6).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import psycopg2.errors
from psycopg2.extras import Json

from tidemark.db import execute_often, rows, scalar, set_audit_actor, statements, transaction
from tidemark.group.errors import (
    GroupError,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    MemberIdRequired,
    OffsetHasResults,
    RebalanceInProgress,
    UnknownMemberId,
)
from tidemark.group.machine import Group, MemberRow, Timer
from tidemark.group.requests import (
    GroupConfig,
    GroupDescription,
    GroupListing,
    Joined,
    JoinRequest,
    Leaving,
    MemberDescription,
    as_json,
    check_join,
    normal_protocols,
)
from tidemark.group.states import GroupState
from tidemark.group.wake import notice, notify
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.group", "coordinator.sql")

LOCK_LIMIT_MS = 10_000
"""How long a call waits for the group's row. No call should hold it for long; `IDLE_LIMIT_MS` ends one that is stuck."""
IDLE_LIMIT_MS = 10_000
"""After this, a process that stalls in the middle of a call (frozen, network lost) loses its session, and with it the lock."""

_LIMITS = {"lock_ms": str(LOCK_LIMIT_MS), "idle_ms": str(IDLE_LIMIT_MS)}
_MEMBER_COLUMNS = ("member_no", "member_id", "client_id", "pending", "joining", "synced", "session_timeout_ms", "rebalance_timeout_ms",
           "expected_members", "protocols", "assignment")  # fmt: skip

T = TypeVar("T")
Request = Literal["heartbeat", "join", "joined", "sync", "synced"]


class _BeatRow(NamedTuple):
    """The group and the member, from the statement on the member's own row."""

    state: str
    generation: int
    protocol: str
    leader: str
    assignment: Any
    joining: bool


class Coordinator:
    """A group's coordinator, on the caller's connection; for one thread at a time.

    Every method changes the group in at most one transaction. A call that raises a `GroupError` has still handled overdue sessions and
    timers. After `DatabaseUnavailable` the outcome is unknown: repeat the call, which is safe for every request.
    """

    def __init__(self, connection: Connection, group: str, config: GroupConfig | None = None) -> None:
        self._connection = connection
        self._group = group
        self._config = config or GroupConfig()
        self._new_ids: dict[str, str] = {}
        self._sent_sync: tuple[str, int] | None = None
        """The member and generation of the last SyncGroup: a repeated one is a poll, which does not lock the group's row."""

    # ---- members

    def join(self, request: JoinRequest) -> Joined | None:
        """Handles JoinGroup. `None`: the join phase is not over; call `joined`.

        A dynamic member's first request raises `MemberIdRequired` with the id to join with. Also raises `InvalidSessionTimeout`,
        `InconsistentGroupProtocol`, `GroupMaxSizeReached`, `UnknownMemberId` or `FencedInstanceId`.
        """
        check_join(self._group, request, self._config)
        member_id, instance_id = request.member_id, request.instance_id
        if member_id and self._config.max_size is None and self._heartbeat("join", member_id, instance_id, join_request=request):
            return self.joined(member_id, instance_id)  # after the commit, so that one of concurrent joiners sees that all have joined
        new_id = f"{instance_id or request.client_id}-{uuid.uuid4()}"
        answer = self._locked(lambda group: group.join(request, new_id), member_id, instance_id, create=not member_id)
        if not member_id and instance_id is not None:
            self._new_ids[instance_id] = new_id
        return answer

    def joined(self, member_id: str, instance_id: str | None = None) -> Joined | None:
        """Polls a parked JoinGroup; counts as a heartbeat. `None`: the join phase is still not over.

        A static member that joined without a member id may omit it here, on the same `Coordinator`; the response contains it. Raises
        `RebalanceInProgress` if a newer join phase has begun since, `UnknownMemberId` or `FencedInstanceId`.
        """
        member_id = self._resolve_id(member_id, instance_id)
        if not member_id:  # this caller may be a process that was replaced since
            raise UnknownMemberId(group=self._group, member_id="", instance_id=instance_id)
        row = self._heartbeat("joined", member_id, instance_id)
        if row is None:
            return self._locked(lambda group: group.joined(member_id, instance_id), member_id, instance_id)
        if row.state == GroupState.PREPARING_REBALANCE:
            if row.joining:
                return None
            raise RebalanceInProgress(group=self._group, member_id=member_id)
        return Joined(row.generation, row.protocol, row.leader, member_id, {}, row.state == GroupState.STABLE)

    def sync(
        self, member_id: str, instance_id: str | None, generation: int, protocol: str | None, assignments: Mapping[str, Any] | None = None
    ) -> Any:
        """Handles SyncGroup, and returns the member's assignment. `None`: the leader has not sent it yet, call again.

        Only the leader's ``assignments`` (by member id) count, and only the first ones of a generation. A member that is missing gets
        ``{}``. Raises `IllegalGeneration`, `InconsistentGroupProtocol`, `RebalanceInProgress`, `UnknownMemberId` or `FencedInstanceId`.
        """
        member_id = self._resolve_id(member_id, instance_id)
        if assignments is None:
            parked, self._sent_sync = self._sent_sync == (member_id, generation), (member_id, generation)
            row = self._heartbeat("synced", member_id, instance_id, generation=generation) if parked else None
            row = row or self._heartbeat("sync", member_id, instance_id, generation=generation, protocol=protocol)
            if row is not None and row.state == GroupState.PREPARING_REBALANCE:
                raise RebalanceInProgress(group=self._group, member_id=member_id)
            if row is not None:
                return row.assignment
        normalized = None if assignments is None else json.loads(as_json(dict(assignments), "assignments"))
        return self._locked(lambda group: group.sync(member_id, instance_id, generation, protocol, normalized), member_id, instance_id)

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        """Handles Heartbeat. Raises `RebalanceInProgress`, `IllegalGeneration`, `UnknownMemberId` or `FencedInstanceId`."""
        member_id = self._resolve_id(member_id, instance_id)
        row = self._heartbeat("heartbeat", member_id, instance_id, generation=generation)
        if row is None:
            self._locked(lambda group: group.heartbeat(member_id, instance_id, generation), member_id, instance_id)
        elif row.state == GroupState.PREPARING_REBALANCE:
            raise RebalanceInProgress(group=self._group, member_id=member_id)

    def leave(self, leaving: Sequence[Leaving], *, by: str = "") -> list[GroupError | None]:
        """Handles LeaveGroup: each member's error, or `None`. An operator removes a static member with ``Leaving("", instance_id)``.

        ``by`` is the operator, for the audit log; without it, the members leave by themselves, which is not audited.
        """

        def remove(group: Group, cur: Cursor, _group_id: int) -> list[GroupError | None]:
            members = dict(group.members)
            answers = group.leave(leaving)
            if by:
                names = {member.member_id or member.instance_id for member in leaving}
                ids = [member.member_id for member in members.values() if names & {member.member_id, member.instance_id}]
                set_audit_actor(cur, by, leaving[0].reason)
                cur.execute(SQL["name_removed"], {"members": json.dumps(ids)})
            return answers

        try:
            return self._locked_rows(remove, GroupIdNotFound(group=self._group))
        except GroupIdNotFound:
            return [UnknownMemberId(group=self._group, member_id=each.member_id, instance_id=each.instance_id) for each in leaving]

    # ---- operators

    def fetch_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int | None]:
        """OffsetFetch: the next offset to read of each partition, or `None` without a position. ``partitions`` defaults to those with one.

        Works in every state and for any caller, as in Kafka. For a topic that was created again, only the newest incarnation counts.
        """
        with transaction(self._connection) as cur:
            positions = store.positions(cur, self._group)
        newest = {position.partition.topic: position.topic_id for position in sorted(positions, key=lambda position: position.topic_id)}
        current = {position.partition: position.position for position in positions if newest[position.partition.topic] == position.topic_id}
        return dict(current) if partitions is None else {partition: current.get(partition) for partition in partitions}

    def describe(self) -> GroupDescription | None:
        """The stored group, or `None`. Changes nothing: overdue members are shown as such until the next call removes them."""
        with transaction(self._connection) as cur:
            cur.execute(SQL["describe"], {"group": self._group})
            member_rows = rows(cur)
        if not member_rows:
            return None
        first = member_rows[0]
        members = tuple(
            MemberDescription(
                row["member_id"],
                row["instance_id"],
                row["client_id"],
                row["pending"],
                dict(row["protocols"]).get(first["protocol"]),
                row["assignment"],
                row["joined_at"],
                row["seen_at"],
                row["overdue"],
            )
            for row in member_rows
            if row["member_id"] is not None
        )
        return GroupDescription(
            self._group,
            GroupState(first["state"]),
            first["state_since"],
            first["rebalance_reason"],
            first["generation"],
            first["protocol"],
            first["leader"],
            members,
        )

    def delete_group(self, *, by: str = "") -> None:
        """DeleteGroups: the group becomes Dead and its name free. A later group of that name starts without positions.

        Writers that still hold one of its partitions are fenced. Attempts, ledger and positions stay under another name: they are the
        history of rows in the sinks. ``by`` is for the audit log. Raises `NonEmptyGroup` or `GroupIdNotFound`.
        """

        def delete(group: Group, cur: Cursor, group_id: int) -> None:
            group.delete()
            set_audit_actor(cur, by)
            cur.execute(SQL["lock_positions"], {"group_id": group_id})
            cur.execute(SQL["fence_positions"], {"group_id": group_id})
            cur.execute(SQL["delete_group"], {"group_id": group_id})

        self._locked_rows(delete, GroupIdNotFound(group=self._group))

    def delete_offsets(
        self, topics: Iterable[str] = (), partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, GroupError | None]:
        """OffsetDelete of whole topics and single partitions. Returns each partition's error, or `None`.

        The error is `GroupSubscribedToTopic` if members are subscribed to the topic, `OffsetHasResults` if the ledger has batches of the
        partition (rewind the group instead). Raises `GroupIdNotFound`.
        """
        names, single = set(topics), list(partitions)

        def delete(group: Group, cur: Cursor, group_id: int) -> dict[TopicPartition, GroupError | None]:
            answers: dict[TopicPartition, GroupError | None] = dict.fromkeys(single)
            cur.execute(SQL["lock_positions"], {"group_id": group_id})
            subscribed = group.subscribed()
            positions = [(TopicPartition(row["topic"], row["partition"]), row["topic_id"]) for row in rows(cur)]
            for partition, topic_id in positions:
                if partition.topic not in names and partition not in answers:
                    continue
                if partition.topic not in subscribed:
                    answers[partition] = answers.get(partition) or _delete_position(cur, group, group_id, partition, topic_id)
                else:
                    answers[partition] = GroupSubscribedToTopic(group=self._group, topic=partition.topic)
            for partition in single:
                if partition.topic in subscribed:
                    answers[partition] = GroupSubscribedToTopic(group=self._group, topic=partition.topic)
            return answers

        return self._locked_rows(delete, GroupIdNotFound(group=self._group))

    # ---- one call, one transaction

    def _heartbeat(
        self,
        request: Request,
        member_id: str,
        instance_id: str | None,
        *,
        generation: int | None = None,
        protocol: str | None = None,
        join_request: JoinRequest | None = None,
    ) -> _BeatRow | None:
        """Updates the member's own row only. `None`: something is due or the request changes more, so it needs the group's lock."""
        values = {
            "group": self._group, "member_id": member_id, "instance_id": instance_id, "generation": generation, "protocol": protocol,
            "request": request, **_join_values(join_request), **_LIMITS,
        }  # fmt: skip
        with transaction(self._connection) as cur:
            if request in ("join", "sync"):
                cur.execute(SQL["share_group"], values)
            execute_often(cur, "beat", SQL["beat"], values)
            row = cur.fetchone()
        # without a row, a new transaction takes the group's lock: this one may hold that of a row that stopped matching while it waited
        return None if row is None else _BeatRow(*row)

    def _locked(self, handle: Callable[[Group], T], member_id: str, instance_id: str | None, *, create: bool = False) -> T:
        missing = UnknownMemberId(group=self._group, member_id=member_id, instance_id=instance_id)
        return self._locked_rows(lambda group, *_: handle(group), missing, create=create)

    def _locked_rows(self, handle: Callable[[Group, Cursor, int], T], missing: GroupError, *, create: bool = False) -> T:
        """Returns what ``handle`` returns or raises, after storing every change. Raises ``missing`` if the group does not exist."""
        with transaction(self._connection) as cur:
            row = self._lock(cur, create=create)
            if row is None:
                raise missing
            group, before = self._load(cur, row)
            group.run_due()
            response: T | GroupError
            try:
                response = handle(group, cur, row["group_id"])
            except GroupError as error:
                response = error
            self._save(cur, row["group_id"], group, before)
        for move in group.moves:
            log.info(
                "group moved group=%s from=%s to=%s why=%s generation=%s members=%s reason=%s",
                self._group, move.source, move.target, move.why, group.generation, len(group.full()), group.reason or None,
            )  # fmt: skip
        if isinstance(response, MemberIdRequired):
            log.debug("member id given out group=%s member=%s", self._group, response.member_id)
        if isinstance(response, GroupError):
            raise response
        return response

    def _resolve_id(self, member_id: str, instance_id: str | None) -> str:
        """The member id, or that of this process's static member whose first JoinGroup is still parked."""
        return member_id or self._new_ids.get(instance_id or "", "")

    # ---- rows

    def _lock(self, cur: Cursor, *, create: bool) -> dict[str, Any] | None:
        while True:
            cur.execute(SQL["lock_group"], {"group": self._group, **_LIMITS})
            groups = rows(cur)
            if groups:
                return groups[0]
            if not create:
                return None
            store.ensure_group(cur, self._group)

    def _load(self, cur: Cursor, row: Mapping[str, Any]) -> tuple[Group, dict[str, Any]]:
        """The locked group, and its stored values, with which `_save` detects changes."""
        cur.execute(SQL["read_members"], {"group_id": row["group_id"]})
        members = [
            MemberRow(**{**member_row, "protocols": tuple((name, data) for name, data in member_row["protocols"])})
            for member_row in rows(cur)
        ]
        group = Group(
            self._group,
            self._config,
            lambda: store.next_generation(cur),
            GroupState(row["state"]),
            row["generation"],
            row["protocol"],
            row["leader"],
            {member.member_id: member for member in members},
            Timer(row["deadline_set"], row["deadline_passed"]),
            Timer(row["initial_set"], row["initial_passed"]),
            row["restarted"],
        )
        return group, {
            "leader": group.leader,
            "reason": row["rebalance_reason"],
            "members": {member.member_no: replace(member) for member in members},
        }

    def _save(self, cur: Cursor, group_id: int, group: Group, before: Mapping[str, Any]) -> None:
        removed = [member.member_no for member in group.removed if member.member_no is not None]
        if removed:
            cur.execute(SQL["remove_members"], {"numbers": removed})
        if group.moves or group.restarted or group.deadline.changed or group.initial.changed or group.leader != before["leader"]:
            reasons = [move.why for move in group.moves if move.target in (GroupState.PREPARING_REBALANCE, GroupState.DEAD)]
            reason = ": ".join(filter(None, (reasons[-1], group.reason))) if reasons else before["reason"]
            cur.execute(SQL["save_group"], {
                "group_id": group_id, "state": group.state, "generation": group.generation, "protocol": group.protocol,
                "leader": group.leader, "moved": bool(group.moves), "reason": reason,
                "deadline_changed": group.deadline.changed, "deadline_ms": group.deadline.ms,
                "initial_changed": group.initial.changed, "initial_ms": group.initial.ms,
            })  # fmt: skip
        changed = [
            _member_values(member)
            for member in group.members.values()
            if member.member_no is not None and member != before["members"][member.member_no]
        ]
        if changed:
            cur.execute(SQL["save_members"], {"members": json.dumps(changed)})
        new = [
            {**_member_values(member), "instance_id": member.instance_id} for member in group.members.values() if member.member_no is None
        ]
        if new:
            cur.execute(SQL["add_members"], {"group_id": group_id, "members": json.dumps(new)})
        for state, generation in group.reached:
            notify(cur, self._group, notice(state, generation))


def list_groups(connection: Connection, states: Iterable[str] = ()) -> list[GroupListing]:
    """The groups in any of ``states`` (default: all but deleted ones), by name, as stored; see `Coordinator.describe`."""
    with transaction(connection) as cur:
        cur.execute(SQL["list_groups"], {"states": list(states)})
        return [GroupListing(row["name"], GroupState(row["state"]), row["generation"], row["members"]) for row in rows(cur)]


def _member_values(member: MemberRow) -> dict[str, Any]:
    return {**{name: getattr(member, name) for name in _MEMBER_COLUMNS}, "heard": member.heard}


def _join_values(request: JoinRequest | None) -> dict[str, Any]:
    """The row values of a JoinGroup's settings; all `None` for other requests."""
    protocols = None if request is None else normal_protocols(request.protocols)
    return {
        "client_id": request and request.client_id,
        "session_timeout_ms": request and request.session_timeout_ms,
        "rebalance_timeout_ms": request and request.rebalance_timeout_ms,
        "expected_members": request and request.expected_members,
        "protocols": None if protocols is None else Json(protocols),
        "offered": None if protocols is None else Json([name for name, _ in protocols]),
    }


def _delete_position(cur: Cursor, group: Group, group_id: int, partition: TopicPartition, topic_id: int) -> GroupError | None:
    """Deletes a position, unless other tables still refer to it through foreign keys."""
    key = {"group_id": group_id, "topic_id": topic_id, "partition": partition.partition}
    cur.execute("SAVEPOINT position")
    try:
        cur.execute(SQL["delete_position"], key)
    except psycopg2.errors.ForeignKeyViolation:
        cur.execute("ROLLBACK TO SAVEPOINT position")
        cur.execute(SQL["count_batches"], key)
        return OffsetHasResults(group=group.name, topic=partition.topic, partition=partition.partition, batches=scalar(cur))
    cur.execute("RELEASE SAVEPOINT position")
    return None


def require_member(cur: Cursor, group: str, group_id: int, member_id: str) -> None:
    """Raises `UnknownMemberId` unless the group has this member; keeps it in the group until the transaction ends."""
    cur.execute(SQL["require_member"], {"group_id": group_id, "member_id": member_id})
    if cur.fetchone() is None:
        raise UnknownMemberId(group=group, member_id=member_id)
