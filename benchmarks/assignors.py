"""The assignors, for groups with up to a million partitions, compared with kafka-python's sticky assignor in the same process.

kafka-python has the other assignor that is written in Python. The inputs of both are built beforehand; the figure is the CPU time of
``assign`` in this process. Each result is checked: every partition is assigned once, to a subscriber, and evenly.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.packages import Unobtainable
from tidemark.group.assignors import Assignment, Metadata, Subscription, TopicInfo, find_assignor
from tidemark.records.ranges import TopicPartition

ROUNDS = 3
PEER = "kafka-python"


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


SMALL = Size(10, 500, 200)
MILLION = Size(500, 2000, 2000)
UNEQUAL = Size(100, 200, 500, other=4)
MINE = (
    ("sticky", SMALL),
    ("sticky", MILLION),
    ("cooperative-sticky", MILLION),
    ("sticky", UNEQUAL),
    ("range", MILLION),
    ("roundrobin", MILLION),
)


def measure(report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per assignor and size, with medians: seconds for a new group (``fresh_s``), and after one member left (``one_left_s``).

    The rows of kafka-python's sticky also have ``ratio_fresh`` and ``ratio_one_left``: its time divided by ours.
    """
    rows = []
    for name, size in MINE:
        row = {"assignor": name, "of": "tidemark", "group": str(size), "equal": size.other is None} | _time(_Ours(name), size)
        seconds = f"fresh {row['fresh_s']:.3f} s, one left {row['one_left_s']:.3f} s"
        report(f"{name:<18} {size}, {'equal' if size.other is None else 'unequal'} subscriptions: {seconds}")
        rows.append(row)
    try:
        peer = _time(_KafkaPython(), SMALL)
    except Unobtainable as error:
        report(f"skipped: {error}")
        return rows
    ratios = {f"ratio_{what}": peer[f"{what}_s"] / rows[0][f"{what}_s"] for what in ("fresh", "one_left")}
    report(f"{PEER}'s sticky {SMALL}: {ratios['ratio_fresh']:.0f} times as long fresh, {ratios['ratio_one_left']:.0f} with one left")
    return [*rows, {"assignor": "sticky", "of": PEER, "group": str(SMALL), "equal": True} | peer | ratios]


class _Ours:
    def __init__(self, name: str) -> None:
        self._assignor = find_assignor(name)

    def prepare(self, metadata: Metadata, members: Mapping[str, Subscription]) -> Callable[[], Assignment]:
        return lambda: self._assignor.assign(metadata, members)

    @staticmethod
    def held(answer: Assignment) -> dict[str, tuple[Any, ...]]:
        return {member: tuple(parts) for member, parts in answer.items()}


class _KafkaPython:
    """kafka-python's sticky; raises `Unobtainable` if it is not installed."""

    def __init__(self) -> None:
        try:
            from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
        except ImportError as error:
            raise Unobtainable(f"{PEER} is not installed ({error}); it comes with the extra dev") from error
        self._class = StickyPartitionAssignor

    def prepare(self, metadata: Metadata, members: Mapping[str, Subscription]) -> Callable[[], Any]:
        cluster = SimpleNamespace(
            topics=lambda: set(metadata.topics), partitions_for_topic=lambda topic: set(range(metadata.topics[topic].partitions))
        )
        theirs = []
        for member, one in members.items():
            theirs.append(SimpleNamespace(member_id=member, group_instance_id=None, metadata=self._metadata(one)))
        return lambda: self._class().assign(cluster, theirs)

    def _metadata(self, one: Subscription) -> Any:
        """The metadata that its member would send after an assignment, built by its own assignor."""
        assignor = self._class()
        if one.owned:
            assignor.on_assignment(SimpleNamespace(partitions=lambda: list(one.owned)), 1)
        return assignor.metadata(sorted(one.topics))

    @staticmethod
    def held(answer: Any) -> dict[str, tuple[Any, ...]]:
        return {member: tuple(one.partitions()) for member, one in answer.items()}


def _time(side: _Ours | _KafkaPython, size: Size) -> dict[str, float]:
    """Both assignments of a group, by one of the two implementations."""
    metadata, members = size.group()
    fresh_s, answer = _median(side.prepare(metadata, members))
    held = side.held(answer)
    _check(metadata, members, held)
    rest = {
        member: dataclasses.replace(one, owned=tuple(TopicPartition(part.topic, part.partition) for part in held[member]), generation=1)
        for member, one in list(members.items())[1:]
    }
    one_left_s, answer = _median(side.prepare(metadata, rest))
    _check(metadata, rest, side.held(answer))
    return {"fresh_s": fresh_s, "one_left_s": one_left_s}


def _median(call: Callable[[], Any]) -> tuple[float, Any]:
    seconds = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        answer = call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), answer


def _check(metadata: Metadata, members: Mapping[str, Subscription], held: Mapping[str, tuple[Any, ...]]) -> None:
    given = {(part.topic, part.partition) for parts in held.values() for part in parts}
    strange = [part for member, parts in held.items() for part in parts if part.topic not in members[member].topics]
    total = sum(info.partitions for info in metadata.topics.values())
    if strange or len(given) != total or sum(map(len, held.values())) != total:
        raise RuntimeError(f"{len(given)} of {total} partitions given, {len(strange)} to members that do not subscribe")
