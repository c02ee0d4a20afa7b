"""Reads a file of cases: the inputs of an assignor, and the known answers of the reference implementation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemark.group.assignors import ASSIGNORS, Assignment, Assignor, Metadata, Subscription, TopicInfo
from tidemark.group.assignors.range import RangeAssignor
from tidemark.group.assignors.sticky import StickyAssignor
from tidemark.records.ranges import TopicPartition

OWN_FILE = Path(__file__).with_name("assignor_cases.json")

Parts = dict[str, frozenset[TopicPartition]]
"""Member id -> its partitions."""


@dataclass(frozen=True)
class Case:
    """One call of an assignor, with the known facts about its answer. A fact that the file does not state is ``None``."""

    name: str
    assignor: str
    metadata: Metadata
    subscriptions: dict[str, Subscription]
    force_racks: bool = False
    expected: Parts | None = None
    final: bool = False
    """Whether ``expected`` is the result of the cooperative follow-up rounds, not the answer of the first call."""
    rounds: tuple[Parts, ...] | None = None
    """The reference's answers to this call and, under the cooperative protocol, to those that follow."""
    properties: tuple[str, ...] = ()
    """What Kafka's test asserts instead, in words. Here only the time limit of a generated case is checked; ``rounds`` says more."""
    transferring: dict[TopicPartition, str] | None = None
    rack_mismatches: int | None = None
    order_of_hashes: bool = False
    """Whether the reference's answer depends on the order of Java's hash maps. If so, only properties can be checked."""
    generator: Mapping[str, Any] | None = field(default=None)

    def make(self) -> Assignor:
        found = ASSIGNORS[self.assignor]
        if issubclass(found, (RangeAssignor, StickyAssignor)):
            return found(force_racks=self.force_racks)
        return found()


def load(path: Path) -> list[Case]:
    """The cases of a file, which may also be a bare list of them. A line may have several assignors, and variants of the racks."""
    data = json.loads(path.read_text())
    return [
        read_case(_expanded(raw, assignor, variant))
        for raw in (data["cases"] if isinstance(data, dict) else data)
        for assignor in raw.get("assignors") or [raw["assignor"]]
        for variant in raw.get("variants") or [""]
    ]


def _expanded(raw: Mapping[str, Any], assignor: str, variant: str) -> dict[str, Any]:
    """The case of one assignor, and with Kafka's ``RackConfig`` of that name."""
    absent = {*raw.get("without", {}).get(assignor, ()), *(["rack"] if variant == "NO_CONSUMER_RACK" else [])}
    members = {
        member: {name: value for name, value in fields.items() if name not in absent}
        for member, fields in (raw.get("subscriptions") or {}).items()
    }
    racks = raw.get("replica_racks") or {}
    if variant == "NO_BROKER_RACK":
        racks = {topic: [[None] * len(replicas) for replicas in parts] for topic, parts in racks.items()}
    name = f"{raw['name']}[{variant}]" if variant else raw["name"]
    return {**raw, "assignor": assignor, "name": name, "subscriptions": members, "replica_racks": racks}


def read_case(raw: Mapping[str, Any]) -> Case:
    expected, rounds, transferring = raw.get("expected"), raw.get("reference_rounds"), raw.get("transferring_ownership")
    return Case(
        name=raw["name"],
        assignor=raw["assignor"],
        metadata=_metadata(raw.get("partitions_per_topic") or {}, raw.get("replica_racks") or {}),
        subscriptions={member: _subscription(fields) for member, fields in (raw.get("subscriptions") or {}).items()},
        force_racks=bool(raw.get("force_rack_logic")),
        expected=None if expected is None else _assignment(expected),
        rounds=None if rounds is None else tuple(map(_assignment, rounds)),
        final=raw.get("expected_phase") == "final",
        properties=tuple(raw.get("properties") or ()),
        transferring=None if transferring is None else {_part(name): member for name, member in transferring.items()},
        rack_mismatches=raw.get("rack_mismatches"),
        order_of_hashes=bool(raw.get("java_hash_order_dependent")),
        generator=raw.get("generator"),
    )


def as_parts(assignment: Assignment) -> Parts:
    return {member: frozenset(parts) for member, parts in assignment.items()}


def _metadata(counts: Mapping[str, int], racks: Mapping[str, Sequence[Sequence[str | None]]]) -> Metadata:
    return Metadata({topic: TopicInfo(count, racks.get(topic)) for topic, count in counts.items()})


def _subscription(fields: Mapping[str, Any]) -> Subscription:
    generation = fields.get("generation")
    return Subscription(
        topics=tuple(fields.get("topics") or ()),
        owned=tuple(_part(name) for name in fields.get("owned") or ()),
        generation=-1 if generation is None else generation,
        rack=fields.get("rack"),
        instance_id=fields.get("instance_id"),
    )


def _assignment(names: Mapping[str, Sequence[str]]) -> Parts:
    return {member: frozenset(map(_part, parts)) for member, parts in names.items()}


def _part(name: str) -> TopicPartition:
    topic, _, number = name.rpartition("-")
    return TopicPartition(topic, int(number))
