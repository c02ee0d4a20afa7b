"""The interface of an assignor, its input and its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from tidemark.records.ranges import TopicPartition

UNKNOWN_GENERATION = -1
"""Kafka's wire value for a member that does not know the generation of its partitions."""

Assignment = Mapping[str, Sequence[TopicPartition]]
"""Member id -> its partitions. Contains every member, even those without partitions."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member reports when it joins: the topics it reads and the partitions it holds.

    ``generation`` is that of ``owned`` (KIP-792): if two members claim one partition, the claim of the newer generation counts, and neither
    if they are equal. ``rack`` is where the member runs (KIP-881), ``instance_id`` names a static member (KIP-345). ``user_data`` is for
    custom assignors. Like the other fields, it must be expressible in JSON.
    """

    topics: frozenset[str] | tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = UNKNOWN_GENERATION
    rack: str | None = None
    instance_id: str | None = None
    user_data: object | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json`. Equal subscriptions give equal dictionaries, so that the coordinator can compare them."""
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
        """Reads what `to_json` wrote. Missing fields get their defaults; unknown ones (from a newer version) are ignored."""
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
    """A topic as the leader saw it: its number of partitions, and the racks of their replicas.

    ``racks`` has an entry for each partition, which has one for each replica (``None``: its broker has no rack). ``racks`` is ``None`` if
    nothing is known.
    """

    partitions: int
    racks: Sequence[Iterable[str | None]] | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """The topics that exist, by name. It may contain topics that no member subscribes to; those are not assigned."""

    topics: Mapping[str, TopicInfo] = field(default_factory=dict)

    @classmethod
    def of(cls, **partitions: int) -> Self:
        """Topics without racks: ``Metadata.of(flights=8)``."""
        return cls({name: TopicInfo(count) for name, count in partitions.items()})


class Assignor(ABC):
    """Divides the partitions of a group among its members. For a custom assignor, implement it and name it ``module:Class`` in the spec.

    Tidemark creates one object per group member, without arguments. The leader calls `assign` once per rebalance, outside any transaction.
    It must be deterministic, whatever the order of the mappings, and must not modify its input. `check_assignment` checks the result before
    it is stored.

    ``protocol``: whether members give up all partitions before a rebalance (``eager``) or only those that move (``cooperative``,
    KIP-429). A ``cooperative`` assignor must not assign a partition that one member reports as owned to another member in the same round:
    leave it unassigned, so that its owner gives it up; the next round follows immediately and assigns it.
    """

    name: ClassVar[str]
    protocol: ClassVar[Literal["eager", "cooperative"]] = "eager"

    @abstractmethod
    def assign(self, metadata: Metadata, subscriptions: Mapping[str, Subscription]) -> Assignment:
        """The partitions of each member, by member id."""


def member_order(subscriptions: Mapping[str, Subscription]) -> list[str]:
    """Member ids in the order of assignment: static members by instance id, then dynamic ones by member id."""

    def key(member: str) -> tuple[bool, str, str]:
        instance = subscriptions[member].instance_id
        return instance is None, instance or "", member

    return sorted(subscriptions, key=key)
