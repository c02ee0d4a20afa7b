"""The assignors, for groups with up to a million partitions, compared with kafka-python's sticky assignor in the same process.

kafka-python has the other assignor that is written in Python. The inputs of both are built beforehand; the figure is the CPU time of
``assign`` in this process. Each result is checked: every partition is assigned once, to a subscriber, and evenly.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.measurement import Bench, Figures, Measurement, Table

from tidemark.group.assignors import Metadata, Subscription, TopicInfo, find_assignor
from tidemark.records.ranges import TopicPartition

Held = dict[str, tuple[Any, ...]]
"""The partitions of each member."""


@dataclass(frozen=True)
class Size:
    """A group: topics, partitions of each, members.

    All subscribe to all topics. With ``other``, every ``other``-th member subscribes to their first half, the rest to their second half.
    """

    topics: int
    partitions: int
    members: int
    other: int | None = None

    def __str__(self) -> str:
        return f"{self.topics * self.partitions:,} partitions x {self.members:,} members"

    def group(self) -> tuple[Metadata, dict[str, Subscription]]:
        names = [f"t{at:04}" for at in range(self.topics)]
        every, first, second = frozenset(names), frozenset(names[: self.topics // 2]), frozenset(names[self.topics // 2 :])
        members = {}
        for at in range(self.members):
            topics = every if self.other is None else first if at % self.other == 0 else second
            members[f"m{at:05}"] = Subscription(topics=topics)
        return Metadata({name: TopicInfo(self.partitions) for name in names}), members


SMALL, MILLION = Size(10, 500, 200), Size(500, 2000, 2000)
FULL = (
    ("sticky", SMALL),
    ("sticky", MILLION),
    ("cooperative-sticky", MILLION),
    ("sticky", Size(100, 200, 500, other=4)),
    ("range", MILLION),
    ("roundrobin", MILLION),
)


def measure(bench: Bench, cases: Sequence[tuple[str, Size]], rounds: int) -> Figures:
    """A row per assignor and size, with medians: seconds for a new group, and after one member left. The first case is also kafka-python's;
    its row says how many times as long as ours it took."""
    rows = [_row(bench, name, size, _ours(name), rounds) for name, size in cases]
    theirs = _row(bench, "kafka-python's sticky", SMALL, _kafka_python, rounds)
    for what in ("fresh", "left"):
        theirs[f"{what}_ratio"] = f" ({theirs[what] / rows[0][what]:.0f} times ours)"
    return {"rows": [*rows, theirs]}


def _row(bench: Bench, name: str, size: Size, side: Callable[..., Callable[[], Held]], rounds: int) -> dict[str, Any]:
    """Both assignments of a group, by one of the two implementations."""
    metadata, members = size.group()
    fresh_s, held = _median(metadata, members, side, rounds)
    rest = {
        member: dataclasses.replace(one, owned=tuple(TopicPartition(part.topic, part.partition) for part in held[member]), generation=1)
        for member, one in list(members.items())[1:]
    }
    left_s, _ = _median(metadata, rest, side, rounds)
    subscriptions = "equal" if size.other is None else "unequal"
    row = {"assignor": name, "group": str(size), "subscriptions": subscriptions, "fresh": fresh_s, "left": left_s}
    bench.report(f"{name:<24} {size}, {subscriptions} subscriptions: fresh {fresh_s:.3f} s, one left {left_s:.3f} s")
    return {**row, "fresh_ratio": "", "left_ratio": ""}


def _ours(name: str) -> Callable[..., Callable[[], Held]]:
    assignor = find_assignor(name)

    def prepared(metadata: Metadata, members: Mapping[str, Subscription]) -> Callable[[], Any]:
        return lambda: assignor.assign(metadata, members)

    return prepared


def _kafka_python(metadata: Metadata, members: Mapping[str, Subscription]) -> Callable[[], Any]:
    """Each member's metadata is what it would send after an assignment, built by its own assignor."""
    from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

    cluster = SimpleNamespace(
        topics=lambda: set(metadata.topics), partitions_for_topic=lambda topic: set(range(metadata.topics[topic].partitions))
    )
    group = []
    for member, one in members.items():
        assignor = StickyPartitionAssignor()
        if one.owned:
            assignor.on_assignment(SimpleNamespace(partitions=lambda owned=one.owned: list(owned)), 1)
        group.append(SimpleNamespace(member_id=member, group_instance_id=None, metadata=assignor.metadata(sorted(one.topics))))
    return lambda: StickyPartitionAssignor().assign(cluster, group)


def _median(metadata: Metadata, members: Mapping[str, Subscription], side: Any, rounds: int) -> tuple[float, Held]:
    call, seconds = side(metadata, members), []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        answer = call()
        seconds.append(time.process_time() - start)
    held = {member: tuple(one.partitions() if hasattr(one, "partitions") else one) for member, one in answer.items()}
    given = {(part.topic, part.partition) for parts in held.values() for part in parts}
    strange = [part for member, parts in held.items() for part in parts if part.topic not in members[member].topics]
    total = sum(info.partitions for info in metadata.topics.values())
    if strange or len(given) != total or sum(map(len, held.values())) != total:
        raise RuntimeError(f"{len(given)} of {total} partitions given, {len(strange)} to members that do not subscribe")
    return statistics.median(seconds), held


MEASUREMENT = Measurement(
    "assignors",
    measure,
    Table(
        "Assignors: CPU seconds of an assignment",
        "assignor | group | subscriptions | fresh | one member gone",
        "{assignor} | {group} | {subscriptions} | {fresh:.3g}{fresh_ratio} | {left:.3g}{left_ratio}",
    ),
    full={"cases": FULL, "rounds": 3},
    quick={"cases": [("sticky", SMALL)], "rounds": 1},
)
