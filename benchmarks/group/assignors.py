"""The sticky assignor, compared with kafka-python's in the same process: the other one that is written in Python.

The inputs of both are built beforehand; the figure is the CPU time of ``assign`` in this process. Each result is checked: every partition
is assigned once, to a subscriber.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.group.assignors import Metadata, Subscription, TopicInfo, find_assignor
from tidemark.records.ranges import TopicPartition

Held = dict[str, tuple[Any, ...]]
"""The partitions of each member."""
Members = Mapping[str, Subscription]
Side = Callable[[Metadata, Members], Callable[[], Any]]
"""One of the implementations: builds its inputs, and returns the call to measure."""


def measure(bench: Bench, topics: int, partitions: int, members: int, rounds: int) -> Figures:
    """Seconds for a new group, and after one member left. Medians."""
    metadata = Metadata({f"t{at:04}": TopicInfo(partitions) for at in range(topics)})
    group = {f"m{at:05}": Subscription(topics=frozenset(metadata.topics)) for at in range(members)}
    rows = []
    for assignor, side in {"Tidemark's": _ours, "kafka-python's": _kafka_python}.items():
        fresh_s, held = _median(metadata, group, side, rounds)
        owned = {member: tuple(TopicPartition(part.topic, part.partition) for part in parts) for member, parts in held.items()}
        rest = {member: dataclasses.replace(one, owned=owned[member], generation=1) for member, one in list(group.items())[1:]}
        left_s, _ = _median(metadata, rest, side, rounds)
        rows.append({"assignor": assignor, "fresh": fresh_s, "left": left_s})
        bench.report(f"{assignor} sticky assignor: fresh {fresh_s:.3f} s, one left {left_s:.3f} s")
    size = {"partitions": topics * partitions, "members": members}
    return {**size, "rows": rows, "ratio": {what: rows[1][what] / rows[0][what] for what in ("fresh", "left")}}


def _ours(metadata: Metadata, members: Members) -> Callable[[], Any]:
    assignor = find_assignor("sticky")
    return lambda: assignor.assign(metadata, members)


def _kafka_python(metadata: Metadata, members: Members) -> Callable[[], Any]:
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


def _median(metadata: Metadata, members: Members, side: Side, rounds: int) -> tuple[float, Held]:
    call, seconds = side(metadata, members), []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        answer = call()
        seconds.append(time.process_time() - start)
    held = {member: tuple(one.partitions() if hasattr(one, "partitions") else one) for member, one in answer.items()}
    given = {(part.topic, part.partition) for parts in held.values() for part in parts}
    total = sum(info.partitions for info in metadata.topics.values())
    if len(given) != total or sum(map(len, held.values())) != total or held.keys() - members.keys():
        raise RuntimeError(f"{len(given)} of {total} partitions given to {len(held)} members")
    return statistics.median(seconds), held


MEASUREMENT = Measurement(
    "assignors",
    measure,
    Table(
        "Sticky assignors, {partitions:,} partitions and {members} members: CPU seconds of an assignment",
        "assignor | fresh | one member gone",
        "{assignor} | {fresh:.3g} | {left:.3g}",
    ),
    bars=[
        Bar("kafka-python's sticky assignor / ours, fresh", lambda of: of["ratio"]["fresh"], at_least=100.0),
        Bar("kafka-python's sticky assignor / ours, one member gone", lambda of: of["ratio"]["left"], at_least=100.0),
    ],
    full={"topics": 10, "partitions": 500, "members": 200, "rounds": 3},
    quick={"topics": 10, "partitions": 100, "members": 40, "rounds": 1},
)
