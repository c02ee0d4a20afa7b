"""A member of a group: joins, sends heartbeats, and notifies its listeners when its partitions change.

It has two threads. Only the *protocol thread* talks to the coordinator, in its own database session: it joins, computes the assignment if
the member leads, and sends heartbeats. It never waits for a batch. The *polling thread* reads and commits. It learns of changes in
`Member.poll` and calls the listeners there. Its partitions never change between two polls.

    eager         the group rebalances ─▶ poll: revoked(all) ─▶ join, sync ─▶ poll: assigned(all)
    cooperative   the group rebalances ─▶ join, sync, while batches continue ─▶ poll: revoked(moved), assigned(new)
                                          ─▶ if any were revoked: rebalance again, so that their new owners get them

The next request waits for the response to the last one, so an error never belongs to a request of an older generation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psycopg2

from tidemark.db import Connection, DatabaseUrl, answering, connect, cut
from tidemark.errors import BadInput, DatabaseUnavailable, TidemarkError, Unavailable
from tidemark.group.assignors import Assignor, Metadata, Subscription, check_assignment
from tidemark.group.assignors.base import UNKNOWN_GENERATION
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import GroupError, IllegalGeneration, MemberIdRequired, RebalanceInProgress, UnknownMemberId
from tidemark.group.listener import Listeners, RebalanceListener
from tidemark.group.requests import GroupConfig, Joined, JoinRequest, Leaving
from tidemark.group.states import GroupState
from tidemark.group.wake import Wakeups, notice
from tidemark.records.ranges import TopicPartition

log = logging.getLogger(__name__)

PARKED_S = 1.0
"""How often a parked join or sync is polled without a notification."""
BACKOFF_S = 0.5
OVERDUE = 0.8
"""The fraction of the rebalance timeout after which a batch that the group waits for is cancelled."""
CLOSE_S = 10.0
"""How long `Member.close` waits for an answer."""


class MemberState(StrEnum):
    """A member's states, under the names of Kafka's clients."""

    UNJOINED = "UNJOINED"
    REBALANCING = "REBALANCING"
    STABLE = "STABLE"


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """A member's settings. Times are in milliseconds, with Kafka's defaults.

    ``instance_id`` makes it a static member: another process with the same id replaces it and fences it. ``remembered`` are the partitions
    that an earlier process of the same instance had in ``generation``; a sticky assignor gives them back to it.
    """

    group: str
    client_id: str
    instance_id: str | None = None
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    metadata_max_age_ms: int = 300_000
    rack: str | None = None
    expected_members: int | None = None
    remembered: tuple[TopicPartition, ...] = ()
    generation: int = UNKNOWN_GENERATION
    config: GroupConfig = field(default_factory=GroupConfig)


class Turn(StrEnum):
    """What the protocol thread does next."""

    REVOKE = "waits for the polling thread to give its partitions back"
    JOIN = "has to send JoinGroup"
    JOINING = "its JoinGroup is parked"
    SYNC = "has to send SyncGroup, or has one parked"
    STABLE = "heartbeats"
    AWAY = "did not poll in time, and left"


@dataclass
class _Shared:
    """State that both threads use, under the lock of `Member._changed`."""

    phase: Turn = Turn.JOIN
    owned: tuple[TopicPartition, ...] = ()
    owned_generation: int = UNKNOWN_GENERATION
    reported: tuple[TopicPartition, ...] = ()
    """What the next JoinGroup reports as owned: the current partitions, those before an eager rebalance, or at first ``remembered``."""
    pending: tuple[TopicPartition, ...] | None = None
    """A new assignment, until the polling thread takes it over."""
    pending_generation: int = UNKNOWN_GENERATION
    complete: bool = False
    """Every partition has an owner; false while some move between members."""
    lost: bool = False
    rejoin: str | None = None
    waiting_since: float | None = None
    """When the group or another member began to wait for the polling thread."""
    polled_at: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    stopping: bool = False


class Member:
    """One member of a group. Call `poll` and `close` from one thread; the properties may be used from any.

    ``topics`` returns the topics to read now (a pattern is resolved again at each join), ``metadata`` the partitions and racks of topics.
    The protocol thread calls ``interrupt`` to end the batch in flight: when the polling thread keeps others waiting for too long, or when
    the partitions are lost.
    """

    def __init__(
        self,
        database_url: DatabaseUrl,
        settings: MemberSettings,
        assignors: Sequence[Assignor],
        topics: Callable[[], Collection[str]],
        metadata: Callable[[Collection[str]], Metadata],
        listeners: Sequence[RebalanceListener],
        *,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self._url = database_url
        self._assignors = {assignor.name: assignor for assignor in assignors}
        self._cooperative = _cooperative(assignors)
        self._topics, self._metadata = topics, metadata
        self._listeners = Listeners(listeners)
        self._interrupt = interrupt
        self._shared = _Shared(reported=settings.remembered, owned_generation=settings.generation)
        self._changed = threading.Condition()
        self._wakeups = Wakeups(database_url, settings.group)
        self._session: Connection | None = None
        self._watched = contextlib.ExitStack()
        """Cancels the session's statements if Postgres stops responding."""
        self._coordinator: Coordinator | None = None
        self._member_id = ""
        self._generation = UNKNOWN_GENERATION
        self._joined: Joined | None = None
        self._reason = "first join"
        self.leads = False
        self._snapshot: Metadata | None = None
        self._snapshot_at = 0.0
        self._heartbeat_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"group {settings.group}", daemon=True)
        self._thread.start()

    # ---- state

    @property
    def state(self) -> MemberState:
        with self._changed:
            if self._shared.phase is Turn.STABLE:
                return MemberState.STABLE
            unjoined = self._generation == UNKNOWN_GENERATION and self._shared.phase in (Turn.JOIN, Turn.AWAY)
            return MemberState.UNJOINED if unjoined else MemberState.REBALANCING

    @property
    def settled(self) -> bool:
        """Whether the group is stable, the whole assignment taken over, and no further rebalance pending."""
        with self._changed:
            shared = self._shared
            return shared.phase is Turn.STABLE and shared.complete and shared.pending is None and shared.rejoin is None and not shared.lost

    @property
    def member_id(self) -> str:
        """Empty until the coordinator has assigned one."""
        return self._member_id

    @property
    def generation(self) -> int:
        """The generation of `assignment`. While the listeners are called, it is already the new one."""
        return self._shared.owned_generation

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The member's partitions, as last reported to the listeners."""
        return self._shared.owned

    # ---- the polling thread

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Calls the listeners when partitions change, waiting up to ``timeout_s`` for a change. Returns whether it called any.

        Raises the error that ended the protocol thread (`FencedInstanceId` and other fatal errors), or a listener's error.
        """
        until = time.monotonic() + timeout_s
        notified = False
        while True:
            with self._changed:
                shared = self._shared
                shared.polled_at = time.monotonic()
                if shared.phase is Turn.AWAY:
                    self._enter(Turn.JOIN)
                self._changed.notify_all()
                failed, task = shared.error, self._task()
                if task is None and failed is None:
                    remaining_s = until - time.monotonic()
                    if notified or remaining_s <= 0:
                        return notified
                    self._changed.wait(remaining_s)
                    continue
            if task is not None:
                notified = True
                task()
            elif failed is not None:
                raise failed

    def enforce_rebalance(self, reason: str) -> None:
        """Rejoins on the member's own initiative, as Kafka's ``enforceRebalance``; until then the member is not `settled`. Does nothing if
        the member is already rebalancing."""
        with self._changed:
            if self._shared.phase is not Turn.STABLE:
                return
            self._shared.rejoin = reason
        self._wakeups.wake()

    def close(self, reason: str = "the consumer is closed") -> None:
        """Gives the partitions back and leaves the group, even as a static member: nothing should wait for a run that has ended.

        Does not wait for an unreachable database: the session then expires by itself. Raises listeners' errors after everything is closed.
        """
        with contextlib.ExitStack() as ends:
            ends.callback(self._wakeups.close)
            ends.callback(self._disconnect)
            ends.callback(self._leave, reason)
            ends.callback(self._stop)
            with self._changed:
                callback = self._listeners.lost if self._shared.lost or self._shared.error is not None else self._listeners.revoked
                owned, self._shared.owned = self._shared.owned, ()
            if owned:
                callback(owned)

    def _task(self) -> Callable[[], None] | None:
        """The polling thread's next task, if any. Call under the lock."""
        shared = self._shared
        if shared.lost:
            return self._report_lost
        if shared.phase is Turn.REVOKE:
            return self._revoke_all
        if shared.pending is not None:
            return self._take_over
        return None

    def _report_lost(self) -> None:
        with self._changed:
            owned, self._shared.owned, self._shared.lost = self._shared.owned, (), False
        try:
            if owned:
                log.warning("partitions lost group=%s member=%s partitions=%s", self.settings.group, self._member_id, len(owned))
                self._listeners.lost(owned)
        finally:
            self._wakeups.wake()

    def _revoke_all(self) -> None:
        owned = self._shared.owned
        try:
            self._listeners.revoked(owned)
        finally:
            with self._changed:
                self._shared.owned = ()
                if self._shared.phase is Turn.REVOKE:
                    self._enter(Turn.JOIN)
            self._wakeups.wake()

    def _take_over(self) -> None:
        with self._changed:
            assert self._shared.pending is not None
            assigned, self._shared.pending = self._shared.pending, None
            self._shared.waiting_since = None
            before = self._shared.owned
            # in this round, a cooperative assignor gives no partition that this member reported to another member
            gave_up = self._cooperative and not self._shared.complete and not set(self._shared.reported) <= set(assigned)
            revoked = tuple(part for part in before if part not in set(assigned))
            added = tuple(part for part in assigned if part not in set(before))
            self._shared.owned_generation = self._shared.pending_generation
        try:
            if revoked:
                self._listeners.revoked(revoked)
        finally:
            with self._changed:
                self._shared.owned = self._shared.reported = assigned
                if gave_up:
                    self._shared.rejoin = "gave partitions back"
        self._wakeups.wake()
        log.info(
            "partitions assigned group=%s member=%s generation=%s partitions=%s new=%s revoked=%s",
            self.settings.group, self._member_id, self.generation, len(assigned), len(added), len(revoked),
        )  # fmt: skip
        self._listeners.assigned(added)

    # ---- the protocol thread

    def _run(self) -> None:
        try:
            while not self._shared.stopping:
                try:
                    self._step()
                except MemberIdRequired as error:
                    self._member_id = error.member_id
                except UnknownMemberId as error:
                    self._member_id = ""
                    self._on_removed(error)
                except IllegalGeneration as error:
                    self._on_removed(error)
                except RebalanceInProgress:
                    self._begin_rejoin("the group rebalances")
                except Unavailable as error:
                    log.warning("group=%s member=%s waits: %s", self.settings.group, self._member_id, error)
                    self._disconnect()
                    self._wakeups.wait(BACKOFF_S)
        except BaseException as error:  # noqa: BLE001 - raised again by the next poll
            with self._changed:
                self._shared.error = error
                self._shared.lost = bool(self._shared.owned)
                self._changed.notify_all()
            self._interrupt()

    def _step(self) -> None:
        """Sends one request, or waits once."""
        with self._changed:
            phase, rejoin = self._shared.phase, self._shared.rejoin
            late = time.monotonic() - self._shared.polled_at > self.settings.max_poll_interval_ms / 1000
        if late and phase is not Turn.AWAY:
            self._leave_stuck()
        elif rejoin is not None and phase is Turn.STABLE:
            with self._changed:
                self._shared.rejoin = None
            self._begin_rejoin(rejoin)
        elif phase is Turn.AWAY:
            self._wakeups.wait(self.settings.heartbeat_interval_ms / 1000)
        elif phase is Turn.REVOKE:
            self._heartbeat()
        elif phase is Turn.JOIN:
            self._join()
        elif phase is Turn.JOINING:
            self._wakeups.wait(PARKED_S)
            self._on_joined(self._get_coordinator().joined(self._member_id, self.settings.instance_id))
        elif phase is Turn.SYNC:
            self._sync()
        else:
            self._heartbeat()
            self._check_metadata()

    def _get_coordinator(self) -> Coordinator:
        if self._coordinator is None:
            self._session = connect(self._url, application=f"tidemark member {self.settings.group}")
            self._watched.enter_context(answering(self._session, self.settings.session_timeout_ms / 1000))
            self._coordinator = Coordinator(self._session, self.settings.group, self.settings.config)
        return self._coordinator

    def _disconnect(self) -> None:
        session, self._session, self._coordinator = self._session, None, None
        self._watched.close()
        if session is not None:
            session.close()

    def _join(self) -> None:
        with self._changed:
            reported, generation = self._shared.reported, self._shared.owned_generation
        subscription = Subscription(
            topics=tuple(sorted(self._topics())),
            owned=reported,
            generation=generation,
            rack=self.settings.rack,
            instance_id=self.settings.instance_id,
        )
        request = JoinRequest(
            member_id=self._member_id,
            instance_id=self.settings.instance_id,
            client_id=self.settings.client_id,
            session_timeout_ms=self.settings.session_timeout_ms,
            rebalance_timeout_ms=self.settings.max_poll_interval_ms,
            protocols=tuple((name, subscription.to_json()) for name in self._assignors),
            reason=self._reason,
            expected_members=self.settings.expected_members,
        )
        answer = self._get_coordinator().join(request)
        with self._changed:
            self._enter(Turn.JOINING)
        self._on_joined(answer)

    def _on_joined(self, joined: Joined | None) -> None:
        if joined is None:
            return
        self._joined = joined
        self._member_id, self._generation = joined.member_id, joined.generation
        self.leads = joined.leader == joined.member_id
        self._reason = ""
        with self._changed:
            self._enter(Turn.SYNC)

    def _sync(self) -> None:
        joined = self._joined
        assert joined is not None
        assignments: Mapping[str, Any] | None = None
        if self.leads and not joined.skip_assignment:
            assignments = self._assign(joined)
        elif not joined.skip_assignment:
            self._wakeups.wait(PARKED_S)  # the leader has to assign first
        answer = self._get_coordinator().sync(self._member_id, self.settings.instance_id, joined.generation, joined.protocol, assignments)
        if answer is None:
            return
        if self.leads and joined.skip_assignment:
            self._take_snapshot(_subscribed_topics(_subscriptions(joined)))
        self._heartbeat_at = time.monotonic()
        with self._changed:
            self._shared.pending = _partitions(answer)
            self._shared.complete = answer.get("complete", False)
            self._shared.pending_generation = joined.generation
            self._shared.waiting_since = time.monotonic()
            self._enter(Turn.STABLE)

    def _assign(self, joined: Joined) -> dict[str, Any]:
        """The leader computes the assignment of every member, as JSON."""
        assignor = self._assignors[joined.protocol]
        subscriptions = _subscriptions(joined)
        metadata = self._take_snapshot(_subscribed_topics(subscriptions))
        assignment = assignor.assign(metadata, subscriptions)
        check_assignment(assignor, metadata, subscriptions, assignment)
        existing = {(topic, number) for topic, info in metadata.topics.items() for number in range(info.partitions)}
        assigned = {(part.topic, part.partition) for parts in assignment.values() for part in parts}
        return {member: _as_json(parts, complete=existing <= assigned) for member, parts in assignment.items()}

    def _take_snapshot(self, topics: Collection[str]) -> Metadata:
        self._snapshot, self._snapshot_at = self._metadata(topics), time.monotonic()
        return self._snapshot

    def _check_metadata(self) -> None:
        """Starts one rebalance, on the leader, if topics or partitions have changed since it assigned them."""
        old = self._snapshot
        if not self.leads or old is None or time.monotonic() - self._snapshot_at < self.settings.metadata_max_age_ms / 1000:
            return
        if self._take_snapshot({*old.topics, *self._topics()}) != old:
            self._begin_rejoin("topics or partitions changed")

    def _heartbeat(self) -> None:
        interval = self.settings.heartbeat_interval_ms / 1000
        notices = self._wakeups.wait(max(0.0, self._heartbeat_at + interval - time.monotonic()))
        self._interrupt_overdue()
        if self._shared.phase is Turn.STABLE and notice(GroupState.PREPARING_REBALANCE, self._generation) in notices:
            self._begin_rejoin("the group rebalances")  # the heartbeat would only return the same
            return
        expected = {notice(state, self._generation) for state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE)}
        if expected.issuperset(notices) and time.monotonic() < self._heartbeat_at + interval:
            return  # the polling thread ended the wait; the next step handles the reason
        self._heartbeat_at = time.monotonic()
        try:
            self._get_coordinator().heartbeat(self._member_id, self.settings.instance_id, self._generation)
        except RebalanceInProgress:
            if self._shared.phase is not Turn.REVOKE:
                raise

    def _interrupt_overdue(self) -> None:
        """Interrupts a batch that the group, or a partition's next owner, has waited for too long."""
        with self._changed:
            since = self._shared.waiting_since
            overdue = since is not None and time.monotonic() - since > OVERDUE * self.settings.max_poll_interval_ms / 1000
            if overdue:
                self._shared.waiting_since = None
        if overdue:
            self._interrupt()

    def _begin_rejoin(self, reason: str) -> None:
        with self._changed:
            self._reason = reason
            self._shared.pending = None  # the next assignment replaces it
            revoke = not self._cooperative and self._shared.owned and not self._shared.lost
            self._enter(Turn.REVOKE if revoke else Turn.JOIN)
            self._shared.waiting_since = time.monotonic() if revoke else None
            self._changed.notify_all()

    def _on_removed(self, error: GroupError) -> None:
        log.warning("group=%s: %s", self.settings.group, error)
        self._generation = UNKNOWN_GENERATION
        self._lose_partitions()

    def _leave_stuck(self) -> None:
        """Leaves because the polling thread seems stuck. A static member only stops sending heartbeats, as in Kafka."""
        log.warning(
            "group=%s member=%s did not poll for %s ms and leaves", self.settings.group, self._member_id, self.settings.max_poll_interval_ms
        )
        if self.settings.instance_id is None and self._member_id:
            self._get_coordinator().leave([Leaving(self._member_id, None, "consumer poll timeout has expired")])
            self._member_id = ""
        self._generation = UNKNOWN_GENERATION
        self._lose_partitions()
        with self._changed:
            self._enter(Turn.AWAY)

    def _lose_partitions(self) -> None:
        with self._changed:
            self._shared.pending = self._shared.rejoin = None
            self._shared.lost = bool(self._shared.owned)
            self._shared.reported, self._shared.owned_generation = (), UNKNOWN_GENERATION
            lost = self._shared.lost
            self._enter(Turn.JOIN)
        if lost:
            self._interrupt()

    def _enter(self, phase: Turn) -> None:
        """Changes the phase. Call under the lock."""
        self._shared.phase = phase
        self._changed.notify_all()

    # ---- the end

    def _stop(self) -> None:
        self._shared.stopping = True
        self._wakeups.wake()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() and self._session is not None:
            log.warning("group=%s member=%s: did not leave the group, Postgres does not respond", self.settings.group, self._member_id)
            self._shared.error = self._shared.error or DatabaseUnavailable(cause="no answer")
            cut(self._session)
            self._thread.join(CLOSE_S)

    def _leave(self, reason: str) -> None:
        if not (self._member_id or self.settings.instance_id) or self._shared.error is not None:
            return
        with contextlib.suppress(TidemarkError, psycopg2.Error):  # a member that has not left expires by itself
            coordinator = self._get_coordinator()
            assert self._session is not None
            with answering(self._session, CLOSE_S):
                coordinator.leave([Leaving(self._member_id, self.settings.instance_id, reason)])


def _cooperative(assignors: Sequence[Assignor]) -> bool:
    """Whether all assignors are cooperative: the group may elect any of them."""
    if not assignors:
        raise BadInput(what="assignment", found="it is empty", fix="Name at least one assignor.")
    return all(assignor.protocol == "cooperative" for assignor in assignors)


def _subscriptions(joined: Joined) -> dict[str, Subscription]:
    """The members' subscriptions from the leader's response."""
    return {member: Subscription.from_json(info.metadata) for member, info in joined.members.items()}


def _subscribed_topics(subscriptions: Mapping[str, Subscription]) -> set[str]:
    """Every topic with at least one subscriber."""
    return {topic for subscription in subscriptions.values() for topic in subscription.topics}


def _as_json(parts: Sequence[TopicPartition], *, complete: bool) -> dict[str, Any]:
    numbers: dict[str, list[int]] = {}
    for part in sorted(parts):
        numbers.setdefault(part.topic, []).append(part.partition)
    return {"partitions": numbers, "complete": complete}


def _partitions(assignment: Mapping[str, Any]) -> tuple[TopicPartition, ...]:
    by_topic = assignment.get("partitions", {})
    return tuple(sorted(TopicPartition(topic, number) for topic, numbers in by_topic.items() for number in numbers))
