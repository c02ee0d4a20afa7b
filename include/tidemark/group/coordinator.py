"""The group coordinator on Postgres rows: the process that makes a call acts as the coordinator.

A call that changes the group is one transaction. It locks the group's row, runs everything that is due by the database's clock, handles
the request, stores the changes and wakes the waiting members. If a process dies during a call, the group stays as it was, and the next
caller continues from there. As long as nothing is due, other calls change the member's own row only: a `heartbeat`, or a `joined` or `sync`
that has to wait, or the response to a follower's `joined` or repeated `sync`, is one statement. The `join` of a member in a join phase,
and a follower's first `sync`, share the group's row, so members do not wait for each other.

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

from tidemark.db import execute_often, on_behalf, rows, statements, transaction
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
    MemberMetadata,
    as_json,
    check_join,
    normal_protocols,
)
from tidemark.group.states import GroupState
from tidemark.group.wake import notice
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

__all__ = [
    "Coordinator",
    "GroupConfig",
    "GroupDescription",
    "GroupListing",
    "JoinRequest",
    "Joined",
    "Leaving",
    "MemberDescription",
    "MemberMetadata",
    "list_groups",
]

log = logging.getLogger(__name__)

SQL = statements("tidemark.group", "coordinator.sql")

LOCK_LIMIT_MS = 10_000
"""How long a call waits for the group's row. No call should hold it for long; `IDLE_LIMIT_MS` ends one that is stuck."""
IDLE_LIMIT_MS = 10_000
"""After this, a process that stalls in the middle of a call (frozen, network lost) loses its session, and with it the lock."""

_LIMITS = {"lock_ms": str(LOCK_LIMIT_MS), "idle_ms": str(IDLE_LIMIT_MS)}
_STORED = ("member_no", "member_id", "client_id", "pending", "joining", "synced", "session_timeout_ms", "rebalance_timeout_ms",
           "expected_members", "protocols", "assignment")  # fmt: skip

T = TypeVar("T")
Request = Literal["heartbeat", "join", "joined", "sync", "synced"]


class _Seen(NamedTuple):
    """The group and the member, as the statement on the member's own row found them."""

    state: str
    generation: int
    protocol: str
    leader: str
    assignment: Any
    joining: bool


class Coordinator:
    """A group's coordinator, on the caller's connection; for one thread at a time.

    Every method changes the group in at most one transaction. A call that raises a `GroupError` has still committed what was due. After
    `DatabaseUnavailable` the outcome is unknown: repeat the call; every request can be repeated safely.
    """

    def __init__(self, connection: Connection, group: str, config: GroupConfig | None = None) -> None:
        self._connection = connection
        self._group = group
        self._config = config or GroupConfig()
        self._new_ids: dict[str, str] = {}
        self._sent_sync: tuple[str, int] | None = None
        """The member and generation of the last SyncGroup: what is repeated is a poll, which does not lock the group's row."""

    # ---- members

    def join(self, request: JoinRequest) -> Joined | None:
        """JoinGroup. `None`: the join phase is not over; call `joined`.

        A dynamic member's first request raises `MemberIdRequired` with the id to join with. Also raises `InvalidSessionTimeout`,
        `InconsistentGroupProtocol`, `GroupMaxSizeReached`, `UnknownMemberId` or `FencedInstanceId`.
        """
        check_join(self._group, request, self._config)
        who, instance_id = request.member_id, request.instance_id
        if who and self._config.max_size is None and self._beat("join", who, instance_id, asked=request):
            return self.joined(who, instance_id)  # after the commit: of members that join at once, at least one then sees that all have
        new_id = f"{request.instance_id or request.client_id}-{uuid.uuid4()}"

        def ask(group: Group) -> Joined | None:
            return group.join(request, new_id)

        answer = self._locked(ask, UnknownMemberId(group=self._group, member_id=request.member_id), create=not request.member_id)
        if not request.member_id and request.instance_id is not None:
            self._new_ids[request.instance_id] = new_id
        return answer

    def joined(self, member_id: str, instance_id: str | None = None) -> Joined | None:
        """Polls a parked JoinGroup; counts as a heartbeat. `None`: the join phase is still not over.

        A static member that joined without a member id may omit it here, on the same `Coordinator`; the response contains it. Raises
        `RebalanceInProgress` if a newer join phase has begun since, `UnknownMemberId` or `FencedInstanceId`.
        """
        who = self._who(member_id, instance_id)
        if not who:  # this caller cannot be told from one that was replaced since
            raise UnknownMemberId(group=self._group, member_id="", instance_id=instance_id)
        seen = self._beat("joined", who, instance_id)
        if seen is None:
            missing = UnknownMemberId(group=self._group, member_id=who, instance_id=instance_id)
            return self._locked(lambda group: group.joined(who, instance_id), missing)
        if seen.state == GroupState.PREPARING_REBALANCE:
            if seen.joining:
                return None
            raise RebalanceInProgress(group=self._group, member_id=who)
        return Joined(seen.generation, seen.protocol, seen.leader, who, {}, seen.state == GroupState.STABLE)

    def sync(
        self, member_id: str, instance_id: str | None, generation: int, protocol: str | None, assignments: Mapping[str, Any] | None = None
    ) -> Any:
        """SyncGroup: the member's assignment; `None`: the leader has not sent it yet, call again.

        Only the leader's ``assignments`` (by member id) count, and only the first ones of a generation. A member that is missing gets
        ``{}``. Raises `IllegalGeneration`, `InconsistentGroupProtocol`, `RebalanceInProgress`, `UnknownMemberId` or `FencedInstanceId`.
        """
        who = self._who(member_id, instance_id)
        if assignments is None:
            parked, self._sent_sync = self._sent_sync == (who, generation), (who, generation)
            seen = self._beat("synced", who, instance_id, generation=generation) if parked else None
            seen = seen or self._beat("sync", who, instance_id, generation=generation, protocol=protocol)
            if seen is not None and seen.state == GroupState.PREPARING_REBALANCE:
                raise RebalanceInProgress(group=self._group, member_id=who)
            if seen is not None:
                return seen.assignment
        given = None if assignments is None else json.loads(as_json(dict(assignments), "assignments"))
        missing = UnknownMemberId(group=self._group, member_id=who, instance_id=instance_id)
        return self._locked(lambda group: group.sync(who, instance_id, generation, protocol, given), missing)

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        """Heartbeat. Raises `RebalanceInProgress`, `IllegalGeneration`, `UnknownMemberId` or `FencedInstanceId`."""
        who = self._who(member_id, instance_id)
        seen = self._beat("heartbeat", who, instance_id, generation=generation)
        if seen is None:
            missing = UnknownMemberId(group=self._group, member_id=who, instance_id=instance_id)
            self._locked(lambda group: group.heartbeat(who, instance_id, generation), missing)
        elif seen.state == GroupState.PREPARING_REBALANCE:
            raise RebalanceInProgress(group=self._group, member_id=who)

    def leave(self, leaving: Sequence[Leaving], *, by: str = "") -> list[GroupError | None]:
        """LeaveGroup: the error for each member, or `None`. An operator removes a static member with ``Leaving("", instance_id)``.

        ``by`` is the operator, for the audit log; without it, the members leave by themselves, which is no event.
        """
        nobody = [UnknownMemberId(group=self._group, member_id=each.member_id, instance_id=each.instance_id) for each in leaving]

        def remove(group: Group, cur: Cursor, _group_id: int) -> list[GroupError | None]:
            known = dict(group.members)
            answers = group.leave(leaving)
            if by:
                names = {each.member_id or each.instance_id for each in leaving}
                ids = [each.member_id for each in known.values() if names & {each.member_id, each.instance_id}]
                on_behalf(cur, by, leaving[0].reason)
                cur.execute(SQL["name_removed"], {"members": json.dumps(ids)})
            return answers

        try:
            return self._locked_rows(remove, GroupIdNotFound(group=self._group))
        except GroupIdNotFound:
            return [*nobody]

    # ---- operators

    def tick(self) -> None:
        """Runs what is due, as any member's call does. Does nothing if the group does not exist."""
        try:
            self._locked(lambda _: None, GroupIdNotFound(group=self._group))
        except GroupIdNotFound:
            return

    def fetch_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int | None]:
        """OffsetFetch: the next offset to read of each partition, or `None` if it has no position. ``partitions`` (default: all known).

        Works in every state and for any caller, as in Kafka. For a topic that was created again, only the newest incarnation counts.
        """
        with transaction(self._connection) as cur:
            known = store.positions(cur, self._group)
        newest = {each.partition.topic: each.topic_id for each in sorted(known, key=lambda each: each.topic_id)}
        found = {each.partition: each.position for each in known if newest[each.partition.topic] == each.topic_id}
        return dict(found) if partitions is None else {partition: found.get(partition) for partition in partitions}

    def describe(self) -> GroupDescription | None:
        """The group as it is stored, or `None`. Changes nothing: overdue members are shown as such until the next call removes them."""
        with transaction(self._connection) as cur:
            cur.execute(SQL["describe"], {"group": self._group})
            found = rows(cur)
        if not found:
            return None
        first = found[0]
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
            for row in found
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
        """DeleteGroups: the group becomes Dead and its name is free. A later group of that name starts without positions.

        Writers that still hold one of its partitions are fenced. Attempts, ledger and positions stay under another name: they are the
        history of rows in the sinks. ``by`` is for the audit log. Raises `NonEmptyGroup` or `GroupIdNotFound`.
        """

        def bury(group: Group, cur: Cursor, group_id: int) -> None:
            group.delete()
            on_behalf(cur, by)
            cur.execute(SQL["lock_positions"], {"group_id": group_id})
            cur.execute(SQL["fence_positions"], {"group_id": group_id})
            cur.execute(SQL["bury_group"], {"group_id": group_id})

        self._locked_rows(bury, GroupIdNotFound(group=self._group))

    def delete_offsets(
        self, topics: Iterable[str] = (), partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, GroupError | None]:
        """OffsetDelete of whole topics and single partitions: the error for each partition, or `None`.

        The error is `GroupSubscribedToTopic` if members are subscribed to the topic, `OffsetHasResults` if the ledger has batches of the
        partition (rewind the group instead). Raises `GroupIdNotFound`.
        """
        names, single = set(topics), list(partitions)

        def delete(group: Group, cur: Cursor, group_id: int) -> dict[TopicPartition, GroupError | None]:
            answers: dict[TopicPartition, GroupError | None] = dict.fromkeys(single)
            cur.execute(SQL["lock_positions"], {"group_id": group_id})
            read = group.subscribed()
            found = [(TopicPartition(row["topic"], row["partition"]), row["topic_id"]) for row in rows(cur)]
            for partition, topic_id in found:
                if partition.topic not in names and partition not in answers:
                    continue
                if partition.topic not in read:
                    answers[partition] = answers.get(partition) or _delete_position(cur, group, group_id, partition, topic_id)
                else:
                    answers[partition] = GroupSubscribedToTopic(group=self._group, topic=partition.topic)
            for partition in single:
                if partition.topic in read:
                    answers[partition] = GroupSubscribedToTopic(group=self._group, topic=partition.topic)
            return answers

        return self._locked_rows(delete, GroupIdNotFound(group=self._group))

    # ---- one call, one transaction

    def _beat(
        self,
        request: Request,
        member_id: str,
        instance_id: str | None,
        *,
        generation: int | None = None,
        protocol: str | None = None,
        asked: JoinRequest | None = None,
    ) -> _Seen | None:
        """Updates only the member's own row, if nothing is due and the request changes nothing else; `None`: it needs the group's lock."""
        values = {
            "group": self._group, "member_id": member_id, "instance_id": instance_id, "generation": generation, "protocol": protocol,
            "request": request, **_of_join(asked), **_LIMITS,
        }  # fmt: skip
        with transaction(self._connection) as cur:
            if request in ("join", "sync"):
                cur.execute(SQL["share_group"], values)
            execute_often(cur, "beat", SQL["beat"], values)
            found = cur.fetchone()
        # without a row, a new transaction takes the lock: this one may keep that of a row that it waited for and that then did not match
        return None if found is None else _Seen(*found)

    def _locked(self, ask: Callable[[Group], T], missing: GroupError, *, create: bool = False) -> T:
        return self._locked_rows(lambda group, *_: ask(group), missing, create=create)

    def _locked_rows(self, ask: Callable[[Group, Cursor, int], T], missing: GroupError, *, create: bool = False) -> T:
        with transaction(self._connection) as cur:
            answer = self._answer(cur, ask, create=create)
        return self._told(answer, missing)

    def _answer(self, cur: Cursor, ask: Callable[[Group, Cursor, int], T], *, create: bool) -> tuple[Group, T | GroupError] | None:
        """What ``ask`` returns or raises, after storing every change; `None`: the group does not exist."""
        row = self._lock(cur, create=create)
        if row is None:
            return None
        group_id = row["group_id"]
        group, before = self._load(cur, row)
        group.run_due()
        said: T | GroupError
        try:
            said = ask(group, cur, group_id)
        except GroupError as error:
            said = error
        self._save(cur, group_id, group, before)
        return group, said

    def _told(self, answer: tuple[Group, T | GroupError] | None, missing: GroupError) -> T:
        """Logs, then returns or raises, the answer of a committed transaction."""
        if answer is None:
            raise missing
        group, said = answer
        for move in group.moves:
            log.info(
                "group moved group=%s from=%s to=%s why=%s generation=%s members=%s reason=%s",
                self._group, move.source, move.target, move.why, group.generation, len(group.full()), group.reason or None,
            )  # fmt: skip
        if isinstance(said, MemberIdRequired):
            log.debug("member id given out group=%s member=%s", self._group, said.member_id)
        if isinstance(said, GroupError):
            raise said
        return said

    def _who(self, member_id: str, instance_id: str | None) -> str:
        """The member id; also for a static member that does not know its own yet, because its first JoinGroup is still parked."""
        return member_id or self._new_ids.get(instance_id or "", "")

    # ---- rows

    def _lock(self, cur: Cursor, *, create: bool) -> dict[str, Any] | None:
        while True:
            cur.execute(SQL["lock_group"], {"group": self._group, **_LIMITS})
            found = rows(cur)
            if found:
                return found[0]
            if not create:
                return None
            store.ensure_group(cur, self._group)

    def _load(self, cur: Cursor, row: Mapping[str, Any]) -> tuple[Group, dict[str, Any]]:
        """The locked group, and its stored values, from which `_save` finds out what has changed."""

        def take_generation() -> int:
            cur.execute(SQL["next_generation"])
            taken = cur.fetchone()
            assert taken is not None
            return int(taken[0])

        cur.execute(SQL["read_members"], {"group_id": row["group_id"]})
        members = [MemberRow(**{**each, "protocols": tuple((name, data) for name, data in each["protocols"])}) for each in rows(cur)]
        group = Group(
            self._group,
            self._config,
            take_generation,
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
            "members": {each.member_no: replace(each) for each in members},
        }

    def _save(self, cur: Cursor, group_id: int, group: Group, before: Mapping[str, Any]) -> None:
        gone = [member.member_no for member in group.removed if member.member_no is not None]
        if gone:
            cur.execute(SQL["remove_members"], {"numbers": gone})
        if group.moves or group.restarted or group.deadline.changed or group.initial.changed or group.leader != before["leader"]:
            began = [move.why for move in group.moves if move.target in (GroupState.PREPARING_REBALANCE, GroupState.DEAD)]
            reason = ": ".join(filter(None, (began[-1], group.reason))) if began else before["reason"]
            cur.execute(SQL["save_group"], {
                "group_id": group_id, "state": group.state, "generation": group.generation, "protocol": group.protocol,
                "leader": group.leader, "moved": bool(group.moves), "reason": reason,
                "deadline_changed": group.deadline.changed, "deadline_ms": group.deadline.ms,
                "initial_changed": group.initial.changed, "initial_ms": group.initial.ms,
            })  # fmt: skip
        changed = [
            _stored(member)
            for member in group.members.values()
            if member.member_no is not None and member != before["members"][member.member_no]
        ]
        if changed:
            cur.execute(SQL["save_members"], {"members": json.dumps(changed)})
        new = [{**_stored(member), "instance_id": member.instance_id} for member in group.members.values() if member.member_no is None]
        if new:
            cur.execute(SQL["add_members"], {"group_id": group_id, "members": json.dumps(new)})
        for state, generation in group.reached:
            cur.execute(SQL["notify"], {"group": self._group, "message": notice(state, generation)})


def list_groups(connection: Connection, states: Iterable[str] = ()) -> list[GroupListing]:
    """The groups in any of ``states`` (default: all but deleted ones), by name. As stored, see `Coordinator.describe`."""
    with transaction(connection) as cur:
        cur.execute(SQL["list_groups"], {"states": list(states)})
        return [GroupListing(row["name"], GroupState(row["state"]), row["generation"], row["members"]) for row in rows(cur)]


def _stored(member: MemberRow) -> dict[str, Any]:
    return {**{name: getattr(member, name) for name in _STORED}, "heard": member.heard}


def _of_join(asked: JoinRequest | None) -> dict[str, Any]:
    """A member's settings in its JoinGroup, for its row; nothing for any other request."""
    protocols = None if asked is None else normal_protocols(asked.protocols)
    return {
        "client_id": asked and asked.client_id,
        "session_timeout_ms": asked and asked.session_timeout_ms,
        "rebalance_timeout_ms": asked and asked.rebalance_timeout_ms,
        "expected_members": asked and asked.expected_members,
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
        row = cur.fetchone()
        assert row is not None
        return OffsetHasResults(group=group.name, topic=partition.topic, partition=partition.partition, batches=row[0])
    cur.execute("RELEASE SAVEPOINT position")
    return None


def require_member(cur: Cursor, group: str, group_id: int, member_id: str) -> None:
    """Raises `UnknownMemberId` unless the group has this member; keeps it in the group until the transaction ends."""
    cur.execute(SQL["require_member"], {"group_id": group_id, "member_id": member_id})
    if cur.fetchone() is None:
        raise UnknownMemberId(group=group, member_id=member_id)
