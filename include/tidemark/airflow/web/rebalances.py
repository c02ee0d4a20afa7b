"""The moves of each rebalance between members, from the assignments that `sql/0001_groups.sql` stores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemark.records.ranges import TopicPartition
from tidemark.spec.scope import spans

Assignment = Mapping[str, Mapping[str, Sequence[int]]]
"""The partitions of each topic, by member."""


def rebalances(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the generations, newest first, each with its moves. ``rows`` have the same order; the oldest has no predecessor, so its moves
    are unknown (`None`)."""
    before = [*(row["assignment"] for row in rows[1:]), None]
    return [
        {name: row[name] for name in ("generation", "at", "reason", "protocol")}
        | {"members": len(row["assignment"]), "moves": None if old is None else moves(old, row["assignment"])}
        for row, old in zip(rows, before, strict=False)
    ]


def moves(before: Assignment, after: Assignment) -> list[dict[str, Any]]:
    """Returns ``{"from", "to", "partitions", "what"}`` for each pair of members. `None`: no member. ``what`` has the syntax of `Scope`."""
    old, new = dict(_owners(before)), dict(_owners(after))
    moved: dict[tuple[str | None, str | None], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for partition in sorted({*old, *new}):
        if old.get(partition) != new.get(partition):
            moved[old.get(partition), new.get(partition)][partition.topic].append(partition.partition)
    return [
        {
            "from": source,
            "to": target,
            "partitions": sum(map(len, topics.values())),
            "what": " ".join(f"{topic}:{spans(partitions)}" for topic, partitions in topics.items()),
        }
        for (source, target), topics in sorted(moved.items(), key=lambda move: (move[0][0] or "", move[0][1] or ""))
    ]


def _owners(assignment: Assignment) -> Iterator[tuple[TopicPartition, str]]:
    for member, topics in assignment.items():
        for topic, partitions in topics.items():
            for partition in partitions:
                yield TopicPartition(topic, partition), member
