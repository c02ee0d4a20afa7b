"""The group coordinator on Postgres rows: whoever calls it, is it.

Each call is one transaction: it locks the group's row, runs what the database's clock has made due, does the request, stores what
has changed and wakes who waits. So a process that dies in a call leaves the group as it was, and the next caller goes on from there.
A `heartbeat`, and a `joined` or `sync` that still waits, is one statement on the member's own row as long as nothing is due.

The protocol itself is in `machine`, the changes of state in `states`, the statements in ``coordinator.sql``. No moment ever comes from
this process; all times are those of ``clock_timestamp()`` (I6).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psycopg2.errors

from tidemark.db import rows, statements, transaction
from tidemark.group.errors import (
    GroupError,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    MemberIdRequired,
    OffsetHasResults,
    RebalanceInProgress,
    UnknownMemberId,
)
from tidemark.group.machine import Group, Member, Timer
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
)
from tidemark.group.states import GroupState
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
"""How long a call waits for the group's row. Nobody holds it for long; who does is stuck, see the next."""
IDLE_LIMIT_MS = 10_000
"""A process that stands still in the middle of a call (frozen, its machine cut off) loses its session, and so the lock, after this."""

_LIMITS = {"lock_ms": str(LOCK_LIMIT_MS), "idle_ms": str(IDLE_LIMIT_MS)}
_STORED = ("member_no", "member_id", "client_id", "pending", "joining", "synced", "session_timeout_ms", "rebalance_timeout_ms",
           "expected_members", "protocols", "assignment")  # fmt: skip

T = TypeVar("T")
Request = Literal["heartbeat", "joined", "sync"]


class Coordinator:
    """A group's coordinator, over a connection of the caller's; for one thread at a time.

    Every method changes a group in exactly one transaction. Those that answer with a `GroupError` have committed what was due by then. A
    `DatabaseUnavailable` leaves open whether the call was done: ask again, each request may be repeated.
    """

    def __init__(self, connection: Connection, group: str, config: GroupConfig | None = None) -> None:
        self._connection = connection
        self._group = group
        self._config = config or GroupConfig()
        self._new_ids: dict[str, str] = {}

    # ---- members

    def join(self, request: JoinRequest) -> Joined | None:
        """JoinGroup. `None`: the join phase is not over; ask `joined`.

        A dynamic member's first one raises `MemberIdRequired` with the id to join with. Raises `InvalidSessionTimeout`,
        `InconsistentGroupProtocol`, `GroupMaxSizeReached`, `UnknownMemberId` or `FencedInstanceId`.
        """
        check_join(self._group, request, self._config)
        new_id = f"{request.instance_id or request.client_id}-{uuid.uuid4()}"

        def ask(group: Group) -> Joined | None:
            return group.join(request, new_id)

        answer = self._locked(ask, UnknownMemberId(group=self._group, member_id=request.member_id), create=not request.member_id)
        if not request.member_id and request.instance_id is not None:
            self._new_ids[request.instance_id] = new_id
        return answer

    def joined(self, member_id: str, instance_id: str | None = None) -> Joined | None:
        """Asks again for a JoinGroup that was parked, and counts as a heartbeat. `None`: still not over.

        A static member that joined without an id may go on without one on this `Coordinator`; the answer brings it. Raises
        `RebalanceInProgress` if a newer join phase has begun since, `UnknownMemberId` or `FencedInstanceId`.
        """
        who = self._who(member_id, instance_id)
        if not who:  # nobody could tell this caller from one whose place was taken since
            raise UnknownMemberId(group=self._group, member_id="", instance_id=instance_id)
        return self._asked_again("joined", who, instance_id, None, lambda group: group.joined(who, instance_id))

    def sync(
        self, member_id: str, instance_id: str | None, generation: int, protocol: str | None, assignments: Mapping[str, Any] | None = None
    ) -> Any:
        """SyncGroup: the member's assignment; `None`: the leader has not handed it in yet, ask again.

        Only the leader's ``assignments`` (by member id) count, and only the first ones of a generation; a member that they leave out gets
        ``{}``. Raises `IllegalGeneration`, `InconsistentGroupProtocol`, `RebalanceInProgress`, `UnknownMemberId` or `FencedInstanceId`.
        """
        who = self._who(member_id, instance_id)
        given = assignments
        if assignments is not None:
            given = json.loads(as_json(dict(assignments), "assignments"))
        ask: Callable[[Group], Any] = lambda group: group.sync(who, instance_id, generation, protocol, given)  # noqa: E731
        if given is None:
            return self._asked_again("sync", who, instance_id, generation, ask)
        return self._locked(ask, UnknownMemberId(group=self._group, member_id=who))

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        """Heartbeat. Raises `RebalanceInProgress`, `IllegalGeneration`, `UnknownMemberId` or `FencedInstanceId`."""
        who = self._who(member_id, instance_id)
        self._asked_again("heartbeat", who, instance_id, generation, lambda group: group.heartbeat(who, instance_id, generation))

    def leave(self, leaving: Sequence[Leaving]) -> list[GroupError | None]:
        """LeaveGroup: for each what hindered it, or `None`. An operator removes a static member with ``Leaving("", instance_id)``."""
        nobody = [UnknownMemberId(group=self._group, member_id=each.member_id, instance_id=each.instance_id) for each in leaving]
        try:
            return self._locked(lambda group: group.leave(leaving), GroupIdNotFound(group=self._group))
        except GroupIdNotFound:
            return [*nobody]

    # ---- operators

    def tick(self) -> None:
        """Runs what is due, as any member's call does. Does nothing where there is no group."""
        try:
            self._locked(lambda _: None, GroupIdNotFound(group=self._group))
        except GroupIdNotFound:
            return

    def fetch_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int | None]:
        """OffsetFetch: the next offset to read of each partition, `None` where there is none; without ``partitions``, of all there are.

        In every state and for anybody, as in Kafka. Of a topic that was created again only the newest is known.
        """
        with transaction(self._connection) as cur:
            known = store.positions(cur, self._group)
        newest = {each.partition.topic: each.topic_id for each in sorted(known, key=lambda each: each.topic_id)}
        found = {each.partition: each.position for each in known if newest[each.partition.topic] == each.topic_id}
        return dict(found) if partitions is None else {partition: found.get(partition) for partition in partitions}

    def describe(self) -> GroupDescription | None:
        """The group as it is stored, or `None`. Changes nothing: who is overdue is shown so until somebody runs what is due."""
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

    def delete_group(self) -> None:
        """DeleteGroups: the group is Dead, its name is free, and a group of that name that is made later starts without positions.

        Who still holds one of its partitions is fenced. Attempts, ledger and positions stay, under another name: they are the history
        of rows that are in the sinks. Raises `NonEmptyGroup` or `GroupIdNotFound`.
        """

        def bury(group: Group, cur: Cursor, group_id: int) -> None:
            group.delete()
            cur.execute(SQL["lock_positions"], {"group_id": group_id})
            cur.execute(SQL["fence_positions"], {"group_id": group_id})
            cur.execute(SQL["bury_group"], {"group_id": group_id})

        self._locked_rows(bury, GroupIdNotFound(group=self._group))

    def delete_offsets(
        self, topics: Iterable[str] = (), partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, GroupError | None]:
        """OffsetDelete of whole topics and of single partitions: for each what hindered it, or `None`.

        Answers `GroupSubscribedToTopic` where members read the topic, and `OffsetHasResults` where results were made from it (rewind the
        group instead). Raises `GroupIdNotFound`.
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

    def _asked_again(
        self, request: Request, member_id: str, instance_id: str | None, generation: int | None, ask: Callable[[Group], T]
    ) -> T | None:
        """The member's own row alone, if there is nothing else to do; else ``ask`` under the group's lock."""
        who = {"group": self._group, "member_id": member_id, "instance_id": instance_id, "generation": generation, "request": request}
        with transaction(self._connection) as cur:
            cur.execute(SQL["beat"], {**who, **_LIMITS})
            beat = cur.fetchone()
        if beat is None:  # in a transaction of its own: a row that was waited for, and found to be another one, stays locked
            return self._locked(ask, UnknownMemberId(group=self._group, member_id=member_id, instance_id=instance_id))
        if request == "heartbeat" and beat[0] == GroupState.PREPARING_REBALANCE:
            raise RebalanceInProgress(group=self._group, member_id=member_id)
        return None

    def _locked(self, ask: Callable[[Group], T], missing: GroupError, *, create: bool = False) -> T:
        return self._locked_rows(lambda group, *_: ask(group), missing, create=create)

    def _locked_rows(self, ask: Callable[[Group, Cursor, int], T], missing: GroupError, *, create: bool = False) -> T:
        with transaction(self._connection) as cur:
            answer = self._answer(cur, ask, create=create)
        return self._told(answer, missing)

    def _answer(self, cur: Cursor, ask: Callable[[Group, Cursor, int], T], *, create: bool) -> tuple[Group, T | GroupError] | None:
        """What ``ask`` returns or raises, with everything stored; `None`: there is no such group."""
        cur.execute(SQL["limits"], _LIMITS)
        group_id = self._lock(cur, create=create)
        if group_id is None:
            return None
        group, before = self._load(cur, group_id)
        group.run_due()
        said: T | GroupError
        try:
            said = ask(group, cur, group_id)
        except GroupError as error:
            said = error
        self._save(cur, group_id, group, before)
        return group, said

    def _told(self, answer: tuple[Group, T | GroupError] | None, missing: GroupError) -> T:
        """The answer of a transaction that has committed."""
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
        """The id of a static member that has not been told it yet: its JoinGroup without an id is still parked."""
        return member_id or self._new_ids.get(instance_id or "", "")

    # ---- rows

    def _lock(self, cur: Cursor, *, create: bool) -> int | None:
        while True:
            cur.execute(SQL["lock_group"], {"group": self._group})
            row = cur.fetchone()
            if row is not None:
                return int(row[0])
            if not create:
                return None
            store.ensure_group(cur, self._group)

    def _load(self, cur: Cursor, group_id: int) -> tuple[Group, dict[str, Any]]:
        """The locked group, and what is stored of it, by which `_save` sees what has changed."""
        key = {"group_id": group_id}
        cur.execute(SQL["read_group"], key)
        row = rows(cur)[0]

        def take_generation() -> int:
            cur.execute(SQL["next_generation"])
            taken = cur.fetchone()
            assert taken is not None
            return int(taken[0])

        cur.execute(SQL["read_members"], key)
        members = [Member(**{**each, "protocols": tuple((name, data) for name, data in each["protocols"])}) for each in rows(cur)]
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
            if member.member_no is not None and (member.heard or _stored(member) != _stored(before["members"][member.member_no]))
        ]
        if changed:
            cur.execute(SQL["save_members"], {"members": json.dumps(changed)})
        new = [{**_stored(member), "instance_id": member.instance_id} for member in group.members.values() if member.member_no is None]
        if new:
            cur.execute(SQL["add_members"], {"group_id": group_id, "members": json.dumps(new)})
        for move in group.moves:
            cur.execute(SQL["notify"], {"group": self._group, "message": f"{move.target} {group.generation}"})


def list_groups(connection: Connection, states: Iterable[str] = ()) -> list[GroupListing]:
    """The groups in any of ``states``, by name; without ``states`` all but deleted ones. As stored: see `Coordinator.describe`."""
    with transaction(connection) as cur:
        cur.execute(SQL["list_groups"], {"states": list(states)})
        return [GroupListing(row["name"], GroupState(row["state"]), row["generation"], row["members"]) for row in rows(cur)]


def _stored(member: Member) -> dict[str, Any]:
    return {**{name: getattr(member, name) for name in _STORED}, "heard": member.heard}


def _delete_position(cur: Cursor, group: Group, group_id: int, partition: TopicPartition, topic_id: int) -> GroupError | None:
    """Deletes a position, unless something was made from it; other tables' foreign keys say so."""
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
    """Raises `UnknownMemberId` unless the group has this member, and will until the transaction ends."""
    cur.execute(SQL["require_member"], {"group_id": group_id, "member_id": member_id})
    if cur.fetchone() is None:
        raise UnknownMemberId(group=group, member_id=member_id)
