"""How a run gets its partitions: by manual assignment or as a member of its group."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from tidemark.connections import Connections
from tidemark.consume.claims import Claimant, ClaimedPartitions, LookUp
from tidemark.consume.renamed import append_tables
from tidemark.db import transaction
from tidemark.errors import BadInput, TidemarkError, Unavailable
from tidemark.group.errors import UnknownMemberId
from tidemark.group.listener import Listeners, RebalanceListener
from tidemark.group.named import find_class
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import KafkaConfig
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced, Owner
from tidemark.records.ranges import Generation
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.group.assignors import Metadata

GROUP_SETTINGS = ("session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms", "metadata.max.age.ms")
"""Settings of Kafka clients that mean the same in Tidemark's groups."""
TRIES = 3
"""Tries of a batch in one run before the attempt fails. With manual assignment, only a fenced batch is tried again."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The running attempt, with its group, spec and connections."""

    attempt_id: int
    group_id: int
    spec: ConsumerSpec
    connections: Connections


class Interrupt:
    """Interrupts the batch in flight. Called by the group member's thread and by the `RewindWatch`."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._called = threading.Event()

    @property
    def called(self) -> bool:
        return self._called.is_set()

    def __call__(self) -> None:
        self._called.set()
        self._cancel()

    def reset(self) -> None:
        self._called.clear()


class Membership(Protocol):
    """The partitions that a run may read, and the changes of their assignment."""

    claimed: ClaimedPartitions

    @property
    def settled(self) -> bool:
        """Whether the run has claimed every partition that it should read."""

    def update(self, lookup: LookUp) -> None:
        """Switches to new ends, including those of new partitions."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Receives changes of the assignment, waiting up to ``timeout_s`` for one. Call it only between two batches."""

    def may_retry(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """Whether a batch that has failed ``tries`` times may be tried again in this run."""

    def reclaim(self) -> None:
        """Claims the still assigned partitions again, at their committed positions. Raises `ClaimRefused`."""

    def close(self) -> None:
        """Releases the partitions."""


class ManualAssignment:
    """All partitions that the run reads, in a generation of its own, without group management (Kafka's ``assign``)."""

    settled = True

    def __init__(self, connection: Connection, attempt: Attempt, cluster: Cluster, lookup: LookUp) -> None:
        with transaction(connection) as cur:
            generation = store.next_generation(cur)
        spec, attempt_id = attempt.spec, attempt.attempt_id
        owner, by_name = Owner(generation, f"attempt {attempt_id}"), bool(spec.fixed.items or spec.only.items)
        tables = append_tables(spec)
        claimant = Claimant(spec.group, attempt.group_id, attempt_id, spec.offset_reset, owner, by_name=by_name, append_tables=tables)
        self.claimed = ClaimedPartitions(connection, cluster, lookup, lambda: claimant)
        self._listeners = Listeners([self.claimed, *_listeners(spec)])
        self._listeners.assigned(sorted(lookup.logs))

    def update(self, lookup: LookUp) -> None:
        """Switches to new ends, including those of new partitions."""
        new = lookup.logs.keys() - self.claimed.lookup.logs.keys()
        self.claimed.update(lookup)
        if new:
            self._listeners.assigned(sorted(new))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Only waits. The check before the next batch notices partitions taken by a newer run or a rewind."""
        time.sleep(timeout_s)

    def may_retry(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """A batch is tried again only if it was interrupted (by a rewind) or fenced."""
        return interrupted or (tries < TRIES and isinstance(error, OffsetFenced))

    def reclaim(self) -> None:
        """Claims the partitions at their new positions. Raises `ClaimRefused` if a newer attempt, not a rewind, took them."""
        self.claimed.claim_again()

    def close(self) -> None:
        with contextlib.suppress(TidemarkError):
            self._listeners.revoked([claim.partition for claim in self.claimed.claims])


class GroupMembership:
    """The partitions that the group assigns. An Airflow task is a static member: its next try has the same instance id."""

    def __init__(self, connection: Connection, attempt: Attempt, cluster: Cluster, lookup: LookUp, interrupt: Interrupt) -> None:
        from tidemark.group.assignors import find_assignor  # not at module level: they import numpy, which manual assignment does not need
        from tidemark.group.member import Member, MemberSettings

        spec, group_id, attempt_id = attempt.spec, attempt.group_id, attempt.attempt_id
        with transaction(connection) as cur:
            own_id = store.instance_id_of(cur, attempt_id)
            remembered, generation = store.partitions_of_instance(cur, group_id, own_id) if own_id else ((), Generation(-1))
        tables = append_tables(spec)
        self._base = Claimant(spec.group, group_id, attempt_id, spec.offset_reset, Owner(Generation(0), "", own_id), append_tables=tables)
        self.claimed = ClaimedPartitions(connection, cluster, lookup, self._claimant)
        settings = MemberSettings(
            group=spec.group,
            client_id=f"tidemark-{spec.name}-{socket.gethostname()}",
            instance_id=own_id,
            expected_members=spec.members,
            remembered=remembered,
            generation=generation,
            **group_settings(attempt.connections.kafka),
        )
        self._member = Member(
            attempt.connections.database_url,
            settings,
            [find_assignor(name) for name in spec.assignment],
            lambda: cluster.subscribed(spec),
            lambda topics: metadata_of(cluster, topics),
            [self.claimed, *_listeners(spec)],
            interrupt=interrupt,
        )

    def _claimant(self) -> Claimant:
        member = self._member
        instance_id = self._base.owner.instance_id
        owner = Owner(Generation(member.generation), instance_id or member.member_id, instance_id)
        return replace(self._base, owner=owner, member_id=member.member_id)

    @property
    def settled(self) -> bool:
        return self._member.settled and self.claimed.complete

    def update(self, lookup: LookUp) -> None:
        """Switches to new ends."""
        with self._rejoin_if_removed():
            self.claimed.update(lookup)

    def poll(self, timeout_s: float = 0.0) -> None:
        with self._rejoin_if_removed():
            self._member.poll(timeout_s)

    def may_retry(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """A batch is read again from the last commits, without a rebalance, if it was interrupted or fenced or met an outage."""
        return interrupted or (tries < TRIES and isinstance(error, OffsetFenced | Unavailable))

    def reclaim(self) -> None:
        """Polls, then claims the still assigned partitions again. After that, the failed batch can no longer commit."""
        self.poll()
        with self._rejoin_if_removed():
            self.claimed.claim_again()

    def close(self) -> None:
        self._member.close("the run has ended")

    @contextlib.contextmanager
    def _rejoin_if_removed(self) -> Iterator[None]:
        """Rejoins if a claim shows that the group has removed the member, as after a failed heartbeat."""
        try:
            yield
        except UnknownMemberId as error:
            if error.member_id == self._member.member_id:
                self._member.enforce_rebalance("a claim found the member removed")


def group_settings(config: KafkaConfig) -> dict[str, Any]:
    """The Kafka settings that belong in `MemberSettings`: `GROUP_SETTINGS` and ``client.rack``. Raises `BadInput`."""
    settings: dict[str, Any] = {"rack": config["client.rack"]} if config.get("client.rack") else {}
    for name in GROUP_SETTINGS:
        if name in config:
            if not config[name].isdecimal() or int(config[name]) == 0:
                raise BadInput(what=f"Kafka setting {name}", found=config[name], fix="Write a whole number of milliseconds above 0.")
            settings[name.replace(".", "_")] = int(config[name])
    return settings


def _listeners(spec: ConsumerSpec) -> list[RebalanceListener]:
    fix = "Write module:Class. The class must take no arguments."
    return [find_class(name, RebalanceListener, what="listener", fix=fix)() for name in spec.listeners]


def instance_id(consumer: str, member: int) -> str:
    """The instance id of a member in the consumer's DAG. See `store.instance_id_of`."""
    return f"consume__{consumer}/consume/{member}"


def metadata_of(cluster: Cluster, topics: Collection[str]) -> Metadata:
    """The metadata that an assignor gets. A topic that does not exist is omitted, so its partitions are not assigned."""
    from tidemark.group.assignors import Metadata, TopicInfo

    return Metadata({topic.name: TopicInfo(topic.partitions, topic.racks) for topic in cluster.topics(topics, missing_ok=True)})
