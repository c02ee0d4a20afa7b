"""Parses topics and partitions: ``all``, ``flights``, ``flights:0,1,5-9``, or several of these. (Write a topic named "all" as ``all:0-9``.)

Rewinds, pauses, ``consume --partition`` and ``partitions`` in a consumer's file all use this notation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidemark.errors import BadInput
from tidemark.records.ranges import TopicPartition
from tidemark.text.wording import nearest, quoted

ALL = "all"
_RANGES = re.compile(r"\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*", re.ASCII)
_ITEM = re.compile(rf"(?P<topic>[A-Za-z0-9._-]{{1,249}})(?::(?P<partitions>{_RANGES.pattern}))?", re.ASCII)
_SHOWN = 10  # entries of a list in a message

Ranges = tuple[tuple[int, int], ...]
"""Partitions of a topic as pairs of first and last, both inclusive."""


@dataclass(frozen=True, slots=True)
class Item:
    """A topic, or some of its partitions."""

    topic: str
    partitions: Ranges = ()

    def covers(self, partition: TopicPartition) -> bool:
        if partition.topic != self.topic:
            return False
        return not self.partitions or any(first <= partition.partition <= last for first, last in self.partitions)

    def __str__(self) -> str:
        numbers = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.partitions)
        return f"{self.topic}:{numbers}" if numbers else self.topic


@dataclass(frozen=True, slots=True)
class Scope:
    """A set of topics and partitions. No items means everything. `parse` reads back what ``str`` writes."""

    items: tuple[Item, ...] = ()

    @classmethod
    def parse(cls, words: Iterable[str], *, what: str = "scope") -> Scope:
        """Parses words, each of which may contain several items, separated by spaces. No words mean ``all``.

        Raises `BadInput` with all invalid items; ``what`` is the error's subject.
        """
        entries = [word for text in words for word in text.split()]
        items, bad = [], []
        for word in entries:
            if word == ALL:
                continue
            match = _ITEM.fullmatch(word)
            if match is None:
                bad.append((quoted(word), ""))
                continue
            try:
                items.append(Item(match["topic"], ranges(match["partitions"]) if match["partitions"] else ()))
            except BadInput as error:
                bad.append((quoted(word), error.fix))
        if bad:
            fixes = list(dict.fromkeys(fix or f"Write {ALL}, flights, or flights:0,1,5-9." for _, fix in bad))
            problem = f"{_listed([word for word, _ in bad])} {'does' if len(bad) == 1 else 'do'} not name topics or partitions"
            raise BadInput(what=what, found=problem, fix=" ".join(fixes))
        if items and ALL in entries:
            raise BadInput(what=what, found=f"{ALL} is next to {_listed([str(item) for item in items])}", fix="Write one or the other.")
        return cls(tuple(dict.fromkeys(items)))

    def covers(self, partition: TopicPartition) -> bool:
        return not self.items or any(item.covers(partition) for item in self.items)

    def select(self, partitions: Iterable[TopicPartition], *, what: str = "scope") -> list[TopicPartition]:
        """The ``partitions`` in this scope, in order.

        Raises `BadInput` if the scope names others, and lists them and the existing ones; ``what`` is the error's subject.
        """
        existing = sorted(set(partitions))
        by_topic: dict[str, list[int]] = defaultdict(list)
        for partition in existing:
            by_topic[partition.topic].append(partition.partition)
        absent = [text for item in self.items for text in missing(item, by_topic)]
        if absent:
            shown = _listed([f"{topic}:{spans(numbers)}" for topic, numbers in sorted(by_topic.items())])
            guess = next((near for item in self.items if item.topic not in by_topic and (near := nearest(item.topic, by_topic))), None)
            hint = f"Did you mean {guess}? " if guess else ""
            fix = f"{hint}The group reads {shown}." if existing else "The group reads no partitions."
            verb = "is" if len(absent) == 1 else "are"
            raise BadInput(what=what, found=f"{_listed(absent)} {verb} not among the group's partitions", fix=fix)
        return [partition for partition in existing if self.covers(partition)]

    def __str__(self) -> str:
        return " ".join(map(str, self.items)) or ALL


def spans(numbers: Iterable[int]) -> str:
    """Formats numbers as ranges: ``0-5,9``."""
    ordered = sorted(set(numbers))
    starts = [number for number, before in zip(ordered, [None, *ordered], strict=False) if before is None or number != before + 1]
    ends = [number for number, after in pairwise([*ordered, None]) if number is not None and after != number + 1]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True))


def ranges(text: str) -> Ranges:
    """Parses the partitions of ``0,1,5-9``, sorted. Raises `BadInput`."""
    if not _RANGES.fullmatch(text):
        raise BadInput(what="partitions", found=f"{quoted(text)} is not a list of partitions", fix="Write 0-2, or 0,4,7-9.")
    pairs = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))]
    if backward := next(((first, last) for first, last in pairs if last < first), None):
        first, last = backward
        raise BadInput(what="partitions", found=f"{first}-{last} is backward", fix=f"Write {last}-{first} for {first}-{last}.")
    return tuple(sorted(set(pairs)))


def missing(item: Item, by_topic: Mapping[str, Sequence[int]]) -> list[str]:
    """The topic or partitions of the item that do not exist, as text."""
    if item.topic not in by_topic:
        return [str(item)]
    existing = set(by_topic[item.topic])
    absent = []
    for first, last in item.partitions:
        if last - first >= 2 * len(existing) + _SHOWN:  # mostly nonexistent: do not loop over a billion numbers
            absent.append(f"{item.topic}:{first}-{last}")
        elif numbers := [number for number in range(first, last + 1) if number not in existing]:
            absent.append(f"{item.topic}:{spans(numbers)}")
    return absent


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more
