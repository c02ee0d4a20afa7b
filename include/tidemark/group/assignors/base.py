"""What an assignor is given and what it answers: the words that the built-in ones, users' own and the group's leader share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from tidemark.records.ranges import TopicPartition

UNKNOWN_GENERATION = -1
"""Kafka's value on the wire for a member that does not know which generation its partitions are of."""

Assignment = Mapping[str, Sequence[TopicPartition]]
"""Member id -> its partitions; every member is there, if only with an empty list."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member reports when it joins: the topics it reads and the partitions it holds.

    ``generation`` is that of ``owned`` (KIP-792): where two members claim one partition, the newer generation is believed, and nobody if
    they are equal. ``rack`` is where the member runs (KIP-881), ``instance_id`` names a static member (KIP-345). ``user_data`` is for
    assignors of one's own; like all the rest it must be expressible in JSON.
    """

    topics: frozenset[str] | tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = UNKNOWN_GENERATION
    rack: str | None = None
    instance_id: str | None = None
    user_data: object | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write; equal for equal subscriptions, so that the coordinator can compare it."""
        owned: dict[str, list[int]] = {}
        for part in sorted(self.owned):
            owned.setdefault(part.topic, []).append(part.partition)
        return {
            "topics": sorted(self.topics),
            "owned": owned,
            "generation": self.generation,
            "rack": self.rack,
            "instance_id": self.instance_id,
            "user_data": self.user_data,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The subscription that `to_json` wrote; what is absent has its default, what is unknown is left alone (a newer member's)."""
        return cls(
            topics=frozenset(data["topics"]),
            owned=tuple(TopicPartition(topic, number) for topic, numbers in data.get("owned", {}).items() for number in numbers),
            generation=data.get("generation", UNKNOWN_GENERATION),
            rack=data.get("rack"),
            instance_id=data.get("instance_id"),
            user_data=data.get("user_data"),
        )


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the leader saw it: its number of partitions, and on which racks the replicas of each are.

    ``racks`` has an entry for each partition, in it one for each replica (``None``: its broker has no rack). It is ``None`` as a whole
    where nothing is known.
    """

    partitions: int
    racks: Sequence[Iterable[str | None]] | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """The topics that exist, by name. Topics that nobody subscribes to may be there: nothing of them is given away."""

    topics: Mapping[str, TopicInfo] = field(default_factory=dict)

    @classmethod
    def of(cls, **partitions: int) -> Self:
        """Topics without racks: ``Metadata.of(flights=8)``."""
        return cls({name: TopicInfo(count) for name, count in partitions.items()})


class Assignor(ABC):
    """Divides the partitions of a group; implement it for a way of your own and name it ``module:Class`` in the spec.

    Tidemark makes one object per group member, without arguments. On the leader, `assign` is called once a rebalance, outside of any
    transaction; it must answer the same for equal input, whatever the order of the mappings, and touch nothing. What it answers is
    checked with `check_assignment` before it is stored.

    ``protocol`` says whether members let go of everything before a rebalance (``eager``) or keep what stays theirs (``cooperative``,
    KIP-429). Under ``cooperative`` a partition that a member reports as owned must not be given to another in the same round: leave it
    out, its owner lets go, and the next round, which follows at once, gives it away.
    """

    name: ClassVar[str]
    protocol: ClassVar[Literal["eager", "cooperative"]] = "eager"

    @abstractmethod
    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        """The partitions of each member, by member id."""


def member_order(subscriptions: Mapping[str, Subscription]) -> list[str]:
    """Member ids in the order in which members are served: static ones by instance id, then dynamic ones by member id."""

    def key(member: str) -> tuple[bool, str, str]:
        instance = subscriptions[member].instance_id
        return instance is None, instance or "", member

    return sorted(subscriptions, key=key)
