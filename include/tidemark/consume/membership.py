"""How a run gets its partitions: by manual assignment, or as a member of its group."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from tidemark.connections import Connections
from tidemark.consume.claims import Claimant, Holding, LookUp
from tidemark.consume.lookup import subscribed
from tidemark.db import transaction
from tidemark.errors import BadInput, TidemarkError, Unavailable
from tidemark.group.errors import UnknownMemberId
from tidemark.group.listener import Listeners, RebalanceListener
from tidemark.group.named import find_class
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import KafkaConfig
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Generation
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.group.assignors import Metadata

log = logging.getLogger(__name__)

GROUP_SETTINGS = ("session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms", "metadata.max.age.ms")
"""Settings of Kafka's clients that mean the same for Tidemark's groups."""
TRIES = 3
"""Tries of a batch in one run before the attempt fails. With manual assignment a batch is tried again only if it was fenced."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What runs, and for whom."""

    attempt_id: int
    group_id: int
    spec: ConsumerSpec
    connections: Connections


class Interrupt:
    """Ends the batch in flight. Called by the thread of the group's protocol, and by the watch for rewinds."""

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
    """The partitions that a run may read, and how it learns that they have changed."""

    held: Holding

    @property
    def settled(self) -> bool:
        """Is every partition that the run should read claimed?"""

    def see(self, found: LookUp) -> None:
        """Reads on up to other ends, also of partitions that are new."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Learns what has changed, waiting so long for news. Between two batches only."""

    def may_go_on(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """May a batch that has failed ``tries`` times be tried again in this run?"""

    def start_over(self) -> None:
        """Claims again what is still assigned, at the committed positions. Raises `ClaimRefused`."""

    def close(self) -> None:
        """Releases the partitions."""


class ManualAssignment:
    """Every partition that the run reads, in a generation of its own, without group management (Kafka's ``assign``)."""

    settled = True

    def __init__(self, connection: Connection, attempt: Attempt, cluster: Cluster, found: LookUp) -> None:
        with transaction(connection) as cur:
            generation = store.next_generation(cur)
        spec, attempt_id = attempt.spec, attempt.attempt_id
        owner, by_name = f"attempt {attempt_id}", bool(spec.fixed.items or spec.only.items)
        me = Claimant(spec.group, attempt.group_id, attempt_id, spec.offset_reset, generation, owner, by_name=by_name)
        self.held = Holding(connection, cluster, found, lambda: me)
        self._listeners = Listeners([self.held, *_listeners(spec)])
        self._listeners.assigned(sorted(found.logs))

    def see(self, found: LookUp) -> None:
        """Reads on up to other ends, also of partitions that are new."""
        new = found.logs.keys() - self.held.found.logs.keys()
        self.held.see(found)
        if new:
            self._listeners.assigned(sorted(new))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Nothing changes but by force, and that shows before the next batch."""
        time.sleep(timeout_s)

    def may_go_on(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """Is a failed batch to be tried again in this run? One that a rewind has cut off, for which nobody else need claim."""
        return interrupted or (tries < TRIES and isinstance(error, OffsetFenced))

    def start_over(self) -> None:
        """Claims again from the new positions on. Raises `ClaimRefused` if it was no rewind but a newer attempt."""
        self.held.claim_again()

    def close(self) -> None:
        with contextlib.suppress(TidemarkError):
            self._listeners.revoked([claim.partition for claim in self.held.claims])


class GroupMembership:
    """What the group assigns, for as long as it does. A task of Airflow's is a static member: the next try has the same instance id."""

    def __init__(self, connection: Connection, attempt: Attempt, cluster: Cluster, found: LookUp, interrupt: Interrupt) -> None:
        from tidemark.group.assignors import find_assignor  # here, because they bring numpy: a run by hand starts without
        from tidemark.group.member import Member, MemberSettings

        spec, group_id, attempt_id = attempt.spec, attempt.group_id, attempt.attempt_id
        with transaction(connection) as cur:
            own_id = store.instance_id_of(cur, attempt_id)
            remembered, generation = store.partitions_of_instance(cur, group_id, own_id) if own_id else ((), Generation(-1))
        self._base = Claimant(spec.group, group_id, attempt_id, spec.offset_reset, Generation(0), "", own_id)
        self.held = Holding(connection, cluster, found, self._me)
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
            lambda: _subscribed(spec, cluster),
            lambda topics: metadata_of(cluster, topics),
            [self.held, *_listeners(spec)],
            interrupt=interrupt,
        )

    def _me(self) -> Claimant:
        member = self._member
        owner = self._base.instance_id or member.member_id
        return replace(self._base, generation=Generation(member.generation), owner=owner, member_id=member.member_id)

    @property
    def settled(self) -> bool:
        return self._member.settled and self.held.complete

    def see(self, found: LookUp) -> None:
        """Reads on up to other ends."""
        with self._removed_meanwhile():
            self.held.see(found)

    def poll(self, timeout_s: float = 0.0) -> None:
        with self._removed_meanwhile():
            self._member.poll(timeout_s)

    def may_go_on(self, error: TidemarkError, tries: int, *, interrupted: bool) -> bool:
        """A batch that the group had cut off, whose partitions were taken meanwhile, or that met an outage, is read again from the last
        commits on, without a rebalance."""
        return interrupted or (tries < TRIES and isinstance(error, OffsetFenced | Unavailable))

    def start_over(self) -> None:
        """Hears what has changed, and claims what is still ours again: nothing of the failed batch commits after that."""
        self.poll()
        with self._removed_meanwhile():
            self.held.claim_again()

    def close(self) -> None:
        self._member.close("the run has ended")

    @contextlib.contextmanager
    def _removed_meanwhile(self) -> Iterator[None]:
        """A claim may be the first to find that the group has removed the member: it joins again, as when a heartbeat finds it."""
        try:
            yield
        except UnknownMemberId as error:
            if error.member_id == self._member.member_id:
                self._member.enforce_rebalance("a claim found it removed")


def group_settings(config: KafkaConfig) -> dict[str, Any]:
    """What the Kafka settings say of group membership, for a `MemberSettings`: `GROUP_SETTINGS` and ``client.rack``. Raises `BadInput`."""
    found: dict[str, Any] = {"rack": config["client.rack"]} if config.get("client.rack") else {}
    for name in GROUP_SETTINGS:
        if name in config:
            if not config[name].isdecimal() or int(config[name]) == 0:
                raise BadInput(what=f"Kafka setting {name}", found=config[name], fix="Write milliseconds, a whole number above 0.")
            found[name.replace(".", "_")] = int(config[name])
    return found


def _listeners(spec: ConsumerSpec) -> list[RebalanceListener]:
    fix = "Write module:Class, a class that needs no arguments."
    return [find_class(name, RebalanceListener, what="listener", fix=fix)() for name in spec.listeners]


def _subscribed(spec: ConsumerSpec, cluster: Cluster) -> Collection[str]:
    return subscribed(cluster, spec)


def instance_id(consumer: str, member: int) -> str:
    """The instance id of a member in the consumer's DAG; see `store.instance_id_of`."""
    return f"consume__{consumer}/consume/{member}"


def metadata_of(cluster: Cluster, topics: Collection[str]) -> Metadata:
    """What an assignor is told of these topics. One that does not exist (any more) is left out, and nothing of it is given away."""
    from tidemark.group.assignors import Metadata, TopicInfo

    return Metadata({topic.name: TopicInfo(topic.partitions, topic.racks) for topic in cluster.topics(topics, missing_ok=True)})
