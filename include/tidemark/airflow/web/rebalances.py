"""What each rebalance of a group moved from which member to which, from the assignments that `sql/0025_page.additive.sql` keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemark.records.ranges import TopicPartition
from tidemark.spec.scope import spans

Assignment = Mapping[str, Mapping[str, Sequence[int]]]
"""The partitions of each topic, by member."""


def rebalances(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The generations, newest first, each with its moves. ``found`` are rows in the same order; the oldest has no predecessor, so its
    moves are unknown (`None`)."""
    before = [*(row["assignment"] for row in found[1:]), None]
    return [
        {name: row[name] for name in ("generation", "at", "reason", "protocol")}
        | {"members": len(row["assignment"]), "moves": None if old is None else moves(old, row["assignment"])}
        for row, old in zip(found, before, strict=False)
    ]


def moves(before: Assignment, after: Assignment) -> list[dict[str, Any]]:
    """``{"from", "to", "partitions", "what"}`` for each pair of members; `None` as a member is nobody. ``what`` is as `Scope` writes it."""
    old, new = dict(_owners(before)), dict(_owners(after))
    moved: dict[tuple[str | None, str | None], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for part in sorted({*old, *new}):
        if old.get(part) != new.get(part):
            moved[old.get(part), new.get(part)][part.topic].append(part.partition)
    return [
        {
            "from": source,
            "to": target,
            "partitions": sum(map(len, topics.values())),
            "what": " ".join(f"{topic}:{spans(parts)}" for topic, parts in topics.items()),
        }
        for (source, target), topics in sorted(moved.items(), key=lambda one: (one[0][0] or "", one[0][1] or ""))
    ]


def _owners(assignment: Assignment) -> Iterator[tuple[TopicPartition, str]]:
    for member, topics in assignment.items():
        for topic, partitions in topics.items():
            for partition in partitions:
                yield TopicPartition(topic, partition), member
