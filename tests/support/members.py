"""Members of one group, each with its own threads. One test polls them in turn and sees the callbacks of their listeners."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.waiting import until
from tidemark.db import session, transaction
from tidemark.group.assignors import Assignor, Metadata, find_assignor
from tidemark.group.coordinator import Coordinator
from tidemark.group.listener import RebalanceListener
from tidemark.group.member import Member, MemberSettings
from tidemark.group.requests import GroupConfig, GroupDescription
from tidemark.group.states import GroupState
from tidemark.records.ranges import TopicPartition

CONFIG = GroupConfig(initial_rebalance_delay_ms=0, min_session_timeout_ms=100)
QUICK: dict[str, Any] = {"heartbeat_interval_ms": 100, "session_timeout_ms": 20_000, "config": CONFIG}
TOPIC = "flights"


def parts(*numbers: int, topic: str = TOPIC) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, number) for number in numbers)


class Told(RebalanceListener):
    """Records its callbacks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[TopicPartition, ...]]] = []

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("assigned", tuple(partitions)))

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("revoked", tuple(partitions)))

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("lost", tuple(partitions)))


@dataclass
class Group:
    """Creates members of one group and polls them in turn, as each member's own process would. Closes them at the end of its block."""

    url: str
    metadata: Metadata = field(default_factory=lambda: Metadata.of(flights=4))
    members: list[Member] = field(default_factory=list)
    told: dict[Member, Told] = field(default_factory=dict)
    interrupted: list[Member] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    seat: dict[str, Any] = field(default_factory=dict)
    """Settings of each member."""
    assignor: str | Assignor = "cooperative-sticky"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as ends:
            for member in self.members:
                ends.callback(member.close)

    def join(self, *assignors: str | Assignor, listeners: Sequence[RebalanceListener] = (), **seat: Any) -> Member:
        told, client = Told(), f"client-{next(self.numbers)}"
        made: list[Member] = []
        member = Member(
            self.url,
            MemberSettings(group="g", client_id=client, **{**QUICK, **self.seat, **seat}),
            [find_assignor(each) if isinstance(each, str) else each for each in assignors or (self.assignor,)],
            self.subscribed,
            lambda topics: self.look(client, topics),
            [told, *listeners],
            interrupt=lambda: self.interrupted.extend(made),
        )
        made.append(member)
        self.members.append(member)
        self.told[member] = told
        return member

    def subscribed(self) -> Collection[str]:
        return (TOPIC,)

    def look(self, client: str, topics: Collection[str]) -> Metadata:
        """The metadata that a client fetches."""
        return Metadata({name: self.metadata.topics[name] for name in topics if name in self.metadata.topics})

    def poll(self) -> None:
        for member in self.members:
            member.poll()

    def settle(self) -> None:
        """Polls until the group is stable with these members, and all have taken over their assignments."""

        def settled() -> bool:
            self.poll()
            found = self.describe()
            everybody = {member.member_id for member in self.members}
            return found is not None and (
                found.state == GroupState.STABLE
                and {each.member_id for each in found.members} == everybody
                and all(member.settled and member.generation == found.generation for member in self.members)
            )

        until(settled, "the group settled", within_s=180)

    def describe(self) -> GroupDescription | None:
        with session(self.url) as connection:
            return Coordinator(connection, "g", CONFIG).describe()

    def described(self) -> GroupDescription:
        found = self.describe()
        assert found is not None
        return found

    def sql(self, statement: str) -> None:
        with session(self.url) as connection, transaction(connection) as cur:
            cur.execute(statement)

    def assignment(self) -> dict[TopicPartition, Member]:
        """The member that has each partition. Checks that no partition has two."""
        pairs = [(part, member) for member in self.members for part in member.assignment]
        assert len(pairs) == len(dict(pairs))
        return dict(pairs)

    def close(self, member: Member) -> None:
        self.members.remove(member)
        member.close()


def wait_for(who: Member | Group, condition: Callable[[], bool]) -> None:
    """Polls until ``condition`` is true."""

    def polled() -> bool:
        who.poll()
        return condition()

    until(polled, "polled until it is so")
